"""Computations: inputs, ops in order and results, as data. Their file form is JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from .._arguments import instance, integer, path_of, sizes_of
from .._core import Computation as CoreComputation
from .._core import has_factor_rule
from .._fork import importing
from .._json import MAX_JSON, strict_json
from .._text import counted, shown
from ..errors import LayoutError, ParseError, ShardwiseError
from .factor_rule import FactorRule, check_unknown, factor_rule, whole_rule
from .structure import STRUCTURE, check_structure

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Computation", "Op"]

#: The most values of a computation, and entries of any list of it.
_MOST = 1 << 20

#: The most bodies around a body.
_DEEPEST = 32


@dataclass(frozen=True)
class Op:
    """An op of a computation, with the numbers of the values that it takes and makes.

    Most ops have a factor rule. Others have bodies: a `call` computes its body once; a `loop` computes it `trips`
    times, each time from the results before; a `while` has a test and a body, and computes the body while the test is
    true; a `case` computes the body that its first operand numbers, or the last, as in StableHLO.
    """

    #: The name as `factor_rule` takes it, or any name if a rule comes with the op.
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    attributes: Mapping[str, Any]
    #: The factor rule with sizes; `None` for `constant`, `iota`, `barrier`, `constraint` and ops with bodies.
    rule: FactorRule | None
    #: The place in the source, such as `"train.py:31"`, or empty.
    source: str = ""
    bodies: tuple[Computation, ...] = ()
    trips: int = 1


class Computation:
    """A computation as data: inputs, ops in order, results.

    Values are numbered: inputs first, then the results of the ops.

    Args:
        inputs: the shape and the dtype of each input, such as `[[4, 6], "float32"]`.
        ops: mappings with `op`, a name; `in`, the numbers of the operands; `out`, the shape and dtype of each result;
            and perhaps `attrs`, attributes as `factor_rule` takes them, `source`, the place in the source, and `rule`,
            the rule of an op that `factor_rule` does not know, as `FactorRule.to_json` gives it. These have no rule:

            - `constant` and `iota` have no operands.
            - `barrier` returns its operands.
            - `constraint` has one operand and the attributes `axes`, a list of axes for each dim, and `open`, the dims
              that further axes may cut.
            - `call` and `loop` have a `body`, a computation as a mapping, which takes the operands and gives the
              results. The operands and results of a loop have the same shapes; `trips` is how often the body is
              computed.
            - `while` has `bodies`: a test, which gives a scalar, and a body as that of a loop.
            - `case` has `bodies`, which take all operands but the first, a scalar.
        outputs: the numbers of the results.
        names: a name for each input, for layouts by name.
        unknown: `"whole"` to take an op of an unknown name as one that needs its operands whole, with a warning.

    Raises:
        LayoutError: if an op takes a value that is not made before it, has other shapes, or has no rule; the error
            names the op and its place.
        TypeError: if a part is of another type.

    >>> add = {"op": "add", "in": [0, 1], "out": [[[4, 6], "float32"]]}
    >>> computation = Computation([[(4, 6), "float32"]] * 2, [add], [2])
    >>> computation.shapes[2], computation.ops[0].rule.text
    ((4, 6), '([i,j],[i,j])->([i,j])')
    """

    __slots__ = ("_core", "dtypes", "inputs", "names", "ops", "outputs", "shapes")

    #: The shape of each value.
    shapes: tuple[tuple[int, ...], ...]
    #: The dtype of each value, as it was given.
    dtypes: tuple[str, ...]
    #: The number of inputs.
    inputs: int
    ops: tuple[Op, ...]
    #: The numbers of the results.
    outputs: tuple[int, ...]
    #: The names of the inputs, or none.
    names: tuple[str, ...]
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
        self._fill(_OpReader(check_unknown(unknown), 0, {}), inputs, ops, outputs, names)

    def _fill(self, reader: _OpReader, inputs: Any, ops: Any, outputs: Any, names: Any) -> None:
        values = [_value(f"inputs[{number}]", value) for number, value in enumerate(_list("inputs", inputs))]
        self.inputs = len(values)
        self.ops = tuple(reader.ops(ops, values))
        self.shapes, self.dtypes = (tuple(each) for each in zip(*values, strict=True)) if values else ((), ())
        self.outputs = _numbers("outputs", outputs, len(values))
        self.names = tuple(instance(f"names[{at}]", name, str) for at, name in enumerate(_list("names", names)))
        if self.names and (len(self.names) != self.inputs or len({*self.names}) != self.inputs):
            raise LayoutError(
                f"names has {counted(len({*self.names}), 'different name')} for {counted(self.inputs, 'input')}"
            )
        core_ops = [_core_op(f"ops[{number}]", op) for number, op in enumerate(self.ops)]
        self._core = CoreComputation(self.shapes, self.dtypes, self.inputs, core_ops, self.outputs)

    @classmethod
    def from_json(cls, document: Any) -> Computation:
        """Return the computation of a mapping with `inputs`, `ops`, `outputs` and perhaps `names`, as for the class.

        Raises:
            ParseError: if `document` is not such a mapping.
            LayoutError: as for the class.
        """
        if not _is_computation(document):
            raise ParseError(f"a computation must be a mapping with inputs, ops and outputs, got {shown(document)}")
        return cls(document["inputs"], document["ops"], document["outputs"], names=document.get("names", ()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Computation:
        """Read a computation from a JSON file, as `to_json` gives it.

        Raises:
            OSError: if the file cannot be read.
            ParseError: if `path` is not a regular file, not JSON, longer than 100,000,000 bytes, or not a computation.
        """
        file = path_of(path)
        if not file.is_file() and file.exists() and not file.is_dir():
            raise ParseError(f"{file} is not a regular file")
        with file.open("rb") as opened:
            said = strict_json(opened.read(MAX_JSON + 1), file)
        try:
            return cls.from_json(said)
        except (ShardwiseError, TypeError) as error:
            raise ParseError(f"{file}: {error}") from None

    def run(self, arrays: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        """Return the results for these input arrays, computed in numpy on one device.

        Raises:
            LayoutError: if there are more or fewer arrays than inputs, one has another shape or cannot be of the
                input's dtype, or an op cannot be computed here: random numbers, and some that numpy lacks.

        >>> tanh = {"op": "tanh", "in": [0], "out": [[(2,), "float32"]]}
        >>> Computation([[(2,), "float32"]], [tanh], [1]).run([[0.0, 0.0]])
        [array([0., 0.], dtype=float32)]
        """
        with importing:
            from .run import branch_of, checked_inputs, compute, in_dtype, value_dtype
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
                values[result] = in_dtype(array, value_dtype(result, dtypes[result]))
        return [values[output] for output in self.outputs]

    def to_json(self) -> dict[str, Any]:
        """Return the computation as values that `json.dumps` takes and `from_json` reads.

        >>> computation = Computation([[(4,), "float32"]], [{"op": "tanh", "in": [0], "out": [[(4,), "float32"]]}], [1])
        >>> computation.to_json()["ops"]
        [{'op': 'tanh', 'in': [0], 'out': [[[4], 'float32']]}]
        """
        ops = [
            {"op": op.name, "in": list(op.operands), "out": [self._said(result) for result in op.results]}
            | ({"attrs": given} if (given := {n: v for n, v in op.attributes.items() if n != "of_slices"}) else {})
            | ({"source": op.source} if op.source else {})
            | ({"rule": op.rule.to_json()} if op.rule is not None and op.rule._core.is_named else {})
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
        sizes = f"{counted(len(self.ops), 'op')}, {counted(self.inputs, 'input')}"
        return f"<Computation of {sizes} and {counted(len(self.outputs), 'result')}>"


def _at(place: str, source: str) -> str:
    """Return the place of an op for messages: its number and its line of the source."""
    return f"{place}{f' ({source})' if source else ''}"


def _core_op(place: str, op: Op) -> tuple[Any, ...]:
    """Return an op as the core takes it."""
    rule, constraint, feature = None, None, None
    if op.rule is not None:
        rule = op.rule._core
        feature = op.attributes["lhs_spec"].index("f") if "lhs_spec" in op.attributes else None
    elif op.name == "constraint":
        axes = [list(axes or ()) for axes in op.attributes["axes"]]
        constraint = axes, list(op.attributes.get("open", ())), f'{_at(place, op.source)}: op "constraint": axes'
    bodies = [body._core for body in op.bodies]
    return op.name, op.operands, op.results, rule, bodies, op.trips, constraint, feature


@dataclass(frozen=True)
class _OpReader:
    """A reader of ops in a body within `depth` others."""

    unknown: str | None
    depth: int
    #: The rules of ops so far, by name, attributes and shapes.
    rules: dict[Any, FactorRule]

    def ops(self, given: Any, values: list[tuple[tuple[int, ...], str]]) -> Iterator[Op]:
        """Yield ops in order, and append their results to the values."""
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
        """Return an op, and the shapes and dtypes of its results."""
        if not isinstance(said, Mapping) or not {"op", "in", "out"} <= set(said):
            raise LayoutError(f"{place}: an op must be a mapping with op, in and out, got {shown(said)}")
        name = instance(f"{place}.op", said["op"], str)
        operands = _numbers(f"{place}.in", said["in"], len(values))
        outs = [_value(f"{place}.out[{at}]", value) for at, value in enumerate(_list(f"{place}.out", said["out"]))]
        attributes = dict(instance(f"{place}.attrs", said.get("attrs", {}), dict))
        source = instance(f"{place}.source", said.get("source", ""), str)
        if name == "concatenate" and _of_slices(operands, makers):
            attributes["of_slices"] = True
        shapes, results = [values[operand][0] for operand in operands], [shape for shape, _ in outs]
        at = _at(place, source)
        rule, trips = None, 1
        bodies: tuple[Computation, ...] = ()
        try:
            if name in STRUCTURE and "rule" in said:
                raise LayoutError(f"a {name} takes no rule; an op with a rule must have another name")
            if "rule" in said:
                rule = FactorRule(**instance(f"{place}.rule", said["rule"], dict)).of(shapes, results)
            elif name not in STRUCTURE and self.unknown == "whole" and not has_factor_rule(name):
                rule = whole_rule(at, name, shapes, results)
            elif name not in STRUCTURE:
                key = (name, repr(attributes), *shapes, None, *results)
                rule = self.rules.get(key) or factor_rule(name, shapes, results, **attributes)
                self.rules[key] = rule
            elif name in ("call", "loop"):
                bodies = (self._body(f"{place}.body", said.get("body")),)
                trips = integer(f"{place}.trips", said.get("trips", 1))
                if not 0 <= trips < 1 << 63:
                    raise LayoutError(f"trips is {shown(trips)}; it must be from 0 to 2**63 - 1")
            elif name in ("while", "case"):
                each = enumerate(_list(f"{place}.bodies", said.get("bodies")))
                bodies = tuple(self._body(f"{place}.bodies[{number}]", body) for number, body in each)
            inside = [([*b.shapes[: b.inputs]], [b.shapes[output] for output in b.outputs]) for b in bodies]
            check_structure(name, shapes, results, attributes, inside)
        except (LayoutError, TypeError) as error:
            raise LayoutError(f"{at}: {error}") from None
        made = tuple(range(len(values), len(values) + len(outs)))
        return Op(name, operands, made, attributes, rule, source, bodies, trips), outs

    def _body(self, place: str, said: Any) -> Computation:
        if self.depth == _DEEPEST:
            raise LayoutError(f"{place} is nested more than {_DEEPEST} bodies deep, the limit")
        if not _is_computation(said):
            raise LayoutError(f"{place} must be a mapping with inputs, ops and outputs, got {shown(said)}")
        body = object.__new__(Computation)
        within = replace(self, depth=self.depth + 1)
        body._fill(within, said["inputs"], said["ops"], said["outputs"], said.get("names", ()))
        return body


def _of_slices(operands: tuple[int, ...], makers: list[Op | None]) -> bool:
    """Return true if all operands are slices, or all are one value and slices of it.

    Shardy has another rule for such a `concatenate`.
    """
    found = [makers[operand] for operand in operands]
    slices = [maker is not None and maker.name == "slice" for maker in found]
    whole = {
        maker.operands[0] if is_slice and maker is not None else operand
        for operand, maker, is_slice in zip(operands, found, slices, strict=True)
    }
    return all(slices) or (any(slices) and len(whole) == 1)


def _is_computation(said: Any) -> bool:
    return isinstance(said, Mapping) and {"inputs", "ops", "outputs"} <= set(said)


def _list(place: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise LayoutError(f"{place} must be a list, got {shown(given)}")
    if len(given) > _MOST:
        raise LayoutError(f"{place} has {len(given)} entries, at most {_MOST}")
    return given


def _value(place: str, given: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise LayoutError(f"{place} must be a shape and a dtype, got {shown(given)}")
    return sizes_of(f"{place}[0]", given[0]), instance(f"{place}[1]", given[1], str)


def _numbers(place: str, given: Any, count: int) -> tuple[int, ...]:
    numbers = tuple(integer(f"{place}[{at}]", number) for at, number in enumerate(_list(place, given)))
    wrong = next((number for number in numbers if not 0 <= number < count), None)
    if wrong is not None:
        raise LayoutError(f"{place} names value {wrong}; only values below {count} are made before it")
    return numbers
