"""Tensors put together from parts of stored ones: the place of each element is worked out, and none is read.

If that would make very many pieces of a few bytes, `is_scattered` is true: then `read` puts boxes of the tensor
together in memory instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._dtypes import Dtype
from ..._text import shown
from ...errors import LayoutError, SizeOverflowError
from ...partition import Partition
from ..boxes import read_piece
from ..files import Holder
from ..pieces import NO_PIECES, Bounds, Piece, Pieces, Stretches, within

__all__ = ["MOST_STRETCHES", "SHORT", "Assembled", "Wanted", "zero_element"]

_LARGEST = 2**63 - 1
#: With at least this many stretches, of fewer bytes than this on average, an order is too fine to copy piece by piece.
MOST_STRETCHES, SHORT = 256, 512

_Array = npt.NDArray[Any]


#: Pieces and replicas.
_Tables = tuple[Pieces, Pieces]


@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor to write.

    Attributes:
        name: Its name in the new checkpoint.
        dtype: Its dtype.
        shape: Its shape.
        pieces: What its elements come from: boxes that tile it.
        replicas: Further boxes, which should hold the same as some of `pieces`.
        partition: How it is cut; `None` if it is written whole.
        identity: Equal for two tensors that share their elements; `None` if that is not known.
        is_object: Whether it is not a tensor, but a value in a PyTorch container, with these bytes.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    pieces: Pieces
    replicas: Pieces = NO_PIECES
    partition: Partition | None = None
    identity: Any = None
    is_object: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        size = self.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tensor made of parts of stored ones.

    Attributes:
        origin: The name of a stored tensor that is in it, for messages.
        shape: Its shape.
        dtype: Its dtype.
        stored: The name of the stored tensor that it is, if it is an unchanged one.
        is_scattered: Whether its pieces are too many and too short to be copied one by one.
        is_apart: Whether it is written by itself, though another tensor is made of the same pieces.
        recipe: How it is made of stored tensors: the name of one, or a tuple of what is done and the recipes of what it
            is done to. Tensors whose recipes differ in names only have pieces that do.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: Dtype
    _make: Callable[[], _Tables]
    _read: Callable[[Bounds], _Array]
    stored: str | None = None
    is_scattered: bool = False
    is_apart: bool = False
    recipe: Any = ""

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
                kept.append((wanted.pieces, wanted.replicas))
            return kept[0]

        return cls(name, shape, dtype, tables, lambda box: _read(tables()[0], box, dtype.bits // 8), name, recipe=name)

    @classmethod
    def of_values(cls, origin: str, values: _Array, dtype: Dtype) -> Assembled:
        """Values in memory, a few of them; the same at each call, so that tied tensors stay tied."""
        kept = _VALUES.setdefault((values.tobytes(), values.shape, dtype.name), np.ascontiguousarray(values))
        as_bytes = kept.view(f"V{dtype.bits // 8}")
        box = tuple((0, size) for size in values.shape)
        table = Pieces.of([Piece(box, as_bytes, 0, as_bytes.strides)], len(box))

        def read(box: Bounds) -> _Array:
            return as_bytes[tuple(slice(*side) for side in box)]

        recipe = (("values", kept.tobytes(), kept.shape, dtype.name),)
        return cls(origin, values.shape, dtype, lambda: (table, NO_PIECES), read, recipe=recipe)

    def read(self, box: Bounds) -> _Array:
        """Put a box of the tensor together in memory; its elements are bytes, whatever the dtype.

        Raises:
            ParseError, OSError: as for `StoredTensor.read`.
        """
        return self._read(box)

    def wanted(self, name: str, partition: Partition | None) -> Wanted:
        """The tensor, to be written under a name."""
        if 0 in self.shape:
            return Wanted(name, self.dtype, self.shape, NO_PIECES, NO_PIECES, partition, None)
        pieces, replicas = self._make()
        identity = None if self.is_apart else self._identity(pieces)
        return Wanted(name, self.dtype, self.shape, pieces, replicas, partition, identity)

    def identity(self) -> Any:
        """Equal for tied tensors, which are made of the same pieces in the same way."""
        return self._identity(self._make()[0])

    def _identity(self, pieces: Pieces) -> Any:
        return pieces.identity, self.dtype.name, self.shape

    def apart(self) -> Assembled:
        """The tensor, never tied to another one."""
        return replace(self, stored=None, is_apart=True)

    def replicas(self) -> Pieces:
        """Further boxes, which repeat what others hold."""
        return NO_PIECES if 0 in self.shape else self._make()[1]

    def taken(self, dim: int, stretches: Stretches, size: int) -> Assembled:
        """The tensor with a dim of this size, made of these stretches of the old one."""
        return _packed((*self.shape[:dim], size, *self.shape[dim + 1 :]), dim, [(self, stretches)])

    def unpacked(self, dim: int, segments: Mapping[str, Stretches]) -> dict[str, Assembled]:
        """The parts that are packed in a dim, each of stretches of it: where they begin in it, and in the dim."""
        return {
            name: self.taken(dim, np.ascontiguousarray(stretches[:, [1, 0, 2]]), int(stretches[:, 2].sum()))
            for name, stretches in segments.items()
        }

    def unstacked(self, place: int) -> Assembled:
        """The tensor at a place in the first dim."""
        row = np.array([[place, 0, 1]], np.int64)
        shape = self.shape[1:]
        return self.changed(
            shape,
            lambda table: table.taken(0, row).without(0),
            lambda box: self.read(((place, place + 1), *box))[0],
            ("unstacked", place),
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
            ("transposed",),
        )

    def padded(self, dim: int, size: int) -> Assembled:
        """The tensor with zeros after a dim's elements."""
        have = self.shape[dim]
        if size == have:
            return self
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        box = tuple((have if i == dim else 0, extent) for i, extent in enumerate(shape))
        zeros = Pieces.of([Piece(box, zero_element(self.dtype.bits // 8), 0, (0,) * len(shape))], len(shape))

        def tables() -> _Tables:
            pieces, replicas = self._make()
            return Pieces.joined([pieces, zeros], len(shape)), replicas

        def read(box: Bounds) -> _Array:
            begin, end = (min(side, have) for side in box[dim])
            there = self.read((*box[:dim], (begin, end), *box[dim + 1 :]))
            out = np.zeros([stop - start for start, stop in box], there.dtype)
            out[tuple(map(slice, there.shape))] = there
            return out

        recipe = (("padded", dim, size), self.recipe)
        return Assembled(self.origin, shape, self.dtype, tables, read, None, self.is_scattered, recipe=recipe)

    def changed(
        self,
        shape: tuple[int, ...],
        change: Callable[[Pieces], Pieces],
        read: Callable[[Bounds], _Array],
        what: tuple[Any, ...],
    ) -> Assembled:
        """The tensor in another form, whose pieces `change` gives and whose boxes `read`; `what` names the change."""

        def tables() -> _Tables:
            pieces, replicas = self._make()
            return change(pieces) if len(pieces) else pieces, change(replicas) if len(replicas) else NO_PIECES

        recipe = (what, self.recipe)
        return Assembled(self.origin, shape, self.dtype, tables, read, None, self.is_scattered, recipe=recipe)

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
            return pieces, Pieces.joined([replicas, *more], len(self.shape))

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
                Pieces.joined([pieces.within(at) for at, (pieces, _) in enumerate(made)], len(shape)),
                Pieces.joined([replicas.within(at) for at, (_, replicas) in enumerate(made)], len(shape)),
            )

        def read(box: Bounds) -> _Array:
            return np.stack([one.read(box[1:]) for one in tensors[slice(*box[0])]])

        scattered = any(one.is_scattered for one in tensors)
        recipe = (("stacked",), *(one.recipe for one in tensors))
        return Assembled(first.origin, shape, first.dtype, tables, read, None, scattered, recipe=recipe)

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
            Pieces.joined([pieces.taken(dim, stretches) for (pieces, _), stretches in made], len(shape)),
            Pieces.joined([replicas.taken(dim, stretches) for (_, replicas), stretches in made], len(shape)),
        )

    def read(box: Bounds) -> _Array:
        out = np.zeros([stop - start for start, stop in box], f"V{first.dtype.bits // 8}")
        for part, stretches in parts:
            _place(out, box, dim, part, stretches)
        return out

    count = sum(len(stretches) for _, stretches in parts)
    run = math.prod(shape[dim:]) * (first.dtype.bits // 8)
    scattered = count > MOST_STRETCHES and run < count * SHORT
    scattered = scattered or any(part.is_scattered for part, _ in parts)
    what = ("packed", dim, *(stretches.tobytes() for _, stretches in parts))
    recipe = (what, *(part.recipe for part, _ in parts))
    return Assembled(first.origin, shape, first.dtype, tables, read, None, scattered, recipe=recipe)


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


def _read(pieces: Pieces, box: Bounds, itemsize: int) -> _Array:
    """The elements of a box, as bytes of this size."""
    out = np.zeros([stop - start for start, stop in box], f"V{itemsize}")
    for part in pieces.clipped(box):
        if isinstance(part.holder, Holder):
            read_piece(part, (0,) * len(box), out[within(part.box, box)])
            part.holder.check()
    return out


_ZEROS: dict[int, npt.NDArray[Any]] = {}
#: Few and short: the shapes of weights.
_VALUES: dict[tuple[bytes, tuple[int, ...], str], _Array] = {}


def zero_element(itemsize: int) -> npt.NDArray[Any]:
    """One element of zero bytes, the same at each call, so that tied tensors stay tied when they are padded."""
    return _ZEROS.setdefault(itemsize, np.zeros(1, f"V{itemsize}"))
