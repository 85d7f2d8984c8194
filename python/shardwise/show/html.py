"""Pictures as HTML: the drawing, and the same as a table."""

from __future__ import annotations

from .picture import Picture, plain, short
from .svg import escaped, svg_of

__all__ = ["html_of"]

_MOST_ROWS = 512


def html_of(picture: Picture) -> str:
    """Give a picture as a piece of HTML: its SVG, with a folded table of its tiles below.

    >>> from shardwise.show.picture import View
    >>> "<svg " in html_of(Picture("nothing", "Nothing is drawn.", (View(("empty",), ()),)))
    True
    """
    tiles = [
        (short(plain(view.captions[0] if view.captions else ""), 80), panel.heading, tile)
        for view in picture.views
        for panel in view.panels
        for tile in panel.tiles
    ]
    parts = ['<div class="shardwise">', svg_of(picture).rstrip()]
    if tiles:
        rows = "".join(
            "<tr>" + "".join(f"<td>{escaped(plain(text))}</td>" for text in (view, tile.place, tile.held)) + "</tr>"
            for view, _, tile in tiles[:_MOST_ROWS]
        )
        more = f"<p>and {len(tiles) - _MOST_ROWS:,} more</p>" if len(tiles) > _MOST_ROWS else ""
        parts.append(
            "<details><summary>As a table</summary><table><thead><tr><th>of</th><th>part</th>"
            f"<th>held by, or how much</th></tr></thead><tbody>{rows}</tbody></table>{more}</details>"
        )
    return "\n".join([*parts, "</div>"])
