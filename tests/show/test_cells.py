"""Cells by hand and by law: where ranges of them begin and end, with empty shards among them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import shardwise as sw
from shardwise.show.cells import ChunkCells, DeviceCells, ShardCells


@pytest.mark.parametrize("uneven", ["ceil", "chunk", "balanced", "floor"])
@pytest.mark.parametrize("size", range(9))
def test_a_range_of_shards_is_what_the_shards_with_elements_take(size: int, uneven: Any) -> None:
    mesh = sw.DeviceMesh((2, 3), ("x", "y"))
    partition = sw.TensorLayout((("x", "y"), None), mesh).partition((size, 2), uneven)
    cells = ShardCells(partition)
    sides = [(side.start, side.stop) for side, _ in map(partition.shard_box, range(6))]
    assert [cells.bounds(0, cell) for cell in range(6)] == sides
    for start, stop in itertools.combinations(range(7), 2):
        held = [side for side in sides[start:stop] if side[0] < side[1]]
        if held:
            expected = (min(low for low, _ in held), max(high for _, high in held))
            assert cells.span(0, start, stop) == expected
        else:
            low, high = cells.span(0, start, stop)
            assert low == high
    assert cells.span(1, 0, 1) == (0, 2)


def test_a_range_of_chunks_ends_with_the_dim() -> None:
    """7 in chunks of 3: 0 to 3, 3 to 6, 6 to 7."""
    cells = ChunkCells(sw.Tiling.grid((7, 4), (3, 4)), (3, 4))
    assert cells.counts == (3, 1)
    assert [cells.span(0, *cut) for cut in ((0, 1), (0, 2), (1, 3), (2, 3), (0, 3))] == [
        (0, 3),
        (0, 6),
        (3, 7),
        (6, 7),
        (0, 7),
    ]
    assert cells.title(0) == "dim 0: 7, in chunks of 3"


def test_a_range_of_devices_is_its_coordinates() -> None:
    cells = DeviceCells(sw.DeviceMesh((4, 2), ("x", "y")))
    assert [cells.span(0, *cut) for cut in ((0, 1), (1, 3), (0, 4))] == [(0, 1), (1, 3), (0, 4)]
    assert [cells.range_text(1, 2), cells.range_text(1, 3)] == ["1", "1:3"]
    assert cells.holders((3, 1), 5) == (["cpu:7"], 1)
