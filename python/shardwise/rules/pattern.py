"""Regular expressions of a caller's for names of tensors: what is found in a name, and put in its place.

The search is the compiled core's, linear in the name: neither an expression nor a name from a file can make it hang.
"""

from __future__ import annotations

import re

from .._core import Pattern, RuleSet
from .._text import shown
from ..errors import LayoutError
from .search import MatchMode, too_large

__all__ = ["FieldSearch", "NamePattern", "Replacement"]

_LONGEST = 1 << 16
_TOKEN = re.compile(r"\\(?:g<([^>]*)>|([1-9][0-9]?(?![0-9]))|(.))|[^\\]+", re.DOTALL)
_FLAGS = re.compile(r"(?:\(\?[aimsux]+\))*")
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}


class NamePattern:
    r"""A regular expression to be found anywhere in names, as `re.search` finds it.

    Args:
        argument: Its name in messages.
        pattern: The expression.

    Raises:
        LayoutError: if it is not a regular expression, or only a backtracking search can find what it matches.

    >>> NamePattern("only", r"layers\.\d+\.").is_found("model.layers.10.mlp")
    True
    """

    def __init__(self, argument: str, pattern: str) -> None:
        _compiled(argument, pattern)
        self._argument, self.pattern = argument, pattern
        self._search = RuleSet((pattern,), "search")
        for _, steps in self._search.too_large():
            raise LayoutError(f"{argument}: {shown(pattern)} {too_large(steps)}")
        if self._search.backtracking():
            raise _refused(
                argument,
                pattern,
                "it uses look-around, a back-reference or another construct that only a backtracking search can find, "
                "or needs more than 16 MiB compiled",
            )

    def is_found(self, name: str) -> bool:
        """Return whether the expression is found in a name."""
        found, rest = self._search.find(name)
        if rest:
            raise _undecided(self._argument, self.pattern, name)
        return bool(found)


class FieldSearch:
    r"""A search for the named groups of a rule's regular expression: where each is in a name.

    Args:
        pattern: The expression.
        match: The place in a name where it has to match.

    Raises:
        LayoutError: if no linear search gives its groups; see `Replacement`.

    >>> FieldSearch(re.compile(r"h\.(?P<i>[0-9]+)\."), "search").spans("x.h.11.w")
    {'i': slice(4, 6, None)}
    """

    def __init__(self, pattern: re.Pattern[str], match: MatchMode) -> None:
        self._pattern = pattern.pattern
        self._groups = pattern.groupindex
        flags = _FLAGS.match(pattern.pattern)
        begin = 0 if flags is None else flags.end()
        before, after = {"search": ("", ""), "match": (r"\A(?:", ")"), "fullmatch": (r"\A(?:", r")\Z")}[match]
        text = f"{pattern.pattern[:begin]}{before}{pattern.pattern[begin:]}{after}"
        try:
            self._search = Pattern(text)
        except LayoutError as error:
            raise _refused("a rule whose fields are used", self._pattern, str(error)) from None

    def spans(self, name: str) -> dict[str, slice]:
        """Return the slice of the name that each group matches; an empty one for a group that has no part in it."""
        matches = self._search.matches(name)
        if matches is None:
            raise _undecided("a rule whose fields are used", self._pattern, name)
        spans = matches[0] if matches else []
        return {group: slice(*((spans[number] if spans else None) or (0, 0))) for group, number in self._groups.items()}


class Replacement:
    r"""A regular expression, and what is put in the place of each of its matches in a name, as by `re.sub`.

    Args:
        argument: Its name in messages.
        pattern: The expression.
        replacement: The text, in which `\1`, `\g<1>` and `\g<name>` are what a group of the match has found.

    Attributes:
        pattern: The expression.

    Raises:
        LayoutError: if it is not a regular expression, or one whose matches no linear search gives as Python does:
            look-around, back-references, possessive repetitions, a repetition of what may be empty, a lazy repetition
            that may match nothing; if the text is not a replacement for it.

    >>> Replacement("rename", r"^h\.(\d+)\.", r"layers.\1.").applied("h.11.attn")
    'layers.11.attn'
    """

    def __init__(self, argument: str, pattern: str, replacement: str) -> None:
        compiled = _compiled(argument, pattern)
        self._argument, self.pattern = argument, pattern
        self._parts = _parts(argument, compiled, replacement)
        try:
            self._search = Pattern(pattern)
        except LayoutError as error:
            raise _refused(argument, pattern, str(error)) from None

    def applied(self, name: str) -> str:
        """Return the name with all matches replaced."""
        matches = self._search.matches(name)
        if matches is None:
            raise _undecided(self._argument, self.pattern, name)
        made, end = [], 0
        for spans in matches:
            begin, stop = spans[0] or (end, end)
            made.append(name[end:begin])
            for part in self._parts:
                span = (0, 0) if isinstance(part, str) else spans[part] or (0, 0)
                made.append(part if isinstance(part, str) else name[slice(*span)])
            end = stop
        return "".join([*made, name[end:]])


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    if len(pattern) > _LONGEST:
        raise LayoutError(f"{argument}: {shown(pattern)} has {len(pattern)} characters, over the limit of {_LONGEST}")
    try:
        pattern.encode()
        return re.compile(pattern)
    except UnicodeEncodeError as error:
        raise LayoutError(f"{argument}: {shown(pattern)} holds a lone surrogate at position {error.start}") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise LayoutError(f"{argument}: {shown(pattern)} is not a regular expression: {error}") from None


def _parts(argument: str, pattern: re.Pattern[str], replacement: str) -> list[str | int]:
    """Return the texts of a replacement, with the numbers of the groups between them."""
    parts: list[str | int] = []
    at = 0
    while at < len(replacement):
        found = _TOKEN.match(replacement, at)
        why = "a backslash ends it" if found is None else ""
        if found is not None:
            at = found.end()
            called, number, escaped = found.groups()
            group: int | None = None
            if called is not None:
                is_number = called.isascii() and called.isdigit()
                group = int(called[:9]) if is_number else pattern.groupindex.get(called, -1)
            elif number is not None:
                group = int(number)
            if group is not None and not 0 <= group <= pattern.groups:
                why = f"there is no group {called or number!r}"
            elif group is not None:
                parts.append(group)
            elif escaped is None:
                parts.append(found.group())
            elif escaped in _ESCAPES:
                parts.append(_ESCAPES[escaped])
            elif escaped.isascii() and escaped.isalnum():
                why = f"bad escape \\{escaped}"
            else:
                parts.append(found.group())
        if why:
            raise LayoutError(
                f"{argument}: {shown(replacement)} is not a replacement for {shown(pattern.pattern)}: {why}"
            )
    return parts


def _refused(argument: str, pattern: str, why: str) -> LayoutError:
    return LayoutError(f"{argument}: {shown(pattern)} cannot be searched for in time linear in a name: {why}")


def _undecided(argument: str, pattern: str, name: str) -> LayoutError:
    return LayoutError(
        f"{argument}: no linear search can tell what {shown(pattern)} matches in the name {shown(name)}, because "
        "engines classify some of its characters differently, or it ends in a newline"
    )
