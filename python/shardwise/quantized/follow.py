"""Rules by name for logical tensors, followed by all their components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..placing import placing_of
from ..shared_tiling import SharedTiling
from .component import LogicalTensor
from .cut import component_layouts
from .forms import Components, check_known

__all__ = ["followed", "followers"]


def followed(found: Components, layouts: Any, uneven: UnevenRule = "even") -> dict[str, TensorLayout | SharedTiling]:
    """Give the layouts of the components of all tensors for which there is one.

    `layouts` is a layout map, a deployment or a mapping by name. A rule names the weight, as
    `model.layers.0.mlp.down_proj.weight`, whatever its components are called. Tensors that no rule names are left out,
    and so are those of a mapping in which components have layouts of their own.

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
    answer: dict[str, TensorLayout | SharedTiling] = {}
    for logical, layout, own, shared in _with_rules(found, layouts, uneven):
        answer.update(_cut(logical, layout, own, shared=shared))
    return answer


def followers(
    found: Components, layouts: Any, uneven: UnevenRule = "even"
) -> dict[str, tuple[str, TensorLayout | SharedTiling | str]]:
    """Give for each component the weight whose rule it follows, and its layout, or why it has none.

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
    answer: dict[str, tuple[str, TensorLayout | SharedTiling | str]] = {}
    for logical, layout, own, shared in _with_rules(found, layouts, uneven):
        try:
            made: dict[str, Any] = dict(_cut(logical, layout, own, shared=shared))
        except ShardwiseError as error:
            made = dict.fromkeys(
                [one.name for one in logical.components], str(error).removeprefix(f"{shown(logical.name)}: ")
            )
        answer.update({name: (logical.name, one) for name, one in made.items()})
    return answer


def _with_rules(
    found: Components, layouts: Any, uneven: UnevenRule
) -> Iterator[tuple[LogicalTensor, TensorLayout, UnevenRule, bool]]:
    """The weights for which there is a layout, with it, the rule for dims that do not divide, and whether to share."""
    check_known(found, layouts)
    placing = placing_of(layouts)
    named = placing.names or ()
    for name, logical in found.tensors.items():
        if any(component.name in named for component in logical.components if component.name != name):
            continue
        layout, own, shared = placing.placed(name, len(logical.shape))
        if layout is None:
            continue
        if not isinstance(layout, TensorLayout):
            kind = type(layout).__name__
            raise TypeError(
                f"the layout of {shown(name)}, which its components follow, is a {kind}, not a TensorLayout"
            )
        yield logical, layout, own or uneven, shared


def _cut(
    logical: LogicalTensor, layout: TensorLayout, uneven: UnevenRule, *, shared: bool
) -> dict[str, TensorLayout | SharedTiling]:
    if layout.unreduced:
        said = shown(layout.unreduced)
        raise LayoutError(f"{shown(logical.name)}: values of quantized weights cannot be partial sums over {said}")
    return component_layouts(logical, layout, uneven, shared=shared)
