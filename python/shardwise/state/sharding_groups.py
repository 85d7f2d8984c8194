"""The devices that hold a tensor, in rows of devices that share its state, with each device's part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError
from ..mesh import DeviceMesh

__all__ = ["DeviceShapes", "ShardingGroups", "TensorKind", "merged"]


class DeviceShapes(NamedTuple):
    """The shapes that a tensor has on devices: one on each, or one for all."""

    shapes: tuple[tuple[int, ...], ...]
    #: The largest of the shapes, for which XLA allocates memory on every device.
    room: tuple[int, ...] | None


class TensorKind(NamedTuple):
    """The shapes of tensors on the devices of groups, and the facts on which optimizer and sharding depend."""

    cut: DeviceShapes
    looks: tuple[Any, ...]

    def shape(self, at: int) -> tuple[int, ...]:
        """Return the shape of the part at a place in the mesh."""
        shapes = self.cut.shapes
        return shapes[at] if len(shapes) > 1 else shapes[0]


class ShardingGroups:
    """The devices that hold some tensors, in rows of devices that share their state."""

    def __init__(self, number: int, mesh: DeviceMesh, devices: npt.NDArray[np.int64], over: Sequence[str]) -> None:
        self.number = number
        self.mesh = mesh
        self.axes = tuple(name for name in mesh.axis_names if name in over)
        at = [axis for axis, name in enumerate(mesh.axis_names) if name in self.axes]
        others = [axis for axis in range(mesh.ndim) if axis not in at]
        order = np.arange(mesh.size).reshape(mesh.shape).transpose([*others, *at])
        ways = math.prod(mesh.shape[axis] for axis in at)
        self.places: npt.NDArray[np.int64] = order.reshape(-1, ways)
        self.rows: npt.NDArray[np.int64] = devices[self.places]
        #: The numbers of its tensors, and the kind of each.
        self.numbers: list[int] = []
        self.kinds: list[TensorKind] = []
        #: The cuts of these by which devices have different shapes.
        self.unlike: dict[int, DeviceShapes] = {}
        self._variants: list[int] | None = None

    def add(self, numbers: Sequence[int], kind: TensorKind) -> None:
        """Add tensors of one kind, by their numbers."""
        self.numbers += numbers
        self.kinds += [kind] * len(numbers)

    def sort(self) -> None:
        """Put the tensors in the order of their numbers."""
        order = np.argsort(self.numbers).tolist()
        self.numbers, self.kinds = [self.numbers[at] for at in order], [self.kinds[at] for at in order]

    def divide(self, size: int | None) -> None:
        """Divide each row into groups of `size`."""
        if size is None:
            return
        if self.rows.shape[1] % size:
            raise LayoutError(f"group is {size}, which does not divide the {self.rows.shape[1]} data-parallel ranks")
        self.places, self.rows = self.places.reshape(-1, size), self.rows.reshape(-1, size)

    def variants(self) -> list[int]:
        """Return for each row the first row with the same shapes."""
        if self._variants is None:
            firsts = self.places[:, 0].tolist()
            if not self.unlike:
                self._variants = [0] * len(firsts)
            else:
                found: dict[Any, int] = {}
                keys = [tuple([cut.shapes[at] for cut in self.unlike.values()]) for at in firsts]
                self._variants = [found.setdefault(key, row) for row, key in enumerate(keys)]
        return self._variants

    def first(self, row: int) -> int:
        """Return the place in the mesh of the first rank of the first row with the same shapes as a row."""
        return int(self.places[self.variants()[row], 0]) if self.unlike else 0


def merged(
    same_devices: Sequence[tuple[ShardingGroups, int]],
) -> tuple[Sequence[int], Sequence[TensorKind], tuple[int, ...]]:
    """Return the tensors of rows of the same devices in order: numbers, kinds, and a place of each, or one for all."""
    if len(same_devices) == 1:
        groups, row = same_devices[0]
        return groups.numbers, groups.kinds, (groups.first(row),)
    every = [(zip(groups.numbers, groups.kinds, strict=True), groups.first(row)) for groups, row in same_devices]
    ordered = sorted(((number, kind, at) for pairs, at in every for number, kind in pairs), key=itemgetter(0))
    numbers, kinds, firsts = zip(*ordered, strict=True)
    return numbers, kinds, firsts
