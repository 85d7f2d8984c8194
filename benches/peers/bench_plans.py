"""Planning a change of layout beside dask's `intersect_chunks`; and a plan for a tensor of 8 × 10⁹ elements."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

from dask.array.rechunk import intersect_chunks
from figures import Row, at_most, faster
from part import main
from timing import compare

import shardwise as sw


def chunks() -> Row:
    src = sw.TensorLayout(("x", "y"), sw.DeviceMesh((64, 64), ("x", "y"))).partition((8192, 8192))
    labels = [f"gpu:{i}" for i in range(4096)]
    dst = sw.TensorLayout(("x", "y"), sw.DeviceMesh((32, 128), ("x", "y"), labels)).partition((8192, 8192))
    old, new = ((128,) * 64, (128,) * 64), ((256,) * 32, (64,) * 128)

    def plan() -> Any:
        return sw.plan_reshard(src, dst).transfers

    def by_dask() -> Any:
        return [list(pieces) for pieces in intersect_chunks(old, new)]

    transfers = plan()
    assert len(transfers) == sum(map(len, by_dask())) == 8192
    floor = ("copying them", transfers.tobytes)
    name = "plan of 8,192 transfers, 64 × 64 → 32 × 128 chunks"
    return compare(name, plan, "dask `intersect_chunks`", by_dask, goal=faster(5), floor=floor)


def huge() -> Iterator[Row]:
    mesh = sw.DeviceMesh((512, 8), ("x", "y"))
    peaks = []
    for rows in (10**6, 10**9):
        src = sw.TensorLayout((("x", "y"), None), mesh).partition((rows, 8), "ceil")
        dst = sw.TensorLayout(("x", "y"), mesh).partition((rows, 8), "ceil")

        def plan(src: Any = src, dst: Any = dst) -> Any:
            return sw.plan_reshard(src, dst).transfers

        transfers = plan()
        tracemalloc.start()
        plan()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    floor = ("copying them", transfers.tobytes)
    name = f"plan of {len(transfers):,} transfers, 10⁹ × 8 on 4,096 devices"
    yield compare(name, plan, goal=at_most(0.01), floor=floor)
    # What Python and numpy allocate; the core writes into that.
    yield Row("the memory of that plan", "the same for 10⁶ × 8", peaks[1], peaks[0], unit="B")


def rows() -> Iterator[Row]:
    yield chunks()
    yield from huge()


if __name__ == "__main__":
    main(rows)
