"""A computation as layouts go through it, with the layouts of all its values and how its ops compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._core import Propagated
from .._fork import cached_property
from .._types import Shape
from ..computation.computation import Computation, Op

__all__ = ["Flow", "FlowNode", "FlowValue", "HowComputed", "Specs", "op_at", "when_computed"]

#: For each dim its axes.
Specs = tuple[tuple[str, ...], ...]


class FlowValue(NamedTuple):
    """A value: of the computation, or of a body, or a copy of a constant for one of its uses."""

    shape: Shape
    dtype: str
    #: The number that it has in its own computation.
    origin: int
    #: For each dim its axes; none where nothing cuts it.
    layout: Specs | None

    @property
    def specs(self) -> Specs:
        """For each dim its axes."""
        return ((),) * len(self.shape) if self.layout is None else self.layout


class HowComputed(NamedTuple):
    """The cuts and layouts with which an op computes."""

    #: The axes that cut each factor of its rule.
    cuts: Specs
    #: The layout of each operand and result while it computes, where it is another than its value has.
    local: tuple[Specs | None, ...]
    #: The axes over which its results are addends then.
    summed: tuple[str, ...]
    #: For a reshape the layouts with which a device can compute, where they are not those.
    possible: tuple[Specs | None, ...]


class FlowNode(NamedTuple):
    """An op as layouts go through it, or an edge."""

    #: `"op"`, `"constraint"`, or the edge that it is: `"operand"` or `"result"` of a call or a loop, `"output"` of all.
    part: str
    #: The op; that whose edge it is; none for the edge to a result of the computation.
    op: Op | None
    #: The numbers of its values: operands, then results.
    values: tuple[int, ...]
    #: The number of times that it is computed: each time that it is, where `when` says when.
    times: int
    #: The innermost body that is computed as often as only the run tells; none for most.
    when: str
    #: The way in which it computes; none where nothing cuts any value.
    how: HowComputed | None

    @property
    def operands(self) -> int:
        """The number of values that are operands."""
        return len(self.values) - (len(self.op.results) if self.op is not None and self.part == "op" else 1)


class MovingNode(NamedTuple):
    """An op or an edge for which something moves, or may."""

    number: int
    #: The number of the first whose values have the same layouts and dtypes, and which computes in the same way.
    first: int
    op: Op | None
    values: list[int]
    #: The numbers that they have in their own computations.
    origins: list[int]
    times: int
    when: str


class FlowBodies(NamedTuple):
    """The bodies of a loop or a case: nodes one after the other."""

    #: The first node, and the place after the last of each body, where the edges to the results are.
    bounds: list[int]
    #: The values that the bodies of a loop take, those of its test first.
    inner: list[int]
    #: The number of times that a loop is computed, if it is known.
    trips: int | None
    #: The value that says whether a loop goes on, or which body of a case is computed.
    decides: int | None


class Flow:
    """The values and ops of a computation and of all its bodies, one after the other.

    What is a constant, or made of constants or of one scalar, is made anew for each use, as Shardy does.
    """

    def __init__(self, computation: Computation, found: Propagated) -> None:
        self._computation, self._found = computation, found
        self._values: dict[int, FlowValue] = {}

    def value(self, number: int) -> FlowValue:
        """Return a value by its number."""
        if number not in self._values:
            self._values[number] = FlowValue(*self._found.value(number))
        return self._values[number]

    def node(self, number: int) -> FlowNode:
        """Return an op or an edge by its number."""
        part, place, values, times, how = self._found.node(number)
        op, when = op_at(self._computation, place) if place else (None, "")
        return FlowNode(part, op, values, times, when, None if how is None else HowComputed(*how))

    @property
    def moving(self) -> Iterator[MovingNode]:
        """The ops and edges for which something moves, or may."""
        for number, first, place, values, origins, times in self._found.moving:
            op, when = op_at(self._computation, place) if place else (None, "")
            yield MovingNode(number, first, op, values, origins, times, when)

    @cached_property
    def nodes(self) -> list[FlowNode]:
        """All ops and edges in order, without those to results."""
        count, last = self._found.counts
        return [self.node(number) for number in range(count - last)]

    @property
    def outputs(self) -> Iterator[FlowNode]:
        """The edges to results."""
        count, last = self._found.counts
        return map(self.node, range(count - last, count))

    @cached_property
    def constants(self) -> dict[int, tuple[Op, list[int]]]:
        """The ops that make constants, and their operands, by value."""
        made = self._found.constants
        return {value: (op_at(self._computation, place)[0], operands) for value, place, operands in made}

    @cached_property
    def bodies(self) -> list[FlowBodies]:
        """The bodies of loops and cases, those that are within others before them."""
        return [FlowBodies(*found) for found in self._found.bodies]


def op_at(computation: Computation, place: Sequence[int]) -> tuple[Op, str]:
    """Return an op by its number in the computation, then in the body of that op, and so on; and when it is done."""
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
    """Say when a body of a while or a case is computed."""
    source = f" ({op.source})" if op.source else ""
    if op.name == "while":
        return f"in each trip of while{source}"
    return f"each time that branch {body} of case{source} is taken"
