"""Low-rank adapters of stacked experts: factors of all experts of a layer in one tensor, cut as the experts are.

PEFT calls them `experts.lora_A.weight` and `experts.base_layer.lora_A.weight`, and does not say which of them is of the
weight `gate_up_proj`, and which of `down_proj`: the sizes in the model's configuration say it. A is of (experts · rank,
in), expert by expert, B of (out, rank · experts), with the expert fastest: `peft.tuners.lora.layer.ParamWrapper`. Older
versions of PEFT took every weight for (experts, in, out), so that A of one of (experts, out, in) has the columns `out`:
such a pair is refused, and so is one with in = out, unless the other pairs of the file show that it is not such a one.
With three dims they are (experts, rank, in) and (experts, out, rank), as vLLM has them in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .._text import counted, shown
from ..errors import LayoutError
from ..layout import Spec, TensorLayout
from ..packed import PackedDim, part
from ..rules.names import expert_names, stated, types_with
from ..rules.rewrites import Rewrites
from ..rules.within import Within, steps_of
from ..rules.wrapped import language_config, model_types
from .component import Along, Component, LogicalTensor

__all__ = ["BY_EXPERT", "StoredFactors", "by_expert", "expert_adapters", "is_of_experts"]

#: The form of factors in which the dim of the experts is joined with the rank.
BY_EXPERT = "adapter of stacked experts"
_NAMED = ("gate_up_proj", "down_proj")
_NO: tuple[str, str, tuple[int, ...]] = ("", "", ())
_WAY_ON = "a rule for its own name places it"
#: The name, dtype and shape of each factor of a weight.
StoredFactors = Mapping[str, tuple[str, str, tuple[int, ...]]]


class _ExpertSizes(NamedTuple):
    """The sizes of a layer's experts, as a configuration states them."""

    experts: int
    hidden: int
    inner: int


def is_of_experts(weight: str, factors: Iterable[str]) -> bool:
    """Return whether factors are of a weight of all experts: of a module called so, or of a weight right in it.

    >>> [is_of_experts(f"mlp.experts.{last}weight", "AB") for last in ("", "gate_up_proj.", "0.", "0.up_proj.")]
    [True, True, False, False]
    """
    *_, outer, last = ["", *weight.removesuffix(".weight").split(".")]
    return "experts" in (outer, last) and not last.isdecimal() and not {"A", "B"}.isdisjoint(factors)


def expert_adapters(
    adapted: Iterable[tuple[str, StoredFactors]], config: Mapping[str, Any], rewrites: Rewrites | None
) -> Iterator[LogicalTensor]:
    """Yield the factors of adapters of stacked experts, each as a component of the weight of all experts.

    Args:
        adapted: The name that each weight has without the adapter's, such as `h.0.mlp.experts.weight`, and its factors.
        config: What the model's configuration says.
        rewrites: The rewrites between the names of the adapted weights and those that rules are for.
    """
    adapted = list(adapted)
    is_square_known = _tells_in_from_out([factors for _, factors in adapted], config)
    for weight, factors in adapted:
        yield from _logical(weight, factors, config, rewrites, is_square_known=is_square_known)


def _logical(
    weight: str, factors: StoredFactors, config: Mapping[str, Any], rewrites: Rewrites | None, *, is_square_known: bool
) -> Iterator[LogicalTensor]:
    module = weight.removesuffix(".weight")
    base, _, last = module.rpartition(".")
    try:
        if set(factors) != {"A", "B"}:
            raise LayoutError(f"its adapter has {', '.join(sorted(factors))}: for experts only A and B are known")
        down, up = factors["A"][2], factors["B"][2]
        experts, rows, columns, is_joined = _dims(down, up, config)
        if last == "experts":
            base, last = module, _named(rows, columns, config)
        elif is_joined and last in _NAMED and _named(rows, columns, config) != last:
            raise LayoutError(f"it is of {rows} x {columns}, but {last} of an expert has other dims")
        name, steps = _target(base, last, rewrites)
        in_out = not types_with("experts_in_out").isdisjoint(model_types(config))
        shape = (experts, columns, rows) if in_out else (experts, rows, columns)
        reasons: tuple[tuple[int, str], ...] = ()
        if is_joined and rows == columns and not is_square_known:  # Its experts can be cut all the same.
            why = f"it is of {rows} x {columns}, so nothing says whether PEFT has exchanged in and out; {_WAY_ON}"
            reasons = (1, why), (2, why)
    except LayoutError as error:
        name, steps, shape, is_joined, in_out = weight, (), (0, 0, 0), False, False
        reasons = tuple((dim, f"{error}; {_WAY_ON}") for dim in range(3))
    out, inner = (2, 1) if in_out else (1, 2)
    for factor, (own, dtype, size) in factors.items():
        along = (Along(None),) * len(size)
        if is_joined:
            rank = down[0] // shape[0]
            along = (Along(0, words=rank), Along(inner)) if factor == "A" else (Along(out), Along(None))
        elif not reasons:
            along = (Along(0), Along(None), Along(inner)) if factor == "A" else (Along(0), Along(out), Along(None))
        form = BY_EXPERT if is_joined else "adapter"
        yield LogicalTensor(name, shape, form, (Component(own, dtype, size, along),), reasons, within=steps)


