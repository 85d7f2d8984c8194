"""Names of tensors and devices for people: in natural order, with similar names grouped."""

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from math import prod
from typing import TypeVar

from .._text import shown

Property = TypeVar("Property", bound=Hashable)

__all__ = ["brief", "group_names", "lines_alike", "natural_key"]

# A number that is a part of the path by itself, like the 0 of `h.0.attn` and `dense_0`, but not that of `w0`.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(0|[1-9][0-9]{0,8})(?![A-Za-z0-9])")


def natural_key(name: str) -> tuple[int | str, ...]:
    """Return a sort key that puts `h.10` after `h.9`.

    >>> sorted(["h.10", "h.9", "wte"], key=natural_key)
    ['h.9', 'h.10', 'wte']
    """
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_split(name)))


def group_names(named: Iterable[tuple[str, Property]]) -> list[tuple[str, list[str], Property]]:
    """Group names that differ only in their numbers and have the same value, in natural order.

    Each group is written as in a shell, and has all combinations of its numbers, so that nothing hides in it.

    Args:
        named: Names and the value that has to be the same for all names of a group.

    Returns:
        For each group its short form, its names, and their value.

    >>> group_names([("h.0.w", 1), ("h.1.w", 1), ("h.2.w", 1), ("h.3.w", 2), ("b", 1)])
    [('b', ['b'], 1), ('h.{0..2}.w', ['h.0.w', 'h.1.w', 'h.2.w'], 1), ('h.3.w', ['h.3.w'], 2)]
    """
    alike: dict[tuple[tuple[str, ...], Property], list[tuple[int, ...]]] = {}
    for name, value in named:
        parts = _split(name)
        alike.setdefault((tuple(parts[::2]), value), []).append(tuple(map(int, parts[1::2])))
    groups = [(*group, value) for (texts, value), numbers in alike.items() for group in _groups(texts, sorted(numbers))]
    return sorted(groups, key=lambda group: natural_key(group[1][0]))


def lines_alike(said: Iterable[tuple[str, str]], most: int, *, joined: bool = False) -> list[str]:
    """Write lines about names; names that differ only in their numbers, and of which the same is said, share one.

    Args:
        said: Names, and what is said of each, after its name.
        most: The number of lines; the names of others are counted in one more.
        joined: Whether any names of which the same is said share a line, which has the first few of them.

    >>> for line in lines_alike([("h.0.w", ": is missing"), ("h.1.w", ": is missing"), ("b", ": is of int8")], 9):
    ...     print(line)
    'b': is of int8
    'h.{0,1}.w': is missing (2 tensors)
    >>> print(*lines_alike([(name, " is missing") for name in "kqv"], 9, joined=True))
    'k' is missing (the same of 'q' and 'v'; 3 tensors)
    >>> lines_alike([("q", " is missing"), ("k", " is missing"), ("a", " is too large"), ("v", " is whole")], 1)
    ["'a' is too large", 'and 3 more']
    """
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for text, names, what in group_names(said):
        alike.setdefault((what, "" if joined else text), []).append((text, len(names)))
    lines = []
    for (what, _), groups in alike.items():
        count = sum(number for _, number in groups)
        others = [shown(text) for text, _ in groups[1:3]] + [f"{len(groups) - 3} more"] * (len(groups) > 3)
        also = f"the same of {' and '.join(filter(None, (', '.join(others[:-1]), others[-1])))}; " if others else ""
        lines.append((f"{shown(groups[0][0])}{what}" + (f" ({also}{count} tensors)" if count > 1 else ""), count))
    more = sum(count for _, count in lines[most:])
    return [line for line, _ in lines[:most]] + ([f"and {more:,} more"] if more else [])


def _split(name: str) -> list[str]:
    """Take a name apart: text, number, text, ..., text; for as many numbers as any sensible path has."""
    return _NUMBER.split(name, maxsplit=8)


def _groups(texts: tuple[str, ...], numbers: list[tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    values = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if prod(map(len, values)) == len(numbers):
        return [(_join(texts, map(_braces, values)), [_join(texts, map(str, number)) for number in numbers])]
    # Not all combinations are there: go through the first number that varies.
    position = next(index for index, column in enumerate(values) if len(column) > 1)
    return [
        group
        for _, part in groupby(numbers, key=lambda number: number[position])
        for group in _groups(texts, list(part))
    ]


def _join(texts: tuple[str, ...], between: Iterable[str]) -> str:
    return texts[0] + "".join(number + text for number, text in zip(between, texts[1:], strict=True))


def _braces(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return f"{{{','.join(map(str, values))}}}"


def brief(devices: Sequence[str]) -> str:
    """Write devices briefly: a common prefix once, neighbours as a range, only the first and last of many.

    >>> brief(["cpu:0", "cpu:4"]), brief([f"cpu:{i}" for i in range(64)]), brief([f"cpu:{8 * i}" for i in range(64)])
    ('cpu:0,4', 'cpu:0..63', 'cpu:0,8,…,504')
    """
    numbered = [re.fullmatch(r"(.*?)(0|[1-9][0-9]*)", device) for device in devices]
    prefixes = {match and match[1] for match in numbered}
    if len(prefixes) == 1 and (prefix := prefixes.pop()) is not None:
        pieces = _ranges([int(match[2]) for match in numbered if match])
    else:
        prefix, pieces = "", list(devices)
    return prefix + ",".join(pieces if len(pieces) <= 4 else [*pieces[:2], "…", pieces[-1]])


def _ranges(numbers: Sequence[int]) -> list[str]:
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    runs = [numbers[start:stop] for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    return [text for run in runs for text in (map(str, run) if len(run) < 3 else [f"{run[0]}..{run[-1]}"])]
