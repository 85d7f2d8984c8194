"""Tensors cut into tasks and files: laws of their boxes, against counts of elements."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.pieces import LocatedPiece, Pieces
from shardwise.store.write.plan.grids import FileGrid, TaskGrid, _joined, task_runs


@pytest.mark.heavy
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tasks_tile_the_tensors_in_runs(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    tensors = data.draw(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 8]), st.integers(1, 600)), max_size=5))
    most = data.draw(st.integers(8, 3000))
    grid = TaskGrid(task_runs(tensors, most), lambda number: tensors[number][:2])
    covered = [np.zeros(shape, int) for shape, _, _ in tensors]
    for task in range(len(grid)):
        boxes = grid.boxes(task)
        size = 0
        for number, box in boxes:
            covered[number][tuple(slice(*side) for side in box)] += 1
            size += math.prod(stop - start for start, stop in box) * tensors[number][1]
            # In C order it is one run: flat positions without a gap.
            flat = np.arange(covered[number].size).reshape(covered[number].shape)
            places = flat[tuple(slice(*side) for side in box)].reshape(-1)
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
        assert 0 < size <= most
        assert grid.bytes[task] == size
    assert all((counts == 1).all() for counts in covered)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_boxes_share_with_tasks_is_counted(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensors: list[tuple[tuple[int, ...], int, int]] = [((3,), 1, 1), (shape, 2, 1)]
    runs = task_runs(tensors, data.draw(st.integers(8, 200)))
    grid = TaskGrid(runs, lambda number: tensors[number][:2])
    found, inside = np.zeros(len(grid), np.int64), np.zeros(shape, int)
    boxes = []
    for _ in range(data.draw(st.integers(1, 3))):
        sides = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        inside[tuple(slice(*side) for side in sides)] += 2
        boxes.append(sides)
    pieces = [LocatedPiece(tuple((a, b) for a, b in box), "r", 0, (0,) * len(shape)) for box in boxes]
    grid.add_overlaps(1, Pieces.of(pieces, len(shape)), found)
    for task in range(len(grid)):
        written = dict(grid.boxes(task))
        shared = int(inside[tuple(slice(*side) for side in written[1])].sum()) if 1 in written else 0
        assert found[task] == shared


def test_boxes_are_joined_where_one_follows_the_other_along_a_dim() -> None:
    """For all pairs of boxes of a small array: as one box if the second begins where the first ends, and only there."""
    sides = [(start, stop) for start in range(3) for stop in range(start + 1, 4)]
    for first in itertools.product(sides, repeat=2):
        for second in itertools.product(sides, repeat=2):
            counts = np.zeros((3, 3), int)
            for box in (first, second):
                counts[tuple(slice(*side) for side in box)] += 1
            found = _joined(first, second)
            around = tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))
            is_box = bool((counts[tuple(slice(*side) for side in around)] == 1).all())  # Both fill it, and once.
            follows = all(a[0] <= b[0] for a, b in zip(first, second, strict=True))
            assert found == (around if is_box and follows else None)


@given(st.data())
def test_what_replicas_share_with_files_is_read_for_them(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(pairwise(edges)) for edges in cuts]
    tiles: list[Any] = [()]
    for dim in sides:
        tiles = [(*tile, side) for tile in tiles for side in dim]
    owners = [data.draw(st.integers(0, 2)) for _ in tiles]
    held = [[(0, tile) for tile, owner in zip(tiles, owners, strict=True) if owner == file] for file in range(3)]
    corners = np.array(tiles, np.int64).reshape(len(tiles), len(shape), 2).transpose(0, 2, 1)
    written = Pieces.dense((owners, 0), corners, 2), 2
    grid = FileGrid(np.zeros(3, np.int64), held.__getitem__, lambda tensor: written)
    assert len(grid) == 3
    owned = np.zeros(shape, int)
    for tile, owner in zip(tiles, owners, strict=True):
        owned[tuple(slice(*side) for side in tile)] = owner
    boxes = []
    for _ in range(4):
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        boxes.append(
            [(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)]
        )
    found = np.zeros(3, np.int64)
    grid.add_overlaps(
        0, Pieces.of([LocatedPiece(tuple(box), "r", 0, (0,) * len(shape)) for box in boxes], len(shape)), found
    )
    for file in range(3):
        assert found[file] == sum(2 * int((owned[tuple(slice(*side) for side in box)] == file).sum()) for box in boxes)
