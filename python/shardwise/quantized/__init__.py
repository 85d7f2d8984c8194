"""Quantized weights: logical tensors, and the components in which they are stored."""

from .component import Along, Component, LogicalTensor
from .cut import component_layouts
from .follow import followers
from .forms import Components, find_components

__all__ = ["Along", "Component", "Components", "LogicalTensor", "component_layouts", "find_components", "followers"]
