"""Rewrites as data: templates, what a rewrite may say, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.rules.templates import parse_template


def names(template: str, name: str) -> dict[str, str] | None:
    return parse_template(template).matched(name)


def test_a_number_in_a_name_is_not_negative() -> None:
    assert names("layers.{i+4}.w", "layers.4.w") == {"i": "0"}
    assert names("layers.{i+4}.w", "layers.3.w") is None
    below = parse_template("layers.{i-4}.w")
    assert below.filled({"i": "4"}) == "layers.0.w"
    for value in ("3", "x"):
        with pytest.raises(
            sw.LayoutError, match=rf"\{{i\}} is '{value}', which does not give a whole number of 0 or more"
        ):
            below.filled({"i": value})


def test_a_number_as_quotient_and_remainder() -> None:
    template = parse_template("layers.{i*every+k}.w", {"every": 3})
    assert template.text == "layers.{i*3+k}.w"
    assert template.fields == {"i", "k"}
    for number in range(10):
        found = template.matched(f"layers.{number}.w")
        assert found == {"i": str(number // 3), "k": str(number % 3)}
        assert template.filled(found) == f"layers.{number}.w"
    for other in ("layers.x.w", "layers.05.w", "layers.-1.w"):
        assert template.matched(other) is None
    for values, why in [
        ({"i": "1", "k": "3"}, r"\{k\} is '3'; a remainder of a division by 3 is from 0 to 2"),
        ({"i": "1", "k": "x"}, r"\{k\} is 'x'; a remainder of a division by 3 is from 0 to 2"),
        ({"i": "x", "k": "1"}, r"\{i\} is 'x', which does not give a whole number of 0 or more"),
    ]:
        with pytest.raises(sw.LayoutError, match=why):
            template.filled(values)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("l.{i*0+k}.w", "a divisor is at least 1"),
        ("l.{i*n+k}.w", "n"),
        ("l.{i*2+i}.w", r"quotient and remainder are both \{i\}"),
        ("l.{i*2+k}.{k}.w", "and one with another number"),
        ("l.{i*2+k}{j}.w", "two fields without a dot"),
        ("l.{i*2+1}.w", "is not a field"),
    ],
)
def test_quotients_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(sw.LayoutError, match=why):
        parse_template(text)


def test_a_number_of_the_file_alone_is_text() -> None:
    template = parse_template("h.{1+n}.w", {"n": 2})
    assert (template.text, template.fields, template.matched("h.3.w")) == ("h.3.w", frozenset(), {})
    with pytest.raises(sw.LayoutError, match=r"\{1-n\} is -1"):
        parse_template("h.{1-n}.w", {"n": 2})
    with pytest.raises(sw.LayoutError, match="n"):
        parse_template("h.{0+n}.w")


@pytest.mark.parametrize(
    ("template", "name", "fields"),
    [
        ("layers.{i}.w", "layers.12.w", {"i": "12"}),
        ("layers.{i}.w", "layers.1.2.w", None),
        ("layers/{i}/w", "layers/1/2/w", None),
        ("layers.{i}.w", "layersx1.w", None),
        ("h{i}.x", "h3.x", {"i": "3"}),
        ("{a}.{b}.{a}", "x.y.x", {"a": "x", "b": "y"}),
        ("{a}.{b}.{a}", "x.y.z", None),
        ("model.{rest*}", "model.a.b", {"rest": "a.b"}),
        ("{rest*}.bias", "a.b.bias", {"rest": "a.b"}),
        ("a{{0}}", "a{0}", {}),
        ("a{{0}}", "a0", None),
    ],
)
def test_a_template_matches_whole_names(template: str, name: str, fields: dict[str, str] | None) -> None:
    assert names(template, name) == fields
    if fields is not None:
        assert parse_template(template).filled(fields) == name


def test_choices_are_written_out() -> None:
    template = parse_template("{a,b}.{{x}}.{i}.{c,d}")
    assert [one.text for one in template.expanded()] == [
        "a.{{x}}.{i}.c",
        "a.{{x}}.{i}.d",
        "b.{{x}}.{i}.c",
        "b.{{x}}.{i}.d",
    ]


@given(st.text(max_size=30))
def test_any_text_is_a_template_that_writes_itself_or_an_error(text: str) -> None:
    try:
        template = parse_template(text)
    except sw.LayoutError:
        return
    for one in template.expanded():
        assert parse_template(one.text) == one
        assert names(one.text, one.filled(dict.fromkeys(one.fields, "7"))) == dict.fromkeys(one.fields, "7")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "1 to 4096 characters"),
        ("x" * 5000, "1 to 4096 characters"),
        ("a{b", "brace at character 1"),
        ("a}b", "brace at character 1"),
        ("{}", "not a field"),
        ("{1}", "not a field"),
        ("{a-b}", "the number b is not given"),
        ("{a+}", "not a field"),
        ("{a+1}.{a}", "and one with another number"),
        ("{a+1}.{a+2}", "and one with another number"),
        ("{a}{b}", "two fields"),
        ("{a}_{b}", "two fields"),
        ("x.{a}{b}", "two fields"),
        ("{a*}.{b*}", "only one field"),
        ("{a}.{a*}", "has both"),
        ("{a,a}", "repeats a text"),
    ],
)
def test_templates_that_are_refused(template: str, message: str) -> None:
    with pytest.raises(sw.LayoutError, match=message) as caught:
        parse_template(template)
    assert len(str(caught.value)) < 300


def test_a_name_cannot_make_a_match_slow() -> None:
    assert names("{a}.x.{b}.x.{rest*}.x.{c}y", "x." * 2000) is None


def test_choices_that_both_sides_have_are_written_out() -> None:
    short = sw.Rewrites([{"from": "h.{i}.{ln_1,ln_2}.{weight,bias}", "to": "l.{i}.{weight,bias}.{ln_1,ln_2}"}])
    long = [
        {"from": f"h.{{i}}.{ln}.{kind}", "to": f"l.{{i}}.{kind}.{ln}"}
        for ln in ("ln_1", "ln_2")
        for kind in ("weight", "bias")
    ]
    assert short == sw.Rewrites(long)


def test_the_inverse_undoes_the_last_first() -> None:
    one = {"from": "{q,k}", "to": {"name": "x", "packed": "q:(2) + k:(3)", "pad_to": 8}, "size": 5}
    other = {"from": "x", "to": {"name": "y", "transpose": True}}
    turned = [
        {"from": side["to"], "to": side["from"], **{k: v for k, v in side.items() if k == "size"}}
        for side in (other, one)
    ]
    assert sw.Rewrites([one, other], drop=["z"]).inverse() == sw.Rewrites(turned, drop=["z"])
    both = sw.Rewrites([one]) + sw.Rewrites([other], unmatched="refuse")
    assert both.inverse() == sw.Rewrites([other], unmatched="refuse").inverse() + sw.Rewrites([one]).inverse()
    assert both.inverse().inverse() == both
    with pytest.raises(sw.LayoutError, match="cannot be undone: size is missing"):
        sw.Rewrites([{"from": "a", "to": {"name": "b", "pad_to": 8}}]).inverse()


PACKED = {"name": "x", "packed": "q:(2) + k:(3)"}


@pytest.mark.parametrize(
    ("rewrite", "error", "message"),
    [
        ("a", TypeError, "expected a mapping"),
        ({"from": "a"}, sw.LayoutError, "'to' is missing"),
        ({"from": "a", "to": "b", "into": "c"}, sw.LayoutError, "unknown key 'into', expected one of from, to"),
        ({"from": 1, "to": "b"}, TypeError, "from must be a template or a table, got 1"),
        ({"from": "a", "to": {"nam": "b"}}, sw.LayoutError, "to: unknown key 'nam'"),
        ({"from": "a", "to": {"name": "b", "h": 3}}, sw.LayoutError, "unknown key 'h'"),
        ({"from": "a", "to": {"stack": "i"}}, sw.LayoutError, "give either name or parts"),
        ({"from": "a", "to": {"name": "b", "stack": 1}}, TypeError, "stack must be the name"),
        ({"from": "a", "to": {"name": "b", "transpose": 1}}, TypeError, "transpose must be true or false"),
        ({"from": "a", "to": {"name": "b", "dim": "x"}}, TypeError, "dim must be an integer"),
        ({"from": "a", "to": {"name": "b", "pad_to": 0}}, sw.LayoutError, "pad_to is 0; it must be 1 to"),
        ({"from": "a", "to": {"name": "b", "pad_to": 2**70}}, sw.LayoutError, "it must be 1 to"),
        ({"from": "a", "to": {"name": "b", "pad_to": 2**63}}, sw.LayoutError, "it must be 1 to 9223372036854775807"),
        ({"from": "a", "to": {"name": "b", "dim": -65}}, sw.LayoutError, "dim is -65; it must be -64 to"),
        ({"from": "a", "to": "b", "size": True}, TypeError, "size must be an integer"),
        ({"from": "a", "to": "b", "size": np.arange(2)}, TypeError, "size must be an integer"),
        ({"from": "a", "to": "b", "size": -1}, sw.LayoutError, "size is -1; it must be 0 to"),
        ({"from": "a", "to": "b", "optional": 1}, TypeError, "optional must be true or false"),
        ({"from": "a", "to": "b", "size": 3}, sw.LayoutError, "neither side has pad_to"),
        ({"from": {"name": "a", "pad_to": 8}, "to": "b"}, sw.LayoutError, "size is missing"),
        ({"from": "a.{i}", "to": "b"}, sw.LayoutError, r"to has no field \{i\}.*stack = 'i'"),
        ({"from": "a", "to": "b.{i}"}, sw.LayoutError, r"from has no field \{i\}"),
        ({"from": "a.{i}", "to": {"name": "b.{i}", "stack": "i"}}, sw.LayoutError, "cannot be in the name too"),
        ({"from": "a.{i*}", "to": {"name": "b", "stack": "i"}}, sw.LayoutError, "cannot be stacked"),
        (
            {"from": "{q,k}", "to": "b"},
            sw.LayoutError,
            "to is one tensor of the parts q, k; state their order with packed",
        ),
        (
            {"from": "b", "to": "{q,k}"},
            sw.LayoutError,
            "from is one tensor of the parts q, k; state their order with packed",
        ),
        (
            {"from": PACKED, "to": "b"},
            sw.LayoutError,
            "to is one tensor of the parts q, k; state their order with packed",
        ),
        ({"from": "{q,k}", "to": {"name": "x", "packed": "(2) + (3)"}}, sw.LayoutError, "the order is not stated"),
        ({"from": "{q,v}", "to": PACKED}, sw.LayoutError, r"from has the parts \['q', 'v'\], but to has \['q', 'k'\]"),
        ({"from": "{a,b}.{q,k}", "to": PACKED}, sw.LayoutError, "is not on the other side"),
        ({"from": "{,k}", "to": PACKED}, sw.LayoutError, "has no name"),
        ({"from": {"parts": {}}, "to": "b"}, TypeError, "parts must be a table"),
        ({"from": {"parts": {"q": "a"}, "packed": "q:(1)"}, "to": "b"}, sw.LayoutError, "cannot be packed too"),
        ({"from": "a", "to": {"name": "b", "packed": "q:(h)", "g": 2}}, sw.LayoutError, "'g', which 'q:.h.' does not"),
        ({"from": "a", "to": {"name": "b", "packed": "q:("}}, sw.ParseError, "rewrite 1: "),
        ({"from": "a", "to": {"name": "b", "packed": 3}}, TypeError, "packed must be the text"),
        (
            {"from": "{q,k}", "to": {"name": "b", "packed": sw.packed.parse("q:(2) + k:(3)"), "g": 2}},
            sw.LayoutError,
            "to: 'g' is given, but packed is not text",
        ),
        (
            {"from": {"parts": {"q": "a.{i}", "k": "b.{j}"}}, "to": {"parts": {"q": "c.{i}", "k": "d.{j}"}}},
            sw.LayoutError,
            "from: its templates do not have the same fields",
        ),
    ],
)
def test_rewrites_that_are_refused(rewrite: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        sw.Rewrites([rewrite])
    assert "rewrite 1: " in str(caught.value)
    assert len(str(caught.value)) < 400


def test_rewrites_are_true_if_there_is_anything_to_do() -> None:
    assert not sw.Rewrites()
    assert not sw.Rewrites() + sw.Rewrites(unmatched="keep")
    assert sw.Rewrites([{"from": "a", "to": "b"}])
    assert sw.Rewrites(drop=["a"])
    assert sw.Rewrites(unmatched="drop")
    assert sw.Rewrites() + sw.Rewrites(unmatched="refuse")


def test_dims_count_from_the_end_too() -> None:
    for dim in (-64, -1, 0):
        rewrites = sw.Rewrites([{"from": "a", "to": {"name": "b", "dim": dim}}])
        assert rewrites.sets[0].rewrites[0].target.dim == dim


def test_too_many_choices_are_refused() -> None:
    many = ".".join(f"{{a{i},b{i}}}" for i in range(40))
    with pytest.raises(sw.LayoutError, match="40 choices make 1099511627776 templates, over the limit"):
        sw.Rewrites([{"from": many, "to": many}])
    with pytest.raises(sw.LayoutError, match="40 choices make 1099511627776 templates, over the limit"):
        sw.Rewrites(drop=[many])


def test_up_to_1024_ways_to_choose() -> None:
    def chosen(*sizes: int) -> sw.Rewrites:
        names = [
            "{" + ",".join(f"{letter}{n}" for n in range(size)) + "}" for letter, size in zip("ab", sizes, strict=True)
        ]
        return sw.Rewrites(drop=[".".join(names)])

    assert chosen(32, 32)
    with pytest.raises(sw.LayoutError, match="2 choices make 1025 templates, over the limit of 1024"):
        chosen(25, 41)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rewrites": "abc"}, TypeError, "rewrites must be a sequence"),
        ({"rewrites": {"from": "a", "to": "b"}}, TypeError, "rewrites must be a sequence"),
        ({"drop": "abc"}, TypeError, "drop must be a sequence"),
        ({"drop": [3]}, TypeError, "template must be a string"),
        ({"unmatched": "no"}, sw.LayoutError, "unmatched is 'no'; it must be one of 'keep', 'drop', 'refuse'"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.Rewrites(**arguments)


def test_a_rules_file_has_rules_and_rewrites() -> None:
    text = """
        drop = ["x"]
        unmatched = "refuse"

        [rules]
        y = ["tp"]

        [[rewrite]]
        from = "h.{i}.{q,k}"
        [rewrite.to]
        name = "y"
        stack = "i"
        packed = "q:(h d) + k:(g d)"
        h = 4
        g = 2
        d = 8
    """
    side = {"name": "y", "stack": "i", "packed": "q:(4 8) + k:(2 8)"}
    expected = sw.Rewrites([{"from": "h.{i}.{q,k}", "to": side}], drop=["x"], unmatched="refuse")
    assert sw.Rewrites.from_toml(io.StringIO(text)) == expected
    assert list(sw.LayoutMap.from_toml(io.StringIO(text))) == ["y"]
    assert not sw.Rewrites.from_toml(io.StringIO("[rules]"))
    assert not sw.LayoutMap.from_toml(io.StringIO("[[rewrite]]\nfrom = 'a'\nto = 'b'"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrite = 3", "the rules file: rewrite must be a list"),
        ("drop = 'x'", "the rules file: drop must be a list"),
        ("drop = [3]", "the rules file: a template must be a string"),
        ("[[rewrite]]\nfrom = 'a'\nto = 3", "the rules file: rewrite 1: to must be a template or a table"),
        ("[[rewrites]]", "unknown key 'rewrites'.* did you mean 'rewrite'"),
        ("unmatched = 'x'", "the rules file: unmatched is 'x'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, message: str) -> None:
    with pytest.raises((sw.ParseError, sw.LayoutError), match=message):
        sw.Rewrites.from_toml(io.StringIO(text))
