"""Hypothesis strategies for tilings of every kind, and what they hold, said with plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import shardwise as sw
from tests.checks import view_index
from tests.strategies import layouts

Array = npt.NDArray[Any]
Pairs = list[tuple[int, int]]


@st.composite
def cut_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Pairs]:
    """Boxes that come of cutting the tensor in two, and a part in two, and so on; some may be empty."""
    boxes: list[Pairs] = [[(0, n) for n in shape]]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        middle = draw(st.integers(start, stop))
        boxes += [[*box[:dim], (start, middle), *box[dim + 1 :]], [*box[:dim], (middle, stop), *box[dim + 1 :]]]
    return boxes


def names(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


@st.composite
def explicit(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Tiling:
    """Boxes dealt out to holders that have them in all the ways there are."""
    boxes = draw(cut_boxes(shape))
    if draw(st.booleans()):
        return sw.Tiling.from_boxes(shape, np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2))
    count = draw(st.integers(1, 4))
    dealt: list[list[Pairs]] = [[] for _ in range(count)]
    for box in boxes:
        dealt[draw(st.integers(0, count - 1))].append(box)
    given: dict[str, Any] = {}
    arrays: dict[str, tuple[int, ...]] = {}
    for name, held in zip(draw(st.permutations(names(count + 2))), dealt, strict=False):
        how = draw(st.sampled_from(["own", "flat", "pieces", "flat pieces"]))
        given[name] = held
        if how == "own" and len(held) == 1:
            given[name] = tuple(slice(*side) for side in held[0])
        elif how == "pieces" and held and shape:
            # One below the other, each after an empty row.
            places, row = [], 0
            for box in held:
                row += 1
                places.append(sw.Piece(tuple(slice(*side) for side in box), (row, *[0] * (len(shape) - 1))))
                row += box[0][1] - box[0][0]
            given[name], arrays[name] = places, (row + 1, *shape[1:])
        elif how == "flat pieces" and held and len(shape) != 1:
            places, at = [], 0
            for box in reversed(held):
                at += 1
                places.append(sw.Piece(tuple(slice(*side) for side in box), at))
                at += int(np.prod([stop - start for start, stop in box], dtype=np.int64))
            given[name], arrays[name] = places, (at,)
    replicas = draw(st.booleans())
    if replicas:
        for name in list(given):
            given[f"{name} again"] = given[name]
            if name in arrays:
                arrays[f"{name} again"] = arrays[name]
    return sw.Tiling.from_boxes(shape, given, replicas=replicas, arrays=arrays)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Tiling:
    chunks = tuple(draw(st.integers(1, n + 2)) for n in shape)
    grid = sw.Tiling.grid(shape, chunks, padded=draw(st.booleans()))
    if draw(st.booleans()):
        return grid
    return sw.Tiling.grid(shape, chunks, draw(st.permutations(names(len(grid.holders)))))


@st.composite
def flat_ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Tiling:
    size = int(np.prod(shape, dtype=np.int64))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    ranges = draw(st.permutations(list(zip([0, *cuts], [*cuts, size], strict=True))))
    replicas = draw(st.booleans())
    ranges = [*ranges, *ranges] if replicas else ranges
    if draw(st.booleans()):
        return sw.Tiling.from_flat_ranges(shape, ranges, replicas=replicas)
    return sw.Tiling.from_flat_ranges(shape, dict(zip(names(len(ranges)), ranges, strict=True)), replicas=replicas)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Tiling:
    layout = draw(layouts(rank=len(shape), partial=False, mesh=sw.DeviceMesh((2, 3), ("x", "y"))))
    return layout.partition(shape, draw(st.sampled_from(["ceil", "chunk", "balanced"])))


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[sw.Tiling]:
    return partitions(shape) | grids(shape) | flat_ranges(shape) | explicit(shape)


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def view(array: Array, piece: sw.Piece, shape: tuple[int, ...]) -> Array:
    """Where a piece lies in its holder's array."""
    extents = [side.stop - side.start for side in piece.box]
    if isinstance(piece.start, tuple):
        sides = [slice(start, start + extent) for start, extent in zip(piece.start, extents, strict=True)]
        found: Array = array[view_index(sides)]
        return found
    size = int(np.prod(extents, dtype=np.int64))
    return array[piece.start : piece.start + size].reshape(extents)


def held(tiling: sw.Tiling, whole: Array, rest: int = -1) -> list[Array]:
    """Each holder's own array, cut out of the whole one; `rest` where no piece is."""
    arrays = []
    for holder in tiling.holders:
        array = np.full(tiling.holder_shape(holder), rest, whole.dtype)
        for piece in tiling.pieces(holder):
            view(array, piece, whole.shape)[...] = whole[view_index(piece.box)]
        arrays.append(array)
    return arrays


def numbered(shape: tuple[int, ...]) -> Array:
    """A tensor of 1, 2, 3, …"""
    return np.arange(1, 1 + int(np.prod(shape, dtype=np.int64))).reshape(shape)
