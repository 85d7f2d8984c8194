"""Pickles that are written, against Python's own pickler."""

from __future__ import annotations

import pickle

import pytest

from shardwise.store.write.forms.pickles import Again, Call, Global, New, Varying, VaryingPickle, pickled

EDGES = sorted(
    {sign * (2**bits + more) for bits in (0, 7, 8, 15, 16, 31, 32) for more in (-1, 0, 1) for sign in (1, -1)}
)


@pytest.mark.parametrize("value", EDGES)
def test_integers_are_written_as_python_writes_them(value: int) -> None:
    assert pickled(value) == pickle.dumps(value, 2)


def test_the_largest_integers_of_a_size_are_read_back() -> None:
    for value in (sign * (2**bits + more) for bits in (63, 64, 71, 72) for more in (-1, 0, 1) for sign in (1, -1)):
        assert pickle.loads(pickled(value)) == value


@pytest.mark.parametrize("size", range(7))
def test_tuples_of_any_size_are_read_back(size: int) -> None:
    assert pickle.loads(pickled([(*range(size),), (*"abcdef"[:size],)])) == [(*range(size),), (*"abcdef"[:size],)]


def test_every_number_of_a_memo_is_read_back() -> None:
    texts = [str(i) for i in range(258)]
    assert pickle.loads(pickled(texts + texts)) == texts + texts


def test_calls_with_equal_arguments_of_other_types_stay_apart() -> None:
    values: list[tuple[int, ...]] = [(True, 1), (1, True), (1, 1), (True, True), (1, True), (True, 1)]
    made = pickle.loads(pickled([Call(Global("builtins", "list"), (value,)) for value in values]))
    assert repr(made) == repr(list(map(list, values)))


def test_values_that_occur_often_are_written_as_if_each_were_another() -> None:
    kind = Global("types", "SimpleNamespace")
    inner = (Call(Global("builtins", "list"), ((1, 2),)), True, {"a": "text"}, New(kind, {"b": 300}), Varying("n", 7))
    plain = [inner, inner, "text", inner[:-1], inner[:-1], inner[:-1]]
    often, without = Again(inner), Again(inner[:-1])
    again = [often, often, "text", without, without, without]
    assert pickled(again) == pickled(plain)
    assert VaryingPickle(again).pickled({"n": 2**20}) == VaryingPickle(plain).pickled({"n": 2**20})
    made = pickle.loads(pickled(again))
    assert made == pickle.loads(pickled(plain))
    assert len({id(each[0]) for each in (*made[:2], *made[3:])}) == 5
