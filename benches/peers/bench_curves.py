"""How the cost of each operation grows with the mesh, from 8 to 2**20 devices, beside those who can do it at all.

At each size the contestants take turns. A contestant that has taken more than `LIMIT` seconds for one call is not asked
about larger meshes.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
from dask.array.rechunk import intersect_chunks
from figures import Point
from jax_mesh import mesh_sharding
from part import QUICK, main
from tensorflow.dtensor.python import layout as tensorflow
from timing import alternate

import shardwise as sw
from shardwise import dtensor

GRIDS = [(4, 2), (8, 8), (16, 32), (64, 64), (256, 128), (512, 512), (1024, 1024)]
LIMIT = 5.0
TURNS = 3 if QUICK else 5

Work = Callable[[], Any]
#: The works of one curve on a mesh of one size, by library.
Works = dict[str, Work]
Grid = tuple[int, int]

OURS, FILL = "shardwise", "fill"
#: JAX caches by shape: each call has a new one, and so has each of ours.
SIZES = itertools.count(1)


def filled(numbers: int) -> Work:
    return lambda: np.empty(numbers, np.int64).fill(1)


def cut_both(grid: Grid) -> sw.TensorLayout:
    return sw.TensorLayout(("x", "y"), sw.DeviceMesh(grid, ("x", "y")))


def new_shape(grid: Grid) -> tuple[int, int]:
    return grid[0] * next(SIZES), grid[1] * 3


def device_names(count: int) -> list[str]:
    return [f"/job:localhost/replica:0/task:0/device:TPU:{index}" for index in range(count)]


def tensorflow_arguments(grid: Grid) -> tuple[Any, ...]:
    ids = np.arange(grid[0] * grid[1])
    return ["x", "y"], ids.reshape(grid), ids.tolist(), device_names(ids.size)


@cache
def tensorflow_mesh(grid: Grid) -> Any:
    return tensorflow.Mesh(*tensorflow_arguments(grid))


def coordinates(grid: Grid, asked: set[str]) -> Works:
    count = grid[0] * grid[1]
    works = {
        OURS: sw.DeviceMesh(grid, ("x", "y")).coordinates,
        "numpy": lambda: np.stack(np.unravel_index(np.arange(count), grid), 1),
        FILL: filled(2 * count),
    }
    if "TensorFlow" in asked:
        works["TensorFlow"] = tensorflow_mesh(grid).unravel_index
    return works


def boxes(grid: Grid, asked: set[str]) -> Works:
    layout, count = cut_both(grid), grid[0] * grid[1]

    def by_numpy() -> Any:
        extent = np.floor_divide(new_shape(grid), grid)
        start = np.stack(np.unravel_index(np.arange(count), grid), 1) * extent
        return np.stack([start, start + extent], 2)

    works = {OURS: lambda: layout.partition(new_shape(grid)).boxes(), "numpy": by_numpy, FILL: filled(4 * count)}
    return {**works, **by_jax(grid, asked)}


def by_jax(grid: Grid, asked: set[str]) -> Works:
    if "JAX" not in asked:
        return {}
    sharding = mesh_sharding(grid)
    return {"JAX": lambda: sharding.devices_indices_map(new_shape(grid))}


def dict_of_boxes(grid: Grid, asked: set[str]) -> Works:
    layout = cut_both(grid)
    layout.devices_indices_map(grid)  # The labels are made once.
    return {OURS: lambda: layout.devices_indices_map(new_shape(grid)), **by_jax(grid, asked)}


def one_box(grid: Grid, asked: set[str]) -> Works:
    layout, last = cut_both(grid), grid[0] * grid[1] - 1
    label = f"cpu:{last}"

    def by_numpy() -> Any:
        (i, j), (rows, columns) = np.unravel_index(last, grid), new_shape(grid)
        height, width = rows // grid[0], columns // grid[1]
        return slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)

    return {OURS: lambda: layout.partition(new_shape(grid)).box(label), "numpy": by_numpy, **by_jax(grid, asked)}


def shard_ids(grid: Grid, asked: set[str]) -> Works:
    count = grid[0] * grid[1]
    partition = sw.TensorLayout(("y", "x"), sw.DeviceMesh(grid, ("x", "y"))).partition(grid[::-1])

    def by_numpy() -> Any:
        x, y = np.unravel_index(np.arange(count), grid)
        return y * grid[0] + x

    works = {OURS: partition.shard_ids, "numpy": by_numpy, FILL: filled(count)}
    if "TensorFlow" in asked:
        layout = tensorflow.Layout(["y", "x"], tensorflow_mesh(grid))
        works["TensorFlow"] = layout.offset_to_shard
    return works


def devices_holding(grid: Grid, asked: set[str]) -> Works:
    """The replicas of one shard, as many as the first axis has devices."""
    partition = sw.TensorLayout(("y",), sw.DeviceMesh(grid, ("x", "y"))).partition((grid[1],))
    every = np.arange(grid[0] * grid[1])
    return {
        OURS: lambda: partition.devices_holding(1),
        "numpy": lambda: np.flatnonzero(np.unravel_index(every, grid)[1] == 1),
    }


def plan(grid: Grid, asked: set[str]) -> Works:
    """Every shard is cut in two by columns and joined with its neighbour by rows: two transfers for each device."""
    count, wide = grid[0] * grid[1], (grid[0] // 2, grid[1] * 2)
    shape = (grid[0] * 4, grid[1] * 4)
    src = cut_both(grid).partition(shape)
    other = sw.DeviceMesh(wide, ("x", "y"), range(count))
    dst = sw.TensorLayout(("x", "y"), other).partition(shape)
    old, new = ((4,) * grid[0], (4,) * grid[1]), ((8,) * wide[0], (2,) * wide[1])
    return {
        OURS: lambda: sw.plan_reshard(src, dst).transfers,
        "dask": lambda: [list(pieces) for pieces in intersect_chunks(old, new)],
    }


def dtensor_mesh(grid: Grid, asked: set[str]) -> Works:
    given = tensorflow_arguments(grid)
    return {OURS: lambda: dtensor.Mesh(*given), "TensorFlow": lambda: tensorflow.Mesh(*given)}


def dtensor_layout(grid: Grid, asked: set[str]) -> Works:
    ours = dtensor.Mesh(*tensorflow_arguments(grid))
    works: Works = {OURS: lambda: dtensor.Layout(["x", "y"], ours)}
    if "TensorFlow" in asked:
        theirs = tensorflow_mesh(grid)
        works["TensorFlow"] = lambda: tensorflow.Layout(["x", "y"], theirs)
    return works


CURVES: dict[str, Callable[[Grid, set[str]], Works]] = {
    "coordinates of all devices": coordinates,
    "boxes of all devices, one array": boxes,
    "boxes of all devices, a dict": dict_of_boxes,
    "partition and one box": one_box,
    "shard ids of all devices": shard_ids,
    "devices holding a shard": devices_holding,
    "plan of a reshard": plan,
    "`dtensor.Mesh` from strings": dtensor_mesh,
    "`dtensor.Layout` on a mesh": dtensor_layout,
}


def rows() -> Iterator[Point]:
    for curve, make in CURVES.items():
        asked = {OURS, FILL, "numpy", "dask", "JAX", "TensorFlow"}
        for grid in GRIDS[:5] if QUICK else GRIDS:
            works = {library: work for library, work in make(grid, asked).items() if library in asked}
            for library, seconds in timed(works).items():
                yield Point(curve, library, grid[0] * grid[1], seconds)
                if seconds > LIMIT:
                    asked.discard(library)


def timed(works: Works) -> dict[str, float]:
    """Medians; what takes more than half a second the first time is called once only."""
    gc.collect()
    found, quick = {}, {}
    for library, work in works.items():
        start = time.perf_counter()
        work()
        once = time.perf_counter() - start
        if once > 0.5:
            found[library] = once
        else:
            quick[library] = work
    taken = alternate(list(quick.values()), TURNS, 0.005 if QUICK else 0.02)
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    return {**found, **dict(zip(quick, medians, strict=True))}


if __name__ == "__main__":
    main(rows)
