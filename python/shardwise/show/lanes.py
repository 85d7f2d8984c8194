"""Pictures whose rows are a list: what each holder has of a packed dim, bars of bytes, who sends to whom."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from ..errors import LayoutError
from ..packed import PackedDim
from ..partition import Partition
from .picture import MOST_KEYS, MOST_NAMED, Panel, Side, Span, Tile, View, held_text, plain, short

__all__ = ["ROW", "bars", "packed_view"]

#: The height of a row.
ROW = 20
_MOST_LANES, _MOST_PIECES, _MOST_BARS = 32, 1024, 32


def packed_view(partition: Partition, name: str, captions: tuple[str, ...]) -> tuple[View, tuple[str, ...]]:
    """Draw a row for each shard of a packed partition, with the legend: the parts of the packed dim."""
    dim, spec = next((dim, spec) for dim, spec in enumerate(partition.layout.axes) if isinstance(spec, PackedDim))
    size = partition.shape[dim]
    stretches = _stretches(spec, size)
    starts = [start for _, start, _ in stretches]
    names = tuple(dict.fromkeys(label for label, _, _ in stretches))
    keys = {label: key for key, label in enumerate(names)} if len(names) <= MOST_KEYS else {}
    total, replicas = partition.total_shards, partition.replicas
    each = math.prod(
        _most_pieces(spec, size) for spec, size in zip(partition.layout.axes, partition.shape, strict=True)
    )
    notes = []
    lanes = min(total, _MOST_LANES, max(_MOST_PIECES // max(each, 1), 1))
    if each > _MOST_PIECES:
        notes.append(f"a device holds up to {each:,} pieces, too many to draw")
        lanes = 0
    elif lanes < total:
        notes.append(f"the first {lanes} of {total:,} shards are drawn")
    spans, tiles = [], []
    for row in range(lanes):
        device = partition.canonical_device(row)
        holders = partition.devices_holding(row) if replicas <= MOST_NAMED else [device]
        held = held_text(holders, replicas)
        many = f" ({replicas:,} replicas)" if replicas > 1 else ""
        spans.append(Span(row, row + 1, f"{held}{many}"))
        for piece in partition.pieces(device):
            side = piece.box[dim]
            if any(part.start == part.stop for part in piece.box):
                continue
            label = stretches[bisect.bisect_right(starts, side.start) - 1][0]
            place = f"{side.start}:{side.stop}"
            box = ", ".join(f"{part.start}:{part.stop}" for part in piece.box)
            labels = ((f"{label} {place}",), (place,), (label,))
            tiles.append(
                Tile((row, row + 1), (side.start, side.stop), keys.get(label), labels, f"[{box}]", held + many)
            )
    across = Side(
        f"dim {dim}: {size}, packed",
        size,
        tuple(Span(start, stop, label) for label, start, stop in stretches) if len(stretches) <= MOST_KEYS else (),
    )
    panel = Panel("", Side("shards", max(lanes, 1), tuple(spans)), across, tuple(tiles), ROW)
    return View((name, *captions), (panel,) if tiles else (), tuple(notes)), names if keys else ()


def _stretches(spec: PackedDim, size: int) -> list[tuple[str, int, int]]:
    """The parts of a packed dim: names, and where each begins and ends."""
    try:
        sizes = spec.sizes(size)
    except LayoutError:
        return [("all", 0, size)]
    found, at = [], 0
    for number, (part, length) in enumerate(zip(spec.parts, sizes, strict=True)):
        own = part.name if part.name is not None else " ".join(name for name, _ in part.blocks[:4])
        found.append((short(plain(own), 24) if own else f"part {number}", at, at + length))
        at += length
    return [each for each in found if each[1] < each[2]] or [("all", 0, size)]


def _most_pieces(spec: Any, size: int) -> int:
    """The most pieces of a device along a dim: for each part the product of the factors before the cut one."""
    if not isinstance(spec, PackedDim):
        return 1
    count = 0
    for part in spec.parts:
        outer = part.factors[: part.cut or 0]
        count += size if None in outer else math.prod(factor for factor in outer if factor is not None)
    return max(count, 1)


def bars(title: str, rows: Sequence[tuple[str, int, str]], key: int | None = 0) -> Panel:
    """Give a panel with a bar for each row: its name, its length, and that as text.

    >>> [tile.across for tile in bars("bytes", [("cpu:0", 4, "4 B"), ("cpu:1", 0, "0 B")]).tiles]
    [(0, 4)]
    """
    longest = max((length for _, length, _ in rows), default=0)
    tiles = tuple(
        Tile((row, row + 1), (0, length), key, (), name, text)
        for row, (name, length, text) in enumerate(rows)
        if length
    )
    # Beside the bar, not on it: the number of a short bar matters just as much.
    spans = tuple(Span(row, row + 1, f"{name}: {text}") for row, (name, _, text) in enumerate(rows))
    return Panel(title, Side("", max(len(rows), 1), spans), Side("", max(longest, 1)), tiles, ROW)


def holder_bars(title: str, names: Sequence[Any], sizes: Sequence[int], key: int | None, text: Any) -> Panel:
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
        listed.append(
            (
                f"{held_text(members[: MOST_NAMED + 1] if len(members) > MOST_NAMED else members, len(members))}{many}",
                most,
                value,
            )
        )
    return bars(title, listed, key)
