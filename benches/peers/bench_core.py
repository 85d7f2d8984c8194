"""Coordinates, shard ids, views, `locate` and gathering beside numpy; and what importing costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from figures import Row, at_most, at_most_times, faster
from part import QUICK, main
from timing import compare

import shardwise as sw

OFFSETS = 10**6 if QUICK else 10**7


def fill(numbers: int) -> tuple[str, Callable[[], Any]]:
    """The floor of what makes an int64 array: making it and writing it once."""

    def work() -> None:
        np.empty(numbers, np.int64).fill(1)

    return "fill", work


def for_all_devices() -> Iterator[Row]:
    mesh = sw.DeviceMesh((64, 64), ("x", "y"))
    partition = sw.TensorLayout(("y", None), mesh).partition((8192, 8192))

    def coordinates() -> Any:
        return np.stack(np.unravel_index(np.arange(4096), (64, 64)), 1)

    def shard_ids() -> Any:
        return np.unravel_index(np.arange(4096), (64, 64))[1]

    def holding() -> Any:
        return np.flatnonzero(shard_ids() == 17)

    assert np.array_equal(mesh.coordinates(), coordinates())
    assert np.array_equal(partition.shard_ids(), shard_ids())
    assert partition.devices_holding(17) == [f"cpu:{i}" for i in holding()]
    unravel = "numpy unravel_index"
    name = "coordinates of 4,096 devices"
    yield compare(name, mesh.coordinates, unravel, coordinates, goal=faster(6), floor=fill(2 * 4096))
    yield compare("shard ids of 4,096 devices", partition.shard_ids, unravel, shard_ids, floor=fill(4096))
    yield compare("the 64 devices that hold a shard", lambda: partition.devices_holding(17), unravel, holding)


def one_device_of_a_million() -> Row:
    layout = sw.TensorLayout(("x", "y"), sw.DeviceMesh((1024, 1024), ("x", "y")))

    def ours() -> Any:
        return layout.partition((1 << 20, 1 << 20)).box("cpu:777777")

    def by_numpy() -> Any:
        i, j = np.unravel_index(777777, (1024, 1024))
        return slice(i * 1024, (i + 1) * 1024), slice(j * 1024, (j + 1) * 1024)

    assert ours() == by_numpy()
    return compare("partition on 2²⁰ devices, and one box", ours, "numpy, by hand", by_numpy, goal=at_most(5e-6))


def views() -> Row:
    partition = sw.TensorLayout(("x", "y"), sw.DeviceMesh((16, 32), ("x", "y"))).partition((1024, 1024))
    array = np.zeros((1024, 1024))

    def loop() -> Any:
        return [array[i * 64 : i * 64 + 64, j * 32 : j * 32 + 32] for i in range(16) for j in range(32)]

    for view, by_hand in zip(partition.views(array), loop(), strict=True):
        assert (view.shape, view.ctypes.data) == (by_hand.shape, by_hand.ctypes.data)
    return compare(
        "512 zero-copy views (0.35 µs each are asked)",
        lambda: partition.views(array),
        "numpy, a loop of `a[slice, slice]`",
        loop,
        goal=at_most(512 * 0.35e-6),
    )


def locate() -> Iterator[Row]:
    mesh = sw.DeviceMesh((9, 7), ("x", "y"))
    partition = sw.TensorLayout(("x", "y"), mesh).partition((50257, 7001), uneven="ceil")
    offsets = np.random.default_rng(1).integers(0, partition.size, OFFSETS)
    height, width = -(-50257 // 9), -(-7001 // 7)

    def divmods() -> Any:
        row, column = np.divmod(offsets, 7001)
        return np.divmod(row, height), np.divmod(column, width)

    def copies() -> Any:
        return offsets.copy(), offsets.copy()

    (shard_row, _), (shard_column, _) = divmods()
    ids, local = partition.locate(offsets)
    assert np.array_equal(ids, shard_row * 7 + shard_column)
    assert np.array_equal(partition.global_offset(ids, local), offsets)

    def ours() -> Any:
        return partition.locate(offsets)

    def inverse() -> Any:
        return partition.global_offset(ids, local)

    floor = ("copying them twice", copies)
    name = "10⁶" if QUICK else "10⁷"
    yield compare(f"locate {name} offsets", ours, "numpy, three `divmod`", divmods, goal=faster(12), floor=floor)
    yield compare(f"locate {name} offsets", ours, *floor, goal=at_most_times(2.5))
    yield compare(f"`global_offset` of {name}", inverse, *floor)
    hundred = range(100)

    def ours_one_by_one() -> None:
        for _ in hundred:
            partition.locate(123456789)

    def divmods_one_by_one() -> None:
        for _ in hundred:
            divmod(123456789, 7001), divmod(17636, height), divmod(7, width)

    def one_divmod() -> None:
        for _ in hundred:
            divmod(123456789, 7001)

    name, floor = "locate one offset, a hundred times (0.5 µs each are asked)", ("one `divmod` each", one_divmod)
    peer = "three `divmod` each in Python"
    yield compare(name, ours_one_by_one, peer, divmods_one_by_one, goal=at_most(50e-6), floor=floor)


def gather() -> Iterator[Row]:
    """Shards with memory of their own, put together."""
    side = 1 << (11 if QUICK else 14)
    for grid in ((8, 1), (2, 4), (1, 512)):
        partition = sw.TensorLayout(("x", "y"), sw.DeviceMesh(grid, ("x", "y"))).partition((side, side))
        array = np.random.default_rng(0).random((side, side), np.float32)
        shards = [view.copy() for view in partition.views(array)]
        sharded = sw.ShardedArray(partition, shards)
        boxes = list(partition.devices_indices_map().values())

        def loop(shards: Any = shards, boxes: Any = boxes) -> Any:
            whole = np.empty((side, side), np.float32)
            for shard, box in zip(shards, boxes, strict=True):
                whole[box] = shard
            return whole

        assert np.array_equal(sharded.numpy(), array)
        assert np.array_equal(loop(), array)
        name = f"gather {array.nbytes / 2**30:g} GiB from {grid[0]} × {grid[1]} shards"
        floor = ("copying it", array.copy)
        yield compare(name, sharded.numpy, "numpy, a loop", loop, floor=floor, turns=5)


def importing() -> Row:
    """The processor's time of `import shardwise` where numpy is there already: a neighbour's work does not count."""
    # Compiled modules are kept, as in any installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # The threads of OpenBLAS wait busily when numpy is there, and their time would count as ours.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    code = (
        "from time import process_time as now; start = now(); import numpy; numpy_is_there = now(); import shardwise; "
        "print(now() - numpy_is_there, numpy_is_there - start)"
    )
    command, taken = [sys.executable, "-c", code], []
    for _ in range(5 if QUICK else 51):
        said = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
        taken.append([float(seconds) for seconds in said.split()])
    ours, theirs = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    ratios = [numpy / own for own, numpy in taken[1:]]
    name = "`import shardwise` after numpy, the processor's time"
    return Row(name, "`import numpy`", ours, theirs, min(ratios), max(ratios), goal=at_most(0.012))


def rows() -> Iterator[Row]:
    yield importing()  # First: right after arrays of a gigabyte it takes twice as long.
    yield from for_all_devices()
    yield one_device_of_a_million()
    yield views()
    yield from locate()
    yield from gather()


if __name__ == "__main__":
    main(rows)
