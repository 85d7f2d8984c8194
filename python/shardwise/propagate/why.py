"""Reasons for moves, in a sentence each: the dim whose cut changes, and the dim of another tensor that decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..computation.factor_rule import FactorRule
from .flow import Specs

__all__ = ["Reasons"]


class Reasons:
    """Reasons for the moves of one op, from its rule and the axes that cut each factor while it computes.

    `place` names a dim of a tensor, such as `"d of w"` or `"dim 0 of operands[1]"`.
    """

    def __init__(self, rule: FactorRule, cuts: Sequence[Sequence[str]], place: Callable[[int, int], str]) -> None:
        core = rule._core
        self._tensors, self._operands, self._cuts, self._place = core.tensors, core.operands, cuts, place
        self._kinds = [kind for _, kind, _ in core.factors]

    def moved(self, at: int, before: Specs, after: Specs) -> str:
        """Return the reason why a tensor changes its layout: an operand before the op, a result after it."""
        outer, inner = (before, after) if at < self._operands else (after, before)
        dim = next((dim for dim, pair in enumerate(zip(outer, inner, strict=True)) if pair[0] != pair[1]), None)
        if dim is None:
            return "Its axes are in another order."
        factors, own = self._tensors[at][dim], self._place(at, dim)
        factor = next((factor for factor in factors if self._cuts[factor]), factors[0])
        cut, kind = self._cuts[factor], self._kinds[factor]
        lost = [axis for axis in outer[dim] if axis not in cut]
        if lost and kind in ("whole", "shift"):
            return f"The op needs {own} whole."
        others = [other for other, axes in enumerate(self._cuts) if other != factor and {*lost} & {*axes}]
        elsewhere = next(self._homes(others[0] if others else factor, at), "no other tensor")
        if others:
            return f"{'+'.join(lost)} cuts {own} and {elsewhere}, and can cut one of them only."
        if lost and kind == "sum":
            return f"The op sums over {own}, which is put together over {'+'.join(lost)}, so no results are added."
        how = f"cut over {'+'.join(cut)}" if cut else "whole"
        return f"The op computes with {own} {how}, as {elsewhere} is."

    def summed(self) -> str:
        """Return the reason why the result is addends."""
        summed = [(factor, axes) for factor, axes in enumerate(self._cuts) if axes and self._kinds[factor] == "sum"]
        sums = [f"{next(self._homes(factor, -1))} is summed, and cut over {'+'.join(axes)}" for factor, axes in summed]
        return f"Each device has an addend: {', and '.join(sums)}."

    def _homes(self, factor: int, but: int) -> Iterator[str]:
        """Yield the names of the dims of other tensors that have a factor."""
        for tensor, dims in enumerate(self._tensors):
            if tensor != but:
                yield from (self._place(tensor, dim) for dim, factors in enumerate(dims) if factor in factors)
