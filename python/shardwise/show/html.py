"""Pictures as HTML: the drawing, and the same as a table."""

from __future__ import annotations

from collections.abc import Sequence

from .canvas import escaped
from .picture import Picture, short, xml_text
from .svg import svg_of

__all__ = ["html_of", "table_html"]

_MOST_ROWS, _LONGEST = 512, 400


def html_of(picture: Picture) -> str:
    """Return a picture as a piece of HTML: its SVG, with a folded table of its tiles below.

    >>> from shardwise.show.picture import View
    >>> "<svg " in html_of(Picture("nothing", "Nothing is drawn.", (View(("empty",), ()),)))
    True
    """
    tiles = [
        (short(xml_text(view.captions[0] if view.captions else ""), 80), panel.heading, tile)
        for view in picture.views
        for panel in view.panels
        for tile in panel.tiles
    ]
    parts = ['<div class="shardwise">', svg_of(picture).rstrip()]
    if tiles:
        rows = [(view, tile.place, tile.caption) for view, _, tile in tiles]
        table = _table(("of", "part", "held by, or how much"), rows)
        parts.append(f"<details><summary>As a table</summary>{table}</details>")
    return "\n".join([*parts, "</div>"])


def table_html(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table with what it shows above it and notes below; a title that begins with `>` is one of numbers.

    >>> print(table_html("two", ("name", ">bytes"), [("a", "1 B"), ("b", "2 B")]))
    <div class="shardwise"><p>two</p><table><thead><tr><th>name</th><th style="text-align:right">bytes</th></tr></thead>
    <tbody><tr><td>a</td><td style="text-align:right">1 B</td></tr>
    <tr><td>b</td><td style="text-align:right">2 B</td></tr></tbody></table></div>
    """
    below = "".join(f"<p>{escaped(short(xml_text(note), _LONGEST))}</p>" for note in notes)
    above = escaped(short(xml_text(caption), _LONGEST))
    return f'<div class="shardwise"><p>{above}</p>{_table(titles, rows)}{below}</div>'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    sides = [' style="text-align:right"' if title.startswith(">") else "" for title in titles]

    def line(kind: str, texts: Sequence[str]) -> str:
        cells = (
            f"<{kind}{side}>{escaped(short(xml_text(text), _LONGEST))}</{kind}>"
            for text, side in zip(texts, sides, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = line("th", [title.removeprefix(">") for title in titles])
    body = "\n".join(line("td", row) for row in rows[:_MOST_ROWS])
    more = f"<p>and {len(rows) - _MOST_ROWS:,} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table><thead>{head}</thead>\n<tbody>{body}</tbody></table>{more}"
