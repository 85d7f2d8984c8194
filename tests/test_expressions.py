"""Expressions of whole numbers: the same values as Python's, and errors for everything else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise._expressions import parse_expression, read_expression

NAMES: dict[str, Any] = {"heads": 32, "groups": 8, "a.b": 5, "zero": 0, "stage": [3, 1, 4]}


def written(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
        lambda of: f" {of[1]} ".join(of[::2])
    )
    return binary | inner.map("({})".format) | inner.map("-{}".format) | inner.map("stage[{}]".format)


@given(st.recursive(st.sampled_from(["heads", "groups", "zero", "0", "1", "2", "17"]), written, max_leaves=12))
def test_values_are_those_of_python(text: str) -> None:
    class Stage(list[int]):
        """A list without entries before its first."""

        def __getitem__(self, place: Any) -> Any:
            if place < 0:
                raise IndexError
            return super().__getitem__(place)

    try:
        expected = eval(text, {}, {**NAMES, "stage": Stage(NAMES["stage"])})
    except (ZeroDivisionError, IndexError):
        with pytest.raises(sw.LayoutError, match=r"by 0|entries, and none at"):
            parse_expression(text).value(NAMES)
        return
    assert parse_expression(text).value(NAMES) == expected
    packed = text.replace(" ", "")
    assert read_expression(f"({packed}@tp d)", 1)[0].value(NAMES) == expected


@given(st.text(alphabet="ab1(+-*/%)[]. ", max_size=30) | st.text(max_size=30))
def test_any_text_is_an_expression_or_an_error(text: str) -> None:
    # Every other exception is a failure.
    with contextlib.suppress(sw.ParseError, sw.LayoutError, sw.SizeOverflowError):
        expression = parse_expression(text)
        assert isinstance(expression.value(dict.fromkeys(expression.names, 2)), int)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", sw.ParseError, "expected a number, a name or a bracket at character 0"),
        ("heads /2", sw.ParseError, "expected an operator at character 6, found '/2'"),
        ("heads ** 2", sw.ParseError, "at character 7"),
        ("heads groups", sw.ParseError, "expected an operator at character 6"),
        ("(heads", sw.ParseError, r"expected '\)' at character 6"),
        ("stage[1", sw.ParseError, r"expected '\]' at character 7"),
        ("abs(3)", sw.ParseError, "expected an operator at character 3"),
        ("a.__class__", sw.LayoutError, "the number a.__class__ is not given; known are heads, groups"),
        ("1.5", sw.ParseError, "expected an operator"),
        ("9" * 20, sw.ParseError, "over the limit of 9223372036854775807"),
        ("9" * 900, sw.ParseError, "over the limit of 9223372036854775807"),
        ("1+" * 600 + "1", sw.ParseError, "up to 1000 characters"),
        ("(" * 40 + "1" + ")" * 40, sw.ParseError, "up to 32 brackets"),
        ("-" * 400 + "1", sw.ParseError, "up to 32 brackets"),
        ("head", sw.LayoutError, "'head': the number head is not given; known are heads"),
        ("heads // zero", sw.LayoutError, "divides 32 by 0, where heads = 32, zero = 0"),
        ("heads % zero", sw.LayoutError, "divides 32 by 0"),
        ("stage", sw.LayoutError, r"stage is the list \[3, 1, 4\]; write stage\[…\]"),
        ("heads[1]", sw.LayoutError, "heads is the number 32, not a list"),
        ("stage[3]", sw.LayoutError, "the list stage has 3 entries, and none at 3"),
        ("stage[-1]", sw.LayoutError, "the list stage has 3 entries, and none at -1"),
        (f"{2**62} * 2", sw.SizeOverflowError, "over the limit"),
        (3, TypeError, "an expression must be a string, got 3"),
    ],
)
def test_what_is_refused(text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_expression(text).value(NAMES)
