"""What every rank holds in PyTorch, which cuts by the rule "chunk" in mesh order, and what its planner reads."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.interop.torch import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    from_placements,
    local_shards,
    to_placements,
)
from shardwise.packed import PackedDim

from .frameworks import Framework
from .layouts import NAMES, LayoutCase, random_mesh, random_specs
from .reshards import ReshardCase
from .subject import Mismatch, Subject, answered, same, sampled

TORCH = Framework("torch", "tests.oracle.torch_oracle", python="SHARDWISE_TORCH_PYTHON")

OURS = {"replicate": Replicate, "partial": Partial, "shard": Shard, "strided": StridedShard}
KINDS = {kind: name for name, kind in OURS.items()}
Placed = tuple[Any, ...]


@dataclass(frozen=True)
class TorchCase:
    """The sizes of a mesh, for each of its dims what it does to the tensor, and a shape."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Placed, ...]
    shape: tuple[int, ...]
    #: Whether a tensor is cut as well, element by element.
    elements: bool = False

    def mesh(self) -> sw.DeviceMesh:
        return sw.DeviceMesh(self.mesh_shape, NAMES[: len(self.mesh_shape)])

    def ours(self) -> list[Any]:
        return [OURS[kind](*numbers) for kind, *numbers in self.placements]

    def snippet(self) -> str:
        return (
            "import shardwise as sw\n"
            "from shardwise.interop.torch import Partial, Replicate, Shard, StridedShard, local_shards\n\n"
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
    """Placements as people have them, those of a layout with axes in any order, or any, that no layout need have."""
    case = rng.choice((usual, of_a_layout, anything))(rng)
    return replace(case, elements=math.prod(case.shape) <= 2000 and rng.random() < 0.5)


def usual(rng: random.Random) -> TorchCase:
    """Where a mesh dim is strided, its split factor is the size of a later one that cuts the dim."""
    mesh_shape = random_mesh(rng, 24)
    rank = rng.choice((1, 1, 2, 2, 3))
    placements: list[Placed] = []
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


def of_a_layout(rng: random.Random) -> TorchCase:
    mesh_shape, rank = random_mesh(rng, 24), rng.choice((0, 1, 1, 2, 2, 3))
    mesh = sw.DeviceMesh(mesh_shape, NAMES[: len(mesh_shape)])
    layout = sw.TensorLayout(random_specs(rng, mesh.axis_names, rank), mesh)
    try:
        placements = placed(to_placements(layout))
    except sw.LayoutError:  # An order of axes of size 1 that placements cannot say.
        return of_a_layout(rng)
    divides = rng.random() < 0.3
    shape = tuple(count * rng.randint(1, 3) for count in layout.num_shards) if divides else few(rng, rank)
    return TorchCase(mesh_shape, placements, shape)


def anything(rng: random.Random) -> TorchCase:
    mesh_shape, rank = random_mesh(rng, 24), rng.choice((0, 1, 1, 2, 2, 3))
    kinds: list[Placed] = [("replicate",), ("partial",)]
    kinds += [("shard", dim) for dim in range(rank) for _ in range(2)]
    kinds += [("strided", dim, rng.randint(1, 6)) for dim in range(rank)]
    return TorchCase(mesh_shape, tuple(rng.choice(kinds) for _ in mesh_shape), few(rng, rank))


def few(rng: random.Random, rank: int) -> tuple[int, ...]:
    """A shape of few elements, often fewer than there are shards, sometimes none."""
    return tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 24, rng.randint(1, 40))) for _ in range(rank))


def placed(placements: Any) -> tuple[Placed, ...]:
    """Placements as the worker takes them."""
    entries: list[Placed] = []
    for placement in placements:
        if isinstance(placement, StridedShard):
            entries.append(("strided", placement.dim, placement.split_factor))
        else:
            entries.append(("shard", placement.dim) if isinstance(placement, Shard) else (KINDS[type(placement)],))
    return tuple(entries)


def question(case: TorchCase) -> dict[str, Any]:
    return {
        "shape": list(case.shape),
        "mesh_shape": list(case.mesh_shape),
        "placements": list(case.placements),
        "elements": case.elements,
    }


def compare(case: TorchCase, answer: Any) -> None:
    if not isinstance(answer, dict):
        raise Mismatch(f"PyTorch answers {answer}")
    shapes, offsets = ([list(entry) for entry in answer[key]] for key in ("shapes", "offsets"))
    shards = local_shards(case.ours(), case.mesh(), case.shape)
    same("the shapes of local_shards", shards.shapes.tolist(), shapes)
    same("the offsets of local_shards", shards.offsets.tolist(), offsets)
    assert len(shapes) == math.prod(case.mesh_shape)
    compare_partition(case, shards.is_box, answer)
    if not case.elements:
        return
    whole = np.arange(math.prod(case.shape)).reshape(case.shape)
    for rank, held in enumerate(answer["elements"]):
        cut: tuple[Any, ...] = (*(slice(a, a + n) for a, n in zip(offsets[rank], shapes[rank], strict=True)), ...)
        same(f"the number of elements of rank {rank}", math.prod(shapes[rank]), len(held))
        same(f"is_box of rank {rank}", bool(shards.is_box[rank]), whole[cut].ravel().tolist() == held)


