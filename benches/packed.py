"""What packed dims cost: the same calls of a packed partition and of a plain one of the same shape, in turns.

Medians, and the ratio of each turn's two times: its median, least and most.

    python benches/packed.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import shardwise as sw

TURNS = 25
SHAPE = (10240, 8192)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def calls(partition: sw.Partition, offsets: np.ndarray[Any, Any]) -> dict[str, Callable[[], Any]]:
    shards, places = partition.locate(offsets)
    return {
        "locate of 10⁶ offsets": lambda: partition.locate(offsets),
        "global_offset of 10⁶": lambda: partition.global_offset(shards, places),
        "runs of a device": lambda: partition.runs(3),
    }


def main() -> None:
    """Time Llama-3-70B's QKV, packed and as one dim, over 8 and 16 ranks, and where 4,096 devices have it."""
    rng = np.random.default_rng(0)
    offsets = rng.integers(0, SHAPE[0] * SHAPE[1], 10**6)
    dims = {"8 ranks": (8, sw.packed.qkv(64, 8, 128, "tp")), "16 ranks": (16, sw.packed.qkv(64, 8, 128, "tp"))}
    for name, (ranks, dim) in dims.items():
        mesh = sw.DeviceMesh((ranks,), ("tp",))
        packed, plain = (sw.TensorLayout((spec, None), mesh).partition(SHAPE) for spec in (dim, "tp"))
        others = calls(plain, offsets)
        for what, call in calls(packed, offsets).items():
            told(f"{what}, {name}", call, others[what])
    mesh = sw.DeviceMesh((512, 8), ("dp", "tp"))
    packed = sw.TensorLayout((dims["8 ranks"][1], None), mesh).partition(SHAPE)
    plain = sw.TensorLayout(("tp", None), mesh).partition(SHAPE)
    told("pieces of 4,096 devices", packed.all_pieces, plain.boxes)


def told(what: str, packed: Callable[[], Any], plain: Callable[[], Any]) -> None:
    pairs = [(seconds(packed), seconds(plain)) for _ in range(TURNS)]
    ratios = sorted(one / other for one, other in pairs)
    times = [statistics.median(side) * 1e6 for side in zip(*pairs, strict=True)]
    print(
        f"{what:32} packed {times[0]:10,.1f} µs, plain {times[1]:10,.1f} µs: "
        f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
