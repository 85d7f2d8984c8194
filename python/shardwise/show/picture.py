"""The model of a picture, whatever draws it: tiles on panels, the ranges of their sides, a legend."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from .names import brief

__all__ = [
    "MOST_KEYS",
    "Drawable",
    "Panel",
    "PanelSide",
    "Picture",
    "Span",
    "Tile",
    "View",
    "held_text",
    "replicas_text",
    "short",
    "xml_text",
]

#: The number of kinds of tiles that a picture tells apart by colour and pattern.
MOST_KEYS = 32
#: The most holders that are all named; of more only the first is, with their number.
MOST_NAMED = 64


@dataclass(frozen=True)
class Span:
    """A range of a side, with its label."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class PanelSide:
    """One side of a panel: what it is, its length in the units of the places of tiles, and its labelled ranges."""

    title: str
    size: int
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A rectangle on a panel.

    Attributes:
        down: Where it begins and ends from top to bottom, in the units of the panel's side.
        across: Where it begins and ends from left to right.
        key: The number of its shard, from which it has its look, and of its entry in the legend; `None` for a tile that
            is no shard, or one of too many.
        labels: What to write on it, as lines; the first for which there is room.
        place: The part of the whole that it is.
        caption: The holders, or the amount, as text.
        seams_down: Where it is cut inside, if it stands for several.
        seams_across: The same from left to right.
        naming: How many of the labels, from the first on, say who holds it; `None` for all of them.
        amount: How much it is as a share of the most, for a tile that is shaded by that.
    """

    down: tuple[int, int]
    across: tuple[int, int]
    key: int | None
    labels: tuple[tuple[str, ...], ...]
    place: str
    caption: str
    seams_down: tuple[int, ...] = ()
    seams_across: tuple[int, ...] = ()
    naming: int | None = None
    amount: float | None = None


@dataclass(frozen=True)
class Panel:
    """Tiles between two sides; without a side there is one position along it.

    `row_height` is the height of a unit of the side `down`, for panels whose rows are a list, each with its name;
    without it a panel is as wide and as high as its sides are long, within limits.
    """

    heading: str
    down: PanelSide | None
    across: PanelSide | None
    tiles: tuple[Tile, ...]
    row_height: int | None = None


@dataclass(frozen=True)
class View:
    """One thing drawn: what it is, its panels, and what they do not show."""

    captions: tuple[str, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Views, and whose tiles have which look.

    Attributes:
        title: What the picture shows, in a few words.
        about: What it says, in sentences, for those who cannot see it.
        views: The views that are drawn.
        legend: Who holds each shard; `Tile.key` counts these. It is drawn only if tiles have no room for their names.
        turns: Whether an arrow leads from the first view to the second, which is next to it if there is room.
    """

    title: str
    about: str
    views: tuple[View, ...]
    legend: tuple[str, ...] = ()
    turns: bool = False

    def tiles(self) -> Iterable[Tile]:
        """Return the tiles of all panels."""
        return (tile for view in self.views for panel in view.panels for tile in panel.tiles)


class Drawable(Protocol):
    """An object with a picture of its own."""

    def _picture(self) -> Picture: ...


def xml_text(text: str) -> str:
    r"""Return text without characters that XML does not allow, and without control characters.

    >>> xml_text("a\0b")
    'a\ufffdb'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def short(text: str, size: int) -> str:
    """Return text of at most `size` characters; anything beyond that is taken out of its middle.

    >>> short("model.layers.0.self_attn", 11)
    'mode…f_attn'
    """
    if len(text) <= size:
        return text
    head = (size - 1) * 2 // 5
    return f"{text[:head]}…{text[len(text) - (size - 1 - head) :]}"


def held_text(labels: Iterable[Any], count: int) -> str:
    """Write holders briefly: `labels` are all of them, or the first ones where there are many; few are looked at.

    >>> held_text(["cpu:0", "cpu:1"], 2), held_text(["cpu:0", "cpu:1"], 4096)
    ('cpu:0,1', 'cpu:0 and 4,095 more')
    """
    names = [short(xml_text(_text(label)), 40) for label in itertools.islice(labels, MOST_NAMED)]
    if not names:
        return "no holder"
    return brief(names) if len(names) == count else f"{names[0]} and {count - 1:,} more"


def replicas_text(held: str, count: int, copies: str = "replicas") -> str:
    """Add to the holders of something how many they are, if there is more than one."""
    return f"{held} ({count:,} {copies})" if count > 1 else held


def _text(label: Any) -> str:
    try:
        return str(label)
    except Exception:  # The label may be of a caller's class, which may raise anything.
        return f"a {type(label).__name__}"
