"""Packed dims as text: it reads back, and what cannot be one is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import packed
from tests.checks import refused


@st.composite
def dims(draw: st.DrawFn) -> packed.PackedDim:
    parts = []
    free = draw(st.booleans())
    for i in range(draw(st.integers(1, 4))):
        factors: list[int | None] = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        if free and draw(st.booleans()):
            factors[draw(st.integers(0, len(factors) - 1))] = None
        options: dict[str, Any] = {"name": draw(st.sampled_from([None, f"t{i}"]))}
        if None in factors:
            options["ratio"] = draw(st.integers(1, 3))
        if draw(st.booleans()):
            options["cut"] = draw(st.integers(0, len(factors) - 1))
            options["axes"] = draw(st.sampled_from(["tp", ("dp", "tp"), "tp:(2)4", ("x\u00e9", "tp"), "a b"]))
            options["uneven"] = draw(st.sampled_from([None, "even", "ceil", "chunk", "balanced", "floor"]))
            options["at_most"] = draw(st.none() | st.integers(1, 9))
            options["split"] = draw(st.booleans())
            options["pad_to"] = None if options["split"] else draw(st.none() | st.integers(1, 9))
            options["pad_each"] = options["pad_to"] is not None and draw(st.booleans())
        parts.append(packed.part(factors, **options))
    return packed.concat(*parts)


@given(dims())
def test_text_reads_back(dim: packed.PackedDim) -> None:
    assert eval(repr(dim), {"packed": packed}) == dim
    assert pickle.loads(pickle.dumps(dim)) == dim
    assert hash(pickle.loads(pickle.dumps(dim))) == hash(dim)
    layout = sw.TensorLayout((dim, None))
    assert eval(repr(layout), {"packed": packed, "TensorLayout": sw.TensorLayout}) == layout


def test_the_repr_is_the_notation_where_that_says_all() -> None:
    for text in ("(8)", "(2*n@tp) + (n@tp)", "q:(n 4@tp/ceil/max2) + (3 [k:1 v:2])"):
        assert repr(packed.parse(text)) == f"packed.parse({text!r})"
    for one in (
        packed.part(4, name="a b"),
        packed.part(4, axes="a)"),
        packed.part(4, ratio=2),
        packed.part(4, pad_to=8),
    ):
        assert repr(packed.concat(one)) == f"packed.concat({one!r})"
        assert eval(repr(one), {"packed": packed}) == one
    for one in (packed.part(4, name="a b"), packed.part(4, axes="a)")):
        with refused(sw.LayoutError, "cannot be written in the notation"):
            str(packed.concat(one))


@pytest.mark.heavy
def test_text_of_too_many_parts_or_factors_is_refused_before_it_is_read() -> None:
    """So that what is wrong otherwise is not found."""
    with refused(sw.LayoutError, "parts", "65536"):
        packed.parse("? + " + " + ".join(["(8@tp:(1)4+dp)"] * (2**16 + 1)))
    assert len(packed.parse("+".join(["(8@tp:(1)4+dp)"] * 2**16)).parts) == 2**16
    with refused(sw.LayoutError, "factors", "64"):
        packed.parse("(" + "1 " * 65 + "?)")
    assert len(packed.parse("(" + "1 " * 64 + ")").parts[0].factors) == 64
