"""Grids of shards, chunks and devices, worked out cell by cell, and grouped into blocks if there are many."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from .._text import counted
from ..mesh import DeviceMesh
from ..partition import Partition
from ..tiling import Tiling
from .picture import MOST_NAMED, Panel, PanelSide, Span, Tile, held_text, replicas_text, short, xml_text

__all__ = [
    "CellBlock",
    "Cells",
    "ChunkCells",
    "DeviceCells",
    "ShardCells",
    "cell_blocks",
    "cell_ranges",
    "copies_of",
    "held_in",
    "panels_of",
    "plane_of",
]

CellIndex = tuple[int, ...]
#: The most cells of a block along a dim for which the cuts inside are drawn.
_MOST_SEAMS = 64
#: The most panels of a picture.
_MOST_PANELS = 4
#: The most dims that are named instead of drawn.
_MOST_WHOLE = 3


class Cells:
    """A regular grid: the number of cells along each dim, the bounds of each, and the holders of each combination."""

    #: The number of cells along each dim.
    counts: tuple[int, ...]
    #: The length of each dim.
    shape: tuple[int, ...]
    #: The label of a cell.
    unit: str
    #: The word for what several holders of a cell hold.
    copies = "replicas"

    def bounds(self, dim: int, cell: int) -> tuple[int, int]:
        """Return where a cell begins and ends along a dim."""
        raise NotImplementedError

    def span(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """Return start and stop along a dim of those cells of a range that are not empty."""
        return self.bounds(dim, start)[0], self.bounds(dim, stop - 1)[1]

    def holders(self, index: CellIndex, most: int) -> tuple[list[Any], int]:
        """Return the first holders of a cell, at most so many, and how many there are."""
        raise NotImplementedError

    def title(self, dim: int) -> str:
        """Return the title of a side: its dim, and the axes that cut it where they are known."""
        raise NotImplementedError

    def range_text(self, start: int, stop: int) -> str:
        """Write where a range of cells begins and ends, as `span` gives it."""
        return _range(start, stop)


class ShardCells(Cells):
    """The shards of a partition that is not packed."""

    unit = "shard"

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.counts, self.shape = partition.num_shards, partition.shape
        self.copies = copies_of(partition)

    def bounds(self, dim: int, cell: int) -> tuple[int, int]:
        """Return where a cell begins and ends along a dim."""
        side = self._partition.shard_box(cell * math.prod(self.counts[dim + 1 :]))[dim]
        return side.start, side.stop

    def span(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """Return start and stop along a dim of those cells of a range that are not empty."""
        first, last = self.bounds(dim, start), self.bounds(dim, stop - 1)
        if self._partition.size == 0 or (first[0] < first[1] and last[0] < last[1]):
            return first[0], last[1]
        # Empty shards lie at the end of the dim, whatever their number; those with elements are in order.
        positions = range(self.shape[dim])
        low, high = (
            bisect.bisect_left(positions, cell, key=lambda at: self._cell_of(dim, at)) for cell in (start, stop)
        )
        return (low, high) if low < high else (self.shape[dim], self.shape[dim])

    def _cell_of(self, dim: int, position: int) -> int:
        """Return the cell that an element is in, along a dim."""
        shard_id, _ = self._partition.locate(position * math.prod(self.shape[dim + 1 :]))
        return shard_id // math.prod(self.counts[dim + 1 :]) % self.counts[dim]

    def holders(self, index: CellIndex, most: int) -> tuple[list[Any], int]:
        """Return the first holders of a cell, at most so many, and how many there are."""
        shard_id = 0
        for position, count in zip(index, self.counts, strict=True):
            shard_id = shard_id * count + position
        if self._partition.replicas > most:
            return [self._partition.canonical_device(shard_id)], self._partition.replicas
        return self._partition.devices_holding(shard_id), self._partition.replicas

    def title(self, dim: int) -> str:
        """Return the title of a side: its dim, and the axes that cut it where they are known."""
        spec = self._partition.layout.axes[dim]
        names: tuple[Any, ...] = spec if isinstance(spec, tuple) else (spec,)
        by = (
            " + ".join(short(xml_text(str(name)), 24) for name in itertools.islice(names, 4))
            if self.counts[dim] > 1
            else ""
        )
        return f"dim {dim}: {self.shape[dim]}" + (f", cut in {self.counts[dim]:,} by {by}" if by else ", not cut")


class ChunkCells(Cells):
    """The chunks of a regular grid."""

    unit = "chunk"

    def __init__(self, tiling: Tiling, chunks: Sequence[int]) -> None:
        self._tiling, self._chunks = tiling, chunks
        self.shape = tiling.shape
        self.counts = tuple(-(-size // chunk) for size, chunk in zip(self.shape, chunks, strict=True))

    def bounds(self, dim: int, cell: int) -> tuple[int, int]:
        """Return where a cell begins and ends along a dim."""
        chunk, size = self._chunks[dim], self.shape[dim]
        return min(cell * chunk, size), min((cell + 1) * chunk, size)

    def holders(self, index: CellIndex, most: int) -> tuple[list[Any], int]:
        """Return the first holders of a cell, at most so many, and how many there are."""
        position = 0
        for part, count in zip(index, self.counts, strict=True):
            position = position * count + part
        return [self._tiling.holder_label(position)], 1

    def title(self, dim: int) -> str:
        """Return the title of a side: its dim, and the axes that cut it where they are known."""
        return f"dim {dim}: {self.shape[dim]}, in chunks of {self._chunks[dim]}"


class DeviceCells(Cells):
    """The devices of a mesh, as cells of a picture."""

    unit = "device"

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.counts = self.shape = mesh.shape

    def bounds(self, dim: int, cell: int) -> tuple[int, int]:
        """Return where a cell begins and ends along a dim."""
        return cell, cell + 1

    def holders(self, index: CellIndex, most: int) -> tuple[list[Any], int]:
        """Return the first holders of a cell, at most so many, and how many there are."""
        return [self._mesh.device(self._mesh.device_index(index))], 1

    def title(self, dim: int) -> str:
        """Return the title of a side: its dim, and the axes that cut it where they are known."""
        return f"{short(xml_text(self._mesh.axis_names[dim]), 40)}: {self.shape[dim]}"

    def range_text(self, start: int, stop: int) -> str:
        """Write where a range of cells begins and ends: of one device its coordinate."""
        return _range(start, stop) if stop - start > 1 else str(start)


class CellBlock:
    """Neighbouring cells that are drawn as one: a range of cells along each dim."""

    def __init__(self, cells: Cells, ranges: Sequence[tuple[int, int]]) -> None:
        self.cells, self.ranges = cells, tuple(ranges)
        self.size = math.prod(stop - start for start, stop in ranges)
        self.box = tuple(cells.span(dim, *cells_of_dim) for dim, cells_of_dim in enumerate(ranges))

    @property
    def is_empty(self) -> bool:
        """True if the block has no element."""
        return any(start >= stop for start, stop in self.box)

    def holders(self, most: int = MOST_NAMED) -> tuple[list[Any], int]:
        """Return the holders of its cells, all of them if there are at most `most`, and their number."""
        first, each = self.cells.holders(tuple(start for start, _ in self.ranges), most)
        total = self.size * each
        if self.size == 1 or total > most:
            return first, total
        found = [
            label
            for index in itertools.product(*(range(*cells) for cells in self.ranges))
            for label in self.cells.holders(index, most)[0]
        ]
        return found, total

    def seams(self, dim: int | None) -> tuple[int, ...]:
        """Return the positions along a dim at which the block is cut inside."""
        if dim is None:
            return ()
        start, stop = self.ranges[dim]
        if stop - start > _MOST_SEAMS:
            return ()
        low, high = self.box[dim]
        return tuple(at for cell in range(start + 1, stop) if low < (at := self.cells.bounds(dim, cell)[0]) < high)


def plane_of(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the dims that the panels show, at most two: the last that are cut, then the last of the others.

    Args:
        counts: for each tiling in the picture, the number of cells along each dim.
    """
    rank = len(counts[0])
    cut = [dim for dim in range(rank) if any(each[dim] > 1 for each in counts)]
    chosen = cut[-2:]
    chosen += [dim for dim in reversed(range(rank)) if dim not in chosen][: 2 - len(chosen)]
    return tuple(sorted(chosen))


