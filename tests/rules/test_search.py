"""What a rule matches is what Python's `re` says, whichever engine finds it."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from shardwise import LayoutMap, TensorLayout
from shardwise._core import RuleSet
from shardwise.rules.search import MATCH_MODES, MatchMode

# Pieces of which the syntaxes of Python and of the compiled core make the same, or different things, or an error.
PIECES = r"""
    a b K k / . _ - 0 é s ſ # & ~ < ] } { ^ $ | ( (?: (?P<n> ) ) ) (?i) (?=a) (?!b) (?<=a) (?i:a)
    * + ? *? +? ?? {2} {1,2} {0,} {,2} {1}? .* .+ (a|b) (a|) (a?)* (a*)+ (^a|b)+ ($|a)* (?:a?b?){2}
    [ab] [^a] [^/]* [a-c] [-a] [a-] []a] [^]] [[a] [a&&b] [a--] [0-9_] [\w-] [^\d] [\s\S] [^\S] [A-z] [Z-b] [é-ü] [^é]
    \d \w \s \D \W \S \b \B \A \Z \. \/ \- \< \> \{ \n \x61 \1
""".split()  # noqa: SIM905
PIECES += [" ", r"\ ", "\n", "\x1c"]

patterns = st.builds(
    lambda fold, pieces: fold + "".join(pieces),
    st.sampled_from(["", "", "", "(?i)"]),
    st.lists(st.sampled_from(PIECES), max_size=7),
)
plain_paths = st.text("aabbkK/._-0 sAB]}&~#<", max_size=8)
paths = (
    plain_paths | st.text("aabkK/._-0 sé\n\x1cſ\u212aü\ud800", max_size=8) | plain_paths.map(lambda path: path + "\n")
)


def is_pattern(pattern: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except (re.error, OverflowError):
            return False
    return bool(pattern)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(patterns, min_size=1, max_size=6, unique=True), st.lists(paths, min_size=1, max_size=6))
@example(["a$"], ["a\n", "a\nb", "a"])
@example([r"\s", r"\B", "(?i)k", "[^a]"], ["\x1c", "", "\u212a", "\n"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_all_rules_that_python_matches_and_no_others(keys: list[str], asked: list[str]) -> None:
    keys = [key for key in keys if is_pattern(key)]
    assume(keys)
    for mode in MATCH_MODES:
        layout_map = LayoutMap(match=mode)
        layout_map.update({key: TensorLayout(()) for key in keys})
        for path in asked:
            if path not in keys:
                expected = tuple(key for key in keys if getattr(re.compile(key), mode)(path))
                assert layout_map.matching_rules(path) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "dense.*kernel",
        r"^model\.layers\.\d+\.(self_attn|mlp)\.(?:[qkv]|gate)_proj\.weight$",
        r"(?i)LayerNorm\.(weight|bias)\Z",
        r"h/[0-9]{1,3}/attn/(?P<name>\w+?)\b",
        re.escape("model/layer-1 [0] #2 & ~3.kernel:0"),
    ],
)
@pytest.mark.parametrize("mode", MATCH_MODES)
def test_usual_rules_do_not_need_the_engine_of_python(pattern: str, mode: MatchMode) -> None:
    assert is_pattern(pattern)
    assert RuleSet([pattern], mode).find("any/path.kernel")[1] == ()


@pytest.mark.parametrize(
    ("pattern", "path", "mode"),
    [
        (r"(?<!conv)kernel", "dense/kernel", "search"),
        (r"(a)\1", "baa", "search"),
        (r"(?x) ker nel # words", "kernel", "fullmatch"),
        (r"(?s)a.b", "a\nb", "match"),
        (r"\w+$", "müller", "fullmatch"),
        ("(?i)STRASSE|ſ", "S", "search"),
        ("a$", "b\na\n", "search"),
        ("(" * 300 + "a" + ")" * 300, "a", "match"),
    ],
)
def test_the_others_run_on_the_engine_of_python(pattern: str, path: str, mode: MatchMode) -> None:
    assert getattr(re, mode)(pattern, path)
    assert RuleSet([pattern], mode).find(path) == ((), (0,))
    layout_map = LayoutMap(match=mode)
    layout_map[pattern] = ()
    assert layout_map.matching_rules(path) == (pattern,)


def test_rules_are_listed_in_their_order_whichever_engine_found_them() -> None:
    layout_map = LayoutMap()
    layout_map.update({key: TensorLayout(()) for key in ["(?=k)", "k", "(?=n)", "n", "(?=x)"]})
    assert layout_map.matching_rules("kernel") == ("(?=k)", "k", "(?=n)", "n")


def test_the_modes_are_those_of_python() -> None:
    with pytest.raises(ValueError, match="find"):
        RuleSet([], "find")
