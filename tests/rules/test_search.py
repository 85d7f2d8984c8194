"""What a rule matches is what Python's `re` says, whichever engine finds it."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from shardwise import LayoutError, LayoutMap, TensorLayout
from shardwise._core import RuleSet
from shardwise.rules.search import MATCH_MODES, MatchMode
from tests.checks import interrupted

# Pieces of which the syntaxes of Python and of the compiled core make the same, or different things, or an error.
PIECES = r"""
    a b K k / . _ - 0 é s ſ # & ~ < ] } { ^ $ | ( (?: (?P<n> ) ) ) (?i) (?s: (?i:
    (?-i:b) (?m:^) (?m:$) (?-m:$) (?x: (?#c) (?=a) (?!b) (?<=a) (?i:a)
    * + ? *? +? ?? {2} {1,2} {0,} {,2} {1}? .* .+ (a|b) (a|) (a?)* (a*)+ (^a|b)+ ($|a)* (?:a?b?){2}
    [ab] [^a] [^/]* [a-c] [-a] [a-] []a] [^]] [[a] [a&&b] [a--] [0-9_] [\w-] [^\d] [\s\S] [^\S] [A-z] [Z-b] [é-ü] [^é]
    \d \w \s \D \W \S \b \B \A \Z \. \/ \- \< \> \{ \n \x61 \u00e9 \t [\n] [\t-\r] [^\n] {a} {2,} \1
""".split()  # noqa: SIM905
PIECES += [" ", r"\ ", "\n", "\x1c"]

patterns = st.builds(
    lambda fold, pieces: fold + "".join(pieces),
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?m)", "(?x)", "(?a)", "(?ia)", "(?imsx)", "(?sm)"]),
    st.lists(st.sampled_from(PIECES), max_size=7),
)
plain_paths = st.text("aabbkK/._-0 sAB]}&~#<", max_size=8)
paths = (
    plain_paths
    | st.text("aabkK/._-0 sé\n\x1cſ\u212aüİıi٣\u0308\u2003€\ud800", max_size=8)
    | plain_paths.map(lambda path: path + "\n")
    | st.text("ab-\n\r", max_size=5)
)


def is_pattern(pattern: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except (re.error, OverflowError):
            return False
    return bool(pattern)


@pytest.mark.heavy
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(patterns, min_size=1, max_size=6, unique=True), st.lists(paths, min_size=1, max_size=6))
@example(["a$"], ["a\n", "a\nb", "a"])
@example([r"\s", r"\B", "(?i)k", "[^a]"], ["\x1c", "", "\u212a", "\n"])
@example(["(?i:a)|k"], ["\u212a"])
@example([r"$\B", "(?m:^b)$", "(?m:a$)\nb$"], ["\n", "a\nb\n", "a\r\nb\n"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_all_rules_that_python_matches_and_no_others(keys: list[str], asked: list[str]) -> None:
    keys = [key for key in keys if is_pattern(key)]
    assume(keys)
    for mode in MATCH_MODES:
        layout_map = LayoutMap(match=mode, backtracking=True)
        layout_map.update({key: TensorLayout(()) for key in keys})
        linear = RuleSet(keys, mode)
        for path in asked:
            expected = tuple(key for key in keys if getattr(re.compile(key), mode)(path))
            if path not in keys:
                assert layout_map.matching_rules(path) == expected
            found, rest = linear.find(path)
            assert set(linear.backtracking()) <= set(rest)
            assert [keys[i] for i in found] == [key for i, key in enumerate(keys) if i not in rest and key in expected]


@pytest.mark.heavy
def test_every_short_rule_on_every_short_path_about_ends_of_lines() -> None:
    pieces = ["a", "\n", "\r", "é", "-", "^", "$", "(?m:^)", "(?m:$)", r"\b", r"\B", r"\Z", r"\s", r"[^\n]"]
    keys = ["".join(parts) for count in (1, 2, 3) for parts in itertools.product(pieces, repeat=count)]
    keys += [f"(?a){key}" for key in keys if r"\B" in key]
    asked = ["".join(parts) for count in range(4) for parts in itertools.product("a\n\r-é", repeat=count)]
    patterns = [re.compile(key) for key in keys]
    rules = RuleSet(keys, "search")
    assert rules.backtracking() == ()
    told = 0
    for path in asked:
        found, rest = rules.find(path)
        undecided = set(rest)
        expected = [i for i, pattern in enumerate(patterns) if i not in undecided and pattern.search(path)]
        assert list(found) == expected, path
        told += len(keys) - len(undecided)
    # Left over are, of the empty path, what has `\\B`, and of one with `\r` and a last newline, both kinds of anchors.
    assert told > 0.99 * len(keys) * len(asked)


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
        (r"(?x) ker nel # words", "kernel", "fullmatch"),
        (r"(?s)a.b", "a\nb", "match"),
        (r"\w+$", "müller", "fullmatch"),
        (r"(?a)^\w+$", "muller\n", "search"),
        ("(?i)k", "\u212a", "search"),
        ("b$", "a\nb\n", "search"),
        ("(?m)a$", "b\na\nc", "search"),
        ("[à-ü]b", "éb", "search"),
    ],
)
def test_neither_the_rule_nor_the_path_makes_a_search_backtrack(pattern: str, path: str, mode: MatchMode) -> None:
    assert getattr(re, mode)(pattern, path)
    assert RuleSet([pattern], mode).find(path) == ((0,), ())


# Python's engine takes 2**40 steps and more for each of these.
@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("(a+)+$", "a" * 40 + "b\nc"),
        (r"(\w+)+$", "a" * 40 + "é€"),
        (r"(\w+)+$", "é" * 40 + "€"),
        ("(?s)(a+)+$", "a" * 40 + "b"),
        ("(?m)(a+)+$", "a" * 40 + "b"),
        ("(?x)(a +)+ $", "a" * 40 + "b"),
        (r"(?a)(\w+)+$", "a" * 40 + "é"),
        ("(?i)(a+)+$", "a" * 40 + "ſ\n\n"),
    ],
)
def test_no_name_makes_a_rule_hang(pattern: str, path: str) -> None:
    layout_map = LayoutMap()
    layout_map[pattern] = ()
    assert layout_map[path] is None


@pytest.mark.parametrize(
    ("pattern", "path", "mode"),
    [
        (r"(?<!conv)kernel", "dense/kernel", "search"),
        (r"(a)\1", "baa", "search"),
        ("(?i)STRASSE|ſ", "S", "search"),
        ("(" * 300 + "a" + ")" * 300, "a", "match"),
    ],
)
def test_what_needs_backtracking_must_be_asked_for(pattern: str, path: str, mode: MatchMode) -> None:
    assert getattr(re, mode)(pattern, path)
    layout_map = LayoutMap(match=mode)
    with pytest.raises(LayoutError, match=r"may take time exponential.*backtracking=True"):
        layout_map[pattern] = ()
    assert len(layout_map) == 0
    layout_map = LayoutMap(match=mode, backtracking=True)
    layout_map[pattern] = ()
    assert layout_map.matching_rules(path) == (pattern,)


def test_a_path_on_whose_classes_the_engines_differ_is_refused() -> None:
    # A combining mark is a word character for Unicode, and none for Python.
    path = "é\u0308"
    with pytest.raises(LayoutError, match=r"only a backtracking search can tell .*backtracking=True"):
        _map(r"é\w", False).matching_rules(path)
    several = LayoutMap()
    several["plain"], several[r"ü\w"], several[r"é\w"] = (), (), ()
    with pytest.raises(LayoutError, match=r"^only a backtracking search can tell whether rule 'ü\\\\w' matches"):
        several.matching_rules("ü\u0308é\u0308")
    assert _map(r"é\w", True).matching_rules(path) == ()
    assert _map(r"é\W", True).matching_rules(path) == (r"é\W",)


def test_two_kinds_of_newlines_under_two_kinds_of_anchors_are_refused() -> None:
    rule = "(?m:^)b$"
    assert [_map(rule, False).matching_rules(path) for path in ("a\nb\n", "a\nb", "a\rb")] == [(rule,), (rule,), ()]
    with pytest.raises(LayoutError, match=r"only a backtracking search can tell whether rule '\(\?m:\^\)b\$' matches"):
        _map(rule, False).matching_rules("a\rb\n")
    assert _map(rule, True).matching_rules("a\rb\n") == ()
    assert _map(rule, True).matching_rules("a\r\nb\n") == (rule,)


def _map(rule: str, backtracking: bool) -> LayoutMap:
    layout_map = LayoutMap(backtracking=backtracking)
    layout_map[rule] = ()
    return layout_map


def test_rules_are_listed_in_their_order_whichever_engine_found_them() -> None:
    layout_map = LayoutMap(backtracking=True)
    layout_map.update({key: TensorLayout(()) for key in ["(?=k)", "k", "(?=n)", "n", "(?=x)"]})
    assert layout_map.matching_rules("kernel") == ("(?=k)", "k", "(?=n)", "n")


def test_a_rule_of_a_mebibyte_is_the_longest() -> None:
    for length, said in ((1 << 20, "unbalanced parenthesis at position 0"), ((1 << 20) + 1, "at most 1048576 are")):
        with pytest.raises(LayoutError, match=said):
            LayoutMap()[")" * length] = ()


def test_a_message_has_both_ends_of_a_long_rule() -> None:
    with pytest.raises(LayoutError, match=r"^rule '\(\?=a\)b{75}' uses look-around"):
        LayoutMap()["(?=a)" + "b" * 75] = ()
    with pytest.raises(LayoutError, match=r"^rule '\(\?=a\)b{20,60}\.\.\.b{20,60}end' uses look-around"):
        LayoutMap()["(?=a)" + "b" * 1000 + "end"] = ()


def test_the_modes_are_those_of_python() -> None:
    with pytest.raises(ValueError, match="find"):
        RuleSet([], "find")


@pytest.mark.heavy
def test_a_search_is_interrupted() -> None:
    # Short rules, each of which is in a thousand states for each letter of a name.
    layout_map = LayoutMap()
    for i in range(16):
        layout_map[f"[a-z]{{2,{985 + i}}}$"] = (None,)
    assert layout_map.matching_rules("!") == ()  # All that is compiled for such names.
    assert interrupted(lambda length: layout_map["a" * length + "!"], range(500, 200_000, 500), KeyboardInterrupt)
    assert layout_map.matching_rules("a" * 1000) == tuple(layout_map)


@pytest.mark.heavy
def test_a_search_is_interrupted_beside_a_unicode_word_boundary() -> None:
    layout_map = LayoutMap()
    layout_map[r"\B[a-zé]{2,1000}$"] = (None,)
    assert interrupted(lambda length: layout_map["éa" * length + "!"], range(500, 200_000, 500), KeyboardInterrupt)
    assert layout_map["é" * 9] is not None


@pytest.mark.parametrize("taken", ["\u212a", "\u017f", "\u0130", "\u0131"])
@pytest.mark.parametrize(
    "pattern",
    ["(?i:a)|k", "(?i:a)|[^k]", "(?i:a)|[^s]", "s(?i:s)|(?i:k)", "(?i:[i-k])", "(?i:a)|i", r"(?i:I)\b|\W(?i:s)"],
)
def test_case_is_ignored_only_where_a_rule_says_so(pattern: str, taken: str) -> None:
    layout_map = LayoutMap()
    layout_map[pattern] = (None,)
    for path in (taken, f"s{taken}", f"{taken}/w"):
        assert (layout_map[path] is not None) is (re.search(pattern, path) is not None), path


LARGE = [
    r"(([a-z.]{1,50}){1,50}){1,50}c0",
    r"(([a-z.]{1,50}){1,50}){1,50}x",
    "a{1002,}b",
    r"\w{1,200}\.",
    "(?:ab|c{2,90}){90}",
]


@pytest.mark.parametrize("pattern", LARGE)
def test_what_is_too_large_once_it_is_written_out_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(LayoutError, match=r"^rule '.* is too large: its counted .* [0-9,]+ steps .* limit of 1,000"):
        LayoutMap()[pattern] = (None,)
    # As the message advises; each matches what the other did, and more.
    LayoutMap()[re.sub(r"\{[0-9]+,?[0-9]*\}", "+", pattern)] = (None,)
    assert RuleSet((pattern,), "search").find("a" * 4096) == ((), (0,))


def test_all_expressions_of_a_map_together_have_a_limit() -> None:
    layout_map = LayoutMap()
    for number in range(20):
        layout_map[f"x{number}[a-z]{{1,900}}$"] = (None,)
    with pytest.raises(LayoutError, match=r"^rule 'x17.* is too large: .* and 16,000 for all of a file"):
        layout_map["x18abc"]


def test_long_expressions_without_counts_are_no_larger_than_they_are_written() -> None:
    words = "|".join(f"word{number}" for number in range(10_000))
    layout_map = LayoutMap()
    layout_map[f"^(?:{words})$"] = (None,)
    assert layout_map.matching_rules("word9999")
    assert not layout_map.matching_rules("word10000")
