"""The devices that hold a tensor, in rows of devices that share its state, with each device's part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError
from ..mesh import DeviceMesh

__all__ = ["Home", "HomeCut"]


class HomeCut(NamedTuple):
    """The cut of a tensor on a home: the shape on each device, or one shape for all."""

    shapes: tuple[tuple[int, ...], ...]
    #: The largest of the shapes, for which XLA allocates memory on every device.
    room: tuple[int, ...] | None


class Home:
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
        #: The numbers of its tensors, with their cuts and what tells them apart.
        self.tensors: list[tuple[int, HomeCut, tuple[Any, ...]]] = []
        self._variants: list[int] | None = None

    def grouped(self, size: int | None) -> None:
        """Divide each row into groups of `size`."""
        if size is None:
            return
        if self.rows.shape[1] % size:
            raise LayoutError(f"group is {size}, which does not divide the {self.rows.shape[1]} data-parallel ranks")
        self.places, self.rows = self.places.reshape(-1, size), self.rows.reshape(-1, size)

    def variants(self) -> list[int]:
        """Return for each row the first row with the same shapes."""
        if self._variants is None:
            odd = [cut for _, cut, _ in self.tensors if len(cut.shapes) > 1]
            firsts = self.places[:, 0].tolist()
            if not odd:
                self._variants = [0] * len(firsts)
            else:
                found: dict[Any, int] = {}
                unlike = {id(cut): cut for cut in odd}.values()
                keys = [tuple([cut.shapes[at] for cut in unlike]) for at in firsts]
                self._variants = [found.setdefault(key, row) for row, key in enumerate(keys)]
        return self._variants

    def parts(self, row: int) -> list[tuple[int, HomeCut, tuple[int, ...], tuple[Any, ...]]]:
        """Give for each tensor its number, its cut, the shape of the part of a row's ranks, and what tells it apart."""
        at = int(self.places[row, 0])
        return [
            (number, cut, cut.shapes[at] if len(cut.shapes) > 1 else cut.shapes[0], looks)
            for number, cut, looks in self.tensors
        ]
