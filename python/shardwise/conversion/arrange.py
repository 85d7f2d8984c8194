"""Tensors with another arrangement of their dims: split, permuted, merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..pieces import Bounds, Pieces
from .assembled import MOST_RUNS, SHORT, Assembled
from .tables import Tables

__all__ = ["arranged"]

#: The most boxes of a tensor that are copied one by one.
_MOST_BOXES = 1 << 20
#: For a part with very many pieces: a box is looked up as one surrounding box, instead of row by row, if that has at
#: most this many times its elements.
_MOST_OVER = 4


def arranged(tensor: Assembled, split: Sequence[Sequence[int]], merged: Sequence[Sequence[int]]) -> Assembled:
    """Return a tensor with each of its dims split into atoms, which are merged to new dims.

    Args:
        tensor: The tensor whose dims are split.
        split: For each dim the sizes of its atoms, major first; their product is the dim's size.
        merged: For each new dim the numbers of its atoms, major first. Atoms in no dim have size 1.

    A dim is split, and dims are merged, as in a C-order reshape.
    """
    sizes = [size for group in split for size in group]
    shape = tuple(math.prod(sizes[atom] for atom in group) for group in merged)
    # Compare the groups, not only their count: a dim split into none with a dim split into two has the right count.
    if all(len(group) == 1 for group in split) and list(map(list, merged)) == [[dim] for dim in range(len(split))]:
        return tensor
    boxes, nbytes = _boxes(sizes, merged), math.prod(shape) * (tensor.dtype.bits // 8)
    scattered = boxes > MOST_RUNS and (nbytes < boxes * SHORT or boxes > _MOST_BOXES)
    return _Arranged(
        tensor.origin, shape, tensor.dtype, (tensor,), tensor.is_scattered or scattered,
        split=tuple(map(tuple, split)), merged=tuple(map(tuple, merged)),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Arranged(Assembled):
    """A tensor whose dims are those of a part, split into atoms, permuted and merged."""

    #: For each dim of the part, the sizes of the atoms that it is split into.
    split: tuple[tuple[int, ...], ...] = field(kw_only=True)
    #: For each new dim, the numbers of the atoms that it is merged of.
    merged: tuple[tuple[int, ...], ...] = field(kw_only=True)

    @property
    def what(self) -> Hashable:
        return "arranged", self.split, self.merged

    @property
    def expected(self) -> int:
        """A piece of the part for each box that one piece becomes; never more than there are elements."""
        return min(self.parts[0].expected * _boxes(self._sizes, self.merged), math.prod(self.shape))

    @property
    def _sizes(self) -> list[int]:
        return [size for group in self.split for size in group]

    def _tables(self, box: Bounds | None) -> Tables:
        (part,) = self.parts
        if box is None:
            return part._tables(None).changed(lambda table: self._changed(table, None))
        sizes, made = self._sizes, list[Tables]()
        order = [atom for group in self.merged for atom in group]
        ranges = [
            list(_rectangles([sizes[atom] for atom in group], *side))
            for group, side in zip(self.merged, box, strict=True)
        ]
        # A box is a few boxes of atoms: up to three in each atom of a dim but the last.
        for chosen in itertools.product(*ranges):
            of = [(0, 1)] * len(sizes)
            for atom, bounds in zip(order, itertools.chain.from_iterable(chosen), strict=True):
                of[atom] = bounds
            made += self._in_atoms(of)
        return Tables.joined(made, len(self.shape))

    def _in_atoms(self, of: Sequence[tuple[int, int]]) -> Iterator[Tables]:
        """Yield the places of the elements of a box, given in atoms."""
        (part,), at = self.parts, 0
        around = []
        for sizes in self.split:
            sides = of[at : at + len(sizes)]
            at += len(sizes)
            first = last = 0
            for size, (start, stop) in zip(sizes, sides, strict=True):
                first, last = first * size + start, last * size + stop - 1
            around.append((first, last + 1))
        wanted = [stop - start for start, stop in of]
        over = math.prod(stop - start for start, stop in around) > _MOST_OVER * math.prod(wanted)
        if not (over and part.is_scattered):
            yield part._tables(tuple(around)).changed(lambda table: self._changed(table, of))
            return
        # The outermost atom of which there is more than one place.
        dim = next(dim for dim, size in enumerate(wanted) if size > 1)
        for row in range(*of[dim]):
            yield from self._in_atoms([*of[:dim], (row, row + 1), *of[dim + 1 :]])

    def _changed(self, table: Pieces, of: Sequence[tuple[int, int]] | None) -> Pieces:
        """Return a table of the part as one of the tensor; with `of`, only the elements in this box of atoms.

        Dims are split before they are merged, and unneeded boxes are removed between the two: only merging turns one
        box into many.
        """
        sizes, split = self._sizes, self.split
        order = [atom for group in self.merged for atom in group]
        for dim in reversed(range(len(split))):
            for place in range(len(split[dim]) - 1):
                table = _split(table, dim + place, math.prod(split[dim][place + 1 :]))
            if not split[dim]:
                table = table.without(dim)
        if of is not None:
            table = table.clipped(tuple(of))
        table = table.transposed([*order, *(atom for atom in range(len(sizes)) if atom not in order)])
        if not len(table):
            return table
        while table.rank > len(order):
            table = table.without(len(order))
        for at, group in enumerate(self.merged):
            if not group:
                table = _with_one(table, at)
            for count in range(1, len(group)):
                # The last two first, so that the inner one is as large as possible.
                inner = math.prod(sizes[atom] for atom in group[-count:])
                table = _merged(table, at + len(group) - count - 1, inner)
        return table


def _boxes(sizes: Sequence[int], merged: Sequence[Sequence[int]]) -> int:
    """Return the number of boxes that one piece becomes: one per position before a merged group's last break."""
    count = 1
    for group in merged:
        atoms = [atom for atom in group if sizes[atom] != 1]
        breaks = [place for place in range(1, len(atoms)) if math.prod(sizes[atoms[place - 1] + 1 : atoms[place]]) != 1]
        breaks += [place for place in range(1, len(atoms)) if atoms[place - 1] > atoms[place]]
        count *= math.prod(sizes[atom] for atom in atoms[: max(breaks, default=0)])
    return count


