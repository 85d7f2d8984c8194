"""Names by their parts: what is found is what a look at every name finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.rules.templates import NameIndex, parse_template

PARTS = ["a", "b", "w1", "w2", "0", "1", "10", ""]
names_of = st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join), max_size=12, unique=True)
tokens = st.sampled_from(["a", "b", "w1", "w{}", "{}", "{}/b", "{*}", "{+1}", "{}.{}", "1", "", "x{*}"])


def written(texts: list[str]) -> str:
    fields = (f"f{number}" for number in itertools.count())
    return ".".join("".join(pieces(text, fields)) for text in texts)


def pieces(text: str, fields: Iterator[str]) -> Iterator[str]:
    for piece in text.split("{"):
        inside, brace, after = piece.partition("}")
        yield f"{{{next(fields)}{inside}}}{after}" if brace else piece


@given(names_of, st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_as_a_look_at_all_names(names: list[str], texts: list[list[str]], data: st.DataObject) -> None:
    for passes in (0, 16):
        known, index = dict.fromkeys(names), NameIndex(names, passes=passes)
        for text in texts:
            try:
                template = parse_template(written(text))
            except sw.LayoutError:
                continue
            found = {name: template.matched(name) for name in known}
            expected = {name: values for name, values in found.items() if values is not None}
            assert list(index.matched(template).items()) == list(expected.items())
            for name in data.draw(st.lists(st.sampled_from(names), max_size=2)) if names else []:
                known.pop(name, None)
                index.discard(name)
                if data.draw(st.booleans()):
                    known[f"{name}.b"] = known.get(f"{name}.b")
                    index.add(f"{name}.b")


def test_whole_parts_are_those_without_a_field() -> None:
    assert parse_template("model.layers.{i}.w{j}.weight").whole_parts == ("model", "layers", "weight")
    assert parse_template("x{rest*}y.z/a").whole_parts == ("z", "a")
    assert parse_template("a.{{b}}").whole_parts == ("a", "{b}")


def test_more_comparisons_than_seconds_allow_are_refused() -> None:
    index = NameIndex([f"layer{i}" for i in range(100)], 1_000)
    for number in range(10):
        assert not index.matched(parse_template(f"h{number}{{i}}"))
    with pytest.raises(sw.LayoutError, match=r"more than 1,000 comparisons with the 100 names"):
        index.matched(parse_template("h{i}"))
    # Where a part is as it is in few names, few are compared.
    index = NameIndex([f"layer.{i}.w" for i in range(100)], 3_000)
    for number in range(500):
        assert len(index.matched(parse_template(f"{{x}}.{number}.w"))) == (number < 100)
