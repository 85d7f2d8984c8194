"""The collectives that XLA compiles a change of layout to, beside ours: no more bytes than it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import shardwise as sw

from .frameworks import Framework
from .layouts import NAMES, LayoutCase, random_specs
from .reshards import ReshardCase
from .subject import Mismatch, Subject, answered, sampled

XLA = Framework("jax", "tests.oracle.worker_xla")


def random_pair(rng: random.Random) -> ReshardCase:
    """Two layouts of one mesh of 8 or 16 devices in one to four axes, of a shape that every cut divides.

    Where axes have different prime factors, XLA may exchange among devices that no axes and no sub-axes lie along, such
    as the first three of the six tiles that axes of sizes 3 and 2 cut; our steps are along axes.
    """
    devices = rng.choice((8, 8, 16))
    sizes: list[int] = []
    rest = devices
    while rest > 1:
        sizes.append(rng.choice([size for size in range(2, rest + 1) if rest % size == 0]))
        rest //= sizes[-1]
    rng.shuffle(sizes)
    rank = rng.randint(1, 3)
    shape = tuple(devices * rng.randint(1, 3) for _ in range(rank))
    names = NAMES[: len(sizes)]
    src = LayoutCase(tuple(sizes), None, random_specs(rng, names, rank), (), shape, "even")
    return ReshardCase(src, replace(src, specs=random_specs(rng, names, rank)))


def question(case: ReshardCase) -> dict[str, Any]:
    return {
        "mesh_shape": case.src.mesh_shape,
        "axis_names": case.src.names,
        "src": case.src.specs,
        "dst": case.dst.specs,
        "shape": case.src.shape,
    }


def answers(cases: list[ReshardCase]) -> list[Any]:
    return XLA.ask([question(case) for case in cases])


def both(case: ReshardCase, answer: list[tuple[str, int]]) -> tuple[int, int]:
    """Give the bytes that a device receives of float32: by our collectives, and by XLA's."""
    cost = sw.plan_reshard(case.src.partition(), case.dst.partition()).cost("float32")
    if cost is None:
        raise Mismatch("there are no collectives")
    return cost.bytes, sum(size for _, size in answer)


def compare(case: ReshardCase, answer: list[tuple[str, int]]) -> None:
    # What two meshes simpler than the case differ in, XLA was not asked about.
    if case.src.mesh_shape != case.dst.mesh_shape or math.prod(case.src.mesh_shape) == 1:
        return
    ours, theirs = both(case, answer)
    if ours > theirs:
        raise Mismatch(f"our collectives take {ours} bytes, XLA's {theirs}: {answer}")


SUBJECTS = [
    Subject(
        "XLA",
        "bytes of collectives",
        4_000,
        40,
        sampled(random_pair, answered(answers, compare)),
        XLA.missing,
        XLA.stop,
    )
]
