"""Tensors of which several ranks hold parts in `torch.save` files: as ranges of flat arrays, or as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES, Dtype
from ...._fork import cached_property
from ...._types import Numbers
from ....pieces import Bounds, Pieces, dense_strides, shared_box
from ...data.files import Holder
from ...data.location import Location
from ...tensors.coverage import tile
from ...tensors.flat import flat_boxes
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece
from .model_parallel import RankCut
from .tensors import Container, SavedTensor

__all__ = ["Arrays", "FlatRow", "WholeRow", "dtype_and_shape", "filled", "is_flat", "made"]


#: The first whole number from which on float32 is not exact.
_MOST_STEPS = 1 << 24


class Arrays:
    """Flat arrays, one per rank, that hold parts of many tensors; their places in files are looked up once.

    Args:
        held: The file and the array of each rank.
        what: The arrays' name in messages.
    """

    def __init__(self, held: Sequence[tuple[Container, SavedTensor]], what: str) -> None:
        self.arrays = tuple(held)
        self._what = what

    @cached_property
    def places(self) -> tuple[list[Holder], Numbers, Numbers]:
        """The files; and for each array the number of its file, and its first byte there."""
        files: list[Holder] = []
        rows = []
        for container, array in self.arrays:
            file, first, _ = container.extent(array, self._what)
            if not files or files[-1] is not file:
                files.append(file)
            rows.append((len(files) - 1, first))
        table = np.array(rows, np.int64).reshape(len(rows), 2)
        return files, table[:, 0], table[:, 1]


class FlatRow(NamedTuple):
    """A tensor whose elements are in ranges of flat arrays.

    Attributes:
        cut: Its cut among model-parallel ranks.
        spans: For each range: the number of its array, its first element there, its model-parallel rank, and its start
            and stop in the rank's own flattened tensor. int64 of shape (ranges, 5).
        alias_of: The name of the tensor of which this is a second name.
    """

    dtype: Dtype
    cut: RankCut
    arrays: Arrays
    spans: Numbers
    alias_of: str | None = None


class WholeRow(NamedTuple):
    """A tensor of which each model-parallel rank has a whole array."""

    dtype: Dtype
    cut: RankCut
    arrays: tuple[tuple[Container, SavedTensor], ...]
    alias_of: str | None = None


def is_flat(array: SavedTensor) -> bool:
    """Return whether an array has one dim and contiguous elements."""
    return len(array.shape) == 1 and (array.strides == (1,) or array.shape[0] < 2)


def dtype_and_shape(row: FlatRow | WholeRow | StoredTensor) -> tuple[Dtype, tuple[int, ...]]:
    """Return the dtype and shape of a row."""
    return (row.known_dtype, row.shape) if isinstance(row, StoredTensor) else (row.dtype, row.cut.shape)


def made(name: str, row: FlatRow | WholeRow | StoredTensor) -> StoredTensor:
    """Return the tensor that a row describes."""
    if isinstance(row, StoredTensor):
        return row
    return _flat(name, row) if isinstance(row, FlatRow) else _whole(name, row)


def _whole(name: str, row: WholeRow) -> StoredTensor:
    shape = row.cut.shape
    parts = [(rank, part) for rank, held in enumerate(row.cut.parts) for part in held]
    pieces = [
        row.arrays[rank][0].piece(row.arrays[rank][1], name, part.bounds, tuple(low for low, _ in part.box))
        for rank, part in parts
    ]
    boxes = np.array([part.bounds for _, part in parts], np.int64).reshape(len(parts), len(shape), 2)
    kept, again = tile(name, shape, boxes, lambda at: pieces[at].path.name, pieces[0].path.parent if pieces else "")
    replicas = [pieces[at] for at in again]
    return StoredTensor(name, row.dtype, shape, [pieces[at] for at in kept], replicas=replicas, alias_of=row.alias_of)


class _PlacedRuns(NamedTuple):
    """Boxes of the whole tensor; for each the number of its source, and its first element there."""

    boxes: Numbers
    sources: Numbers
    begins: Numbers


@lru_cache(256)
def _placed(cut: RankCut, ranges: tuple[tuple[int, int, int], ...]) -> tuple[_PlacedRuns, _PlacedRuns]:
    """Return the boxes that tile a tensor, and those that repeat them, of sources given by rank, start and stop."""
    rank_count, dims = len(cut.parts), len(cut.shape)
    by_rank: list[list[tuple[Bounds, int, int]]] = []
    for rank in range(rank_count):
        numbers = [number for number, (of, _, _) in enumerate(ranges) if of == rank]
        found = flat_boxes(cut.local[rank], [ranges[number][1:] for number in numbers])
        if rank_count == 1:
            return _PlacedRuns(found.boxes, found.ranges, found.begins), _columns([], dims)
        boxes = [tuple((low, high) for low, high in box) for box in found.boxes.tolist()]
        by_rank.append(
            [
                (box, numbers[of], at)
                for box, of, at in zip(boxes, found.ranges.tolist(), found.begins.tolist(), strict=True)
            ]
        )
    pieces: list[tuple[Bounds, int, int]] = []
    replicas: list[tuple[Bounds, int, int]] = []
    segments: dict[Bounds, list[list[tuple[Bounds, int, int]]]] = {}
    for rank, held in enumerate(cut.parts):
        for part in held:
            moved = []
            for box, number, begin in by_rank[rank]:
                common = shared_box(box, part.box)
                if all(low < high for low, high in common):
                    at = begin + _flat_step(common, box, cut.local[rank])
                    moved.append((_moved(common, part.box, part.start), number, at))
            segments.setdefault(part.bounds, []).append(moved)
    for copies in segments.values():
        common_boxes = _refined([[box for box, _, _ in copy] for copy in copies])
        for position, copy in enumerate(copies):
            (replicas if position else pieces).extend(_split(copy, common_boxes, cut, ranges))
    return _columns(pieces, dims), _columns(replicas, dims)


def _moved(box: Bounds, around: Bounds, start: tuple[int, ...]) -> Bounds:
    """Return a box of a rank's tensor as a box of the whole one."""
    return tuple((low - at + to, high - at + to) for (low, high), (at, _), to in zip(box, around, start, strict=True))


