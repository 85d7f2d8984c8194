"""Positions of 10⁷ offsets in an engine that fuses and stacks, one rank's share of a sparse update, and its reads.

The engine has queries, keys and values fused, gate and up too, and stacks its experts: 8 ways of tensor parallelism and
4 of experts. The reads are of DeepSeek-V3's shapes, in files that are holes.
"""

from __future__ import annotations

import math
import re
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_convert import FILES, PART, WHOLE, write
from figures import Row, at_most, at_most_times, at_most_times_bytes, faster
from part import QUICK, main
from timing import compare

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule, FusedParameter, positions_of
from shardwise.store import device_reads

TP, EP, HIDDEN, INNER, EXPERTS = 8, 4, 4096, 1536, 32
COUNT = 10**5 if QUICK else 10**7
RANKS = 64


def engine() -> tuple[Deployment, dict[str, tuple[int, ...]]]:
    """An engine of one layer, and the shapes of the checkpoint's tensors."""
    mesh = sw.DeviceMesh((EP, TP), ("ep", "tp"))
    rules: dict[str, Any] = {
        "[qkv]_proj": (("ep", "tp"), None),
        r"experts\.{e}\.(gate|up)_proj": DeploymentRule(("tp", None), at={"ep": f"e // {EXPERTS // EP}"}),
        r"experts\.{e}\.down_proj": DeploymentRule((None, "tp"), at={"ep": f"e // {EXPERTS // EP}"}),
    }
    fused = [
        FusedParameter("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        FusedParameter("w13", ("experts.{e}.gate_proj", "experts.{e}.up_proj"), stack="e"),
        FusedParameter("w2", ("experts.{e}.down_proj",), stack="e"),
    ]
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (8192, HIDDEN), "k_proj": (1024, HIDDEN), "v_proj": (1024, HIDDEN)}
    for e in range(EXPERTS):
        shapes |= {f"experts.{e}.{x}_proj": (INNER, HIDDEN) for x in ("gate", "up")}
        shapes[f"experts.{e}.down_proj"] = HIDDEN, INNER
    return Deployment(EP * TP, mesh, rules, parameters=fused), shapes


def spread(shapes: dict[str, tuple[int, ...]], count: int) -> dict[str, Any]:
    """So many offsets, as many of each element, in the order of their tensors."""
    total = sum(map(math.prod, shapes.values()))
    random = np.random.default_rng(0)
    return {
        name: np.sort(random.integers(0, math.prod(shape), round(count * math.prod(shape) / total)))
        for name, shape in shapes.items()
    }


def all_ranks() -> Iterator[Row]:
    deployment, shapes = engine()
    offsets = spread(shapes, COUNT)
    places = positions_of(deployment, shapes)
    count = sum(map(len, offsets.values()))

    def located() -> dict[str, Any]:
        return places.shards(offsets)

    # As each rank finds its own.
    for (name, given), (shards, local, holders) in zip(offsets.items(), located().values(), strict=True):
        for one in places.locate("cpu:9", name, given):
            (start,) = [at for device, parameter, at in holders[shards[one.which[0]]] if device == "cpu:9"]
            assert np.array_equal(local[one.which] + start, one.positions)
    everything = np.concatenate(list(offsets.values()))
    work = f"{count:,} offsets → rank, parameter, offset, of an engine of {EP * TP} ranks"
    goal = at_most_times(4)
    yield compare(work, located, "a copy of the offsets", everything.copy, goal=goal, turns=5)
    tracemalloc.start()
    kept = located()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept
    yield Row(f"{work}: memory", "the offsets", peak, everything.nbytes, goal=at_most_times_bytes(6), unit="B")


