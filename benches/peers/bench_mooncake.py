"""A plan of a model from a trainer to an engine, beside `mooncake.reshard`, which does nothing else.

Its wheel is enough: `pip install --no-deps mooncake-transfer-engine`. Both give the same operations and bytes: here as
arrays for each receiver, from deployments on; there as objects, from manifests made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from figures import Row, faster
from models import llama
from mooncake.reshard import weight
from part import QUICK, main
from timing import compare

import shardwise as sw
from shardwise.deploy import Deployment, fsdp2


def ours(tensors: Mapping[str, tuple[tuple[int, ...], int | None]]) -> tuple[int, int]:
    """Operations and bytes of all receivers, from deployments to descriptors."""
    rules: dict[str, Any] = {"embed_tokens|lm_head|[qkv]_proj|(gate|up)_proj": ("tp", None)}
    rules |= {"o_proj|down_proj": (None, "tp"), "norm": (None,)}
    engine = Deployment([f"gpu:{i}" for i in range(4)], sw.DeviceMesh((4,), ("tp",)), rules)
    plan = sw.plan_model(fsdp2(8), engine, {name: (shape, "bfloat16") for name, (shape, _) in tensors.items()})
    parts = [plan.descriptors(label) for label in engine.devices]
    return sum(len(part.receives) for part in parts), sum(part.bytes_received for part in parts)


def theirs(tensors: Mapping[str, tuple[tuple[int, ...], int | None]]) -> Callable[[], tuple[int, int]]:
    """The same by Mooncake, its manifests made beforehand."""

    def side(name: str, count: int, dims: Mapping[str, int | None]) -> Any:
        participants = tuple(
            weight.TopologyParticipant(f"{name}{rank}", weight.ParallelRank(tp=rank)) for rank in range(count)
        )
        topology = weight.ParallelTopology(tp_size=count, pp_size=1, ep_size=1, dp_size=1, participants=participants)
        described, fragments = [], []
        for tensor, (shape, _) in tensors.items():
            dim = dims[tensor]
            axes = weight.ReplicatedAxis(kind="tp") if dim is None else weight.SplitAxis(kind="tp", dim=dim)
            described.append(
                weight.TensorDescriptor(
                    tensor_id=tensor, global_shape=shape, dtype="bfloat16", itemsize=2, layer_id=None, expert_id=None,
                    layout_fingerprint="plain:v1", shard_dims=() if dim is None else (dim,), parallel_axes=(axes,),
                )
            )  # fmt: skip
            for rank in range(count):
                local, offset = list(shape), [0] * len(shape)
                if dim is not None:
                    local[dim] //= count
                    offset[dim] = rank * local[dim]
                fragments.append(
                    weight.PlacementFragment(
                        placement_fragment_id=f"{name}{rank}/{tensor}", tensor_id=tensor, global_offset=tuple(offset),
                        local_shape=tuple(local), nbytes=2 * prod(local), rank=weight.ParallelRank(tp=rank),
                    )
                )  # fmt: skip
        return weight.WeightPlacementManifest.from_fragments(
            resource_id="llama", revision="r1", weight_generation=1, placement_set_id=name, topology=topology,
            tensors=tuple(described), fragments=tuple(fragments),
        )  # fmt: skip

    source = side("src", 8, dict.fromkeys(tensors, 0))
    target = side("dst", 4, {name: dim for name, (_, dim) in tensors.items()})

    def plan() -> tuple[int, int]:
        found = weight.plan_placement_transfer(source, target)
        return len(found.operations), found.total_bytes

    return plan


def rows() -> Iterator[Row]:
    tensors = llama(4 if QUICK else 32)
    planned = theirs(tensors)
    operations, size = planned()
    assert ours(tensors) == (operations, size)
    yield compare(
        f"plan of Llama-3-8B's {len(tensors)} tensors, FSDP 8 → TP 4: {operations:,} operations, {size:,} bytes",
        lambda: ours(tensors),
        "mooncake.reshard",
        planned,
        goal=faster(100),
        turns=15,
    )


if __name__ == "__main__":
    main(rows)
