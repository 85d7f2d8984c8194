"""The search for the rules of a layout map that match a path.

The compiled core searches for all rules at once, in time linear in the path. Rules that it leaves to Python's own
engine, which may take time exponential in the path, are refused unless the map was told to accept them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._arguments import instance
from .._core import RuleSet
from .._fork import ForkLock
from .._text import shown
from ..errors import LayoutError

if TYPE_CHECKING:
    from .layout_rule import LayoutRule

__all__ = [
    "MATCH_MODES",
    "REMEMBERED_PATHS",
    "Answers",
    "MatchMode",
    "Rule",
    "RuleSearch",
    "checked_match",
    "checked_path",
    "compiled_rule",
    "too_large",
]

MatchMode = Literal["search", "match", "fullmatch"]

MATCH_MODES: tuple[MatchMode, ...] = ("search", "match", "fullmatch")

#: A layout map remembers the rules of this many paths; then it forgets them all and starts again.
REMEMBERED_PATHS = 65_536

#: The most characters of a rule: compiling a longer one takes seconds.
_LONGEST_RULE = 1 << 20

#: The most rules that a message names for one path.
_LISTED = 10

#: The words by which a message asks for it, if rules need it.
ASKED_FOR = "LayoutMap(..., backtracking=True), or backtracking = true in a rules file,"


class Rule(NamedTuple):
    """The value of a layout map under one key."""

    value: LayoutRule
    pattern: re.Pattern[str]


class RuleSearch:
    """The rules of a layout map at one moment, compiled.

    Attributes:
        rules: the rule of each key, in the order of the map.
        is_ordered: whether the first rule that matches applies.
    """

    def __init__(self, rules: Mapping[str, Rule], match: MatchMode, backtracking: bool, ordered: bool = False) -> None:
        self._backtracking = backtracking
        self.is_ordered = ordered
        self.rules = {key: rule.value for key, rule in rules.items()}
        self._entries = tuple(self.rules.items())
        together = RuleSet(tuple(rules), match)
        self._find_together = together.find
        self._too_large = dict(together.too_large())
        self._find_alone = [getattr(rule.pattern, match) for rule in rules.values()]

    def matching(self, path: str) -> tuple[str, ...]:
        """List the key that equals the path, or else all keys that match it; in an ordered map the first that does."""
        found = self.every_match(path)
        if self.is_ordered:
            return found[:1]
        return (path,) if path in self.rules else found

    def every_match(self, path: str) -> tuple[str, ...]:
        """List all keys that match the path, in the order of the map, whichever of them applies."""
        return tuple([self._entries[position][0] for position in self._matching(path)])

    def losing_rules(self, paths: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the rules that match paths, none of them first: for each the rules before it, with how many paths."""
        winning: set[str] = set()
        lost: dict[str, dict[str, int]] = {}
        for path in paths:
            every = self.every_match(path)
            winning.update(every[:1])
            for loser in every[1:]:
                by = lost.setdefault(loser, {})
                by[every[0]] = by.get(every[0], 0) + 1
        return {rule: by for rule, by in lost.items() if rule not in winning}

    def rule(self, path: str) -> LayoutRule | None:
        """Look up the rule of the key that applies to the path; `None` if none does.

        Raises:
            LayoutError: if several do.
        """
        rule = None if self.is_ordered else self.rules.get(path)
        if rule is not None:
            return rule
        found = self._matching(path)
        if not found:
            return None
        if len(found) > 1 and not self.is_ordered:
            keys = ", ".join(shown(self._entries[position][0]) for position in found[:_LISTED])
            keys += ", …" if len(found) > _LISTED else ""
            raise LayoutError(f"path {shown(path)} matches {len(found)} rules, but only one may match: {keys}")
        return self._entries[found[0]][1]

    def _matching(self, path: str) -> tuple[int, ...]:
        found, rest = self._find_together(path)
        if rest and not (self.is_ordered and found and found[0] < rest[0]):
            if path and not self._backtracking:
                rule = self._entries[rest[0]][0]
                if rest[0] in self._too_large:
                    raise LayoutError(
                        f"rule {shown(rule)} {too_large(self._too_large[rest[0]])}; {ASKED_FOR} allows it"
                    )
                raise LayoutError(
                    f"only a backtracking search can tell whether rule {shown(rule)} matches the path "
                    f"{shown(path)}; {ASKED_FOR} allows it"
                )
            return tuple(sorted([*found, *(position for position in rest if self._find_alone[position](path))]))
        return found


