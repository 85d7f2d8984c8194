"""Tensors that are put together from parts of stored ones: no element is read, only where each lies is worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._dtypes import Dtype
from ..._text import shown
from ...errors import LayoutError, SizeOverflowError
from ...partition import Partition
from .wanted import SourcePiece, Wanted

__all__ = ["Assembled", "Stretches"]

_LARGEST = 2**63 - 1
#: How many pairs of stretches and pieces are looked at together.
_PAIRS = 1 << 20

#: Stretches of a dim, int64 (stretches, 3): where each begins in the old dim, where in the new one, and its length.
Stretches = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Table:
    """Pieces of a tensor, one a row: boxes (pieces, dims, 2), bytes at which they begin, strides (pieces, dims)."""

    boxes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    holders: npt.NDArray[Any]

    @classmethod
    def of(cls, pieces: Sequence[SourcePiece], rank: int) -> _Table:
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
    def joined(cls, tables: Iterable[_Table], rank: int) -> _Table:
        found = [cls.of((), rank), *tables]
        return cls(
            np.concatenate([one.boxes for one in found]),
            np.concatenate([one.offsets for one in found]),
            np.concatenate([one.strides for one in found]),
            np.concatenate([one.holders for one in found]),
        )

    def pieces(self) -> list[SourcePiece]:
        rows = zip(self.boxes.tolist(), self.holders, self.offsets.tolist(), self.strides.tolist(), strict=True)
        return [SourcePiece(tuple(map(tuple, box)), holder, at, tuple(steps)) for box, holder, at, steps in rows]

    def taken(self, dim: int, stretches: Stretches) -> _Table:
        """What the stretches of a dim hold, where they are to be."""
        rows = max(_PAIRS // max(len(self.boxes), 1), 1)
        blocks = [self._taken(dim, stretches[at : at + rows]) for at in range(0, len(stretches), rows)]
        return _Table.joined(blocks, self.boxes.shape[1])

    def _taken(self, dim: int, stretches: Stretches) -> _Table:
        begins, ends = self.boxes[:, dim, 0], self.boxes[:, dim, 1]
        low = np.maximum(stretches[:, :1], begins)
        high = np.minimum(stretches[:, :1] + stretches[:, 2:], ends)
        of, piece = np.nonzero(low < high)
        low, high = low[of, piece], high[of, piece]
        boxes = self.boxes[piece].copy()
        shift = stretches[of, 1] - stretches[of, 0]
        boxes[:, dim, 0], boxes[:, dim, 1] = low + shift, high + shift
        steps = self.strides[piece]
        return _Table(boxes, self.offsets[piece] + (low - begins[piece]) * steps[:, dim], steps, self.holders[piece])

    def without(self, dim: int) -> _Table:
        """Without a dim, in which all boxes are the first element."""
        return _Table(np.delete(self.boxes, dim, 1), self.offsets, np.delete(self.strides, dim, 1), self.holders)

    def within(self, place: int) -> _Table:
        """With a first dim more, at a place in it."""
        boxes = np.insert(self.boxes, 0, 0, 1)
        boxes[:, 0] = place, place + 1
        return _Table(boxes, self.offsets, np.insert(self.strides, 0, 0, 1), self.holders)

    def transposed(self, order: Sequence[int]) -> _Table:
        """With the dims in another order."""
        return _Table(self.boxes[:, order], self.offsets, self.strides[:, order], self.holders)


#: Pieces and replicas.
_Tables = tuple[_Table, _Table]


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tensor of parts of stored ones.

    Attributes:
        origin: The name of a stored tensor that is in it, for messages.
        shape: Its shape.
        dtype: Its dtype.
        stored: The name of the stored tensor that it is, if it is one as it lies.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: Dtype
    _make: Callable[[], _Tables]
    stored: str | None = None

    @classmethod
    def of_stored(cls, name: str, shape: tuple[int, ...], dtype: Dtype, make: Callable[[], Wanted]) -> Assembled:
        """A stored tensor; `make` says where its pieces lie, and is called once, if they are needed."""
        kept: list[_Tables] = []

        def tables() -> _Tables:
            if not kept:
                wanted = make()
                kept.append((_Table.of(wanted.pieces, len(shape)), _Table.of(wanted.replicas, len(shape))))
            return kept[0]

        return cls(name, shape, dtype, tables, name)

    def wanted(self, name: str, partition: Partition | None) -> Wanted:
        """The tensor, to be written under a name."""
        pieces, replicas = self._make()
        identity = (
            *(array.tobytes() for array in (pieces.boxes, pieces.offsets, pieces.strides)),
            tuple(map(id, pieces.holders)),
            self.dtype.name,
            self.shape,
        )
        if 0 in self.shape:
            return Wanted(name, self.dtype, self.shape, [], (), partition, None)
        return Wanted(name, self.dtype, self.shape, pieces.pieces(), replicas.pieces(), partition, identity)

    def taken(self, dim: int, stretches: Stretches, size: int) -> Assembled:
        """The tensor whose dim has this size, and is these stretches of the old one."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._with(shape, lambda table: table.taken(dim, stretches))

    def unstacked(self, place: int) -> Assembled:
        """The tensor at a place in the first dim."""
        row = np.array([[place, 0, 1]], np.int64)
        return self._with(self.shape[1:], lambda table: table.taken(0, row).without(0))

    def transposed(self) -> Assembled:
        """The tensor with its last two dims swapped."""
        rank = len(self.shape)
        if rank < 2:
            raise LayoutError(f"tensor {shown(self.origin)} has {rank} dims, and cannot be transposed")
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._with(tuple(self.shape[dim] for dim in order), lambda table: table.transposed(order))

    def padded(self, dim: int, size: int) -> Assembled:
        """The tensor with zeros behind a dim's elements."""
        if size == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        box = tuple((self.shape[dim] if i == dim else 0, extent) for i, extent in enumerate(shape))
        piece = SourcePiece(box, _zero(self.dtype.bits // 8), 0, (0,) * len(shape))
        zeros = _Table.of([piece], len(shape))
        return Assembled(self.origin, shape, self.dtype, lambda: _padded(self._make(), zeros, len(shape)))

    def _with(self, shape: tuple[int, ...], change: Callable[[_Table], _Table]) -> Assembled:
        def tables() -> _Tables:
            pieces, replicas = self._make()
            return change(pieces), change(replicas)

        return Assembled(self.origin, shape, self.dtype, tables)

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
                _Table.joined([pieces.within(at) for at, (pieces, _) in enumerate(made)], len(shape)),
                _Table.joined([replicas.within(at) for at, (_, replicas) in enumerate(made)], len(shape)),
            )

        return Assembled(first.origin, shape, first.dtype, tables)

    @staticmethod
    def packed(dim: int, parts: Sequence[tuple[Assembled, Stretches]]) -> Assembled:
        """Tensors packed in a dim: of each part, where its stretches are to be.

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
        return _merged([part.taken(dim, stretches, size) for part, stretches in parts])


def _merged(tensors: Sequence[Assembled]) -> Assembled:
    """Tensors of one shape of which each has other boxes."""
    first = tensors[0]

    def tables() -> _Tables:
        made = [one._make() for one in tensors]
        rank = len(first.shape)
        return _Table.joined([one for one, _ in made], rank), _Table.joined([one for _, one in made], rank)

    return Assembled(first.origin, first.shape, first.dtype, tables)


def _padded(tables: _Tables, zeros: _Table, rank: int) -> _Tables:
    return _Table.joined([tables[0], zeros], rank), tables[1]


_ZEROS: dict[int, npt.NDArray[Any]] = {}


def _zero(itemsize: int) -> npt.NDArray[Any]:
    """One element of zero bytes, the same at each call, so that tied tensors stay tied when they are padded."""
    return _ZEROS.setdefault(itemsize, np.zeros(1, f"V{itemsize}"))