def _split(table: Pieces, dim: int, inner: int) -> Pieces:
    """Return a table with a dim split in two, the second of size `inner`; a box becomes up to three."""
    low, high = table.boxes[:, dim, 0], table.boxes[:, dim, 1]
    step = table.strides[:, dim]
    first, last = low // inner, (high - 1) // inner
    begin, end = low - first * inner, high - last * inner
    whole = (begin == 0) & (end == inner)
    alone = (first == last) & ~whole
    head, tail = ~alone & (begin > 0), ~alone & (end < inner)
    middle = (first + head, last + ~tail)
    parts = []
    for rows, (outer, stop), (start, until) in (
        (alone, (first, first + 1), (begin, end)),
        (head, (first, first + 1), (begin, np.full_like(end, inner))),
        (~alone & (middle[0] < middle[1]), middle, (np.zeros_like(begin), np.full_like(end, inner))),
        (tail, (last, last + 1), (np.zeros_like(begin), end)),
    ):
        boxes = np.insert(table.boxes, dim, 0, 1)
        boxes[:, dim] = np.stack([outer, stop], 1)
        boxes[:, dim + 1] = np.stack([start, until], 1)
        strides = np.insert(table.strides, dim, 0, 1)
        # Of one row the stride is not needed, and could be over the limit.
        strides[:, dim] = np.where(stop - outer > 1, step * inner, 0)
        offsets = table.offsets + (outer * inner + start - low) * step
        parts.append(Pieces.built(table.numbers[rows], offsets[rows], boxes[rows], strides[rows], table.holders))
    return Pieces.joined(parts, table.rank + 1)


def _merged(table: Pieces, dim: int, inner: int) -> Pieces:
    """Return a table with two dims merged, the second of size `inner`; a box stays one, or becomes one per row."""
    (low, high), (begin, end) = table.boxes[:, dim].T, table.boxes[:, dim + 1].T
    outer, step = table.strides[:, dim], table.strides[:, dim + 1]
    alone = high - low == 1
    whole = (begin == 0) & (end == inner) & ((outer == step * inner) | (inner == 1))
    kept = alone | whole
    counts = np.where(kept, 1, high - low)
    row = np.repeat(np.arange(len(counts)), counts)
    place = low[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    boxes = np.delete(table.boxes[row], dim, 1)
    boxes[:, dim, 0] = place * inner + begin[row]
    boxes[:, dim, 1] = np.where(kept[row], (high[row] - 1) * inner + end[row], place * inner + end[row])
    strides = np.delete(table.strides[row], dim, 1)
    strides[:, dim] = np.where(whole & ~alone & (inner == 1), outer, step)[row]
    offsets = table.offsets[row] + (place - low[row]) * outer[row]
    return Pieces.built(table.numbers[row], offsets, boxes, strides, table.holders)


def _with_one(table: Pieces, dim: int) -> Pieces:
    """Return a table with an additional dim of size 1."""
    boxes = np.insert(table.boxes, dim, 0, 1)
    boxes[:, dim] = 0, 1
    strides = np.insert(table.strides, dim, 0, 1)
    return Pieces.built(table.numbers, table.offsets, boxes, strides, table.holders)


def _rectangles(sizes: Sequence[int], low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the boxes that a range of positions in several merged dims consists of."""
    if len(sizes) <= 1:
        yield [(low, high)] if sizes else []
        return
    inner = math.prod(sizes[1:])
    first, last = low // inner, (high - 1) // inner
    begin, end = low - first * inner, high - last * inner
    whole = [(0, size) for size in sizes[1:]]
    if first == last:
        for rest in _rectangles(sizes[1:], begin, end):
            yield [(first, first + 1), *rest]
        return
    if begin:
        for rest in _rectangles(sizes[1:], begin, inner):
            yield [(first, first + 1), *rest]
        first += 1
    stop = last if end < inner else last + 1
    if first < stop:
        yield [(first, stop), *whole]
    if end < inner:
        for rest in _rectangles(sizes[1:], 0, end):
            yield [(last, last + 1), *rest]
