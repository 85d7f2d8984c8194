"""Factor rules: the dims of an op's tensors as products of factors, and the effect of cutting each.

The form is that of Shardy's `sdy.op_sharding_rule`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from .._arguments import instance, integer
from .._core import FactorRule as CoreRule
from .._core import factor_rule as core_rule
from .._text import shown
from ..errors import LayoutError

__all__ = ["FactorKind", "FactorRule", "check_unknown", "factor_rule", "whole_rule"]

#: The effect of a cut factor: each device has its part of the result (`pass`) or an addend of it (`sum`); the op cannot
#: compute with it (`whole`); each device has its part, and reads some elements of its neighbours (`shift`).
FactorKind = Literal["pass", "sum", "whole", "shift"]

#: Makes a rule without the arguments of its class; looked up once, because rules are made by the hundred thousand.
_blank = object.__new__

#: The names of the factors of each dim of a tensor, major first.
Dims = tuple[tuple[str, ...], ...]


class FactorRule:
    """A rule for an op on tensors that are cut: the factors of all dims, and the effect of cutting each.

    Args:
        text: the operands and results as lists of dims, and each dim as its factors, major first: letters, or letters
            with a number such as `z_1`. `"([i,k],[k,j])->([i,j])"` is a matrix product, `"([ij])->([i,j])"` a reshape.
        sum: factors that the op adds up; a device that has a part of one has an addend of the result.
        whole: factors that the op cannot compute with while they are cut.
        shift: factors for which a device reads some elements of its neighbours.
        blocked: factors whose cut does not spread to the other tensors.
        sizes: the sizes of factors that the shapes do not give, because a dim has several factors.
        reduction: the op that puts addends together: `"add"`, `"maximum"`, `"minimum"`, `"multiply"`, `"and"` or
            `"or"`.

    Raises:
        LayoutError: if the text is not a rule, a factor is not in it, or a factor is of two kinds.
        TypeError: if an argument is of another type.

    Rules are immutable, comparable, hashable and picklable; equal rules may name their factors differently.

    >>> rule = FactorRule("([i,k],[k,j])->([i,j])", sum="k")
    >>> rule.kinds["k"], rule.of([(4, 8), (8, 16)], [(4, 16)]).sizes["k"]
    ('sum', 8)
    """

    __slots__ = ("_core",)

    _core: CoreRule

    def __init__(
        self,
        text: str,
        *,
        sum: str | Iterable[str] = (),  # noqa: A002
        whole: str | Iterable[str] = (),
        shift: str | Iterable[str] = (),
        blocked: str | Iterable[str] = (),
        sizes: Mapping[str, int] = MappingProxyType({}),
        reduction: str = "add",
    ) -> None:
        named = {"sum": _names("sum", sum), "whole": _names("whole", whole), "shift": _names("shift", shift)}
        kinds = [(name, kind) for kind, names in named.items() for name in names]
        given = instance("sizes", sizes, Mapping).items()  # type: ignore[type-abstract]
        known = [(instance("sizes", name, str), integer(f"sizes[{name!r}]", size)) for name, size in given]
        text, reduction = instance("text", text, str), instance("reduction", reduction, str)
        self._core = CoreRule(text, kinds, _names("blocked", blocked), known, reduction, ())

    @classmethod
    def _of(cls, core: CoreRule) -> FactorRule:
        rule = _blank(cls)
        rule._core = core
        return rule

    @classmethod
    def _ordered(cls, text: str, summed: Sequence[str], order: tuple[str, ...]) -> FactorRule:
        """Return a rule whose factors have this order, in which policies prefer them."""
        return cls._of(CoreRule(text, [(name, "sum") for name in summed], (), [], "add", order))

    @property
    def text(self) -> str:
        """The rule in the form that the class takes, without kinds and sizes."""
        return self._core.text

    @property
    def operands(self) -> tuple[Dims, ...]:
        """The factors of each dim of each operand."""
        return self._dims[: self._core.operands]

    @property
    def results(self) -> tuple[Dims, ...]:
        """The factors of each dim of each result."""
        return self._dims[self._core.operands :]

    @property
    def _dims(self) -> tuple[Dims, ...]:
        names = self._core.names
        return tuple(tuple(tuple(names[number] for number in dim) for dim in tensor) for tensor in self._core.tensors)

    @property
    def sizes(self) -> dict[str, int]:
        """The elements of each factor whose size is known."""
        return {name: size for name, (size, _, _) in self._factors() if size >= 0}

    @property
    def kinds(self) -> dict[str, FactorKind]:
        """The kind of each factor."""
        return {name: kind for name, (_, kind, _) in self._factors()}

    @property
    def blocked(self) -> tuple[str, ...]:
        """The factors whose cut does not spread to the other tensors."""
        return tuple(name for name, (_, _, blocked) in self._factors() if blocked)

    @property
    def reduction(self) -> str:
        """The name of the op that puts addends together."""
        return self._core.reduction

    def _factors(self) -> Iterable[tuple[str, tuple[int, FactorKind, bool]]]:
        return zip(self._core.names, self._core.factors, strict=True)

    def of(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> FactorRule:
        """Return the rule with the sizes of its factors for operands and results of these shapes.

        Raises:
            LayoutError: if the shapes do not fit the rule, or a size stays unknown.

        >>> FactorRule("([ij])->([i,j])").of([(24,)], [(4, 6)]).sizes
        {'i': 4, 'j': 6}
        """
        return FactorRule._of(self._core.sized(operands, results))

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of the class, without defaults, as values that `json.dumps` takes.

        >>> FactorRule("([i,k],[k,j])->([i,j])", sum="k").to_json()
        {'text': '([i,k],[k,j])->([i,j])', 'sum': ['k']}
        """
        kinds = self.kinds
        found: dict[str, Any] = {"text": self.text}
        for kind in ("sum", "whole", "shift"):
            found[kind] = [name for name, known in kinds.items() if known == kind]
        found |= {"blocked": list(self.blocked), "sizes": self.sizes}
        found = {name: value for name, value in found.items() if value}
        return found if self.reduction == "add" else found | {"reduction": self.reduction}

    @property
    def _key(self) -> tuple[Any, ...]:
        tensors, factors = self._core.tensors, self._core.factors
        # Factors are numbered by first use, because equal rules may have theirs in another order.
        used = dict.fromkeys(number for tensor in tensors for dim in tensor for number in dim)
        numbers = {number: at for at, number in enumerate(used)}
        dims = tuple(tuple(tuple(numbers[number] for number in dim) for dim in tensor) for tensor in tensors)
        return (dims, self._core.operands, tuple(factors[number] for number in used), self.reduction)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, FactorRule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FactorRule, **self.to_json()), ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        said = self.to_json()
        text = said.pop("text")
        return f"FactorRule({text!r}{''.join(f', {name}={value!r}' for name, value in said.items())})"


