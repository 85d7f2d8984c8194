"""Long lists that are made when they are asked for."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.store.data.block_lists import Computed, Listed


@given(st.integers(0, 5000), st.lists(st.tuples(st.integers(0, 80_000), st.integers(0, 80_000)), max_size=5))
def test_computed_rows_are_those_of_the_whole_list(count: int, spans: list[Any]) -> None:
    whole = np.arange(2 * count, dtype="<i8").tobytes()
    rows = Computed(count, 2, lambda begin, end: np.arange(2 * begin, 2 * end, dtype=np.int64))
    for ends in spans:
        begin, end = sorted(min(at, len(whole)) for at in ends)
        assert rows.read(begin, end) == whole[begin:end]


def test_rows_that_are_read_one_after_the_other_are_made_together() -> None:
    made = []

    def make(begin: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        made.append((begin, end))
        return np.arange(begin, end, dtype=np.int64)

    rows = Computed(3000, 1, make)
    assert b"".join(rows.read(8 * at, 8 * at + 8) for at in range(3000)) == np.arange(3000, dtype="<i8").tobytes()
    assert made == [(0, 1024), (1024, 2048), (2048, 3000)]


@given(st.integers(1, 3000), st.integers(1, 40), st.lists(st.integers(-3000, 2999), max_size=60))
def test_elements_of_a_list_are_those_that_are_asked_for(count: int, near: int, asked: list[int]) -> None:
    made: list[int] = []

    def make(begin: int, end: int) -> list[int]:
        made.extend(range(begin, end))
        return [number * number for number in range(begin, end)]

    squares = Listed("square", count, make, near=near)
    for number in (number % count for number in asked):
        assert squares[number] == squares[number - count] == number * number
    if near > 1 and count <= 1024:  # All that were made are kept.
        assert len(made) == len(set(made)) <= near * len(asked)
