"""Panels as lines of text with frames."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

from .colours import FILLS, INK, look
from .lines import Line, padded, width_of
from .picture import Panel, PanelSide, Tile, short

__all__ = ["is_grid", "panel_lines", "side_label"]

#: The styles in a terminal that stand for the patterns of pictures, in their order.
_LETTERS = ("", "underline ", "bold ", "italic ", "bold underline ", "italic underline ")

#: The most rows and columns of a grid that is drawn as one though some of its places are free.
_MOST_SPARSE = 16

#: The contents of a place of a grid: lines of text, and their style.
TextCell = tuple[list[str], str]


def is_grid(panel: Panel) -> bool:
    """Return whether the tiles of a panel stand in rows and columns; not all places need be taken, if these are few."""
    if panel.row_height is not None or not panel.tiles:
        return False
    rows, columns = (sorted(set(sides)) for sides in zip(*((t.down, t.across) for t in panel.tiles), strict=True))
    if any(one[1] > other[0] for sides in (rows, columns) for one, other in itertools.pairwise(sides)):
        return False
    places = {(tile.down, tile.across) for tile in panel.tiles}
    full = len(places) == len(rows) * len(columns)
    return len(places) == len(panel.tiles) and (full or max(len(rows), len(columns)) <= _MOST_SPARSE)


def panel_lines(panel: Panel, most: int = sys.maxsize, level: int = 0, stacked: bool = False) -> Iterator[Line]:
    """Draw a panel whose tiles stand in rows and columns: frames, the ranges before and above them.

    Args:
        panel: A panel for which `is_grid` is true.
        most: The most characters of a label; longer ones are shortened.
        level: Which of the labels of a tile to write; the last if there are fewer.
        stacked: Whether the lines of a label are below one another instead of side by side.
    """
    rows, columns = (sorted(set(sides)) for sides in zip(*((t.down, t.across) for t in panel.tiles), strict=True))
    places = {(tile.down, tile.across): tile for tile in panel.tiles}
    cells = [[_cell(places.get((row, column)), most, level, stacked) for column in columns] for row in rows]
    labels = [side_label(panel.down, row, most) for row in rows]
    margin = max(map(width_of, labels))
    titles = [side_label(panel.across, column, most) for column in columns]
    yield from _framed([padded(text, margin, right=True) for text in labels], titles, cells)


def _cell(tile: Tile | None, most: int, level: int, stacked: bool) -> TextCell:
    if tile is None:
        return [""], "dim"
    lines = tile.labels[min(level, len(tile.labels) - 1)] if tile.labels else ("",)
    texts = [short(line, most) for line in lines]
    style = ""
    if tile.key is not None:
        style = f"{_LETTERS[tile.key // len(FILLS) % len(_LETTERS)]}{INK} on {look(tile.key)[0]}"
    return texts if stacked else [" · ".join(texts)], style


def side_label(side: PanelSide | None, bounds: tuple[int, int], most: int) -> str:
    """Return the label of a range of a side, or its bounds if it has none."""
    if side is None:
        return ""
    name = next((span.text for span in side.spans if (span.start, span.stop) == bounds), None)
    return short(name, most) if name is not None else f"{bounds[0]}:{bounds[1]}"


def _framed(labels: list[str], titles: list[str], cells: list[list[TextCell]]) -> Iterator[Line]:
    """Put rows of cells into frames, with a title over each column and a label, all of one length, before each row."""
    margin = " " * (width_of(labels[0]) + 1)
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

    if any(titles):
        yield [(f"{margin} ", ""), (" ".join(map(centred, titles, widths)), "")]
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
