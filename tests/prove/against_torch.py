"""Shape and offset of every rank's shard in PyTorch, which cuts by the rule "chunk", in the order of the mesh."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import shardwise as sw
from shardwise.interop.torch import Replicate, Shard, StridedShard, local_shards

from .frameworks import Framework
from .layouts import NAMES, random_mesh
from .subject import Mismatch, Subject, answered, same, sampled

TORCH = Framework("torch", "tests.oracle.torch_oracle", python="SHARDWISE_TORCH_PYTHON")


@dataclass(frozen=True)
class TorchCase:
    """The sizes of a mesh, for each of its dims what it does to the tensor, and a shape."""

    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[Any, ...], ...]
    shape: tuple[int, ...]

    @property
    def plain(self) -> bool:
        return all(kind != "strided" for kind, *_ in self.placements)

    def mesh(self) -> sw.DeviceMesh:
        return sw.DeviceMesh(self.mesh_shape, NAMES[: len(self.mesh_shape)])

    def ours(self) -> list[Any]:
        made = {"replicate": Replicate, "shard": Shard, "strided": StridedShard}
        return [made[kind](*numbers) for kind, *numbers in self.placements]

    def partition(self) -> sw.Partition:
        names = NAMES[: len(self.mesh_shape)]
        axes = [
            [name for name, place in zip(names, self.placements, strict=True) if place == ("shard", dim)]
            for dim in range(len(self.shape))
        ]
        return sw.TensorLayout(axes, self.mesh()).partition(self.shape, "chunk")

    def snippet(self) -> str:
        return (
            "import shardwise as sw\n"
            "from shardwise.interop.torch import Replicate, Shard, StridedShard, local_shards\n\n"
            f"mesh = sw.DeviceMesh({self.mesh_shape}, {NAMES[: len(self.mesh_shape)]})\n"
            f"shards = local_shards({self.ours()}, mesh, {self.shape})"
        )

    def simpler(self) -> Iterator[TorchCase]:
        for dim, n in enumerate(self.shape):
            for smaller in {0, n // 2, max(n - 1, 0)} - {n}:
                yield replace(self, shape=(*self.shape[:dim], smaller, *self.shape[dim + 1 :]))
        for i, placement in enumerate(self.placements):
            if placement != ("replicate",):
                yield replace(self, placements=(*self.placements[:i], ("replicate",), *self.placements[i + 1 :]))


def draw(rng: random.Random) -> TorchCase:
    """Any placements; where a mesh dim is strided, its split factor is the size of a later one that cuts the dim."""
    mesh_shape = random_mesh(rng, 24)
    rank = rng.choice((1, 1, 2, 2, 3))
    placements: list[tuple[Any, ...]] = []
    cutting: dict[int, int] = {}
    # From the last mesh dim on: those that follow decide which split factors there are.
    for size in reversed(mesh_shape):
        dim = rng.randint(-1, rank - 1)
        later = cutting.get(dim, 1)
        if dim < 0:
            placements.append(("replicate",))
        elif later > 1 and rng.random() < 0.6:
            placements.append(("strided", dim, later))
        else:
            placements.append(("shard", dim))
        if dim >= 0:
            cutting[dim] = later * size
    placements.reverse()
    shape = tuple(0 if rng.random() < 0.05 else rng.randint(1, 3 * cutting.get(dim, 2) + 2) for dim in range(rank))
    return TorchCase(mesh_shape, tuple(placements), shape)


def question(case: TorchCase) -> dict[str, Any]:
    return {"shape": list(case.shape), "mesh_shape": list(case.mesh_shape), "placements": list(case.placements)}


def compare(case: TorchCase, answer: Any) -> None:
    if not isinstance(answer, dict):
        raise Mismatch(f"PyTorch answers {answer}")
    shapes, offsets = ([list(entry) for entry in answer[key]] for key in ("shapes", "offsets"))
    shards = local_shards(case.ours(), case.mesh(), case.shape)
    same("the shapes of local_shards", shards.shapes.tolist(), shapes)
    same("the offsets of local_shards", shards.offsets.tolist(), offsets)
    if case.plain:
        boxes = case.partition().boxes()
        same("the shapes of the partition", (boxes[:, :, 1] - boxes[:, :, 0]).tolist(), shapes)
        same("the offsets of the partition", boxes[:, :, 0].tolist(), offsets)
    assert len(shapes) == math.prod(case.mesh_shape)


def answers(cases: list[TorchCase]) -> list[Any]:
    return TORCH.ask([question(case) for case in cases])


SUBJECTS = [
    Subject(
        "PyTorch", "placements", 200_000, 2_000, sampled(draw, answered(answers, compare)), TORCH.missing, TORCH.stop
    )
]