def by_expert(logical: LogicalTensor, layout: TensorLayout) -> TensorLayout:
    """Return the layout of a factor in which experts and rank are one dim, by the layout of the weight of all experts.

    Raises:
        LayoutError: if the experts are cut in a way that such a dim cannot follow.
    """
    component, experts = logical.components[0], logical.shape[0]
    for dim, why in logical.uncut:
        if layout.axes[dim]:
            raise LayoutError(why)
    is_down = component.along[0].of == 0
    spec = layout.axes[0]
    uneven = None
    if isinstance(spec, PackedDim):
        one, *more = spec.parts
        axes, uneven = one.axes, one.uneven
        if more or one != part(one.factors[-1:], 0, axes, uneven):
            raise LayoutError(
                f"its experts are cut as {spec}, and the dim that holds experts and ranks cannot follow that"
            )
    else:
        axes = (spec,) if isinstance(spec, str) else tuple(spec or ())
    rank = component.shape[0 if is_down else 1] // experts
    factors, cut = ((experts, rank), 0) if is_down else ((rank, experts), 1)
    joined: Spec = PackedDim((part(factors, cut, axes, uneven),)) if axes else None
    other = component.along[1 if is_down else 0].of
    assert other is not None
    kept = layout.axes[other]
    return TensorLayout((joined, kept) if is_down else (kept, joined), layout.device_mesh)


def _dims(down: tuple[int, ...], up: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int, int, bool]:
    """Return the number of experts, the shape of an expert's weight, and whether experts and rank are one dim."""
    if len(down) == len(up) == 3:
        if down[0] != up[0] or down[1] != up[2]:
            raise LayoutError(f"its factors {down} and {up} have different ranks or numbers of experts")
        said = stated(language_config(config), "experts")
        if said is not None and said[1] != down[0]:
            raise LayoutError(f"its factors are of {counted(down[0], 'expert')}, and the model has {said[1]}")
        return down[0], up[1], down[2], False
    if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
        raise LayoutError(f"its factors {down} and {up} have different ranks")
    experts = _sizes(config).experts
    if down[0] % experts:
        raise LayoutError(f"the ranks of all its experts add up to {down[0]}, which {experts} experts do not divide")
    return experts, up[0], down[1], True


def _sizes(config: Mapping[str, Any]) -> _ExpertSizes:
    said = language_config(config)
    found = [stated(said, "experts"), stated(said, "hidden"), stated(said, "expert_inner") or stated(said, "inner")]
    numbers = [one[1] for one in found if one is not None and type(one[1]) is int and one[1] > 0]
    if len(numbers) != len(found):
        raise LayoutError(
            "it is for all experts: A has the ranks of one expert after those of the other, B has the experts "
            "interleaved. Their number and sizes are not known; the model's config.json states them (--config)"
        )
    return _ExpertSizes(*numbers)


def _tells_in_from_out(adapted: Iterable[StoredFactors], config: Mapping[str, Any]) -> bool:
    """Return whether pairs of equal sizes are not to be taken for their opposite: by the other pairs of the file."""
    if not types_with("experts_say_in_out").isdisjoint(model_types(config)):
        return True
    pairs = {(one["B"][2][0], one["A"][2][1]) for one in adapted if all(len(one.get(x, _NO)[2]) == 2 for x in "AB")}
    try:
        return bool([_named(rows, columns, config) for rows, columns in pairs if rows != columns])
    except LayoutError:
        return False


def _named(rows: int, columns: int, config: Mapping[str, Any]) -> str:
    """Return the weight of an expert that has these rows and columns."""
    _, hidden, inner = _sizes(config)
    if (rows, columns) == (2 * inner, hidden):
        return "gate_up_proj"
    if (rows, columns) == (hidden, inner):
        return "down_proj"
    raise LayoutError(
        f"it is of {rows} x {columns}, and experts of {hidden} and {inner} have {2 * inner} x {hidden} and "
        f"{hidden} x {inner}"
    )


def _target(base: str, last: str, rewrites: Rewrites | None) -> tuple[str, tuple[Within, ...]]:
    """Return the name that rules have for the weight of all experts, and the rewrites from its own name to that.

    Raises:
        LayoutError: if the rules have another order of what the weight is made of.
    """
    own = f"{base}.{last}"
    for name in (own, f"{own}.weight"):
        if steps := steps_of(name, rewrites):
            return steps[-1].name, steps
    outer = base.removesuffix("experts").removesuffix(".").rpartition(".")[0]
    for one in expert_names():
        gate, up, down = one.projections
        names = [
            f"{outer}.{one.block}.experts.0.{x}.weight" for x in ((gate, up) if last == "gate_up_proj" else (down,))
        ]
        if any(found := [steps_of(name.removeprefix("."), rewrites) for name in names]):
            break
    if not any(found):
        return own, ()
    targets = {steps[-1].name for steps in found if steps}
    if not all(len(steps) == 1 for steps in found) or len(targets) != 1:
        raise LayoutError(f"the rules join {own} differently")
    target = found[0][0].rewrite.target
    order = tuple(target.packed.names) if target.packed is not None else ()
    wanted = tuple(steps[0].part for steps in found) if len(found) == 2 else ()
    is_plain = target.dims is None and not target.transpose and target.zigzag is None and target.pad_to is None
    if len(target.stack) != 1 or order != wanted or not is_plain or found[0][0].rewrite.refused is not None:
        raise LayoutError(f"the rules have {own} in another order, in {shown(next(iter(targets)))}")
    return next(iter(targets)), ()
