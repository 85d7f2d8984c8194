"""PyTorch's dialect and the rule "chunk", and plans as its checkpoint planner makes them, compared with PyTorch itself.

PyTorch's default packages bring gigabytes of GPU libraries and are therefore no requirement of any kind; where a CPU
build is installed, or SHARDWISE_TORCH_PYTHON names a Python that has one, this runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

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
from tests.oracle.torch_oracle import missing, torch_worker
from tests.oracle.worker import Worker

LAYOUTS = 300
PLANS = 200
NAMES = ("x", "y", "z", "w")
OURS = {"replicate": Replicate, "partial": Partial, "shard": Shard, "strided": StridedShard}
KINDS = {kind: name for name, kind in OURS.items()}

Placed = tuple[Any, ...]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    worker = torch_worker()
    yield worker
    worker.stop()


def random_shape(rng: random.Random, rank: int) -> tuple[int, ...]:
    """Few elements, often fewer than there are shards, sometimes none."""
    return tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 24, rng.randint(1, 40))) for _ in range(rank))


def random_mesh(rng: random.Random) -> sw.DeviceMesh:
    sizes = [rng.choice((1, 2, 2, 3, 4, 5)) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))]
    while np.prod(sizes) > 36:
        sizes[rng.randrange(len(sizes))] = 2
    return sw.DeviceMesh(sizes, NAMES[: len(sizes)])


def random_specs(rng: random.Random, names: tuple[str, ...], rank: int) -> list[list[str]]:
    """Each axis, in any order, cuts some dim, or none."""
    specs: list[list[str]] = [[] for _ in range(rank)]
    for name in rng.sample(names, len(names)):
        dim = rng.randint(-1, rank - 1)
        if dim >= 0:
            specs[dim].append(name)
    return specs


def placement_entries(placements: list[Any]) -> list[Placed]:
    entries: list[Placed] = []
    for placement in placements:
        if isinstance(placement, StridedShard):
            entries.append(("strided", placement.dim, placement.split_factor))
        else:
            entries.append(("shard", placement.dim) if isinstance(placement, Shard) else (KINDS[type(placement)],))
    return entries


def random_held_case(rng: random.Random) -> dict[str, Any]:
    """Placements of a layout whose axes cut in any order, or placements of any kind, that no layout need have."""
    mesh, rank = random_mesh(rng), rng.choice((0, 1, 1, 2, 2, 3))
    shape = random_shape(rng, rank)
    if rng.random() < 0.5:
        layout = sw.TensorLayout(random_specs(rng, mesh.axis_names, rank), mesh)
        try:
            placed = placement_entries(list(to_placements(layout)))
        except sw.LayoutError:  # an order of axes of size 1 that placements cannot say
            return random_held_case(rng)
        if rng.random() < 0.3:
            shape = tuple(count * rng.randint(1, 3) for count in layout.num_shards)
    else:
        kinds: list[Placed] = [("replicate",), ("partial",)]
        kinds += [("shard", dim) for dim in range(rank) for _ in range(2)]
        kinds += [("strided", dim, rng.randint(1, 6)) for dim in range(rank)]
        placed = [rng.choice(kinds) for _ in mesh.shape]
    return {
        "shape": list(shape),
        "mesh_shape": list(mesh.shape),
        "placements": placed,
        "elements": math.prod(shape) <= 2000,
    }


def check_held(case: dict[str, Any], answer: Any) -> int:
    """Compare every rank; gives their number."""
    assert isinstance(answer, dict), (case, answer)
    mesh = sw.DeviceMesh(case["mesh_shape"], NAMES[: len(case["mesh_shape"])])
    placements = [OURS[kind](*numbers) for kind, *numbers in case["placements"]]
    shape = tuple(case["shape"])
    shards = local_shards(placements, mesh, shape)
    assert shards.shapes.tolist() == answer["shapes"], case
    assert shards.offsets.tolist() == answer["offsets"], case
    check_partition(case, placements, mesh, shards.is_box, answer)
    if "elements" in answer:
        offsets = np.arange(int(np.prod(shape))).reshape(shape)
        for rank, held in enumerate(answer["elements"]):
            start, size = shards.offsets[rank], shards.shapes[rank]
            cut: tuple[Any, ...] = (*(slice(a, a + n) for a, n in zip(start, size, strict=True)), ...)
            box = offsets[cut]
            assert len(held) == np.prod(size), (case, rank)
            assert bool(shards.is_box[rank]) == (box.ravel().tolist() == held), (case, rank)
    return mesh.size


def check_partition(case: dict[str, Any], placements: list[Any], mesh: sw.DeviceMesh, is_box: Any, answer: Any) -> None:
    """Where a layout says the same as the placements, its partition does, as far as the rules are the same."""
    try:
        layout = from_placements(placements, mesh, len(case["shape"]))
    except sw.LayoutError:
        return
    stretches = [spec.parts[0].factors[0] or 1 if isinstance(spec, PackedDim) else 1 for spec in layout.axes]
    if any(n % outer for n, outer in zip(case["shape"], stretches, strict=True)):
        with pytest.raises(sw.LayoutError, match="cannot take the rest"):  # A layout's stretches are equal.
            layout.partition(case["shape"], "chunk")
        return
    partition = layout.partition(case["shape"], "chunk")
    cuts = zip(case["shape"], stretches, partition.num_shards, strict=True)
    if any(n % (outer * count) for n, outer, count in cuts) and any(
        kind == "strided" for kind, *_ in case["placements"]
    ):
        return
    if "elements" in answer:
        assert held_by(partition, mesh) == answer["elements"], case
    if max(stretches, default=1) == 1:
        boxes = partition.boxes()
        assert boxes[:, :, 0].tolist() == answer["offsets"], case
        assert (boxes[:, :, 1] - boxes[:, :, 0]).tolist() == answer["shapes"], case
        assert is_box.all(), case


def held_by(partition: sw.Partition, mesh: sw.DeviceMesh) -> list[list[int]]:
    """The offsets of the elements that each device holds, in the order of its own array."""
    offsets = np.arange(math.prod(partition.shape)).reshape(partition.shape)
    begins, pieces = partition.all_pieces()
    held = []
    for device, (first, last) in enumerate(itertools.pairwise(begins)):
        own = np.full(partition.shard_shape(mesh.devices.flat[device]), -1)
        for piece in pieces[first:last]:
            local = tuple(slice(at, at + stop - start) for start, stop, at in piece)
            own[local] = offsets[tuple(slice(start, stop) for start, stop, _ in piece)]
        held.append(own.ravel().tolist())
    return held


def test_what_every_rank_holds(worker: Worker) -> None:
    rng = random.Random(20)
    cases = [random_held_case(rng) for _ in range(LAYOUTS)]
    ranks = sum(check_held(case, answer) for case, answer in zip(cases, worker.ask(cases), strict=True))
    assert ranks > LAYOUTS


def random_plan(rng: random.Random) -> sw.reshard.ReshardPlan:
    """Between two layouts of one shape over devices that the two meshes do not share, so that everything moves."""
    rank = rng.choice((0, 1, 2, 2, 3))
    shape = random_shape(rng, rank)
    sides = []
    for device in ("src", "dst"):
        mesh = random_mesh(rng)
        mesh = sw.DeviceMesh(mesh.shape, mesh.axis_names, [f"{device}:{i}" for i in range(mesh.size)])
        layout = sw.TensorLayout(random_specs(rng, mesh.axis_names, rank), mesh)
        sides.append(layout.partition(shape, rng.choice(("ceil", "chunk", "balanced"))))
    return sw.plan_reshard(*sides)


def plan_chunks(plan: sw.reshard.ReshardPlan) -> tuple[dict[str, Any], dict[int, int]]:
    """The case: every shard is saved once, every destination wants its own; and which chunk each source device has."""
    assert plan.src is not None
    numbers: dict[tuple[Any, ...], int] = {}
    saved_by = {}
    for device, (offsets, sizes) in enumerate(chunks_of(plan.src)):  # type: ignore[arg-type]
        saved_by[device] = numbers.setdefault((tuple(offsets), tuple(sizes)), len(numbers))
    return {"saved": list(numbers), "wanted": chunks_of(plan.dst)}, saved_by  # type: ignore[arg-type]


def chunks_of(partition: sw.Partition) -> list[tuple[list[int], list[int]]]:
    boxes = partition.boxes()
    return list(zip(boxes[:, :, 0].tolist(), (boxes[:, :, 1] - boxes[:, :, 0]).tolist(), strict=True))


def check_plan(plan: sw.reshard.ReshardPlan, saved_by: dict[int, int], answer: Any) -> None:
    assert isinstance(answer, list), (plan, answer)
    source, destination = plan.source_boxes(), plan.destination_boxes()
    ours = [
        (
            int(transfer["dst_device"]),
            saved_by[int(transfer["src_device"])],
            into[:, 0].tolist(),
            out_of[:, 0].tolist(),
            (transfer["stop"] - transfer["start"]).tolist(),
        )
        for transfer, out_of, into in zip(plan.transfers, source, destination, strict=True)
    ]
    assert sorted(ours) == sorted(answer), plan


def test_plans_are_those_of_the_checkpoint_planner(worker: Worker) -> None:
    rng = random.Random(21)
    plans = [random_plan(rng) for _ in range(PLANS)]
    chunks = [plan_chunks(plan) for plan in plans]
    answers = worker.ask([case for case, _ in chunks])
    for plan, (_, saved_by), answer in zip(plans, chunks, answers, strict=True):
        check_plan(plan, saved_by, answer)


def test_the_checkpoint_planner_takes_every_shard_for_a_box(worker: Worker) -> None:
    """13 rows over z, then y, then x: rank 5 holds the rows 7 and 10, and PyTorch would load 7 and 8 into it."""
    mesh = sw.DeviceMesh((2, 2, 2), ("x", "y", "z"))
    placements = to_placements(sw.TensorLayout((("z", "y", "x"),), mesh))
    assert placements == [StridedShard(0, 4), StridedShard(0, 2), Shard(0)]
    placed = placement_entries(list(placements))
    held = {"shape": [13], "mesh_shape": [2, 2, 2], "placements": placed, "elements": True}
    answer, *_ = worker.ask([held])
    assert answer["elements"][5] == [7, 10]
    chunk = (answer["offsets"][5], answer["shapes"][5])
    assert worker.ask([{"saved": [([0], [13])], "wanted": [chunk]}]) == [[(0, 0, [0], [7], [2])]]
    shards = local_shards(placements, mesh, (13,))
    assert shards.is_box.tolist() == [True] * 5 + [False] + [True] * 2


def test_the_calculator_takes_a_dim_and_its_negative_for_two(worker: Worker) -> None:
    positive, negative = (
        {"shape": [2, 8], "mesh_shape": [2, 2], "placements": [("shard", dim), ("shard", 1)]} for dim in (1, -1)
    )
    right, wrong = worker.ask([positive, negative])
    assert [offset[1] for offset in right["offsets"]] == [0, 2, 4, 6]
    assert [offset[1] for offset in wrong["offsets"]] == [0, 2, 0, 2]
    shards = local_shards([Shard(-1), Shard(1)], sw.DeviceMesh((2, 2), ("x", "y")), (2, 8))
    assert shards.offsets.tolist() == right["offsets"]


def test_the_checkpoint_planner_says_nothing_of_gaps_and_overlaps(worker: Worker) -> None:
    gap = {"saved": [([0], [3]), ([5], [3])], "wanted": [([0], [8])]}
    overlap = {"saved": [([0], [5]), ([3], [5])], "wanted": [([0], [8])]}
    assert [sum(read[4][0] for read in answer) for answer in worker.ask([gap, overlap])] == [6, 10]
    mesh = sw.DeviceMesh((1,), ("x",))
    whole = sw.TensorLayout((None,), mesh).partition((8,))
    for case in (gap, overlap):
        boxes = [[[offsets[0], offsets[0] + sizes[0]]] for offsets, sizes in case["saved"]]
        with pytest.raises(sw.LayoutError):
            sw.plan_reshard(sw.Tiling.from_boxes((8,), boxes), whole)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this Python")
def test_a_cpu_tensor_is_distributed_without_a_copy() -> None:
    torch = importlib.import_module("torch")
    tensor = torch.arange(12).reshape(3, 4)
    layout = sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))
    shard = sw.distribute_tensor(tensor, layout).shard("cpu:1")
    shard[0, 0] = 100
    assert tensor[0, 2].item() == 100
