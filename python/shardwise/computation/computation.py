"""Computations: inputs, ops in order, results; each value has a shape and a dtype. JSON is their file form."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from .._arguments import instance, integer, path_of, sizes_of
from .._core import Computation as CoreComputation
from .._fork import importing
from .._json import strict_json
from .._text import shown
from ..errors import LayoutError, ParseError
from .factor_rule import FactorRule, factor_rule

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Computation", "Op"]

#: The most values and operands that a computation has.
_MOST = 1 << 20

#: The deepest that bodies are within bodies.
_DEEPEST = 32

#: Ops without a rule: `constant` and `iota` have no operands; `barrier` passes its operands on; `constraint` gives its
#: operand the layout that its `axes` say; the others have bodies, which are computations of their operands.
STRUCTURE = ("constant", "iota", "barrier", "constraint", "call", "loop", "while", "case")


@dataclass(frozen=True)
class Op:
    """An op of a computation: its name, the numbers of its operands and results, its attributes and its rule.

    One with bodies has these in place of a rule: a `call` computes its body once, and a `loop` as often as `trips`
    says, each time with what it gave before. A `while` has a test and a body, and computes the body as long as the test
    is true; a `case` computes that of its bodies which its first operand numbers, or the last.
    """

    #: Its name, as `factor_rule` takes it, or any name if it comes with a rule.
    name: str
    #: The numbers of the values that it takes.
    operands: tuple[int, ...]
    #: The numbers of those that it makes.
    results: tuple[int, ...]
    #: All else that is said of it.
    attributes: Mapping[str, Any]
    #: Its factor rule, with sizes; none for an op with bodies, a constant, an iota, a barrier and a constraint.
    rule: FactorRule | None
    #: Its place in the source, if one is said.
    source: str = ""
    #: The computations that it computes, and how often a loop does.
    bodies: tuple[Computation, ...] = ()
    trips: int = 1


class Computation:
    """A computation as data: its values are numbered, inputs first, then the results of the ops in order.

    Args:
        inputs: the shape and the dtype of each input.
        ops: each op as a mapping: `op`, its name; `in`, the numbers of its operands; `out`, shape and dtype of each
            result; `attrs`, its attributes (see `factor_rule`); if it is not known, `rule`, what `FactorRule.to_json`
            gives; and perhaps `source`, its place in the source. The op `call` has a `body` in place of attributes, a
            computation as a mapping; the op `loop` has `trips` besides, and results of the shapes of its operands,
            which are those of the body's inputs and results. `while` and `case` have `bodies`: a test, which gives one
            truth value, and a body as that of a `loop`; or branches, of which the first operand gives the number, and
            which take the others. `constraint` has the attribute `axes`, for each dim its
            axes, and perhaps `open`, the dims that may have more. `constant` and `iota` have no operands, `barrier` has
            as many operands as results.
        outputs: the numbers of the values that are its results.
        names: names of the inputs, for layouts by name.
        unknown: `"whole"` to take ops of an unknown name as ones that need all their operands whole, with a warning.

    Raises:
        LayoutError: if an op takes a value that is not made before it, its shapes are not such an op's, or its name is
            not known and it has no rule.

    >>> add = {"op": "add", "in": [0, 1], "out": [[[4, 6], "float32"]]}
    >>> computation = Computation([[(4, 6), "float32"]] * 2, [add], [2])
    >>> computation.shapes[2], computation.ops[0].rule.text
    ((4, 6), '([i,j],[i,j])->([i,j])')
    """

    __slots__ = ("_core", "dtypes", "inputs", "names", "ops", "outputs", "shapes")

    #: The shape of each value.
    shapes: tuple[tuple[int, ...], ...]
    #: The dtype of each, as it was said.
    dtypes: tuple[str, ...]
    #: The number of inputs.
    inputs: int
    #: The ops in order.
    ops: tuple[Op, ...]
    #: The numbers of the results.
    outputs: tuple[int, ...]
    #: The names of the inputs, if they have some.
    names: tuple[str, ...]
    #: The same as the core has it.
    _core: CoreComputation

    def __init__(
        self,
        inputs: Sequence[Sequence[Any]],
        ops: Sequence[Mapping[str, Any]],
        outputs: Sequence[int],
        *,
        names: Sequence[str] = (),
        unknown: Literal["whole"] | None = None,
    ) -> None:
        if unknown not in (None, "whole"):
            raise LayoutError(f"unknown is {shown(unknown)}; it is 'whole' or None")
        self._fill(_OpReader(unknown, 0, {}), inputs, ops, outputs, names)

    @classmethod
    def _within(cls, reader: _OpReader, said: Mapping[str, Any]) -> Computation:
        computation = object.__new__(cls)
        computation._fill(reader, said["inputs"], said["ops"], said["outputs"], said.get("names", ()))
        return computation

    def _fill(self, reader: _OpReader, inputs: Any, ops: Any, outputs: Any, names: Any) -> None:
        values = [_value(f"inputs[{number}]", value) for number, value in enumerate(_list("inputs", inputs))]
        self.inputs = len(values)
        self.ops = tuple(reader.ops(ops, values))
        self.shapes, self.dtypes = (tuple(each) for each in zip(*values, strict=True)) if values else ((), ())
        self.outputs = _numbers("outputs", outputs, len(values))
        self.names = tuple(instance(f"names[{at}]", name, str) for at, name in enumerate(_list("names", names)))
        if self.names and (len(self.names) != self.inputs or len({*self.names}) != self.inputs):
            raise LayoutError(f"names has {len({*self.names})} different names for {self.inputs} inputs")
        core_ops = list(map(_core_op, self.ops))
        self._core = CoreComputation(self.shapes, self.dtypes, self.inputs, core_ops, self.outputs)

    @classmethod
    def from_json(cls, document: Any) -> Computation:
        """Make one of what JSON says: a mapping with `inputs`, `ops` and `outputs`.

        Raises:
            ParseError: if it is not such a mapping.
            LayoutError: as for the class.
        """
        if not isinstance(document, Mapping) or not {"inputs", "ops", "outputs"} <= set(document):
            raise ParseError(f"a computation is a mapping with inputs, ops and outputs, got {shown(document)}")
        return cls(document["inputs"], document["ops"], document["outputs"], names=document.get("names", ()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Computation:
        """Read one from a JSON file.

        Raises:
            ParseError: if the file is not JSON, or not a computation.
        """
        file = path_of(path)
        try:
            return cls.from_json(strict_json(file.read_bytes(), file))
        except (LayoutError, TypeError) as error:
            raise ParseError(f"{file}: {error}") from None

    def run(self, arrays: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        """Compute the results in numpy, of arrays for the inputs.

        Raises:
            LayoutError: if arrays are not of the inputs' shapes, or an op is none that numpy has here.

        >>> tanh = {"op": "tanh", "in": [0], "out": [[(2,), "float32"]]}
        >>> Computation([[(2,), "float32"]], [tanh], [1]).run([[0.0, 0.0]])
        [array([0., 0.], dtype=float32)]
        """
        with importing:
            from .run import branch_of, checked_inputs, compute, value_dtype
        shapes, dtypes = self.shapes, self.dtypes
        values = dict(enumerate(checked_inputs(arrays, shapes[: self.inputs], dtypes[: self.inputs])))
        for op in self.ops:
            made: Any = [values[operand] for operand in op.operands]
            if not op.bodies:
                made = compute(op.name, op.attributes, made, [shapes[result] for result in op.results], op.source)
            elif op.name == "case":
                made = op.bodies[branch_of(made[0], len(op.bodies))].run(made[1:])
            elif op.name == "while":
                while op.bodies[0].run(made)[0]:
                    made = op.bodies[1].run(made)
            else:
                for _ in range(op.trips):
                    made = op.bodies[0].run(made)
            for result, array in zip(op.results, made, strict=True):
                values[result] = array.astype(value_dtype(result, dtypes[result]), copy=False)
        return [values[output] for output in self.outputs]

    def to_json(self) -> dict[str, Any]:
        """Return the computation as values that `json.dumps` takes; `from_json` reads them.

        >>> computation = Computation([[(4,), "float32"]], [{"op": "tanh", "in": [0], "out": [[(4,), "float32"]]}], [1])
        >>> computation.to_json()["ops"]
        [{'op': 'tanh', 'in': [0], 'out': [[[4], 'float32']]}]
        """
        ops = [
            {"op": op.name, "in": list(op.operands), "out": [self._said(result) for result in op.results]}
            | ({"attrs": given} if (given := {n: v for n, v in op.attributes.items() if n != "of_slices"}) else {})
            | ({"source": op.source} if op.source else {})
            | ({"rule": op.rule.to_json()} if op.rule is not None and not _is_known(op.name) else {})
            | ({"body": op.bodies[0].to_json()} if op.name in ("call", "loop") else {})
            | ({"bodies": [body.to_json() for body in op.bodies]} if op.name in ("while", "case") else {})
            | ({"trips": op.trips} if op.name == "loop" else {})
            for op in self.ops
        ]
        inputs = [self._said(number) for number in range(self.inputs)]
        names = {"names": list(self.names)} if self.names else {}
        return {"inputs": inputs, "ops": ops, "outputs": list(self.outputs)} | names

    def _said(self, number: int) -> list[Any]:
        return [list(self.shapes[number]), self.dtypes[number]]

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Computation) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Computation.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return f"<Computation of {len(self.ops)} ops, {self.inputs} inputs and {len(self.outputs)} results>"


def _core_op(op: Op) -> tuple[Any, ...]:
    """Return an op as the core takes it."""
    rule, constraint, feature = None, None, None
    if op.rule is not None:
        rule = op.rule._core
        feature = op.attributes["lhs_spec"].index("f") if "lhs_spec" in op.attributes else None
    elif op.name == "constraint":
        constraint = [list(axes or ()) for axes in op.attributes["axes"]], list(op.attributes.get("open", ()))
    bodies = [body._core for body in op.bodies]
    return op.name, op.operands, op.results, rule, bodies, op.trips, constraint, feature


@dataclass(frozen=True)
class _OpReader:
    """A reader of ops, in bodies `depth` deep."""

    unknown: str | None
    depth: int
    #: The rules of ops so far, by all that they depend on: ops that are alike have one.
    rules: dict[Any, FactorRule]

    def ops(self, given: Any, values: list[tuple[tuple[int, ...], str]]) -> Iterator[Op]:
        """Read ops in order, and add their results to the values."""
        makers: list[Op | None] = [None] * len(values)
        for number, said in enumerate(_list("ops", given)):
            op, outs = self._op(f"ops[{number}]", said, values, makers)
            values += outs
            makers += [op] * len(outs)
            if len(values) > _MOST:
                raise LayoutError(f"ops[{number}]: a computation has at most {_MOST} values")
            yield op

    def _op(
        self, place: str, said: Any, values: list[tuple[tuple[int, ...], str]], makers: list[Op | None]
    ) -> tuple[Op, list[tuple[tuple[int, ...], str]]]:
        """Read an op; give it with its results."""
        if not isinstance(said, Mapping) or not {"op", "in", "out"} <= set(said):
            raise LayoutError(f"{place}: an op is a mapping with op, in and out, got {shown(said)}")
        name = instance(f"{place}.op", said["op"], str)
        operands = _numbers(f"{place}.in", said["in"], len(values))
        outs = [_value(f"{place}.out[{at}]", value) for at, value in enumerate(_list(f"{place}.out", said["out"]))]
        attributes = dict(instance(f"{place}.attrs", said.get("attrs", {}), dict))
        source = instance(f"{place}.source", said.get("source", ""), str)
        if name == "concatenate" and _of_slices(operands, makers):
            attributes["of_slices"] = True
        shapes, results = [values[operand][0] for operand in operands], [shape for shape, _ in outs]
        at = f"{place}{f' ({source})' if source else ''}"
        rule, trips = None, 1
        bodies: tuple[Computation, ...] = ()
        try:
            if "rule" in said:
                rule = FactorRule(**instance(f"{place}.rule", said["rule"], dict)).of(shapes, results)
            elif name not in STRUCTURE and self.unknown == "whole" and not _is_known(name):
                rule = _whole(at, name, shapes, results)
            elif name not in STRUCTURE:
                key = (name, repr(attributes), *shapes, None, *results)
                rule = self.rules.get(key) or factor_rule(name, shapes, results, **attributes)
                self.rules[key] = rule
            elif name in ("call", "loop"):
                bodies = (self._body(f"{place}.body", said.get("body")),)
                trips = integer(f"{place}.trips", said.get("trips", 1))
            elif name in ("while", "case"):
                each = enumerate(_list(f"{place}.bodies", said.get("bodies")))
                bodies = tuple(self._body(f"{place}.bodies[{number}]", body) for number, body in each)
            _check_structure(name, shapes, results, attributes, bodies, trips)
        except (LayoutError, TypeError) as error:
            raise LayoutError(f"{at}: {error}") from None
        made = tuple(range(len(values), len(values) + len(outs)))
        return Op(name, operands, made, attributes, rule, source, bodies, trips), outs

    def _body(self, place: str, said: Any) -> Computation:
        if self.depth == _DEEPEST:
            raise LayoutError(f"{place} is within {_DEEPEST} others; that is the limit")
        if not isinstance(said, Mapping) or not {"inputs", "ops", "outputs"} <= set(said):
            raise LayoutError(f"{place} is a mapping with inputs, ops and outputs, got {shown(said)}")
        return Computation._within(replace(self, depth=self.depth + 1), said)


def _whole(at: str, name: str, shapes: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> FactorRule:
    """Return the rule of an op that needs all its operands whole, and warn."""
    warnings.warn(f"{at}: no rule is known for {shown(name)}; its operands are put together", stacklevel=2)
    numbers = iter(range(sum(map(len, shapes)) + sum(map(len, results))))
    factors = [[f"z_{next(numbers)}" for _ in shape] for shape in (*shapes, *results)]
    sides = [f"[{','.join(dims)}]" for dims in factors]
    text = f"({','.join(sides[: len(shapes)])})->({','.join(sides[len(shapes) :])})"
    return FactorRule(text, whole=[factor for dims in factors for factor in dims]).of(shapes, results)


def _check_structure(
    name: str,
    shapes: list[tuple[int, ...]],
    results: list[tuple[int, ...]],
    attributes: dict[str, Any],
    bodies: tuple[Computation, ...],
    trips: int,
) -> None:
    """Check an op without a rule."""
    taken = shapes[1:] if name == "case" else shapes
    if name == "while" and len(bodies) != 2:
        raise LayoutError(f"a while has two bodies, a test and that which is computed, got {len(bodies)}")
    if name == "case" and (not bodies or not shapes or shapes[0] != ()):
        raise LayoutError(
            f"a case has a scalar first, which numbers one of its bodies; its operands are {shown(shapes)}, and "
            f"{len(bodies)} bodies are given"
        )
    for number, body in enumerate(bodies):
        made = [()] if name == "while" and number == 0 else results
        inside = [*body.shapes[: body.inputs]], [body.shapes[output] for output in body.outputs]
        if inside != (taken, made):
            raise LayoutError(
                f"body {number} is to take {shown(taken)} and to give {shown(made)}; it takes {shown(inside[0])} and "
                f"gives {shown(inside[1])}"
            )
    if trips < 0:
        raise LayoutError(f"trips is {trips}; it is at least 0")
    same = name in ("loop", "while", "barrier", "constraint")
    if (same and shapes != results) or (name == "constraint" and len(shapes) != 1):
        raise LayoutError(f"a {name} has results of the shapes of its operands, got {shown(shapes)}, {shown(results)}")
    if name in ("constant", "iota") and (shapes or len(results) != 1):
        raise LayoutError(f"it has no operands and one result, got {len(shapes)} and {len(results)}")
    if name == "constraint":
        axes = attributes.get("axes")
        if not isinstance(axes, Sequence) or isinstance(axes, str) or len(axes) != len(shapes[0]):
            raise LayoutError(f"axes is {shown(axes)}; it has for each of {len(shapes[0])} dims a list of axes")
        wrong = [dim for dim in attributes.get("open", ()) if dim not in range(len(axes))]
        if wrong:
            raise LayoutError(f"open has {shown(wrong[0])}, but there are {len(axes)} dims")


def _of_slices(operands: tuple[int, ...], makers: list[Op | None]) -> bool:
    """Say whether slices are put together again: all operands are, or all are one value or slices of it."""
    found = [makers[operand] for operand in operands]
    slices = [maker is not None and maker.name == "slice" for maker in found]
    whole = {
        maker.operands[0] if is_slice and maker is not None else operand
        for operand, maker, is_slice in zip(operands, found, slices, strict=True)
    }
    return all(slices) or (any(slices) and len(whole) == 1)


@cache
def _is_known(name: str) -> bool:
    try:
        factor_rule(name, [], [])
    except LayoutError as error:
        return "no rule is known" not in str(error)
    return True


def _list(place: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise LayoutError(f"{place} is a list, got {shown(given)}")
    if len(given) > _MOST:
        raise LayoutError(f"{place} has {len(given)} entries, at most {_MOST}")
    return given


def _value(place: str, given: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise LayoutError(f"{place} is a shape and a dtype, got {shown(given)}")
    return sizes_of(f"{place}[0]", given[0]), instance(f"{place}[1]", given[1], str)


def _numbers(place: str, given: Any, count: int) -> tuple[int, ...]:
    numbers = tuple(integer(f"{place}[{at}]", number) for at, number in enumerate(_list(place, given)))
    wrong = next((number for number in numbers if not 0 <= number < count), None)
    if wrong is not None:
        raise LayoutError(f"{place} names value {wrong}; there are {count} before it")
    return numbers
