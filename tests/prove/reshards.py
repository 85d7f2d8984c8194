"""Plans from one partition to another: exactly once, nothing needless, and the arrays that come of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import shardwise as sw
from shardwise.reshard.kinds import CollectiveStep
from tests.oracle.numpy_oracle import Oracle

from .against_numpy import oracle_of
from .layouts import LayoutCase, random_layout_case, random_specs
from .subject import Mismatch, Subject, one_by_one, same, sampled

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ReshardCase:
    """Two partitions of one shape."""

    src: LayoutCase
    dst: LayoutCase

    def snippet(self) -> str:
        return (
            "import shardwise as sw\n\n"
            f"src = {self.src.code()}\n"
            f"dst = {self.dst.code()}\n"
            "plan = sw.plan_reshard(src, dst)"
        )

    def simpler(self) -> Iterator[ReshardCase]:
        shape = self.src.shape
        for dim, n in enumerate(shape):
            for smaller in {0, n // 2, max(n - 1, 0)} - {n}:
                less = (*shape[:dim], smaller, *shape[dim + 1 :])
                yield ReshardCase(replace(self.src, shape=less), replace(self.dst, shape=less))
        for simpler in self.src.simpler():
            if simpler.shape == shape:
                yield ReshardCase(simpler, self.dst)
        for simpler in self.dst.simpler():
            if simpler.shape == shape:
                yield ReshardCase(self.src, simpler)


def random_pair(rng: random.Random) -> ReshardCase:
    """Two layouts, often of different meshes, whose devices overlap in some way; any rules but "even"."""
    rules: tuple[sw.UnevenRule, ...] = ("ceil", "chunk", "balanced", "floor")
    src = random_layout_case(rng, most_devices=rng.choice((8, 12, 24)), most_elements=150)
    dst = replace(random_layout_case(rng, most_devices=rng.choice((8, 12, 24)), most_elements=150), unreduced=())
    if rng.random() < 0.4:
        dst = replace(dst, mesh_shape=src.mesh_shape, devices=src.devices)
    specs = random_specs(rng, dst.names, len(src.shape))
    src = replace(src, unreduced=(), rule=rng.choice(rules))
    return ReshardCase(src, replace(dst, specs=specs, shape=src.shape, rule=rng.choice(rules)))


def elements_of(start: list[int], stop: list[int], offsets: Array) -> list[int]:
    box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    found: list[int] = offsets[box].ravel().tolist()
    return found


def check_plan(case: ReshardCase) -> None:
    """Compare transfers with the sets of elements that devices have and want, and the result of a run with a cut."""
    before, after = oracle_of(case.src), oracle_of(case.dst)
    src, dst = case.src.partition(), case.dst.partition()
    plan = sw.plan_reshard(src, dst)
    offsets = np.arange(src.size).reshape(src.shape)
    senders = [src.device_mesh.device(i) for i in range(src.device_mesh.size)]
    receivers = [dst.device_mesh.device(i) for i in range(dst.device_mesh.size)]
    has = {label: frozenset(held.ravel().tolist()) for label, held in zip(senders, before.held, strict=True)}
    received: dict[Any, Counter[int]] = {label: Counter() for label in receivers}
    pieces: Counter[Any] = Counter()
    for row in plan.transfers.tolist():
        sender, receiver = senders[row[0]], receivers[row[1]]
        elements = elements_of(row[2], row[3], offsets)
        if sender == receiver or not elements or not has[sender].issuperset(elements):
            raise Mismatch(f"transfer {row}: the sender has {sorted(has[sender])}")
        received[receiver].update(elements)
        pieces[receiver] += 1
    shards = set(map(frozenset, has.values()))
    for label, held in zip(receivers, after.held, strict=True):
        wanted = set(held.ravel().tolist())
        missing = wanted - has.get(label, frozenset())
        same(f"elements that {label!r} receives, and how often", received[label], Counter(missing))
        same(f"transfers to {label!r}", pieces[label], sum(not missing.isdisjoint(shard) for shard in shards))
    check_run(plan, src, dst, before, after)


def check_run(
    plan: sw.reshard.ReshardPlan, src: sw.Partition, dst: sw.Partition, before: Oracle, after: Oracle
) -> None:
    """Run on shards that share no memory; the values are the offsets, so that each shows where it is from."""
    shards = [held.copy() for held in before.held]
    results = plan.run(shards)
    for i, (result, held) in enumerate(zip(results, after.held, strict=True)):
        same(f"the shape of result {i}", result.shape, held.shape)
        same(f"the values of result {i}", result.tolist(), held.tolist())
    sent = plan.bytes_sent("int64").sum()
    same("bytes sent and received", sent, plan.bytes_received("int64").sum())
    kept = plan.bytes_kept("int64") + plan.bytes_received("int64")
    same("bytes kept and received", kept.tolist(), [held.nbytes for held in after.held])
    same("src and dst", (plan.src, plan.dst), (src, dst))


def random_even_pair(rng: random.Random) -> ReshardCase:
    """Two layouts of one mesh, the first perhaps unreduced, of a shape that every cut divides."""
    case = random_layout_case(rng, most_devices=12)
    rank = rng.choice((1, 2, 2, 3))
    size = int(np.prod(case.mesh_shape))
    shape = (size,) * rank if size**rank <= 2000 else (size,)
    src_specs = random_specs(rng, case.names, len(shape))
    free = [name for name in case.names if not any(name in spec for spec in src_specs)]
    unreduced = tuple(name for name in free if rng.random() < 0.4)
    src = replace(case, specs=src_specs, unreduced=unreduced, shape=shape, rule="even")
    dst = replace(src, specs=random_specs(rng, case.names, len(shape)), unreduced=())
    return ReshardCase(src, dst)


def check_collectives(case: ReshardCase) -> None:
    """Carry the collectives out one by one; after each, every device holds what the layout then says."""
    src, dst = case.src.partition(), case.dst.partition()
    addends = {name: size for name, size in case.src.sizes.items() if name in case.src.unreduced}
    generator = np.random.default_rng(len(case.src.shape))
    partial = generator.integers(-99, 99, (*addends.values(), *src.shape))
    shards = cut(case, src.layout, partial)
    plan = sw.plan_reshard(src, dst)
    same_arrays("run", plan.run(shards), cut(case, dst.layout, partial))
    steps = plan.collectives("int64")
    if steps is None:
        raise Mismatch(f"there are no collectives: {plan.obstacle}")
    devices = Devices(case, steps)
    stepped, layout = shards, src.layout
    for step in steps:
        if step.layout is None:
            raise Mismatch(f"no layout after {step}")
        stepped = (permute if step.kind == "collective-permute" else apply)(step, devices, layout, stepped)
        layout = step.layout
        same_arrays(f"after {step}", stepped, cut(case, step.layout, partial, devices))
    same_arrays("the steps", stepped, cut(case, dst.layout, partial))
    ran = plan.run_collectives(sw.ShardedArray(src, shards))
    same_arrays("run_collectives", ran, stepped)
    prices = [(step.bytes, step.seconds) for step in sw.reshard.cost_of(steps, src, "int64").steps]
    same("cost_of", prices, [(step.bytes, step.seconds) for step in steps])


class Devices:
    """The mesh of a case with its axes cut wherever a sub-axis of the steps begins or ends."""

    def __init__(self, case: ReshardCase, steps: Sequence[CollectiveStep] = ()) -> None:
        named = {name for step in steps for name in step.axes}
        named |= {name for step in steps if step.layout is not None for name in names_in(step.layout)}
        cuts = {name: {1, size} for name, size in case.src.sizes.items()}
        for name in named - set(cuts):
            axis, before, size = parsed(name)
            cuts[axis] |= {before, before * size}
        #: The size of each part, by axis and the product of the parts before it, in the order of the mesh.
        self.sizes: dict[tuple[str, int], int] = {}
        for axis, found in cuts.items():
            ends = sorted(found) if len(found) > 1 else [1, 1]
            self.sizes |= {(axis, start): stop // start for start, stop in itertools.pairwise(ends)}
        self.coordinates = list(itertools.product(*map(range, self.sizes.values())))

    def parts(self, names: Iterable[str]) -> list[int]:
        """Give the positions of the parts that axes and sub-axes consist of, major first."""
        found = []
        for name in names:
            whole = [part for part in self.sizes if part[0] == name]
            if not whole:
                axis, before, size = parsed(name)
                whole = [(at, start) for at, start in self.sizes if at == axis and before <= start < before * size]
            found += [list(self.sizes).index(part) for part in whole]
        return found

    def oracle(self, layout: sw.TensorLayout, shape: tuple[int, ...]) -> Oracle:
        parts = {f"{axis} {start}": size for (axis, start), size in self.sizes.items()}
        names = list(parts)
        specs = [tuple(names[part] for part in self.parts(spec_names(spec))) for spec in layout.axes]  # type: ignore[arg-type]
        return Oracle(parts, specs, shape, "even")


def parsed(name: str) -> tuple[str, int, int]:
    axis, _, numbers = name.rpartition(":(")
    before, _, size = numbers.partition(")")
    return axis, int(before), int(size)


def spec_names(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def names_in(layout: sw.TensorLayout) -> set[str]:
    return {name for spec in layout.axes for name in spec_names(spec)} | set(layout.unreduced)  # type: ignore[arg-type]


def same_arrays(what: str, ours: list[Array], theirs: list[Array]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same(f"{what}: device {i}", a.tolist(), b.tolist())


def cut(case: ReshardCase, layout: sw.TensorLayout, partial: Array, devices: Devices | None = None) -> list[Array]:
    """Give the shards of a layout: addends over axes that are not unreduced any more are added up."""
    devices = devices or Devices(case)
    names = sorted(case.src.unreduced, key=case.src.names.index)
    # One dim of `partial` for each part of an unreduced axis.
    parts = sorted(devices.parts(names))
    sizes = list(devices.sizes.values())
    partial = partial.reshape(*(sizes[part] for part in parts), *case.src.shape)
    left = devices.parts(layout.unreduced)
    summed = partial.sum(axis=tuple(i for i, part in enumerate(parts) if part not in left))
    oracle = devices.oracle(layout, case.src.shape)
    shards = []
    for coordinate, held in zip(oracle.devices, oracle.held, strict=True):
        place = tuple(coordinate[part] for part in sorted(left))
        shards.append(summed[place].ravel()[held])
    return shards


def permute(step: CollectiveStep, devices: Devices, layout: sw.TensorLayout, shards: list[Array]) -> list[Array]:
    """Each device takes the whole shard of one that holds the box that it is to hold, of the same addend."""
    assert step.layout is not None
    addends = devices.parts(step.layout.unreduced)

    def labels(of: sw.TensorLayout) -> list[Any]:
        shape = tuple(n * count for n, count in zip(shards[0].shape, of.num_shards, strict=True))
        oracle = devices.oracle(of, shape)
        pairs = zip(oracle.devices, oracle.positions, strict=True)
        return [([coordinate[part] for part in addends], positions) for coordinate, positions in pairs]

    before = labels(layout)
    return [shards[before.index(wanted)] for wanted in labels(step.layout)]


def apply(step: CollectiveStep, devices: Devices, layout: sw.TensorLayout, shards: list[Array]) -> list[Array]:
    """Do what the name of a collective says, among the devices that differ in the step's axes only."""
    coordinates, sizes = devices.coordinates, list(devices.sizes.values())
    onto = devices.parts(step.axes)
    # The group puts its shards together in the order in which the axes cut the dim before.
    held = (
        onto
        if step.from_dim is None
        else [part for part in devices.parts(spec_names(layout.axes[step.from_dim])) if part in onto]  # type: ignore[arg-type]
    )

    def members(own: tuple[int, ...], order: list[int]) -> list[int]:
        turns = [dict(zip(order, turn, strict=True)) for turn in itertools.product(*(range(sizes[p]) for p in order))]
        return [coordinates.index(tuple(turn.get(part, at) for part, at in enumerate(own))) for turn in turns]

    after: list[Array] = []
    for device, own in enumerate(coordinates):
        group = [shards[member] for member in members(own, held)]
        place = members(own, onto).index(device)

        def part(shard: Array, place: int = place, parts: int = len(group)) -> Array:
            assert step.to_dim is not None
            return np.split(shard, parts, axis=step.to_dim)[place]

        if step.kind == "slice":
            after.append(part(shards[device]))
        elif step.kind == "all-gather":
            after.append(np.concatenate(group, axis=step.from_dim))
        elif step.kind == "all-to-all":
            after.append(np.concatenate([part(shard) for shard in group], axis=step.from_dim))
        elif step.kind == "reduce-scatter":
            after.append(np.add.reduce([part(shard) for shard in group]))
        else:
            after.append(np.add.reduce(group))
    return after


SUBJECTS = [
    Subject("numpy", "reshard plans and runs", 60_000, 500, sampled(random_pair, one_by_one(check_plan))),
    Subject("numpy", "collectives step by step", 50_000, 500, sampled(random_even_pair, one_by_one(check_collectives))),
]
