"""The laws at sizes where no list of elements could be made: up to 2**63 - 1 elements, and a million devices.

The definitions are written out in Python's integers, which are never too small.
"""

from __future__ import annotations

import math
import random

import numpy as np

import shardwise as sw

from .layouts import NAMES, RULES, LayoutCase, random_specs
from .subject import Subject, one_by_one, same, sampled

MOST = 2**63 - 1


def random_large_case(rng: random.Random) -> LayoutCase:
    """A mesh of up to some million devices, a tensor of up to 2**63 - 1 elements."""
    mesh_shape = tuple(rng.choice((1, 2, 3, 7, 8, 16, 30, 64, 100)) for _ in range(rng.randint(1, 4)))
    while math.prod(mesh_shape) > 2**20:
        mesh_shape = mesh_shape[:-1]
    names = NAMES[: len(mesh_shape)]
    specs = random_specs(rng, names, rng.choice((1, 1, 2, 2, 3, 4)))
    sizes = dict(zip(names, mesh_shape, strict=True))
    rule = rng.choice(RULES)
    room, shape = MOST, []
    for spec in rng.sample(specs, len(specs)):
        shards = math.prod(sizes[name] for name in spec)
        n = min(int(2 ** rng.uniform(0, 63)) + rng.randint(0, 9), room)
        if rule == "even":
            n = n // shards * shards
        shape.append((spec, n))
        room //= max(n, 1)
    return LayoutCase(mesh_shape, None, tuple(spec for spec, _ in shape), (), tuple(n for _, n in shape), rule)


def bounds(n: int, sizes: list[int], place: list[int], rule: str) -> tuple[int, int]:
    """Start and stop of the shard whose coordinate over the axes of a spec is `place` (2.4)."""
    if rule == "chunk":
        start, stop = 0, n
        for size, i in zip(sizes, place, strict=True):
            step = -(-(stop - start) // size)
            start, stop = min(start + i * step, stop), min(start + (i + 1) * step, stop)
    else:
        count, i = math.prod(sizes), 0
        for size, digit in zip(sizes, place, strict=True):
            i = i * size + digit
        if rule == "balanced":
            small, more = divmod(n, count)
            start, stop = i * small + min(i, more), (i + 1) * small + min(i + 1, more)
        elif rule == "floor":
            start, stop = n * i // count, n * (i + 1) // count
        else:
            step = -(-n // count)
            start, stop = min(i * step, n), min((i + 1) * step, n)
    return (n, n) if start == stop else (start, stop)


def check_large(case: LayoutCase) -> None:
    partition = case.partition()
    mesh, sizes = partition.device_mesh, case.sizes
    rng = random.Random(partition.size)
    for device in {0, mesh.size - 1, rng.randrange(mesh.size), rng.randrange(mesh.size)}:
        label = f"cpu:{device}"
        rest, coordinate = device, {}
        for name in reversed(case.names):
            rest, coordinate[name] = divmod(rest, sizes[name])
        same("coordinate", mesh.coordinate(device), tuple(coordinate[name] for name in case.names))
        box, shard_id = [], 0
        for n, spec in zip(case.shape, case.specs, strict=True):
            place = [coordinate[name] for name in spec]
            box.append(bounds(n, [sizes[name] for name in spec], place, case.rule))
            for name in spec:
                shard_id = shard_id * sizes[name] + coordinate[name]
        cutting = {name for spec in case.specs for name in spec}
        replica = 0
        for name in case.names:
            if name not in cutting:
                replica = replica * sizes[name] + coordinate[name]
        same("box", partition.box(label), tuple(slice(start, stop) for start, stop in box))
        same("shard_shape", partition.shard_shape(label), tuple(stop - start for start, stop in box))
        same("shard_id", partition.shard_id(label), shard_id)
        same("replica_id", partition.replica_id(label), replica)
        same("devices_holding", partition.devices_holding(shard_id)[replica], label)
        check_owner(partition, box, shard_id, rng)


def check_owner(partition: sw.Partition, box: list[tuple[int, int]], shard_id: int, rng: random.Random) -> None:
    """Elements of the box, its first and its last among them, are located in the shard, and found again."""
    if any(start == stop for start, stop in box):
        return
    offsets, local_offsets = [], []
    for pick in (lambda a, b: a, lambda a, b: b - 1, rng.randrange, rng.randrange):
        position = [pick(start, stop) for start, stop in box]
        offset = local = 0
        for at, n, (start, stop) in zip(position, partition.shape, box, strict=True):
            offset, local = offset * n + at, local * (stop - start) + at - start
        offsets.append(offset)
        local_offsets.append(local)
        same(f"locate({offset})", partition.locate(offset), (shard_id, local))
        same("global_offset", partition.global_offset(shard_id, local), offset)
    found = partition.locate(np.array(offsets))
    same("locate", [answer.tolist() for answer in found], [[shard_id] * len(offsets), local_offsets])
    same("global_offset", partition.global_offset(*found).tolist(), offsets)


SUBJECTS = [
    Subject(
        "Python's integers", "layouts of any size", 200_000, 2_000, sampled(random_large_case, one_by_one(check_large))
    )
]
