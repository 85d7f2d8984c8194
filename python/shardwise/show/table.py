"""A table as lines of aligned text."""

from collections.abc import Iterator, Sequence

from .fit import fit_names
from .lines import Line, StyledText, padded, printable, width_of

__all__ = ["table_lines", "table_text"]

_GAP = "  "

# Less than this of a name says too little; then each has its own line.
_SHORTEST = 16


def table_lines(
    titles: Sequence[str], rows: Sequence[Sequence[StyledText]], width: int | None = None
) -> Iterator[Line]:
    """Lay out rows under their titles; a title that begins with `>` aligns its column to the right.

    If the table is wider than `width`, the names in the first column lose what they have in common; if that is not
    enough, each gets its own line, above the rest of its row; if the rest is wider than `width` too, each value has its
    title next to it. Nothing else is ever shortened.

    >>> for line in table_lines(["name", ">bytes"], [[("a", ""), ("12", "")], [("bcd", ""), ("3", "")]]):
    ...     print("".join(text for text, _ in line))
    name  bytes
    a        12
    bcd       3
    """
    rights = [title.startswith(">") for title in titles]
    header: list[StyledText] = [(title.removeprefix(">"), "bold") for title in titles]
    lines = [header, *([(printable(text), style) for text, style in row] for row in rows)]
    widths = [max(width_of(line[column][0]) for line in lines) for column in range(len(titles))]
    rest = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    if width is None or widths[0] + rest <= width:
        yield from _aligned(lines, widths, rights)
        return
    names = [row[0][0] for row in lines[1:]]
    shortened = fit_names(names, width - rest) if width - rest >= max(_SHORTEST, width_of(header[0][0])) else None
    if shortened is not None:
        lines[1:] = [[(name, row[0][1]), *row[1:]] for name, row in zip(shortened, lines[1:], strict=True)]
        widths[0] = max(width_of(line[0][0]) for line in lines)
        yield from _aligned(lines, widths, rights)
        return
    names = fit_names(names, width) or names
    if names and len(_GAP) + rest > width:
        for name, line in zip(names, lines[1:], strict=True):
            yield [(name, line[0][1])]
            yield from _flowing(header[1:], line[1:], width)
        return
    below = list(_aligned([line[1:] for line in lines], widths[1:], rights[1:]))
    for name, style, line in zip([header[0][0], *names], [line[0][1] for line in lines], below, strict=True):
        yield [(name, style)]
        yield [(_GAP, ""), *line]


def table_text(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table as text, with what it shows above it and notes below.

    >>> print(table_text("two", ("name", ">bytes"), [("a", "12"), ("bcd", "3")], ["and more"]))
    two
    name  bytes
    a        12
    bcd       3
    and more
    """
    lines = table_lines(titles, [[(cell, "") for cell in row] for row in rows]) if rows else ()
    table = ["".join(text for text, _ in line).rstrip() for line in lines]
    return "\n".join([printable(caption), *table, *map(printable, notes)])


def _flowing(titles: Sequence[StyledText], values: Sequence[StyledText], width: int) -> Iterator[Line]:
    """Write values with their titles, as many in a line as there is room for."""
    line: Line = []
    used = 0
    for (title, bold), (text, style) in zip(titles, values, strict=True):
        size = width_of(title) + 1 + width_of(text)
        if line and used + len(_GAP) + size > width:
            yield line
            line, used = [], 0
        line += [(_GAP, ""), (f"{title} ", bold), (text, style)]
        used += len(_GAP) + size
    if line:
        yield line


def _aligned(lines: Sequence[Sequence[StyledText]], widths: Sequence[int], rights: Sequence[bool]) -> Iterator[Line]:
    for line in lines:
        parts: Line = []
        for (text, style), size, right in zip(line, widths, rights, strict=True):
            parts.append((padded(text, size, right), style))
            parts.append((_GAP, ""))
        yield parts[:-1]
