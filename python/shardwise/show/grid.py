"""The shards of a partition as a panel of rows and columns, for a terminal; only both ends of it if it is too large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..partition import Partition
from .names import brief
from .parted import Parted
from .picture import Panel, Side, Span, Tile

__all__ = ["LOOKS", "Cell", "Grid", "bounds_text", "grid_panel", "in_turn"]

#: The number of colours that the shards take in turn.
LOOKS = 8
#: More replicas than this are not even listed for a summary: a mesh may have more devices than fit in memory.
_MOST_REPLICAS = 4096


@dataclass(frozen=True)
class Cell:
    """One shard at its place in a grid.

    Attributes:
        shard_id: Its number.
        box: Its slices of the tensor.
        owner: The first of the devices that hold it.
    """

    shard_id: int
    box: tuple[slice, ...]
    owner: Any

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return any(part.start == part.stop for part in self.box)


class Grid:
    """The shards of a partition, found one by one: a grid of any size costs nothing until its cells are asked for.

    A column is a shard of the last dim that is cut, and a row one of all the others; in a tensor of two dims these
    are the second and the first.

    Args:
        partition: Who holds what.

    Attributes:
        down: The dims along which rows follow one another.
        across: The dim along which columns do, if there is one.
        rows: The number of rows.
        columns: The number of columns.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> grid = Grid(TensorLayout(("x", "y"), mesh).partition((4, 6)))
    >>> grid.rows, grid.columns, grid.cell(1, 0).box, grid.cell(1, 0).owner
    (2, 2, (slice(2, 4, None), slice(0, 3, None)), 'cpu:2')
    """

    def __init__(self, partition: Partition) -> None:
        parted: Any = Parted(partition) if partition.is_packed else partition
        counts = parted.num_shards
        cut = [dim for dim, count in enumerate(counts) if count > 1]
        plane = cut if len(counts) > 2 and cut else range(len(counts))[-2:]
        self.partition = parted
        self.down, self.across = tuple(plane[:-1]), tuple(plane[-1:])
        self.rows, self.columns = (math.prod(counts[dim] for dim in dims) for dims in (self.down, self.across))

    def cell(self, row: int, column: int) -> Cell:
        """Give the shard in a row and a column."""
        counts, index = self.partition.num_shards, {}
        for dims, position in ((self.down, row), (self.across, column)):
            for dim in reversed(dims):
                position, index[dim] = divmod(position, counts[dim])
        shard_id = 0
        for dim, count in enumerate(counts):
            shard_id = shard_id * count + index.get(dim, 0)
        return Cell(shard_id, self.partition.shard_box(shard_id), self.partition.canonical_device(shard_id))


def grid_panel(grid: Grid, width: int, most_rows: int) -> Panel:
    """Make the panel of a grid, without its middle if it has more rows or is wider.

    All rows have one size and all columns too, whatever the number of elements: the tiles of a terminal hold text. A
    row or a column of its own marks what is left out.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> grid = Grid(TensorLayout(("x",), DeviceMesh((9,), ("x",))).partition((18,)))
    >>> panel = grid_panel(grid, 40, 3)
    >>> [span.text for span in panel.across.spans], [tile.held for tile in panel.tiles]
    (['0:2', '2:4', '…', '16:18'], ['cpu:0', 'cpu:1', '…', 'cpu:8'])
    """

    def label(dims: Sequence[int], row: int, column: int) -> str:
        return bounds_text(grid.cell(row, column).box, dims)

    rows = list(_without_middle(grid.rows, most_rows))
    names = ["⋮" if row is None else label(grid.down, row, 0) for row in rows]
    titles = [", ".join(f"dim {dim}" for dim in dims) for dims in (grid.down, grid.across)]
    margin = max(map(len, [titles[0], *names]))
    last = grid.rows - 1, grid.columns - 1
    widest = max(len(_tile(grid, *last, 0, 0).held), len(label(grid.across, *last)))
    columns = list(_without_middle(grid.columns, max(3, (width - margin - 2) // (widest + 3))))
    over = ["…" if column is None else label(grid.across, 0, column) for column in columns]
    down, across = (
        Side(title, len(texts), tuple(Span(at, at + 1, text) for at, text in enumerate(texts)))
        for title, texts in zip(titles, (names, over), strict=True)
    )
    tiles = (_tile(grid, row, column, i, j) for i, row in enumerate(rows) for j, column in enumerate(columns))
    return Panel("", down, across, tuple(tiles))


def _tile(grid: Grid, row: int | None, column: int | None, i: int, j: int) -> Tile:
    place, key, held = "", None, "…"
    if row is not None and column is not None:
        cell, replicas = grid.cell(row, column), grid.partition.replicas
        place = f"[{bounds_text(cell.box, range(len(cell.box)))}]"
        if replicas > _MOST_REPLICAS:
            held = f"{cell.owner} + {replicas - 1:,}"
        else:
            held = brief([str(device) for device in grid.partition.devices_holding(cell.shard_id)])
        if cell.is_empty:
            held += " empty"
        else:
            key = in_turn(cell.shard_id, LOOKS)
    return Tile((i, i + 1), (j, j + 1), key, ((held,),), place, held)


def _without_middle(count: int, room: int) -> Iterator[int | None]:
    """Count up to `count`, with one None in place of a middle for which there is no room.

    >>> list(_without_middle(9, 4))
    [0, 1, None, 8]
    """
    if count <= room:
        yield from range(count)
    else:
        yield from islice(range(count), room - 2)
        yield None
        yield count - 1


def bounds_text(box: Sequence[slice], dims: Sequence[int]) -> str:
    """Write where a box begins and ends along some dims.

    >>> bounds_text((slice(0, 2), slice(4, 8)), (1,))
    '4:8'
    """
    return ", ".join(f"{box[dim].start}:{box[dim].stop}" for dim in dims)


def in_turn(index: int, choices: int) -> int:
    """Choose a colour by number, shifted by one each time round, so that no column of a grid has only one colour.

    >>> [in_turn(i, 3) for i in range(7)]
    [0, 1, 2, 1, 2, 0, 2]
    """
    return (index + index // choices) % choices
