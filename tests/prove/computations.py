"""Whole computations: devices with their shards, after what moves, give what the plain computation does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.computation import Computation
from shardwise.propagate import propagate

from .subject import Mismatch, Subject, one_by_one, sampled

Shape = tuple[int, ...]
SIZES = (2, 3, 4, 4, 6, 8)
KINDS = ("add", "negate", "dot", "transpose", "reduce", "reshape", "reverse", "concatenate", "slice", "sort")
Said = dict[str, Any]


@dataclass(frozen=True)
class ComputationCase:
    """Ops in order, each as a mapping of a computation, and layouts of the inputs."""

    inputs: tuple[Shape, ...]
    ops: tuple[Said, ...]
    mesh: tuple[int, ...]
    layouts: tuple[Any, ...]
    policy: Any = "shardy"
    seed: int = 0

    def computation(self) -> Computation:
        count = len(self.inputs) + len(self.ops)
        return Computation([[shape, "float64"] for shape in self.inputs], self.ops, [count - 1, *range(count - 1)][:2])

    def snippet(self) -> str:
        return (
            "from shardwise.computation import Computation\nfrom shardwise.propagate import propagate\n"
            f"computation = Computation.from_json({self.computation().to_json()})\n"
            f"# on {self.mesh}, layouts {self.layouts}, policy {self.policy}"
        )

    def simpler(self) -> Iterator[ComputationCase]:
        if len(self.ops) > 1:
            yield replace(self, ops=self.ops[:-1])
        for at, layout in enumerate(self.layouts):
            if layout is not None:
                yield replace(self, layouts=(*self.layouts[:at], None, *self.layouts[at + 1 :]))


def random_op(rng: random.Random, shapes: list[Shape], inputs: list[Shape]) -> Said:
    """Draw an op of values that are there; a product may add an input, whose number is given as -1."""
    at = rng.randrange(len(shapes))
    shape, rank = shapes[at], len(shapes[at])

    def said(op: str, out: Shape, *more: int, **attributes: Any) -> Said:
        return {"op": op, "in": [at, *more], "out": [[list(out), "float64"]], "attrs": attributes}

    kind = rng.choice(
        ("add", "negate", "dot", "transpose", "reduce", "reshape", "reverse", "concatenate", "slice", "sort")
    )
    if kind == "add":
        alike = [number for number, other in enumerate(shapes) if other == shape]
        return said("add", shape, rng.choice(alike))
    if kind == "negate" or rank == 0:
        return said("negate", shape)
    dim = rng.randrange(rank)
    if kind == "dot":
        inputs.append((shape[dim], rng.choice(SIZES)))
        names = {"lhs_contracting_dimensions": [dim], "rhs_contracting_dimensions": [0]}
        names |= {"lhs_batching_dimensions": [], "rhs_batching_dimensions": []}
        return said("dot_general", (*shape[:dim], *shape[dim + 1 :], inputs[-1][1]), -1, **names)
    if kind == "transpose":
        order = rng.sample(range(rank), rank)
        return said("transpose", tuple(shape[dim] for dim in order), permutation=order)
    if kind == "reduce":
        inputs.append(())
        return said("reduce", (*shape[:dim], *shape[dim + 1 :]), -1, dimensions=[dim], body="add", n=1)
    if kind == "reshape":
        left = math.prod(shape)
        out: list[int] = []
        while left > 1:
            out.append(rng.choice([size for size in range(2, left + 1) if left % size == 0]))
            left //= out[-1]
        return said("reshape", tuple(out))
    if kind == "reverse":
        return said("reverse", shape, dimensions=[dim])
    if kind == "concatenate":
        return said("concatenate", (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]), at, dimension=dim)
    if kind == "sort":
        return said("sort", shape, dimension=dim, n=1)
    first = rng.randrange(shape[dim])
    last = rng.randint(first + 1, shape[dim])
    starts, limits = [0] * rank, list(shape)
    starts[dim], limits[dim] = first, last
    part = tuple(limit - start for start, limit in zip(starts, limits, strict=True))
    return said("slice", part, start_indices=starts, limit_indices=limits, strides=[1] * rank)


def random_computation(rng: random.Random) -> ComputationCase:
    """Draw some ops, all inputs first, and layouts of some inputs."""
    inputs: list[Shape] = [tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3))) for _ in range(2)]
    more: list[Shape] = []
    shapes, drawn = list(inputs), []
    for _ in range(rng.randint(1, 6)):
        op = random_op(rng, shapes, more)
        if math.prod(op["out"][0][0]) > 4096:
            break
        drawn.append((op, len(more) - 1))
        shapes.append(tuple(op["out"][0][0]))
    first = len(inputs)
    ops = []
    for op, number in drawn:
        # The inputs that ops added come after the others, and before all results.
        moved = [first + number if at < 0 else at if at < first else at + len(more) for at in op["in"]]
        ops.append(op | {"in": moved})
    if not ops:
        return random_computation(rng)
    given = (*inputs, *more)
    mesh = tuple(rng.choice((2, 2, 3)) for _ in range(rng.randint(1, 2)))
    layouts = tuple(random_layout(rng, shape, mesh) if rng.random() < 0.8 else None for shape in given)
    return ComputationCase(given, tuple(ops), mesh, layouts, rng.choice(("shardy", "least")), rng.randrange(2**32))


def random_layout(rng: random.Random, shape: Shape, mesh: tuple[int, ...]) -> list[list[str]]:
    """Draw axes for dims that they divide."""
    left = list(shape)
    axes: list[list[str]] = [[] for _ in shape]
    for number, size in enumerate(mesh):
        dims = [dim for dim, rest in enumerate(left) if rest % size == 0]
        if dims and rng.random() < 0.8:
            dim = rng.choice(dims)
            left[dim] //= size
            axes[dim].append(f"a{number}")
    return axes


def check_computation(case: ComputationCase) -> None:
    """Compare what devices compute with the plain computation."""
    computation = case.computation()
    numpy = np.random.default_rng(case.seed)
    arrays = [numpy.integers(-4, 5, shape) for shape in case.inputs]
    mesh = sw.DeviceMesh(case.mesh, [f"a{number}" for number in range(len(case.mesh))])
    found = propagate(computation, case.layouts, mesh=mesh, policy=case.policy).run(arrays)
    for number, (ours, plain) in enumerate(zip(found, computation.run(arrays), strict=True)):
        if not np.array_equal(ours, plain):
            raise Mismatch(f"result {number}: {ours.tolist()}, expected {plain.tolist()}")


SUBJECTS = [
    Subject("numpy", "computations", 20_000, 200, sampled(random_computation, one_by_one(check_computation))),
]
