"""Pictures of plans: before, after, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._text import bytes_text
from ..show.lanes import holder_bars
from ..show.picture import MOST_KEYS, Panel, Picture, Side, Span, Tile, View, held_text
from ..show.views import tilings_picture
from ..tiling import Tiling

__all__ = ["loads_picture", "plan_picture"]

_MOST_TRANSFERS = 1 << 20
#: Up to how many holders have a row each, and how many rows there are for more, wide enough for their numbers.
_MOST_SIDE, _MOST_GROUPS = 16, 8


class Planned(Protocol):
    """The members of a plan that a picture needs."""

    @property
    def src(self) -> Tiling: ...
    @property
    def dst(self) -> Tiling: ...
    @property
    def transfers(self) -> npt.NDArray[np.void]: ...
    @property
    def kept(self) -> npt.NDArray[np.void]: ...
    def __len__(self) -> int: ...


def plan_picture(plan: Planned) -> Picture:
    """Give the picture of a plan: both tilings, and a table of the elements that go from each holder to each."""
    picture = tilings_picture([plan.src, plan.dst], ["before", "after"])
    count = len(plan)
    transfers = "1 transfer" if count == 1 else f"{count:,} transfers"
    if count > _MOST_TRANSFERS:
        view = View((f"{transfers}, too many to draw who sends to whom",), ())
        return replace(picture, views=(*picture.views, view), about=f"{picture.about} {transfers}.")
    senders, receivers = _Groups(plan.src), _Groups(plan.dst)
    sent, kept = (_volumes(boxes, senders, receivers) for boxes in (plan.transfers, plan.kept))
    moved, stays = sum(map(sum, sent)), sum(map(sum, kept))
    caption = f"{transfers} of {moved:,} elements in all; {stays:,} elements stay where they are"
    fits = len(picture.legend) + 2 <= MOST_KEYS
    keys = (len(picture.legend), len(picture.legend) + 1) if fits else (None, None)
    tiles = tuple(
        _tile(row, column, sent[row][column], kept[row][column], keys, senders, receivers)
        for row in range(senders.count)
        for column in range(receivers.count)
        if sent[row][column] or kept[row][column]
    )
    both = any(
        sent[row][column] and kept[row][column] for row in range(senders.count) for column in range(receivers.count)
    )
    heading = "elements from each holder to each" + "; of two numbers the second stays" * both
    panel = Panel(heading, senders.side("from"), receivers.side("to"), tiles)
    return replace(
        picture,
        about=f"{picture.about} {caption}.",
        views=(*picture.views, View((caption,), (panel,) if tiles else ())),
        legend=(*picture.legend, *(("sent to another", "stays") if fits else ())),
    )


class _Groups:
    """The holders of a tiling; if there are many, in groups of neighbours."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling, self._holders = tiling, tiling._count
        self.each = 1 if self._holders <= _MOST_SIDE else -(-self._holders // _MOST_GROUPS)
        self.count = -(-self._holders // self.each)

    def name(self, group: int) -> str:
        start, stop = group * self.each, min((group + 1) * self.each, self._holders)
        return held_text(map(self._tiling._label, range(start, stop)), stop - start)

    def side(self, title: str) -> Side:
        title += f" {self._holders:,} holders" if self.each > 1 else ""
        spans = tuple(Span(group, group + 1, self.name(group)) for group in range(self.count))
        return Side(title, max(self.count, 1), spans)


def _volumes(boxes: npt.NDArray[np.void], senders: _Groups, receivers: _Groups) -> list[list[int]]:
    """Add up the elements of boxes by sender and receiver, exactly: halves of 31 bits, whose sums a float64 holds."""
    volumes = (boxes["stop"] - boxes["start"]).prod(axis=1, dtype=np.int64)
    places = boxes["src_device"] // senders.each * receivers.count + boxes["dst_device"] // receivers.each
    size = senders.count * receivers.count
    high, low = (np.bincount(places, part, size) for part in (volumes >> 31, volumes & (2**31 - 1)))
    sums = [(int(upper) << 31) + int(lower) for upper, lower in zip(high, low, strict=True)]
    return [sums[row * receivers.count : (row + 1) * receivers.count] for row in range(senders.count)]


def _tile(
    row: int,
    column: int,
    sent: int,
    kept: int,
    keys: tuple[int | None, int | None],
    senders: _Groups,
    receivers: _Groups,
) -> Tile:
    lines = tuple(text for text in (f"{sent:,} sent" * bool(sent), f"{kept:,} stay" * bool(kept)) if text)
    brief = tuple(f"{number:.2g}" for number in (sent, kept) if number)
    place = f"{senders.name(row)} to {receivers.name(column)}"
    labels = (lines, tuple(line.split()[0] for line in lines), brief)
    return Tile((row, row + 1), (column, column + 1), keys[0 if sent else 1], labels, place, ", ".join(lines))


def loads_picture(
    title: str, loads: Mapping[str, Mapping[Any, int]], text: Callable[[int], str] = bytes_text
) -> Picture:
    """Draw bars of what each holder sends, receives and keeps: for each of these a number by holder."""
    panels, sums = [], []
    for key, (name, each) in enumerate(loads.items()):
        sums.append(f"{text(sum(each.values()))} {name}")
        if any(each.values()):
            panels.append(holder_bars(name, list(each), list(each.values()), key, text))
    about = f"{title}: {', '.join(sums)}"
    return Picture(title, f"{about}.", (View((title, ", ".join(sums)), tuple(panels)),), tuple(loads))
