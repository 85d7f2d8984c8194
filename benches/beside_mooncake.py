"""Plan a model's weights from a trainer to an engine beside `mooncake.reshard`, which does nothing else.

Run, with `pip install --no-deps mooncake-transfer-engine`: `python benches/beside_mooncake.py`. The 291 tensors of
Llama-3-8B go from 8 devices that cut dim 0 to 4 others under tensor parallelism. Both give 5,424 operations and
16,062,119,936 bytes: here as arrays for each receiver, there as objects. An optimised build (`make build`) takes a
hundredth of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import shardwise as sw
from shardwise.deploy import Deployment, fsdp2

OPERATIONS, BYTES = 5424, 16_062_119_936
REPEATS = 15


def llama(layers: int = 32) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """The shapes of Llama-3-8B, and the dim that tensor parallelism cuts."""
    hidden, inner, words, kv = 4096, 14336, 128256, 1024
    tensors: dict[str, tuple[tuple[int, ...], int | None]] = {
        "model.embed_tokens.weight": ((words, hidden), 0),
        "lm_head.weight": ((words, hidden), 0),
        "model.norm.weight": ((hidden,), None),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{x}_proj.weight": ((hidden if x == "q" else kv, hidden), 0) for x in "qkv"}
        tensors |= {f"{layer}mlp.{x}_proj.weight": ((inner, hidden), 0) for x in ("gate", "up")}
        tensors[f"{layer}self_attn.o_proj.weight"] = (hidden, hidden), 1
        tensors[f"{layer}mlp.down_proj.weight"] = (hidden, inner), 1
        tensors |= {f"{layer}{x}_layernorm.weight": ((hidden,), None) for x in ("input", "post_attention")}
    return tensors


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
    from mooncake.reshard import weight

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


def seconds(work: Callable[[], tuple[int, int]]) -> float:
    """The median processor time of some runs, each of which must give what it should; both sides have one thread."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        assert work() == (OPERATIONS, BYTES)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    tensors = llama()
    mine, peer = seconds(lambda: ours(tensors)), seconds(theirs(tensors))
    print(f"{len(tensors)} tensors, {OPERATIONS:,} operations, {BYTES:,} bytes, on both sides")
    print(f"shardwise, from deployments to descriptors: {1000 * mine:.1f} ms")
    print(f"mooncake.reshard, from its manifests: {1000 * peer:.1f} ms, {peer / mine:.0f} times as long")


if __name__ == "__main__":
    main()
