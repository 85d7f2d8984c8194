"""Tensors assembled from parts of stored ones: a tree of operations, and the place of each element.

A tree reads nothing. `pieces_in` returns the boxes of files that make up a box of the tensor; trees that are equal
except for names have equal tables. If a whole table would have very many pieces of a few bytes, `is_scattered` is true,
and the tensor is better assembled box by box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .._dtypes import Dtype
from .._fork import cached_property
from .._text import counted, shown
from ..errors import LayoutError, SizeOverflowError
from ..partition import Partition
from ..pieces import NO_PIECES, Bounds, LocatedPiece, Pieces, Runs
from ..shared_tiling import SharedTiling
from .tables import Tables, Wanted

__all__ = ["MOST_RUNS", "SHORT", "Assembled", "Leaf", "zero_element"]

_LARGEST = 2**63 - 1
#: A tensor is scattered if it has at least this many runs, of fewer bytes on average than the second number.
MOST_RUNS, SHORT = 256, 512


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tensor made of parts of stored ones: a node of a tree, whose leaves are stored tensors and values.

    Attributes:
        origin: The name of one stored tensor in it, for messages.
        parts: The tensors that it is made of.
        is_scattered: Whether its pieces are too many and too short to be copied one by one.
        is_apart: Whether it is written separately, even if another tensor is made of the same pieces.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: Dtype
    parts: tuple[Assembled, ...] = ()
    is_scattered: bool = False
    is_apart: bool = False

    @property
    def what(self) -> Hashable:
        """The operation on the parts, as a value that is equal for equal operations."""
        raise NotImplementedError

    def _tables(self, box: Bounds | None) -> Tables:
        """Return the places of the elements of a box, or of all."""
        raise NotImplementedError

    @property
    def source(self) -> str | None:
        """The name of the stored tensor that has exactly its elements, in order; else `None`."""
        return None

    @property
    def stored(self) -> str | None:
        """The name of the stored tensor that can be written in its place; else `None`."""
        return None

    def tree(self, leaf: Callable[[Leaf], Hashable]) -> Hashable:
        """Return the operations and leaves as a value, equal for tensors made by equal operations of equal leaves."""
        return self.what, *(part.tree(leaf) for part in self.parts)

    def origins(self) -> list[str]:
        """Return the names of the stored tensors that it is made of."""
        found: dict[str, None] = {}
        self.tree(lambda leaf: found.setdefault(leaf.origin))
        return list(found)

    def pieces_in(self, box: Bounds) -> Tables:
        """Return the places of the elements of a box; the cost grows with the box's own pieces only."""
        return Tables(NO_PIECES) if any(a >= b for a, b in box) else self._tables(box)

    def tables(self) -> Tables:
        """Return the places of all elements."""
        return Tables(NO_PIECES) if 0 in self.shape else self._tables(None)

    def replicas(self) -> Pieces:
        """Further boxes, which store elements again; if nothing is stored twice, no table is made."""
        return self.tables().replicas if self.has_replicas else NO_PIECES

    @property
    def has_replicas(self) -> bool:
        """True if elements of the tensor may be stored twice."""
        return any(part.has_replicas for part in self.parts)

    @property
    def expected(self) -> int:
        """The approximate number of pieces in its table."""
        return sum(part.expected for part in self.parts)

    def wanted(self, name: str, partition: Partition | SharedTiling | None) -> Wanted:
        """Return it as a tensor to be written under a name."""
        tables = self.tables()
        identity = None if self.is_apart or 0 in self.shape else self.identity()
        return Wanted(name, self.dtype, self.shape, *tables, partition, identity)

    def identity(self) -> Hashable:
        """Return a value that is equal for tied tensors: made by the same operations of the same stored elements."""
        return self.tree(lambda leaf: leaf.place), self.dtype.name, self.shape

    def apart(self) -> Assembled:
        """Return the same tensor, never tied to another one."""
        return replace(self, is_apart=True)

    def taken(self, dim: int, runs: Runs, size: int) -> Assembled:
        """Return a tensor whose dim has this size, made of these runs of the old dim."""
        return _packed((*self.shape[:dim], size, *self.shape[dim + 1 :]), dim, [(self, runs)])

    def unpacked(self, dim: int, segments: Mapping[str, Runs]) -> dict[str, Assembled]:
        """Return the parts that are packed in a dim; the runs of a part have starts in the part and in the dim."""
        return {
            name: self.taken(dim, np.ascontiguousarray(runs[:, [1, 0, 2]]), int(runs[:, 2].sum()))
            for name, runs in segments.items()
        }

    def unstacked(self, place: int) -> Assembled:
        """Return the tensor at a position of the first dim."""
        return _Unstacked(self.origin, self.shape[1:], self.dtype, (self,), self.is_scattered, place=place)

    def transposed(self) -> Assembled:
        """Return the tensor with its last two dims swapped."""
        rank = len(self.shape)
        if rank < 2:
            raise LayoutError(f"tensor {shown(self.origin)} has {counted(rank, 'dim')}, so it cannot be transposed")
        order = (*range(rank - 2), rank - 1, rank - 2)
        shape = tuple(self.shape[dim] for dim in order)
        return _Transposed(self.origin, shape, self.dtype, (self,), self.is_scattered, order=order)

    def padded(self, dim: int, size: int) -> Assembled:
        """Return the tensor with zeros after a dim's elements, up to a size."""
        if size == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return _Padded(self.origin, shape, self.dtype, (self,), self.is_scattered, dim=dim)

    def repeated(self, others: Sequence[Assembled]) -> Assembled:
        """Return the tensor with others as replicas, which should have equal elements.

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
        return _Repeated(self.origin, self.shape, self.dtype, (self, *others), self.is_scattered, self.is_apart)

    @staticmethod
    def stacked(tensors: Sequence[Assembled]) -> Assembled:
        """Return tensors of one shape and dtype, stacked in a new first dim.

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
        scattered = any(one.is_scattered for one in tensors)
        return _Stacked(first.origin, (len(tensors), *first.shape), first.dtype, tuple(tensors), scattered)

    @staticmethod
    def packed(dim: int, parts: Sequence[tuple[Assembled, Runs]]) -> Assembled:
        """Return tensors packed in a dim; each part comes with the new places of its runs.

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


class Leaf(Assembled):
    """A tensor without parts."""

    @property
    def place(self) -> Hashable:
        """A value that is equal for two leaves with the same stored elements."""
        raise NotImplementedError

    def tree(self, leaf: Callable[[Leaf], Hashable]) -> Hashable:
        """Return the result of the function for this leaf."""
        return leaf(self)


@dataclass(frozen=True, eq=False)
class _PackedRuns(Assembled):
    """Runs of a dim of each part, packed in one dim, one part after the other or interleaved."""

    dim: int = field(kw_only=True)
    #: For each part where its runs begin in it, where in the dim, and their lengths.
    runs: tuple[Runs, ...] = field(kw_only=True)

    @property
    def what(self) -> Hashable:
        return "packed", self.dim, *(runs.tobytes() for runs in self.runs)

    @property
    def expected(self) -> int:
        """The approximate number of pieces: those of each part for each run, at most one per element."""
        count = sum(part.expected * len(each) for part, each in zip(self.parts, self.runs, strict=True))
        return min(count, math.prod(self.shape))

    def _tables(self, box: Bounds | None) -> Tables:
        made = []
        for part, every in zip(self.parts, self.runs, strict=True):
            runs, inner = every, box
            if box is not None:
                runs = _within(every, *box[self.dim])
                if not len(runs):
                    continue
                ends = runs[:, 0] + runs[:, 2]
                around = int(runs[:, 0].min()), int(ends.max())
                inner = (*box[: self.dim], around, *box[self.dim + 1 :])
            made.append(part._tables(inner).changed(partial(Pieces.taken, dim=self.dim, runs=runs)))
        return Tables.joined(made, len(self.shape))


@dataclass(frozen=True, eq=False)
class _Unstacked(Assembled):
    """The tensor at a position of its part's first dim."""

    place: int = field(kw_only=True)

    @property
    def what(self) -> Hashable:
        return "unstacked", self.place

    @cached_property
    def _whole(self) -> Tables:
        """Return the places of all elements of the part, worked out once for all its positions."""
        return self._made(tuple((0, size) for size in self.shape))

    def _tables(self, box: Bounds | None) -> Tables:
        return self._whole if box is None else self._made(box)

    def _made(self, box: Bounds) -> Tables:
        row = np.array([[self.place, 0, 1]], np.int64)
        tables = self.parts[0]._tables(((self.place, self.place + 1), *box))
        return tables.changed(lambda table: table.taken(0, row).without(0))


