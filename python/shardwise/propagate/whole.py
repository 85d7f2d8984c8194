"""Propagation: the layouts of all values of a computation from those of some inputs, and the moves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._arguments import instance, integer, integers_of
from .._atomic import replace_file
from .._core import Propagated, propagated
from .._drawn import Drawn
from .._dtypes import itemsize_of
from .._fork import cached_property, importing
from .._text import bytes_text, counted, shown
from ..computation.computation import Computation
from ..computation.run import checked_inputs
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from .flow import Flow, Specs, op_at
from .given import GivenAxes, Policy, check_policy, layout_of, mesh_of, mesh_text, specs_of
from .move import Move, axes_json
from .moves import Moves
from .run import Devices

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..show.picture import Picture

__all__ = ["Propagation", "Start", "propagate"]

#: The axes of each dim at the beginning, true for dims that may take more, and the dims' priorities.
BegunLayout = tuple[Specs, list[bool], list[int]]


@dataclass(frozen=True)
class Start:
    """A layout of an input or a result, with the dims that more axes may cut, and with priorities, as in Shardy.

    >>> from shardwise.computation import Computation
    >>> add = {"op": "add", "in": [0, 1], "out": [[(4, 8), "float32"]]}
    >>> computation = Computation([[(4, 8), "float32"]] * 2, [add], [2])
    >>> given = [Start(("x", None), open=[1]), (None, "y")]
    >>> propagate(computation, given, mesh=DeviceMesh((2, 4), ("x", "y"))).layouts[0].axes
    ('x', 'y')
    """

    layout: TensorLayout | GivenAxes
    #: The dims that may get more axes; `True` for all.
    open: bool | Sequence[int] = ()
    #: A number from 0 for each dim: axes of 0 spread first, those of the next number when nothing changes any more.
    priorities: Sequence[int] = ()


@dataclass(frozen=True)
class Propagation(Drawn):
    """The layouts of all values of a computation, and the moves; `propagate` makes one.

    In a notebook it shows its picture: bytes by collective and by line of the source.
    """

    computation: Computation
    mesh: DeviceMesh
    policy: Policy
    _found: Propagated = field(repr=False, compare=False)
    _moves: Moves = field(repr=False, compare=False)

    @property
    def layouts(self) -> tuple[TensorLayout | None, ...]:
        """The layout of each value, by its number; `None` if no axis reaches it.

        Constants and broadcast scalars have a copy for each use, as in Shardy; the layout is that of the last copy.
        """
        return self._held[0]

    @property
    def results(self) -> tuple[TensorLayout | None, ...]:
        """The layout of each result; `None` if no axis reaches it."""
        return self._held[1]

    @cached_property
    def in_order(self) -> tuple[Move, ...]:
        """All moves in the order of the ops, including those with nothing to receive, such as slices."""
        return tuple(self._moves.of(self._flow))

    @cached_property
    def _flow(self) -> Flow:
        return Flow(self.computation, self._found)

    @cached_property
    def _held(self) -> tuple[tuple[TensorLayout | None, ...], tuple[TensorLayout | None, ...]]:
        def layout(number: int | None) -> TensorLayout | None:
            specs = None if number is None else self._flow.value(number).layout
            return None if specs is None else self._moves.layout(specs)

        values, results = self._found.numbers
        return tuple(map(layout, values)), tuple(map(layout, results))

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves in which a device receives something, the most bytes first."""
        return tuple(sorted((move for move in self.in_order if move.bytes), key=lambda move: -move.bytes_in_all))

    @property
    def bytes_received(self) -> int:
        """The bytes that each device receives, loops of known length counted in full, except those of `bytes_when`."""
        return sum(move.bytes_in_all for move in self.in_order if not move.when)

    @property
    def bytes_when(self) -> dict[str, int]:
        """The bytes that each device receives in one trip of each while, and in each branch of a case.

        Only the run tells how often these are computed.
        """
        found: dict[str, int] = {}
        for move in self.moves:
            if move.when:
                found[move.when] = found.get(move.when, 0) + move.bytes_in_all
        return found

    @property
    def _bytes(self) -> int:
        """The bytes of all moves, with one trip of each while, and each branch once."""
        return sum(move.bytes_in_all for move in self.in_order)

    def explain(self, most: int = 10) -> str:
        """Return the `most` moves with the most bytes in words, with their lines of the source and their reasons.

        >>> dot = {"op": "dot_general", "in": [0, 1], "out": [[(8, 16), "float32"]], "source": "a.py:7", "attrs": {
        ...     "lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}}
        >>> computation = Computation([[(8, 4), "float32"], [(4, 16), "float32"]], [dot], [2])
        >>> found = propagate(computation, [(None, "x"), ("x", None)], mesh=DeviceMesh((2,), ("x",)))
        >>> print(found.explain())
        1 op, 3 values on x=2: each device receives 512 B.
        1. 512 B: all-reduce over x of results[0] of dot_general (a.py:7), 8 x 16 float32.
           Each device has an addend: dim 1 of operands[0] is summed, and cut over x.
        """
        if integer("most", most) < 0:
            raise LayoutError(f"most is {most}; it must be at least 0")
        count, values = len(self.computation.ops), len(self.computation.shapes)
        ops = f"{counted(count, 'op')}, {counted(values, 'value')} on {mesh_text(self.mesh)}"
        received = [f"{bytes_text(size)} {when}" for when, size in self.bytes_when.items()]
        lines = [f"{ops}: each device receives {', and '.join([bytes_text(self.bytes_received), *received])}."]
        lines += [f"{number}. {move.line}" for number, move in enumerate(self.moves[:most], 1)]
        rest = self.moves[most:]
        if rest:
            more = bytes_text(sum(move.bytes_in_all for move in rest if not move.when))
            lines.append(f"{counted(len(rest), 'more move')}, {more} in all.")
        return "\n".join(lines)

    def run(self, arrays: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        """Return the results for whole input arrays, computed in numpy by each device with its shards.

        They equal those of `computation.run(arrays)`, except for rounding: tests check propagations with it.

        Raises:
            LayoutError: as for `Computation.run`, and if devices that should hold the same elements do not.

        >>> tanh = {"op": "tanh", "in": [0], "out": [[(2,), "float32"]]}
        >>> computation = Computation([[(2,), "float32"]], [tanh], [1])
        >>> propagate(computation, [("x",)], mesh=DeviceMesh((2,), ("x",))).run([[0.0, 0.0]])
        [array([0., 0.], dtype=float32)]
        """
        shapes, dtypes, count = self.computation.shapes, self.computation.dtypes, self.computation.inputs
        return Devices(self._flow, self.mesh).run(checked_inputs(arrays, shapes[:count], dtypes[:count]))

    def to_json(self) -> dict[str, Any]:
        """Return the layouts and moves as values that `json.dumps` takes.

        >>> tanh = {"op": "tanh", "in": [0], "out": [[(4,), "float32"]]}
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> propagate(Computation([[(4,), "float32"]], [tanh], [1]), [("x",)], mesh=mesh).to_json()["layouts"][1]
        {'axes': [['x']], 'unreduced': []}
        """

        def listed(layouts: Sequence[TensorLayout | None]) -> list[Any]:
            return [None if layout is None else axes_json(layout) for layout in layouts]

        return {
            "policy": self.policy,
            "layouts": listed(self.layouts),
            "results": listed(self.results),
            "moves": [move.to_json() for move in self.in_order],
            "bytes_received": self.bytes_received,
            "bytes_when": self.bytes_when,
        }

    def to_html(self, title: str = "What a computation moves") -> str:
        """Return a page: bars by collective and by line of the source, moves with reasons, inputs and results."""
        with importing:
            from .page import page_of
        return page_of(self, instance("title", title, str))

    def save_html(self, path: str | os.PathLike[str], title: str = "What a computation moves") -> None:
        """Write the page of `to_html` to a file; an existing file is replaced as a whole.

        Raises:
            OSError: if the file cannot be written; the old one is then unchanged.
        """
        replace_file(path, self.to_html(title).encode())

    def _picture(self) -> Picture:
        with importing:
            from .drawn import moves_picture
        return moves_picture(self.moves, mesh_text(self.mesh))

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        ops, moves = len(self.computation.ops), len(self.moves)
        counts = f"{ops:,} op{'s' * (ops != 1)}, {moves:,} move{'s' * (moves != 1)}"
        return f"<Propagation of {counts}, {self.bytes_received:,} bytes to each device>"


def propagate(
    computation: Computation,
    layouts: Sequence[TensorLayout | GivenAxes | Start | None] | Mapping[str, TensorLayout | GivenAxes | Start | None],
    *,
    results: Sequence[TensorLayout | GivenAxes | Start | None] | None = None,
    mesh: DeviceMesh | None = None,
    policy: Policy = "shardy",
) -> Propagation:
    """Return the layouts of all values of a computation, and the moves, from the layouts of some inputs and results.

    Args:
        computation: the ops, in order.
        layouts: the layout of each input: a `TensorLayout`, its axes, a `Start` for one that may get more axes, or
            `None` for one that is free. A mapping gives them by the computation's `names`; inputs that it lacks are
            free.
        results: the layout of each result, in the same forms; all are free by default.
        mesh: the mesh; may be left out if a layout has one.
        policy: the choice where layouts disagree: `"shardy"` has the layouts and moves of Shardy's passes, which JAX
            uses. `"least"` computes each op with the fewest bytes that a device receives. It tries Shardy's layouts,
            and those that result if inputs that a step replaces, such as weights, have a lower priority; it takes those
            that move less. `"explicit"` is JAX's explicit mode: every input has a layout, devices divide each dim that
            they cut, and a disagreement is an error.

    Raises:
        LayoutError: if layouts do not fit the inputs or results, a dtype has no size, or the policy is `"explicit"` and
            layouts disagree or cut a dim unevenly; the message names the op, its place and the inputs that its layouts
            come from.
        TypeError: if an argument is of another type.

    >>> dot = {"op": "dot_general", "in": [0, 1], "out": [[(8, 16), "float32"]], "attrs": {
    ...     "lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}}
    >>> tanh = {"op": "tanh", "in": [2], "out": [[(8, 16), "float32"]]}
    >>> computation = Computation([[(8, 4), "float32"], [(4, 16), "float32"]], [dot, tanh], [3])
    >>> found = propagate(computation, [("x", None), (None, "y")], mesh=DeviceMesh((2, 4), ("x", "y")))
    >>> found.layouts[3].axes
    ('x', 'y')
    """
    instance("computation", computation, Computation)
    check_policy(policy)
    inputs = computation.shapes[: computation.inputs]
    outputs = [computation.shapes[number] for number in computation.outputs]
    given = _named(computation, layouts) if isinstance(layouts, Mapping) else _listed("layouts", layouts, len(inputs))
    wanted = [None] * len(outputs) if results is None else _listed("results", results, len(outputs))
    said = [("layouts", at, start) for at, start in enumerate(given)]
    said += [("results", at, start) for at, start in enumerate(wanted)]
    held = [(name, at, start.layout if isinstance(start, Start) else start) for name, at, start in said]
    where = mesh_of(mesh, {f"{name}[{at}]": own for name, at, own in held if isinstance(own, TensorLayout)})
    begun = _starts("layouts", given, inputs, where), _starts("results", wanted, outputs, where)
    free = begun[0].index(None) if None in begun[0] else None
    if policy == "explicit" and free is not None:
        raise LayoutError(
            f"layouts[{free}] is None, but with policy='explicit' every input needs a layout; give its axes, or "
            "policy='shardy'"
        )
    found = propagated(where.core, computation._core, *begun, _itemsize, policy)
    if isinstance(found, tuple):
        raise LayoutError(_disagreement(computation, *found))
    moves = Moves(where, policy)
    answers = [Propagation(computation, where, policy, each, moves) for each in found]
    return answers[0] if len(answers) == 1 else min(answers, key=lambda each: each._bytes)


def _disagreement(computation: Computation, why: str, operands: list[tuple[int, int | None]], place: list[int]) -> str:
    """Return the error's text: the op whose operands disagree, and the inputs that their layouts are from."""
    names = computation.names or [f"layouts[{number}]" for number in range(computation.inputs)]
    advice = "give policy='shardy' or policy='least' to decide it"
    if not place:
        number = operands[0][0]
        name = f"results[{number}]" if operands[0][1] is None else f"input {names[number]}"
        return f"{name}: {why}; {advice}"
    op, _ = op_at(computation, place)
    origins = [f"operands[{at}] has it from input {names[number]}" for at, number in operands if number is not None]
    source, from_ = f" ({op.source})" if op.source else "", f" ({', '.join(origins)})" if origins else ""
    return f"{op.name}{source}: {why}{from_}; {advice}"


def _named(computation: Computation, layouts: Mapping[str, Any]) -> list[Any]:
    wrong = next((name for name in layouts if name not in computation.names), None)
    if wrong is not None:
        raise LayoutError(f"layouts has {shown(wrong)}; the computation's inputs are {shown(list(computation.names))}")
    return [layouts.get(name) for name in computation.names]


def _listed(argument: str, given: Sequence[Any], count: int) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{argument} must be a sequence of layouts, got {shown(given)}")
    if len(given) != count:
        raise LayoutError(
            f"{argument} has {counted(len(given), 'entry', 'entries')} for "
            f"{counted(count, 'input' if argument == 'layouts' else argument.removesuffix('s'))}"
        )
    return given


def _itemsize(dtype: str) -> int:
    try:
        return itemsize_of(dtype)
    except TypeError:
        raise LayoutError(f"a value of the computation has the dtype {shown(dtype)}, whose size is not known") from None


def _starts(
    argument: str, given: Sequence[Any], shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh
) -> list[BegunLayout | None]:
    # Inputs with the same axes share one layout.
    known: dict[Any, BegunLayout | None] = {}
    found = []
    for at, (each, shape) in enumerate(zip(given, shapes, strict=True)):
        plain = type(each) is tuple and all(axis is None or type(axis) is str for axis in each)
        key = (each, len(shape)) if plain or each is None else at
        if key not in known:
            known[key] = _start(f"{argument}[{at}]", each, shape, mesh)
        found.append(known[key])
    return found


def _start(name: str, given: Any, shape: tuple[int, ...], mesh: DeviceMesh) -> BegunLayout | None:
    start = given if isinstance(given, Start) else Start(given)
    layout = layout_of(name, start.layout, mesh, len(shape))
    if layout is None:
        return None
    dims = range(len(shape))
    if isinstance(start.open, bool):
        may_grow = [start.open for _ in dims]
    else:
        may_grow = [False for _ in dims]
        for dim in integers_of(f"{name}.open", start.open):
            if dim not in dims:
                raise LayoutError(f"{name}.open has {dim}; the tensor has {counted(len(shape), 'dim')}")
            may_grow[dim] = True
    priorities = [integer(f"{name}.priorities[{at}]", each) for at, each in enumerate(start.priorities)]
    if priorities and (len(priorities) != len(shape) or min(priorities) < 0 or max(priorities) >= 1 << 32):
        raise LayoutError(
            f"{name}.priorities is {shown(priorities)}; it must have a number from 0 to 2**32 - 1 for each of "
            f"{counted(len(shape), 'dim')}"
        )
    return specs_of(layout), may_grow, priorities or [0 for _ in dims]
