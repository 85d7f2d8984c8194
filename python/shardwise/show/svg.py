"""Pictures of who holds what, as SVG text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._arguments import sizes_of
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..partition import Partition
from .grid import Cell, Grid, bounds_text, in_turn, plane_of

__all__ = ["draw"]

#: Fills on which black text can be read, and whose edges show on black and on white pages.
_FILLS = ("#9fd3f0", "#f7cf87", "#8fd9bd", "#f3b48f", "#d7b5d8", "#f0e68c", "#b8c4e8", "#c9d39a")
_INK = "#111111"
#: Text outside of the shards: 4.5 times as bright as black, a 4.5th of white.
_GREY = "#767676"

_WIDTH, _LEAST_HEIGHT = 280, 44
_CHAR, _LINE, _GAP = 6.7, 15, 16
_MAX_SHARDS = 1024
_MAX_DEVICES = 2**20
_MAX_NAMED = 16


def draw(
    layout: Partition | TensorLayout,
    shape: Sequence[int] | None = None,
    *,
    after: Partition | TensorLayout | None = None,
    uneven: UnevenRule = "even",
) -> str:
    """Draw which devices hold which part of a tensor, before and after a change of layout if there is one.

    Args:
        layout: what to draw: a partition, or a layout of a tensor of `shape`.
        shape: the tensor's shape; a partition has its own.
        after: a second partition or layout of the same shape, drawn beside the first.
        uneven: how layouts cut dims that do not divide.

    Returns:
        An SVG picture: a rectangle per shard, as large as its part of the tensor, with the devices that hold it. A
        tensor of more than two dims is drawn as slices over two of those that are cut. The colours are those of the
        devices that own the shards. It is the same text each time, and can be read on light and on dark pages.

    Raises:
        LayoutError: if a shape is missing, or given twice; if the two are of different shapes; for more than 1024
            shards.

    >>> from shardwise import DeviceMesh
    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> picture = draw(TensorLayout(("x", None), mesh), (4, 4), after=TensorLayout((None, "x"), mesh))
    >>> picture.startswith("<svg ") and picture.count("<rect") == 4
    True
    """
    first = _partition("layout", layout, shape, uneven)
    partitions = [first]
    if after is not None:
        second = _partition("after", after, None if isinstance(after, Partition) else first.shape, uneven)
        if second.shape != first.shape:
            raise LayoutError(f"after is of shape {second.shape}, but layout of {first.shape}; they must be equal")
        partitions.append(second)
    for partition in partitions:
        if partition.total_shards > _MAX_SHARDS:
            raise LayoutError(f"{partition.total_shards} shards are too many to see; at most {_MAX_SHARDS} are drawn")
        if partition.device_mesh.size > _MAX_DEVICES:
            raise LayoutError(f"{partition.device_mesh.size} devices are too many to name; the limit is {_MAX_DEVICES}")
    plane = plane_of(partitions)
    owners = itertools.chain.from_iterable(_owners(partition) for partition in partitions)
    colours = {owner: _FILLS[in_turn(i, len(_FILLS))] for i, owner in enumerate(dict.fromkeys(owners))}
    names = ["before: ", "after: "] if after is not None else [""]
    pictures = [_Picture.of(Grid(partition, plane), colours) for partition in partitions]
    width = height = 0.0
    body = []
    for i, (name, picture, partition) in enumerate(zip(names, pictures, partitions, strict=True)):
        if i:
            arrow = f"M{width + 4:g} {_arrow_at(pictures):g}h22m-7 -6l7 6l-7 6"
            body.append(f'<path d="{arrow}" fill="none" stroke="{_GREY}" stroke-width="2"/>')
            width += 40
        captions = [f"{name}{partition.layout.axes}", f"{_sizes(partition)}, {_mesh(partition)}"]
        body.append(f'<g transform="translate({width:g} 0)">')
        body += [_text(0, 12 + _LINE * row, line, anchor="start") for row, line in enumerate(captions)]
        body.append(f'<g transform="translate(0 {_CAPTION})">\n' + "\n".join(picture.parts) + "\n</g>\n</g>")
        width += max(picture.width, *(len(line) * _CHAR for line in captions))
        height = max(height, picture.height + _CAPTION)
    title = " ".join(f"{name}{_plain(repr(partition))}" for name, partition in zip(names, partitions, strict=True))
    size = f"{math.ceil(width) + 8} {math.ceil(height) + 8}".split()
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {size[0]} {size[1]}" width="{size[0]}" '
            f'height="{size[1]}" role="img" font-family="ui-monospace, monospace" font-size="11">',
            f"<title>{_escaped(title if len(title) <= 400 else title[:400] + '…')}</title>",
            *body,
            "</svg>\n",
        ]
    )


_CAPTION = 2 * _LINE + 8


def _partition(
    argument: str, what: Partition | TensorLayout, shape: Sequence[int] | None, uneven: UnevenRule
) -> Partition:
    if isinstance(what, Partition):
        if shape is not None and sizes_of("shape", shape) != what.shape:
            raise LayoutError(f"shape is {shown(shape)}, but {argument} is a partition of shape {shown(what.shape)}")
        return what
    if not isinstance(what, TensorLayout):
        raise TypeError(f"{argument} must be a Partition or a TensorLayout, got {type(what).__name__}")
    if shape is None:
        raise LayoutError(f"shape is needed: {argument} is a layout, which has none")
    return what.partition(shape, uneven)


def _owners(partition: Partition) -> list[Any]:
    return [partition.canonical_device(shard_id) for shard_id in range(partition.total_shards)]


def _arrow_at(pictures: Sequence[_Picture]) -> float:
    return _CAPTION + min(picture.height for picture in pictures) / 2


def _sizes(partition: Partition) -> str:
    return " x ".join(map(str, partition.shape)) or "scalar"


def _mesh(partition: Partition) -> str:
    mesh = partition.device_mesh
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


@dataclass
class _Picture:
    """The shards of one partition: a panel of rectangles for each shard of the dims that are not drawn."""

    parts: list[str] = field(default_factory=list)
    width: float = 0
    height: float = 0

    @classmethod
    def of(cls, grid: Grid, colours: dict[Any, str]) -> _Picture:
        picture = cls()
        empty: list[Any] = []
        for panel in range(grid.panels):
            cells = list(grid.cells(panel))
            for cell in cells:
                if cell.is_empty:
                    empty += grid.partition.devices_holding(cell.shard_id)
            if shown := [cell for cell in cells if not cell.is_empty]:
                if grid.deep:
                    picture._line(", ".join(f"dim {dim} {bounds_text(shown[0].box, (dim,))}" for dim in grid.deep))
                picture._panel(grid, shown, colours)
        if empty:
            picture._line(f"empty: {_named(empty, 4)}")
        return picture

    def _line(self, text: str) -> None:
        self.parts.append(_text(0, self.height + 11, text, anchor="start"))
        self.height += _LINE
        self.width = max(self.width, len(text) * _CHAR)

    def _panel(self, grid: Grid, cells: Sequence[Cell], colours: dict[Any, str]) -> None:
        (down,), (across,) = grid.down or (None,), grid.across or (None,)
        rows, columns = (1 if dim is None else grid.partition.shape[dim] for dim in (down, across))
        height = _LEAST_HEIGHT if down is None else _WIDTH * min(max(rows / columns, 0.4), 1.0)
        ranges = [_bounds(cell.box, down) for cell in cells]
        labels = [] if down is None else [f"{start}:{stop}" for start, stop in dict.fromkeys(ranges)]
        left = max((len(label) for label in labels), default=0) * _CHAR + 6
        top = self.height + _LINE
        done: set[tuple[str, int]] = set()
        for cell in cells:
            box, devices = cell.box, grid.partition.devices_holding(cell.shard_id)
            (upper, lower), (start, stop) = _bounds(box, down), _bounds(box, across)
            y, h = _span(upper, lower, rows, height)
            x, w = _span(start, stop, columns, _WIDTH)
            # One label for each row and each column of shards.
            if across is not None and ("column", start) not in done and w >= (len(f"{start}:{stop}") + 1) * _CHAR:
                self.parts.append(_text(left + x + w / 2, top - 4, f"{start}:{stop}"))
            if down is not None and ("row", upper) not in done and h >= _LINE - 3:
                self.parts.append(_text(left - 5, top + y + h / 2 + 4, f"{upper}:{lower}", anchor="end"))
            done |= {("column", start), ("row", upper)}
            place = bounds_text(box, range(len(box)))
            self.parts.append(
                f'<rect x="{left + x:g}" y="{top + y:g}" width="{w:g}" height="{h:g}" fill="{colours[cell.owner]}" '
                f'stroke="{_INK}"><title>[{place}] on {_escaped(_named(devices, _MAX_NAMED))}</title></rect>'
            )
            lines = _fitting(devices, w, h)
            first = top + y + h / 2 + 4 - _LINE * (len(lines) - 1) / 2
            self.parts += [
                _text(left + x + w / 2, first + _LINE * row, line, fill=_INK) for row, line in enumerate(lines)
            ]
        self.width = max(self.width, left + _WIDTH)
        self.height = top + height + _GAP


def _bounds(box: Sequence[slice], dim: int | None) -> tuple[int, int]:
    return (0, 1) if dim is None else (box[dim].start, box[dim].stop)


def _span(start: int, stop: int, size: int, length: float) -> tuple[float, float]:
    """Place and length in a picture; places are rounded, so that what ends where another begins does so there too."""
    low, high = (round(length * bound / size * 4) / 4 for bound in (start, stop))
    return low, high - low


def _fitting(devices: Sequence[Any], width: float, height: float) -> list[str]:
    """The devices in as many lines as there is room for; or the first and how many more; or nothing."""
    room, rows = int((width - 6) / _CHAR), int((height - 4) / _LINE)
    lines: list[str] = []
    for name in itertools.islice(map(_plain, map(str, devices)), 64):
        if lines and len(lines[-1]) + 2 + len(name) <= room:
            lines[-1] += f", {name}"
        else:
            lines.append(name)
    if len(devices) <= 64 and len(lines) <= rows and max(map(len, lines)) <= room:
        return lines
    first, more = _plain(str(devices[0])), f"+ {len(devices) - 1}"
    for short in ([f"{first} {more}"], [first, more]):
        if len(devices) > 1 and len(short) <= rows and max(map(len, short)) <= room:
            return short
    return []


def _named(devices: Sequence[Any], limit: int) -> str:
    names = ", ".join(map(_plain, map(str, devices[:limit])))
    return f"{names} and {len(devices) - limit} more" if len(devices) > limit else names


def _escaped(text: str) -> str:
    # Not `xml.sax.saxutils.escape`, whose import takes as long as that of all of shardwise.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(text: str) -> str:
    """Text without what XML does not have."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = _GREY) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{_escaped(_plain(text))}</text>'
