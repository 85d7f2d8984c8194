"""A grid of shards as lines of text with frames."""

from collections.abc import Iterator, Sequence
from itertools import islice

from .grid import Grid, bounds_text, in_turn
from .lines import Line, Part
from .names import brief

__all__ = ["framed", "grid_lines"]

# More replicas than these are not listed even to be summarised: a mesh may have more devices than there is memory.
_MAX_REPLICAS = 4096

# Backgrounds of the shards: light, so that black text can be read on them.
_COLOURS = [f"black on color({number})" for number in (117, 222, 150, 182, 216, 158, 189, 229)]


def grid_lines(grid: Grid, width: int, max_rows: int) -> Iterator[Line]:
    """Draw a grid of one panel; without its middle if it has more than `max_rows`, or is wider than `width`.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> grid = Grid(TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((6,)))
    >>> for line in grid_lines(grid, 80, 3):
    ...     print("".join(text for text, _ in line))
            dim 0
         0:3     3:6
      ┌───────┬───────┐
      │ cpu:0 │ cpu:1 │
      └───────┴───────┘
    """

    def label(dims: Sequence[int], row: int, column: int) -> str:
        return bounds_text(grid.cell(row, column).box, dims)

    rows = list(_without_middle(grid.rows, max_rows))
    labels = ["⋮" if row is None else label(grid.down, row, 0) for row in rows]
    corner = ", ".join(f"dim {dim}" for dim in grid.down)
    margin = max(map(len, [corner, *labels]))
    last = grid.rows - 1, grid.columns - 1
    widest = max(len(_cell(grid, *last)[0]), len(label(grid.across, *last)))
    columns = list(_without_middle(grid.columns, max(3, (width - margin - 2) // (widest + 3))))
    titles = ["…" if column is None else label(grid.across, 0, column) for column in columns]
    cells = [[_cell(grid, row, column) for column in columns] for row in rows]
    over = "".join(f"dim {dim}" for dim in grid.across)
    yield from framed([text.rjust(margin) for text in (corner, *labels)], over, titles, cells)


def _cell(grid: Grid, row: int | None, column: int | None) -> Part:
    if row is None or column is None:
        return "…", "dim"
    cell, replicas = grid.cell(row, column), grid.partition.replicas
    if replicas > _MAX_REPLICAS:
        devices = f"{cell.owner} + {replicas - 1:,}"
    else:
        devices = brief([str(device) for device in grid.partition.devices_holding(cell.shard_id)])
    if cell.is_empty:
        return f"{devices} empty", "dim"
    return devices, _COLOURS[in_turn(cell.shard_id, len(_COLOURS))]


def framed(labels: list[str], over: str, titles: list[str], cells: list[list[Part]]) -> Iterator[Line]:
    """Put rows of cells into frames, with a title over each column and a label before each row.

    Args:
        labels: One for the corner, then one for each row, all of one length.
        over: What stands over all titles; without it there are none.
        titles: One for each column.
        cells: The rows.
    """
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
    if any(titles):
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
