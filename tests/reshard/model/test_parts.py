"""The parts in which messages go among processes of PyTorch; it need not be installed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.execute.torch import _ALONE, _BUFFER, _is_run, _parts
from shardwise.reshard.model.descriptors import DESCRIPTOR


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
    pairs = list(_parts(np.array(given, DESCRIPTOR).tolist()))
    parts = [part for _, part, _ in pairs]
    assert sorted(run for part in parts for row in part for run in runs(row)) == sorted(
        run for row in given for run in runs(row)
    )
    for length, part, is_alone in pairs:
        assert part
        sizes = [row[5] * row[6] for row in part]
        assert length == sum(sizes)
        # What is one run on both sides is in no buffer.
        assert sum(sizes) <= _BUFFER or (len(part) == 1 and part[0][6] == 1)
        # Alone is what is large, and a run of either side; there is no room for a mark after any other of this size.
        assert is_alone == (
            len(part) == 1 and length >= _ALONE and (_is_run(part[0], "src") or _is_run(part[0], "dst"))
        )
