"""Boxes of a tensor with the places of their bytes: one table, and all that is worked out on it (rule 2.12 a)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._core import BoxTree
from ._text import counted
from ._types import Numbers
from .errors import SizeOverflowError

__all__ = ["NO_PIECES", "Bounds", "LocatedPiece", "Pieces", "Runs", "dense_strides", "repeats", "shared_box", "within"]

Bounds = tuple[tuple[int, int], ...]
"""Start and stop per dim."""

#: Runs of a dim, int64 (runs, 3): where each begins in the old dim, where in the new one, and its length.
Runs = Numbers

#: The number of pieces from which those that meet a box are found by a tree.
_TREE_FROM = 64
#: The number of pairs of runs and pieces that are looked at together.
_PAIRS = 1 << 20
#: So few pairs, and so few boxes, are all looked at; and how many boxes are looked for at a time.
_FEW, _TARGETS = 16, 1 << 14


class LocatedPiece(NamedTuple):
    """A box of a tensor, and where its elements are in the file, object or array that holds it.

    Attributes:
        box: Start and stop per dim.
        holder: Its holder: a device, a file or an array.
        offset: In a file the byte at which the box's first element begins; in an array the bytes from its element 0.
        strides: The bytes from one element to the next, per dim; never negative in a file.
    """

    box: Bounds
    holder: Any
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, box: Iterable[tuple[int, int]], holder: Any, offset: int, itemsize: int) -> LocatedPiece:
        """Return a box whose elements, of so many bytes, lie one after the other in C order.

        >>> LocatedPiece.dense(((0, 2), (3, 6)), "file", 8, 4)
        LocatedPiece(box=((0, 2), (3, 6)), holder='file', offset=8, strides=(12, 4))
        """
        box = tuple(box)
        strides, step = [], itemsize
        for start, stop in reversed(box):
            strides.append(step)
            step *= max(stop - start, 1)
        return cls(box, holder, offset, tuple(reversed(strides)))


class Pieces(Sequence[LocatedPiece]):
    """Pieces of a tensor, one a row: `[holder, offset, start…, stop…, strides…]`, int64 of shape (pieces, 2 + 3 dims).

    A row is made a `LocatedPiece` when it is asked for, so a million of them take the room of their numbers. Nothing
    else in this package says which boxes share elements, and where their bytes then are.

    Args:
        rows: The rows, as above.
        holders: The holders that the numbers in rows stand for.

    >>> upper = LocatedPiece(((0, 4), (0, 6)), "a", 10, (6, 1))
    >>> pieces = Pieces.of([upper, LocatedPiece(((4, 8), (0, 6)), "b", 0, (6, 1))], 2)
    >>> pieces.meeting(((5, 6), (0, 2))).tolist()
    [1]
    >>> pieces.clipped(((3, 5), (2, 4)))[0]
    LocatedPiece(box=((3, 4), (2, 4)), holder='a', offset=30, strides=(6, 1))
    """

    def __init__(self, rows: Numbers, holders: Sequence[Any] = ()) -> None:
        self.rows, self.holders = rows, holders
        #: The number of dims.
        self.rank: int = (rows.shape[1] - 2) // 3
        self._tree: BoxTree | None = None

    @classmethod
    def of(cls, pieces: Iterable[LocatedPiece], rank: int) -> Pieces:
        """Return the table of these pieces of a tensor with so many dims; a table is returned as it is.

        Raises:
            SizeOverflowError: if a number is over 2**63 - 1.
        """
        if isinstance(pieces, Pieces):
            return pieces
        numbers: dict[int, int] = {}
        holders: list[Any] = []
        rows = []
        for box, holder, offset, strides in pieces:
            at = numbers.setdefault(id(holder), len(holders))
            if at == len(holders):
                holders.append(holder)
            rows.append([at, offset, *(a for a, _ in box), *(b for _, b in box), *strides])
        return cls(_rows_array(rows, rank), holders)

    @classmethod
    def by_number(cls, pieces: Iterable[LocatedPiece], rank: int) -> Pieces:
        """Return the table of pieces whose holders are numbers of a job's files and arrays; a table as it is.

        Raises:
            ValueError: if one has another number of dims.
            SizeOverflowError: if a number is over 2**63 - 1.
        """
        if isinstance(pieces, Pieces):
            return pieces
        rows = [[number, at, *(a for a, _ in box), *(b for _, b in box), *steps] for box, number, at, steps in pieces]
        wrong = next((row for row in rows if len(row) != 2 + 3 * rank), None)
        if wrong is not None:
            raise ValueError(
                f"a piece has {len(wrong) - 2} bounds and strides; for {counted(rank, 'dim')} it needs {3 * rank}"
            )
        return cls(_rows_array(rows, rank))

    @classmethod
    def built(
        cls, numbers: Numbers, offsets: Numbers, boxes: Numbers, strides: Numbers, holders: Sequence[Any]
    ) -> Pieces:
        """Return the table of these columns; `boxes` are int64 of shape (pieces, dims, 2)."""
        count, rank, _ = boxes.shape
        rows = np.empty((count, 2 + 3 * rank), np.int64)
        rows[:, 0], rows[:, 1] = numbers, offsets
        rows[:, 2 : 2 + 2 * rank] = boxes.transpose(0, 2, 1).reshape(count, 2 * rank)
        rows[:, 2 + 2 * rank :] = strides
        return cls(rows, holders)

    @classmethod
    def dense(cls, places: tuple[Any, Any], sides: Numbers, itemsize: int, arrays: Numbers | None = None) -> Pieces:
        """Return pieces whose elements are stored in C order without gaps, or as parts of arrays that are.

        Args:
            places: The numbers of the holders, and the offsets in them, in bytes.
            sides: The boxes: int64 of shape (pieces, 2, dims).
            itemsize: Bytes per element.
            arrays: The shape of the array that each piece is a part of, int64 of shape (pieces, dims).
        """
        count, _, rank = sides.shape
        extents = sides[:, 1] - sides[:, 0] if arrays is None else arrays
        rows = np.empty((count, 2 + 3 * rank), np.int64)
        rows[:, 0], rows[:, 1] = places
        rows[:, 2 : 2 + 2 * rank] = sides.reshape(count, 2 * rank)
        rows[:, 2 + 2 * rank :] = dense_strides(extents, itemsize)
        return cls(rows)

    @classmethod
    def boxed(cls, boxes: Numbers) -> Pieces:
        """Return a table of boxes alone, int64 of shape (boxes, dims, 2), without places of their bytes."""
        count, rank, _ = boxes.shape
        none = np.zeros(count, np.int64)
        return cls.built(none, none, boxes, np.zeros((count, rank), np.int64), ())

    @classmethod
    def joined(cls, tables: Iterable[Pieces], rank: int) -> Pieces:
        """Return the rows of several tables, in order, as one table."""
        filled = [table for table in tables if len(table)]
        if len(filled) == 1:
            return filled[0]
        numbers: dict[int, int] = {}
        holders: list[Any] = []
        rows = [np.zeros((0, 2 + 3 * rank), np.int64)]
        for table in filled:
            new = []
            for holder in table.holders:
                new.append(numbers.setdefault(id(holder), len(holders)))
                if new[-1] == len(holders):
                    holders.append(holder)
            part = table.rows.copy()
            part[:, 0] = np.array(new, np.int64)[part[:, 0]]
            rows.append(part)
        return cls(np.concatenate(rows), holders)

    @property
    def identity(self) -> tuple[bytes, tuple[int, ...]]:
        """A key that is equal for tables of equal rows in the same holders, as long as the holders live."""
        return self.rows.tobytes(), tuple(map(id, self.holders))

    @property
    def numbers(self) -> Numbers:
        """The number of each piece's holder."""
        return self.rows[:, 0]

    @property
    def offsets(self) -> Numbers:
        """The byte of its holder at which each piece begins."""
        return self.rows[:, 1]

    @property
    def starts(self) -> Numbers:
        """The start of each piece's box, per dim."""
        return self.rows[:, 2 : 2 + self.rank]

    @property
    def stops(self) -> Numbers:
        """The stop of each piece's box, per dim."""
        return self.rows[:, 2 + self.rank : 2 + 2 * self.rank]

    @property
    def strides(self) -> Numbers:
        """The bytes from one element to the next, per dim."""
        return self.rows[:, 2 + 2 * self.rank :]

    @property
    def boxes(self) -> Numbers:
        """The boxes: int64 of shape (pieces, dims, 2)."""
        return np.stack([self.starts, self.stops], axis=2)

    @property
    def volumes(self) -> Numbers:
        """The number of elements of each piece."""
        found: Numbers = (self.stops - self.starts).prod(axis=1)
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.chosen(np.arange(len(self))[index])
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"piece {number} of {len(self)}")
        return next(self._made(self.rows[number % len(self)][None]))

    def __iter__(self) -> Iterator[LocatedPiece]:
        for begin in range(0, len(self), 1024):
            yield from self._made(self.rows[begin : begin + 1024])

    def _made(self, rows: Numbers) -> Iterator[LocatedPiece]:
        rank = self.rank
        for number, offset, *rest in rows.tolist():
            box = tuple(zip(rest[:rank], rest[rank : 2 * rank], strict=True))
            yield LocatedPiece(box, self.holders[number], offset, tuple(rest[2 * rank :]))

    def chosen(self, positions: npt.NDArray[Any]) -> Pieces:
        """Return the pieces at these positions."""
        return Pieces(self.rows[positions], self.holders)

    def moved(self, numbers: Numbers, by: Numbers | int = 0) -> Pieces:
        """Return the pieces with these numbers of holders, moved `by` bytes; the list of holders is left out."""
        rows = self.rows.copy()
        rows[:, 0] = numbers
        rows[:, 1] += by
        return Pieces(rows)

    def numbered(self, numbers: dict[int, int], first: int = 0) -> Pieces:
        """Return the pieces with holders numbered from `first` on as they come; `numbers` gets each one's place."""
        rows = self.rows.copy()
        rows[:, 0] = [first + numbers.setdefault(holder, len(numbers)) for holder in self.numbers.tolist()]
        return Pieces(rows)

    def of_holders(self, held: Callable[[int], Any]) -> Pieces:
        """Return the pieces with the holders that a function gives for their numbers."""
        numbers, inner = np.unique(self.numbers, return_inverse=True)
        rows = self.rows.copy()
        rows[:, 0] = inner.reshape(-1)
        return Pieces(rows, list(map(held, numbers.tolist())))

    def meeting(self, box: Bounds) -> npt.NDArray[np.intp]:
        """Return the positions of the pieces that share elements with a box, in order."""
        if not len(self):
            return np.zeros(0, np.intp)
        if len(self) < _TREE_FROM or not self.rank:
            low, high = self._shared(self.rows, box)
            return np.flatnonzero((low < high).all(axis=1))
        found: npt.NDArray[np.intp] = self._by_tree(np.array([*(a for a, _ in box), *(b for _, b in box)], np.int64))[0]
        return found

    def pairs(self, other: Pieces, few: int = _FEW, at_once: int = _TARGETS) -> Iterator[Numbers]:
        """Yield the positions of pieces here and of others that share elements: int64 of shape (2, pairs).

        Up to `few` pairs are given whether they share elements or not; of more, `at_once` others are looked for at a
        time, and their pairs are given together.
        """
        if len(self) * len(other) <= few or not self.rank:
            yield np.array(np.divmod(np.arange(len(self) * len(other)), max(len(other), 1)), np.int64)
            return
        for begin in range(0, len(other), at_once):
            rows = other.rows[begin : begin + at_once, 2 : 2 + 2 * self.rank]
            yield self._by_tree(rows) + np.array([[0], [begin]])

    def _by_tree(self, boxes: Numbers) -> Numbers:
        if self._tree is None:
            self._tree = BoxTree(np.ascontiguousarray(self.rows[:, 2 : 2 + 2 * self.rank]).reshape(-1), self.rank)
        return self._tree.pairs(np.ascontiguousarray(boxes).reshape(-1))

    def _shared(self, rows: Numbers, box: Bounds) -> tuple[Numbers, Numbers]:
        rank = self.rank
        sides = np.array(box, np.int64).reshape(rank, 2)
        return np.maximum(rows[:, 2 : 2 + rank], sides[:, 0]), np.minimum(rows[:, 2 + rank : 2 + 2 * rank], sides[:, 1])

    @property
    def filled(self) -> Pieces:
        """The pieces that have elements."""
        there = (self.starts < self.stops).all(axis=1)
        return self if there.all() else self.chosen(np.flatnonzero(there))

    def clipped(self, box: Bounds) -> Pieces:
        """Return the parts of pieces that are within a box."""
        if not len(self):
            return self
        rows = self.rows
        if len(rows) >= _TREE_FROM:
            rows = rows[self.meeting(box)]
            return Pieces(_cut(rows, self.rank, *self._shared(rows, box)), self.holders)
        low, high = self._shared(rows, box)
        there = (low < high).all(axis=1)
        return Pieces(_cut(rows[there], self.rank, low[there], high[there]), self.holders)

    def are_runs(self, itemsize: int) -> npt.NDArray[np.bool_]:
        """Return for each piece whether its elements lie one after the other, in C order."""
        extents = self.stops - self.starts
        found: npt.NDArray[np.bool_] = ((extents == 1) | (self.strides == dense_strides(extents, itemsize))).all(axis=1)
        return found

    def spans(self, itemsize: int) -> tuple[Numbers, Numbers]:
        """Return the first byte of each piece in its holder, and one past its last; strides are not negative."""
        reach: Numbers = ((self.stops - self.starts - 1) * self.strides).sum(axis=1)
        return self.offsets, self.offsets + reach + itemsize

    def _overlaps(
        self, other: Pieces, few: int = _FEW, at_once: int = _TARGETS
    ) -> Iterator[tuple[Pieces, Pieces, Numbers, Numbers]]:
        """Yield the pairs of `pairs` as two tables, with the starts and the stops of their common boxes."""
        for ours, theirs in self.pairs(other, few, at_once):
            source, target = self.chosen(ours), other.chosen(theirs)
            yield source, target, np.maximum(source.starts, target.starts), np.minimum(source.stops, target.stops)

    def shared(self, other: Pieces) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield, for pairs that share elements, the number of the holder here, and the number of these elements."""
        for source, _, low, high in self._overlaps(other):
            yield source.numbers, np.maximum(high - low, 0).prod(axis=1)

    def common(self, other: Pieces) -> Iterator[tuple[Pieces, Pieces]]:
        """Yield the parts that pieces here and others have in common, once as pieces here, once as others."""
        for source, target, low, high in self._overlaps(other):
            there = (low < high).all(axis=1)
            yield (
                Pieces(_cut(source.rows[there], self.rank, low[there], high[there]), self.holders),
                Pieces(_cut(target.rows[there], self.rank, low[there], high[there]), other.holders),
            )

    def runs_into(self, other: Pieces, itemsize: int, few: int = _FEW, at_once: int = _TARGETS) -> int:
        """Return the number of copies from these to others, each of bytes that are contiguous on both sides."""
        total = 0
        for source, target, low, high in self._overlaps(other, few, at_once):
            extents = high - low
            length = np.full(len(source), itemsize, np.int64)
            runs = (extents > 0).all(axis=1).astype(np.int64)
            joined = np.ones(len(source), np.bool_)
            for dim in reversed(range(self.rank)):
                extent = extents[:, dim]
                joined &= (extent <= 1) | ((source.strides[:, dim] == length) & (target.strides[:, dim] == length))
                length = np.where(joined, length * extent, length)
                runs = np.where(joined, runs, runs * extent)
            total += int(runs.sum())
        return total

    def taken(self, dim: int, runs: Runs) -> Pieces:
        """Return the parts of pieces that are in runs of a dim, moved to the new places of these runs."""
        if not len(self):
            return self
        most = max(_PAIRS // max(len(self), 1), 1)
        blocks = [self._taken(dim, runs[at : at + most]) for at in range(0, len(runs), most)]
        return Pieces.joined(blocks, self.rank)

    def _taken(self, dim: int, runs: Runs) -> Pieces:
        begins, ends = self.starts[:, dim], self.stops[:, dim]
        low = np.maximum(runs[:, :1], begins)
        high = np.minimum(runs[:, :1] + runs[:, 2:], ends)
        of, piece = np.nonzero(low < high)
        low, high = low[of, piece], high[of, piece]
        found = self.chosen(piece)
        shift = runs[of, 1] - runs[of, 0]
        found.rows[:, 1] += (low - begins[piece]) * found.strides[:, dim]
        found.starts[:, dim], found.stops[:, dim] = low + shift, high + shift
        return found

    def without(self, dim: int) -> Pieces:
        """Return the pieces without a dim, along which every box is the first element."""
        if not len(self):
            return self
        return Pieces(np.delete(self.rows, [2 + dim + side * self.rank for side in range(3)], 1), self.holders)

    def within(self, place: int) -> Pieces:
        """Return the pieces with an additional first dim, at a place in it."""
        if not len(self):
            return self
        # A model has tables by the ten thousand, and np.insert takes its time.
        rank = self.rank
        rows = np.empty((len(self), 5 + 3 * rank), np.int64)
        rows[:, :2] = self.rows[:, :2]
        for side, first in enumerate((place, place + 1, 0)):
            begin = 2 + side * (rank + 1)
            rows[:, begin] = first
            rows[:, begin + 1 : begin + 1 + rank] = self.rows[:, 2 + side * rank : 2 + (side + 1) * rank]
        return Pieces(rows, self.holders)

    def transposed(self, order: Sequence[int]) -> Pieces:
        """Return the pieces with the dims in another order."""
        if not len(self):
            return self
        columns = [2 + side * self.rank + dim for side in range(3) for dim in order]
        return Pieces(self.rows[:, [0, 1, *columns]], self.holders)


#: The table without pieces, of any number of dims.
NO_PIECES = Pieces(np.zeros((0, 2), np.int64))


def _rows_array(rows: list[list[int]], rank: int) -> Numbers:
    try:
        return np.array(rows, np.int64).reshape(len(rows), 2 + 3 * rank)
    except OverflowError:
        raise SizeOverflowError("a size, an offset or a stride of a piece is over 2**63 - 1") from None


def _cut(rows: Numbers, rank: int, low: Numbers, high: Numbers) -> Numbers:
    """Shrink the boxes of the rows to these bounds, in place, and return the rows."""
    rows[:, 1] += ((low - rows[:, 2 : 2 + rank]) * rows[:, 2 + 2 * rank :]).sum(axis=1)
    rows[:, 2 : 2 + rank], rows[:, 2 + rank : 2 + 2 * rank] = low, high
    return rows


def dense_strides(extents: Numbers, itemsize: int) -> Numbers:
    """Return the strides in bytes of boxes in C order, given their extents, int64 of shape (boxes, dims).

    >>> dense_strides(np.array([[2, 3, 4], [1, 1, 5]]), 2).tolist()
    [[24, 8, 2], [10, 10, 2]]
    """
    strides = np.full_like(extents, itemsize)
    for dim in reversed(range(extents.shape[1] - 1)):
        strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
    return strides


def repeats(pieces: Pieces) -> npt.NDArray[np.bool_]:
    """Return for each piece whether an earlier one has the same box.

    >>> repeats(Pieces.boxed(np.array([[[0, 2]], [[2, 4]], [[0, 2]]]))).tolist()
    [False, False, True]
    """
    if len(pieces) <= _FEW:
        boxes = [row.tobytes() for row in pieces.rows[:, 2 : 2 + 2 * pieces.rank]]
        return np.array([box in boxes[:at] for at, box in enumerate(boxes)], np.bool_)
    found = np.ones(len(pieces), np.bool_)
    if pieces.rank:
        found[np.unique(pieces.rows[:, 2 : 2 + 2 * pieces.rank], axis=0, return_index=True)[1]] = False
    else:
        found[:1] = False
    return found


def shared_box(first: Bounds, second: Bounds) -> Bounds:
    """Return the box that two boxes share; if they share no elements, it stops no later than it starts along a dim.

    >>> shared_box(((0, 4), (2, 9)), ((1, 6), (0, 3)))
    ((1, 4), (2, 3))
    """
    return tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(first, second, strict=True))


def within(box: Bounds, around: Bounds) -> tuple[Any, ...]:
    """Return the index of a box in an array that holds the box `around`.

    >>> within(((2, 4), (0, 3)), ((1, 6), (0, 3)))
    (slice(1, 3, None), slice(0, 3, None), Ellipsis)
    """
    # With an ellipsis, so that a box without dims is a view too.
    return (*(slice(a - start, b - start) for (a, b), (start, _) in zip(box, around, strict=True)), ...)
