"""NVIDIA's published case: Qwen3-30B-A3B from 16 trainers with 8 of 128 experts each to an engine of 4, by its rows.

ai-dynamo/modelexpress 528 says that a rank of the engine has 12,693,891 contiguous runs to read, and reads 51 % more
than it needs to have 117,123. Here they are rows with strides, as NIXL takes them, and no byte more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from figures import Row, at_most, at_most_times_bytes
from part import QUICK, main
from timing import compare

import shardwise as sw
from shardwise.execute.transports import MemoryManifest, MemoryRange, address_rows
from shardwise.reshard import Descriptors, ModelPlan

LAYERS, EXPERTS, HIDDEN, INNER, WORDS = 4 if QUICK else 48, 128, 2048, 768, 151936


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of Qwen3-30B-A3B."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    found["model.norm.weight"] = (HIDDEN,)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        found |= {f"{layer}self_attn.{x}_proj.weight": (4096 if x == "q" else 512, HIDDEN) for x in "qkv"}
        found |= {f"{layer}self_attn.o_proj.weight": (HIDDEN, 4096), f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN)}
        found |= {f"{layer}self_attn.{x}_norm.weight": (128,) for x in "qk"}
        found |= {f"{layer}{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
        for expert in range(EXPERTS):
            found |= {f"{layer}mlp.experts.{expert}.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
            found[f"{layer}mlp.experts.{expert}.down_proj.weight"] = HIDDEN, INNER
    return found


def layouts(names: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Who has what: experts whole on one of 16 trainers; features cut over 4 ranks of the engine."""
    trainers = [f"trainer:{i}" for i in range(16)]
    mesh, tp = sw.DeviceMesh((16,), ("ep",), trainers), sw.DeviceMesh((4,), ("tp",), [f"engine:{i}" for i in range(4)])
    alone = [sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("one",), [label])) for label in trainers]
    whole = {(rank, on): sw.TensorLayout((None,) * rank, on) for rank in (1, 2) for on in (mesh, tp)}
    rows, columns = sw.TensorLayout(("tp", None), tp), sw.TensorLayout((None, "tp"), tp)
    src, dst = {}, {}
    for name, shape in names.items():
        expert = re.search(r"experts\.(\d+)", name)
        src[name] = alone[int(expert[1]) // 8] if expert else whole[len(shape), mesh]
        is_cut = "proj" in name or "embed" in name or "lm_head" in name
        is_column = "down_proj" in name or "o_proj" in name
        dst[name] = columns if is_column else rows if is_cut else whole[len(shape), tp]
    return src, dst


def far_apart(part: Descriptors, side: str) -> dict[str, MemoryRange]:
    """Addresses for each tensor, no two of which touch."""
    rows = part.sends if side == "src" else part.receives
    ends = rows[f"{side}_offset"] + (rows["count"] - 1) * rows[f"{side}_stride"] + rows["bytes"]
    least = np.zeros(len(part.tensors), np.int64)
    np.maximum.at(least, rows[f"{side}_tensor"], ends)
    starts = np.cumsum(least + 64) - least
    return {part.tensors[at]: MemoryRange(int(starts[at]), int(least[at])) for at in np.flatnonzero(least).tolist()}


def rows() -> Iterator[Row]:
    tensors = shapes()
    src, dst = layouts(tensors)
    described = {name: (shape, "bfloat16") for name, shape in tensors.items()}

    def planned() -> ModelPlan:
        return sw.plan_model(src, dst, described)

    plan = planned()
    part = plan.descriptors("engine:1")
    count, runs = len(part.receives), int(part.receives["count"].sum())
    work = f"plan of Qwen3-30B-A3B's {len(tensors):,} tensors, 16 trainers → 4 of an engine"
    yield compare(work, planned, goal=at_most(0.1), turns=5)
    work = f"a rank's {runs:,} runs as {count:,} rows with strides, of that plan"
    yield compare(work, lambda: plan.descriptors("engine:1"), goal=at_most(0.1), turns=5)
    memory = far_apart(part, "dst")
    peers = [plan.descriptors(f"trainer:{i}") for i in range(16)]
    told = [MemoryManifest.of(one, far_apart(one, "src"), {}, version="1") for one in peers]
    mine = MemoryManifest.of(part, {}, memory, version="1")

    def addresses() -> list[Any]:
        return [address_rows(part, mine, one) for one in told]

    found = addresses()
    assert sum(map(len, found)) == count
    yield compare("these rows with the addresses of both sides", addresses, turns=5)
    read = sum(one.nbytes for one in found)
    yield Row(
        "bytes that the rank reads", "what it needs", read, part.bytes_received, goal=at_most_times_bytes(1), unit="B"
    )


if __name__ == "__main__":
    main(rows)
