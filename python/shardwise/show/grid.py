"""The shards of a partition in rows and columns, for a terminal, which shows both ends of what is too large for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..partition import Partition
from .parted import Parted

__all__ = ["Cell", "Grid", "bounds_text", "in_turn"]


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

    A column is a shard of the last dim that is cut and a row one of all others that are; of a tensor of two dims these
    are the second and the first.

    Args:
        partition: Who holds what.

    Attributes:
        down: The dims along which rows follow one another.
        across: The dim along which columns do, if there is one.
        rows: How many rows there are.
        columns: How many columns there are.

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
