"""The layouts of all values of a computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._arguments import instance
from .._core import propagated
from .._text import shown
from ..computation.computation import Computation
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from .given import GivenAxes, layout_of, mesh_of, specs_of
from .move import axes_json

__all__ = ["Propagation", "propagate"]

#: When layouts go through ops that are not elementwise: see `rust/core/propagate/whole.rs`.
_WAYS = {
    "reshape": "first",
    "transpose": "first",
    "dynamic_slice": "forward",
    "dynamic_update_slice": "forward",
    "broadcast_in_dim": "broadcast",
}


@dataclass(frozen=True)
class Propagation:
    """The layouts of all values of a computation; `propagate` makes one."""

    #: The computation.
    computation: Computation
    #: The layout of each value, by its number; `None` where no axis reaches. A scalar that is broadcast is made anew
    #: for each use, as Shardy has it: its layout is that of the last.
    layouts: tuple[TensorLayout | None, ...]

    def to_json(self) -> dict[str, Any]:
        """Give the layouts as JSON has them.

        >>> tanh = {"op": "tanh", "in": [0], "out": [[(4,), "float32"]]}
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> propagate(Computation([[(4,), "float32"]], [tanh], [1]), [("x",)], mesh=mesh).to_json()["layouts"][1]
        {'axes': [['x']], 'unreduced': []}
        """
        return {"layouts": [None if layout is None else axes_json(layout) for layout in self.layouts]}


def propagate(
    computation: Computation,
    layouts: Sequence[TensorLayout | GivenAxes | None],
    *,
    mesh: DeviceMesh | None = None,
    open: Sequence[int] = (),  # noqa: A002
) -> Propagation:
    """Give the layouts of all values of a computation, as Shardy's passes, and with them JAX, give them.

    Args:
        computation: the computation.
        layouts: the layout of each input: a `TensorLayout`, its axes, or `None` for one that is free.
        mesh: the mesh, if none of the layouts has one.
        open: the numbers of inputs whose layout may take more axes.

    Raises:
        LayoutError: if layouts do not fit the inputs.

    >>> dot = {"op": "dot_general", "in": [0, 1], "out": [[(8, 16), "float32"]], "attrs": {
    ...     "lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}}
    >>> tanh = {"op": "tanh", "in": [2], "out": [[(8, 16), "float32"]]}
    >>> computation = Computation([[(8, 4), "float32"], [(4, 16), "float32"]], [dot, tanh], [3])
    >>> found = propagate(computation, [("x", None), (None, "y")], mesh=DeviceMesh((2, 4), ("x", "y")))
    >>> found.layouts[3].axes
    ('x', 'y')
    """
    instance("computation", computation, Computation)
    if len(layouts) != computation.inputs:
        raise LayoutError(f"layouts has {len(layouts)} entries for {computation.inputs} inputs")
    named = {f"layouts[{number}]": layout for number, layout in enumerate(layouts)}
    where = mesh_of(mesh, named)
    shapes = computation.shapes
    given = [layout_of(name, layout, where, len(shapes[at])) for at, (name, layout) in enumerate(named.items())]
    for at, layout in enumerate(given):
        if layout is not None and layout.unreduced:
            raise LayoutError(f"layouts[{at}] is unreduced over {', '.join(layout.unreduced)}; reduce it first")
    wrong = [number for number in open if number not in range(len(given)) or given[number] is None]
    if wrong:
        raise LayoutError(f"open is {shown(list(open))}; {wrong[0]} is not an input with a layout")
    starts = [None if layout is None else (specs_of(layout), at in open) for at, layout in enumerate(given)]
    nodes, outputs, copies = _split(computation)
    every = [*shapes, *(shapes[number] for number in copies)]
    starts += [None] * (len(every) - len(starts))
    found = propagated(where.core, every, starts, computation.inputs, nodes, outputs)
    # Of several copies the last is the value's.
    last = {number: len(shapes) + at for at, number in enumerate(copies)}
    specs = [found[last.get(number, number)] for number in range(len(shapes))]
    return Propagation(computation, tuple(None if each is None else TensorLayout(each, where) for each in specs))


#: An op for the core: its rule, when layouts go through it, the numbers of its values.
_OpNode = tuple[Any, str, list[int]]


def _split(computation: Computation) -> tuple[list[_OpNode], list[int], list[int]]:
    """Give the ops for the core, with a copy of a broadcast scalar for each use, and the numbers of what is copied."""
    copies: list[int] = []
    nodes: list[list[_OpNode]] = []
    broadcasts: dict[int, list[_OpNode]] = {}

    def taken(number: int) -> int:
        if number not in broadcasts:
            return number
        rule, way, values = broadcasts[number][0]
        copies.append(number)
        copy = len(computation.shapes) + len(copies) - 1
        broadcasts[number].append((rule, way, [*values[:-1], copy]))
        return copy

    for op in computation.ops:
        way = _WAYS.get(op.name) or ("alike" if op.is_elementwise else "later")
        nodes.append([(op.rule._core, way, [*map(taken, op.operands), *op.results])])
        if op.name == "broadcast_in_dim" and not computation.shapes[op.operands[0]]:
            broadcasts[op.results[0]] = nodes[-1]
    outputs = [taken(number) for number in computation.outputs]
    # One that has copies is not there itself.
    return [node for each in nodes for node in (each[1:] or each)], outputs, copies
