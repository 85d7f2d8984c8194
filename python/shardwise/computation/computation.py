"""Computations: inputs, ops in order, results; each value has a shape and a dtype. JSON is their file form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._arguments import instance, integer, path_of, sizes_of
from .._core import is_elementwise
from .._json import strict_json
from .._text import shown
from ..errors import LayoutError, ParseError
from .factor_rule import FactorRule, factor_rule

__all__ = ["Computation", "Op"]

#: The most values and operands that a computation has.
_MOST = 1 << 20


@dataclass(frozen=True)
class Op:
    """An op of a computation: its name, the numbers of its operands and results, its attributes and its rule."""

    #: Its name, as `factor_rule` takes it, or any name if it comes with a rule.
    name: str
    #: The numbers of the values that it takes.
    operands: tuple[int, ...]
    #: The numbers of those that it makes.
    results: tuple[int, ...]
    #: All else that is said of it.
    attributes: Mapping[str, Any]
    #: Its factor rule, with sizes.
    rule: FactorRule
    #: Its place in the source, if one is said.
    source: str = ""

    @property
    def is_elementwise(self) -> bool:
        """True if it computes each element of a result from those at its place."""
        return is_elementwise(self.name)


class Computation:
    """A computation as data: its values are numbered, inputs first, then the results of the ops in order.

    Args:
        inputs: the shape and the dtype of each input.
        ops: each op as a mapping: `op`, its name; `in`, the numbers of its operands; `out`, shape and dtype of each
            result; `attrs`, its attributes (see `factor_rule`); if it is not known, `rule`, what `FactorRule.to_json`
            gives; and perhaps `source`, its place in the source.
        outputs: the numbers of the values that are its results.

    Raises:
        LayoutError: if an op takes a value that is not made before it, its shapes are not such an op's, or its name is
            not known and it has no rule.

    >>> add = {"op": "add", "in": [0, 1], "out": [[[4, 6], "float32"]]}
    >>> computation = Computation([[(4, 6), "float32"]] * 2, [add], [2])
    >>> computation.shapes[2], computation.ops[0].rule.text
    ((4, 6), '([i,j],[i,j])->([i,j])')
    """

    __slots__ = ("dtypes", "inputs", "ops", "outputs", "shapes")

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

    def __init__(
        self,
        inputs: Sequence[Sequence[Any]],
        ops: Sequence[Mapping[str, Any]],
        outputs: Sequence[int],
    ) -> None:
        values = [_value(f"inputs[{number}]", value) for number, value in enumerate(_list("inputs", inputs))]
        self.inputs = len(values)
        made: list[Op] = []
        makers: list[Op | None] = [None] * len(values)
        for number, said in enumerate(_list("ops", ops)):
            place = f"ops[{number}]"
            made.append(_op(place, said, values, makers))
            makers += [made[-1]] * len(made[-1].results)
            if len(values) > _MOST:
                raise LayoutError(f"{place}: a computation has at most {_MOST} values")
        self.ops = tuple(made)
        self.shapes, self.dtypes = (tuple(each) for each in zip(*values, strict=True)) if values else ((), ())
        self.outputs = _numbers("outputs", outputs, len(values))

    @classmethod
    def from_json(cls, document: Any) -> Computation:
        """Make one of what JSON says: a mapping with `inputs`, `ops` and `outputs`.

        Raises:
            ParseError: if it is not such a mapping.
            LayoutError: as for the class.
        """
        if not isinstance(document, Mapping) or not {"inputs", "ops", "outputs"} <= set(document):
            raise ParseError(f"a computation is a mapping with inputs, ops and outputs, got {shown(document)}")
        return cls(document["inputs"], document["ops"], document["outputs"])

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

    def to_json(self) -> dict[str, Any]:
        """Give the computation as values that `json.dumps` takes; `from_json` reads them.

        >>> computation = Computation([[(4,), "float32"]], [{"op": "tanh", "in": [0], "out": [[(4,), "float32"]]}], [1])
        >>> computation.to_json()["ops"]
        [{'op': 'tanh', 'in': [0], 'out': [[[4], 'float32']]}]
        """
        ops = []
        for op in self.ops:
            said: dict[str, Any] = {
                "op": op.name,
                "in": list(op.operands),
                "out": [self._said(result) for result in op.results],
            }
            given = {key: value for key, value in op.attributes.items() if key != "of_slices"}
            ops.append(
                said
                | ({"attrs": given} if given else {})
                | ({"source": op.source} if op.source else {})
                | ({} if _is_known(op.name) else {"rule": op.rule.to_json()})
            )
        inputs = [self._said(number) for number in range(self.inputs)]
        return {"inputs": inputs, "ops": ops, "outputs": list(self.outputs)}

    def _said(self, number: int) -> list[Any]:
        return [list(self.shapes[number]), self.dtypes[number]]

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Computation) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Computation of {len(self.ops)} ops, {self.inputs} inputs and {len(self.outputs)} results>"


def _op(place: str, said: Any, values: list[tuple[tuple[int, ...], str]], makers: list[Op | None]) -> Op:
    """Read an op, and add its results to the values."""
    if not isinstance(said, Mapping) or not {"op", "in", "out"} <= set(said):
        raise LayoutError(f"{place}: an op is a mapping with op, in and out, got {shown(said)}")
    name = instance(f"{place}.op", said["op"], str)
    operands = _numbers(f"{place}.in", said["in"], len(values))
    outs = [_value(f"{place}.out[{number}]", value) for number, value in enumerate(_list(f"{place}.out", said["out"]))]
    attributes = dict(instance(f"{place}.attrs", said.get("attrs", {}), dict))
    source = instance(f"{place}.source", said.get("source", ""), str)
    if name == "concatenate" and _of_slices(operands, makers):
        attributes["of_slices"] = True
    shapes = [values[operand][0] for operand in operands]
    results = [shape for shape, _ in outs]
    try:
        if "rule" in said:
            rule = FactorRule(**instance(f"{place}.rule", said["rule"], dict)).of(shapes, results)
        else:
            rule = factor_rule(name, shapes, results, **attributes)
    except (LayoutError, TypeError) as error:
        raise LayoutError(f"{place}{f' ({source})' if source else ''}: {error}") from None
    first = len(values)
    values += outs
    return Op(name, operands, tuple(range(first, len(values))), attributes, rule, source)


def _of_slices(operands: tuple[int, ...], makers: list[Op | None]) -> bool:
    """Say whether slices are put together again: all operands are, or all are one value or slices of it."""
    found = [makers[operand] for operand in operands]
    slices = [maker is not None and maker.name == "slice" for maker in found]
    whole = {
        maker.operands[0] if is_slice and maker is not None else operand
        for operand, maker, is_slice in zip(operands, found, slices, strict=True)
    }
    return all(slices) or (any(slices) and len(whole) == 1)


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
