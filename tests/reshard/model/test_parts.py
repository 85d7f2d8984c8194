"""The parts in which messages go among MPI ranks and processes of PyTorch, neither of which is needed here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.reshard.model.descriptors import DESCRIPTOR
from shardwise.reshard.model.runner import ALONE, is_run, message_parts

BUFFER = 2**20


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, ...]:
    """A row of runs that lie apart, or one after the other, on either side."""
    size = draw(st.sampled_from([1, 7, 512, 2**18, 2**20, 2**20 + 1, 3 * 2**20]))
    count = draw(st.sampled_from([1, 2, 9, 600]))
    strides = [0, 0] if count == 1 else [size + draw(st.sampled_from([0, 3])) for _ in range(2)]
    return (draw(st.integers(0, 3)), 0, 1, draw(st.integers(0, 9)), draw(st.integers(0, 9)), size, count, *strides)


def runs(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    *who, src, dst, size, count, src_stride, dst_stride = row
    return [(*who, src + i * src_stride, dst + i * dst_stride, size) for i in range(count)]


@given(st.lists(rows(), max_size=8))
def test_parts_are_all_rows_and_fit_a_buffer_where_they_are_put_together(given: list[tuple[int, ...]]) -> None:
    pairs = list(message_parts(np.array(given, DESCRIPTOR).tolist(), BUFFER))
    parts = [part for part, _, _ in pairs]
    assert sorted(run for part in parts for row in part for run in runs(row)) == sorted(
        run for row in given for run in runs(row)
    )
    for part, length, is_alone in pairs:
        assert part
        sizes = [row[5] * row[6] for row in part]
        assert length == sum(sizes)
        # What is one run on both sides is in no buffer.
        assert sum(sizes) <= BUFFER or (len(part) == 1 and part[0][6] == 1)
        # Alone is what is large, and a run of either side; there is no room for a mark after any other of this size.
        assert is_alone == (len(part) == 1 and length >= ALONE and (is_run(part[0], "src") or is_run(part[0], "dst")))


@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize("most", [8, 100, 2**20])
def test_parts_to_be_added_have_whole_elements_and_fit_a_buffer(itemsize: int, most: int) -> None:
    row = (0, 0, 1, 16, 32, 3 * 2**19, 2, 2**21, 2**22)
    parts = list(message_parts([row, (0, 0, 1, 0, 0, 24, 1, 0, 0)], most, itemsize))
    for part in parts:
        assert not part.is_alone
        assert part.size <= most
        assert all(one[field] % itemsize == 0 for one in part.rows for field in (3, 4, 5))
    assert sum(part.size for part in parts) == 2 * 3 * 2**19 + 24


def test_no_part_is_longer_than_mpi_counts() -> None:
    """A run of 64 GiB, in parts of at most 1 GiB, which has 32 bits to spare."""
    parts = list(message_parts([(0, 0, 1, 0, 0, 2**36, 1, 0, 0)], 2**20))
    assert [part.size for part in parts] == [2**30] * 64
    assert [part.rows[0][3] for part in parts] == [n * 2**30 for n in range(64)]
