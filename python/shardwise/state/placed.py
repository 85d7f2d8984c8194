"""The layouts of a training state's tensors, and the axes of data parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from .._arguments import checked_axes
from .._fork import importing
from .._text import all_digits_alike, shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..partition import Partition
from ..placing import Placed, Placing
from ..quantized import Components
from ..shared_tiling import SharedTiling
from .described import ModelTensor
from .recipe import SHARDINGS

__all__ = ["PlacedTensors"]


class PlacedTensors:
    """The layouts of tensors by name, including components of quantized weights and adapters.

    Args:
        placing: the layouts by name.
        components: the quantized weights, whose components are cut as the weights are.
        uneven: how dims that do not divide are cut, unless a rule says so.

    Attributes:
        world: The mesh of all devices.
        uneven: How dims that do not divide are cut, unless a rule says so.
        followers: The components of quantized weights, each with its weight and its layout.
    """

    def __init__(self, placing: Placing, components: Components, uneven: UnevenRule) -> None:
        if placing.world is None:
            raise LayoutError("layouts has no mesh of all devices; give a layout map with a mesh, or a deployment")
        self.world: DeviceMesh = placing.world
        self.followers: dict[str, tuple[str, TensorLayout | Partition | SharedTiling | str]] = {}
        if components.tensors or components.states or components.refused:
            with importing:
                from ..quantized.follow import followers

            self.followers = followers(components, placing, uneven)
        self._placing, self.uneven = placing, uneven

    @property
    def meshes(self) -> list[DeviceMesh]:
        """All meshes by name; if the layouts have no named ones, the mesh of all devices."""
        return list(self._placing.meshes.values()) or [self.world]

    def parallel_axes(
        self, sharding: str, over: Sequence[str] | None, tensors: Iterable[ModelTensor]
    ) -> tuple[str, ...]:
        """Return the axes of data parallelism: as given, as the deployment states, or those that no rule uses."""
        if sharding == "none":
            if over is not None:
                raise LayoutError(
                    "over is for a sharding of the state, but sharding is 'none', so only the rules cut: leave over "
                    f"out, or give another sharding: {', '.join(SHARDINGS)}"
                )
            return ()
        known = dict.fromkeys(axis for mesh in self.meshes for axis in mesh.axis_names)
        if over is not None:
            given = checked_axes("over", over)
            if unknown := [axis for axis in given if axis not in known]:
                raise LayoutError(f"over names the axis {shown(unknown[0])}; the meshes have {', '.join(known)}")
            return given
        replicated: tuple[str, ...] = getattr(self._placing, "replicated", ())
        default = getattr(self._placing, "default", None)
        by_default = () if default is None else tuple(default.layout.named_axes())
        if by_default or replicated:
            return by_default or replicated
        # The axes of stages and experts, along which a deployment's rules say where a tensor is.
        rules: Mapping[str, Any] = getattr(self._placing, "rules", dict)()
        used = {axis for rule in rules.values() for axis, _ in getattr(rule, "at", ())}
        seen: set[Any] = set()
        for tensor in tensors:
            key = re.sub(r"[0-9]+", "#", tensor.name), len(tensor.look.shape)
            if key in seen:
                continue
            seen.add(key)
            layout = self.layout_of(tensor)[0]
            if isinstance(layout, TensorLayout):
                used |= {axis.partition(":(")[0] for axis in layout.named_axes()}
        return tuple(axis for axis in known if axis not in used)

    def alike(self, tensors: Sequence[ModelTensor]) -> list[tuple[list[int], Placed]]:
        """Return the numbers of tensors with one place and one shape and dtype, and that place, by the first of them.

        A model may have a hundred thousand tensors, of which nearly all differ from others in digits of their names.
        """
        groups: dict[tuple[object, int], list[int]] = {}
        names, looks = [tensor[0] for tensor in tensors], [tensor[1] for tensor in tensors]
        keys: Sequence[object] = names
        with suppress(TypeError):  # A name that is no text is refused where it is looked up.
            keys = all_digits_alike(names)
        for number, key in enumerate(zip(keys, map(id, looks), strict=True)):
            try:
                groups[key].append(number)
            except KeyError:
                groups[key] = [number]
        found: list[tuple[list[int], Placed]] = []
        for numbers in groups.values():
            rank = len(looks[numbers[0]].shape)
            for placed, positions in self._placing.placed_alike([names[number] for number in numbers], rank):
                found.append(([numbers[position] for position in positions], placed))
        return sorted(found, key=itemgetter(0))

    def layout_of(self, tensor: ModelTensor) -> tuple[TensorLayout | SharedTiling | None, UnevenRule]:
        """Return the layout or the tiling of a tensor, and the rule for dims that do not divide."""
        if tensor.name in self.followers:
            leader, made = self.followers[tensor.name]
            if isinstance(made, str):
                raise LayoutError(
                    f"tensor {shown(tensor.name)}, which follows {shown(leader)}, cannot be placed: {made}"
                )
            return (made.layout, made.uneven) if isinstance(made, Partition) else (made, self.uneven)
        name, dims = tensor.follows or (tensor.name, None)
        layout, own, _ = self._placing.placed(name, len(tensor.look.shape) if dims is None else 2).by_layout()
        if layout is not None and not isinstance(layout, (TensorLayout, SharedTiling)):
            raise TypeError(f"layouts[{shown(name)}] must be a TensorLayout, got {shown(layout)}")
        if dims is not None and isinstance(layout, TensorLayout):
            axes = [None if dim is None else layout.axes[dim] for dim in dims]
            layout = TensorLayout(axes, layout.device_mesh)
        return layout, own or self.uneven
