"""Random meshes, layouts, shapes and rules: mostly small ones, with all that a careless formula gets wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import shardwise as sw

NAMES = ("x", "y", "z", "w", "v")
RULES: tuple[sw.UnevenRule, ...] = ("even", "ceil", "chunk", "balanced", "floor")
#: Sizes of mesh axes; small ones are enough for every case of every rule.
AXIS_SIZES = (1, 2, 2, 2, 3, 3, 4, 5)


@dataclass(frozen=True)
class LayoutCase:
    """A mesh, a layout over it, and the shape and the rule that it is applied to."""

    mesh_shape: tuple[int, ...]
    #: Labels in device-index order, or None for the default ones.
    devices: tuple[Any, ...] | None
    specs: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...]
    shape: tuple[int, ...]
    rule: sw.UnevenRule

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.mesh_shape)]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.mesh_shape, strict=True))

    def mesh(self) -> sw.DeviceMesh:
        return sw.DeviceMesh(self.mesh_shape, self.names, self.devices)

    def layout(self) -> sw.TensorLayout:
        return sw.TensorLayout(self.specs, self.mesh(), unreduced=self.unreduced)

    def partition(self) -> sw.Partition:
        return self.layout().partition(self.shape, self.rule)

    def code(self) -> str:
        """Give an expression for the partition."""
        devices = "" if self.devices is None else f", {list(self.devices)}"
        mesh = f"sw.DeviceMesh({self.mesh_shape}, {self.names}{devices})"
        unreduced = f", unreduced={self.unreduced}" if self.unreduced else ""
        return f"sw.TensorLayout({self.specs}, {mesh}{unreduced}).partition({self.shape}, {self.rule!r})"

    def snippet(self) -> str:
        return f"import shardwise as sw\n\npartition = {self.code()}"

    def simpler(self) -> Iterator[LayoutCase]:
        if self.devices is not None:
            yield replace(self, devices=None)
        if self.unreduced:
            yield replace(self, unreduced=())
        for dim, n in enumerate(self.shape):
            before, after = slice(None, dim), slice(dim + 1, None)
            yield replace(
                self, specs=self.specs[before] + self.specs[after], shape=self.shape[before] + self.shape[after]
            )
            for smaller in {0, n // 2, max(n - 1, 0)} - {n}:
                yield replace(self, shape=(*self.shape[before], smaller, *self.shape[after]))
            for cutting in self.specs[dim]:
                spec = tuple(name for name in self.specs[dim] if name != cutting)
                yield replace(self, specs=(*self.specs[before], spec, *self.specs[after]))
        for axis, size in enumerate(self.mesh_shape):
            if self.devices is None and size > 1:
                yield replace(self, mesh_shape=(*self.mesh_shape[:axis], size - 1, *self.mesh_shape[axis + 1 :]))
        last = self.names[-1]
        if self.devices is None and len(self.names) > 1 and all(last not in spec for spec in self.specs):
            yield replace(self, mesh_shape=self.mesh_shape[:-1], unreduced=tuple(set(self.unreduced) - {last}))


def random_mesh(rng: random.Random, most: int) -> tuple[int, ...]:
    """One to four axes, and not more than `most` devices."""
    shape: list[int] = []
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))):
        fitting = [size for size in AXIS_SIZES if size * math.prod(shape) <= most]
        shape.append(rng.choice(fitting))
    return tuple(shape)


def random_specs(rng: random.Random, names: tuple[str, ...], rank: int) -> tuple[tuple[str, ...], ...]:
    """Each axis, in any order, cuts some dim, or none."""
    specs: list[list[str]] = [[] for _ in range(rank)]
    for name in rng.sample(names, len(names)):
        dim = int(rng.random() * (rank + 0.5))
        if dim < rank:
            specs[dim].append(name)
    return tuple(map(tuple, specs))


def random_devices(rng: random.Random, size: int) -> tuple[Any, ...] | None:
    """None, the default labels in another order, or numbers with gaps in any order."""
    kind = rng.random()
    if kind < 0.4:
        return None
    labels: list[Any] = [f"cpu:{i}" for i in range(size)] if kind < 0.7 else [3 * i for i in range(size)]
    rng.shuffle(labels)
    return tuple(labels)


def random_shape(
    rng: random.Random, specs: tuple[tuple[str, ...], ...], sizes: dict[str, int], rule: str, most: int
) -> tuple[int, ...]:
    """Dims of 0 to some 20 elements, of not much more than `most` elements in all; for "even" ones that divide."""
    shape: list[int] = []
    room = most
    for spec in specs:
        shards = math.prod(sizes[name] for name in spec)
        if rule == "even":
            # A few do not divide, and must be refused.
            n = shards * (0 if rng.random() < 0.04 else rng.randint(1, 4)) + (rng.random() < 0.02)
        else:
            n = 0 if rng.random() < 0.04 else rng.randint(1, rng.choice((3, 2 * shards, 3 * shards + 2)))
        shape.append(min(n, max(room, shards)))
        room //= max(n, 1)
    return tuple(shape)


def random_layout_case(rng: random.Random, most_devices: int = 0, most_elements: int = 0) -> LayoutCase:
    """Up to some 24 devices and 200 elements; one in 64 is larger."""
    large = rng.random() < 1 / 64
    mesh_shape = random_mesh(rng, most_devices or (120 if large else 24))
    names = NAMES[: len(mesh_shape)]
    specs = random_specs(rng, names, rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))
    free = [name for name in names if not any(name in spec for spec in specs)]
    rule = rng.choice(RULES)
    sizes = dict(zip(names, mesh_shape, strict=True))
    return LayoutCase(
        mesh_shape,
        random_devices(rng, math.prod(mesh_shape)),
        specs,
        tuple(name for name in free if rng.random() < 0.2),
        random_shape(rng, specs, sizes, rule, most_elements or (2000 if large else 200)),
        rule,
    )
