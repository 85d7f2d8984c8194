"""A computation computed by devices, each with its shards, in numpy: what a propagation says, done."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._types import Array, Shape
from ..computation.computation import Op, branch_of, value_dtype
from ..computation.evaluate import REDUCTIONS, DeviceTensors, compute, compute_local
from ..errors import LayoutError
from ..mesh import DeviceMesh
from .flow import Flow, FlowNode, Specs
from .moves import AxisSizes
from .shift import rows_held, rows_read, shifting_dims

__all__ = ["Devices"]

#: The number that stands where a device has nothing: if it is read, the results are wrong.
_NOTHING = 12345678


class Devices:
    """The devices of a mesh with their shards of the values of a flow."""

    def __init__(self, flow: Flow, mesh: DeviceMesh) -> None:
        self._flow = flow
        self._sizes = AxisSizes(zip(mesh.axis_names, mesh.shape, strict=True))
        self._places = [_place(mesh, number) for number in range(mesh.size)]
        self._axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        self._known: dict[tuple[Shape, Specs], list[list[tuple[int, int]]]] = {}
        #: The layout of each value that is there, and the shard of each device.
        self._held: dict[int, tuple[Specs, list[Array]]] = {}

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Compute the results of whole arrays for the inputs."""
        for value, array in enumerate(arrays):
            self._put(value, array)
        self._nodes(0, len(self._flow.nodes), len(self._flow.bodies))
        results = []
        for node in self._flow.outputs:
            self._edge(node, node.values[0])
            results.append(self._whole(node.values[-1]))
        return results

    def _nodes(self, at: int, last: int, count: int) -> None:
        """Compute nodes up to the last; of the bodies that begin at one, the outermost of the first `count`."""
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
        """Compute the bodies of a loop or a case as often as they are; give the place after their edges."""
        bounds, inner, trips, decides = self._flow.bodies[number]
        edges: list[FlowNode] = []
        first = bounds[-1]
        while first + len(edges) < len(self._flow.nodes) and (not edges or self._follows(edges[0], first + len(edges))):
            edges.append(self._flow.nodes[first + len(edges)])
        branches = len(bounds) - 1
        if not inner:
            assert decides is not None
            branch = branch_of(self._whole(decides), branches)
            self._nodes(bounds[branch], bounds[branch + 1], number)
            for edge in edges:
                self._edge(edge, edge.values[branch])
            return first + len(edges)
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
        return first + len(edges)

    def _follows(self, edge: FlowNode, at: int) -> bool:
        """Say whether a node is another edge of the same op."""
        node = self._flow.nodes[at]
        return node.part == "result" and node.op is edge.op

    def _specs(self, value: int) -> Specs:
        return self._flow.value(value).specs

    def _boxes(self, value: int, specs: Specs) -> list[list[tuple[int, int]]]:
        """Return the box of each device."""
        shape = self._flow.value(value).shape
        if (shape, specs) not in self._known:
            pairs = list(zip(shape, specs, strict=True))
            self._known[shape, specs] = [
                [rows_held(size, spec, self._sizes, self._at(spec, place)) for size, spec in pairs]
                for place in self._places
            ]
        return self._known[shape, specs]

    def _at(self, spec: Sequence[str], place: dict[str, int]) -> dict[str, int]:
        """Return the coordinates of axes and sub-axes."""
        found = {}
        for name in spec:
            axis, _, part = name.partition(":(")
            if part and axis in self._axes:
                before, size = (int(each) for each in part.split(")"))
                found[name] = place[axis] // (self._axes[axis] // (before * size)) % size
            else:
                found[name] = place[name]
        return found

    def _dtype(self, value: int) -> np.dtype[Any]:
        return value_dtype(self._flow.value(value).origin, self._flow.value(value).dtype)

    def _cut(self, value: int, whole: Array, specs: Specs) -> list[Array]:
        return [whole[_slices(box)] for box in self._boxes(value, specs)]

    def _put(self, value: int, whole: Array) -> None:
        specs = self._specs(value)
        self._held[value] = (specs, self._cut(value, whole, specs))

    def _whole(self, value: int) -> Array:
        """Put a value together; all devices that have an element have the same."""
        if value not in self._held:
            op, operands = self._flow.constants[value]
            made = compute(
                op.name,
                op.attributes,
                [self._whole(operand) for operand in operands],
                [self._flow.value(value).shape],
                op.source,
            )
            self._put(value, made[0].astype(self._dtype(value)))
        specs, shards = self._held[value]
        found: Array = np.zeros(self._flow.value(value).shape, shards[0].dtype)
        boxes = [_slices(box) for box in self._boxes(value, specs)]
        for box, shard in zip(boxes, shards, strict=True):
            found[box] = shard
        for box, shard in zip(boxes, shards, strict=True):
            part = found[box]
            if not (np.array_equal(part, shard) or np.allclose(part, shard, equal_nan=True)):
                raise LayoutError(f"value {value}: devices that should have the same elements have others")
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
        _, layouts, summed, possible = node.how or ((), none, (), none)
        used = [possible[at] or layouts[at] or self._specs(value) for at, value in enumerate(node.values)]
        taken = [self._shards(value, specs) for value, specs in zip(operands, used, strict=False)]
        shapes = [self._flow.value(value).shape for value in node.values]
        moving = [shifting_dims(op, at, shapes[at]) for at in range(len(operands))]
        wholes = [self._whole(value) for value in operands] if any(moving) else []
        found: list[list[Array]] = []
        every = [self._boxes(value, specs) for value, specs in zip(node.values, used, strict=True)]
        for number, (place, *boxes) in enumerate(zip(self._places, *every, strict=True)):
            has = [shards[number] for shards in taken]
            first = all(at == 0 for at in self._at(summed, place).values())
            if any(moving):
                found.append(self._shifted(op, wholes, moving, shapes, boxes, first))
                continue
            starts = [tuple(low for low, _ in box) for box in boxes[: len(operands)]]
            sizes = [tuple(high - low for low, high in box) for box in boxes[len(operands) :]]
            found.append(
                compute_local(
                    op.name, op.attributes, DeviceTensors(has, starts, shapes[: len(operands)], sizes, first), op.source
                )
            )
        for at, value in enumerate(made):
            shards = [each[at].astype(self._dtype(value), copy=False) for each in found]
            if summed:
                assert op.rule is not None
                shards = self._added(shards, summed, op.rule.reduction)
            self._held[value] = (used[len(operands) + at], shards)
            specs = self._specs(value)
            self._held[value] = (specs, self._shards(value, specs))

    def _shifted(
        self,
        op: Op,
        wholes: Sequence[Array],
        moving: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[int]],
        boxes: Sequence[list[tuple[int, int]]],
        first: bool,
    ) -> list[Array]:
        """Compute on whole dims of which a device has the rows that it reads, and keep its part of the result."""
        parts = []
        whole_dims = set(range(len(shapes[-1]))) if op.name != "convolution" else None
        kept: list[Any] = [slice(None)] * len(shapes[-1])
        for at, array in enumerate(wholes):
            rank = len(shapes[at])
            rows = [
                rows_read(op, shapes, at, dim, boxes) if dim in moving[at] else boxes[at][dim] for dim in range(rank)
            ]
            dims = list(moving[at])
            if op.name == "convolution" and at == 1:
                dims = [dim for dim, name in enumerate(op.attributes["rhs_spec"]) if isinstance(name, int)]
            # Places of a window that another device has add nothing here.
            fill = 0 if op.name == "convolution" and at == 1 else _NOTHING
            part = np.full(
                [size if dim in dims else rows[dim][1] - rows[dim][0] for dim, size in enumerate(shapes[at])],
                fill,
                array.dtype,
            )
            part[tuple(slice(*rows[dim]) if dim in dims else slice(None) for dim in range(rank))] = array[_slices(rows)]
            parts.append(part)
        shape = [high - low for low, high in boxes[-1]]
        shifted = (
            [dim for dim, name in enumerate(op.attributes["out_spec"]) if isinstance(name, int)]
            if whole_dims is None
            else moving[0]
        )
        for dim in shifted:
            kept[dim], shape[dim] = slice(*boxes[-1][dim]), shapes[-1][dim]
        starts = [(0,) * part.ndim for part in parts]
        has = DeviceTensors(parts, starts, [tuple(sizes) for sizes in shapes], [tuple(shape)] * len(op.results), first)
        return [made[tuple(kept)] for made in compute_local(op.name, op.attributes, has, op.source)]

    def _added(self, shards: list[Array], axes: Sequence[str], reduction: str) -> list[Array]:
        groups: dict[Any, list[int]] = {}
        for number, place in enumerate(self._places):
            rest = {axis: at for axis, at in place.items() if not any(name.split(":(")[0] == axis for name in axes)}
            others = tuple(self._rest(name, place) for name in axes)
            groups.setdefault((tuple(rest.items()), others), []).append(number)
        found = list(shards)
        for numbers in groups.values():
            total = functools.reduce(REDUCTIONS[reduction], [shards[number] for number in numbers])
            for number in numbers:
                found[number] = total
        return found

    def _rest(self, name: str, place: dict[str, int]) -> tuple[int, ...]:
        """Return the coordinates along an axis besides those of a part of it."""
        axis, _, part = name.partition(":(")
        if not part:
            return ()
        before, size = (int(each) for each in part.split(")"))
        after = self._axes[axis] // (before * size)
        return place[axis] // (after * size), place[axis] % after


def _place(mesh: DeviceMesh, number: int) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.coordinate(number), strict=True))


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)