def _flat_step(inner: Bounds, box: Bounds, shape: tuple[int, ...]) -> int:
    """Return the elements from the first of a box to the first of a box inside, in an array of this shape."""
    return sum((low - at) * step for (low, _), (at, _), step in zip(inner, box, _dense(shape), strict=True))


def _refined(copies: list[list[Bounds]]) -> list[Bounds] | None:
    """Return boxes so small that each is inside of one box of every copy; `None` if the copies have the same boxes."""
    if all(copy == copies[0] for copy in copies):
        return None
    found = copies[0]
    for copy in copies[1:]:
        meets = [shared_box(one, other) for one in found for other in copy]
        found = [box for box in meets if all(low < high for low, high in box)]
    return found


def _split(
    copy: list[tuple[Bounds, int, int]],
    boxes: list[Bounds] | None,
    cut: RankCut,
    ranges: tuple[tuple[int, int, int], ...],
) -> list[tuple[Bounds, int, int]]:
    if boxes is None:
        return copy
    found = []
    for box, number, begin in copy:
        for one in boxes:
            common = shared_box(box, one)
            if all(low < high for low, high in common):
                found.append((common, number, begin + _flat_step(common, box, cut.local[ranges[number][0]])))
    return found


def _columns(rows: list[tuple[Bounds, int, int]], dims: int) -> _PlacedRuns:
    boxes = np.array([box for box, _, _ in rows], np.int64).reshape(len(rows), dims, 2)
    return _PlacedRuns(boxes, *(np.array([row[at] for row in rows], np.int64) for at in (1, 2)))


class _FlatPieces(ListedPieces):
    """The pieces of a tensor in flat arrays."""

    has_extents = True

    def __init__(self, name: str, row: FlatRow, placed: _PlacedRuns) -> None:
        super().__init__(placed.boxes, self._piece)
        self._name, self._row, self._placed = name, row, placed

    def _piece(self, position: int, box: Bounds) -> StoredPiece:
        row = self._row
        number, at, rank, _, _ = row.spans[self._placed.sources[position]].tolist()
        container, array = row.arrays.arrays[number]
        offset = array.offset + at + int(self._placed.begins[position])
        shape = tuple(high - low for low, high in box)
        saved: SavedTensor = array._replace(shape=shape, strides=_dense(row.cut.local[rank]), offset=offset)
        piece: StoredPiece = container.piece(saved, self._name, box)
        return piece

    def extents(self) -> Pieces:
        row, placed = self._row, self._placed
        files, numbers, firsts = row.arrays.places
        spans, itemsize = row.spans[placed.sources], row.dtype.bits // 8
        strides = dense_strides(np.array(row.cut.local, np.int64).reshape(len(row.cut.local), -1), itemsize)
        offsets = firsts[spans[:, 0]] + (spans[:, 1] + placed.begins) * itemsize
        return Pieces.built(numbers[spans[:, 0]], offsets, placed.boxes, strides[spans[:, 2]], files)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _flat(name: str, row: FlatRow) -> StoredTensor:
    ranges = tuple(map(tuple, row.spans[:, 2:].tolist()))
    pieces, replicas = (_FlatPieces(name, row, one) for one in _placed(row.cut, ranges))
    return StoredTensor(name, row.dtype, row.cut.shape, pieces, replicas=replicas, alias_of=row.alias_of)


def filled(name: str, number: Any, path: Location) -> StoredTensor:
    """Return a number as a tensor without dims: of float32, as PyTorch keeps steps, if that is exact."""
    is_exact = isinstance(number, float) or number < _MOST_STEPS
    dtype = DTYPES["float32" if is_exact else "int64"]
    return StoredTensor(name, dtype, (), (StoredPiece((), path, fill=np.array(number, dtype.numpy())),))
