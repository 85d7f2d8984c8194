"""Rows to columns and back beside a memcpy with two threads, and a loop in numpy; three times the tensor in memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from figures import Goal, Row, at_most_times, faster
from part import main
from tensors import SIDE, SIZE, rows_to_columns
from timing import compare


def beside_memcpy(devices: int, memcpy_goal: Goal | None, loop_goal: Goal | None) -> Iterator[Row]:
    work = rows_to_columns(devices)
    target, middle, step = np.zeros_like(work.array), SIDE // 2, SIDE // devices
    pool = ThreadPoolExecutor(2)

    def memcpy() -> None:
        array = work.array
        list(pool.map(np.copyto, (target[:middle], target[middle:]), (array[:middle], array[middle:])))

    def loop() -> None:
        for i, shard in enumerate(work.shards):
            for j, column in enumerate(work.out):
                column[i * step : (i + 1) * step] = shard[:, j * step : (j + 1) * step]

    name = f"rows → columns of {SIZE}, {devices} shards"
    copying = "copying it with two threads"
    yield compare(name, work.run, copying, memcpy, goal=memcpy_goal, floor=("that", memcpy), turns=7)
    yield compare(name, work.run, "numpy, a loop", loop, goal=loop_goal, turns=5)
    name = f"columns → rows of {SIZE}, {devices} shards"
    yield compare(name, work.back, copying, memcpy, floor=("that", memcpy), turns=7)


def rows() -> Iterator[Row]:
    yield from beside_memcpy(8, at_most_times(1.15), None)
    yield from beside_memcpy(64, at_most_times(1.15), None)
    yield from beside_memcpy(512, at_most_times(1.15), faster(5))


if __name__ == "__main__":
    main(rows)
