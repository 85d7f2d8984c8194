"""Pieces from element numbers: which boxes of a tensor lie in a parameter, and with which strides.

A loader that only moves data puts each element somewhere, or to several places. A *row* says the same of many elements
at once: a box of the tensor, every so many of each dim, and where in the flat parameter its first element is, how far
it is from there to the next along each dim, and how often all of it is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from .._types import Numbers

    Links = npt.NDArray[np.bool_]

__all__ = ["boxes_of", "rows_of"]

#: The columns of a row: the offset; for each dim start, count, step and stride; the times it is repeated, and how far
#: it is from one to the next. Until the last step the times are the occurrence: 0 for the first place of an element.
_OF_DIM = 4
#: The most rows for which no other order is tried.
_FEW = 4


def rows_of(positions: Numbers, offsets: Numbers, shape: Sequence[int]) -> Numbers:
    """Return the rows that say where elements of a tensor are: int64 of shape (rows, 3 + 4 · dims).

    Args:
        positions: the place of each in the flat parameter, ascending.
        offsets: the flat position of each in the tensor.
        shape: the shape of the tensor.

    The rows are exact whatever the places are. They are few where a tensor is cut, fused, transposed, repeated or
    interleaved.

    >>> matrix = np.arange(6).reshape(2, 3).T  # of which a parameter is the transpose
    >>> rows_of(np.arange(6), matrix.ravel(), (2, 3)).tolist()
    [[0, 0, 0, 2, 3, 1, 1, 1, 2, 1, 0]]
    """
    rank, shape = max(len(shape), 1), tuple(shape) or (1,)
    order = np.argsort(offsets, kind="stable")
    offsets, positions = offsets[order], positions[order]
    occurrence = _occurrences(offsets)
    if occurrence.any():
        order = np.argsort(occurrence, kind="stable")
        offsets, positions, occurrence = offsets[order], positions[order], occurrence[order]
    best = None
    for last, others in ((True, True), (True, False), (False, False)):
        rows = _first_rows(positions, offsets, occurrence, shape, rank, joined=last)
        for in_tensor in (others, not others):
            for dim in reversed(range(rank)):
                rows = _merged(rows, rank, dim, in_tensor=in_tensor)
        rows = _repeated(rows)
        if best is None or len(rows) < len(best):
            best = rows
        if len(best) <= _FEW:
            break
    assert best is not None
    return best[np.argsort(best[:, 0], kind="stable")]


def boxes_of(offsets: Numbers, shape: Sequence[int]) -> Numbers:
    """Return boxes that have exactly these elements of a tensor: int64 of shape (boxes, dims, 2).

    Args:
        offsets: the flat positions of the elements, ascending, each once.
        shape: the shape of the tensor.

    >>> boxes_of(np.array([1, 2, 5, 6]), (2, 4)).tolist()
    [[[0, 2], [1, 3]]]
    """
    if not len(shape):
        return np.zeros((min(len(offsets), 1), 0, 2), np.int64)
    rank, nothing = len(shape), np.zeros(len(offsets), np.int64)
    rows = _first_rows(nothing, offsets, nothing, shape, rank, joined=True)
    for dim in reversed(range(rank)):
        rows = _merged(rows, rank, dim, in_tensor=True)
    starts = rows[:, 1 : 1 + rank]
    rows = rows[np.lexsort(starts.T[::-1])]
    starts, counts = rows[:, 1 : 1 + rank], rows[:, 1 + rank : 1 + 2 * rank]
    return np.stack([starts, starts + counts], axis=2)


def _occurrences(offsets: Numbers) -> Numbers:
    """Return, for each of these sorted numbers, how many equal ones come before it."""
    is_first = np.ones(len(offsets), np.bool_)
    is_first[1:] = offsets[1:] != offsets[:-1]
    first = np.flatnonzero(is_first)
    return np.arange(len(offsets)) - np.repeat(first, np.diff(np.append(first, len(offsets))))


def _first_rows(
    positions: Numbers, offsets: Numbers, occurrence: Numbers, shape: Sequence[int], rank: int, *, joined: bool
) -> Numbers:
    """Return rows of single elements; if `joined`, of equally spaced elements along the last dim."""
    first, lengths, strides = np.arange(len(offsets)), None, None
    if joined and len(offsets) > 1:
        linked = (np.diff(offsets) == 1) & (np.diff(occurrence) == 0) & (offsets[1:] % shape[-1] != 0)
        apart = np.diff(positions)
        first, lengths = _groups(_kept(linked, apart, apart))
        strides = np.append(apart, 0)[first]
    rows = np.zeros((len(first), 3 + _OF_DIM * rank), np.int64)
    rows[:, 0] = positions[first]
    rows[:, 1 : 1 + rank] = np.stack(np.unravel_index(offsets[first], shape), axis=1)
    rows[:, 1 + rank : 1 + 3 * rank] = 1
    if lengths is not None and strides is not None:
        rows[:, 2 * rank] = lengths
        rows[:, 4 * rank] = np.where(lengths > 1, strides, 0)
    rows[:, -2] = occurrence[first]
    return rows


def _merged(rows: Numbers, rank: int, dim: int, *, in_tensor: bool) -> Numbers:
    """Return rows with those joined that continue each other along a dim, in the tensor or in their places."""
    start, count, step, stride = (1 + dim + side * rank for side in range(_OF_DIM))
    is_open = rows[:, count] == 1
    done, rows = rows[~is_open], rows[is_open]
    if len(rows) < 2:
        return np.concatenate([done, rows])
    others = [at for at in range(1, rows.shape[1]) if at not in (start, step, stride)]
    rows = rows[np.lexsort((rows[:, start if in_tensor else 0], *(rows[:, at] for at in others)))]
    places, moved = np.diff(rows[:, start]), np.diff(rows[:, 0])
    linked = (rows[1:, others] == rows[:-1, others]).all(axis=1) & ((places == 1) if in_tensor else (places >= 1))
    first, lengths = _groups(_kept(linked, places, moved))
    made = rows[first]
    several = np.flatnonzero(lengths > 1)
    made[several, count], made[several, step] = lengths[several], places[first[several]]
    made[several, stride] = moved[first[several]]
    return np.concatenate([done, made])


def _repeated(rows: Numbers) -> Numbers:
    """Return rows with those joined that have the same elements at equal distances."""
    rows[:, -2:] = 1, 0
    if len(rows) < 2:
        return rows
    rows = rows[np.lexsort(rows.T[: rows.shape[1] - 2])]
    linked = (rows[1:, 1:-2] == rows[:-1, 1:-2]).all(axis=1)
    moved = np.diff(rows[:, 0])
    first, lengths = _groups(_kept(linked, moved, moved))
    made = rows[first]
    made[:, -2] = lengths
    made[:, -1] = np.where(lengths > 1, np.append(moved, 0)[first], 0)
    return made


def _kept(linked: Links, places: Numbers, moved: Numbers) -> Links:
    """Return the links that are followed: one that ends a longer run of equal ones is not part of a shorter one."""
    kept: Links = linked.copy()
    if len(linked) < 2:
        return kept
    both: Links = linked[1:] & linked[:-1]
    equal = both & (places[1:] == places[:-1]) & (moved[1:] == moved[:-1])
    _, lengths = _groups(equal)
    length = np.repeat(lengths, lengths)
    clash = np.flatnonzero(both & ~equal)
    left, right = length[clash], length[clash + 1]
    near = np.abs(moved[clash]) <= np.abs(moved[clash + 1])
    is_left = (left > right) | ((left == right) & near)
    kept[clash[is_left] + 1] = False
    kept[clash[~is_left]] = False
    return kept


def _groups(linked: Links) -> tuple[Numbers, Numbers]:
    """Return the first of each chain of linked items, and the number of items in each chain."""
    first = np.flatnonzero(np.concatenate([[True], ~linked]))
    return first, np.diff(np.append(first, len(linked) + 1))
