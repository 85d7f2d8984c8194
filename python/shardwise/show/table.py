"""A table as lines of aligned text."""

from collections.abc import Iterator, Sequence

from .lines import Line, Part, printable

__all__ = ["shorten", "table_lines"]

_GAP = "  "

# Of a name less than this says too little; a table that needs more room than there is may as well be broken by the
# terminal, where it can be put together again by making the window wider.
_SHORTEST = 32


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[Part]], width: int | None = None) -> Iterator[Line]:
    """Lay out rows under their titles; a title that begins with `>` aligns its column to the right.

    If the table is wider than `width`, the first column gives way: its texts lose their middle.

    >>> for line in table_lines(["name", ">bytes"], [[("a", ""), ("12", "")], [("bcd", ""), ("3", "")]]):
    ...     print("".join(text for text, _ in line))
    name  bytes
    a        12
    bcd       3
    """
    rights = [title.startswith(">") for title in titles]
    header: list[Part] = [(title.removeprefix(">"), "bold") for title in titles]
    lines = [header, *([(printable(text), style) for text, style in row] for row in rows)]
    widths = [max(len(line[column][0]) for line in lines) for column in range(len(titles))]
    if width is not None:
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths[0] -= max(0, min(excess, widths[0] - _SHORTEST))
    for line in lines:
        parts: Line = []
        for (text, style), size, right in zip(line, widths, rights, strict=True):
            text = shorten(text, size)
            parts.append((text.rjust(size) if right else text.ljust(size), style))
            parts.append((_GAP, ""))
        yield parts[:-1]


def shorten(text: str, size: int) -> str:
    """Give text of at most `size` characters; what is too much is taken out nearer to its beginning than to its end.

    >>> shorten("encoder.layer.0.attention.output.dense.weight", 32)
    'encoder.la…n.output.dense.weight'
    """
    if len(text) <= size:
        return text
    head = (size - 1) // 3
    return f"{text[:head]}…{text[len(text) - (size - 1 - head) :]}"
