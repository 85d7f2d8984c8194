"""What a picture of a partition shows: its shards in panels of rows and columns, whatever draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..partition import Partition
from .parted import Parted

__all__ = ["Cell", "Grid", "bounds_text", "in_turn", "plane_of"]


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

    Args:
        partition: Who holds what.
        plane: The dims that a panel shows, at most two: rows and columns, or columns. The other dims that are cut are
            spread over panels. Without it there is one panel, in which a column is a shard of the last dim that is cut
            and a row one of all others that are.

    Attributes:
        down: The dims along which rows follow one another.
        across: The dim along which columns do, if there is one.
        deep: The dims along which panels do.
        panels: How many panels there are.
        rows: How many rows a panel has.
        columns: How many columns it has.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> grid = Grid(TensorLayout(("x", "y"), mesh).partition((4, 6)))
    >>> grid.rows, grid.columns, grid.cell(1, 0).box, grid.cell(1, 0).owner
    (2, 2, (slice(2, 4, None), slice(0, 3, None)), 'cpu:2')
    """

    def __init__(self, partition: Partition, plane: Sequence[int] | None = None) -> None:
        parted: Any = Parted(partition) if partition.is_packed else partition
        counts = parted.num_shards
        cut = [dim for dim, count in enumerate(counts) if count > 1]
        if plane is None:
            plane = cut if len(counts) > 2 and cut else range(len(counts))[-2:]
        self.partition = parted
        self.down, self.across = tuple(plane[:-1]), tuple(plane[-1:])
        self.deep = tuple(dim for dim in cut if dim not in plane)
        self.panels, self.rows, self.columns = (
            math.prod(counts[dim] for dim in dims) for dims in (self.deep, self.down, self.across)
        )

    def cell(self, row: int, column: int, panel: int = 0) -> Cell:
        """Give the shard in a row and a column of a panel."""
        counts, index = self.partition.num_shards, {}
        for dims, position in ((self.deep, panel), (self.down, row), (self.across, column)):
            for dim in reversed(dims):
                position, index[dim] = divmod(position, counts[dim])
        shard_id = 0
        for dim, count in enumerate(counts):
            shard_id = shard_id * count + index.get(dim, 0)
        return Cell(shard_id, self.partition.shard_box(shard_id), self.partition.canonical_device(shard_id))

    def cells(self, panel: int) -> Iterator[Cell]:
        """Give the shards of a panel, row by row."""
        return (self.cell(row, column, panel) for row in range(self.rows) for column in range(self.columns))


def plane_of(partitions: Sequence[Partition]) -> list[int]:
    """Give the dims that pictures of these partitions, all of one shape, show: two of those that are cut, if there are.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> plane_of([TensorLayout(("x", None, "y", None), mesh).partition((2, 2, 2, 2))])
    [0, 2]
    """
    rank = len(partitions[0].shape)
    cut = [dim for dim in range(rank) if any(partition.num_shards[dim] > 1 for partition in partitions)]
    chosen = cut[-2:]
    for dim in reversed(range(rank)):
        if len(chosen) < 2 and dim not in chosen:
            chosen.append(dim)
    return sorted(chosen)


def bounds_text(box: Sequence[slice], dims: Sequence[int]) -> str:
    """Write where a box begins and ends along some dims.

    >>> bounds_text((slice(0, 2), slice(4, 8)), (1,))
    '4:8'
    """
    return ", ".join(f"{box[dim].start}:{box[dim].stop}" for dim in dims)


def in_turn(index: int, choices: int) -> int:
    """Choose a colour by number, one further each time round: a grid as wide as there are has no columns of one.

    >>> [in_turn(i, 3) for i in range(7)]
    [0, 1, 2, 1, 2, 0, 2]
    """
    return (index + index // choices) % choices
