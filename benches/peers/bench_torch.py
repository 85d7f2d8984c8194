"""PyTorch's dialect: what all ranks hold, the checkpoint planner, and moving rows to columns with its copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from figures import Row, faster
from part import QUICK, main
from tensors import SIDE, SIZE, rows_to_columns
from timing import compare
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import shardwise as sw
from shardwise.interop.torch import Replicate, Shard, StridedShard, local_shards, to_torch_placements

GRID = (8, 8) if QUICK else (64, 64)
MESH = sw.DeviceMesh(GRID, ("dp", "tp"))
CASES: list[tuple[str, list[Any], tuple[int, ...]]] = [
    ("(8192, 8192), Shard(0), Shard(1)", [Shard(0), Shard(1)], (8192, 8192)),
    ("(8190, 1000), uneven", [Shard(0), Shard(1)], (8190, 1000)),
    ("(8192, 8192), Shard(0), Shard(0)", [Shard(0), Shard(0)], (8192, 8192)),
    ("(8192, 8192), Replicate(), Shard(1)", [Replicate(), Shard(1)], (8192, 8192)),
    ("(8190, 8), _StridedShard(0, 64), Shard(0)", [StridedShard(0, GRID[1]), Shard(0)], (8190, 8)),
]


def ranks() -> Iterator[Row]:
    coordinates = MESH.coordinates().tolist()
    for name, placements, shape in CASES:
        theirs = to_torch_placements(placements)

        def loop(shape: Any = shape, theirs: Any = theirs) -> Any:
            return [_compute_local_shape_and_global_offset(shape, GRID, rank, theirs) for rank in coordinates]

        def ours(placements: Any = placements, shape: Any = shape) -> Any:
            return local_shards(placements, MESH, shape)

        strided = any(isinstance(placement, StridedShard) for placement in placements)
        yield compare(
            f"shapes and offsets of {MESH.size:,} ranks: {name}",
            ours,
            "PyTorch's calculator, rank by rank",
            loop,
            goal=None if strided else faster(500),
            turns=5,
        )


def chunks(partition: sw.Partition) -> list[Any]:
    """The boxes as the checkpoint planner wants them."""
    return [
        ChunkStorageMetadata(
            offsets=torch.Size([part.start for part in box]), sizes=torch.Size([part.stop - part.start for part in box])
        )
        for box in partition.devices_indices_map().values()
    ]


def planner() -> Row:
    """Saved on one mesh, read on another: every reader asks the planner for its chunk."""
    wide = sw.DeviceMesh((GRID[0] // 2, GRID[1] * 2), ("x", "y"), [f"gpu:{i}" for i in range(MESH.size)])
    src = sw.TensorLayout(("dp", "tp"), MESH).partition((8192, 8192))
    dst = sw.TensorLayout(("x", "y"), wide).partition((8192, 8192))
    saved = TensorStorageMetadata(TensorProperties(), torch.Size([8192, 8192]), chunks(src))
    wanted = chunks(dst)

    def plan() -> Any:
        return sw.plan_reshard(src, dst).transfers

    def by_torch() -> Any:
        return [create_read_items_for_chunk_list("weight", saved, [chunk]) for chunk in wanted]

    transfers = plan()
    assert len(transfers) == sum(map(len, by_torch()))
    name = f"plan of {len(transfers):,} transfers, {GRID[0]} × {GRID[1]} → {GRID[0] // 2} × {GRID[1] * 2} chunks"
    peer = "PyTorch `create_read_items_for_chunk_list`, chunk by chunk"
    return compare(name, plan, peer, by_torch, goal=faster(500), turns=3)


def copies() -> Iterator[Row]:
    for devices in (8, 512):
        work = rows_to_columns(devices)
        shards = [torch.from_numpy(shard) for shard in work.shards]
        columns = [torch.from_numpy(column) for column in work.out]
        step = SIDE // devices

        def loop(shards: Any = shards, columns: Any = columns, step: int = step) -> None:
            for i, shard in enumerate(shards):
                for j, column in enumerate(columns):
                    column[i * step : (i + 1) * step].copy_(shard[:, j * step : (j + 1) * step])

        name = f"rows → columns of {SIZE}, {devices} shards"
        yield compare(name, work.run, "a loop of PyTorch's `copy_`", loop, turns=3)


def rows() -> Iterator[Row]:
    yield from ranks()
    yield planner()
    yield from copies()


if __name__ == "__main__":
    main(rows)
