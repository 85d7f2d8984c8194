"""Rules by name for logical tensors, followed by all their components, and by states of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..layout import Spec, TensorLayout, UnevenRule
from ..packed import PackedDim
from ..partition import Partition
from ..placing import Placing, placing_of
from ..rules.rewrites import Rewrites
from ..rules.states import training_names
from ..rules.within import layout_before, rank_after
from ..shared_tiling import SharedTiling
from .adapters import SHARDED, adapters_in
from .component import Along, LogicalTensor
from .cut import component_layouts
from .expert_adapters import BY_EXPERT, by_expert
from .forms import Components
from .states import states_in
from .unstated import check_known

__all__ = ["followed", "followers", "with_states"]


def with_states(
    found: Components, tensors: Mapping[str, tuple[tuple[int, ...], str]], rewrites: Rewrites | None = None
) -> Components:
    """Return the logical tensors with the states of an optimizer that belong to weights, and with adapters of weights.

    See `states_in` and `adapters_in`.

    Args:
        found: The quantized weights.
        tensors: All tensors, as shapes and the names of dtypes.
        rewrites: The rewrites by which the tensors are named, which leave adapters as they are.
    """
    logical = {name: (weight.shape, weight.form) for name, weight in found.tensors.items()}
    states = states_in({**tensors, **logical}, training_names({**tensors, **logical}))
    return found._replace(
        states=(*(state.logical() for state in states), *adapters_in(tensors, rewrites, found.config))
    )


def followed(
    found: Components, layouts: Any, uneven: UnevenRule = "even"
) -> dict[str, TensorLayout | Partition | SharedTiling]:
    """Return the layouts of the components of all tensors for which there is one.

    `layouts` is a layout map, a deployment or a mapping by name. A rule names the weight, as
    `model.layers.0.mlp.down_proj.weight`, whatever its components are called. Tensors that no rule names are left out,
    and so are those of a mapping in which components have layouts of their own, and states for which there is a rule
    that is not their weight's.

    Raises:
        LayoutError: as `component_layouts`.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> from shardwise.quantized import find_components
    >>> stored = {"down.weight": ("F8_E4M3", (256, 512)), "down.weight_scale_inv": ("F32", (2, 4))}
    >>> rules = LayoutMap(DeviceMesh((4,), ("tp",)))
    >>> rules["down"] = (None, "tp")
    >>> for name, layout in followed(find_components(stored, {}), rules).items():
    ...     print(name, layout.axes)
    down.weight (None, 'tp')
    down.weight_scale_inv (None, 'tp')
    """
    answer: dict[str, TensorLayout | Partition | SharedTiling] = {}
    for one in _with_rules(found, layouts, uneven):
        answer.update(_cut(one))
    return answer


def followers(
    found: Components, layouts: Any, uneven: UnevenRule = "even"
) -> dict[str, tuple[str, TensorLayout | Partition | SharedTiling | str]]:
    """Return for each component the weight whose rule it follows, and its layout, or why it has none.

    Where neighbours share blocks, it may be a tiling; see `component_layouts`.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> from shardwise.quantized import find_components
    >>> stored = {"down.weight": ("F8_E4M3", (256, 512)), "down.weight_scale_inv": ("F32", (2, 4))}
    >>> rules = LayoutMap(DeviceMesh((8,), ("tp",)))
    >>> rules["down"] = (None, "tp")
    >>> weight, why = followers(find_components(stored, {}), rules)["down.weight_scale_inv"]
    >>> print(weight, "|", why[:73])
    down.weight | dim 1 has 512 elements, and is cut at 64, within a block of 128 of weight
    """
    answer: dict[str, tuple[str, TensorLayout | Partition | SharedTiling | str]] = {}
    for one in _with_rules(found, layouts, uneven):
        name = one.weight.name
        try:
            made: dict[str, Any] = dict(_cut(one))
        except ShardwiseError as error:
            why = str(error).removeprefix(f"{shown(name)}: ")
            # A state that is as its weight does not fit where that does not.
            is_alike = one.is_state and _is_alike(one.weight)
            made = dict.fromkeys([each.name for each in one.weight.components], one.layout if is_alike else why)
        answer.update({each: (name, layout) for each, layout in made.items()})
    return answer


class _Ruled(NamedTuple):
    """A weight with its layout, the rule for dims that do not divide, and whether to share blocks."""

    weight: LogicalTensor
    layout: TensorLayout
    uneven: UnevenRule
    shared: bool
    is_state: bool


def _with_rules(found: Components, layouts: Any, uneven: UnevenRule) -> Iterator[_Ruled]:
    """Yield the weights for which there is a layout, and states with that of their weight."""
    check_known(found, layouts)
    placing = placing_of(layouts)
    named = placing.names or ()
    states = [(state, True) for state in _without_own(found, placing)]
    for logical, is_state in (*((weight, False) for weight in found.tensors.values()), *states):
        name = logical.name
        if any(component.name in named for component in logical.components if component.name != name):
            continue
        layout, own, shared = placing.placed(name, rank_after(len(logical.shape), logical.within)).by_layout()
        if layout is None:
            continue
        if not isinstance(layout, TensorLayout):
            kind = type(layout).__name__
            raise TypeError(
                f"the layout of {shown(name)}, which its components follow, is a {kind}, not a TensorLayout"
            )
        yield _Ruled(logical, layout, own or uneven, shared, is_state)


def _without_own(found: Components, placing: Placing) -> Iterator[LogicalTensor]:
    """Yield the states for which there is no other rule than their weight's."""
    if placing.names is not None:
        yield from found.states
        return
    for state in found.states:
        (component,) = state.components
        rules = placing.matching_rules(component.name)
        if not rules or set(rules) <= set(placing.matching_rules(state.name)):
            yield state


