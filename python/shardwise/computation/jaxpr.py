"""Computations of jaxprs: JAX's primitives as the ops of StableHLO that JAX lowers them to.

A jaxpr is data here, so that only tracing needs JAX: `{"inputs": [[shape, dtype]], "consts", "eqns", "outputs"}`, each
of `eqns` with `op`, `params`, `in`, `out` and perhaps `source`. A value is a number (inputs, constants, results in
order) or a literal, `{"lit": number, "aval": [shape, dtype]}`; a param that is a jaxpr is `{"jaxpr": ...}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._fork import importing
from .._text import shown
from ..errors import LayoutError
from .computation import Computation
from .factor_rule import FactorRule, factor_rule

__all__ = ["computation_from_jax", "computation_of_jaxpr"]

Aval = list[Any]

#: The most elements of a constant that are kept.
_MOST = 4096

_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
#: Primitives that are an op of as many operands, each broadcast to the result.
_ELEMENTWISE = {
    **{
        name: name
        for name in ("abs", "sign", "floor", "ceil", "tanh", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh")
    },
    **{
        name: name for name in ("acosh", "atanh", "cbrt", "sqrt", "rsqrt", "log", "logistic", "is_finite", "not", "erf")
    },
    **{name: name for name in ("erf_inv", "real", "imag", "square", "add", "atan2", "and", "or", "xor", "complex")},
    **{
        name: name
        for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical", "clamp", "reduce_precision")
    },
    **{"neg": "negate", "exp": "exponential", "exp2": "exponential", "log1p": "log_plus_one", "sin": "sine"},
    **{"expm1": "exponential_minus_one", "cos": "cosine", "round": "round_nearest_even", "clz": "count_leading_zeros"},
    **{"population_count": "popcnt", "add_any": "add", "sub": "subtract", "mul": "multiply", "div": "divide"},
    **{"rem": "remainder", "max": "maximum", "min": "minimum", "pow": "power"},
    **dict.fromkeys(_ORDER, "compare"),
}
#: Reductions: the op that puts two elements together.
_BODIES = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply", "and": "and", "or": "or"}
#: The value that a reduction begins with.
_START = {"add": 0, "multiply": 1, "maximum": -math.inf, "minimum": math.inf, "and": True, "or": False}
_CUMULATIVE = {"cumsum": "add", "cumprod": "multiply", "cummax": "maximum", "cummin": "minimum"}
_SCATTERS = {
    "scatter": "assign",
    "scatter-add": "add",
    "scatter-mul": "multiply",
    "scatter-max": "maximum",
    "scatter-min": "minimum",
}
#: Primitives that are their operand as far as layouts go.
_NOTHING = ("stop_gradient", "copy", "copy_p", "pvary", "optimization_barrier_p")
#: Primitives that are the jaxpr that they have: as a call, and in place.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_lin")
_INLINED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "checkpoint", "remat")


def computation_of_jaxpr(
    jaxpr: Mapping[str, Any], *, rules: Mapping[str, FactorRule] | None = None, unknown: Literal["whole"] | None = None
) -> Computation:
    """Give the computation of a jaxpr; see `computation_from_jax`."""
    said = _Body(rules or {}, unknown).of(jaxpr)
    return Computation(said["inputs"], said["ops"], said["outputs"], names=jaxpr.get("names", ()), unknown=unknown)


class _Body:
    """The ops of one jaxpr, as JSON has a computation."""

    def __init__(self, rules: Mapping[str, FactorRule], unknown: str | None) -> None:
        self._rules, self._unknown = rules, unknown
        self._values: list[Aval] = []
        self._ops: list[dict[str, Any]] = []
        self._source = ""

    def of(self, jaxpr: Mapping[str, Any]) -> dict[str, Any]:
        """Give the jaxpr as JSON has a computation."""
        inputs = [list(value) for value in jaxpr["inputs"]]
        self._values = list(inputs)
        taken = list(range(len(inputs)))
        outputs = self._inlined(jaxpr, taken)
        return {"inputs": inputs, "ops": self._ops, "outputs": outputs}

    def _inlined(self, jaxpr: Mapping[str, Any], inputs: Sequence[int]) -> list[int]:
        env = list(inputs)
        constants = zip(
            jaxpr.get("consts", ()), jaxpr.get("values", [None] * len(jaxpr.get("consts", ()))), strict=True
        )
        env += [self._constant(out, value) for out, value in constants]
        for eqn in jaxpr["eqns"]:
            before, self._source = self._source, eqn.get("source", self._source)
            operands = [self._operand(env, value) for value in eqn["in"]]
            env += self._eqn(eqn["op"], eqn["params"], operands, eqn["out"])
            self._source = before
        return [self._operand(env, value) for value in jaxpr["outputs"]]

    def _operand(self, env: Sequence[int], value: Any) -> int:
        return self._constant(value["aval"], value["lit"]) if isinstance(value, Mapping) else env[value]

    def _constant(self, out: Aval, value: Any) -> int:
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        return self._emit("constant", [], out, **({} if value is None else {"value": value}))

    def _emit(self, op: str, operands: Sequence[int], out: Aval, **attributes: Any) -> int:
        return self._emit_all(op, operands, [out], attributes)[0]

    def _emit_all(
        self, op: str, operands: Sequence[int], outs: Sequence[Aval], attributes: Mapping[str, Any], **more: Any
    ) -> list[int]:
        said = {"op": op, "in": list(operands), "out": [list(out) for out in outs]} | more
        said |= {"attrs": dict(attributes)} if attributes else {}
        self._ops.append(said | ({"source": self._source} if self._source else {}))
        first = len(self._values)
        self._values += [list(out) for out in outs]
        return list(range(first, len(self._values)))

    def _shape(self, value: int) -> list[int]:
        return list(self._values[value][0])

    def _call(self, jaxpr: Mapping[str, Any], operands: Sequence[int], outs: Sequence[Aval]) -> list[int]:
        body = _Body(self._rules, self._unknown)
        body._source = self._source
        return self._emit_all("call", operands, outs, {}, body=body.of(jaxpr))

    def _broadcast(self, value: int, shape: Sequence[int], dims: Sequence[int] | None = None) -> int:
        """Broadcast a value whose dims are the last, or these."""
        if self._shape(value) == list(shape):
            return value
        rank = len(self._shape(value))
        dims = range(len(shape) - rank, len(shape)) if dims is None else dims
        out = [list(shape), self._values[value][1]]
        return self._emit("broadcast_in_dim", [value], out, broadcast_dimensions=list(dims))

    def _full(self, shape: Sequence[int], dtype: str, value: Any) -> int:
        return self._broadcast(self._constant([[], dtype], value), shape)

    def _eqn(self, name: str, params: Mapping[str, Any], operands: list[int], outs: Sequence[Aval]) -> list[int]:
        if name in self._rules:
            return self._emit_all(name, operands, outs, {}, rule=self._rules[name].to_json())
        if name in _NOTHING:
            return list(operands)
        if name in _CALLS:
            return self._call(_jaxpr_of(params), operands, outs)
        if name in _INLINED:
            if params.get("prevent_cse") and params.get("differentiated"):
                operands = self._emit_all("barrier", operands, [self._values[value] for value in operands], {})
            return self._inlined(_jaxpr_of(params), operands)
        if name == "scan":
            return self._scan(params, operands, outs)
        if name == "split":
            return self._split(params, operands[0], outs)
        if name == "optimization_barrier":
            return self._emit_all("barrier", operands, outs, {})
        if name == "sort":
            return self._emit_all("sort", operands, outs, {"dimension": params["dimension"], "n": len(operands)})
        if name == "top_k":
            return self._emit_all("top_k", operands, outs, {})
        return [self._one(name, params, operands, list(outs[0]), outs)]

    def _one(self, name: str, params: Mapping[str, Any], operands: list[int], out: Aval, outs: Sequence[Aval]) -> int:
        """Give the result of a primitive that has one."""
        shape, dtype = out
        if name in _ELEMENTWISE:
            if name == "exp2":
                operands = [self._emit("multiply", [self._full(shape, dtype, math.log(2)), *operands], out)]
            scalars = (0, 2) if name == "clamp" else ()
            taken = [v if at in scalars else self._broadcast(v, shape) for at, v in enumerate(operands)]
            return self._emit(_ELEMENTWISE[name], taken, out, **({"direction": name.upper()} if name in _ORDER else {}))
        if name.startswith("reduce_") and name[7:] in _BODIES:
            start = self._constant([[], dtype], _START[_BODIES[name[7:]]])
            attributes = {"dimensions": params["axes"], "body": _BODIES[name[7:]], "n": 1}
            return self._emit("reduce", [operands[0], start], out, **attributes)
        if name in _SCATTERS:
            return self._scatter(_SCATTERS[name], params, operands, out)
        if name in _CUMULATIVE:
            return self._cumulative(_CUMULATIVE[name], params, operands[0], out)
        method = getattr(self, f"_{name}", None)
        if method is not None:
            return int(method(params, operands, out))
        if self._unknown == "whole" or _has_rule(name, [self._shape(v) for v in operands], outs):
            return self._emit_all(name, operands, outs, {})[0]
        place = f" ({self._source})" if self._source else ""
        raise LayoutError(
            f"no rule is known for JAX's primitive {shown(name)}{place}; give rules={{{name!r}: FactorRule(...)}}, or "
            "unknown='whole' to put its operands together"
        )

    def _split(self, params: Mapping[str, Any], value: int, outs: Sequence[Aval]) -> list[int]:
        shape, axis, found = self._shape(value), params["axis"], []
        first = 0
        for out, size in zip(outs, params["sizes"], strict=True):
            starts, limits = [0] * len(shape), list(shape)
            starts[axis], limits[axis] = first, first + size
            first += size
            attributes = {"start_indices": starts, "limit_indices": limits, "strides": [1] * len(shape)}
            found.append(self._emit("slice", [value], out, **attributes))
        return found

    def _scan(self, params: Mapping[str, Any], operands: list[int], outs: Sequence[Aval]) -> list[int]:
        """Make a loop: its values are what is scanned, constants, the counter, what is carried, what is stacked."""
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, carries = operands[:consts], operands[consts : consts + carried]
        scanned = operands[consts + carried :]
        counter = self._constant([[], "int32"], 0)
        stacked = [self._full(shape, dtype, 0) for shape, dtype in outs[carried:]]
        every = [*scanned, *fixed, counter, *carries, *stacked]
        avals = [self._values[value] for value in every]
        inner = _Body(self._rules, self._unknown)
        inner._source, inner._values = self._source, [list(aval) for aval in avals]
        ends = [len(scanned), len(scanned) + consts, len(scanned) + consts + 1, len(scanned) + consts + 1 + carried]
        xs, cs, at, ys = range(ends[0]), range(ends[0], ends[1]), ends[1], range(ends[3], len(every))
        body = _jaxpr_of(params)
        index = at
        if params.get("reverse"):
            length = inner._constant([[], "int32"], params["length"])
            index = inner._emit("subtract", [length, index], [[], "int32"])
            index = inner._emit("subtract", [index, inner._constant([[], "int32"], 1)], [[], "int32"])
        slices = [inner._indexed(x, index) for x in xs]
        made = inner._call(body, [*cs, *range(ends[2], ends[3]), *slices], [*outs[:carried], *_slices(outs[carried:])])
        updated = [inner._updated(y, part, index) for y, part in zip(ys, made[carried:], strict=True)]
        step = inner._emit("add", [at, inner._constant([[], "int32"], 1)], [[], "int32"])
        results = [*xs, *cs, step, *made[:carried], *updated]
        said = {"inputs": avals, "ops": inner._ops, "outputs": results}
        found = self._emit_all("loop", every, avals, {}, body=said, trips=params["length"])
        return found[ends[2] :]

    def _indexed(self, value: int, index: int) -> int:
        """Take the part at an index of the first dim, in a call."""
        shape, dtype = self._values[value]
        body = _Body(self._rules, self._unknown)
        body._values = [[shape, dtype], [[], "int32"]]
        part = [[1, *shape[1:]], dtype]
        zeros = [body._constant([[], "int32"], 0) for _ in shape[1:]]
        cut = body._emit("dynamic_slice", [0, 1, *zeros], part, slice_sizes=part[0])
        out = [shape[1:], dtype]
        said = {"inputs": body._values[:2], "ops": body._ops, "outputs": [body._emit("reshape", [cut], out)]}
        return self._emit_all("call", [value, index], [out], {}, body=said)[0]

    def _updated(self, value: int, part: int, index: int) -> int:
        """Put a part at an index of the first dim, in a call."""
        shape, dtype = self._values[value]
        body = _Body(self._rules, self._unknown)
        body._values = [[shape, dtype], self._values[part], [[], "int32"]]
        wide = body._emit(
            "broadcast_in_dim", [1], [[1, *shape[1:]], dtype], broadcast_dimensions=list(range(1, len(shape)))
        )
        zeros = [body._constant([[], "int32"], 0) for _ in shape[1:]]
        made = body._emit("dynamic_update_slice", [0, wide, 2, *zeros], [shape, dtype])
        said = {"inputs": body._values[:3], "ops": body._ops, "outputs": [made]}
        return self._emit_all("call", [value, part, index], [[shape, dtype]], {}, body=said)[0]

    def _scatter(self, body: str, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        said = params["dimension_numbers"]
        operand, indices, updates = operands
        if "CLIP" in str(params.get("mode")):
            shape, dtype = self._values[indices]
            windows = iter(said["update_window_dims"])
            alone = [*said["inserted_window_dims"], *said["operand_batching_dims"]]
            parts = [1 if d in alone else self._shape(updates)[next(windows)] for d in range(len(self._shape(operand)))]
            last = [self._shape(operand)[dim] - parts[dim] for dim in said["scatter_dims_to_operand_dims"]]
            bound = self._broadcast(self._constant([shape[-1:], dtype], last), shape, [len(shape) - 1])
            indices = self._emit("clamp", [self._constant([[], dtype], 0), indices, bound], [shape, dtype])
        return self._emit(
            "scatter",
            [operand, indices, updates],
            out,
            offset_dims=said["update_window_dims"],
            collapsed_slice_dims=said["inserted_window_dims"],
            operand_batching_dims=said["operand_batching_dims"],
            start_indices_batching_dims=said["scatter_indices_batching_dims"],
            start_index_map=said["scatter_dims_to_operand_dims"],
            index_vector_dim=len(self._shape(indices)) - 1,
            body=body,
        )

    def _gather(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        operand, indices = operands
        shape, dtype = self._values[indices]
        said = dict(params["dimension_numbers"], index_vector_dim=len(shape) - 1)
        attributes = dict(said, slice_sizes=params["slice_sizes"])
        if "FILL" not in str(params.get("mode")):
            return self._emit("gather", [operand, indices], out, **attributes)
        truth = [shape, "bool"]
        last = [self._shape(operand)[dim] - params["slice_sizes"][dim] for dim in said["start_index_map"]]
        bound = self._constant([shape[-1:], dtype], last)
        above = self._emit("compare", [indices, self._full(shape, dtype, 0)], truth, direction="GE")
        bound = self._broadcast(bound, [1] * (len(shape) - 1) + shape[-1:], [len(shape) - 1])
        below = self._emit(
            "compare", [indices, self._broadcast(bound, shape, range(len(shape)))], truth, direction="LE"
        )
        inside = self._emit("and", [above, below], truth)
        start = self._constant([[], "bool"], True)
        reduction = {"dimensions": [len(shape) - 1], "body": "and", "n": 1}
        mask = self._emit("reduce", [inside, start], [shape[:-1], "bool"], **reduction)
        found = self._emit("gather", [operand, indices], out, **attributes)
        batches = [dim for dim in range(len(out[0])) if dim not in said["offset_dims"]]
        fill = self._full(out[0], out[1], params.get("fill_value", math.nan))
        return self._emit("select", [self._broadcast(mask, out[0], batches), found, fill], out)

    def _cumulative(self, body: str, params: Mapping[str, Any], operand: int, out: Aval) -> int:
        shape, dtype = out
        axis, size = params["axis"], shape[params["axis"]]
        inner = _Body(self._rules, self._unknown)
        inner._values = [out]
        start = inner._constant([[], dtype], _START[body])
        start = inner._emit("broadcast_in_dim", [start], [[], dtype], broadcast_dimensions=[])
        window = [size if dim == axis else 1 for dim in range(len(shape))]
        pads = [0, size - 1] if params["reverse"] else [size - 1, 0]
        padding = [pads if dim == axis else [0, 0] for dim in range(len(shape))]
        attributes = {"window_dimensions": window, "window_strides": [1] * len(shape), "padding": padding, "body": body}
        made = inner._emit("reduce_window", [0, start], out, **attributes)
        said = {"inputs": [out], "ops": inner._ops, "outputs": [made]}
        return self._emit_all("call", [operand], [out], {}, body=said)[0]

    def _select_n(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        which, *cases = operands
        if len(cases) != 2:
            raise LayoutError(f"JAX's select_n of {len(cases)} cases is not supported; write it as jax.numpy.where")
        return self._emit("select", [which, cases[1], cases[0]], out)

    def _integer_pow(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        (x,), left = operands, abs(params["y"])
        made = None
        while left:
            if left & 1:
                made = x if made is None else self._emit("multiply", [made, x], out)
            left >>= 1
            x = self._emit("multiply", [x, x], out) if left else x
        if made is None or params["y"] < 0:
            one = self._full(out[0], out[1], 1)
            return one if made is None else self._emit("divide", [one, made], out)
        return made

    def _convert_element_type(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        shape, dtype = out
        before = self._values[operands[0]][1]
        if dtype == "bool" and before != "bool":
            operands = [self._emit("compare", [operands[0], self._full(shape, before, 0)], out, direction="NE")]
        return self._emit("convert", operands, out)

    def _broadcast_in_dim(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        dims = params["broadcast_dimensions"]
        return self._emit("broadcast_in_dim", operands[:1], out, broadcast_dimensions=dims)

    def _reshape(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("reshape", operands[:1], out)

    _squeeze = _reshape

    def _transpose(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("transpose", operands, out, permutation=params["permutation"])

    def _iota(self, params: Mapping[str, Any], _operands: list[int], out: Aval) -> int:
        return self._emit("iota", [], out, dimension=params["dimension"])

    def _concatenate(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("concatenate", operands, out, dimension=params["dimension"])

    def _slice(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        strides = params.get("strides") or [1] * len(out[0])
        given = {"start_indices": params["start_indices"], "limit_indices": params["limit_indices"]}
        return self._emit("slice", operands, out, **given, strides=strides)

    def _pad(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        low, high, interior = (list(each) for each in zip(*params["padding_config"], strict=True))
        given = {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": interior}
        return self._emit("pad", operands, out, **given)

    def _rev(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("reverse", operands, out, dimensions=params["dimensions"])

    def _dynamic_slice(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("dynamic_slice", operands, out, slice_sizes=params["slice_sizes"])

    def _dynamic_update_slice(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        return self._emit("dynamic_update_slice", operands, out)

    def _dot_general(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        (left, right), (lefts, rights) = params["dimension_numbers"]
        return self._emit(
            "dot_general",
            operands,
            out,
            lhs_batching_dimensions=lefts,
            rhs_batching_dimensions=rights,
            lhs_contracting_dimensions=left,
            rhs_contracting_dimensions=right,
        )

    def _conv_general_dilated(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        def names(spec: Sequence[int], first: str) -> list[Any]:
            found: list[Any] = [None] * len(spec)
            for name, dim in zip([*first, *range(len(spec) - 2)], spec, strict=True):
                found[dim] = name
            return found

        said = params["dimension_numbers"]
        named = {name: names(said[name], "oi" if name == "rhs_spec" else "bf") for name in said}
        given = {name: params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")}
        counts = {name: params[name] for name in ("feature_group_count", "batch_group_count")}
        return self._emit("convolution", operands, out, **named, **given, **counts)

    def _sharding_constraint(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        spec = params["sharding"]["spec"]
        free = params.get("unconstrained_dims")
        may_grow = sorted(free) if isinstance(free, (list, tuple, set, frozenset)) else []
        axes = [*spec, *[[]] * (len(out[0]) - len(spec))]
        return self._emit("constraint", operands, out, axes=axes, **({"open": may_grow} if may_grow else {}))

    def _reshard(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        spec = params["dst_sharding"]["spec"]
        return self._sharding_constraint({"sharding": {"spec": spec}}, operands, out) if any(spec) else operands[0]


def _slices(outs: Sequence[Aval]) -> list[Aval]:
    return [[shape[1:], dtype] for shape, dtype in outs]


def _jaxpr_of(params: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if isinstance(params.get(name), Mapping):
            found: Mapping[str, Any] = params[name]["jaxpr"]
            return found
    raise LayoutError(f"a call has no jaxpr, its params are {shown(sorted(params))}")


def _has_rule(name: str, operands: Sequence[Sequence[int]], outs: Sequence[Aval]) -> bool:
    try:
        factor_rule(name, operands, [shape for shape, _ in outs])
    except LayoutError:
        return False
    return True


def computation_from_jax(
    function: Callable[..., Any],
    *shapes: Any,
    rules: Mapping[str, FactorRule] | None = None,
    unknown: Literal["whole"] | None = None,
) -> Computation:
    """Give the computation of a function of JAX, by tracing it; needs JAX, and no devices.

    Gradients and optimizers are traced with it: give the function of the whole step. The computation's `names` are
    those of the inputs, as `jax.tree_util.keystr` writes them, and the places of its ops are lines of the user's
    source.

    Args:
        function: the function.
        shapes: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
        rules: the factor rules of primitives that are not known, by their names.
        unknown: `"whole"` to take others as ops that need their operands whole.

    Raises:
        LayoutError: if a primitive is not known.
    """
    with importing:
        import jax
        from jax import tree_util
    closed = jax.make_jaxpr(function)(*shapes)
    paths = [tree_util.keystr(path) for path, _ in tree_util.tree_flatten_with_path(shapes)[0]]
    return computation_of_jaxpr(_read(closed) | {"names": paths}, rules=rules, unknown=unknown)


def _read(closed: Any) -> dict[str, Any]:
    """Read a closed jaxpr of JAX."""
    jaxpr = closed.jaxpr
    numbers: dict[Any, int] = {}
    for variable in (*jaxpr.invars, *jaxpr.constvars):
        numbers[variable] = len(numbers)

    def value(variable: Any) -> Any:
        if not hasattr(variable, "val"):
            return numbers[variable]
        literal = variable.val.item() if hasattr(variable.val, "item") else variable.val
        return {"lit": literal, "aval": _aval(variable.aval)}

    eqns = []
    count = len(numbers)
    for eqn in jaxpr.eqns:
        taken = [value(variable) for variable in eqn.invars]
        for variable in eqn.outvars:
            numbers[variable], count = count, count + 1
        eqns.append(
            {
                "op": eqn.primitive.name,
                "params": {name: _param(given) for name, given in eqn.params.items() if given is not None},
                "in": taken,
                "out": [_aval(variable.aval) for variable in eqn.outvars],
            }
            | ({"source": place} if (place := _place(eqn)) else {})
        )
    return {
        "inputs": [_aval(variable.aval) for variable in jaxpr.invars],
        "consts": [_aval(variable.aval) for variable in jaxpr.constvars],
        "values": [_listed(array) for array in getattr(closed, "consts", ())],
        "eqns": eqns,
        "outputs": [value(variable) for variable in jaxpr.outvars],
    }


def _listed(array: Any) -> Any:
    """Give the elements of a constant, if they are not too many."""
    return array.tolist() if hasattr(array, "tolist") and math.prod(array.shape) <= _MOST else None


def _aval(aval: Any) -> Aval:
    return [list(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "float32"))]


def _param(given: Any) -> Any:
    """Read a param: numbers, words, jaxprs, layouts, and what is made of them."""
    if isinstance(given, (bool, int, float, str)) or given is None:
        return given
    if isinstance(given, np.generic):
        return given.item()
    if hasattr(given, "eqns"):
        return {"jaxpr": _read(given if hasattr(given, "jaxpr") else _Closed(given))}
    if hasattr(given, "spec"):
        return {
            "spec": [[] if axes is None else [axes] if isinstance(axes, str) else list(axes) for axes in given.spec]
        }
    if hasattr(given, "_asdict") or hasattr(given, "__dataclass_fields__"):
        names = given._fields if hasattr(given, "_asdict") else given.__dataclass_fields__
        return {name: _param(getattr(given, name)) for name in names}
    if isinstance(given, (tuple, list, set, frozenset)):
        return [_param(each) for each in given]
    return str(given)


class _Closed:
    """A jaxpr with no constants, as one that is closed."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr


def _place(eqn: Any) -> str:
    """Give the line of the user's source that an equation is from."""
    with importing:
        from jax._src import source_info_util
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame is not None else ""
