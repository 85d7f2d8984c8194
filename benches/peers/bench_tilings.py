"""What the plans between tilings, the plans of whole models and the smallest work take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from figures import Goal, Row, at_most, at_most_times, faster
from part import QUICK, main
from timing import compare

import shardwise as sw


def grid(rows: int, columns: int, shape: tuple[int, int], prefix: str) -> sw.Partition:
    """A device for each cell of a grid."""
    labels = [f"{prefix}:{i}" for i in range(rows * columns)]
    mesh = sw.DeviceMesh((rows, columns), ("x", "y"), labels)
    return sw.TensorLayout(("x", "y"), mesh).partition(shape)


def boxes_of(partition: sw.Partition) -> sw.Tiling:
    """The same as explicit boxes; a new one each time, for a tiling remembers what it was asked."""
    return sw.Tiling.from_boxes(partition.shape, partition.boxes())


def explicit() -> Row:
    src, dst = grid(64, 64, (8192, 8192), "a"), grid(32, 128, (8192, 8192), "b")
    rows, columns = src.boxes(), dst.boxes()

    def plan() -> Any:
        tilings = (sw.Tiling.from_boxes(src.shape, boxes) for boxes in (rows, columns))
        return sw.plan_reshard(*tilings).transfers

    def closed() -> Any:
        return sw.plan_reshard(src, dst).transfers

    return compare("plan of explicit boxes, 64 × 64 → 32 × 128", plan, "the closed form", closed, goal=at_most_times(2))


def many_boxes() -> Row:
    side = 100 if QUICK else 1200
    shape = (4 * side, 4 * side)
    cells = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), axis=-1).reshape(-1, 2, 1) * 4
    boxes = np.concatenate([cells, cells + 4], axis=2)
    whole = sw.Tiling.from_boxes(shape, [[(0, shape[0]), (0, shape[1])]])

    def check_and_plan() -> Any:
        tiling = sw.Tiling.from_boxes(shape, boxes)
        tiling.check()
        return sw.plan_reshard(tiling, whole).transfers

    name = f"check and plan of {side:,} × {side:,} explicit boxes"
    return compare(name, check_and_plan, goal=None if QUICK else at_most(0.5), turns=5)


def model() -> Row:
    """The weights of a model of 80 layers with biases of q, k and v, from 8-way to 16-way tensor parallel."""
    sizes = {"q": 8192, "k": 1024, "v": 1024, "gate": 28672, "up": 28672}
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, 8192), "head": (128256, 8192), "norm": (8192,)}
    specs: dict[str, tuple[str | None, ...]] = {"embed": ("tp", None), "head": ("tp", None), "norm": (None,)}
    for layer in range(80):
        for name, size in sizes.items():
            shapes[f"{layer}.{name}"], specs[f"{layer}.{name}"] = (size, 8192), ("tp", None)
        for name in ("q", "k", "v"):
            shapes[f"{layer}.{name}.bias"], specs[f"{layer}.{name}.bias"] = (sizes[name],), ("tp",)
        for name, size in (("o", 8192), ("down", 28672)):
            shapes[f"{layer}.{name}"], specs[f"{layer}.{name}"] = (8192, size), (None, "tp")
        for name in ("before", "after"):
            shapes[f"{layer}.{name}"], specs[f"{layer}.{name}"] = (8192,), (None,)
    old, new = sw.DeviceMesh((16, 8), ("dp", "tp")), sw.DeviceMesh((8, 16), ("dp", "tp"))
    src, dst = ({name: sw.TensorLayout(spec, mesh) for name, spec in specs.items()} for mesh in (old, new))
    tensors = {name: (shape, "bfloat16") for name, shape in shapes.items()}
    name = f"`plan_model` of {len(shapes)} tensors on {old.size} devices"
    return compare(name, lambda: sw.plan_model(src, dst, tensors), goal=at_most(0.05))


def runs(count: int, goal: Goal) -> Row:
    partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((4,), ("x",))).partition((count, 16))

    def by_hand() -> Any:
        found = np.empty((count, 2), np.int64)
        found[:, 0] = np.arange(count) * 16 + 4
        found[:, 1] = 4
        return found

    assert np.array_equal(by_hand(), partition.runs("cpu:1"))
    return compare(f"{count:,} runs of a shard", lambda: partition.runs("cpu:1"), "numpy, by hand", by_hand, goal=goal)


def small() -> Iterator[Row]:
    """One MiB over four devices into arrays that are there, and a tiny array into new ones."""
    side = 512
    mesh = sw.DeviceMesh((4,), ("x",))
    rows, columns = sw.TensorLayout(("x", None), mesh), sw.TensorLayout((None, "x"), mesh)
    array = np.ones((side, side), np.float32)
    shards = [view.copy() for view in rows.partition(array.shape).views(array)]
    out = [np.empty((side, side // 4), np.float32) for _ in range(4)]
    plan, step = sw.plan_reshard(rows.partition(array.shape), columns.partition(array.shape)), side // 4

    def loop() -> None:
        for i, shard in enumerate(shards):
            for j, column in enumerate(out):
                column[i * step : (i + 1) * step] = shard[:, j * step : (j + 1) * step]

    copied = np.empty_like(array)
    floor = ("copying it", lambda: np.copyto(copied, array))
    name = "rows → columns of 1 MiB, 4 devices, into arrays that are there"
    yield compare(name, lambda: plan.run(shards, out), "numpy, a loop", loop, floor=floor, goal=at_most(50e-6))
    tiny = np.arange(64.0).reshape(8, 8)
    partition = rows.partition(tiny.shape)
    sharded = sw.ShardedArray(partition, [view.copy() for view in partition.views(tiny)])
    yield compare("`ShardedArray.reshard` of 8 × 8, 4 devices, planned anew", lambda: sharded.reshard(columns))


def rows() -> Iterator[Row]:
    yield explicit()
    yield many_boxes()
    yield model()
    yield runs(100, faster(3))
    yield runs(10_000, faster(3))
    yield runs(10_000_000, faster(1))
    yield from small()


if __name__ == "__main__":
    main(rows)
