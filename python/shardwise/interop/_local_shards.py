"""The shards that each rank of PyTorch holds of a tensor, worked out without PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import array_like, int64_array, refuse_mask
from .._frozen import frozen
from .._strided import Ranges, strided_pieces
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ._axes import checked_mesh
from ._placements import (
    Placement,
    Shard,
    StridedShard,
    read_placements,
)

__all__ = ["LocalShards", "local_shards", "merged_ranges", "pieces_along"]


class _Columns(NamedTuple):
    shapes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    is_box: npt.NDArray[np.bool_]


class LocalShards(_Columns):
    """The shards of every rank, in device-index order: read-only arrays, by name or as a tuple of three.

    Attributes:
        shapes: The shape of each rank's local tensor: int64 (ranks, dims).
        offsets: Where the local tensor begins in the global tensor; for an empty shard, along the dim that empties it,
            the dim's size: int64 (ranks, dims).
        is_box: Whether the local tensor is a box of the global tensor: bool (ranks,). Strided shards may not be boxes;
            an empty shard is one.
    """

    __slots__ = ()

    def __new__(cls, shapes: Any, offsets: Any, is_box: Any) -> LocalShards:
        """Copy what is given."""
        refuse_mask("is_box", is_box)
        boxes = np.asarray(array_like("is_box", is_box))
        if boxes.dtype != np.bool_ and boxes.size:
            raise TypeError(f"is_box must be an array of flags, got dtype {boxes.dtype}")
        columns = (int64_array("shapes", shapes), int64_array("offsets", offsets), boxes.astype(np.bool_))
        return super().__new__(cls, *map(frozen, columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LocalShards):
            return NotImplemented
        return all(map(np.array_equal, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple((column.shape, column.tobytes()) for column in self))

    def __repr__(self) -> str:
        columns = (f"{name}={column.tolist()}" for name, column in zip(self._fields, self, strict=True))
        return f"LocalShards({', '.join(columns)})"


def local_shards(placements: Iterable[Any], mesh: DeviceMesh, shape: Sequence[int]) -> LocalShards:
    """Say what every rank holds of a tensor of `shape`, without a process group.

    Args:
        placements: one per axis of the mesh, ours or PyTorch's.
        mesh: the mesh, with its axes in the order of the placements.
        shape: the global shape; dims that do not divide are cut as `torch.chunk` does.

    Returns:
        What `compute_local_shape_and_global_offset` gives on each rank. The cost does not grow with the elements.

    Raises:
        LayoutError: if placements, mesh and shape do not fit together.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> shards = local_shards([StridedShard(0, split_factor=2), Shard(0)], mesh, (15, 5))
    >>> shards.shapes[:, 0].tolist()
    [2, 2, 2, 2, 2, 2, 2, 1]
    >>> shards.offsets[:, 0].tolist()
    [0, 8, 2, 10, 4, 12, 6, 14]
    """
    checked_mesh(mesh)
    sizes = tuple(shape)
    read = read_placements(placements, mesh, len(sizes))
    strided = {placement.dim for placement in read if isinstance(placement, StridedShard)}
    plain: list[list[str]] = [[] for _ in sizes]
    for name, placement in zip(mesh.axis_names, read, strict=True):
        if isinstance(placement, Shard) and placement.dim not in strided:
            plain[placement.dim].append(name)
    boxes = TensorLayout(plain, mesh).partition(sizes, uneven="chunk").boxes()
    shards = _Columns(boxes[:, :, 1] - boxes[:, :, 0], boxes[:, :, 0], np.ones(mesh.size, np.bool_))
    for dim in strided:
        _cut_strided(dim, int(sizes[dim]), read, mesh, shards)
    if strided:
        # Dim by dim: numpy is slow at `any` along short rows.
        for column in shards.shapes.T:
            shards.is_box[:] |= column == 0
    return LocalShards(*shards)


def _cut_strided(dim: int, size: int, placements: list[Placement], mesh: DeviceMesh, shards: _Columns) -> None:
    """Write each rank's part of a dim that strided shards cut into `shards`."""
    ids, pieces = pieces_along(dim, size, placements, mesh)
    shards.shapes[:, dim] = np.array([sum(stop - start for start, stop in piece) for piece in pieces])[ids]
    shards.offsets[:, dim] = np.array([piece[0][0] if piece else size for piece in pieces])[ids]
    shards.is_box[:] &= np.array([len(piece) <= 1 for piece in pieces])[ids]


def pieces_along(
    dim: int, size: int, placements: list[Placement], mesh: DeviceMesh
) -> tuple[npt.NDArray[np.int64], list[Ranges]]:
    """Return the number of each rank's piece of a dim, and the pieces into which PyTorch cuts the dim."""
    coordinates = mesh.coordinates()
    ids = np.zeros(mesh.size, np.int64)
    cuts: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim:
            ids = ids * mesh.shape[axis] + coordinates[:, axis]
            cuts.append((mesh.shape[axis], placement.split_factor if isinstance(placement, StridedShard) else 1))
    return ids, strided_pieces(size, cuts)


def merged_ranges(ranges: Ranges) -> Ranges:
    """Return ascending ranges, with touching ones joined."""
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