@dataclass(frozen=True, eq=False)
class _Transposed(Assembled):
    """A tensor with the dims of a part in another order."""

    order: tuple[int, ...] = field(kw_only=True)

    @property
    def what(self) -> Hashable:
        return "transposed", self.order

    def _tables(self, box: Bounds | None) -> Tables:
        inner = None
        if box is not None:
            sides = dict(zip(self.order, box, strict=True))
            inner = tuple(sides[dim] for dim in range(len(box)))
        return self.parts[0]._tables(inner).changed(lambda table: table.transposed(self.order))


@dataclass(frozen=True, eq=False)
class _Padded(Assembled):
    """A part with zeros after the elements of a dim."""

    dim: int = field(kw_only=True)

    @property
    def what(self) -> Hashable:
        return "padded", self.dim, self.shape[self.dim]

    def _tables(self, box: Bounds | None) -> Tables:
        (part,), rank = self.parts, len(self.shape)
        have = part.shape[self.dim]
        whole = tuple((0, extent) for extent in self.shape) if box is None else box
        begin, end = whole[self.dim]
        made = []
        if 0 not in part.shape and begin < have:
            inner = (*whole[: self.dim], (begin, min(end, have)), *whole[self.dim + 1 :])
            made.append(part._tables(None if box is None else inner))
        if have < end:
            rest = tuple((have if dim == self.dim else 0, extent) for dim, extent in enumerate(self.shape))
            zeros = Tables(Pieces.of([LocatedPiece(rest, zero_element(self.dtype.bits // 8), 0, (0,) * rank)], rank))
            made.append(zeros if box is None else zeros.clipped(box))
        return Tables.joined(made, rank)


@dataclass(frozen=True, eq=False)
class _Stacked(Assembled):
    """Parts of one shape, stacked in a first dim."""

    @property
    def what(self) -> Hashable:
        return "stacked"

    def _tables(self, box: Bounds | None) -> Tables:
        first, stop = (0, len(self.parts)) if box is None else box[0]
        inner = None if box is None else box[1:]
        made = [self.parts[at]._tables(inner).changed(partial(Pieces.within, place=at)) for at in range(first, stop)]
        return Tables.joined(made, len(self.shape))


@dataclass(frozen=True, eq=False)
class _Repeated(Assembled):
    """The first part, with the others as its replicas."""

    @property
    def what(self) -> Hashable:
        return self.parts[0].what

    @property
    def source(self) -> str | None:
        return self.parts[0].source

    @property
    def has_replicas(self) -> bool:
        return True

    @property
    def expected(self) -> int:
        return self.parts[0].expected

    def tree(self, leaf: Callable[[Leaf], Hashable]) -> Hashable:
        """Return the first part's tree: the replicas do not change the elements."""
        return self.parts[0].tree(leaf)

    def _tables(self, box: Bounds | None) -> Tables:
        (pieces, replicas), *others = (part._tables(box) for part in self.parts)
        again = [table for tables in others for table in tables]
        return Tables(pieces, Pieces.joined([replicas, *again], len(self.shape)))


def _packed(shape: tuple[int, ...], dim: int, parts: Sequence[tuple[Assembled, Runs]]) -> Assembled:
    """Return a tensor of this shape, in which each part has other runs of a dim."""
    first = parts[0][0]
    count = sum(len(runs) for _, runs in parts)
    run = math.prod(shape[dim:]) * (first.dtype.bits // 8)
    scattered = count > MOST_RUNS and run < count * SHORT
    scattered = scattered or any(part.is_scattered for part, _ in parts)
    tensors, runs = (tuple(each) for each in zip(*parts, strict=True))
    return _PackedRuns(first.origin, shape, first.dtype, tensors, scattered, dim=dim, runs=runs)


def _within(runs: Runs, low: int, high: int) -> Runs:
    """Return the parts of runs whose new places are in a range."""
    begin = np.maximum(runs[:, 1], low)
    lengths = np.minimum(runs[:, 1] + runs[:, 2], high) - begin
    found: Runs = np.stack([runs[:, 0] + begin - runs[:, 1], begin, lengths], 1)[lengths > 0]
    return found


_ZEROS: dict[int, npt.NDArray[Any]] = {}


def zero_element(itemsize: int) -> npt.NDArray[Any]:
    """Return an array with one element of zero bytes, always the same object, so that padded tied tensors stay tied."""
    return _ZEROS.setdefault(itemsize, np.zeros(1, f"V{itemsize}"))
