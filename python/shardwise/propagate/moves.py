"""The moves of a propagated computation, op by op, with their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._dtypes import itemsize_of
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..reshard.kinds import CollectiveStep
from .flow import Flow, FlowNode, FlowValue, HowComputed, Specs, when_computed
from .given import Policy
from .move import Move, move_between
from .shift import missing_elements
from .why import Reasons

__all__ = ["AxisSizes", "Moves"]


class AxisSizes(dict[str, int]):
    """The sizes of axes, and of sub-axes such as `tp:(1)4`."""

    def __missing__(self, name: str) -> int:
        return int(name.rpartition(")")[2])


class _OpMove(NamedTuple):
    """A move that ops share which are alike, except for the number of the value and the place."""

    #: The tensor's number among the op's operands and results.
    at: int
    move: Move
    #: The layout of the moved operand, which another op may need too.
    there: Specs | None = None


class Moves:
    """The moves of computations on a mesh; ops that are alike share theirs."""

    def __init__(self, mesh: DeviceMesh, policy: Policy) -> None:
        self._mesh, self._shardy = mesh, policy == "shardy"
        self._at_once = policy != "least"
        self._sizes = AxisSizes(zip(mesh.axis_names, mesh.shape, strict=True))
        self._layouts: dict[Any, TensorLayout] = {}
        self._steps: dict[Any, Move] = {}
        self._known: dict[Any, list[_OpMove]] = {}

    def layout(self, specs: Specs, summed: tuple[str, ...] = ()) -> TensorLayout:
        """Return the layout with these axes and addends; equal ones are one object."""
        if (specs, summed) not in self._layouts:
            self._layouts[specs, summed] = TensorLayout(specs, self._mesh, unreduced=summed)
        return self._layouts[specs, summed]

    def of(self, flow: Flow) -> list[Move]:
        """Return all moves in order; by other policies than Shardy's an operand that two ops need alike moves once."""
        found: list[Move] = []
        there: set[tuple[int, Specs]] = set()
        known: dict[tuple[Any, ...], list[_OpMove]] = {}
        for first, node in flow.moving:
            _, part, op, values, times, when = node
            name, source = ("output", "") if op is None else (op.name, op.source)
            # The attributes of ops with one rule are equal; edges have none.
            key = first, name, op and id(op.rule)
            if key not in known:
                known[key] = self._alike(flow, node)
            for at, move, moved in known[key]:
                if moved is not None and not self._shardy:
                    if (values[at], moved) in there:
                        continue
                    there.add((values[at], moved))
                placed = {"value": flow.origins[values[at]], "source": source, "times": times, "when": when}
                if part == "result" and op is not None and (at or name == "case"):
                    # What a body gives moves as often as the body is computed.
                    is_loop = name == "loop"
                    placed["times"] = times * op.trips if is_loop else 1
                    placed["when"] = when if is_loop else when_computed(op, at)
                found.append(Move(**vars(move) | placed))
        return found

    def _alike(self, flow: Flow, node: FlowNode) -> list[_OpMove]:
        """Return the moves that a node shares with the nodes that are like it."""
        values, how = [flow.value(value) for value in node.values], flow.how(node)
        assert how is not None
        key = (node.part, node.op and (node.op.name, id(node.op.rule)), how, *values)
        if key not in self._known:
            self._known[key] = list(self._of_op(node, how, values))
        return self._known[key]

    def _of_op(self, node: FlowNode, how: HowComputed, values: Sequence[FlowValue]) -> Iterator[_OpMove]:
        """Yield the moves of one op or edge."""
        cuts, local, summed, possible = how
        outer = [value.specs for value in values]
        inner = [specs or held for specs, held in zip(local, outer, strict=True)]
        rule = None if node.op is None else node.op.rule
        reasons = None
        if rule is not None:
            reasons = Reasons(rule, cuts, lambda tensor, dim: f"dim {dim} of {tensor_name(node, tensor)}")

        def move(at: int, before: Specs, after: Specs, over: tuple[str, ...] = (), implied: bool = False) -> Move:
            if implied:
                why = "A part of a dim cannot stay cut if only one side of the reshape has it."
            elif reasons is None:
                parts = {"output": "result", "constraint": "constraint"}
                what = parts.get(node.part) or f"{node.part} of the {node.op.name if node.op else 'computation'}"
                why = f"The {what} has another layout."
            else:
                why = reasons.summed() if over else reasons.moved(at, before, after)
            had, goal = self.layout(before, over), self.layout(after)
            return replace(self._priced(node, at, values[at], had, goal), why=why, implied=implied)

        for at, (held, used) in enumerate(zip(outer, inner, strict=True)):
            can = possible[at]
            if at < node.operands:
                if local[at] is not None:
                    yield _OpMove(at, move(at, held, used), used)
                if can is not None:
                    yield _OpMove(at, move(at, used, can, implied=True))
                if node.part == "op":
                    yield from self._shifted(node, at, values, inner)
            elif node.part == "op":
                if can is not None:
                    yield _OpMove(at, move(at, can, used, implied=True))
                if summed and (self._shardy or local[at] is None):
                    yield _OpMove(at, move(at, used, used, summed))
                if local[at] is not None:
                    yield _OpMove(at, move(at, used, held, () if self._shardy else summed))

    def _priced(self, node: FlowNode, at: int, value: FlowValue, had: TensorLayout, goal: TensorLayout) -> Move:
        key = (value.shape, value.dtype, had, goal)
        if key not in self._steps:
            at_once, size = self._at_once, itemsize_of(value.dtype)
            self._steps[key] = move_between("", value.shape, had, goal, size, at_once=at_once)
        op = "output" if node.op is None else node.op.name
        return replace(self._steps[key], tensor=tensor_name(node, at), op=op, dtype=value.dtype)

    def _shifted(
        self, node: FlowNode, at: int, values: Sequence[FlowValue], inner: Sequence[Specs]
    ) -> Iterator[_OpMove]:
        """Yield the move of the rows of an operand that devices read and do not hold, if there are any."""
        op, value = node.op, values[at]
        assert op is not None
        count, axes = missing_elements(op, [each.shape for each in values], inner, self._sizes, at)
        if count:
            layout = self.layout(inner[at])
            step = CollectiveStep("collective-permute", axes, layout=layout, bytes=count * itemsize_of(value.dtype))
            why = "Each device reads rows that its neighbours have."
            move = replace(self._priced(node, at, value, layout, layout), steps=(step,), why=why, implied=True)
            yield _OpMove(at, move)


def tensor_name(node: FlowNode, at: int) -> str:
    """Return the name of a tensor of an op, such as `"operands[0]"`."""
    return f"operands[{at}]" if at < node.operands else f"results[{at - node.operands}]"