class Answers(dict[str, "LayoutRule | None"]):
    """The rules of paths, each looked up at the first request and then kept.

    Threads may share it. The rules are compiled at the first look-up; when the map changes, it makes a new one.

    Attributes:
        rules: the rules of the map.
        match: where in a path a rule has to match.
    """

    def __init__(self, rules: dict[str, Rule], match: MatchMode, backtracking: bool, ordered: bool = False) -> None:
        super().__init__()
        self._backtracking = backtracking
        self._ordered = ordered
        self._rules = rules
        self._match = match
        self._search: RuleSearch | None = None
        self._lock = ForkLock()

    @property
    def search(self) -> RuleSearch:
        """The compiled rules, made on the first look-up."""
        if self._search is None:
            with self._lock:
                if self._search is None:
                    self._search = RuleSearch(self._rules.copy(), self._match, self._backtracking, self._ordered)
        return self._search

    def __missing__(self, path: str) -> LayoutRule | None:
        rule = (self._search or self.search).rule(checked_path(path))
        if len(self) >= REMEMBERED_PATHS:
            self.clear()
        self[path] = rule
        return rule


def checked_match(match: Any) -> MatchMode:
    """Return `match` if it is a known kind of match; else refuse it.

    Raises:
        LayoutError: if it is none of the three.
    """
    if instance("match", match, str) not in MATCH_MODES:
        raise LayoutError(f"match is {shown(match)}; it must be one of {', '.join(map(repr, MATCH_MODES))}")
    mode: MatchMode = match
    return mode


def checked_path(path: object) -> str:
    """Return the path if it is a string."""
    return instance("path", path, str)


def compiled_rule(key: object, match: MatchMode, backtracking: bool) -> re.Pattern[str]:
    """Compile the key of a rule.

    Raises:
        LayoutError: if it is not a regular expression; the message says where and why. If only a backtracking search
            can find what it matches, unless `backtracking` allows one.
        TypeError: if it is not a string, or empty.
    """
    pattern = _compiled(key)
    if backtracking:
        return pattern
    alone = RuleSet((pattern.pattern,), match)
    for _, steps in alone.too_large():
        raise LayoutError(f"rule {shown(pattern.pattern)} {too_large(steps)}; {ASKED_FOR} allows it")
    if alone.backtracking():
        raise LayoutError(
            f"rule {shown(pattern.pattern)} uses look-around, a back-reference or another construct that only a "
            "backtracking search can find, or needs more than 16 MiB compiled; such a search may take time exponential "
            f"in a path; {ASKED_FOR} allows it"
        )
    return pattern


def too_large(steps: int) -> str:
    """Return the message that counted repetitions make a regular expression too large, with advice."""
    return (
        f"is too large: its counted repetitions, such as {{1,50}}, come to {steps:,} steps when they are written out, "
        "over the limit of 1,000 for one expression and 16,000 for all of a file; use + or * instead"
    )


def _compiled(key: object) -> re.Pattern[str]:
    if not isinstance(key, str) or not key:
        raise TypeError(f"the key of a rule must be a non-empty string, got {shown(key)}")
    if len(key) > _LONGEST_RULE:
        raise LayoutError(f"rule {shown(key)} has {len(key)} characters; at most {_LONGEST_RULE} are compiled")
    try:
        key.encode()
        return re.compile(key)
    except UnicodeEncodeError as error:
        raise LayoutError(f"rule {shown(key)} holds a lone surrogate at position {error.start}") from None
    except re.error as error:
        at = "" if error.pos is None else f" at position {error.pos}"
        raise LayoutError(f"rule {shown(key)} is not a regular expression: {error.msg}{at}") from None
    except (OverflowError, RecursionError) as error:
        raise LayoutError(f"rule {shown(key)} is not a regular expression that Python accepts: {error}") from None
