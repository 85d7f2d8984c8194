"""Rules by name for logical tensors, followed by all their components."""

from __future__ import annotations

from typing import Any

from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from .cut import component_layouts
from .forms import Components

__all__ = ["followed"]


def followed(found: Components, layouts: Any, uneven: UnevenRule = "even") -> dict[str, TensorLayout]:
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
    answer: dict[str, TensorLayout] = {}
    for name, logical in found.tensors.items():
        own, shared = uneven, False
        if hasattr(layouts, "layout_of"):  # A layout map is a mapping too.
            layout = layouts.layout_of(name, len(logical.shape))
            own, shared = layouts.uneven_of(name) or uneven, layouts.shared_of(name)
        elif any(component.name in layouts for component in logical.components if component.name != name):
            continue
        else:
            layout = layouts.get(name)
        if layout is None:
            continue
        if layout.unreduced:
            raise LayoutError(f"{shown(name)}: values of quantized weights are no sums over {shown(layout.unreduced)}")
        answer.update(component_layouts(logical, layout, own, shared=shared))
    return answer
