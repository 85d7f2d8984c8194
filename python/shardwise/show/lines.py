"""Lines of styled text, in the form in which they are printed."""

__all__ = ["Line", "Part", "printable"]

Part = tuple[str, str]
"""Text and its style, in the words of rich; "" is plain."""

Line = list[Part]


def printable(text: str) -> str:
    r"""Give text with its control characters escaped: a tensor's name must not steer the terminal.

    >>> printable("h.0\x1b[2J")
    'h.0\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
