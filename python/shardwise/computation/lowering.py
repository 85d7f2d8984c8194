"""Bodies under construction, and jaxprs lowered into them; the module `jaxpr` has the ways of the primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._text import shown
from ..errors import LayoutError
from .factor_rule import FactorRule, factor_rule, whole_rule
from .held import IDENTITY, identity
from .primitives import BODIES

__all__ = ["INDEX", "Aval", "Body", "Eqn", "Lowered", "Lowering"]

#: A shape and a dtype.
Aval = list[Any]

#: The number of a value that nothing uses.
_UNUSED = -1

#: The index of a loop.
INDEX: Aval = [[], "int32"]

#: The advice for primitives that have no rule, by their names.
_ADVICE = {
    "eigh": ", of some of the eigenvalues only; compute all and slice them",
    "reduce": ", a reduction by a function that is not one op such as `jax.lax.add`; reduce by one of these",
    "scatter": ", which sets elements to a function of them; gather them, compute, and set them",
    **dict.fromkeys((f"reduce_window_{name}" for name in BODIES), ", with windows that are dilated"),
    "shard_map": (
        ", a function of one device's shards; trace that of whole arrays instead, with in_specs as `layouts` of "
        "`propagate` or as `jax.lax.with_sharding_constraint`"
    ),
}


class Body:
    """The ops of a computation of some inputs, as they are added; values are named by their numbers."""

    def __init__(self, inputs: Sequence[Aval], source: str = "") -> None:
        self.values = [list(value) for value in inputs]
        self.source = source
        self._inputs = len(inputs)
        self._ops: list[dict[str, Any]] = []

    def said(self, outputs: Sequence[int]) -> dict[str, Any]:
        """Return the computation with these results as JSON has it."""
        return {"inputs": self.values[: self._inputs], "ops": self._ops, "outputs": list(outputs)}

    def shape(self, value: int) -> list[int]:
        """Return the shape of a value."""
        return list(self.values[value][0])

    def emit(self, op: str, operands: Sequence[int], out: Aval, **attributes: Any) -> int:
        """Add an op, and return its result."""
        return self.emit_all(op, operands, [out], attributes)[0]

    def emit_all(
        self, op: str, operands: Sequence[int], outs: Sequence[Aval], attributes: Mapping[str, Any], **more: Any
    ) -> list[int]:
        """Add an op, and return its results."""
        said = {"op": op, "in": list(operands), "out": [list(out) for out in outs]} | more
        said |= {"attrs": dict(attributes)} if attributes else {}
        self._ops.append(said | ({"source": self.source} if self.source else {}))
        first = len(self.values)
        self.values += [list(out) for out in outs]
        return list(range(first, len(self.values)))

    def called(self, body: Body, operands: Sequence[int], result: int) -> int:
        """Add a call of a body with one result."""
        return self.emit_all("call", operands, [body.values[result]], {}, body=body.said([result]))[0]

    def constant(self, out: Aval, value: Any) -> int:
        """Add a constant; its value is unknown if it is `None`."""
        return self.emit("constant", [], out, **({} if value is None else {"value": _constant_json(value)}))

    def full(self, shape: Sequence[int], dtype: str, value: Any) -> int:
        """Add a tensor of equal elements."""
        return self.broadcast(self.constant([[], dtype], value), shape)

    def start(self, body: str, dtype: str) -> int:
        """Add the scalar that a reduction begins with."""
        is_integer = dtype.removeprefix("u") in ("int8", "int16", "int32", "int64")
        return self.constant([[], dtype], identity(body, np.dtype(dtype)).item() if is_integer else IDENTITY[body])

    def broadcast(self, value: int, shape: Sequence[int], dims: Sequence[int] | None = None) -> int:
        """Broadcast a value whose dims become the last ones, or `dims`."""
        if self.shape(value) == list(shape):
            return value
        rank = len(self.shape(value))
        dims = range(len(shape) - rank, len(shape)) if dims is None else dims
        out = [list(shape), self.values[value][1]]
        return self.emit("broadcast_in_dim", [value], out, broadcast_dimensions=list(dims))

    def transposed(self, value: int, order: Sequence[int]) -> int:
        """Put the dims of a value in this order."""
        if list(order) == sorted(order):
            return value
        shape, dtype = self.values[value]
        return self.emit("transpose", [value], [[shape[dim] for dim in order], dtype], permutation=list(order))

    def reduce(self, body: str, value: int, start: int, dims: Sequence[int], out: Aval) -> int:
        """Reduce a value along some dims."""
        return self.emit("reduce", [value, start], out, dimensions=list(dims), body=body, n=1)

    def part(self, value: int, dim: int, first: int, size: int) -> int:
        """Add a slice of one dim."""
        shape = self.shape(value)
        starts, limits = [0] * len(shape), list(shape)
        starts[dim], limits[dim] = first, first + size
        out = [[limit - start for start, limit in zip(starts, limits, strict=True)], self.values[value][1]]
        return self.emit("slice", [value], out, start_indices=starts, limit_indices=limits, strides=[1] * len(shape))


class Eqn(NamedTuple):
    """An equation of a jaxpr whose operands have numbers."""

    name: str
    params: Mapping[str, Any]
    operands: list[int]
    outs: Sequence[Aval]
    #: True for each result that is used.
    needed: Sequence[bool]

    @property
    def out(self) -> Aval:
        """The shape and dtype of the first result."""
        return list(self.outs[0])

    @property
    def jaxpr(self) -> Mapping[str, Any]:
        """The called jaxpr."""
        for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if isinstance(self.params.get(name), Mapping):
                found: Mapping[str, Any] = self.params[name]["jaxpr"]
                return found
        raise LayoutError(f"a call has no jaxpr, its params are {shown(sorted(self.params))}")

    @property
    def window(self) -> dict[str, Any]:
        """The attributes of windows."""
        return {name: self.params[name] for name in ("window_dimensions", "window_strides", "padding")}


class Lowered(NamedTuple):
    """The ways in which primitives are lowered, by their names."""

    #: Functions that add ops, and return the number of the result or the numbers of several, or `None` if they cannot.
    lowered: Mapping[str, Callable[[Lowering, Eqn], int | list[int] | None]]
    #: The user's rules of other primitives.
    rules: Mapping[str, FactorRule]
    #: `"whole"` to take all others as ops that need their operands whole.
    unknown: str | None


class Lowering(Body):
    """The ops of one jaxpr."""

    def __init__(self, inputs: Sequence[Aval], given: Lowered, source: str = "") -> None:
        super().__init__(inputs, source)
        self._ways = given

    def of(self, jaxpr: Mapping[str, Any], used: Sequence[bool] | None = None) -> dict[str, Any]:
        """Return the computation of a jaxpr's used results as JSON has it."""
        inner = self.within(jaxpr["inputs"])
        outputs = inner.inlined(jaxpr, range(len(jaxpr["inputs"])), used)
        return inner.said([output for output in outputs if output != _UNUSED])

    def within(self, inputs: Sequence[Aval]) -> Lowering:
        """Return a new body that takes such values."""
        return Lowering(inputs, self._ways, self.source)

    def inlined(self, jaxpr: Mapping[str, Any], inputs: Sequence[int], used: Sequence[bool] | None = None) -> list[int]:
        """Add the ops that the used results need, as JAX does, and return the numbers of all results."""
        env = list(inputs)
        consts = jaxpr.get("consts", ())
        values = jaxpr.get("values", [None] * len(consts))
        env += [self.constant(out, value) for out, value in zip(consts, values, strict=True)]
        used = [True for _ in jaxpr["outputs"]] if used is None else used

        def number(value: Any) -> int:
            return self.constant(value["aval"], value["lit"]) if isinstance(value, Mapping) else env[value]

        for eqn, needed in zip(jaxpr["eqns"], _needed(jaxpr, used, len(env)), strict=True):
            if not any(needed):
                env += [_UNUSED for _ in needed]
                continue
            before, self.source = self.source, eqn.get("source", self.source)
            operands = [number(value) for value in eqn["in"]]
            env += self._lowered(Eqn(eqn["op"], eqn["params"], operands, eqn["out"], needed))
            self.source = before
        return [number(value) if use else _UNUSED for value, use in zip(jaxpr["outputs"], used, strict=True)]

    def _lowered(self, eqn: Eqn) -> list[int]:
        name, operands = eqn.name, eqn.operands
        rule, way = self._ways.rules.get(name), self._ways.lowered.get(name)
        made = way(self, eqn) if way is not None and rule is None else None
        if made is not None:
            return [made] if isinstance(made, int) else made
        shapes, results = [self.shape(value) for value in operands], [shape for shape, _ in eqn.outs]
        if rule is None and way is None and _fits_rule(name, shapes, results):
            return self.emit_all(name, operands, eqn.outs, {})
        place = f"JAX's primitive {shown(name)}{f' ({self.source})' if self.source else ''}"
        if rule is None and self._ways.unknown == "whole":
            rule = whole_rule(place, name, shapes, results)
        if rule is None:
            raise LayoutError(
                f"no rule is known for {place}{_ADVICE.get(name, '')}; give rules={{{name!r}: FactorRule(...)}}, or "
                "unknown='whole' to put its operands together"
            )
        return self.emit_all(name, operands, eqn.outs, {}, rule=rule.to_json())

    def call(
        self, jaxpr: Mapping[str, Any], operands: Sequence[int], outs: Sequence[Aval], needed: Sequence[bool] = ()
    ) -> list[int]:
        """Add a call of a jaxpr for its needed results, by default all."""
        needed = needed or [True for _ in outs]
        taken = [out for out, is_needed in zip(outs, needed, strict=True) if is_needed]
        made = iter(self.emit_all("call", operands, taken, {}, body=self.of(jaxpr, needed)))
        return [next(made) if is_needed else _UNUSED for is_needed in needed]

    def indexed(self, value: int, index: int) -> int:
        """Add a call that takes the part at an index of the first dim."""
        shape, dtype = self.values[value]
        body = self.within([[shape, dtype], INDEX])
        zeros = [body.constant(INDEX, 0) for _ in shape[1:]]
        part = [[1, *shape[1:]], dtype]
        cut = body.emit("dynamic_slice", [0, 1, *zeros], part, slice_sizes=part[0])
        return self.called(body, [value, index], body.emit("reshape", [cut], [shape[1:], dtype]))

    def updated(self, value: int, part: int, index: int) -> int:
        """Add a call that puts a part at an index of the first dim."""
        shape, dtype = self.values[value]
        body = self.within([[shape, dtype], self.values[part], INDEX])
        dims = list(range(1, len(shape)))
        wide = body.emit("broadcast_in_dim", [1], [[1, *shape[1:]], dtype], broadcast_dimensions=dims)
        zeros = [body.constant(INDEX, 0) for _ in shape[1:]]
        made = body.emit("dynamic_update_slice", [0, wide, 2, *zeros], [shape, dtype])
        return self.called(body, [value, part, index], made)


def _constant_json(value: Any) -> Any:
    """Return the elements of a constant for JSON, which has no infinities, NaN and complex numbers: these are words."""
    if isinstance(value, list):
        return [_constant_json(each) for each in value]
    is_plain = not isinstance(value, complex) and (not isinstance(value, float) or math.isfinite(value))
    return value if is_plain else str(value)


def _needed(jaxpr: Mapping[str, Any], used: Sequence[bool], count: int) -> list[list[bool]]:
    """Return, for each equation, true for the results that the used results of the jaxpr need.

    The jaxpr has `count` inputs and constants.
    """
    needed = {
        value for value, is_used in zip(jaxpr["outputs"], used, strict=True) if is_used and isinstance(value, int)
    }
    count += sum(len(eqn["out"]) for eqn in jaxpr["eqns"])
    found = []
    for eqn in reversed(jaxpr["eqns"]):
        count -= len(eqn["out"])
        found.append([count + at in needed for at in range(len(eqn["out"]))])
        if any(found[-1]):
            needed.update(value for value in eqn["in"] if isinstance(value, int))
    return found[::-1]


def _fits_rule(name: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> bool:
    try:
        factor_rule(name, operands, results)
    except LayoutError:
        return False
    return True