def cell_ranges(
    cells: Cells, plane: Sequence[int], most: int, widest: int | None = None
) -> list[list[tuple[int, int]]]:
    """Cut a grid into at most `most` blocks: return ranges of cells along each dim, whose combinations they are.

    With `widest`, there are at most that many ranges along each dim.
    """
    groups = [1 if count == 0 else count for count in cells.counts]
    if widest is not None:
        groups = [min(group, widest) for group in groups]
    deep = [dim for dim in range(len(groups)) if dim not in plane]
    for dims, limit in ((deep, _MOST_PANELS), (range(len(groups)), most)):
        while math.prod(groups[dim] for dim in dims) > limit:
            widest = max(dims, key=lambda dim: groups[dim])
            groups[widest] = -(-groups[widest] // 2)
    found = []
    for count, group in zip(cells.counts, groups, strict=True):
        each = max(-(-count // group), 1)
        found.append([(start, min(start + each, count)) for start in (i * each for i in range(group)) if start < count])
    return found


def cell_blocks(cells: Cells, plane: Sequence[int], most: int, widest: int | None = None) -> list[CellBlock]:
    """Return single cells if there are at most `most`, else blocks of neighbours, of even sizes."""
    return [CellBlock(cells, block) for block in itertools.product(*cell_ranges(cells, plane, most, widest))]


def panels_of(
    cells: Cells, plane: Sequence[int], blocks: Sequence[CellBlock], keys: Sequence[int | None]
) -> list[Panel]:
    """Return panels with the blocks on them: one for each combination of the dims that are not in the plane."""
    down = plane[0] if len(plane) > 1 else None
    across = plane[-1] if plane else None
    deep = [dim for dim in range(len(cells.counts)) if dim not in plane and cells.counts[dim] > 1]
    # Dims that are not drawn are named too; axes of one device are in the name of a mesh.
    whole = [dim for dim in range(len(cells.counts)) if dim not in plane and dim not in deep]
    whole_text = "" if cells.unit == "device" else _whole_text(cells, whole)
    found: dict[Any, list[tuple[CellBlock, int | None]]] = {}
    prefix = _prefix(blocks)
    for block, key in zip(blocks, keys, strict=True):
        if not block.is_empty:
            found.setdefault(tuple(block.ranges[dim] for dim in deep), []).append((block, key))
    panels = []
    for members in found.values():
        first = members[0][0]
        heading = "; ".join(filter(None, [", ".join(_deep_text(first, dim) for dim in deep), whole_text]))
        tiles = tuple(_tile(block, key, down, across, prefix) for block, key in members)
        sides = [
            None
            if dim is None
            else PanelSide(
                cells.title(dim),
                cells.shape[dim],
                tuple(
                    Span(*span, cells.range_text(*span))
                    for span in dict.fromkeys(block.box[dim] for block, _ in members)
                ),
            )
            for dim in (down, across)
        ]
        panels.append(Panel(heading, sides[0], sides[1], tiles))
    return panels


def _whole_text(cells: Cells, dims: Sequence[int]) -> str:
    """Return a text with the first few dims that are neither cut nor drawn."""
    named = ", ".join(cells.title(dim) for dim in dims[:_MOST_WHOLE])
    return f"{named} and {counted(len(dims) - _MOST_WHOLE, 'more dim')}" if len(dims) > _MOST_WHOLE else named


def _deep_text(block: CellBlock, dim: int) -> str:
    start, stop = block.ranges[dim]
    # Along an axis of a mesh the range is the number.
    many = f" ({stop - start:,} {block.cells.unit}s)" if stop - start > 1 and block.cells.unit != "device" else ""
    return f"{block.cells.title(dim).rpartition(': ')[0]} at {block.cells.range_text(*block.box[dim])}{many}"


def _rough(number: int) -> str:
    return f"{number:,}" if number < 10**6 else f"{number:.2g}"


def _range(start: int, stop: int) -> str:
    return f"{start}:{stop}"


def copies_of(partition: Partition) -> str:
    """Return the word for what the devices of one shard hold: replicas, or addends over unreduced axes.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2, 4), ("x", "y"))
    >>> [copies_of(TensorLayout((cut,), mesh, unreduced=("y",)).partition((8,))) for cut in ("x", None)]
    ['addends', 'devices']
    """
    layout = partition.layout
    if not layout.unreduced:
        return "replicas"
    return "devices" if layout.replicated_axes else "addends"


def held_in(block: CellBlock) -> str:
    """Return texts on the holders of a block.

    >>> from shardwise import TensorLayout
    >>> partition = TensorLayout(("x",), DeviceMesh((2, 2), ("x", "y"))).partition((8,))
    >>> [held_in(block) for block in cell_blocks(ShardCells(partition), (0,), 2)]
    ['cpu:0,1 (2 replicas)', 'cpu:2,3 (2 replicas)']
    """
    labels, count = block.holders()
    held, many = held_text(labels, count), f"{block.size:,} {block.cells.unit}s"
    if block.size > 1:
        return f"{many}, {held}" if count == block.size else f"{many}, {count:,} devices: {held}"
    return replicas_text(held, count, block.cells.copies)


def _prefix(blocks: Sequence[CellBlock]) -> str:
    """Return the beginning that all holders' names share before their numbers, which narrow tiles leave out."""
    names = [held_text(block.holders(1)[0][:1], 1) for block in blocks]
    prefix = re.sub(r"[0-9]+$", "", min(names, default=""))
    while not all(name.startswith(prefix) for name in names):
        prefix = prefix[:-1]
    return prefix if re.fullmatch(r"[\w.:/ -]*", prefix) else ""


def _tile(block: CellBlock, key: int | None, down: int | None, across: int | None, prefix: str) -> Tile:
    labels, count = block.holders()
    held = held_text(labels, count)
    unit = block.cells.unit
    if block.size > 1:
        size, many = f"{block.size:,}", f"{block.size:,} {unit}s"
        first = held_text(labels[:1], 1)
        lines: tuple[tuple[str, ...], ...] = ((held, many), (f"{held} · {many}",), (f"{first} …", many))
        lines += ((f"{first} …", size, f"{unit}s"), (f"{first} … · {many}",), (many,), (_rough(block.size),))
        naming = len(lines) - 2
    else:
        number = held.removeprefix(prefix)
        if count > 1:
            many = f"{count:,} {block.cells.copies}"
            first = held_text(labels[:1], 1)
            lines = ((held, many), (f"{held} · {many}",), (held,), (f"{first} + {count - 1:,}",))
            lines += ((first, f"+ {count - 1:,}"), (number,))
        else:
            lines = ((held,), (short(held, 8),), (number,))
        lines = tuple(line for line in dict.fromkeys(lines) if line != ("",))
        naming = sum(any(held in line for line in label) for label in lines)
    place = "[" + ", ".join(block.cells.range_text(*side) for side in block.box) + "]"
    return Tile(
        (0, 1) if down is None else block.box[down],
        (0, 1) if across is None else block.box[across],
        key,
        lines,
        place,
        held_in(block),
        block.seams(down),
        block.seams(across),
        naming,
    )
