"""Lines of styled text, in the form in which they are printed."""

import textwrap
import unicodedata

__all__ = ["Line", "StyledText", "padded", "printable", "width_of", "wrapped"]

StyledText = tuple[str, str]
"""Text and its style, in the words of rich; "" is plain."""

Line = list[StyledText]


def printable(text: str) -> str:
    r"""Return text with its control characters escaped: a tensor's name must not steer the terminal.

    >>> printable("h.0\x1b[2J")
    'h.0\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: wide characters, as those of Chinese, take two.

    >>> width_of("tp"), width_of("漢")
    (2, 2)
    """
    return len(text) + (0 if text.isascii() else sum(unicodedata.east_asian_width(letter) in "WF" for letter in text))


def padded(text: str, size: int, right: bool = False) -> str:
    """Fill text with spaces to this many columns of a terminal; `right` puts them before it.

    >>> padded("tp", 4), padded("漢", 4, right=True)
    ('tp  ', '  漢')
    """
    spaces = " " * (size - width_of(text))
    return spaces + text if right else text + spaces


def wrapped(text: str, size: int) -> list[str]:
    """Cut text into lines of at most so many columns, between its words where it can be.

    >>> wrapped("8 shards, each on one device", 14)
    ['8 shards, each', 'on one device']
    """
    widest = 1 if text.isascii() or width_of(text) == len(text) else 2
    return textwrap.wrap(text, max(size // widest, 1)) or [""]
