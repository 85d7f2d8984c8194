"""The moves of each op of a computation, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._dtypes import itemsize_of
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..reshard.kinds import CollectiveStep
from .flow import Flow, FlowNode, FlowValue, Specs, when_computed
from .given import Policy
from .move import Move, move_between
from .shift import missing_elements, shifting_dims

__all__ = ["AxisSizes", "Moves"]


class AxisSizes(dict[str, int]):
    """The sizes of axes, and of sub-axes such as `tp:(1)4`."""

    def __missing__(self, name: str) -> int:
        return int(name.rpartition(")")[2])


class _Change(NamedTuple):
    """One tensor of an op, with its layouts before and after."""

    node: FlowNode
    at: int
    before: Specs
    after: Specs
    summed: tuple[str, ...] = ()
    implied: bool = False


class Moves:
    """The moves of a flow, as they come."""

    def __init__(self, flow: Flow, mesh: DeviceMesh, policy: Policy) -> None:
        self._flow, self._mesh, self._shardy = flow, mesh, policy == "shardy"
        self._at_once = policy != "least"
        self._sizes = AxisSizes(zip(mesh.axis_names, mesh.shape, strict=True))
        self._layouts: dict[Any, TensorLayout] = {}
        self._known: dict[Any, Move] = {}
        self._shifted: dict[Any, int] = {}
        #: The values that have moved already, with the layouts that they have then.
        self._there: set[tuple[int, Specs]] = set()
        self._found: list[Move] = []

    def layout(self, specs: Specs, summed: tuple[str, ...] = ()) -> TensorLayout:
        """Return the layout of these axes."""
        if (specs, summed) not in self._layouts:
            self._layouts[specs, summed] = TensorLayout(specs, self._mesh, unreduced=summed)
        return self._layouts[specs, summed]

    def all(self) -> list[Move]:
        """Return all that must move, in order."""
        for node in self._flow.moving:
            self._of(node)
        return self._found

    def _of(self, node: FlowNode) -> None:
        """Add what must move for one op or edge."""
        assert node.how is not None
        _, local, summed, possible = node.how
        # The layouts that it computes with.
        outer = [self._flow.value(value).specs for value in node.values]
        inner = [specs or held for specs, held in zip(local, outer, strict=True)]
        operands = node.operands
        for at, value in enumerate(node.values):
            held, used = outer[at], inner[at]
            if at < operands:
                if local[at] is not None and (self._shardy or (value, used) not in self._there):
                    self._there.add((value, used))
                    self._add(_Change(node, at, held, used))
                if possible[at] is not None:
                    self._add(_Change(node, at, used, possible[at] or (), implied=True))
                if node.part == "op":
                    self._shift(node, at, inner)
            elif node.part == "op":
                if possible[at] is not None:
                    self._add(_Change(node, at, possible[at] or (), used, implied=True))
                if summed and (self._shardy or local[at] is None):
                    self._add(_Change(node, at, used, used, summed))
                if local[at] is not None:
                    self._add(_Change(node, at, used, held, () if self._shardy else summed))

    def _add(self, change: _Change) -> None:
        node, at = change.node, change.at
        value = self._flow.value(node.values[at])
        other = at - node.operands
        tensor = f"operands[{at}]" if other < 0 else f"results[{other}]"
        key = (value.shape, value.dtype, change.before, change.after, change.summed)
        if key not in self._known:
            had, goal = self.layout(change.before, change.summed), self.layout(change.after)
            size = itemsize_of(value.dtype)
            self._known[key] = move_between(tensor, value.shape, had, goal, size, at_once=self._at_once)
        said = {"tensor": tensor, "why": self._why(change), "implied": change.implied}
        if node.part == "result" and node.op is not None and (at or node.op.name == "case"):
            # What a body gives moves as often as the body is computed.
            is_loop = node.op.name == "loop"
            said |= (
                {"times": node.times * node.op.trips} if is_loop else {"times": 1, "when": when_computed(node.op, at)}
            )
        self._placed(self._known[key], node, value, **said)

    def _shift(self, node: FlowNode, at: int, inner: Sequence[Specs]) -> None:
        """Add the rows of an operand that devices read and do not hold."""
        op, value = node.op, self._flow.value(node.values[at])
        assert op is not None
        axes = tuple(dict.fromkeys(axis for dim in shifting_dims(op, at, value.shape) for axis in inner[at][dim]))
        if not axes:
            return
        shapes = [self._flow.value(number).shape for number in node.values]
        key = (op.name, repr(op.attributes), *shapes, *inner, at)
        if key not in self._shifted:
            self._shifted[key] = missing_elements(op, shapes, inner, self._sizes, at)
        count, layout = self._shifted[key], self.layout(inner[at])
        if count:
            step = CollectiveStep("collective-permute", axes, layout=layout, bytes=count * itemsize_of(value.dtype))
            why = "Each device reads rows that its neighbours have."
            move = Move(f"operands[{at}]", shapes[at], layout, layout, (step,), why=why, implied=True)
            self._placed(move, node, value)

    def _placed(self, move: Move, node: FlowNode, value: FlowValue, **said: Any) -> None:
        """Add the move with its value, its op and what else is said of it."""
        name, source = ("output", "") if node.op is None else (node.op.name, node.op.source)
        placed: dict[str, Any] = {"value": value.origin, "dtype": value.dtype, "op": name, "source": source}
        placed |= {"times": node.times, "when": node.when} | said
        self._found.append(Move(**vars(move) | placed))

    def _why(self, change: _Change) -> str:
        """Say in a sentence why a tensor moves: the factor, and the tensor that its cut is from."""
        node, at = change.node, change.at
        if change.summed:
            return "Each device has addends."
        if change.implied:
            return "A part of a dim that only one side of the reshape has cannot stay cut."
        if node.op is None or node.op.rule is None or node.how is None:
            parts = {"output": "result", "constraint": "constraint"}
            what = parts.get(node.part) or f"{node.part} of the {node.op.name if node.op else 'computation'}"
            return f"The {what} has another layout."
        cuts = node.how.cuts
        rule = node.op.rule
        tensors, kinds = (*rule.operands, *rule.results), rule.kinds
        names = list(kinds)
        outer, inner = change.before, change.after
        if at >= node.operands:
            outer, inner = inner, outer
        for dim, factors in enumerate(tensors[at]):
            if outer[dim] == inner[dim]:
                continue
            name = next((name for name in factors if cuts[names.index(name)]), factors[0])
            cut = cuts[names.index(name)]
            lost = [axis for axis in outer[dim] if axis not in cut]
            if lost and kinds[name] in ("whole", "shift"):
                return f"The op needs dim {dim} whole."
            others = [other for other in names if other != name and {*lost} & {*cuts[names.index(other)]}]
            where = _holder(tensors, node.operands, others[0] if others else name, at)
            if lost and others:
                return f"{'+'.join(lost)} cuts dim {dim}, and {where} too."
            if cut:
                return f"Dim {dim} is cut over {'+'.join(cut)} in {where}."
            return f"Dim {dim} is whole in {where}."
        return "Its axes are in another order."


def _holder(tensors: Sequence[Sequence[Sequence[str]]], operands: int, name: str, at: int) -> str:
    """Say which other tensor has a factor."""
    for other, dims in enumerate(tensors):
        dim = next((dim for dim, factors in enumerate(dims) if name in factors), None)
        if other != at and dim is not None:
            tensor = f"operands[{other}]" if other < operands else f"results[{other - operands}]"
            return f"dim {dim} of {tensor}"
    return "no other tensor"
