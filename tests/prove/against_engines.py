"""Fused weights, as the engines cut them: see `tests.oracle.fused`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise import packed
from tests.oracle import fused

from .subject import Subject, one_by_one, same, sampled

#: For each engine how its weight is packed, and the rows of a rank; both of the numbers of a case.
Made = tuple[packed.PackedDim, Callable[[int], Any]]


def vllm_qkv(n: list[int], tp: int) -> Made:
    heads, kv, d = counts(n, tp)
    return packed.qkv(heads, kv, d, "tp"), lambda rank: fused.vllm_qkv(heads, kv, d, tp, rank)


def tensorrt_llm_qkv(n: list[int], tp: int) -> Made:
    heads, kv, d = counts(n, tp)
    kv_part = packed.part((kv, d), axes=f"tp:(1){kv}" if kv < tp else "tp")
    dim = packed.concat(packed.part((heads, d), axes="tp"), kv_part, kv_part)
    return dim, lambda rank: fused.tensorrt_llm_qkv(heads, kv, d, tp, rank)


def vllm_merged(n: list[int], tp: int) -> Made:
    sizes = [tp * size for size in n]
    dim = packed.concat(*(packed.part(size, axes="tp") for size in sizes))
    return dim, lambda rank: fused.vllm_merged(sizes, tp, rank)


def transformers_packed(n: list[int], tp: int) -> Made:
    sizes = [tp * n[0]] * n[1]
    dim = packed.parse(f"({n[1]} f@tp)")
    return dim, lambda rank: fused.transformers_packed(sizes, tp, rank)


def megatron_qkv(n: list[int], tp: int) -> Made:
    # Fewer groups than ranks: each is split, into as many heads' rows as there are ranks for it, or a multiple of that.
    divisors = [k for k in range(1, tp + 1) if tp % k == 0]
    few = n[0] % 2 == 0
    groups, d = (divisors[n[1] % len(divisors)] if few else tp * n[0]), n[2]
    heads = (tp if few else groups) * n[1]
    d *= tp if (heads // groups + 2) * d % (tp // groups or 1) else 1
    return packed.qkv(heads, groups, d, "tp", order="interleaved"), lambda rank: fused.megatron_qkv(
        heads, groups, d, tp, rank
    )


def megatron_stride(n: list[int], tp: int) -> Made:
    size = n[0] * n[1] * tp
    return packed.parse("(s f@tp)", s=n[1]), lambda rank: fused.megatron_stride(size, n[1], tp, rank)


def strided_shard(n: list[int], tp: int) -> Made:
    dim = packed.concat(packed.part((n[1], n[0] + n[2]), cut=1, axes="tp", uneven="ceil"))
    return dim, lambda rank: fused.strided_shard(n[1] * (n[0] + n[2]), n[1], tp, rank)


def deepspeed_bloom(n: list[int], tp: int) -> Made:
    return packed.parse("(g@tp/balanced 3 u)", g=n[0], u=n[1]), lambda rank: fused.deepspeed_bloom(*n[:2], tp, rank)  # type: ignore[call-arg]


def deepspeed_glm(n: list[int], tp: int) -> Made:
    return packed.parse("(3 g@tp/balanced u)", g=n[0], u=n[1]), lambda rank: fused.deepspeed_glm(*n[:2], tp, rank)  # type: ignore[call-arg]


def deepspeed_phi3(n: list[int], tp: int) -> Made:
    dim = packed.parse("(g@tp/balanced r u) + (g@tp/balanced u) + (g@tp/balanced u)", g=n[0], r=n[1], u=n[2])
    return dim, lambda rank: fused.deepspeed_phi3(*n[:3], tp, rank)  # type: ignore[call-arg]


def deepspeed_bigcode(n: list[int], tp: int) -> Made:
    dim = packed.parse("(h@tp/balanced u) + (2 u)", h=n[0], u=n[1])
    return dim, lambda rank: fused.deepspeed_bigcode(*n[:2], tp, rank)  # type: ignore[call-arg]


def llama_cpp(n: list[int], tp: int) -> Made:
    segments = [(n[0], n[1] * n[2]), (2 * n[0], n[2])]
    dim = packed.concat(*(packed.part(segment, axes="tp", uneven="floor") for segment in segments))
    return dim, lambda rank: fused.llama_cpp(segments, tp, rank)


def counts(n: list[int], tp: int) -> tuple[int, int, int]:
    """Query heads, key-value heads and head dim: the ranks divide the heads, and of ranks and key-value heads one does
    the other."""
    divisors = [k for k in range(1, tp + 1) if tp % k == 0]
    kv = divisors[n[0] % len(divisors)] if n[1] % 2 else tp * n[0]
    step = np.lcm(kv, tp)
    return int(step) * n[2], kv, n[1]


ENGINES: dict[str, Callable[[list[int], int], Made]] = {
    made.__name__: made
    for made in (
        vllm_qkv,
        tensorrt_llm_qkv,
        vllm_merged,
        transformers_packed,
        megatron_qkv,
        megatron_stride,
        strided_shard,
        deepspeed_bloom,
        deepspeed_glm,
        deepspeed_phi3,
        deepspeed_bigcode,
        llama_cpp,
    )
}


@dataclass(frozen=True)
class EngineCase:
    """An engine, three numbers from which its sizes are made, the ranks, and how many others hold the same."""

    engine: str
    numbers: tuple[int, int, int]
    ranks: int
    replicas: int

    def snippet(self) -> str:
        return f"from tests.prove.against_engines import EngineCase, check\n\ncheck({self!r})"

    def simpler(self) -> Iterator[EngineCase]:
        for i, number in enumerate(self.numbers):
            if number > 1:
                yield replace(self, numbers=(*self.numbers[:i], number - 1, *self.numbers[i + 1 :]))  # type: ignore[arg-type]
        if self.ranks > 1:
            yield replace(self, ranks=self.ranks - 1)
        if self.replicas > 1:
            yield replace(self, replicas=1)


def draw(rng: random.Random) -> EngineCase:
    numbers = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 4)
    return EngineCase(rng.choice(list(ENGINES)), numbers, rng.choice((1, 2, 3, 4, 6, 8)), rng.choice((1, 1, 2)))


def check(case: EngineCase) -> None:
    dim, rows = ENGINES[case.engine](list(case.numbers), case.ranks)
    compare_rows(dim, [rows(rank).tolist() for rank in range(case.ranks)], case.replicas)


def compare_rows(dim: packed.PackedDim, expected: list[list[int]], replicas: int = 1) -> None:
    """Compare all that a partition says of a dim with the rows that each rank is to hold, in its own order."""
    ranks = len(expected)
    mesh = sw.DeviceMesh((replicas, ranks), ("dp", "tp"))
    size = dim.size if dim.size is not None else len({row for held in expected for row in held})
    partition = sw.TensorLayout((dim,), mesh).partition((size,))
    first: dict[int, tuple[int, int]] = {}
    for device in range(mesh.size):
        label, held = mesh.device(device), expected[device % ranks]
        pieces = [(piece.box[0].start, piece.box[0].stop, piece.start) for piece in partition.pieces(label)]
        same("rows", [row for start, stop, _ in pieces for row in range(start, stop)], held)
        same("places", [start for *_, (start,) in pieces], np.cumsum([0, *(b - a for a, b, _ in pieces)])[:-1].tolist())  # type: ignore[misc]
        same("shape", partition.shard_shape(label), (len(held),))
        runs = [row for start, length in partition.runs(label).tolist() for row in range(start, start + length)]
        same("runs", runs, sorted(held))
        shard = partition.shard_id(label)
        for place, row in enumerate(held):
            first[row] = min(first.get(row, (shard, place)), (shard, place))
        if held:
            back = partition.global_offset([shard] * len(held), list(range(len(held))))
            same("global_offset", back.tolist(), held)
    shards, places = partition.locate(np.arange(size))
    same("locate", list(zip(shards.tolist(), places.tolist(), strict=True)), [first[row] for row in range(size)])


SUBJECTS = [Subject("engines' loaders", "fused weights", 120_000, 2_000, sampled(draw, one_by_one(check)))]
