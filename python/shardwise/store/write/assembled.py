"""Tensors put together from parts of stored ones: the place of each element is worked out, and none is read.

If that would make very many pieces of a few bytes, `is_scattered` is true: then `read` puts boxes of the tensor
together in memory instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._dtypes import Dtype
from ..._text import shown
from ...errors import LayoutError, SizeOverflowError
from ...partition import Partition
from ..boxes import Bounds, Extent, read_extent
from ..files import DataFile
from .wanted import SourcePiece, Wanted

__all__ = ["MOST_STRETCHES", "SHORT", "Assembled", "Stretches", "Table"]

_LARGEST = 2**63 - 1
#: With at least this many stretches, of fewer bytes than this on average, an order is too fine to copy piece by piece.
MOST_STRETCHES, SHORT = 256, 512
#: The number of pairs of stretches and pieces that are looked at together.
_PAIRS = 1 << 20

_Array = npt.NDArray[Any]
#: Stretches of a dim, int64 (stretches, 3): where each begins in the old dim, where in the new one, and its length.
Stretches = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Pieces of a tensor, one a row: boxes (pieces, dims, 2), bytes at which they begin, strides (pieces, dims)."""

    boxes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    holders: npt.NDArray[Any]

    @classmethod
    def of(cls, pieces: Sequence[SourcePiece], rank: int) -> Table:
        """The table of these pieces."""
        holders = np.empty(len(pieces), object)
        for row, piece in enumerate(pieces):
            holders[row] = piece.holder
        return cls(
            np.array([piece.box for piece in pieces], np.int64).reshape(len(pieces), rank, 2),
            np.array([piece.offset for piece in pieces], np.int64),
            np.array([piece.strides for piece in pieces], np.int64).reshape(len(pieces), rank),
            holders,
        )

    @classmethod
    def joined(cls, tables: Iterable[Table], rank: int) -> Table:
        """The rows of several tables."""
        found = [one for one in tables if len(one.offsets)]
        if len(found) <= 1:
            return found[0] if found else cls.of((), rank)
        return cls(
            np.concatenate([one.boxes for one in found]),
            np.concatenate([one.offsets for one in found]),
            np.concatenate([one.strides for one in found]),
            np.concatenate([one.holders for one in found]),
        )

    def pieces(self) -> list[SourcePiece]:
        """The rows as pieces."""
        rows = zip(self.boxes.tolist(), self.holders, self.offsets.tolist(), self.strides.tolist(), strict=True)
        return [SourcePiece(tuple(map(tuple, box)), holder, at, tuple(steps)) for box, holder, at, steps in rows]

    def taken(self, dim: int, stretches: Stretches) -> Table:
        """What the stretches of a dim hold, at their new places."""
        if not len(self.offsets):
            return self
        rows = max(_PAIRS // max(len(self.boxes), 1), 1)
        blocks = [self._taken(dim, stretches[at : at + rows]) for at in range(0, len(stretches), rows)]
        return Table.joined(blocks, self.boxes.shape[1])

    def _taken(self, dim: int, stretches: Stretches) -> Table:
        begins, ends = self.boxes[:, dim, 0], self.boxes[:, dim, 1]
        low = np.maximum(stretches[:, :1], begins)
        high = np.minimum(stretches[:, :1] + stretches[:, 2:], ends)
        of, piece = np.nonzero(low < high)
        low, high = low[of, piece], high[of, piece]
        boxes = self.boxes[piece].copy()
        shift = stretches[of, 1] - stretches[of, 0]
        boxes[:, dim, 0], boxes[:, dim, 1] = low + shift, high + shift
        steps = self.strides[piece]
        return Table(boxes, self.offsets[piece] + (low - begins[piece]) * steps[:, dim], steps, self.holders[piece])

    def without(self, dim: int) -> Table:
        """Without a dim, in which all boxes are the first element."""
        return Table(np.delete(self.boxes, dim, 1), self.offsets, np.delete(self.strides, dim, 1), self.holders)

    def within(self, place: int) -> Table:
        """With an additional first dim, at a place in it."""
        # A model has tables by the ten thousand, and np.insert takes its time.
        count, rank, _ = self.boxes.shape
        boxes, strides = np.empty((count, rank + 1, 2), np.int64), np.zeros((count, rank + 1), np.int64)
        boxes[:, 0], boxes[:, 1:], strides[:, 1:] = (place, place + 1), self.boxes, self.strides
        return Table(boxes, self.offsets, strides, self.holders)

    def read(self, box: Bounds, itemsize: int) -> _Array:
        """The elements of a box, as bytes of this size."""
        out = np.zeros([stop - start for start, stop in box], f"V{itemsize}")
        wanted = np.array(box, np.int64).reshape(len(box), 2)
        low, high = np.maximum(self.boxes[..., 0], wanted[:, 0]), np.minimum(self.boxes[..., 1], wanted[:, 1])
        for row in np.flatnonzero((low < high).all(axis=1)).tolist():
            begins, ends = (low[row] - wanted[:, 0]).tolist(), (high[row] - wanted[:, 0]).tolist()
            # With an ellipsis, so that a box without dims is a view too.
            region: tuple[Any, ...] = (*map(slice, begins, ends), ...)
            part = out[region]
            inner = (low[row] - self.boxes[row, :, 0]).tolist()
            at, strides, holder = int(self.offsets[row]), tuple(self.strides[row].tolist()), self.holders[row]
            if isinstance(holder, DataFile):
                read_extent(Extent(holder, at, strides), inner, part)
                holder.check()
        return out

    def transposed(self, order: Sequence[int]) -> Table:
        """With the dims in another order."""
        return Table(self.boxes[:, order], self.offsets, self.strides[:, order], self.holders)


#: Pieces and replicas.
_Tables = tuple[Table, Table]


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tensor made of parts of stored ones.

    Attributes:
        origin: The name of a stored tensor that is in it, for messages.
        shape: Its shape.
        dtype: Its dtype.
        stored: The name of the stored tensor that it is, if it is an unchanged one.
        is_scattered: Whether its pieces are too many and too short to be copied one by one.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: Dtype
    _make: Callable[[], _Tables]
    _read: Callable[[Bounds], _Array]
    stored: str | None = None
    is_scattered: bool = False

    @classmethod
    def of_stored(cls, name: str, shape: tuple[int, ...], dtype: Dtype, make: Callable[[], Wanted]) -> Assembled:
        """A stored tensor; `make` gives its pieces, and is called once, if they are needed."""
        kept: list[_Tables] = []

        def tables() -> _Tables:
            if not kept:
                if dtype.bits % 8:
                    raise TypeError(
                        f"tensor {shown(name)} is {dtype.name}, {dtype.bits} bits an element; packed elements cannot "
                        "be rewritten"
                    )
                wanted = make()
                kept.append((Table.of(wanted.pieces, len(shape)), Table.of(wanted.replicas, len(shape))))
            return kept[0]

        return cls(name, shape, dtype, tables, lambda box: tables()[0].read(box, dtype.bits // 8), name)

    def read(self, box: Bounds) -> _Array:
        """Put a box of the tensor together in memory; its elements are bytes, whatever the dtype.

        Raises:
            ParseError, OSError: as for `StoredTensor.read`.
        """
        return self._read(box)

    def wanted(self, name: str, partition: Partition | None) -> Wanted:
        """The tensor, to be written under a name."""
        if 0 in self.shape:
            return Wanted(name, self.dtype, self.shape, [], (), partition, None)
        pieces = self._make()[0].pieces()
        return Wanted(name, self.dtype, self.shape, pieces, self.replicas(), partition, self.identity())

    def identity(self) -> Any:
        """Equal for tied tensors, which are made of the same pieces in the same way."""
        pieces, _ = self._make()
        holders = np.fromiter(map(id, pieces.holders), np.uint64, len(pieces.holders))
        digest = hashlib.sha256()
        for array in (pieces.boxes, pieces.offsets, pieces.strides, holders):
            digest.update(array.tobytes())
        return digest.digest(), self.dtype.name, self.shape

    def replicas(self) -> list[SourcePiece]:
        """Further boxes, which repeat what others hold."""
        return [] if 0 in self.shape else self._make()[1].pieces()

    def taken(self, dim: int, stretches: Stretches, size: int) -> Assembled:
        """The tensor with a dim of this size, made of these stretches of the old one."""
        return _packed((*self.shape[:dim], size, *self.shape[dim + 1 :]), dim, [(self, stretches)])

    def unstacked(self, place: int) -> Assembled:
        """The tensor at a place in the first dim."""
        row = np.array([[place, 0, 1]], np.int64)
        shape = self.shape[1:]
        return self.changed(
            shape, lambda table: table.taken(0, row).without(0), lambda box: self.read(((place, place + 1), *box))[0]
        )

    def transposed(self) -> Assembled:
        """The tensor with its last two dims swapped."""
        rank = len(self.shape)
        if rank < 2:
            raise LayoutError(f"tensor {shown(self.origin)} has {rank} dims, so it cannot be transposed")
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self.changed(
            tuple(self.shape[dim] for dim in order),
            lambda table: table.transposed(order),
            lambda box: self.read(tuple(box[dim] for dim in order)).transpose(order),
        )

    def padded(self, dim: int, size: int) -> Assembled:
        """The tensor with zeros after a dim's elements."""
        have = self.shape[dim]
        if size == have:
            return self
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        box = tuple((have if i == dim else 0, extent) for i, extent in enumerate(shape))
        piece = SourcePiece(box, _zero(self.dtype.bits // 8), 0, (0,) * len(shape))
        zeros = Table.of([piece], len(shape))

        def tables() -> _Tables:
            pieces, replicas = self._make()
            return Table.joined([pieces, zeros], len(shape)), replicas

        def read(box: Bounds) -> _Array:
            begin, end = (min(side, have) for side in box[dim])
            there = self.read((*box[:dim], (begin, end), *box[dim + 1 :]))
            out = np.zeros([stop - start for start, stop in box], there.dtype)
            out[tuple(map(slice, there.shape))] = there
            return out

        return Assembled(self.origin, shape, self.dtype, tables, read, None, self.is_scattered)

    def changed(
        self, shape: tuple[int, ...], change: Callable[[Table], Table], read: Callable[[Bounds], _Array]
    ) -> Assembled:
        """The tensor in another form, whose pieces `change` gives and whose boxes `read`."""

        def tables() -> _Tables:
            pieces, replicas = self._make()
            return change(pieces), change(replicas)

        return Assembled(self.origin, shape, self.dtype, tables, read, None, self.is_scattered)

    def marked(self, is_scattered: bool) -> Assembled:
        """The tensor, also scattered if this is true."""
        return replace(self, is_scattered=self.is_scattered or is_scattered)

    def kept(self) -> Assembled:
        """The tensor, whose pieces are worked out once, for several that are made of it."""
        made: list[_Tables] = []

        def tables() -> _Tables:
            if not made:
                made.append(self._make())
            return made[0]

        return replace(self, _make=tables)

    def repeated(self, others: Sequence[Assembled]) -> Assembled:
        """The tensor, of which others are stored again, and should hold the same.

        Raises:
            LayoutError: if one is of another shape or dtype.
        """
        for other in others:
            if (other.shape, other.dtype) != (self.shape, self.dtype):
                raise LayoutError(
                    f"tensors {shown(self.origin)} and {shown(other.origin)} should be the same: one is "
                    f"{self.dtype.name} {self.shape}, the other {other.dtype.name} {other.shape}"
                )
        if not others:
            return self

        def tables() -> _Tables:
            pieces, replicas = self._make()
            more = [table for other in others for table in other._make()]
            return pieces, Table.joined([replicas, *more], len(self.shape))

        return replace(self, _make=tables, stored=None)

    @staticmethod
    def stacked(tensors: Sequence[Assembled]) -> Assembled:
        """Tensors of one shape and dtype, stacked in a first dim.

        Raises:
            LayoutError: if their shapes or dtypes differ.
        """
        first = tensors[0]
        for other in tensors:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise LayoutError(
                    f"tensors {shown(first.origin)} and {shown(other.origin)} cannot be stacked: one is "
                    f"{first.dtype.name} {first.shape}, the other {other.dtype.name} {other.shape}"
                )
        shape = (len(tensors), *first.shape)

        def tables() -> _Tables:
            made = [one._make() for one in tensors]
            return (
                Table.joined([pieces.within(at) for at, (pieces, _) in enumerate(made)], len(shape)),
                Table.joined([replicas.within(at) for at, (_, replicas) in enumerate(made)], len(shape)),
            )

        def read(box: Bounds) -> _Array:
            return np.stack([one.read(box[1:]) for one in tensors[slice(*box[0])]])

        scattered = any(one.is_scattered for one in tensors)
        return Assembled(first.origin, shape, first.dtype, tables, read, None, scattered)

    @staticmethod
    def packed(dim: int, parts: Sequence[tuple[Assembled, Stretches]]) -> Assembled:
        """Tensors packed in a dim: for each part, the new places of its stretches.

        Raises:
            LayoutError: if they differ in another dim, or in dtype.
            SizeOverflowError: if the dim is over 2**63 - 1.
        """
        first = parts[0][0]
        size = sum(part.shape[dim] for part, _ in parts)
        if size > _LARGEST:
            raise SizeOverflowError(f"dim {dim} would have {shown(size)} elements, over the limit of {_LARGEST}")
        shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
        for part, _ in parts:
            if part.dtype != first.dtype or (*part.shape[:dim], size, *part.shape[dim + 1 :]) != shape:
                raise LayoutError(
                    f"tensors {shown(first.origin)} and {shown(part.origin)} cannot be packed in dim {dim}: one is "
                    f"{first.dtype.name} {first.shape}, the other {part.dtype.name} {part.shape}"
                )
        return _packed(shape, dim, parts)


def _packed(shape: tuple[int, ...], dim: int, parts: Sequence[tuple[Assembled, Stretches]]) -> Assembled:
    """A tensor of which each part has other stretches of a dim."""
    first = parts[0][0]

    def tables() -> _Tables:
        made = [(part._make(), stretches) for part, stretches in parts]
        return (
            Table.joined([pieces.taken(dim, stretches) for (pieces, _), stretches in made], len(shape)),
            Table.joined([replicas.taken(dim, stretches) for (_, replicas), stretches in made], len(shape)),
        )

    def read(box: Bounds) -> _Array:
        out = np.zeros([stop - start for start, stop in box], f"V{first.dtype.bits // 8}")
        for part, stretches in parts:
            _place(out, box, dim, part, stretches)
        return out

    count = sum(len(stretches) for _, stretches in parts)
    run = math.prod(shape[dim:]) * (first.dtype.bits // 8)
    scattered = count > MOST_STRETCHES and run < count * SHORT
    return Assembled(
        first.origin, shape, first.dtype, tables, read, None, scattered or any(part.is_scattered for part, _ in parts)
    )


def _place(out: _Array, box: Bounds, dim: int, part: Assembled, stretches: Stretches) -> None:
    """Put what a part has of a box at its new place."""
    low = np.maximum(stretches[:, 1], box[dim][0])
    lengths = np.minimum(stretches[:, 1] + stretches[:, 2], box[dim][1]) - low
    there = lengths > 0
    if not there.any():
        return
    low, lengths, shift = low[there], lengths[there], (stretches[:, 0] - stretches[:, 1])[there]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    to = np.repeat(low, lengths) + within
    of = to + np.repeat(shift, lengths)
    begin, end = int(of.min()), int(of.max()) + 1
    values = part.read((*box[:dim], (begin, end), *box[dim + 1 :]))
    into: tuple[Any, ...] = (slice(None),) * dim + (to - box[dim][0],)
    out[into] = values[(slice(None),) * dim + (of - begin,)]


_ZEROS: dict[int, npt.NDArray[Any]] = {}


def _zero(itemsize: int) -> npt.NDArray[Any]:
    """One element of zero bytes, the same at each call, so that tied tensors stay tied when they are padded."""
    return _ZEROS.setdefault(itemsize, np.zeros(1, f"V{itemsize}"))
