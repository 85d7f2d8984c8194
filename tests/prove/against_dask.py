"""Chunks, of one size or as equal as can be, their blocks, and their intersections, as dask finds them."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw

from .subject import Subject, one_by_one, same, sampled


@dataclass(frozen=True)
class ChunkCase:
    """A shape, and into how many pieces each dim is cut before and after, by `numpy.array_split`'s rule."""

    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def partition(self, shards: tuple[int, ...], name: str, rule: sw.UnevenRule = "balanced") -> sw.Partition:
        """One mesh axis per dim, so that device indices count chunks; `name` keeps the devices apart."""
        names = [f"a{i}" for i in range(len(shards))]
        mesh = sw.DeviceMesh(shards, names, [f"{name}{i}" for i in range(int(np.prod(shards)))])
        return sw.TensorLayout(names, mesh).partition(self.shape, rule)

    def snippet(self) -> str:
        return (
            "from tests.prove.against_dask import ChunkCase, check\n\n"
            f"check(ChunkCase({self.shape}, {self.before}, {self.after}))"
        )

    def simpler(self) -> Iterator[ChunkCase]:
        for dim in range(len(self.shape)):
            for field in ("shape", "before", "after"):
                numbers = getattr(self, field)
                if numbers[dim] > 1:
                    yield replace(self, **{field: (*numbers[:dim], numbers[dim] - 1, *numbers[dim + 1 :])})


def draw(rng: random.Random) -> ChunkCase:
    """Chunks that are not empty, since dask gives no slices of those."""
    rank = rng.choice((1, 1, 2, 2, 3))
    shape = tuple(rng.randint(1, 40 // rank) for _ in range(rank))
    before, after = (tuple(rng.randint(1, min(n, 5)) for n in shape) for _ in range(2))
    return ChunkCase(shape, before, after)


def check(case: ChunkCase) -> None:
    core, rechunk = importlib.import_module("dask.array.core"), importlib.import_module("dask.array.rechunk")
    src, dst = case.partition(case.before, "s"), case.partition(case.after, "d")
    old, new = (
        tuple(tuple(map(len, np.array_split(range(n), k))) for n, k in zip(case.shape, shards, strict=True))
        for shards in (case.before, case.after)
    )
    same("slices", list(dst.devices_indices_map().values()), list(core.slices_from_chunks(new)))
    same("chunks", core.normalize_chunks(new, shape=case.shape), new)
    # Chunks of one size are the rule "ceil"; dask has none that are empty.
    uniform = core.normalize_chunks([-(-n // k) for n, k in zip(case.shape, case.after, strict=True)], shape=case.shape)
    ceil = case.partition(case.after, "d", "ceil").devices_indices_map().values()
    held = [index for index in ceil if all(side.start < side.stop for side in index)]
    same("slices of uniform chunks", held, list(core.slices_from_chunks(uniform)))
    if sum(case.shape) % 16 == 0:  # Of the few for which there is time, the blocks themselves.
        values = np.arange(np.prod(case.shape)).reshape(case.shape)
        blocks = core.from_array(values, chunks=new).blocks
        for place, view in zip(np.ndindex(case.after), dst.views(values), strict=True):
            same("a block", view.tolist(), blocks[place].compute(scheduler="synchronous").tolist())
    expected = set()
    for receiver, pieces in enumerate(rechunk.intersect_chunks(old, new)):
        for piece in pieces:
            sender = int(np.ravel_multi_index(tuple(place for place, _ in piece), case.before))
            expected.add((sender, receiver, tuple((side.start, side.stop) for _, side in piece)))
    plan = sw.plan_reshard(src, dst)
    transfers = zip(plan.transfers.tolist(), plan.source_boxes().tolist(), strict=True)
    ours: list[Any] = [(row[0], row[1], tuple(map(tuple, box))) for row, box in transfers]
    same("intersections", sorted(ours), sorted(expected))


def missing() -> str | None:
    return "not installed" if importlib.util.find_spec("dask") is None else None


SUBJECTS = [Subject("dask", "chunks, intersections", 100_000, 2_000, sampled(draw, one_by_one(check)), missing)]