def share_of_one() -> Iterator[Row]:
    """1 % of a model of 10¹² parameters on 128 ranks: what one rank has to do for its own experts and rows."""
    mesh = sw.DeviceMesh((128,), ("ep",))
    rules = {r"experts\.{e}\.": DeploymentRule((None, None), at={"ep": "e // 3"})}
    places_of = Deployment(128, mesh, rules)
    layers = 1 if QUICK else 60
    shape = (2048, 7168)
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{i}.experts.{e}.{x}.weight": shape for i in range(layers) for e in (0, 1, 2) for x in "gud"
    }
    places = positions_of(places_of, shapes)
    offsets = spread(shapes, math.prod(shape) * len(shapes) // 100)
    values = {name: np.ones(len(given), np.uint16) for name, given in offsets.items()}
    changed = {name: (given.astype(np.int32), values[name]) for name, given in offsets.items()}
    count = sum(map(len, values.values()))
    work = f"a rank's share of 1 % of 10¹² parameters on 128 ranks: {count:,} offsets to positions"
    yield compare(work, lambda: places.updates("cpu:0", changed), goal=at_most(2), turns=3)


def applied() -> Iterator[Row]:
    """1 % of a layer of Llama-3-8B written into the memory of an engine that fuses, in place."""
    rows = 4096 // 8 if QUICK else 4096
    sizes = {"q": rows, "k": rows // 4, "v": rows // 4, "o": rows, "gate": rows * 7 // 2, "up": rows * 7 // 2}
    shapes: dict[str, tuple[int, ...]] = {name: (size, HIDDEN) for name, size in sizes.items()}
    shapes["down"] = HIDDEN, rows * 7 // 2
    fused = [FusedParameter("qkv", ("q", "k", "v")), FusedParameter("gate_up", ("gate", "up"))]
    mesh = sw.DeviceMesh((1,), ("tp",))
    places = positions_of(Deployment(1, mesh, {".": (None, None)}, parameters=fused), shapes)
    offsets = spread(shapes, sum(map(math.prod, shapes.values())) // 100)
    changed = {name: (given.astype(np.int32), np.ones(len(given), np.uint16)) for name, given in offsets.items()}
    memory = {name: np.zeros(size, np.uint16) for name, size in places.parameters("cpu:0").items()}
    whole = {name: np.ones_like(array) for name, array in memory.items()}
    known = places.updates("cpu:0", changed)

    def put() -> None:
        for name, (at, values) in known.items():
            memory[name][at] = values

    def copied() -> None:
        for name, array in whole.items():
            memory[name][:] = array

    work = f"{sum(map(len, offsets.values())):,} elements, 1 % of a layer of Llama-3-8B, written in place"
    floor = "numpy's writes to positions that are known", put
    goal, write = faster(20), lambda: places.apply("cpu:0", memory, changed)
    yield compare(work, write, "a copy of the layer", copied, floor=floor, goal=goal, turns=5)


def reads() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        write(folder, PART if QUICK else WHOLE, 4 if QUICK else FILES, empty=True)
        mesh = sw.DeviceMesh((RANKS,), ("rank",))
        with sw.open_checkpoint(folder) as checkpoint:
            cut = {name: len(checkpoint[name].shape) for name in checkpoint}
            by_rows = {name: sw.TensorLayout(("rank", *[None] * (n - 1)), mesh) for name, n in cut.items() if n}
            alone = [sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("one",), [f"cpu:{i}"])) for i in range(RANKS)]
            of_experts = {
                name: alone[int(expert[1]) * RANKS // 256] if (expert := re.search(r"experts\.(\d+)\.", name)) else one
                for name, one in by_rows.items()
            }
            for what, layouts in (("its own experts", of_experts), ("FSDP, dim 0 of each tensor", by_rows)):
                found = device_reads(checkpoint, layouts, "cpu:5", uneven="ceil")
                needed = int(found.copies["length"].sum())
                work = f"{what}: {len(found.reads):,} reads of {len(by_rows):,} tensors"
                yield Row(work, "what it needs", found.bytes_read, needed, goal=at_most_times_bytes(1.05), unit="B")
            few = device_reads(checkpoint, by_rows, "cpu:5", uneven="ceil", max_reads=2000)
            work = f"FSDP, dim 0 of each tensor: the fewest bytes of {len(few.reads):,} reads"
            yield Row(work, "what it needs", few.bytes_read, needed, unit="B")


def rows() -> Iterator[Row]:
    yield from all_ranks()
    yield from share_of_one()
    yield from applied()
    yield from reads()


if __name__ == "__main__":
    main(rows)
