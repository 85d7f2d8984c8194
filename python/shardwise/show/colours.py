"""The looks of tiles: six fills of one lightness by six patterns for shards, greys for amounts."""

from __future__ import annotations

__all__ = ["FILLS", "HEAT", "INK", "NEUTRAL", "PALE", "PATTERNS", "THEMES", "heat", "look"]

#: All of the OKLCH lightness 0.78, so that no shard looks more important than another; the six of that lightness, of a
#: chroma of at most 0.15, of which the closest two are furthest apart for an eye with all cones and for eyes without
#: one kind of them (Machado, Oliveira, Fernandes 2009). docs/pictures/palette.py finds them.
FILLS = ("#8db8ff", "#f3a539", "#0fd4bb", "#8fcb6c", "#e499e2", "#c7b49b")

#: The drawings over a fill, in a square of 8: nothing, stripes that rise, that fall, dots, lines across, lines down.
PATTERNS = ("", "M-2 2l4 -4M0 8l8 -8M6 10l4 -4", "M-2 6l4 4M0 0l8 8M6 -2l4 4", "M1 2h2M5 6h2", "M0 4h8", "M4 0v8")

#: Greys for amounts, from little to much, in equal steps of OKLCH lightness away from the page: colours are shards.
HEAT = {
    "light": ("#eef0f3", "#dfe1e5", "#d0d3d6", "#c2c4c7", "#b4b6b9", "#a6a8ab", "#989a9d", "#8a8c8f"),
    "dark": ("#25292f", "#2d3137", "#34393f", "#3c4147", "#44494f", "#4d5258", "#555a60", "#5e6369"),
}

#: The fill of tiles that are not shards, or that are too many for a colour each.
NEUTRAL = "#d9dde3"

#: Text on fills, and on greys on dark screens.
INK, PALE = "#111111", "#f0f4f8"

#: Page, text, and quieter text, on light and on dark screens.
THEMES = {"light": ("#ffffff", "#1b1f24", "#57606a"), "dark": ("#14181d", "#e6edf3", "#9aa5b1")}


def look(key: int | None) -> tuple[str, str]:
    """Return the fill and the pattern of a kind of tile.

    >>> look(1) != look(7) and look(1)[0] == look(7)[0]
    True
    """
    if key is None:
        return NEUTRAL, ""
    return FILLS[key % len(FILLS)], PATTERNS[key // len(FILLS) % len(PATTERNS)]


def heat(share: float) -> int:
    """Return the number of the grey for an amount, given as a share of the greatest amount.

    >>> heat(0.01), heat(0.5), heat(1)
    (0, 4, 7)
    """
    steps = len(HEAT["light"])
    return min(int(share * steps), steps - 1)
