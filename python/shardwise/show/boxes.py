"""Pictures of tilings that are lists of boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..tiling import Tiling
from .lanes import ROW
from .picture import MOST_KEYS, MOST_NAMED, Panel, Side, Span, Tile, View, held_text

__all__ = ["boxes_view"]

_MOST_BOXES, _MOST_PANELS = 256, 8

Box = tuple[tuple[int, int], ...]


def boxes_view(tiling: Tiling, captions: tuple[str, ...]) -> tuple[View, tuple[str, ...]]:
    """Draw the boxes of a tiling, with the legend: who holds them. Identical boxes are one tile.

    Boxes that overlap without being identical have rows of their own, so that all can be seen.
    """
    boxes: dict[Box, list[int]] = {}
    count, notes = tiling._count, []
    for holder in range(count):
        pieces = tiling._core_tiling.pieces(holder)
        found: list[Box] = [tuple((side.start, side.stop) for side in piece) for piece, _ in pieces]
        new = [sides for sides in found if all(start < stop for start, stop in sides)]
        if len(boxes) + len(new) > _MOST_BOXES:
            notes.append(f"the boxes of the first {holder:,} of {count:,} holders are drawn")
            if holder:
                break
            notes[-1] = f"the first {_MOST_BOXES} boxes of the first of {count:,} holders are drawn"
        for sides in new[:_MOST_BOXES]:
            boxes.setdefault(sides, []).append(holder)
    if not boxes:
        return View(captions, (), (*notes, "there are no elements")), ()
    owners = list(dict.fromkeys(tuple(holders) for holders in boxes.values()))
    legend = tuple(_held(tiling, list(each)) for each in owners) if len(owners) <= MOST_KEYS else ()
    keys = {each: number if legend else None for number, each in enumerate(owners)}
    plane = _plane(list(boxes), len(tiling.shape))
    groups: dict[Any, list[Box]] = {}
    for box in boxes:
        groups.setdefault(tuple(side for dim, side in enumerate(box) if dim not in plane), []).append(box)
    if len(groups) > _MOST_PANELS:
        notes.append(f"only {_MOST_PANELS} of {len(groups)} slices are drawn")
    panels = []
    for deep, members in list(groups.items())[:_MOST_PANELS]:
        others = [dim for dim in range(len(tiling.shape)) if dim not in plane]
        heading = ", ".join(f"dim {dim} at {_range(side)}" for dim, side in zip(others, deep, strict=True))
        tiles = [(box, keys[tuple(boxes[box])], _held(tiling, boxes[box])) for box in members]
        panels.append(_panel(tiling, heading, tiles, plane))
    return View(captions, tuple(panels), tuple(notes)), legend


def _held(tiling: Tiling, holders: list[int]) -> str:
    text = held_text([tiling._label(holder) for holder in holders[:MOST_NAMED]], len(holders))
    return f"{text} ({len(holders):,} replicas)" if len(holders) > 1 else text


def _range(side: tuple[int, int]) -> str:
    return f"{side[0]}:{side[1]}"


def _plane(boxes: list[Box], rank: int) -> tuple[int, ...]:
    """The dims that a panel shows, at most two: the last along which the boxes differ, then the last of the others."""
    varied = [dim for dim in range(rank) if len({box[dim] for box in boxes}) > 1]
    chosen = varied[-2:]
    chosen += [dim for dim in reversed(range(rank)) if dim not in chosen][: 2 - len(chosen)]
    return tuple(sorted(chosen))


def _panel(tiling: Tiling, heading: str, tiles: list[tuple[Box, int | None, str]], plane: tuple[int, ...]) -> Panel:
    down = plane[0] if len(plane) > 1 else None
    across = plane[-1] if plane else None
    places = [tuple((0, 1) if dim is None else box[dim] for dim in (down, across)) for box, _, _ in tiles]
    apart = _overlap(places)
    drawn = []
    for row, ((box, key, held), (rows, columns)) in enumerate(zip(tiles, places, strict=True)):
        place = "[" + ", ".join(map(_range, box)) + "]"
        flat = _range(columns) if apart or down is None else f"{_range(rows)}, {_range(columns)}"
        labels = ((f"{held}: {place}",), (place,), (flat,)) if apart else ((held, flat), (held,), (flat,))
        drawn.append(Tile((row, row + 1) if apart else rows, columns, key, labels, place, held))
    if apart:
        spans = tuple(Span(row, row + 1, tile.held) for row, tile in enumerate(drawn))
        return Panel(
            f"{heading} boxes overlap: a row each".strip(),
            Side("", len(drawn), spans),
            _side(tiling, across, places, 1),
            tuple(drawn),
            ROW,
        )
    return Panel(heading, _side(tiling, down, places, 0), _side(tiling, across, places, 1), tuple(drawn))


def _side(tiling: Tiling, dim: int | None, places: list[Any], at: int) -> Side | None:
    """The side of a panel, with labels for as many bounds as do not overlap, from the first on."""
    if dim is None:
        return None
    spans: list[Span] = []
    for start, stop in sorted({place[at] for place in places}):
        if not spans or start >= spans[-1].stop:
            spans.append(Span(start, stop, f"{start}:{stop}"))
    return Side(f"dim {dim}: {tiling.shape[dim]}", tiling.shape[dim], tuple(spans))


def _overlap(places: list[Any]) -> bool:
    """Whether any two rectangles share a place."""
    bounds = np.array(places, np.int64).reshape(len(places), 2, 2)
    low = np.maximum(bounds[:, None, :, 0], bounds[None, :, :, 0])
    high = np.minimum(bounds[:, None, :, 1], bounds[None, :, :, 1])
    shared = (low < high).all(axis=2)
    return bool(shared.sum() > len(places))
