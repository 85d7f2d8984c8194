"""Pictures as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from .canvas import CHAR, GAP, HALF, LINE, NARROW, OVER, WIDE, Area, Canvas, escaped, text_length, text_lines
from .colours import HEAT, INK, PALE, THEMES
from .lines import width_of
from .picture import Panel, PanelSide, Picture, Span, Tile, View, short, xml_text

__all__ = ["svg_of"]

#: The least height of a panel, the greatest, and that of many rows.
_LOW, _HIGH, _HIGHEST = 56, 300, 560
_MARGIN, _ARROW = 12, 44
#: The part of the width that the labels of rows may take; longer ones stand above their rows.
_MOST_LEFT = 0.42
#: The least length of a range whose label is written upright along it.
_UPRIGHT = 14


def svg_of(picture: Picture) -> str:
    """Draw a picture as SVG text: the same text each time, readable on light and on dark pages.

    It has its own background, a title and a description for readers who cannot see it, and no font of its own. Each
    text has a `textLength`, so that it is as long as the room that was found for it, whatever the font.

    >>> svg_of(Picture("nothing", "Nothing is drawn.", ()))[:5]
    '<svg '
    """
    beside = picture.turns and all(_ViewLayout.fits(view, HALF) for view in picture.views[:2])
    views = [_ViewLayout(view, HALF if beside and number < 2 else WIDE) for number, view in enumerate(picture.views)]
    if picture.turns:
        _ViewLayout.at_one_scale(*views[:2])
    canvas = Canvas()
    width = height = 0.0
    for number, view in enumerate(views):
        x, y = 0.0, height + 3 * GAP * bool(number)
        if number == 1 and beside:
            canvas.arrow(width + 8, min(view.height, height) / 2, "h24m-7 -6l7 6l-7 6")
            x, y = width + _ARROW, 0.0
        elif number == 1 and picture.turns:
            canvas.arrow(width / 2, height + GAP + 4, "v22m-6 -7l6 7l6 -7")
            y = height + GAP + _ARROW
        view.draw(canvas, x, y)
        width, height = max(width, x + view.width), max(height, y + view.height)
    width, height = canvas.legend(picture.legend, max(width, NARROW), height)
    size = f"{width + 2 * _MARGIN:.10g}", f"{height + 2 * _MARGIN:.10g}"
    body = "\n".join(canvas.parts)
    name = f"sw{crc32((picture.title + body).encode('utf-8', 'replace')):08x}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" viewBox="{-_MARGIN} {-_MARGIN} {size[0]} {size[1]}" '
            f'width="{size[0]}" height="{size[1]}" style="max-width:100%;height:auto" role="img" '
            f'aria-labelledby="{name}t {name}d" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
            f'<title id="{name}t">{escaped(short(xml_text(picture.title), 300))}</title>',
            f'<desc id="{name}d">{escaped(short(xml_text(picture.about), 1000))}</desc>',
            f"<style>{_style(name, any(tile.amount for tile in picture.tiles()))}</style>",
            *canvas.patterns(name),
            f'<rect class="page" x="{-_MARGIN}" y="{-_MARGIN}" width="{size[0]}" height="{size[1]}" rx="6"/>',
            body.replace(OVER, f"{OVER}{name}"),  # No text of a label has a quotation mark.
            "</svg>\n",
        ]
    )


def _style(name: str, has_amounts: bool) -> str:
    def theme(name_of: str, ink: str) -> str:
        page, text, quiet = THEMES[name_of]
        greys = f"#{name} .amount{{fill:{ink}}}" if has_amounts else ""
        for number, grey in enumerate(HEAT[name_of] if has_amounts else ()):
            greys += f"#{name} .h{number}{{fill:{grey}}}"
        return (
            f"#{name} .page{{fill:{page};stroke:{quiet};stroke-opacity:.35}}#{name} .text{{fill:{text}}}"
            f"#{name} .quiet,#{name} .still{{fill:{quiet}}}#{name} .line{{stroke:{quiet};fill:none}}"
            f"#{name} .tile{{stroke:{page}}}{greys}"
        )

    # Labels on tiles are dark on either page: so are fills light.
    tiles = f"#{name} .on{{fill:{INK}}}"
    return f"{tiles}{theme('light', INK)}@media (prefers-color-scheme:dark){{{theme('dark', PALE)}}}"


#: Lines of text, whether they stand upright, and whether they say who holds what.
_Written = tuple[tuple[str, ...], bool, bool]


class _ViewLayout:
    """One view laid out: where its panels are."""

    def __init__(self, view: View, widest: float) -> None:
        self._widest = widest
        self._panels = [_PanelLayout.of(panel, widest) for panel in view.panels]
        # Bars that begin at one place can be compared.
        rows = [panel for panel in self._panels if panel.panel.row_height is not None]
        for panel in rows:
            panel.place_rows(widest, any(each.above for each in rows), max(each.left for each in rows))
        self._captions = [
            (line, bool(number)) for number, text in enumerate(view.captions) for line in text_lines(text, widest)
        ]
        self._notes = [line for text in view.notes for line in text_lines(text, widest)]
        self._measure()

    def _measure(self) -> None:
        lines = [*(text_length(line) for line, _ in self._captions), *map(text_length, self._notes)]
        self.width = max([*lines, *(panel.width for panel in self._panels)], default=0.0)
        self.height = (len(self._captions) + len(self._notes)) * LINE + sum(p.height + GAP for p in self._panels)
        if self._panels and not self._notes:
            self.height -= GAP - 2  # the label of a low row reaches below it

    def at_one_scale(self, other: _ViewLayout) -> None:
        """Draw panels of one length in both views as wide and as high as the larger: before and after a change."""
        for mine, theirs in zip(self._panels, other._panels, strict=False):
            if mine.extent == theirs.extent and mine.panel.row_height is None is theirs.panel.row_height:
                across = min(max(mine.across, theirs.across), *(self._widest - each.left for each in (mine, theirs)))
                for panel in (mine, theirs):
                    panel.stretch(across, max(mine.down, theirs.down))
        for view in (self, other):
            view._measure()

    @staticmethod
    def fits(view: View, widest: float) -> bool:
        """Return whether a view has room for its labels in this width."""
        return all(panel.row_height is None and _PanelLayout.of(panel, widest).has_room for panel in view.panels)

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        for line, is_quiet in self._captions:
            y += LINE
            canvas.text(x, y - 3, line, "quiet" if is_quiet else "text", "start")
        for panel in self._panels:
            panel.draw(canvas, x, y)
            y += panel.height + GAP
        for line in self._notes:
            y += LINE
            canvas.text(x, y - 3, line, "quiet", "start")


@dataclass
class _PanelLayout:
    """One panel laid out: the field of the tiles, and the margins for the labels of its sides."""

    panel: Panel
    titles: list[str]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    left: float
    top: float
    across: float
    down: float
    upright: bool
    #: True if the label of each row stands above it.
    above: bool
    has_room: bool

    @classmethod
    def of(cls, panel: Panel, widest: float) -> _PanelLayout:
        titles = text_lines(panel.heading, widest) if panel.heading else []
        for arrow, side in (("↓", panel.down), ("→", panel.across)):
            if side is not None and side.title:
                titles += text_lines(f"{arrow} {side.title}", widest)
        rows = _spans(panel.down, widest if panel.row_height is not None else widest * _MOST_LEFT)
        left = max((text_length(row.text) for row in rows), default=-8.0) + 8
        above = panel.row_height is not None and left > widest * _MOST_LEFT
        if above:
            left = 0.0
        spans = _spans(panel.across, widest * _MOST_LEFT)
        needed = [
            (text_length(span.text) + 8) / share for span in spans if (share := _share(panel.across, span)) >= 1 / 64
        ]
        needed += [
            (max(map(text_length, tile.labels[0])) + 8) / share
            for tile in panel.tiles
            if tile.labels and (share := _share(panel.across, tile.across)) >= 1 / 64
        ]
        across = room = widest - left
        if panel.row_height is None:
            across = min(max([NARROW, *needed]), room)
        upright, top = _header(panel.across, spans, across)
        down = float(_LOW)
        if panel.row_height is not None and panel.down is not None:
            down = float(panel.row_height * panel.down.size)
        elif panel.down is not None:
            ratio = panel.down.size / max(panel.across.size if panel.across is not None else 1, 1)
            lines = max((len(tile.labels[0]) for tile in panel.tiles if tile.labels), default=1)
            down = min(max(across * min(max(ratio, 0.35), 1.0), len(rows) * (LINE * lines + 4)), _HIGH)
            down = max(down, min(len(rows) * 18, _HIGHEST))
        return cls(
            panel, titles, rows, spans, left, top, across, down, upright, above, max(needed, default=0.0) <= room
        )

    @property
    def extent(self) -> tuple[int, int]:
        """The lengths of its sides, in the units of the places of tiles."""
        down, across = (1 if side is None else side.size for side in (self.panel.down, self.panel.across))
        return down, across

    def stretch(self, across: float, down: float) -> None:
        """Make the field of the tiles as wide and as high as this."""
        self.across, self.down = across, down
        self.upright, self.top = _header(self.panel.across, self.columns, across)

    def place_rows(self, widest: float, above: bool, left: float) -> None:
        """Put the labels of rows above them, or into a margin of this width."""
        assert self.panel.row_height is not None
        self.above, self.left = above, 0.0 if above else left
        self.across = widest - self.left
        self.down = (self.panel.row_height + above * LINE) * (self.panel.down.size if self.panel.down else 1)

    @property
    def width(self) -> float:
        return max([self.left + self.across, *map(text_length, self.titles)])

    @property
    def height(self) -> float:
        return len(self.titles) * LINE + self.top + self.down + 6

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        for title in self.titles:
            y += LINE
            canvas.text(x, y - 3, title, "quiet", "start")
        x, y = x + self.left, y + self.top + 6
        for span in self.columns:
            low, extent = _place(self.panel.across, (span.start, span.stop), self.across)
            if not self.upright:
                canvas.text(x + low + extent / 2, y - 5, span.text)
            elif extent >= _UPRIGHT:
                canvas.text(x + low + extent / 2 + 4, y - 5, span.text, anchor="start", upright=True)
        for span in self.rows:
            low, extent = _place(self.panel.down, (span.start, span.stop), self.down)
            if self.above:
                canvas.text(x, y + low + 12, span.text, anchor="start")
            elif extent >= _UPRIGHT - 2:
                canvas.text(x - 6, y + low + extent / 2 + 4, span.text, anchor="end")
        places = [self._extent(tile) for tile in self.panel.tiles]
        for tile, place, written in zip(self.panel.tiles, places, _writings(self.panel.tiles, places), strict=True):
            self._tile(canvas, tile, (x + place[0], y + place[1], *place[2:]), written)
            self._seams(canvas, tile, x, y)

    def _extent(self, tile: Tile) -> Area:
        low, width = _place(self.panel.across, tile.across, self.across)
        upper, height = _place(self.panel.down, tile.down, self.down)
        if self.panel.row_height is None:
            return low, upper, width, height
        name = LINE * self.above
        return low, upper + name + 2, width, height - name - 4

    def _tile(self, canvas: Canvas, tile: Tile, place: Area, written: _Written | None) -> None:
        kind = canvas.tile(place, tile.key, short(xml_text(f"{tile.place}: {tile.caption}"), 400), tile.amount)
        canvas.told(tile.key, self.panel.row_height is not None or (written is not None and written[2]))
        if written is None:
            return
        lines, upright, _ = written
        middle, centre = place[0] + place[2] / 2, place[1] + place[3] / 2
        first = (middle if upright else centre) + 4 - LINE * (len(lines) - 1) / 2
        for row, line in enumerate(map(xml_text, lines)):
            at = first + LINE * row
            canvas.text(*((at, centre) if upright else (middle, at)), line, kind, upright=upright)

    def _seams(self, canvas: Canvas, tile: Tile, x: float, y: float) -> None:
        """Draw where a tile that stands for several is cut, unless the lines would be too close."""
        low, width = _place(self.panel.across, tile.across, self.across)
        upper, height = _place(self.panel.down, tile.down, self.down)
        path = ""
        if len(tile.seams_across) * 4 < width:
            for at in tile.seams_across:
                path += (
                    f"M{x + _place(self.panel.across, (at, at), self.across)[0]:.10g} {y + upper:.10g}v{height:.10g}"
                )
        if len(tile.seams_down) * 4 < height:
            for at in tile.seams_down:
                path += f"M{x + low:.10g} {y + _place(self.panel.down, (at, at), self.down)[0]:.10g}h{width:.10g}"
        if path:
            canvas.parts.append(f'<path d="{path}" stroke="{INK}" stroke-opacity="0.3" stroke-width="0.5"/>')


def _writings(tiles: Sequence[Tile], places: Sequence[Area]) -> list[_Written | None]:
    """Choose for each tile the first label for which there is room; tiles of one size say the same of themselves.

    The shortest label says little: an upright longer one is better, but not the same one upright; and where one tile
    has room for nothing else, the others of its size still say more.
    """
    rooms: list[list[int]] = []
    choices: list[list[_Written]] = []
    alike: dict[tuple[int, ...], int] = {}
    sizes = [
        (len(tile.labels), round(width), round(height))
        for tile, (_, _, width, height) in zip(tiles, places, strict=True)
    ]
    for tile, (_, _, width, height), size in zip(tiles, places, sizes, strict=True):
        naming = len(tile.labels) if tile.naming is None else tile.naming
        level, upright = (
            [(lines, turned, number < naming) for number, lines in enumerate(tile.labels)] for turned in (False, True)
        )
        choices.append([*level[:-1], *upright[:-1], *level[-1:], *upright[-1:]])
        rooms.append(
            [
                n
                for n, (lines, turned, _) in enumerate(choices[-1])
                if _fits(lines, *((height, width) if turned else (width, height)))
            ]
        )
        if rooms[-1] and rooms[-1][0] < 2 * len(tile.labels) - 2:
            alike[size] = max(alike.get(size, 0), rooms[-1][0])
    return [
        own[next((number for number in room if number >= alike.get(size, 0)), room[0])] if room else None
        for own, room, size in zip(choices, rooms, sizes, strict=True)
    ]


def _header(side: PanelSide | None, spans: Sequence[Span], across: float) -> tuple[bool, float]:
    """Say whether the labels of columns stand upright in this width, and how high they are."""
    upright = any(text_length(span.text) + 4 > across * _share(side, span) for span in spans)
    shown = [span for span in spans if across * _share(side, span) >= _UPRIGHT] if upright else spans
    if not shown:
        return upright, 0.0
    return upright, max(text_length(span.text) for span in shown) + 8 if upright else LINE + 2


def _spans(side: PanelSide | None, width: float) -> tuple[Span, ...]:
    """Return the ranges of a side, their labels short enough for this width."""
    most = int((width - 8) / CHAR)
    return () if side is None else tuple(Span(s.start, s.stop, _cut(xml_text(s.text), most)) for s in side.spans)


def _cut(text: str, most: int) -> str:
    return short(text, most if width_of(text) == len(text) else most // 2)


def _share(side: PanelSide | None, what: Span | tuple[int, int]) -> float:
    start, stop = (what.start, what.stop) if isinstance(what, Span) else what
    return 1.0 if side is None or side.size == 0 else (stop - start) / side.size


def _place(side: PanelSide | None, bounds: tuple[int, int], length: float) -> tuple[float, float]:
    """Return the begin and the length of a range in a picture; ranges that touch also touch there."""
    size = 1 if side is None else max(side.size, 1)
    low, high = (round(length * bound / size, 2) for bound in bounds)
    return low, high - low


def _fits(lines: Sequence[str], width: float, height: float) -> bool:
    return len(lines) * LINE <= height - 1 and max(map(text_length, lines), default=0) + 1.5 <= width
