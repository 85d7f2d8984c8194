"""Fills that readers tell apart: eight colours by four patterns."""

from __future__ import annotations

__all__ = ["FILLS", "INK", "NEUTRAL", "PATTERNS", "THEMES", "look"]

#: Chosen so that any two differ by at least 20 in CIELAB for normal sight and without one of the three kinds of cones
#: (Machado, Oliveira, Fernandes 2009), and so that black text can be read on each.
FILLS = ("#89c4f4", "#f3e683", "#c6eab7", "#ea67a1", "#c2973d", "#8b88ed", "#67f9ef", "#969764")

#: What is drawn over a fill, in a square of 8: nothing, stripes that rise, stripes that fall, dots.
PATTERNS = ("", "M-2 2l4 -4M0 8l8 -8M6 10l4 -4", "M-2 6l4 4M0 0l8 8M6 -2l4 4", "M1 2h2M5 6h2")

#: The fill of tiles that the legend does not explain.
NEUTRAL = "#d9dde3"

#: Text on fills.
INK = "#111111"

#: Page, text, and quieter text, on light and on dark screens.
THEMES = {"light": ("#ffffff", "#1b1f24", "#57606a"), "dark": ("#14181d", "#e6edf3", "#9aa5b1")}


def look(key: int | None) -> tuple[str, str]:
    """Give the fill and the pattern of a kind of tile.

    >>> look(1) != look(9) and look(1)[0] == look(9)[0]
    True
    """
    if key is None:
        return NEUTRAL, ""
    return FILLS[key % len(FILLS)], PATTERNS[key // len(FILLS) % len(PATTERNS)]
