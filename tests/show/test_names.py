"""Groups of names hide nothing: written out, they are the names."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.show.names import brief, group_names, lines_alike, natural_key
from shardwise.show.picture import short

names = st.builds(
    ".".join,
    st.lists(st.sampled_from(["h", "w", "w1", "0", "1", "2", "3", "10", "01", "x_2", "-3"]), min_size=1, max_size=5),
)


def written_out(text: str) -> list[str]:
    """What a shell makes of braces."""
    parts = re.split(r"\{(.*?)\}", text)
    choices = []
    for index, part in enumerate(parts):
        if index % 2 == 0:
            choices.append([part])
        elif ".." in part:
            first, last = map(int, part.split(".."))
            choices.append([str(number) for number in range(first, last + 1)])
        else:
            choices.append(part.split(","))
    return ["".join(combination) for combination in itertools.product(*choices)]


@given(st.dictionaries(names, st.integers(0, 2)))
def test_groups_written_out_are_the_names(named: dict[str, int]) -> None:
    groups = group_names(named.items())
    found: dict[str, int] = {}
    for text, members, value in groups:
        assert sorted(written_out(text)) == sorted(members)
        assert not found.keys() & set(members)
        found |= dict.fromkeys(members, value)
    assert found == named
    firsts = [members[0] for _, members, _ in groups]
    assert firsts == sorted(firsts, key=natural_key)


def test_layers_are_one_row() -> None:
    model = [f"h.{layer}.{part}" for layer in range(12) for part in ("attn.w", "mlp.w")] + ["wte"]
    assert [text for text, *_ in group_names((name, 0) for name in model)] == [
        "h.{0..11}.attn.w",
        "h.{0..11}.mlp.w",
        "wte",
    ]


def test_experts_within_layers_are_one_row_and_a_layer_without_them_is_none() -> None:
    model = [f"layers.{layer}.experts.{expert}.w1" for layer in (1, 2, 3) for expert in range(8)]
    assert [text for text, *_ in group_names((name, 0) for name in model)] == ["layers.{1..3}.experts.{0..7}.w1"]
    model.remove("layers.2.experts.7.w1")
    assert [text for text, *_ in group_names((name, 0) for name in model)] == [
        "layers.1.experts.{0..7}.w1",
        "layers.2.experts.{0..6}.w1",
        "layers.3.experts.{0..7}.w1",
    ]


def test_numbers_far_apart_are_listed() -> None:
    assert group_names([("h.0.w", 0), ("h.7.w", 0), ("h.9.w", 0)])[0][0] == "h.{0,7,9}.w"


def test_a_name_made_of_numbers_is_no_trouble() -> None:
    model = [(".".join(["0"] * step + ["1"] * (2000 - step)), 0) for step in range(50)]
    assert sum(len(members) for _, members, _ in group_names(model)) == 50


def test_devices_in_few_characters() -> None:
    assert brief(["cpu:3"]) == "cpu:3"
    assert brief(["cpu:0", "cpu:1", "cpu:4", "cpu:5"]) == "cpu:0,1,4,5"
    assert brief([f"cpu:{i}" for i in (0, 1, 2, 3, 8, 9, 10, 11)]) == "cpu:0..3,8..11"
    assert brief(["tpu:0", "gpu:1"]) == "tpu:0,gpu:1"
    assert brief(["left", "right"]) == "left,right"
    assert brief([f"node{i}" for i in range(0, 12, 2)]) == "node0,2,…,10"


@pytest.mark.parametrize("size", range(2, 14))
def test_a_text_cut_in_its_middle_is_as_long_as_it_may_be(size: int) -> None:
    """Two fifths of what is kept are its beginning."""
    text = "abcdefghijkl"
    cut = short(text, size)
    if size >= len(text):
        assert cut == text
        return
    head, tail = cut.split("…")
    assert len(cut) == size
    assert (text.startswith(head), text.endswith(tail)) == (True, True)
    assert len(head) == (size - 1) * 2 // 5


def test_two_numbers_are_named_and_three_are_a_range() -> None:
    assert [text for text, *_ in group_names([("h.0.w", 0), ("h.1.w", 0)])] == ["h.{0,1}.w"]
    assert [text for text, *_ in group_names((f"h.{i}.w", 0) for i in range(3))] == ["h.{0..2}.w"]
    assert brief(["cpu:0", "cpu:1"]) == "cpu:0,1"
    assert brief(["cpu:0", "cpu:1", "cpu:2"]) == "cpu:0..2"


def test_up_to_four_devices_are_named_and_of_more_the_first_two_and_the_last() -> None:
    assert brief([f"cpu:{8 * i}" for i in range(4)]) == "cpu:0,8,16,24"
    assert brief([f"cpu:{8 * i}" for i in range(5)]) == "cpu:0,8,…,32"


@given(
    st.lists(st.tuples(names, st.sampled_from([" is a", " is b", " is c"])), unique_by=lambda pair: pair[0]),
    st.booleans(),
)
def test_lines_about_names_count_each_name_once(said: list[tuple[str, str]], joined: bool) -> None:
    """Every line but the last is of one text, and the numbers of tensors in all lines add up."""
    lines = lines_alike(said, 2, joined=joined)
    assert len(lines) == min(len({what for _, what in said} if joined else group_names(said)), 3)
    count = 0
    for number, line in enumerate(lines):
        more = re.fullmatch(r"and (\d+) more", line)
        of_many = re.search(r"(\d+) tensors\)$", line)
        count += int(more[1]) if more else int(of_many[1]) if of_many else 1
        assert (more is not None) == (number == 2)
    assert count == len(said)