def _cut(one: _Ruled) -> dict[str, TensorLayout | Partition | SharedTiling]:
    logical, layout = one.weight, one.layout
    component = logical.components[0]
    if logical.within:
        try:
            layout = layout_before(layout, logical.within)
        except LayoutError as error:
            raise LayoutError(f"tensor {shown(component.name)}: {error}; a rule for its own name places it") from None
    if logical.uncut and not any(logical.shape) and any(layout.axes):  # Not even its shape is known.
        raise LayoutError(f"tensor {shown(component.name)}: {logical.uncut[0][1]}")
    if layout.unreduced:
        said, what = shown(layout.unreduced), "states" if one.is_state else "quantized weights"
        raise LayoutError(f"{shown(logical.name)}: values of {what} cannot be partial sums over {said}")
    if one.is_state and _is_alike(logical):
        if layout.device_mesh is None or layout.rank != len(logical.shape):
            component_layouts(logical, layout, one.uneven)  # Says why not.
        try:
            return {component.name: _partition(layout, logical.shape, one.uneven)}
        except LayoutError as error:
            raise LayoutError(f"tensor {shown(component.name)}: {error}") from None
    if logical.form == SHARDED and not logical.uncut:
        layout = _sharded(logical, layout)
        return {component.name: _partition(layout, component.shape, one.uneven)}
    if logical.form == BY_EXPERT and layout.rank == 3 and layout.axes[0]:
        try:
            return {component.name: _partition(by_expert(logical, layout), component.shape, one.uneven)}
        except LayoutError as error:
            raise LayoutError(f"tensor {shown(component.name)}: {error}") from None
    return dict(component_layouts(logical, layout, one.uneven, shared=one.shared))


def _sharded(logical: LogicalTensor, layout: TensorLayout) -> TensorLayout:
    """Return the layout of a factor: its rank dim, which the weight lacks, is cut by the axes of the other dim."""
    if layout.rank != 2:
        raise LayoutError(f"{shown(logical.name)} has 2 dims, but its layout has {layout.rank}")
    rows, columns = layout.axes
    by_rows, by_columns = (_axes_of(spec) for spec in (rows, columns))
    is_down = logical.components[0].along[0].of is None
    axes = (
        ((by_rows or None, columns) if by_rows else (None, columns)) if is_down else (rows or by_columns or None, None)
    )
    return TensorLayout(axes, layout.device_mesh)


def _axes_of(spec: Spec) -> tuple[str, ...]:
    """Return the whole axes by which a dim is cut."""
    names = spec.axis_names if isinstance(spec, PackedDim) else (spec,) if isinstance(spec, str) else spec or ()
    return tuple(dict.fromkeys(name.partition(":")[0] for name in names))


def _is_alike(logical: LogicalTensor) -> bool:
    """Return whether each element of the only component is for one of the weight, at its place."""
    component = logical.components[0]
    own = tuple(map(Along, range(len(component.shape))))
    return component.shape == logical.shape and component.along == own and not logical.uncut


@lru_cache(maxsize=4096)
def _partition(layout: TensorLayout, shape: tuple[int, ...], uneven: UnevenRule) -> Partition:
    # One for all tensors that are cut alike: plans know them by it.
    return layout.partition(shape, uneven)
