"""Panels as lines of text with frames."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

from .grid import LOOKS, Grid, grid_panel
from .lines import Line, padded, width_of
from .picture import Panel, Side, Tile, short

__all__ = ["grid_lines", "is_grid", "named", "panel_lines"]

# Backgrounds of the shards: light, so that black text can be read on them.
_COLOURS = [f"black on color({number})" for number in (117, 222, 150, 182, 216, 158, 189, 229)]

#: Up to how many rows and columns a grid of which some places are free is drawn as one.
_MOST_SPARSE = 16

#: What stands in a place of a grid: lines of text, and their style.
Cell = tuple[list[str], str]


def grid_lines(grid: Grid, width: int, most_rows: int) -> Iterator[Line]:
    """Draw the panel of a grid of shards; see `grid_panel` for what is left out of it.

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
    yield from panel_lines(grid_panel(grid, width, most_rows))


def is_grid(panel: Panel) -> bool:
    """Whether the tiles of a panel stand in rows and columns; not all places need be taken, if these are few."""
    if panel.row_height is not None or not panel.tiles:
        return False
    rows, columns = (sorted(set(sides)) for sides in zip(*((t.down, t.across) for t in panel.tiles), strict=True))
    if any(one[1] > other[0] for sides in (rows, columns) for one, other in itertools.pairwise(sides)):
        return False
    places = {(tile.down, tile.across) for tile in panel.tiles}
    full = len(places) == len(rows) * len(columns)
    return len(places) == len(panel.tiles) and (full or max(len(rows), len(columns)) <= _MOST_SPARSE)


def panel_lines(
    panel: Panel, titles: bool = True, most: int = sys.maxsize, level: int = 0, stacked: bool = False
) -> Iterator[Line]:
    """Draw a panel whose tiles stand in rows and columns: frames, the ranges before and above them.

    Args:
        panel: A panel for which `is_grid` is true.
        titles: Whether to write the titles of the sides at the ranges.
        most: The most characters of a label; longer ones are shortened.
        level: Which of the labels of a tile to write; the last if there are fewer.
        stacked: Whether the lines of a label are below one another instead of side by side.
    """
    rows, columns = (sorted(set(sides)) for sides in zip(*((t.down, t.across) for t in panel.tiles), strict=True))
    places = {(tile.down, tile.across): tile for tile in panel.tiles}
    cells = [[_cell(places.get((row, column)), most, level, stacked) for column in columns] for row in rows]
    corner = panel.down.title if titles and panel.down is not None else ""
    labels = [corner, *(named(panel.down, row, most) for row in rows)]
    margin = max(map(width_of, labels))
    over = panel.across.title if titles and panel.across is not None else ""
    columns_named = [named(panel.across, column, most) for column in columns]
    yield from _framed([padded(text, margin, right=True) for text in labels], over, columns_named, cells)


def _cell(tile: Tile | None, most: int, level: int, stacked: bool) -> Cell:
    if tile is None:
        return [""], "dim"
    lines = tile.labels[min(level, len(tile.labels) - 1)] if tile.labels else ("",)
    texts = [short(line, most) for line in lines]
    return texts if stacked else [" · ".join(texts)], "dim" if tile.key is None else _COLOURS[tile.key % LOOKS]


def named(side: Side | None, bounds: tuple[int, int], most: int) -> str:
    """Give the label of a stretch of a side, or its bounds if it has none."""
    if side is None:
        return ""
    name = next((span.text for span in side.spans if (span.start, span.stop) == bounds), None)
    return short(name, most) if name is not None else f"{bounds[0]}:{bounds[1]}"


def _framed(labels: list[str], over: str, titles: list[str], cells: list[list[Cell]]) -> Iterator[Line]:
    """Put rows of cells into frames, with a title over each column and a label before each row.

    Args:
        labels: One for the corner, then one for each row, all of one length.
        over: What is written over all titles; without it there are none.
        titles: One for each column.
        cells: The rows.
    """
    corner, *labels = labels
    margin = " " * (width_of(corner) + 1)
    widths = [
        2 + max(width_of(title), *(width_of(text) for row in cells for text in row[column][0]))
        for column, title in enumerate(titles)
    ]

    def rule(left: str, middle: str, right: str) -> Line:
        return [(margin + left + middle.join("─" * width for width in widths) + right, "dim")]

    def centred(text: str, width: int) -> str:
        # `str.center` puts an odd space on varying sides.
        spaces = width - width_of(text)
        return " " * (spaces // 2) + text + " " * (spaces - spaces // 2)

    if over:
        yield [(f"{margin} {centred(over, sum(widths) + len(widths) - 1)}", "dim")]
    if any(titles):
        yield [(f"{corner}  ", "dim"), (" ".join(map(centred, titles, widths)), "")]
    yield rule("┌", "┬", "┐")
    for number, (label, row) in enumerate(zip(labels, cells, strict=True)):
        if number:
            yield rule("├", "┼", "┤")
        height = max(len(texts) for texts, _ in row)
        for at in range(height):
            line: Line = [(f"{label} " if at == (height - 1) // 2 else margin, "")]
            for (texts, style), width in zip(row, widths, strict=True):
                text = texts[at] if at < len(texts) else ""
                line += [("│", "dim"), (centred(text, width), style)]
            yield [*line, ("│", "dim")]
    yield rule("└", "┴", "┘")
