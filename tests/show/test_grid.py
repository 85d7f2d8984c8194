"""What pictures are made of: every shard has one place, and is in one block."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise import DeviceMesh, Partition, TensorLayout
from shardwise.show.cells import CellBlock, ShardCells, cell_blocks, plane_of
from tests.strategies import partitions


@given(partition=partitions(), most=st.integers(1, 40), data=st.data())
def test_every_shard_is_in_one_block(partition: Partition, most: int, data: st.DataObject) -> None:
    cells = ShardCells(partition)
    rank = len(partition.shape)
    plane = data.draw(st.sets(st.integers(0, rank - 1), max_size=2).map(sorted) if rank else st.just([]))
    blocks = cell_blocks(cells, plane, most)
    assert 1 <= len(blocks) <= most
    count = np.zeros(partition.num_shards, int)
    for block in blocks:
        count[tuple(slice(*cells) for cells in block.ranges)] += 1
        grid = np.arange(partition.total_shards).reshape(partition.num_shards)
        ids = np.atleast_1d(grid[tuple(slice(*cells) for cells in block.ranges)])
        labels, total = block.holders()
        assert total == ids.size * partition.replicas
        if total <= 64:
            expected = [device for shard in ids.flat for device in partition.devices_holding(int(shard))]
            assert Counter(labels) == Counter(expected)
        # The box reaches from the first shard to the last; the cuts within are where the others begin.
        boxes = [partition.shard_box(int(shard)) for shard in ids.flat]
        for dim, (start, stop) in enumerate(block.box):
            sides = {(box[dim].start, box[dim].stop) for box in boxes if box[dim].start < box[dim].stop}
            low, high = min(sides, default=(start,))[0], max(sides, default=(stop, start))[-1]
            if partition.size:
                assert (start, stop) == (low, high) if sides else start == stop
                assert set(block.seams(dim)) == {side[0] for side in sides} - {start}
    assert (count == 1).all()


def test_the_plane_of_two_pictures_has_dims_that_either_cuts() -> None:
    mesh = DeviceMesh((2, 2), ("x", "y"))
    before = ShardCells(TensorLayout(("x", None, None), mesh).partition((4, 4, 4)))
    after = ShardCells(TensorLayout((None, "y", None), mesh).partition((4, 4, 4)))
    assert plane_of([before.counts]) == (0, 2)
    assert plane_of([before.counts, after.counts]) == (0, 1)
    assert plane_of([()]) == ()


def test_blocks_that_end_in_empty_shards_end_with_the_elements() -> None:
    """Three rows on four devices: the last has none."""
    cells = ShardCells(TensorLayout(("x", "y"), DeviceMesh((4, 2), ("x", "y"))).partition((3, 4), "ceil"))
    assert [cells.span(0, start, stop) for start, stop in ((0, 2), (2, 4), (3, 4))] == [(0, 2), (2, 3), (3, 3)]
    assert cells.span(1, 0, 2) == (0, 4)


def test_blocks_are_cut_where_their_shards_are_up_to_64_of_them() -> None:
    cells = ShardCells(TensorLayout(("x",), DeviceMesh((200,), ("x",))).partition((400,)))
    assert CellBlock(cells, [(196, 200)]).seams(0) == (394, 396, 398)
    assert CellBlock(cells, [(100, 164)]).seams(0) == tuple(range(202, 328, 2))
    assert CellBlock(cells, [(100, 165)]).seams(0) == CellBlock(cells, [(0, 4)]).seams(None) == ()
