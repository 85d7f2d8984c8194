"""Pictures as lines of text, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .lines import Line, padded, printable, width_of
from .picture import Panel, Picture, Tile, short
from .terminal import is_grid, panel_lines, side_label

__all__ = ["lines_of", "text_of"]

#: The width of a picture, unless a name or a number alone is wider.
_WIDTH = 80
#: The length of a bar, and the least of one that leaves room for labels.
_BAR, _SHORTEST = 40, 12
_MOST = 56
#: The most pieces in a row that are all named.
_MOST_NAMED = 4


def text_of(picture: Picture) -> str:
    """Write a picture as text, 80 columns wide: full grids as panels with frames, others as lists.

    If there is no room for the longest labels, their lines go below one another, shorter labels are used, or the
    columns of a panel continue in further frames. Numbers are never cut.

    >>> from shardwise.show.picture import PanelSide, Span, View
    >>> rows = PanelSide("dim 0: 2", 2, (Span(0, 2, "0:2"),))
    >>> sides = rows, PanelSide("dim 1: 4", 4, (Span(0, 2, "0:2"), Span(2, 4, "2:4")))
    >>> tiles = tuple(Tile((0, 2), (at, at + 2), None, ((f"cpu:{at}",),), "", "") for at in (0, 2))
    >>> print(text_of(Picture("", "", (View(("two",), (Panel("", *sides, tiles),)),))))
    two
    ↓ dim 0: 2
    → dim 1: 4
           0:2     2:4
         ┌───────┬───────┐
     0:2 │ cpu:0 │ cpu:2 │
         └───────┴───────┘
    """
    return "\n".join("".join(printable(text) for text, _ in line).rstrip() for line in lines_of(picture, _WIDTH))


def lines_of(picture: Picture, width: int) -> Iterator[Line]:
    """Yield the lines of a picture as text, with the styles of its tiles; see `text_of`."""
    for number, view in enumerate(picture.views):
        if number:
            yield []
        if number == 1 and picture.turns:
            yield [("↓", "")]
        yield from _wrapped(view.captions, width)
        for panel in view.panels:
            yield from _panel(panel, width)
        yield from _wrapped(view.notes, width)


def _wrapped(lines: Sequence[str], width: int) -> Iterator[Line]:
    for line in lines:
        texts = textwrap.wrap(short(line, 200), width, subsequent_indent="  ", break_long_words=False) or [""]
        yield from ([(text, "")] for text in texts)


def _panel(panel: Panel, width: int) -> Iterator[Line]:
    if panel.heading:
        yield from _wrapped([panel.heading], width)
    for arrow, side in (("↓", panel.down), ("→", panel.across)):
        if side is not None and side.title:
            yield from _wrapped([f"{arrow} {side.title}"], width)
    if panel.row_height is not None and panel.down is not None:
        yield from ([(text, "")] for text in _rows(panel, width))
    elif is_grid(panel):
        yield from _grid(panel, width)
    else:
        yield from ([(text, "")] for text in _list(panel, width))


def _grid(panel: Panel, width: int) -> Iterator[Line]:
    """Draw a panel with the longest labels that fit; if none do, in several frames, or as a list if it is one row."""
    # Rather than labels that do not say who, several frames.
    levels = max(len(tile.labels) if tile.naming is None else tile.naming for tile in panel.tiles)
    ways = [(level, stacked) for level in range(max(levels, 1)) for stacked in (False, True)]
    for level, stacked in ways:
        lines = _framed(panel, level, stacked)
        if _fits(lines, width):
            yield from lines
            return
    columns = sorted({tile.across for tile in panel.tiles})
    if len({tile.down for tile in panel.tiles}) == 1 and len(columns) > 1:
        yield from ([(text, "")] for text in _list(panel, width))
        return
    level, stacked = min(ways, key=lambda way: max(map(_width_of, _framed(panel, *way))))
    while columns:
        count = len(columns)
        while count > 1 and not _fits(_framed(_part(panel, columns[:count]), level, stacked), width):
            count -= 1
        yield from _framed(_part(panel, columns[:count]), level, stacked)
        columns = columns[count:]


def _part(panel: Panel, columns: Sequence[tuple[int, int]]) -> Panel:
    return replace(panel, tiles=tuple(tile for tile in panel.tiles if tile.across in columns))


def _framed(panel: Panel, level: int, stacked: bool) -> list[Line]:
    return [[(" ", ""), *line] for line in panel_lines(panel, most=_MOST, level=level, stacked=stacked)]


def _width_of(line: Line) -> int:
    return sum(width_of(text) for text, _ in line)


def _fits(lines: Sequence[Line], width: int) -> bool:
    return all(_width_of(line) <= width for line in lines)


def _rows(panel: Panel, width: int) -> Iterator[str]:
    """List the rows of a panel: the name of each, a bar with all its tiles, what they are."""
    rows = [(span.start, span.stop) for span in panel.down.spans] if panel.down is not None else []
    tiles: dict[tuple[int, int], list[Tile]] = {row: [] for row in rows}
    for tile in panel.tiles:
        tiles.setdefault(tile.down, []).append(tile)
    names = [side_label(panel.down, row, _MOST) for row in tiles]
    yield from _listed(panel, names, list(tiles.values()), width)


def _list(panel: Panel, width: int) -> Iterator[str]:
    """List the tiles of a panel: the ranges of each, a bar at its place, who holds it."""
    sides = [
        [side_label(side, place, _MOST) for place in places]
        for side, places in (
            (panel.down, [tile.down for tile in panel.tiles]),
            (panel.across, [tile.across for tile in panel.tiles]),
        )
        if side is not None
    ]
    widths = [max(map(width_of, texts)) for texts in sides]
    names = ["  ".join(map(padded, texts, widths)) for texts in zip(*sides, strict=True)]
    yield from _listed(panel, names or [""] * len(panel.tiles), [[tile] for tile in panel.tiles], width)


def _listed(panel: Panel, names: Sequence[str], rows: Sequence[Sequence[Tile]], width: int) -> Iterator[str]:
    left = max(map(width_of, names), default=0)
    room = width - left - 6
    texts = [_text(tiles, 0) for tiles in rows]
    if max(map(width_of, texts), default=0) > room - _SHORTEST:
        texts = [_text(tiles, 1) for tiles in rows]
    longest = max(map(width_of, texts), default=0)
    below = longest > room - _SHORTEST
    if below:
        texts = [_text(tiles, 0) for tiles in rows]
    bar = max(min(_BAR, room if below else room - longest), _SHORTEST)
    for name, tiles, text in zip(names, rows, texts, strict=True):
        line = f"  {padded(name, left)}  {_bar(panel, tiles, bar)}"
        if not below:
            yield f"{line}  {text}"
            continue
        yield line
        yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)


def _text(tiles: Sequence[Tile], level: int) -> str:
    """Return the labels on the tiles of a row; of many on the first and the last only."""
    texts = [short(tile.labels[min(level, len(tile.labels) - 1)][0], _MOST) for tile in tiles if tile.labels]
    if len(texts) > _MOST_NAMED:
        return f"{texts[0]}, {texts[1]}, …, {texts[-1]} ({len(texts):,} pieces)"
    return ", ".join(texts)


def _bar(panel: Panel, tiles: Sequence[Tile], length: int) -> str:
    """Return a line on which tiles stand out at their places, neighbours in different letters."""
    size = max(panel.across.size if panel.across is not None else 1, 1)
    letters = ["·"] * length
    for number, tile in enumerate(tiles):
        low, high = (bound * length // size for bound in tile.across)
        low = min(low, length - 1)
        for at in range(low, max(high, low + 1)):
            letters[at] = "█▓▒"[number % 3]
    return "".join(letters)
