"""`shardwise show`: the shards of one tensor, drawn as a grid that says which devices hold which part."""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from .._text import bytes_text
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..partition import Partition
from .names import brief
from .notation import (
    format_layout,
    format_mesh,
    format_shape,
    parse_dtype,
    parse_layout,
    parse_mesh,
    parse_shape,
)
from .terminal import Line, Part, Screen

__all__ = ["Grid", "run_show"]

# How large a picture gets where there is no terminal to say it; and the lines of one that are not rows of the grid.
_COLUMNS, _LINES = 100, 40
_OTHER_LINES = 8

# More replicas than these are not listed even to be summarised: a mesh may have more devices than there is memory.
_MAX_REPLICAS = 4096

# Backgrounds of the shards: light, so that black text can be read on them.
_COLOURS = [f"black on color({number})" for number in (117, 222, 150, 182, 216, 158, 189, 229)]


def run_show(screen: Screen, options: argparse.Namespace) -> int:
    """Say and draw how a layout cuts a tensor, and give the exit status."""
    mesh = parse_mesh(options.mesh)
    shape = parse_shape(options.shape)
    layout = TensorLayout(parse_layout(options.layout, len(shape)).axes, mesh)
    grid = Grid(mesh, layout.partition(shape, options.uneven))
    bits = None if options.dtype is None else parse_dtype(options.dtype)
    screen.write(
        *((format_shape(shape), "bold"), " laid out as ", (format_layout(layout) or "()", "bold")),
        f" on the mesh {format_mesh(mesh)}",
    )
    screen.write(_summary(grid, bits))
    screen.write("")
    width, height = screen.size or (_COLUMNS, _LINES)
    for line in grid.draw(width, max(3, (height - _OTHER_LINES) // 2)):
        screen.write(*line)
    return 0


def _summary(grid: "Grid", bits: int | None) -> str:
    partition, shard = grid.partition, grid.largest_shard
    uneven = any(size % count for size, count in zip(partition.shape, partition.num_shards, strict=True))
    shards = "1 shard" if grid.size == 1 else f"{grid.size:,} shards"
    holders = "one device" if grid.replicas == 1 else f"{grid.replicas:,} devices"
    text = f"{shards} of {'at most ' * uneven}{format_shape(shard)}, each on {holders}"
    if bits is None:
        return text
    part, whole = (-(-math.prod(sizes) * bits // 8) for sizes in (shard, partition.shape))
    share = f", {100 * part / whole:.3g}%" if whole else ""
    return f"{text}, {bytes_text(part)} of {bytes_text(whole)}{share}"


class Grid:
    """The shards of a partition in rows and columns.

    A column is a shard of the last dim that is cut, a row is a shard of the others that are; a tensor of up to two dims
    is drawn as it is, cut or not.
    """

    def __init__(self, mesh: DeviceMesh, partition: Partition) -> None:
        self._mesh = mesh
        self.partition = partition
        counts = partition.num_shards
        drawn = [dim for dim, count in enumerate(counts) if count > 1]
        if len(counts) <= 2 or not drawn:
            drawn = list(range(len(counts)))[-2:]
        self._down, self._across = drawn[:-1], drawn[-1:]
        self.rows = math.prod(counts[dim] for dim in self._down)
        self.columns = math.prod(counts[dim] for dim in self._across)
        self.size = self.rows * self.columns
        self.replicas = mesh.size // self.size

    @property
    def largest_shard(self) -> tuple[int, ...]:
        """The shape of the largest shard."""
        return self.partition.largest_shard_shape

    def draw(self, width: int, max_rows: int) -> Iterator[Line]:
        """Draw the grid; without its middle if it has more than `max_rows`, or is wider than `width`."""
        rows = list(_without_middle(self.rows, max_rows))
        labels = ["⋮" if row is None else self._label(self._down, row, 0) for row in rows]
        corner = ", ".join(f"dim {dim}" for dim in self._down)
        margin = max(map(len, [corner, *labels]))
        last = self.rows - 1, self.columns - 1
        widest = max(len(self._cell(*last)[0]), len(self._label(self._across, *last)))
        columns = list(_without_middle(self.columns, max(3, (width - margin - 2) // (widest + 3))))
        titles = ["…" if column is None else self._label(self._across, 0, column) for column in columns]
        cells = [[self._cell(row, column) for column in columns] for row in rows]
        over = "".join(f"dim {dim}" for dim in self._across)
        yield from _frame([text.rjust(margin) for text in (corner, *labels)], over, titles, cells)

    def _owner(self, row: int, column: int) -> object:
        """Give the canonical owner of a shard: of the devices that hold it the first in the mesh."""
        positions = dict.fromkeys(self._across, column)
        for dim in reversed(self._down):
            row, positions[dim] = divmod(row, self.partition.num_shards[dim])
        number = 0
        for dim, count in enumerate(self.partition.num_shards):
            number = number * count + positions.get(dim, 0)
        return self.partition.canonical_device(number)

    def _label(self, dims: Sequence[int], row: int, column: int) -> str:
        box = self.partition.box(self._owner(row, column))
        return ", ".join(f"{box[dim].start}:{box[dim].stop}" for dim in dims)

    def _cell(self, row: int | None, column: int | None) -> Part:
        if row is None or column is None:
            return "…", "dim"
        owner = self._owner(row, column)
        number = self.partition.shard_id(owner)
        if self.replicas > _MAX_REPLICAS:
            devices = f"{owner} + {self.replicas - 1:,}"
        else:
            devices = brief([str(device) for device in self.partition.devices_holding(number)])
        if 0 in self.partition.shard_shape(owner):
            return f"{devices} empty", "dim"
        # One further each time round, so that a grid as wide as there are colours has no columns of one colour.
        return devices, _COLOURS[(number + number // len(_COLOURS)) % len(_COLOURS)]


def _frame(labels: list[str], over: str, titles: list[str], cells: list[list[Part]]) -> Iterator[Line]:
    corner, *labels = labels
    margin = " " * (len(corner) + 1)
    widths = [2 + max(len(title), *(len(row[column][0]) for row in cells)) for column, title in enumerate(titles)]

    def rule(left: str, middle: str, right: str) -> Line:
        return [(margin + left + middle.join("─" * width for width in widths) + right, "dim")]

    def centred(text: str, width: int) -> str:
        # `str.center` puts an odd space on changing sides.
        left = (width - len(text)) // 2
        return " " * left + text + " " * (width - len(text) - left)

    if over:
        yield [(f"{margin} {centred(over, sum(widths) + len(widths) - 1)}", "dim")]
        yield [(f"{corner}  ", "dim"), (" ".join(map(centred, titles, widths)), "")]
    yield rule("┌", "┬", "┐")
    for number, (label, row) in enumerate(zip(labels, cells, strict=True)):
        if number:
            yield rule("├", "┼", "┤")
        line: Line = [(f"{label} ", "")]
        for (text, style), width in zip(row, widths, strict=True):
            line += [("│", "dim"), (centred(text, width), style)]
        yield [*line, ("│", "dim")]
    yield rule("└", "┴", "┘")


def _without_middle(count: int, room: int) -> Iterator[int | None]:
    """Count up to `count`, with one None in the place of a middle for which there is no room.

    >>> list(_without_middle(9, 4))
    [0, 1, None, 8]
    """
    if count <= room:
        yield from range(count)
    else:
        yield from islice(range(count), room - 2)
        yield None
        yield count - 1