def _names(argument: str, names: str | Iterable[str]) -> list[str]:
    if isinstance(names, str):
        return [names] if "_" in names else list(names)
    if not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be the names of factors, got {shown(names)}")
    return [instance(argument, name, str) for name in names]


def factor_rule(
    op: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], /, **attributes: Any
) -> FactorRule:
    """Return Shardy's rule of an op for operands and results of these shapes.

    Args:
        op: the name in StableHLO, such as `"dot_general"` or `"gather"`, or one of `"top_k"`, `"erf"`, `"eigh"`,
            `"lu"`, `"qr"`, `"svd"`, which StableHLO has as calls.
        operands: the shape of each operand, in elements.
        results: the shape of each result.
        attributes: the op's attributes in StableHLO: numbers, lists of numbers, words. `body` is the op within a
            reduction or a scatter, such as `"add"`; `"assign"` is that of a scatter that overwrites.

    Raises:
        LayoutError: if the op has no rule here, lacks an attribute, or has other shapes.
        TypeError: if an argument is of another type.

    >>> print(factor_rule("reshape", [(8, 24)], [(2, 4, 24)]))
    ([ij,k])->([i,j,k])
    >>> factor_rule("reduce", [(4, 6), ()], [(4,)], dimensions=[1], body="add").kinds
    {'i': 'pass', 'j': 'sum'}
    """
    rule = _blank(FactorRule)
    rule._core = core_rule(op, operands, results, attributes)
    return rule


def check_unknown(unknown: Literal["whole"] | None) -> Literal["whole"] | None:
    """Return what is done with ops that have no rule, checked."""
    if unknown not in (None, "whole"):
        raise LayoutError(f"unknown is {shown(unknown)}; it must be 'whole' or None")
    return unknown


def whole_rule(at: str, name: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> FactorRule:
    """Return the rule of an unknown op at a place, all of whose factors are whole, with a warning."""
    warnings.warn(f"{at}: no rule is known for {shown(name)}; its operands are put together", stacklevel=2)
    numbers = iter(range(sum(map(len, (*operands, *results)))))
    factors = [[f"z_{next(numbers)}" for _ in shape] for shape in (*operands, *results)]
    sides = [f"[{','.join(dims)}]" for dims in factors]
    text = f"({','.join(sides[: len(operands)])})->({','.join(sides[len(operands) :])})"
    return FactorRule(text, whole=[factor for dims in factors for factor in dims]).of(operands, results)
