"""Copies side by side in one wide array, some of which are done in fewer turns than others, beside numpy."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest

import shardwise as sw

LONGEST = 1 << 16
"""Longer rows are cut: into pieces of this length, and what is left of each."""


# More than 4 MiB in a turn, so that the copies are shared among workers, and those of the last have fewer turns.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("rows", "widths"),
    [
        pytest.param(64, [LONGEST] * 3 + [2048] * 3, id="narrow ones"),
        pytest.param(64, [LONGEST] * 4 + [2048], id="one narrow one"),
        pytest.param(96, [100_000] * 4, id="ends of rows that are cut"),
    ],
)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("streaming", [True, False, None])
def test_columns_and_one_array(rows: int, widths: list[int], gather: bool, streaming: bool | None) -> None:
    edges = [0, *accumulate(widths)]
    shape = (rows, edges[-1])
    array = np.random.default_rng(rows).integers(0, 256, shape, np.uint8)
    columns = sw.Tiling.from_boxes(shape, np.array([[[0, rows], side] for side in pairwise(edges)]))
    whole = sw.Tiling.from_boxes(shape, np.array([[[0, rows], [0, edges[-1]]]]))
    src, dst = (columns, whole) if gather else (whole, columns)
    parts = [np.ascontiguousarray(array[:, start:stop]) for start, stop in pairwise(edges)]
    shards, expected = (parts, [array]) if gather else ([array], parts)
    out = [np.zeros_like(one) for one in expected]
    sw.plan_reshard(src, dst).core.run(shards, out, list(range(len(out))), None, streaming)
    assert all((got == want).all() for got, want in zip(out, expected, strict=True))
