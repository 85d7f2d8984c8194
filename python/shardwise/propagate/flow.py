"""Propagated computations as the core gives them: ops, edges into calls and loops, and the layouts of all values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._core import Propagated
from .._fork import cached_property
from .._types import Shape
from ..computation.computation import Computation, Op

__all__ = ["Flow", "FlowNode", "FlowValue", "HowComputed", "Specs", "op_at", "when_computed"]

#: The axes of each dim.
Specs = tuple[tuple[str, ...], ...]


class FlowValue(NamedTuple):
    """A value of the computation or of a body, or a copy of a constant for one of its uses."""

    shape: Shape
    dtype: str
    #: The axes of each dim; `None` where nothing cuts the value.
    layout: Specs | None

    @property
    def specs(self) -> Specs:
        """The axes of each dim, none where nothing cuts the value."""
        return ((),) * len(self.shape) if self.layout is None else self.layout


class HowComputed(NamedTuple):
    """The cuts and layouts with which an op computes."""

    #: The axes that cut each factor of the op's rule.
    cuts: Specs
    #: The layout of each operand and result while the op computes; `None` where it is the value's own.
    local: tuple[Specs | None, ...]
    #: The axes over which the results are addends.
    summed: tuple[str, ...]
    #: The layouts with which a device can compute a reshape; `None` where they are those above.
    possible: tuple[Specs | None, ...]


class FlowNode(NamedTuple):
    """An op, or an edge: from a value to another that has the same elements, across the border of a body."""

    number: int
    #: `"op"`, `"constraint"`, or the edge's kind: `"operand"` or `"result"` of a call or a loop, `"output"`.
    part: str
    #: The op, or the call or loop of an edge; `None` for the edge to a result of the computation.
    op: Op | None
    #: The numbers of its values: operands, then results.
    values: list[int]
    #: The trips of the loops around it; within a `when`, those of one trip or one branch.
    times: int
    #: The innermost while or branch around it, where only the run tells how often it is computed; else empty.
    when: str

    @property
    def operands(self) -> int:
        """The number of operands among the values."""
        return len(self.values) - (len(self.op.results) if self.op is not None and self.part == "op" else 1)


class FlowBodies(NamedTuple):
    """The bodies of a loop or a case, whose nodes follow each other."""

    #: The first node of each body, then the node after the last: the first edge to a result.
    bounds: list[int]
    #: The values that the bodies of a loop take, those of its test first.
    inner: list[int]
    #: The number of times that a loop is computed; `None` for one with a test.
    trips: int | None
    #: The value of a loop's test, or the number of a case's body.
    decides: int | None


class Flow:
    """The values and ops of a computation and of all its bodies, in one numbering.

    Constants, and what is made of constants or of one scalar, have a copy for each use, as in Shardy's passes.
    """

    def __init__(self, computation: Computation, found: Propagated) -> None:
        self._computation, self._found = computation, found
        self._values: dict[int, FlowValue] = {}

    def value(self, number: int) -> FlowValue:
        """Return the value of a number."""
        if number not in self._values:
            self._values[number] = FlowValue(*self._found.value(number))
        return self._values[number]

    def _node(self, number: int, part: str, place: list[int], values: list[int], times: int) -> FlowNode:
        op, when = op_at(self._computation, place) if place else (None, "")
        return FlowNode(number, part, op, values, times, when)

    def how(self, node: FlowNode) -> HowComputed | None:
        """Return the cuts and layouts with which an op computes; `None` where nothing cuts any value."""
        how = self._found.how(node.number)
        return None if how is None else HowComputed(*how)

    @property
    def moving(self) -> Iterator[tuple[int, FlowNode]]:
        """The ops and edges whose tensors may move, with the number of the first that moves in the same way."""
        for first, node in self._found.moving:
            yield first, self._node(*node)

    @cached_property
    def origins(self) -> list[int]:
        """The number of each value in its own computation or body."""
        return self._found.origins

    @cached_property
    def nodes(self) -> list[FlowNode]:
        """All ops and edges in order, except for those to results."""
        return [self._node(*node) for node in self._found.nodes[0]]

    @property
    def outputs(self) -> list[FlowNode]:
        """The edges to results."""
        return [self._node(*node) for node in self._found.nodes[1]]

    @cached_property
    def constants(self) -> dict[int, tuple[Op, list[int]]]:
        """The op that makes each constant, and its operands, by the constant's number."""
        made = self._found.constants
        return {value: (op_at(self._computation, place)[0], operands) for value, place, operands in made}

    @cached_property
    def bodies(self) -> list[FlowBodies]:
        """The bodies of loops and cases, inner ones first."""
        return [FlowBodies(*found) for found in self._found.bodies]


def op_at(computation: Computation, place: Sequence[int]) -> tuple[Op, str]:
    """Return the op at a place, its number in the computation, then in that op's body, and so on, and its `when`."""
    op, when = computation.ops[place[0]], ""
    rest = iter(place[1:])
    for number in rest:
        if op.name in ("while", "case"):
            when = when_computed(op, number)
            op = op.bodies[number].ops[next(rest)]
        else:
            op = op.bodies[0].ops[number]
    return op, when


def when_computed(op: Op, body: int) -> str:
    """Return the text of `Move.when` for a body of a while or a case."""
    source = f" ({op.source})" if op.source else ""
    if op.name == "while":
        return f"in each trip of while{source}"
    return f"each time that branch {body} of case{source} is taken"
