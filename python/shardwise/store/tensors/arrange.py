"""Tensors put together in another arrangement of their dims: split, permuted, merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..pieces import Bounds, Pieces
from .assembled import MOST_STRETCHES, SHORT, Assembled

__all__ = ["arranged"]

#: More boxes than these are not copied one by one, however long they are.
_MOST_BOXES = 1 << 20
#: A block is read with up to so many times its elements, rather than in several reads.
_MOST_OVER = 4

_Array = npt.NDArray[Any]
_Sizes = Sequence[int]


def arranged(tensor: Assembled, split: Sequence[_Sizes], merged: Sequence[Sequence[int]]) -> Assembled:
    """The tensor with each of its dims split into several, which are put together to new ones.

    Args:
        tensor: The tensor.
        split: For each dim the sizes that it is split into, major first; their product is the dim's size.
        merged: For each new dim which of these it is made of, by their numbers, major first. Those that are in none
            have one element.

    A dim is split, and dims are merged, as in a C-order reshape.
    """
    sizes = [size for group in split for size in group]
    shape = tuple(math.prod(sizes[atom] for atom in group) for group in merged)
    # Not by the numbers alone: a dim of no size beside one of two makes as many.
    if all(len(group) == 1 for group in split) and list(merged) == [[dim] for dim in range(len(split))]:
        return tensor
    order = [atom for group in merged for atom in group]

    def change(table: Pieces) -> Pieces:
        for dim in reversed(range(len(split))):
            for place in range(len(split[dim]) - 1):
                table = _split(table, dim + place, math.prod(split[dim][place + 1 :]))
            if not split[dim]:
                table = table.without(dim)
        table = table.transposed([*order, *(atom for atom in range(len(sizes)) if atom not in order)])
        while table.rank > len(order):
            table = table.without(len(order))
        for at, group in enumerate(merged):
            if not group:
                table = _with_one(table, at)
            for count in range(1, len(group)):
                # The last two first, so that the inner one is as large as possible.
                inner = math.prod(sizes[atom] for atom in group[-count:])
                table = _merged(table, at + len(group) - count - 1, inner)
        return table

    def read(box: Bounds) -> _Array:
        return _read(tensor, split, merged, box)

    what = ("arranged", *map(tuple, split), *map(tuple, merged), len(split))
    made = tensor.changed(shape, change, read, what)
    boxes, nbytes = _boxes(sizes, merged), math.prod(shape) * (tensor.dtype.bits // 8)
    return made.marked(boxes > MOST_STRETCHES and (nbytes < boxes * SHORT or boxes > _MOST_BOXES))


def _boxes(sizes: _Sizes, merged: Sequence[Sequence[int]]) -> int:
    """How many boxes a tensor in one piece becomes: one for each place in the dims before the last break of a group."""
    count = 1
    for group in merged:
        atoms = [atom for atom in group if sizes[atom] != 1]
        breaks = [place for place in range(1, len(atoms)) if math.prod(sizes[atoms[place - 1] + 1 : atoms[place]]) != 1]
        breaks += [place for place in range(1, len(atoms)) if atoms[place - 1] > atoms[place]]
        count *= math.prod(sizes[atom] for atom in atoms[: max(breaks, default=0)])
    return count


def _split(table: Pieces, dim: int, inner: int) -> Pieces:
    """A dim in two, of which the second has so many elements: a box becomes up to three."""
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
    """Two dims as one, the second of which has so many elements: a box stays one, or becomes one for each row."""
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
    """With an additional dim of one element."""
    boxes = np.insert(table.boxes, dim, 0, 1)
    boxes[:, dim] = 0, 1
    strides = np.insert(table.strides, dim, 0, 1)
    return Pieces.built(table.numbers, table.offsets, boxes, strides, table.holders)


def _read(tensor: Assembled, split: Sequence[_Sizes], merged: Sequence[Sequence[int]], box: Bounds) -> _Array:
    """A box of the arranged tensor, from boxes of the tensor itself."""
    sizes = [size for group in split for size in group]
    out = np.zeros([stop - start for start, stop in box], f"V{tensor.dtype.bits // 8}")
    if 0 in out.shape:
        return out
    order = [atom for group in merged for atom in group]
    ranges = [
        list(_rectangles([sizes[atom] for atom in group], *side)) for group, side in zip(merged, box, strict=True)
    ]
    for chosen in itertools.product(*ranges):
        of = [(0, 1)] * len(sizes)
        for atom, bounds in zip(order, itertools.chain.from_iterable(sides for _, sides in chosen), strict=True):
            of[atom] = bounds
        values = _read_split(tensor, split, of)
        rest = [atom for atom in range(len(sizes)) if atom not in order]
        values = values.transpose([*order, *rest])
        lengths = [math.prod(stop - start for start, stop in sides) for _, sides in chosen]
        place = tuple(
            slice(at - begin, at - begin + length)
            for (at, _), (begin, _), length in zip(chosen, box, lengths, strict=True)
        )
        region: tuple[Any, ...] = (*place, ...)
        out[region] = values.reshape(lengths)
    return out


def _rectangles(sizes: _Sizes, low: int, high: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The boxes that make up a range of several dims as one, each with where it begins in them."""
    if not sizes:
        yield 0, []
        return
    if len(sizes) == 1:
        yield low, [(low, high)]
        return
    inner = math.prod(sizes[1:])
    first, last = low // inner, (high - 1) // inner
    begin, end = low - first * inner, high - last * inner
    whole = [(0, size) for size in sizes[1:]]
    if first == last:
        for at, rest in _rectangles(sizes[1:], begin, end):
            yield first * inner + at, [(first, first + 1), *rest]
        return
    if begin:
        for at, rest in _rectangles(sizes[1:], begin, inner):
            yield first * inner + at, [(first, first + 1), *rest]
        first += 1
    stop = last if end < inner else last + 1
    if first < stop:
        yield first * inner, [(first, stop), *whole]
    if end < inner:
        for at, rest in _rectangles(sizes[1:], 0, end):
            yield last * inner + at, [(last, last + 1), *rest]


def _read_split(tensor: Assembled, split: Sequence[_Sizes], of: Sequence[tuple[int, int]]) -> _Array:
    """A box of the tensor with its dims split, in one read if that does not take too much, else in several."""
    around, indices = [], []
    at = 0
    for sizes in split:
        sides = of[at : at + len(sizes)]
        at += len(sizes)
        index = np.zeros((), np.int64)
        for size, (start, stop) in zip(sizes, sides, strict=True):
            index = np.expand_dims(index, -1) * size + np.arange(start, stop)
        first, last = int(index.flat[0]), int(index.flat[-1])
        around.append((first, last + 1))
        indices.append(index.reshape(-1) - first)
    wanted = [stop - start for start, stop in of]
    if math.prod(stop - start for start, stop in around) <= _MOST_OVER * math.prod(wanted):
        return tensor.read(tuple(around))[np.ix_(*indices)].reshape(wanted)
    # The outermost dim of which there is more than one place.
    dim = next(dim for dim, size in enumerate(wanted) if size > 1)
    rows = range(*of[dim])
    parts = [_read_split(tensor, split, [*of[:dim], (row, row + 1), *of[dim + 1 :]]) for row in rows]
    return np.concatenate(parts, dim)
