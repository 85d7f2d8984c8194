"""The model of pictures: every shard has one place, whatever the panels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise import DeviceMesh, Partition, TensorLayout
from shardwise.show.grid import Grid, plane_of
from tests.strategies import partitions


@given(partition=partitions(), data=st.data())
def test_every_shard_has_one_place(partition: Partition, data: st.DataObject) -> None:
    rank = len(partition.shape)
    plane = data.draw(st.none() | st.sets(st.integers(0, rank - 1), max_size=2).map(sorted) if rank else st.none())
    grid = Grid(partition, plane)
    assert plane is not None or grid.panels == 1
    cells = [cell for panel in range(grid.panels) for cell in grid.cells(panel)]
    assert sorted(cell.shard_id for cell in cells) == list(range(partition.total_shards))
    for cell in cells:
        assert cell.owner == partition.devices_holding(cell.shard_id)[0]
        assert cell.box == partition.box(cell.owner)
        assert cell.is_empty == (0 in partition.shard_shape(cell.owner))


def test_rows_columns_and_panels_follow_the_dims_that_they_stand_for() -> None:
    mesh = DeviceMesh((2, 2, 3), ("x", "y", "z"))
    partition = TensorLayout(("x", "y", None, "z"), mesh).partition((2, 2, 5, 3))
    grid = Grid(partition, (1, 3))
    assert (grid.panels, grid.rows, grid.columns) == (2, 2, 3)
    assert (grid.deep, grid.down, grid.across) == ((0,), (1,), (3,))
    assert [[part.start for part in grid.cell(1, 2, panel).box] for panel in (0, 1)] == [[0, 1, 0, 2], [1, 1, 0, 2]]
    folded = Grid(partition)
    assert (folded.panels, folded.rows, folded.columns) == (1, 4, 3)
    assert [part.start for part in folded.cell(2, 0).box] == [1, 0, 0, 0]


def test_the_plane_of_two_pictures_has_dims_that_either_cuts() -> None:
    mesh = DeviceMesh((2, 2), ("x", "y"))
    before = TensorLayout(("x", None, None), mesh).partition((4, 4, 4))
    after = TensorLayout((None, "y", None), mesh).partition((4, 4, 4))
    assert plane_of([before]) == [0, 2]
    assert plane_of([before, after]) == [0, 1]
    assert plane_of([TensorLayout((), mesh).partition(())]) == []


def test_a_grid_beyond_memory() -> None:
    size = 2**40
    mesh = DeviceMesh((size, 2**20), ("x", "y"))
    grid = Grid(TensorLayout(("x", None), mesh).partition((size, 7)))
    assert (grid.rows, grid.columns) == (size, 1)
    cell = grid.cell(size - 1, 0)
    assert (cell.shard_id, cell.owner, cell.box[0]) == (
        size - 1,
        f"cpu:{(size - 1) * 2**20}",
        slice(size - 1, size),
    )
