"""Pictures as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .lines import printable
from .picture import Panel, Picture, Tile, short
from .terminal import is_grid, named, panel_lines

__all__ = ["text_of"]

_BAR = 40
_MOST = 48


def text_of(picture: Picture) -> str:
    """Write a picture as text: full grids as panels with frames, others as lists.

    >>> from shardwise.show.picture import Side, Span, View
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
    if is_grid(panel):
        for line in panel_lines(panel, titles=False, most=_MOST):
            yield " " + "".join(text for text, _ in line)
        return
    for tile in panel.tiles:
        label = f"  {short(tile.labels[0][0], _MOST)}" if tile.labels else ""
        yield f"  {named(panel.down, tile.down, _MOST)}  {_bar(panel, tile)}{label}"


def _bar(panel: Panel, tile: Tile) -> str:
    """A line with a tile marked at its place."""
    size = panel.across.size if panel.across is not None else 1
    low, high = (bound * _BAR // max(size, 1) for bound in tile.across)
    high = max(high, low + 1)
    return "·" * low + "█" * (high - low) + "·" * (_BAR - high)
