"""Pictures as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .lines import printable
from .picture import Panel, Picture, Side, Tile, short
from .terminal import framed

__all__ = ["text_of"]

_BAR = 40
_MOST = 48


def text_of(picture: Picture) -> str:
    """Write a picture as text: panels that are full grids with frames, others as lists.

    >>> from shardwise.show.picture import Span, View
    >>> sides = Side("dim 0: 2", 2, (Span(0, 2, "0:2"),)), Side("dim 1: 4", 4, (Span(0, 2, "0:2"), Span(2, 4, "2:4")))
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
    lines: list[str] = []
    for number, view in enumerate(picture.views):
        if number:
            lines += ["", "↓" if picture.turns else ""][: 1 + picture.turns]
        lines += [short(line, 200) for line in view.captions]
        for panel in view.panels:
            lines += _panel(panel)
        lines += [short(line, 200) for line in view.notes]
    return "\n".join(printable(line).rstrip() for line in lines)


def _panel(panel: Panel) -> Iterator[str]:
    if panel.heading:
        yield panel.heading
    for arrow, side in (("↓", panel.down), ("→", panel.across)):
        if side is not None and side.title:
            yield f"{arrow} {short(side.title, 200)}"
    rows = list(dict.fromkeys(tile.down for tile in panel.tiles))
    columns = list(dict.fromkeys(tile.across for tile in panel.tiles))
    places = {(tile.down, tile.across): tile for tile in panel.tiles}
    if panel.row_height is None and len(places) == len(panel.tiles) == len(rows) * len(columns):
        cells = [[(_label(places[row, column]), "") for column in columns] for row in rows]
        labels = [_named(panel.down, row) for row in rows]
        titles = [_named(panel.across, column) for column in columns]
        margin = max(map(len, ["", *labels]))
        for line in framed([text.rjust(margin) for text in ("", *labels)], "", titles, cells):
            yield " " + "".join(text for text, _ in line)
        return
    for tile in panel.tiles:
        label = f"  {short(tile.labels[0][0], _MOST)}" if tile.labels else ""
        yield f"  {_named(panel.down, tile.down)}  {_bar(panel, tile)}{label}"


def _label(tile: Tile) -> str:
    return short(" · ".join(tile.labels[0]) if tile.labels else "", 40)


def _named(side: Side | None, bounds: tuple[int, int]) -> str:
    """The label of a stretch of a side, or its bounds if it has none."""
    if side is None:
        return ""
    return next(
        (short(span.text, _MOST) for span in side.spans if (span.start, span.stop) == bounds),
        f"{bounds[0]}:{bounds[1]}",
    )


def _bar(panel: Panel, tile: Tile) -> str:
    """A line on which a tile stands out at its place."""
    size = panel.across.size if panel.across is not None else 1
    low, high = (bound * _BAR // max(size, 1) for bound in tile.across)
    high = max(high, low + 1)
    return "·" * low + "█" * (high - low) + "·" * (_BAR - high)
