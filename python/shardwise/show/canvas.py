"""A drawing as elements of SVG: lines of text, tiles in their looks, a legend."""

from __future__ import annotations

from collections.abc import Sequence

from .colours import INK, heat, look
from .lines import width_of, wrapped
from .picture import short, xml_text

__all__ = [
    "CHAR",
    "GAP",
    "HALF",
    "LINE",
    "NARROW",
    "OVER",
    "WIDE",
    "Area",
    "Canvas",
    "escaped",
    "text_length",
    "text_lines",
]

#: The width of a character, the height of a line, the space between views and between panels.
CHAR, LINE, GAP = 7.25, 15, 14
#: The greatest width of all of it, so that it can be read on a telephone, where it is drawn a fifth smaller; of one of
#: two views beside each other, which stand below each other if they need more; and the least of a panel.
WIDE, HALF, NARROW = 460, 208, 160
MOST_TEXT = 160
#: The least extent of a tile; of a smaller one only the rim would be seen.
THIN = 3
#: The beginning of the fill of a pattern.
OVER = 'fill="url(#'


def escaped(text: str) -> str:
    """Escape text for markup.

    >>> escaped('<b>"&')
    '&lt;b&gt;&quot;&amp;'
    """
    # Not `xml.sax.saxutils.escape`, whose import takes as long as that of all of shardwise.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def text_length(text: str) -> float:
    """Return the drawn length of a line of text: characters that take two places in a terminal take two here."""
    return CHAR * width_of(text)


def text_lines(text: str, width: float) -> list[str]:
    """Return text in lines of at most this length, without the characters that XML does not allow."""
    return wrapped(short(xml_text(text), MOST_TEXT), int(width / CHAR))


#: The place of something that is drawn: left, top, width, height.
Area = tuple[float, float, float, float]


class Canvas:
    """Elements that have been drawn, which patterns they use, and which entries of the legend they do without."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._patterns: dict[str, int] = {}
        self._keys: dict[int, bool] = {}

    def text(
        self, x: float, y: float, text: str, kind: str = "text", anchor: str = "middle", upright: bool = False
    ) -> None:
        """Write a line at a place; `kind` is a class of the style, or the fill of the tile under it."""
        if not text:
            return
        style = f'class="{kind}"'
        turn = f' transform="rotate(-90 {x:.10g} {y:.10g})"' if upright else ""
        if kind.startswith("#"):
            # No line of a pattern goes through letters: a plate in the colour of the tile is under them.
            style, left = 'class="on"', x - text_length(text) / 2 - 2
            self.parts.append(
                f'<rect class="plate" x="{left:.10g}" y="{y - 12:.10g}" width="{text_length(text) + 4:.10g}" '
                f'height="15" rx="2" fill="{kind}" pointer-events="none"{turn}/>'
            )
        self.parts.append(
            f'<text x="{x:.10g}" y="{y:.10g}" text-anchor="{anchor}" textLength="{text_length(text):.10g}" '
            f'lengthAdjust="spacingAndGlyphs" {style}{turn}>{escaped(text)}</text>'
        )

    def tile(self, place: Area, key: int | None, about: str, amount: float | None = None) -> str:
        """Draw a rectangle in its look, and give the class of texts on it, or its fill if it has a pattern."""
        fill, pattern = look(key)
        x, y, width, height = (f"{number:.10g}" for number in place)
        where = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        about = f"<title>{escaped(about)}</title>" if about else ""
        kind = "" if key is None else f' data-key="{key}"'
        rim = f' style="stroke:{fill};stroke-width:1.5"' if min(place[2:]) < THIN else ""
        if amount is not None:
            # What is nothing is a frame.
            look_of, written = ("line", "still") if amount <= 0 else (f"tile h{heat(amount)}", "amount")
            self.parts.append(f'<rect class="{look_of}" {where}>{about}</rect>')
            return written
        self.parts.append(f'<rect class="tile" {where} fill="{fill}"{rim}{kind}>{about}</rect>')
        if not pattern:
            return "on"
        number = self._patterns.setdefault(pattern, len(self._patterns))
        self.parts.append(f'<rect class="over" {where} {OVER}p{number})" pointer-events="none"/>')
        return fill

    def told(self, key: int | None, is_told: bool) -> None:
        """Note whether it is written at a tile of this key who holds it."""
        if key is not None:
            self._keys[key] = self._keys.get(key, False) or is_told

    def arrow(self, x: float, y: float, path: str) -> None:
        """Draw an arrow along a path that begins at a place."""
        self.parts.append(f'<path class="line" d="M{x:.10g} {y:.10g}{path}" stroke-width="2"/>')

    def patterns(self, name: str) -> list[str]:
        """Return the definitions of the patterns that have been used."""
        if not self._patterns:
            return []
        found = [
            f'<pattern id="{name}p{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<path d="{pattern}" stroke="{INK}" stroke-opacity="0.5" stroke-width="1.25"/></pattern>'
            for pattern, number in self._patterns.items()
        ]
        return ["<defs>", *found, "</defs>"]

    def legend(self, entries: Sequence[str], width: float, top: float) -> tuple[float, float]:
        """Draw the legend in columns below, unless the tiles say all of it; give the width and height of everything."""
        if not entries or all(self._keys.values()):
            return width, top
        entries = [short(xml_text(entry), int((WIDE - 34) / CHAR)) for entry in entries]
        each = max(map(text_length, entries)) + 34
        columns = max(int(max(width, WIDE) / each), 1)
        top += 2 * GAP
        for number, entry in enumerate(entries):
            row, column = divmod(number, columns)
            x, y = column * each, top + row * 20
            self.tile((x, y, 16, 14), number, "")
            self.text(x + 22, y + 11, entry, anchor="start")
        return max(width, each * min(columns, len(entries))), top + -(-len(entries) // columns) * 20
