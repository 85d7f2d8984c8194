"""The moves of each op of a computation, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._dtypes import itemsize_of
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..reshard.kinds import CollectiveStep
from .flow import Flow, FlowNode, Specs
from .given import Policy
from .move import Move, move_between
from .shift import missing_elements, shifting_dims

__all__ = ["AxisSizes", "Moves"]


class AxisSizes(dict[str, int]):
    """The sizes of axes, and of sub-axes such as `tp:(1)4`."""

    def __missing__(self, name: str) -> int:
        return int(name.rpartition(")")[2])


class _Change(NamedTuple):
    """One tensor of an op, with the axes that cut it before and after."""

    node: FlowNode
    at: int
    operands: int
    cuts: Specs
    before: Specs
    after: Specs
    summed: tuple[str, ...] = ()
    implied: bool = False


class Moves:
    """The moves of a flow, as they come."""

    def __init__(self, flow: Flow, layouts: Sequence[Specs | None], mesh: DeviceMesh, policy: Policy) -> None:
        self._flow, self._held, self._mesh, self._shardy = flow, layouts, mesh, policy == "shardy"
        self._at_once = policy != "least"
        self._sizes = AxisSizes(zip(mesh.axis_names, mesh.shape, strict=True))
        self._layouts: dict[Any, TensorLayout] = {}
        self._known: dict[Any, Move] = {}
        #: The values that have moved already, with the layouts that they have then.
        self._there: set[tuple[int, Specs]] = set()
        self.found: list[Move] = []

    def layout(self, specs: Specs, summed: tuple[str, ...] = ()) -> TensorLayout:
        """Give the layout of these axes."""
        if (specs, summed) not in self._layouts:
            self._layouts[specs, summed] = TensorLayout(specs, self._mesh, unreduced=summed)
        return self._layouts[specs, summed]

    def add(
        self,
        node: FlowNode,
        cuts: Specs,
        local: Sequence[Specs | None],
        summed: tuple[str, ...],
        possible: Sequence[Specs | None],
    ) -> None:
        """Add what must move for one op or edge."""
        # The layouts that it computes with.
        inner = [
            specs or self._held[value] or ((),) * len(self._flow.shapes[value])
            for value, specs in zip(node.values, local, strict=True)
        ]
        operands = len(node.values) - (len(node.op.results) if node.op is not None and node.kind == "op" else 1)
        for at, value in enumerate(node.values):
            held = self._held[value] or ((),) * len(self._flow.shapes[value])
            used, of = inner[at], (node, at, operands, cuts)
            if at < operands:
                if local[at] is not None and (self._shardy or (value, used) not in self._there):
                    self._there.add((value, used))
                    self._add(_Change(*of, held, used))
                if possible[at] is not None:
                    self._add(_Change(*of, used, possible[at] or (), implied=True))
                if node.kind == "op":
                    self._shift(node, at, inner)
            elif node.kind == "op" and node.way != "constraint":
                if possible[at] is not None:
                    self._add(_Change(*of, possible[at] or (), used, implied=True))
                if summed and (self._shardy or local[at] is None):
                    self._add(_Change(*of, used, used, summed))
                if local[at] is not None:
                    self._add(_Change(*of, used, held, () if self._shardy else summed))

    def _add(self, change: _Change) -> None:
        value = change.node.values[change.at]
        shape, dtype = self._flow.shapes[value], self._flow.dtypes[value]
        is_operand = change.at < change.operands
        tensor = f"operands[{change.at}]" if is_operand else f"results[{change.at - change.operands}]"
        key = (shape, dtype, change.before, change.after, change.summed)
        if key not in self._known:
            had = self.layout(change.before, change.summed)
            goal, size = self.layout(change.after), itemsize_of(dtype)
            self._known[key] = move_between(tensor, shape, had, goal, size, at_once=self._at_once)
        move = replace(self._known[key], tensor=tensor, why=self._why(change), implied=change.implied)
        self.found.append(self._placed(move, change.node, value))

    def _shift(self, node: FlowNode, at: int, inner: Sequence[Specs]) -> None:
        """Add the rows of an operand that devices read and do not hold."""
        op, value = node.op, node.values[at]
        assert op is not None
        dims = shifting_dims(op, at, len(inner[at]))
        axes = tuple(dict.fromkeys(axis for dim in dims for axis in inner[at][dim]))
        if not axes:
            return
        shapes = [self._flow.shapes[value] for value in node.values]
        count = missing_elements(op, shapes, inner, self._sizes, at)
        if count:
            dtype, layout = self._flow.dtypes[value], self.layout(inner[at])
            step = CollectiveStep("collective-permute", axes, layout=layout, bytes=count * itemsize_of(dtype))
            why = "Each device reads rows that its neighbours have."
            move = Move(f"operands[{at}]", shapes[at], layout, layout, (step,), why=why, implied=True)
            self.found.append(self._placed(move, node, value))

    def _placed(self, move: Move, node: FlowNode, value: int) -> Move:
        """Give the move with its value and its op."""
        name, source = ("output", "") if node.op is None else (node.op.name, node.op.source)
        origin, dtype = self._flow.origin[value], self._flow.dtypes[value]
        return replace(move, value=origin, dtype=dtype, op=name, source=source, times=node.times)

    def _why(self, change: _Change) -> str:
        """Say in a sentence why a tensor moves: the factor, and the tensor that its cut is from."""
        node, at, cuts = change.node, change.at, change.cuts
        if change.summed:
            return "Each device has addends."
        if change.implied:
            return "A part of a dim that only one side of the reshape has cannot stay cut."
        if node.op is None or node.kind != "op" or node.op.rule is None:
            what = (
                "result"
                if node.op is None
                else node.way
                if node.way == "constraint"
                else f"{node.kind} of the {node.op.name}"
            )
            return f"The {what} has another layout."
        rule = node.op.rule
        tensors = (*rule.operands, *rule.results)
        names = list(rule.kinds)
        outer, inner = change.before, change.after
        if at >= change.operands:
            outer, inner = inner, outer
        for dim, factors in enumerate(tensors[at]):
            if outer[dim] == inner[dim]:
                continue
            name = next((name for name in factors if cuts[names.index(name)]), factors[0])
            cut = cuts[names.index(name)]
            lost = [axis for axis in outer[dim] if axis not in cut]
            if lost and rule.kinds[name] in ("whole", "shift"):
                return f"The op needs dim {dim} whole."
            others = [other for other in names if other != name and {*lost} & {*cuts[names.index(other)]}]
            where = self._from(node, others[0] if others else name, at)
            if lost and others:
                return f"{'+'.join(lost)} cuts dim {dim}, and {where} too."
            if cut:
                return f"Dim {dim} is cut over {'+'.join(cut)} in {where}."
            return f"Dim {dim} is whole in {where}."
        return "Its axes are in another order."

    def _from(self, node: FlowNode, name: str, at: int) -> str:
        """Say which other tensor has a factor."""
        assert node.op is not None
        assert node.op.rule is not None
        rule = node.op.rule
        operands = len(rule.operands)
        for other, dims in enumerate((*rule.operands, *rule.results)):
            dim = next((dim for dim, factors in enumerate(dims) if name in factors), None)
            if other != at and dim is not None:
                tensor = f"operands[{other}]" if other < operands else f"results[{other - operands}]"
                return f"dim {dim} of {tensor}"
        return "no other tensor"
