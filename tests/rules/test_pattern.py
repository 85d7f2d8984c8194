"""Patterns for names: what they replace is what Python's `re` replaces, found in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardwise import LayoutError
from shardwise.rules.pattern import FieldSearch, NamePattern, Replacement
from shardwise.rules.search import MatchMode

ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "^", "$", r"\b", "é", r"\Z", "x1"])


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map("|".join).map("(?:{})".format),
        parts.map("({})".format),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?", "+?", "??"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    )


PATTERNS = st.recursive(ATOMS, joined, max_leaves=6)
NAMES = st.text("ab.1xé_", max_size=8)


@given(PATTERNS, NAMES)
@example("", "ab")
@example("x*", "abxd")
@example("a?b?", "aab.b")
@example("(a)|b", "ab.")
@example("a+?", "aaa")
@example("(a|ab)(c|bcd)(d*)", "abcd")
@example(r"(?:(a)|b)+", "ab")
@example(r"\b", "é.a")
@example("$", "")
def test_what_is_replaced_is_what_python_replaces(pattern: str, name: str) -> None:
    compiled = re.compile(pattern)
    text = "<" + "".join(rf"[\{group}]" for group in range(1, compiled.groups + 1)) + r"\g<0>>"
    try:
        made = Replacement("rename", pattern, text)
    except LayoutError:
        assume(False)
        return
    assert made.applied(name) == compiled.sub(text, name)


@given(PATTERNS, NAMES)
def test_what_is_found_is_what_python_finds(pattern: str, name: str) -> None:
    assert NamePattern("only", pattern).is_found(name) == bool(re.search(pattern, name))


@pytest.mark.parametrize(
    ("pattern", "text", "name"),
    [
        (r"^transformer\.h\.(?P<layer>\d+)\.", r"model.layers.\g<layer>.", "transformer.h.10.attn.weight"),
        (r"^(model\.)?", r"m.\1", "layers.0"),
        (r"(q|k|v)_proj", r"\g<1>-\\-\.-\n", "q_proj.k_proj"),
        (r"(?i)WEIGHT$", "w", "a.Weight"),
        (r"(a)|(b)", r"[\2]", "ab"),
        ("é+", "e", "caféé.é"),
    ],
)
def test_replacements_are_written_as_in_python(pattern: str, text: str, name: str) -> None:
    assert Replacement("rename", pattern, text).applied(name) == re.sub(pattern, text, name)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){12}c", r"([a-z]+)+\d", "(x+x+)+y"])
def test_no_pattern_makes_a_name_hang(pattern: str) -> None:
    name = "a" * 4000 + "!"
    assert not NamePattern("only", pattern).is_found(name)
    assert Replacement("rename", pattern, "b").applied(name) == name


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "look-around"),
        (r"(a)\1", "back-reference"),
        ("(a*)*", "repeats what may be empty"),
        ("a??", "may match nothing where it could match something"),
        ("^|a", "may match nothing where it could match something"),
        ("((a{1000}){1000}){1000}", "too large"),
    ],
)
def test_what_no_linear_search_replaces_as_python_does_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(LayoutError, match=f"^rename: '.*' cannot be searched for in time linear in a name: .*{why}"):
        Replacement("rename", pattern, "")


def test_only_python_can_tell_what_an_end_before_a_newline_matches() -> None:
    assert NamePattern("only", "a$").is_found("a\n")
    with pytest.raises(LayoutError, match="no linear search can tell what 'a\\$' matches"):
        Replacement("rename", "a$", "b").applied("a\n")


@pytest.mark.parametrize("text", ["\\", r"\2", r"\g<2>", r"\g<x>", r"\q", r"\0"])
def test_a_text_that_is_no_replacement_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="is not a replacement for '\\(a\\)'"):
        Replacement("rename", "(a)", text)


@pytest.mark.parametrize("pattern", ["(", "a\ud800"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    for make in (lambda: NamePattern("only", pattern), lambda: Replacement("only", pattern, "")):
        with pytest.raises(LayoutError, match=r"^only: "):
            make()


def test_a_pattern_has_at_most_65536_characters() -> None:
    assert not NamePattern("only", "a" * 65_536).is_found("b")
    for make in (NamePattern, lambda argument, pattern: Replacement(argument, pattern, "")):
        with pytest.raises(LayoutError, match=r"^only: .* has 65537 characters, over the limit of 65536$"):
            make("only", "a" * 65_537)


def test_what_is_too_large_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"^only: '\(a\{1,50\}\)\{1,50\}' is too large: its counted .* 2,499 steps"):
        NamePattern("only", "(a{1,50}){1,50}")


@pytest.mark.parametrize(
    ("key", "match", "name"),
    [
        (r"h\.(?P<i>[0-9]+)\.", "search", "x.h.11.w"),
        (r"h\.(?P<i>[0-9]+)\.", "match", "h.11.h.12.w"),
        (r"(?P<a>.*)\.(?P<i>[0-9]+)\.(?P<b>\w+)", "fullmatch", "é.h.11.w"),
        (r"(?i)H\.(?P<i>[0-9]+)|k(?P<k>[0-9])", "match", "h.3"),
        (r"(?:(?P<i>[0-9])|b)+", "search", "x12b"),
        (r"a|ab(?P<i>[0-9])", "fullmatch", "ab1"),
        (r"(?P<i>[0-9])", "search", "none"),
    ],
)
def test_fields_are_where_python_finds_them(key: str, match: MatchMode, name: str) -> None:
    pattern = re.compile(key)
    found = getattr(pattern, match)(name)
    texts = {group: (found[group] or "") if found else "" for group in pattern.groupindex}
    assert {group: name[span] for group, span in FieldSearch(pattern, match).spans(name).items()} == texts


def test_fields_that_only_a_backtracking_search_finds_are_refused() -> None:
    with pytest.raises(LayoutError, match="cannot be searched for in time linear"):
        FieldSearch(re.compile("(?P<i>[0-9])(a*)*"), "search")
    with pytest.raises(LayoutError, match="no linear search can tell"):
        FieldSearch(re.compile("(?P<i>[0-9])$"), "search").spans("1\n")
