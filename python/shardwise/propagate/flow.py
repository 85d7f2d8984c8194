"""A computation as layouts go through it: one list of ops, with edges into calls and loops and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .._core import FactorRule as CoreRule
from .._dtypes import find_dtype
from .._text import shown
from .._types import Shape
from ..computation.computation import Computation, Op
from ..computation.factor_rule import factor_rule
from ..errors import LayoutError

__all__ = ["BegunLayout", "Flow", "FlowNode"]

#: When layouts go through ops that are not elementwise: see `rust/core/propagate/whole.rs`.
_WAYS = {
    "reshape": "first",
    "transpose": "first",
    "dynamic_slice": "forward",
    "dynamic_update_slice": "forward",
    "broadcast_in_dim": "broadcast",
    "constraint": "constraint",
}

#: The ops that give a constant if their operands are constants, besides those that are elementwise.
_CONSTANT = ("broadcast_in_dim", "reshape", "slice", "constraint")

#: For each dim its axes.
Specs = tuple[tuple[str, ...], ...]


class BegunLayout(NamedTuple):
    """The layout that a value begins with: for each dim its axes, whether it may take more, and when it gets them."""

    axes: Sequence[Sequence[str]]
    open: Sequence[bool]
    priorities: Sequence[int]


@dataclass(frozen=True)
class FlowNode:
    """An op as layouts go through it, or an edge."""

    #: The op; that whose edge it is; none for the edge to a result of the computation.
    op: Op | None
    #: `"op"`, or the edge that it is: `"operand"` or `"result"` of a call or a loop, `"output"` of the computation.
    kind: str
    #: The numbers of its values: operands, then results.
    values: tuple[int, ...]
    #: The number of times that it is computed.
    times: int = 1
    way: str = "edge"


@dataclass
class Flow:
    """The values and ops of a computation and of all its bodies, one after the other.

    What is a constant, or made of constants or of one scalar, is made anew for each use, as Shardy does.
    """

    shapes: list[Shape] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    starts: list[BegunLayout | None] = field(default_factory=list)
    #: The value whose layout each has: itself, or for an input of a loop's body that of the loop's result.
    same: list[int] = field(default_factory=list)
    #: The number that each value has in its own computation.
    origin: list[int] = field(default_factory=list)
    nodes: list[FlowNode] = field(default_factory=list)
    outputs: list[FlowNode] = field(default_factory=list)
    #: The ops that make constants, and their operands, by value.
    constants: dict[int, tuple[Op, list[int]]] = field(default_factory=dict)
    #: For the first node of a loop's body the place after its last, the values that the body takes, and how often.
    loops: dict[int, tuple[int, list[int], int]] = field(default_factory=dict)
    #: The flow's number of each value of the computation itself.
    numbers: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, computation: Computation, inputs: Sequence[BegunLayout | None], results: Sequence[BegunLayout | None]
    ) -> Flow:
        """Make one, of the layouts of inputs and results that are given."""
        flow = cls()
        taken = [flow._value(computation, number) for number in range(computation.inputs)]
        flow.starts[:] = inputs
        made = flow._body(computation, taken, 1, flow.numbers)
        flow._constrain()
        for value, start in zip(made, results, strict=True):
            result = flow._new(flow.shapes[value], flow.dtypes[value], flow.origin[value])
            flow.starts[result] = start
            flow.outputs.append(FlowNode(None, "output", (value, result)))
        return flow

    def numpy(self, value: int) -> np.dtype[Any]:
        """Give the dtype of a value."""
        dtype = find_dtype(self.dtypes[value])
        if dtype is None:
            raise LayoutError(f"value {value} is of dtype {shown(self.dtypes[value])}, which numpy does not have")
        return dtype.numpy()

    def core(self) -> tuple[list[Any], list[Any]]:
        """Give ops and results as the core takes them."""

        def rule(node: FlowNode) -> CoreRule:
            if node.op is not None and node.op.rule is not None and node.kind == "op":
                return node.op.rule._core
            return _identity(self.shapes[node.values[0]], len(node.values) - 1)

        def listed(nodes: list[FlowNode]) -> list[Any]:
            return [(rule(node), node.way, list(node.values)) for node in nodes]

        return listed(self.nodes), listed(self.outputs)

    def _new(self, shape: Shape, dtype: str, origin: int) -> int:
        self.origin.append(origin)
        self.shapes.append(shape)
        self.dtypes.append(dtype)
        self.starts.append(None)
        self.same.append(len(self.same))
        return len(self.same) - 1

    def _value(self, computation: Computation, number: int) -> int:
        return self._new(computation.shapes[number], computation.dtypes[number], number)

    def _body(
        self, computation: Computation, inputs: Sequence[int], times: int, numbers: dict[int, int] | None = None
    ) -> list[int]:
        """Add the ops of a computation whose inputs have these numbers; give those of its results."""
        split = _Split(computation)
        found = dict(enumerate(inputs))
        for op, operands, results in split.ops:
            taken = [found[operand] for operand in operands]
            made = [self._value(computation, result) for result in op.results]
            self._op(op, taken, made, times)
            found.update(zip(results, made, strict=True))
        if numbers is not None:
            # Of several copies of a value the last is its own.
            numbers |= {split.original.get(number, number): value for number, value in found.items()}
        return [found[output] for output in split.outputs]

    def _op(self, op: Op, operands: list[int], results: list[int], times: int) -> None:
        if op.name in ("call", "barrier"):
            if op.body is not None:
                inner = [self._value(op.body, number) for number in range(op.body.inputs)]
                for pair in zip(operands, inner, strict=True):
                    self.nodes.append(FlowNode(op, "operand", pair, times))
                inner = self._body(op.body, inner, times)
            else:
                inner = operands
            for pair in zip(inner, results, strict=True):
                self.nodes.append(FlowNode(op, "result", pair, times))
        elif op.name == "loop":
            assert op.body is not None
            inner = [self._value(op.body, number) for number in range(op.body.inputs)]
            for value, result in zip(inner, results, strict=True):
                self.same[value] = result
            first = len(self.nodes)
            made = self._body(op.body, inner, times * op.trips)
            self.loops[first] = (len(self.nodes), inner, op.trips)
            for edge in zip(operands, made, results, strict=True):
                self.nodes.append(FlowNode(op, "result", edge, times))
        elif op.name in ("constant", "iota"):
            self.constants[results[0]] = (op, operands)
        else:
            way = _WAYS.get(op.name) or ("alike" if op.is_elementwise else "later")
            self.nodes.append(FlowNode(op, "op", (*operands, *results), times, way))
            if op.name == "constraint":
                may_grow = op.attributes.get("open", ())
                rank = range(len(self.shapes[operands[0]]))
                self.starts[results[0]] = BegunLayout(
                    [list(axes or ()) for axes in op.attributes["axes"]],
                    [dim in may_grow for dim in rank],
                    [0 for _ in rank],
                )

    def _constrain(self) -> None:
        """Give the operand of a constraint its layout too, if it is free and no other constraint differs."""
        users: dict[int, list[FlowNode]] = {}
        for node in self.nodes:
            if node.way == "constraint":
                users.setdefault(node.values[0], []).append(node)
        edges = {node.values[-1] for node in self.nodes if node.way == "edge"}
        for operand, constraints in users.items():
            start = self.starts[constraints[0].values[1]]
            alike = all(self.starts[node.values[1]] == start for node in constraints)
            if self.starts[operand] is None and start is not None and alike and not any(start.open):
                if operand in edges or self.same[operand] != operand:
                    self._take_over(constraints[0])
                else:
                    self.starts[operand] = start

    def _take_over(self, constraint: FlowNode) -> None:
        """Let all others that use the operand of a constraint use its result."""
        operand, result = constraint.values
        at = self.nodes.index(constraint)
        del self.nodes[at]
        makers = [number for number, node in enumerate(self.nodes) if node.values[-1] == operand and node.way == "edge"]
        first = makers[0] + 1 if makers else min(n for n, node in enumerate(self.nodes) if operand in node.values)
        for number, node in enumerate(self.nodes):
            if number >= first and operand in node.values[:-1]:
                values = tuple(result if value == operand else value for value in node.values[:-1])
                self.nodes[number] = FlowNode(node.op, node.kind, (*values, node.values[-1]), node.times, node.way)
        self.nodes.insert(first, constraint)


@cache
def _identity(shape: Shape, operands: int) -> CoreRule:
    return factor_rule("identity", [shape] * operands, [shape])._core


class _Split:
    """The ops of a computation, with a copy of a constant, and of what is made of constants, for each use."""

    def __init__(self, computation: Computation) -> None:
        self._shapes = computation.shapes
        self._next = len(computation.shapes)
        #: The value of which each copy is one.
        self.original: dict[int, int] = {}
        self._makers: dict[int, int] = {}
        self._copied: set[int] = set()
        constants: set[int] = set()
        at: list[list[tuple[Op, Sequence[int], Sequence[int]]]] = []
        for number, op in enumerate(computation.ops):
            self._makers |= dict.fromkeys(op.results, number)
            constant = op.name in ("constant", "iota") or (
                is_preserving(op) and all(self._makers.get(value, -1) in constants for value in op.operands)
            )
            if constant:
                constants.add(number)
            spread = op.name == "broadcast_in_dim" and not self._shapes[op.operands[0]]
            if constant or spread:
                self._copied.add(number)
                at.append([(op, op.operands, op.results)])
                continue
            at.append([(op, [self._taken(value, at, computation) for value in op.operands], op.results)])
        self.outputs = [self._taken(value, at, computation) for value in computation.outputs]
        used = set(self.outputs)
        kept: list[tuple[Op, Sequence[int], Sequence[int]]] = []
        for number in reversed(range(len(at))):
            for op, operands, results in reversed(at[number][1:] + at[number][:1]):
                # What is copied for each use is not there itself, unless a scalar.
                if number not in self._copied or any(result in used for result in results):
                    kept.append((op, operands, results))
                    used.update(operands)
        self.ops = kept[::-1]

    def _taken(self, value: int, at: list[Any], computation: Computation) -> int:
        """Give the number of a new copy of a value, or its own if it is not copied."""
        if self._makers.get(value, -1) not in self._copied:
            return value
        return self._copy(value, at, computation, {})

    def _copy(self, value: int, at: list[Any], computation: Computation, copies: dict[int, int]) -> int:
        if value not in self._makers or not self._shapes[value] or value in copies:
            return copies.get(value, value)
        number = self._makers[value]
        op = computation.ops[number]
        operands = [self._copy(operand, at, computation, copies) for operand in op.operands]
        for result in op.results:
            copies[result] = self._next
            self.original[self._next] = result
            self._next += 1
        at[number].append((op, operands, [copies[result] for result in op.results]))
        return copies[value]


def is_preserving(op: Op) -> bool:
    """Say whether an op gives constants for constants."""
    if op.name == "call":
        assert op.body is not None
        return all(inner.name in ("constant", "iota") or is_preserving(inner) for inner in op.body.ops)
    return op.is_elementwise or op.name in _CONSTANT
