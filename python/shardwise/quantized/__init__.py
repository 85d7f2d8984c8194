"""Quantized weights: logical tensors, and the components in which they are stored.

| module | answers |
|---|---|
| `forms`, `outline` | which quantized weights there are in a model; those among tensors, with states and adapters |
| `unstated` | what may be cut where the configuration states nothing |
| `component` | logical tensors, and components as blocks of them |
| `stated`, `method`, `modules` | a configuration's statements; its method by name; the modules that it is for |
| `scaled`, `integers`, `flat` | the components of FP8 and FP4, of packed integers, of flat blocks |
| `parts` | the tensors in a fused weight |
| `cut` | the layouts of components, from that of their weight |
| `states`, `adapters`, `expert_adapters` | what the dims of an optimizer's states and of adapters mean |
| `follow` | components, states and adapters under rules for weights |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .component import Along, Component, LogicalTensor
    from .cut import component_layouts
    from .follow import followers
    from .forms import Components, find_components

__all__ = ["Along", "Component", "Components", "LogicalTensor", "component_layouts", "find_components", "followers"]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "component": ("Along", "Component", "LogicalTensor"),
        "cut": ("component_layouts",),
        "follow": ("followers",),
        "forms": ("Components", "find_components"),
    },
)
