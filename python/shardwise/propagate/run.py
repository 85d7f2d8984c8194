"""Propagations carried out in numpy: each device computes with its shards."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._types import Array, Shape
from ..computation.computation import Op
from ..computation.evaluate import better_with_places
from ..computation.held import REDUCTIONS, DeviceTensors
from ..computation.run import branch_of, compute, compute_local, in_dtype, value_dtype
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..partition import Partition
from .flow import Flow, FlowNode, Specs
from .shift import Parts, RowRange, RowsRead, rows_read, spatial_dims

__all__ = ["Devices"]

#: The filling of rows that a device does not have, so that reading them gives wrong results.
_NOTHING = 12345678


class Devices:
    """The devices of a mesh, with their shards of a flow's values."""

    def __init__(self, flow: Flow, mesh: DeviceMesh) -> None:
        self._flow = flow
        self._mesh = mesh
        self._known: dict[tuple[Shape, Specs], Partition] = {}
        #: The layout and the shards of each value that is computed.
        self._held: dict[int, tuple[Specs, list[Array]]] = {}

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the whole results of whole inputs.

        Raises:
            LayoutError: as for `compute`, and if devices that should hold the same elements hold others.
        """
        for value, array in enumerate(arrays):
            self._put(value, array)
        self._nodes(0, len(self._flow.nodes), len(self._flow.bodies))
        results = []
        for node in self._flow.outputs:
            self._edge(node, node.values[0])
            results.append(self._whole(node.values[-1]))
        return results

    def _nodes(self, at: int, last: int, count: int) -> None:
        """Compute nodes up to `last`; of the first `count` bodies, the outermost that begins at a node is entered."""
        while at < last:
            begun = [number for number, body in enumerate(self._flow.bodies[:count]) if body.bounds[0] == at]
            if begun:
                at = self._bodies(begun[-1])
                continue
            node = self._flow.nodes[at]
            if node.part == "op":
                self._op(node)
            else:
                self._edge(node, node.values[0])
            at += 1

    def _bodies(self, number: int) -> int:
        """Compute a loop, or the branch of a case that is taken; return the place after its edges to results."""
        bounds, inner, trips, decides = self._flow.bodies[number]
        after = self._flow.nodes[bounds[-1] :]
        edges = list(itertools.takewhile(lambda node: node.part == "result" and node.op is after[0].op, after))
        branches = len(bounds) - 1
        if not inner:
            assert decides is not None
            branch = branch_of(self._whole(decides), branches)
            self._nodes(bounds[branch], bounds[branch + 1], number)
            for edge in edges:
                self._edge(edge, edge.values[branch])
            return bounds[-1] + len(edges)
        for edge in edges:
            self._edge(edge, edge.values[0])
        done = 0
        while done != trips:
            for value, edge in zip(inner, edges * branches, strict=True):
                self._held[value] = self._held[edge.values[-1]]
            if decides is not None:
                self._nodes(bounds[0], bounds[1], number)
                if not self._whole(decides):
                    break
            self._nodes(bounds[-2], bounds[-1], number)
            made = [self._shards(edge.values[1], self._specs(edge.values[-1])) for edge in edges]
            for edge, shards in zip(edges, made, strict=True):
                self._held[edge.values[-1]] = (self._specs(edge.values[-1]), shards)
            done += 1
        return bounds[-1] + len(edges)

    def _specs(self, value: int) -> Specs:
        return self._flow.value(value).specs

    def _partition(self, shape: Shape, specs: Specs) -> Partition:
        if (shape, specs) not in self._known:
            self._known[shape, specs] = TensorLayout(specs, self._mesh).partition(shape, uneven="ceil")
        return self._known[shape, specs]

    def _boxes(self, value: int, specs: Specs) -> list[list[RowRange]]:
        """Return the box of each device."""
        boxes = self._partition(self._flow.value(value).shape, specs).boxes().tolist()
        return [[(low, high) for low, high in box] for box in boxes]

    def _dtype(self, value: int) -> np.dtype[Any]:
        return value_dtype(self._flow.origins[value], self._flow.value(value).dtype)

    def _cut(self, value: int, whole: Array, specs: Specs) -> list[Array]:
        return self._partition(self._flow.value(value).shape, specs).views(np.asarray(whole))

    def _put(self, value: int, whole: Array) -> None:
        specs = self._specs(value)
        self._held[value] = (specs, self._cut(value, whole, specs))

    def _whole(self, value: int) -> Array:
        """Return a whole value, made of its shards; refuse replicas that differ."""
        if value not in self._held:
            op, operands = self._flow.constants[value]
            arrays, shape = [self._whole(operand) for operand in operands], self._flow.value(value).shape
            made = compute(op.name, op.attributes, arrays, [shape], op.source)
            self._put(value, in_dtype(made[0], self._dtype(value)))
        specs, shards = self._held[value]
        found: Array = np.zeros(self._flow.value(value).shape, shards[0].dtype)
        boxes = [_slices(box) for box in self._boxes(value, specs)]
        for box, shard in zip(boxes, shards, strict=True):
            found[box] = shard
        for box, shard in zip(boxes, shards, strict=True):
            part = found[box]
            if not (np.array_equal(part, shard) or np.allclose(part, shard, equal_nan=True)):
                raise LayoutError(f"value {value}: devices that should have the same elements have different ones")
        return found

    def _shards(self, value: int, specs: Specs) -> list[Array]:
        if value in self._held and self._held[value][0] == specs:
            return self._held[value][1]
        return self._cut(value, self._whole(value), specs)

    def _edge(self, node: FlowNode, source: int) -> None:
        goal = self._specs(node.values[-1])
        self._held[node.values[-1]] = (goal, self._shards(source, goal))

    def _op(self, node: FlowNode) -> None:
        op = node.op
        assert op is not None
        results = len(op.results)
        operands, made = node.values[:-results], node.values[-results:]
        none = (None,) * len(node.values)
        _, layouts, summed, possible = self._flow.how(node) or ((), none, (), none)
        used = [possible[at] or layouts[at] or self._specs(value) for at, value in enumerate(node.values)]
        taken = [self._shards(value, specs) for value, specs in zip(operands, used, strict=False)]
        shapes = [self._flow.value(value).shape for value in node.values]
        reads = [rows_read(op, shapes, at) for at in range(len(operands))]
        wholes = [self._whole(value) for value in operands] if any(reads) else []
        # Devices with the same number have the same addends.
        addends = self._partition((math.prod(self._mesh.shape),), (summed,)).shard_ids()
        every = [self._boxes(value, specs) for value, specs in zip(node.values, used, strict=True)]
        found: list[Sequence[Array]] = []
        for number, boxes in enumerate(zip(*every, strict=True)):
            has = [shards[number] for shards in taken]
            starts = [tuple(low for low, _ in box) for box in boxes[: len(operands)]]
            sizes = [tuple(high - low for low, high in box) for box in boxes[len(operands) :]]
            part = DeviceTensors(has, starts, shapes[: len(operands)], sizes, addends[number] == 0)
            if any(reads):
                found.append(self._shifted(op, wholes, reads, boxes, shapes[len(operands) :], part))
            else:
                found.append(compute_local(op.name, op.attributes, part, op.source))
        if summed:
            found = _added(op, found, list(zip(*every[len(operands) :], strict=True)), addends.tolist())
        for at, value in enumerate(made):
            shards = [in_dtype(each[at], self._dtype(value)) for each in found]
            self._held[value] = (used[len(operands) + at], shards)
            specs = self._specs(value)
            self._held[value] = (specs, self._shards(value, specs))

    def _shifted(
        self,
        op: Op,
        wholes: Sequence[Array],
        reads: Sequence[RowsRead],
        boxes: Parts,
        results: Sequence[Shape],
        part: DeviceTensors,
    ) -> list[Array]:
        """Compute with operands of their whole extents, filled in the rows that a device reads, and cut the result."""
        parts = []
        for at, array in enumerate(wholes):
            rows = [reads[at][dim](boxes) if dim in reads[at] else side for dim, side in enumerate(boxes[at])]
            dims, fill = list(reads[at]), _NOTHING
            if op.name == "convolution" and at == 1:
                # Places of a window that another device has add nothing here.
                dims, fill = spatial_dims(op.attributes["rhs_spec"]), 0
            sizes = [size if dim in dims else rows[dim][1] - rows[dim][0] for dim, size in enumerate(array.shape)]
            with np.errstate(over="ignore"):
                held = np.full(sizes, np.array(fill).astype(array.dtype), array.dtype)
            here = tuple(slice(*side) if dim in dims else slice(None) for dim, side in enumerate(rows))
            held[here] = array[_slices(rows)]
            parts.append(held)
        whole = spatial_dims(op.attributes["out_spec"]) if op.name == "convolution" else reads[0]
        shapes = [
            tuple(size if dim in whole else n for dim, (size, n) in enumerate(zip(*pair, strict=True)))
            for pair in zip(results, part.shapes, strict=True)
        ]
        has = replace(part, arrays=parts, starts=[(0,) * held.ndim for held in parts], shapes=shapes)
        every = compute_local(op.name, op.attributes, has, op.source)
        return [
            made[tuple(slice(*side) if dim in whole else slice(None) for dim, side in enumerate(box))]
            for made, box in zip(every, boxes[len(wholes) :], strict=True)
        ]


def _added(
    op: Op, found: Sequence[Sequence[Array]], boxes: Sequence[Any], addends: Sequence[int]
) -> list[Sequence[Array]]:
    """Return each device's results with the addends of its box put together, one of each kind."""
    parts: dict[str, dict[int, Sequence[Array]]] = {}
    for shards, box, addend in zip(found, boxes, addends, strict=True):
        known = parts.setdefault(str(box), {}).setdefault(addend, shards)
        if not all(np.allclose(*pair, equal_nan=True) for pair in zip(known, shards, strict=True)):
            raise LayoutError("devices that should have the same addends have different ones")
    sums = {box: functools.reduce(functools.partial(_sum, op), of_box.values()) for box, of_box in parts.items()}
    return [sums[str(box)] for box in boxes]


def _sum(op: Op, one: Sequence[Array], other: Sequence[Array]) -> Sequence[Array]:
    if op.attributes.get("with_places"):
        return better_with_places(op.attributes["body"], one, other)
    assert op.rule is not None
    return [REDUCTIONS[op.rule.reduction](*pair) for pair in zip(one, other, strict=True)]


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)
