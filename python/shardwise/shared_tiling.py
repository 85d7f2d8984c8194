"""Tilings of blocks that neighbours share: each device has the blocks that its part of another tensor touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._types import Numbers
from .layout import TensorLayout
from .piece import Piece
from .tiling import Tiling

if TYPE_CHECKING:
    from .mesh import DeviceMesh

__all__ = ["SharedTiling", "Windows"]


class Windows(NamedTuple):
    """The segments of one dim that each device has, in the order of device indices."""

    #: The beginning of those of each device in the list of all: int64 (devices + 1,).
    begins: Numbers
    #: Start and stop of each, and its place in the device's own array: int64 (segments, 3).
    rows: Numbers
    #: The size of the dim in each device's own array: int64 (devices,).
    sizes: Numbers


class SharedTiling(Tiling):
    """A tiling of a mesh's devices whose boxes overlap: what two of them have is cut off, and both are its replicas.

    The scales of a quantized weight are held so where a cut of the weight falls within a block that has one scale.

    >>> from shardwise import DeviceMesh
    >>> rows = TensorLayout(("tp",), DeviceMesh((2,), ("tp",)))
    >>> windows = Windows(np.array([0, 1, 2]), np.array([[0, 2, 0], [1, 3, 0]]), np.array([2, 2]))
    >>> tiling = SharedTiling.of((3,), rows, [windows], begins_within=True)
    >>> for piece in tiling.pieces("cpu:1"):
    ...     print(piece)
    Piece(box=(slice(1, 2, None),), start=(0,))
    Piece(box=(slice(2, 3, None),), start=(1,))
    """

    __slots__ = ("_begins_within", "_layout")

    _layout: TensorLayout
    _begins_within: bool

    @classmethod
    def of(
        cls, shape: tuple[int, ...], layout: TensorLayout, windows: Sequence[Windows], *, begins_within: bool
    ) -> SharedTiling:
        """Make the tiling of a tensor of this shape.

        Args:
            shape: the tensor's shape.
            layout: the layout of the tensor that it belongs to, over the mesh.
            windows: for each dim what the devices have of it.
            begins_within: see the property.
        """
        assert layout.device_mesh is not None
        boxes: dict[Any, list[Piece]] = {}
        arrays: dict[Any, tuple[int, ...]] = {}
        cells = [_cells(each) for each in windows]
        for number, label in enumerate(layout.device_mesh.labels()):
            boxes[label] = [
                Piece(tuple(slice(start, stop) for start, stop, _ in sides), tuple(at for *_, at in sides))
                for sides in product(*(each[number] for each in cells))
            ]
            arrays[label] = tuple(int(each.sizes[number]) for each in windows)
        return cls._of(Tiling.from_boxes(shape, boxes, replicas=True, arrays=arrays), layout, begins_within)

    @classmethod
    def _of(cls, tiling: Tiling, layout: TensorLayout, begins_within: bool) -> SharedTiling:
        made = cls.__new__(cls)
        made._core, made._key, made._given_labels, made._index = (
            tiling._core,
            tiling._key,
            tiling._given_labels,
            tiling._index,
        )
        made._layout, made._begins_within = layout, begins_within
        return made

    @property
    def layout(self) -> TensorLayout:
        """The layout of the tensor that it belongs to."""
        return self._layout

    @property
    def begins_within(self) -> bool:
        """True if the first block of a device that has several begins before the device's part.

        Who counts blocks from the first row that a device has is wrong there.
        """
        return self._begins_within

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh whose devices hold it."""
        assert self._layout.device_mesh is not None
        return self._layout.device_mesh

    @property
    def total_shards(self) -> int:
        """The number of shards of the layout."""
        return math.prod(self._layout.num_shards)

    @property
    def largest_shard_shape(self) -> tuple[int, ...]:
        """The shape of the largest array of a device."""
        return max(self.holder_shapes(), key=math.prod)

    def all_pieces(self) -> tuple[Numbers, Numbers]:
        """Return the pieces of all devices as `Partition.all_pieces` does."""
        found = [self.pieces(label) for label in self.holders]
        rows = [
            [(side.start, side.stop, at) for side, at in zip(piece.box, _places(piece), strict=True)]
            for own in found
            for piece in own
        ]
        begins = np.cumsum([0, *map(len, found)], dtype=np.int64)
        return begins, np.array(rows, np.int64).reshape(len(rows), len(self.shape), 3)

    def position_of(self, holder: Any) -> int:
        """Return the index of the device of this label."""
        return self.device_mesh.index_of_label(holder)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedTiling):
            return NotImplemented
        return (self._key, self._layout) == (other._key, other._layout)

    def __hash__(self) -> int:
        return hash((self._key, self._layout))

    def __reduce__(self) -> tuple[Any, ...]:
        restore, key = super().__reduce__()
        return _restored, (restore, key, self._layout, self._begins_within)


def _restored(restore: Any, key: tuple[Any, ...], layout: TensorLayout, begins_within: bool) -> SharedTiling:
    return SharedTiling._of(restore(*key), layout, begins_within)


def _places(piece: Piece) -> tuple[int, ...]:
    assert isinstance(piece.start, tuple)
    return piece.start


def _cells(windows: Windows) -> list[list[tuple[int, int, int]]]:
    """Return each device's segments, each cut where one of another device begins or ends within it."""
    filled = windows.rows[windows.rows[:, 0] < windows.rows[:, 1]]
    edges = np.unique(filled[:, :2])
    found = []
    for first, stop in zip(windows.begins[:-1].tolist(), windows.begins[1:].tolist(), strict=True):
        own = [
            (low, high, at + low - start)
            for start, end, at in windows.rows[first:stop].tolist()
            if start < end
            for low, high in _steps(edges[np.searchsorted(edges, start) : np.searchsorted(edges, end) + 1].tolist())
        ]
        found.append(own or [(0, 0, 0)])
    return found


def _steps(edges: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(edges))
