"""Pictures of tilings that are lists of boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..tiling import Tiling
from .cells import plane_of
from .lanes import ROW
from .picture import MOST_KEYS, Panel, PanelSide, Span, Tile, View, held_text, replicas_text

__all__ = ["boxes_view"]

_MOST_BOXES, _MOST_PANELS, _MOST_READ = 256, 8, 1 << 13

Box = tuple[tuple[int, int], ...]


def boxes_view(tiling: Tiling, captions: tuple[str, ...]) -> tuple[View, list[tuple[Any, str]]]:
    """Return the panels of a tiling's boxes, the groups of holders, and these as text. Identical boxes are one tile.

    Boxes that overlap without being identical get rows of their own, so that all can be seen. If there are too many,
    touching boxes of one holder are drawn as one, and then those of neighbouring holders.
    """
    held, notes = _read(tiling)
    if not any(held):
        return View(captions, (), (*notes, _nothing(tiling))), []
    each, boxes = 1, _by_box(held, 1)
    if len(boxes) > _MOST_BOXES:
        notes.append(f"{sum(map(len, held)):,} boxes; those that touch are drawn as one")
        boxes = _by_box(held, 1, joined=True)
    while len(boxes) > _MOST_BOXES and each < len(held):
        each = min(max(2 * each, -(-len(held) // MOST_KEYS)), len(held))
        boxes = _by_box(held, each, joined=True)
    if len(boxes) > _MOST_BOXES:
        notes.append(f"{_MOST_BOXES} of {len(boxes):,} boxes are drawn")
        boxes = dict(list(boxes.items())[:_MOST_BOXES])
    owners = list(dict.fromkeys(tuple(groups) for groups in boxes.values()))
    texts = {groups: _held(tiling, groups, each, len(held)) for groups in owners}
    keys = {each: number for number, each in enumerate(owners)}
    counts = [len({box[dim] for box in boxes}) for dim in range(len(tiling.shape))]
    plane = plane_of([counts])
    groups: dict[Any, list[Box]] = {}
    for box in boxes:
        groups.setdefault(tuple(side for dim, side in enumerate(box) if dim not in plane), []).append(box)
    if len(groups) > _MOST_PANELS:
        notes.append(f"only {_MOST_PANELS} of {len(groups)} slices are drawn")
    panels = []
    for deep, members in list(groups.items())[:_MOST_PANELS]:
        others = [dim for dim in range(len(tiling.shape)) if dim not in plane]
        heading = ", ".join(f"dim {dim} at {_range(side)}" for dim, side in zip(others, deep, strict=True))
        tiles = [(box, keys[tuple(boxes[box])], texts[tuple(boxes[box])]) for box in members]
        panels.append(_panel(tiling, heading, tiles, plane))
    # One holder alone has the name that it has in other tilings.
    names = [tiling.holder_label(own[0]) if each == 1 and len(own) == 1 else (each, *own) for own in owners]
    return View(captions, tuple(panels), tuple(notes)), list(zip(names, texts.values(), strict=True))


def _nothing(tiling: Tiling) -> str:
    return "no holder has an element" if math.prod(tiling.shape) else "the tensor has no elements"


def _read(tiling: Tiling) -> tuple[list[list[Box]], list[str]]:
    """Return the boxes of each holder, up to a limit, and a note on the others."""
    held: list[list[Box]] = []
    room = _MOST_READ
    for holder in range(tiling.holder_count):
        pieces = tiling.core_tiling().pieces(holder)
        boxes: list[Box] = [tuple((side.start, side.stop) for side in piece) for piece, _ in pieces]
        boxes = [sides for sides in boxes if all(start < stop for start, stop in sides)]
        if (held and len(boxes) > room) or room <= 0:
            return held, [f"the boxes of the first {holder:,} of {tiling.holder_count:,} holders are drawn"]
        held.append(boxes[:room])
        if len(boxes) > room:
            name = held_text([tiling.holder_label(holder)], 1)
            return held, [f"the first {room:,} of the {len(boxes):,} boxes of {name} are drawn"]
        room -= max(len(boxes), 1)
    return held, []


def _by_box(held: list[list[Box]], each: int, joined: bool = False) -> dict[Box, list[int]]:
    """Return the groups of `each` holders that have each box; if `joined`, touching boxes of a group are one."""
    boxes: dict[Box, list[int]] = {}
    for group, first in enumerate(range(0, len(held), each)):
        own = list(dict.fromkeys(box for holder in held[first : first + each] for box in holder))
        for box in _joined(own) if joined else own:
            boxes.setdefault(box, []).append(group)
    return boxes


def _joined(boxes: list[Box]) -> list[Box]:
    """Join boxes that touch and differ along one dim only, dim by dim, the last one first."""
    for dim in reversed(range(len(boxes[0]) if boxes else 0)):
        lines: dict[Box, list[tuple[int, int]]] = {}
        for box in boxes:
            lines.setdefault(box[:dim] + box[dim + 1 :], []).append(box[dim])
        boxes = []
        for others, sides in lines.items():
            found: list[tuple[int, int]] = []
            for start, stop in sorted(sides):
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((start, stop))
            boxes += [(*others[:dim], side, *others[dim:]) for side in found]
    return boxes


def _held(tiling: Tiling, groups: Sequence[int], each: int, count: int) -> str:
    """Return the text on who has a box: single holders, or groups of holders that have it together."""
    holders = [range(group * each, min((group + 1) * each, count)) for group in groups]
    many = sum(map(len, holders))
    text = held_text(map(tiling.holder_label, itertools.chain.from_iterable(holders)), many)
    return f"{text} ({many:,} holders)" if each > 1 else replicas_text(text, many)


def _range(side: tuple[int, int]) -> str:
    return f"{side[0]}:{side[1]}"


def _panel(tiling: Tiling, heading: str, tiles: list[tuple[Box, int, str]], plane: tuple[int, ...]) -> Panel:
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
        spans = tuple(Span(row, row + 1, tile.caption) for row, tile in enumerate(drawn))
        return Panel(
            f"{heading} boxes overlap: a row each".strip(),
            PanelSide("", len(drawn), spans),
            _side(tiling, across, places, 1),
            tuple(drawn),
            ROW,
        )
    return Panel(heading, _side(tiling, down, places, 0), _side(tiling, across, places, 1), tuple(drawn))


def _side(tiling: Tiling, dim: int | None, places: list[Any], at: int) -> PanelSide | None:
    """Return the side of a panel, with labels for as many bounds as fit, from the first on."""
    if dim is None:
        return None
    spans: list[Span] = []
    for start, stop in sorted({place[at] for place in places}):
        if not spans or start >= spans[-1].stop:
            spans.append(Span(start, stop, f"{start}:{stop}"))
    return PanelSide(f"dim {dim}: {tiling.shape[dim]}", tiling.shape[dim], tuple(spans))


def _overlap(places: list[Any]) -> bool:
    """Return whether any two rectangles share a place."""
    bounds = np.array(places, np.int64).reshape(len(places), 2, 2)
    low = np.maximum(bounds[:, None, :, 0], bounds[None, :, :, 0])
    high = np.minimum(bounds[:, None, :, 1], bounds[None, :, :, 1])
    shared = (low < high).all(axis=2)
    return bool(shared.sum() > len(places))