def compare_partition(case: TorchCase, is_box: Any, answer: Any) -> None:
    """Where a layout says the same as the placements, its partition does, as far as the rules are the same."""
    try:
        layout = from_placements(case.ours(), case.mesh(), len(case.shape))
    except sw.LayoutError:
        return
    segments = [spec.parts[0].factors[0] or 1 if isinstance(spec, PackedDim) else 1 for spec in layout.axes]
    try:
        partition = layout.partition(case.shape, "chunk")
    except sw.LayoutError as error:  # A layout's segments are equal.
        same("what is refused", any(n % outer for n, outer in zip(case.shape, segments, strict=True)), True)
        same("how it is refused", "the rest cannot be filled" in str(error), True)
        return
    same("what is not refused", any(n % outer for n, outer in zip(case.shape, segments, strict=True)), False)
    cuts = zip(case.shape, segments, partition.num_shards, strict=True)
    is_strided = any(kind == "strided" for kind, *_ in case.placements)
    if is_strided and any(n % (outer * count) for n, outer, count in cuts):
        return
    if case.elements:
        same("the elements of the partition", held_by(partition, case.mesh()), answer["elements"])
    if max(segments, default=1) == 1:
        boxes = partition.boxes()
        same("the offsets of the partition", boxes[:, :, 0].tolist(), [list(each) for each in answer["offsets"]])
        sizes = (boxes[:, :, 1] - boxes[:, :, 0]).tolist()
        same("the shapes of the partition", sizes, [list(each) for each in answer["shapes"]])
        same("is_box", bool(is_box.all()), True)


def held_by(partition: sw.Partition, mesh: sw.DeviceMesh) -> list[list[int]]:
    """The offsets of the elements that each device holds, in the order of its own array."""
    offsets = np.arange(math.prod(partition.shape)).reshape(partition.shape)
    begins, pieces = partition.all_pieces()
    held = []
    for device, (first, last) in enumerate(itertools.pairwise(begins)):
        own = np.full(partition.shard_shape(mesh.device(device)), -1)
        for piece in pieces[first:last]:
            local = tuple(slice(at, at + stop - start) for start, stop, at in piece)
            own[local] = offsets[tuple(slice(start, stop) for start, stop, _ in piece)]
        held.append(own.ravel().tolist())
    return held


def answers(cases: list[TorchCase]) -> list[Any]:
    return TORCH.ask([question(case) for case in cases])


# A checkpoint as the planner of PyTorch reads it: every shard is saved once, every destination wants its own.


def random_pair(rng: random.Random) -> ReshardCase:
    """Two layouts of one shape over devices that the two meshes do not share, so that everything moves."""
    rank = rng.choice((0, 1, 2, 2, 3))
    shape = few(rng, rank)
    sides = []
    for first in (0, 1000):
        mesh_shape = random_mesh(rng, 24)
        names = NAMES[: len(mesh_shape)]
        devices = tuple(range(first, first + math.prod(mesh_shape)))
        rule: sw.UnevenRule = rng.choice(("ceil", "chunk", "balanced"))
        sides.append(LayoutCase(mesh_shape, devices, random_specs(rng, names, rank), (), shape, rule))
    return ReshardCase(*sides)


def chunks_of(partition: sw.Partition) -> list[tuple[list[int], list[int]]]:
    boxes = partition.boxes()
    return list(zip(boxes[:, :, 0].tolist(), (boxes[:, :, 1] - boxes[:, :, 0]).tolist(), strict=True))


def saved_chunks(case: ReshardCase) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The chunks that are saved, and which of them each source device has."""
    numbers: dict[tuple[Any, ...], int] = {}
    own = [numbers.setdefault((tuple(at), tuple(n)), len(numbers)) for at, n in chunks_of(case.src.partition())]
    return list(numbers), own


def reads(cases: list[ReshardCase]) -> list[Any]:
    return TORCH.ask([{"saved": saved_chunks(case)[0], "wanted": chunks_of(case.dst.partition())} for case in cases])


def compare_reads(case: ReshardCase, answer: Any) -> None:
    if not isinstance(answer, list):
        raise Mismatch(f"PyTorch answers {answer}")
    if set(case.src.mesh().labels()) & set(case.dst.mesh().labels()):  # A simpler case, in which something stays.
        return
    plan, own = sw.plan_reshard(case.src.partition(), case.dst.partition()), saved_chunks(case)[1]
    ours = [
        (
            int(transfer["dst_device"]),
            own[int(transfer["src_device"])],
            into[:, 0].tolist(),
            out_of[:, 0].tolist(),
            (transfer["stop"] - transfer["start"]).tolist(),
        )
        for transfer, out_of, into in zip(plan.transfers, plan.source_boxes(), plan.destination_boxes(), strict=True)
    ]
    same("what is read", sorted(ours), sorted(map(tuple, answer)))


SUBJECTS = [
    Subject(
        "PyTorch", "placements", 200_000, 2_000, sampled(draw, answered(answers, compare)), TORCH.missing, TORCH.stop
    ),
    Subject(
        "PyTorch",
        "reads of a checkpoint",
        20_000,
        500,
        sampled(random_pair, answered(reads, compare_reads)),
        TORCH.missing,
        TORCH.stop,
    ),
]
