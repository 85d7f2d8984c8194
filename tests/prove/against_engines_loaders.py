"""Weights as the loaders of vLLM and SGLang themselves fill them; see `tests.oracle.engines_loaders`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import shardwise as sw
from shardwise import packed

from .against_engines import compare_rows
from .against_engines_code import PYTHON, WORKER
from .frameworks import Framework
from .subject import Mismatch, Subject, answered, same, sampled

#: What a layer takes, whether the checkpoint has its tensors apart or fused, and by which of its loaders.
WAYS = [(source, loader) for source in ("apart", "fused") for loader in ("weight_loader", "weight_loader_v2")]


@dataclass(frozen=True)
class LoadedCase:
    """A layer of an engine, the numbers of which its sizes are made, the ranks, and how its weight is loaded.

    Of `"qkv"` the numbers are the query heads of a group, the groups, and the sizes of a head and of a value head.
    """

    engine: str
    layer: str
    numbers: tuple[int, ...]
    ranks: int
    source: str
    loader: str

    def snippet(self) -> str:
        return (
            "from tests.prove.against_engines_loaders import LoadedCase, compare\n\n"
            f"case = {self!r}\n# compare(case, what the worker answers to case.question())"
        )

    def simpler(self) -> Iterator[LoadedCase]:
        for i, number in enumerate(self.numbers):
            if number > 1:
                yield replace(self, numbers=(*self.numbers[:i], number - 1, *self.numbers[i + 1 :]))
        if self.ranks > 1:
            yield replace(self, ranks=self.ranks - 1)

    def question(self) -> dict[str, Any]:
        asked = {key: getattr(self, key) for key in ("engine", "layer", "numbers", "ranks", "loader")}
        return {"what": "loaded", "from": self.source, **asked}

    def dim(self) -> packed.PackedDim:
        n = self.numbers
        if self.layer == "qkv":
            return packed.qkv(n[0] * n[1], n[1], n[2], "tp", v_head_dim=n[3])
        if self.layer == "merged":
            return packed.concat(*(packed.part(size, axes="tp") for size in n))
        if self.layer == "vocabulary":
            return packed.padded_vocab(n[0], "tp", n[1])
        if self.source == "experts":
            return packed.concat(packed.part((n[0], 2 * n[1]), axes="tp", uneven="balanced"))
        return packed.experts(n[0], "tp", cut="features", fused=2)

    @property
    def size(self) -> int:
        n = self.numbers
        sizes = {
            "qkv": lambda: n[1] * ((n[0] + 1) * n[2] + n[3]),
            "merged": lambda: sum(n),
            "vocabulary": lambda: n[0],
            "experts": lambda: 2 * n[0] * n[1],
        }
        return sizes[self.layer]()


def drawn(engine: str) -> Any:
    def draw(rng: random.Random) -> LoadedCase:
        ranks = rng.choice((1, 2, 3, 4, 6, 8, 12))
        layer = rng.choice(("qkv", "qkv", "merged", "vocabulary", "experts") if engine == "vllm" else ("qkv", "merged"))
        source, loader = rng.choice(WAYS)
        if layer == "qkv":
            # Mostly what can be cut: key-value heads that divide the ranks or are divided by them.
            kv_heads = rng.choice([k for k in range(1, ranks + 1) if ranks % k == 0] + [ranks * 2, ranks * 3])
            kv_heads += rng.random() < 0.1
            queries = rng.randint(1, 4)
            queries *= 1 if rng.random() < 0.1 or kv_heads * queries % ranks == 0 else ranks
            numbers: tuple[int, ...] = (queries, kv_heads, rng.randint(1, 3), rng.randint(1, 3))
        elif layer == "merged":
            numbers = tuple(ranks * rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
            numbers = (numbers[0] + (rng.random() < 0.1), *numbers[1:])
        elif layer == "vocabulary":
            loader = "weight_loader"
            numbers = (rng.randint(1, 300), ranks * rng.randint(1, 16) + (rng.random() < 0.1))
        else:
            source = rng.choice(("experts", "features"))
            numbers = (rng.randint(1, 9), ranks * rng.randint(1, 3))
        return LoadedCase(engine, layer, numbers, ranks, source, loader)

    return draw


def compare(case: LoadedCase, held: Any) -> None:
    """What the engine refuses is refused; else every rank has the rows, in their order, and the padding behind them."""
    mesh = sw.DeviceMesh((case.ranks,), ("tp",))
    if isinstance(held, tuple):
        # `divide`, and the assertions of the layers.
        if held[1] != "AssertionError":
            raise Mismatch(f"the engine answers {held}")
        try:
            sw.TensorLayout((case.dim(),), mesh).partition((case.size,))
        except sw.LayoutError:
            return
        raise Mismatch(f"the engine refuses it: {held[2]}")
    if all(row >= 0 for rows in held for row in rows):
        compare_rows(case.dim(), held)
    partition = sw.TensorLayout((case.dim(),), mesh).partition((case.size,))
    for label, rows in zip(partition.holders, held, strict=True):
        own = [-1] * partition.shard_shape(label)[0]
        for piece in partition.pieces(label):
            (box,), (start,) = piece.box, piece.start  # type: ignore[misc]
            own[start : start + box.stop - box.start] = range(box.start, box.stop)
        same("rows and padding", own, rows)


def subject(oracle: str, engine: str) -> Subject:
    framework = Framework(engine, WORKER, {"SHARDWISE_ENGINE": engine}, python=PYTHON)

    def answers(cases: list[LoadedCase]) -> list[Any]:
        return framework.ask([case.question() for case in cases])

    run = sampled(drawn(engine), answered(answers, compare))
    return Subject(oracle, "fused weights", 5_000, 250, run, framework.missing, framework.stop)


SUBJECTS = [subject("vLLM", "vllm"), subject("SGLang", "sglang")]
