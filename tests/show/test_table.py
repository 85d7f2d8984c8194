"""Tables that fit the terminal: names give way, numbers never."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.show.fit import fit_names
from shardwise.show.table import table_lines

LLAMA = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    *(f"model.layers.{{0..79}}.mlp.{name}_proj.weight" for name in ("down", "gate", "up")),
    *(f"model.layers.{{0..79}}.self_attn.{name}_proj.weight" for name in "kqv"),
    "model.layers.{0..79}.post_attention_layernorm.weight",
]
TITLES = ("tensor", ">shape", "layout", ">bytes")


def texts(names: list[str], width: int | None) -> list[str]:
    rows = [
        [(name, ""), ("8192 x 28672", ""), ("-,model", ""), (f"{117_440_512 + i:,}", "")]
        for i, name in enumerate(names)
    ]
    return ["".join(text for text, _ in line) for line in table_lines(TITLES, rows, width)]


def test_what_names_have_in_common_goes_first() -> None:
    assert fit_names(LLAMA, 52) == LLAMA
    assert fit_names(LLAMA, 40) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "…layers.{0..79}.mlp.down_proj.weight",
        "…layers.{0..79}.mlp.gate_proj.weight",
        "model.layers.{0..79}.mlp.up_proj.weight",
        *(f"…layers.{{0..79}}.self_attn.{name}_proj.weight" for name in "kqv"),
        "…{0..79}.post_attention_layernorm.weight",
    ]
    # What makes the last one a name of its own has 31 characters.
    assert fit_names(LLAMA, 31) is None
    assert fit_names(["a" * 40], 39) is None
    assert fit_names(["a.b.c.d", "a.x.c.d"], 6) == ["…b.c.d", "…x.c.d"]


names = st.lists(st.lists(st.sampled_from(["a", "b", "model", "layers", "{0..7}", "/", "."]), min_size=1, max_size=40))


@given(names.map(lambda given: [".".join(parts) for parts in given]), st.integers(1, 60))
def test_shortened_names_fit_and_differ_where_the_names_do(given: list[str], size: int) -> None:
    short = fit_names(given, size)
    if short is None:
        assert any(len(name) > size for name in given)
        return
    assert all(len(text) <= size for text in short)
    assert len(set(short)) == len(set(given))
    for name, text in zip(given, short, strict=True):
        head, gap, tail = text.partition("…")
        assert text == name or (gap and name.startswith(head) and name.endswith(tail))


@pytest.mark.parametrize("width", [84, 80, 72, 60, 50, 43])
def test_a_table_fits_and_no_number_is_cut(width: int) -> None:
    lines = texts(LLAMA, width)
    assert max(map(len, lines)) <= width or width < 52
    numbers = [text for line in lines for text in re.findall(r"117,440,\d{3}$", line)]
    assert numbers == [f"{117_440_512 + i:,}" for i in range(len(LLAMA))]
    assert sum("8192 x 28672" in line and "-,model" in line for line in lines) == len(LLAMA)


def test_names_on_lines_of_their_own() -> None:
    assert texts(LLAMA[:2], 45) == [
        "tensor",
        "         shape  layout         bytes",
        "lm_head.weight",
        "  8192 x 28672  -,model  117,440,512",
        "model.embed_tokens.weight",
        "  8192 x 28672  -,model  117,440,513",
    ]


def test_values_on_lines_of_their_own_with_their_titles() -> None:
    assert texts(LLAMA[:2], 35) == [
        "lm_head.weight",
        "  shape 8192 x 28672",
        "  layout -,model  bytes 117,440,512",
        "model.embed_tokens.weight",
        "  shape 8192 x 28672",
        "  layout -,model  bytes 117,440,513",
    ]


@given(st.integers(1, 60))
def test_no_value_is_cut_however_narrow(width: int) -> None:
    lines = texts(LLAMA, width)
    assert sum("8192 x 28672" in line for line in lines) == len(LLAMA)
    assert sum("-,model" in line for line in lines) == len(LLAMA)
    numbers = [number for line in lines for number in re.findall(r"117,440,\d{3}$", line)]
    assert numbers == [f"{117_440_512 + i:,}" for i in range(len(LLAMA))]
    # What is wider than the screen is one name or one value with its title.
    assert all(len(line) <= max(width, 53) and (len(line) <= width or line.count("  ") <= 1) for line in lines)


def test_wide_characters_take_two_columns() -> None:
    """In columns of a terminal the first name takes 2 + 1 + 1 + 1 + 2 + 2."""
    rows = [[("层.0.权重", ""), ("12", "")], [("h.0.w", ""), ("3", "")]]
    lines = ["".join(text for text, _ in line) for line in table_lines(["name", ">bytes"], rows)]
    assert lines == ["name       bytes", "层.0.权重     12", "h.0.w          3"]
    names = ["模型.第一层.权重", "模型.第二层.权重"]
    assert fit_names(names, 16) == names
    assert fit_names(names, 15) == fit_names(names, 12) == ["…第一层.权重", "…第二层.权重"]
    assert fit_names(names, 11) is None


def test_wide_enough() -> None:
    assert texts(LLAMA, None) == texts(LLAMA, max(map(len, texts(LLAMA, None))))
    assert texts([], 3) == ["tensor", "  shape  layout  bytes"]


@pytest.mark.parametrize("width", [None, 72, 45, 35, 24])
def test_values_keep_their_styles_wherever_they_stand(width: int | None) -> None:
    styles = ("cyan", "dim", "red", "green")
    rows = [
        list(zip((name, "8192 x 28672", "-,model", f"{number:,}"), styles, strict=True))
        for number, name in enumerate(LLAMA[:6])
    ]
    parts = [part for line in table_lines(TITLES, rows, width) for part in line]
    for text, style in (("8192 x 28672", "dim"), ("-,model", "red")):
        assert [found for part, found in parts if part.strip() == text] == [style] * len(rows)
    assert [found for part, found in parts if part.strip().isdigit()] == ["green"] * len(rows)
    assert len([part for part, found in parts if found == "cyan"]) == len(rows)
    assert {part.strip() for part, found in parts if found == "bold"} <= {title.removeprefix(">") for title in TITLES}
