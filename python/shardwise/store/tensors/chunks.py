"""Tensors in chunks of one shape, on a grid: pieces for stored chunks, and boxes of a fill value for the rest.

The size of the grid costs nothing: cells that are not stored are merged into boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...pieces import Bounds
from ..data.location import Location
from .stored_pieces import ListedPieces, StoredPiece

__all__ = ["ChunkIndex", "grid_pieces", "missing_cell", "overlapping", "stored_cells"]

ChunkIndex = tuple[int, ...]


def stored_cells(shape: Sequence[int], chunk: Sequence[int], cells: Iterator[ChunkIndex]) -> list[ChunkIndex]:
    """Return those cells that have elements of the tensor, in C order."""
    if 0 in shape:
        return []
    counts = _counts(shape, chunk)
    return sorted(cell for cell in cells if all(at < count for at, count in zip(cell, counts, strict=True)))


def missing_cell(shape: Sequence[int], chunk: Sequence[int], cells: Sequence[ChunkIndex]) -> ChunkIndex | None:
    """Return the first cell of the grid that is not in `cells`, which is in C order; `None` if all are."""
    counts = _counts(shape, chunk)
    if 0 in shape or len(cells) == math.prod(counts):
        return None
    expected = next((at for at, cell in enumerate(cells) if _number(cell, counts) != at), len(cells))
    found = []
    for count in reversed(counts):
        expected, at = divmod(expected, count)
        found.append(at)
    return tuple(reversed(found))


def overlapping(ranges: npt.NDArray[np.uint64]) -> int | None:
    """Return the first byte that two ranges share; `None` if none do.

    >>> overlapping(np.array([[8, 4], [0, 4], [4, 4]], np.uint64)) is None
    True
    >>> overlapping(np.array([[8, 4], [0, 9], [20, 1]], np.uint64))
    8

    Args:
        ranges: First byte and size of each: int64 of shape (ranges, 2).
    """
    some = ranges[ranges[:, 1] > 0]
    begins, lengths = some[np.lexsort((some[:, 1], some[:, 0]))].T
    shared = np.flatnonzero(begins[1:] - begins[:-1] < lengths[:-1])
    return int(begins[shared[0] + 1]) if len(shared) else None


def grid_pieces(
    shape: Sequence[int],
    chunk: Sequence[int],
    cells: Sequence[ChunkIndex],
    make: Callable[[ChunkIndex, Bounds], StoredPiece],
    fill: npt.NDArray[Any] | None,
    path: Location,
) -> ListedPieces:
    """Return the pieces of a tensor: its stored chunks, then boxes of the others.

    Args:
        shape: Elements per dim.
        chunk: The shape of a chunk.
        cells: The chunks that are stored, by their positions on the grid, in C order.
        make: Makes the piece of a stored chunk, from its position and its box of the tensor.
        fill: The value of all elements that are not stored, an array without dims; `None` if all are stored.
        path: The path for messages about boxes of the fill value.
    """
    rank = len(shape)
    counts, steps, sizes = _counts(shape, chunk), np.array(chunk, np.int64), np.array(shape, np.int64)
    held = np.array(cells, np.int64).reshape(len(cells), rank)
    sides = [np.stack([held, held + 1], axis=-1)]
    if 0 not in shape and len(cells) < math.prod(counts):
        sides.append(np.array(list(_gaps(counts, cells)), np.int64).reshape(-1, rank, 2))
    boxes = np.concatenate(sides)
    # The end of a chunk may be over 2**63 - 1, but not that of a whole one.
    whole = sizes // steps
    high = np.where(boxes[..., 1] > whole, sizes, np.minimum(boxes[..., 1], whole) * steps)
    return ListedPieces(np.stack([boxes[..., 0] * steps, high], axis=-1), partial(_made, cells, make, fill, path))


def _made(
    cells: Sequence[ChunkIndex],
    make: Callable[[ChunkIndex, Bounds], StoredPiece],
    fill: npt.NDArray[Any] | None,
    path: Location,
    position: int,
    box: Bounds,
) -> StoredPiece:
    return make(cells[position], box) if position < len(cells) else StoredPiece(box, path, fill=fill)


def _counts(shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    return [-(-size // step) for size, step in zip(shape, chunk, strict=True)]


def _number(cell: ChunkIndex, counts: Sequence[int]) -> int:
    number = 0
    for at, count in zip(cell, counts, strict=True):
        number = number * count + at
    return number


def _gaps(counts: Sequence[int], cells: Sequence[ChunkIndex]) -> Iterator[Bounds]:
    """Yield boxes of cells that tile the grid without `cells`, which are in C order."""
    at = 0
    for cell in cells:
        number = _number(cell, counts)
        yield from _boxes_of(counts, at, number)
        at = number + 1
    yield from _boxes_of(counts, at, math.prod(counts))


def _boxes_of(counts: Sequence[int], start: int, stop: int) -> Iterator[Bounds]:
    """Yield boxes that a range of positions in C order consists of, at most 2 · rank - 1."""
    if start >= stop:
        return
    if not counts:
        yield ()
        return
    row, inner = math.prod(counts[1:]), counts[1:]
    low, high = -(-start // row), stop // row
    if low > high:  # Within one row.
        yield from (((high, high + 1), *box) for box in _boxes_of(inner, start - high * row, stop - high * row))
        return
    yield from (((low - 1, low), *box) for box in _boxes_of(inner, start - (low - 1) * row, row) if start < low * row)
    if low < high:
        yield ((low, high), *((0, count) for count in inner))
    yield from (((high, high + 1), *box) for box in _boxes_of(inner, 0, stop - high * row))
