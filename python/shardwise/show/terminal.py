"""Panels as lines of text with frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .grid import LOOKS, Grid, grid_panel
from .lines import Line, Part
from .picture import Panel, Side, Tile, short

__all__ = ["grid_lines", "is_grid", "named", "panel_lines"]

# Backgrounds of the shards: light, so that black text can be read on them.
_COLOURS = [f"black on color({number})" for number in (117, 222, 150, 182, 216, 158, 189, 229)]


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
    """Whether the tiles of a panel fill rows and columns."""
    rows, columns = {tile.down for tile in panel.tiles}, {tile.across for tile in panel.tiles}
    places = {(tile.down, tile.across) for tile in panel.tiles}
    return panel.row_height is None and len(places) == len(panel.tiles) == len(rows) * len(columns)


def panel_lines(panel: Panel, titles: bool = True, most: int = sys.maxsize) -> Iterator[Line]:
    """Draw a panel whose tiles fill rows and columns: frames, the ranges before and above them.

    Args:
        panel: A panel for which `is_grid` is true.
        titles: Whether to write the titles of the sides at the ranges.
        most: The most characters of a label; longer ones are shortened.
    """
    rows = list(dict.fromkeys(tile.down for tile in panel.tiles))
    columns = list(dict.fromkeys(tile.across for tile in panel.tiles))
    places = {(tile.down, tile.across): tile for tile in panel.tiles}
    cells = [[_part(places[row, column], most) for column in columns] for row in rows]
    corner = panel.down.title if titles and panel.down is not None else ""
    labels = [corner, *(named(panel.down, row, most) for row in rows)]
    margin = max(map(len, labels))
    over = panel.across.title if titles and panel.across is not None else ""
    columns_named = [named(panel.across, column, most) for column in columns]
    yield from _framed([text.rjust(margin) for text in labels], over, columns_named, cells)


def _part(tile: Tile, most: int) -> Part:
    text = short(" · ".join(tile.labels[0]), most) if tile.labels else ""
    return text, "dim" if tile.key is None else _COLOURS[tile.key % LOOKS]


def named(side: Side | None, bounds: tuple[int, int], most: int) -> str:
    """Give the label of a stretch of a side, or its bounds if it has none."""
    if side is None:
        return ""
    name = next((span.text for span in side.spans if (span.start, span.stop) == bounds), None)
    return short(name, most) if name is not None else f"{bounds[0]}:{bounds[1]}"


def _framed(labels: list[str], over: str, titles: list[str], cells: list[list[Part]]) -> Iterator[Line]:
    """Put rows of cells into frames, with a title over each column and a label before each row.

    Args:
        labels: One for the corner, then one for each row, all of one length.
        over: What is written over all titles; without it there are none.
        titles: One for each column.
        cells: The rows.
    """
    corner, *labels = labels
    margin = " " * (len(corner) + 1)
    widths = [2 + max(len(title), *(len(row[column][0]) for row in cells)) for column, title in enumerate(titles)]

    def rule(left: str, middle: str, right: str) -> Line:
        return [(margin + left + middle.join("─" * width for width in widths) + right, "dim")]

    def centred(text: str, width: int) -> str:
        # `str.center` puts an odd space on varying sides.
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
