"""Pictures of plans: the tilings before and after, and the bytes that each holder sends to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._dtypes import find_dtype, itemsize_of
from .._text import bytes_text, counted
from ..show.lanes import holder_bars
from ..show.picture import Panel, PanelSide, Picture, Span, Tile, View, held_text
from ..show.views import tilings_picture
from ..tiling import Tiling

__all__ = ["loads_picture", "plan_picture"]

_MOST_TRANSFERS = 1 << 20
#: The most holders with a row each; and the number of rows for more holders, wide enough for their numbers.
_MOST_SIDE, _MOST_GROUPS = 16, 8


class HasTransfers(Protocol):
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


def plan_picture(plan: HasTransfers, dtype: npt.DTypeLike = np.float32) -> Picture:
    """Give the picture of a plan for a tensor of `dtype`: both tilings, and the bytes that go from each holder to each.

    The stronger the grey of a cell, the more is sent: the picture has colours for shards only.
    """
    picture = tilings_picture([plan.src, plan.dst], ["before", "after"])
    count, itemsize = len(plan), itemsize_of(dtype)
    transfers = counted(count, "transfer")
    if count > _MOST_TRANSFERS:
        view = View((f"{transfers}, which are too many to draw",), ())
        return replace(picture, views=(*picture.views, view), about=f"{picture.about} {transfers}.")
    senders, receivers = _HolderGroups(plan.src), _HolderGroups(plan.dst)
    sent, kept = (_volumes(boxes, senders, receivers, itemsize) for boxes in (plan.transfers, plan.kept))
    moved, stays = sum(map(sum, sent)), sum(map(sum, kept))
    caption = f"{transfers}, {bytes_text(moved)} of {_name(dtype)} in all; {bytes_text(stays)} stay where they are"
    most = max(map(max, sent), default=0)
    tiles = tuple(
        _tile((row, column), f"{sender} to {receivers.name(column)}", sent[row][column], kept[row][column], most)
        for row, sender in enumerate(map(senders.name, range(senders.count)))
        for column in range(receivers.count)
        if sent[row][column] or kept[row][column]
    )
    given = [sum(row) for row in sent]
    gotten = [sum(column) for column in zip(*sent, strict=True)]
    panel = Panel("", senders.side("from", "sends", given), receivers.side("to", "gets", gotten), tiles)
    scale = (f"bytes from each holder to each; a stronger shade means more, up to {bytes_text(most)}",) * bool(most)
    return replace(
        picture,
        about=f"{picture.about} {caption}.",
        views=(*picture.views, View((caption, *scale), (panel,) if tiles else ())),
    )


class _HolderGroups:
    """The holders of a tiling, in groups of neighbours if there are many."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling, self._holders = tiling, tiling.holder_count
        self.each = 1 if self._holders <= _MOST_SIDE else -(-self._holders // _MOST_GROUPS)
        self.count = -(-self._holders // self.each)

    def name(self, group: int) -> str:
        start, stop = group * self.each, min((group + 1) * self.each, self._holders)
        return held_text(map(self._tiling.holder_label, range(start, stop)), stop - start)

    def side(self, title: str, verb: str, sums: Sequence[int]) -> PanelSide:
        title += f" {self._holders:,} holders" if self.each > 1 else ""
        names = [
            f"{held_text([self._tiling.holder_label(group * self.each)], 1)} …" if self.each > 1 else self.name(group)
            for group in range(self.count)
        ]
        spans = tuple(
            Span(group, group + 1, f"{names[group]} {verb} {bytes_text(total)}" if total else names[group])
            for group, total in enumerate(sums)
        )
        return PanelSide(title, max(self.count, 1), spans)


def _volumes(
    boxes: npt.NDArray[np.void], senders: _HolderGroups, receivers: _HolderGroups, itemsize: int
) -> list[list[int]]:
    """Return the bytes of boxes added up by sender and receiver, exactly: 31-bit halves are added in float64."""
    volumes = (boxes["stop"] - boxes["start"]).prod(axis=1, dtype=np.int64)
    places = boxes["src_device"] // senders.each * receivers.count + boxes["dst_device"] // receivers.each
    size = senders.count * receivers.count
    high, low = (np.bincount(places, part, size) for part in (volumes >> 31, volumes & (2**31 - 1)))
    sums = [((int(upper) << 31) + int(lower)) * itemsize for upper, lower in zip(high, low, strict=True)]
    return [sums[row * receivers.count : (row + 1) * receivers.count] for row in range(senders.count)]


def _tile(at: tuple[int, int], place: str, sent: int, kept: int, most: int) -> Tile:
    moves, stays = bytes_text(sent), f"{bytes_text(kept)} stay"
    number, unit = moves.split()
    brief = (f"{float(number):.0f}", unit)
    if not sent:
        labels: tuple[tuple[str, ...], ...] = ((stays,), (bytes_text(kept), "stay"), ("stay",))
    elif not kept:
        labels = ((moves,), (" ".join(brief),), (number, unit), brief)
    else:
        labels = ((moves, stays), (moves, *stays.rsplit(" ", 1)), (moves,), (number, unit), brief)
    held = ", ".join(text for text, size in ((f"{moves} sent", sent), (stays, kept)) if size)
    sides = [(start, start + 1) for start in at]
    return Tile(sides[0], sides[1], None, labels, place, held, amount=sent / most if sent else 0.0)


def loads_picture(
    title: str, loads: Mapping[str, Mapping[Any, int]], text: Callable[[int], str] = bytes_text
) -> Picture:
    """Return bars of the bytes that each holder sends, receives and keeps."""
    panels, sums = [], []
    for name, each in loads.items():
        sums.append(f"{text(sum(each.values()))} {name}")
        if any(each.values()):
            panels.append(holder_bars(name, list(each), list(each.values()), text))
    about = f"{title}: {', '.join(sums)}"
    return Picture(title, f"{about}.", (View((title, ", ".join(sums)), tuple(panels)),))


def _name(dtype: npt.DTypeLike) -> str:
    found = find_dtype(dtype)
    return str(dtype) if found is None else found.name
