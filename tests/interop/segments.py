"""Dims that PyTorch's strided shards can say, for property tests: equal segments cut by axes and sub-axes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise import DeviceMesh, TensorLayout, packed
from shardwise.packed import PackedDim

__all__ = ["Segments", "random_segments"]


@dataclass(frozen=True)
class Segments:
    """A mesh, and a dim of so many equal segments, each cut by these axes into shards of so many units of rows."""

    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    outer: int
    units: int
    rows: int
    #: How the segments are written: as one part, or each as its own.
    apart: bool = False

    def mesh(self) -> DeviceMesh:
        return DeviceMesh(self.mesh_shape, list("xyz")[: len(self.mesh_shape)])

    @property
    def size(self) -> int:
        shards = math.prod(map(self.mesh().axis_size, self.axes))
        return self.outer * self.units * shards * self.rows

    def dim(self) -> PackedDim:
        units = self.size // self.outer // self.rows
        if self.apart:
            return packed.concat(
                *(packed.part((units, self.rows), axes=self.axes, name=f"t{i}") for i in range(self.outer))
            )
        return packed.concat(packed.part((self.outer, units, self.rows), cut=1, axes=self.axes))

    def layout(self) -> TensorLayout:
        return TensorLayout((self.dim(),), self.mesh())

    def rows_held(self) -> list[list[int]]:
        """The rows of every device, by the definition: the digits of a row's number, major first."""
        mesh = self.mesh()
        held: list[list[int]] = [[] for _ in range(mesh.size)]
        sizes = [mesh.axis_size(name) for name in self.axes]
        per_shard = self.units * self.rows
        for row in range(self.size):
            shard = row // per_shard % math.prod(sizes)
            digits = []
            for size in reversed(sizes):
                digits.append(shard % size)
                shard //= size
            wanted = dict(zip(self.axes, reversed(digits), strict=True))
            for device in range(mesh.size):
                if all(digit == coordinate_of(mesh, device, name) for name, digit in wanted.items()):
                    held[device].append(row)
        return held

    def snippet(self) -> str:
        return f"from tests.interop.segments import Segments\n\nlayout = {self!r}.layout()"

    def simpler(self) -> Iterator[Segments]:
        for name in ("outer", "units", "rows"):
            if getattr(self, name) > 1:
                yield replace(self, **{name: getattr(self, name) - 1})
        for i in range(len(self.axes)):
            yield replace(self, axes=self.axes[:i] + self.axes[i + 1 :])


def coordinate_of(mesh: DeviceMesh, device: int, name: str) -> int:
    """The coordinate of a device along an axis or a sub-axis, `axis:(before)size`."""
    axis, _, sub = name.partition(":(")
    coordinate = int(mesh.coordinate(device)[mesh.axis_names.index(axis)])
    if not sub:
        return coordinate
    before, size = map(int, sub.split(")"))
    return coordinate // (mesh.axis_size(axis) // before // size) % size


def random_segments(source: random.Random, **fixed: Any) -> Segments:
    """Any; about half of them name sub-axes, of which some are not all of their axes."""
    shape = tuple(source.choice((1, 2, 2, 3, 4, 4, 6)) for _ in range(source.randint(1, 3)))
    names: list[str] = []
    for name, size in zip("xyz", shape, strict=False):
        if source.random() < 0.25:
            continue
        major = source.choice([k for k in range(1, size + 1) if size % k == 0])
        if source.random() < 0.5 and 1 < major < size:
            halves = [f"{name}:(1){major}", f"{name}:({major}){size // major}"]
            names += halves if source.random() < 0.8 else halves[:1]
        else:
            names.append(name)
    source.shuffle(names)
    made = Segments(shape, tuple(names), source.choice((1, 1, 2, 3, 4)), source.randint(1, 3), source.randint(1, 3))
    return replace(made, apart=source.random() < 0.4, **fixed)
