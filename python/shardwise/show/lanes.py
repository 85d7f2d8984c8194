"""Pictures whose rows are a list: what each holder has of a packed dim, bars of bytes, who sends to whom."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import LayoutError
from ..packed import PackedDim
from ..partition import Partition
from .cells import ShardCells, copies_of
from .picture import (
    MOST_KEYS,
    MOST_NAMED,
    Panel,
    PanelSide,
    Span,
    Tile,
    View,
    held_text,
    replicas_text,
    short,
    xml_text,
)

__all__ = ["ROW", "bars", "packed_view"]

#: The height of a row.
ROW = 20
_MOST_LANES, _MOST_PIECES, _MOST_BARS = 32, 1024, 32
#: The most pieces whose places are asked for.
_MOST_READ = 1 << 14


def packed_view(partition: Partition, name: str, captions: tuple[str, ...]) -> tuple[View, list[tuple[Any, str]]]:
    """Draw a row for each shard of a packed partition; give with it, for each row, who holds it, and that as text.

    If there are more shards than rows, or more pieces than a picture holds, neighbours share a row, with their number.
    """
    dim, spec = next((dim, spec) for dim, spec in enumerate(partition.layout.axes) if isinstance(spec, PackedDim))
    size = partition.shape[dim]
    segments = _segments(spec, size)
    total = partition.total_shards
    pieces = math.prod(
        _most_pieces(spec, size) for spec, size in zip(partition.layout.axes, partition.shape, strict=True)
    )
    each = -(-total // _MOST_LANES)
    rows = _rows(partition, dim, segments, each) if total * pieces <= _MOST_READ else None
    while rows is not None and each < total and sum(len(row) for row in rows) > _MOST_PIECES:
        each = min(2 * each, total)
        rows = _rows(partition, dim, segments, each)
    if rows is None or sum(len(row) for row in rows) > _MOST_PIECES:  # Together the shards hold all of every part.
        each, rows = total, [[(label, (start, stop), "") for label, start, stop in segments[:_MOST_PIECES]]]
    spans, tiles, holders = [], [], []
    for row, parts in enumerate(rows):
        title, held = _lane(partition, dim, row * each, min((row + 1) * each, total))
        holders.append((partition.canonical_device(row) if each == 1 else (title,), title))
        spans.append(Span(row, row + 1, title))
        for label, (start, stop), box in parts:
            place = f"{start}:{stop}"
            labels = ((f"{label} {place}",), (place,), (label,))
            tiles.append(Tile((row, row + 1), (start, stop), row, labels, box or f"dim {dim} at {place}", held))
    across = PanelSide(
        f"dim {dim}: {size}, packed",
        size,
        tuple(Span(start, stop, label) for label, start, stop in segments) if len(segments) <= MOST_KEYS else (),
    )
    panel = Panel("", PanelSide("shards", max(len(rows), 1), tuple(spans)), across, tuple(tiles), ROW)
    notes = []
    if each > 1:
        notes.append(f"a row stands for {'all' if each >= total else 'up to'} {each:,} shards")
    if each > 1 and pieces > _MOST_PIECES:
        notes.append(f"a shard holds up to {pieces:,} pieces")
    return View((name, *captions, *_other_dims(partition, dim)), (panel,) if tiles else (), tuple(notes)), holders


def _rows(
    partition: Partition, dim: int, segments: Sequence[tuple[str, int, int]], each: int
) -> list[list[tuple[str, tuple[int, int], str]]]:
    """Return what the shards of each row hold of each part; of one shard with its boxes, of several what they have."""
    starts = [start for _, start, _ in segments]
    found = []
    for first in range(0, partition.total_shards, each):
        parts: dict[tuple[str, tuple[int, int]], str] = {}
        for shard in range(first, min(first + each, partition.total_shards)):
            for piece in partition.pieces(partition.canonical_device(shard)):
                if any(side.start == side.stop for side in piece.box):
                    continue
                side = piece.box[dim]
                label = segments[bisect.bisect_right(starts, side.start) - 1][0]
                box = ", ".join(f"{part.start}:{part.stop}" for part in piece.box)
                parts.setdefault((label, (side.start, side.stop)), f"[{box}]" if each == 1 else "")
        if each == 1:
            found.append([(label, place, box) for (label, place), box in parts.items()])
        else:
            found.append(_joined(list(parts)))
    return found


def _joined(parts: list[tuple[str, tuple[int, int]]]) -> list[tuple[str, tuple[int, int], str]]:
    """Merge ranges of one part that touch or overlap."""
    found: list[tuple[str, tuple[int, int], str]] = []
    for label, (start, stop) in sorted(parts, key=lambda part: part[1]):
        if found and found[-1][0] == label and start <= found[-1][1][1]:
            found[-1] = (label, (found[-1][1][0], max(stop, found[-1][1][1])), "")
        else:
            found.append((label, (start, stop), ""))
    return found


def _lane(partition: Partition, dim: int, start: int, stop: int) -> tuple[str, str]:
    """Return the title of a row of shards, and who holds them."""
    replicas = partition.replicas
    count = (stop - start) * replicas
    if count <= MOST_NAMED:
        holders = [device for shard in range(start, stop) for device in partition.devices_holding(shard)]
    else:
        holders = [partition.canonical_device(start)]
    held = held_text(holders, count)
    if stop - start > 1:
        many = f"{stop - start:,} shards"
        return f"{held} ({many})", f"{many}, {held}" if replicas == 1 else f"{many}, {count:,} devices: {held}"
    held = replicas_text(held, replicas, copies_of(partition))
    pieces = partition.pieces(holders[0])[:1]
    others = [other for other in _others(partition, dim) if partition.num_shards[other] > 1] if pieces else []
    at = "".join(f", dim {other} at {pieces[0].box[other].start}:{pieces[0].box[other].stop}" for other in others)
    return f"{held}{at}", held


def _others(partition: Partition, dim: int) -> list[int]:
    """Return the other dims of a packed partition that are not packed, a few of them."""
    dims = [other for other, spec in enumerate(partition.layout.axes) if not isinstance(spec, PackedDim)]
    return [other for other in dims if other != dim][:4]


def _other_dims(partition: Partition, dim: int) -> list[str]:
    cells = ShardCells(partition)
    return [cells.title(other) for other in _others(partition, dim)]


def _segments(spec: PackedDim, size: int) -> list[tuple[str, int, int]]:
    """Return the parts of a packed dim: names, and where each begins and ends."""
    try:
        sizes = spec.sizes(size)
    except LayoutError:
        return [("all", 0, size)]
    found, at = [], 0
    for number, (part, length) in enumerate(zip(spec.parts, sizes, strict=True)):
        own = part.name if part.name is not None else " ".join(name for name, _ in part.blocks[:4])
        found.append((short(xml_text(own), 24) if own else f"part {number}", at, at + length))
        at += length
    return [each for each in found if each[1] < each[2]] or [("all", 0, size)]


def _most_pieces(spec: Any, size: int) -> int:
    """Return the most pieces of a device along a dim: for each part the product of the factors before the cut one."""
    if not isinstance(spec, PackedDim):
        return 1
    count = 0
    for part in spec.parts:
        outer = part.factors[: part.cut or 0]
        count += size if None in outer else math.prod(factor for factor in outer if factor is not None)
    return max(count, 1)


def bars(title: str, rows: Sequence[tuple[str, int, str]]) -> Panel:
    """Return a panel with a bar for each row, all of one colour: its name, its length, and that as text.

    >>> [tile.across for tile in bars("bytes", [("cpu:0", 4, "4 B"), ("cpu:1", 0, "0 B")]).tiles]
    [(0, 4)]
    """
    longest = max((length for _, length, _ in rows), default=0)
    tiles = tuple(
        Tile((row, row + 1), (0, length), 0, (), name, text) for row, (name, length, text) in enumerate(rows) if length
    )
    # Beside the bar, not on it: the number of a short bar matters just as much.
    spans = tuple(Span(row, row + 1, f"{name}: {text}") for row, (name, _, text) in enumerate(rows))
    return Panel(title, PanelSide("", max(len(rows), 1), spans), PanelSide("", max(longest, 1)), tiles, ROW)


def holder_bars(title: str, names: Sequence[Any], sizes: Sequence[int], text: Callable[[int], str]) -> Panel:
    """Draw bars of what each holder has; neighbours with the same amount share one, or a range where there are many."""
    rows: list[tuple[list[Any], int, int]] = []
    for name, size in zip(names, sizes, strict=True):
        if rows and rows[-1][1] == rows[-1][2] == size:
            rows[-1][0].append(name)
        else:
            rows.append(([name], size, size))
    while len(rows) > _MOST_BARS:
        pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
        rows = [
            ([n for row in pair for n in row[0]], min(row[1] for row in pair), max(row[2] for row in pair))
            for pair in pairs
        ]
    listed = []
    for members, least, most in rows:
        each = f"{text(most)} each" if len(members) > 1 else text(most)
        value = each if least == most else f"{text(least)} to {text(most)}"
        many = f" ({len(members):,})" if len(members) > 1 else ""
        listed.append((f"{held_text(members, len(members))}{many}", most, value))
    return bars(title, listed)
