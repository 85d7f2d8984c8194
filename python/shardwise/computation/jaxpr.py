"""Computations of jaxprs: JAX's primitives as the ops of StableHLO that JAX lowers them to.

A jaxpr is data here, so that only tracing needs JAX: `{"inputs": [[shape, dtype]], "consts", "eqns", "outputs"}`, each
of `eqns` with `op`, `params`, `in`, `out` and perhaps `source`. A value is a number (inputs, constants, results in
order) or a literal, `{"lit": number, "aval": [shape, dtype]}`; a param that is a jaxpr is `{"jaxpr": ...}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .._text import shown
from ..errors import LayoutError
from .computation import Computation
from .factor_rule import FactorRule, factor_rule
from .primitives import (
    ALIKE,
    BODIES,
    CALLS,
    CUMULATIVE,
    ELEMENTWISE,
    INLINED,
    NOTHING,
    ORDER,
    RANDOM,
    SCATTERS,
    START,
    WINDOWS,
)

__all__ = ["Aval", "computation_of_jaxpr"]

#: A shape and a dtype.
Aval = list[Any]


def computation_of_jaxpr(
    jaxpr: Mapping[str, Any], *, rules: Mapping[str, FactorRule] | None = None, unknown: Literal["whole"] | None = None
) -> Computation:
    """Return the computation of a jaxpr; see `computation_from_jax`."""
    said = _Body(rules or {}, unknown).of(jaxpr)
    return Computation(said["inputs"], said["ops"], said["outputs"], names=jaxpr.get("names", ()), unknown=unknown)


#: The number that stands for a value that nothing uses.
_UNUSED = -1


class _Body:
    """The ops of one jaxpr, as JSON has a computation."""

    def __init__(self, rules: Mapping[str, FactorRule], unknown: str | None) -> None:
        self._rules, self._unknown = rules, unknown
        self._values: list[Aval] = []
        self._inputs = 0
        self._ops: list[dict[str, Any]] = []
        self._source = ""

    def of(self, jaxpr: Mapping[str, Any], used: Sequence[bool] | None = None) -> dict[str, Any]:
        """Return the jaxpr as JSON has a computation, of those results that are used."""
        self._values = [list(value) for value in jaxpr["inputs"]]
        self._inputs = len(self._values)
        outputs = self._inlined(jaxpr, range(self._inputs), used)
        return self._said([output for output in outputs if output != _UNUSED])

    def _said(self, outputs: Sequence[int]) -> dict[str, Any]:
        return {"inputs": self._values[: self._inputs], "ops": self._ops, "outputs": list(outputs)}

    def _within(self, values: Sequence[Aval]) -> _Body:
        """Return a body that takes such values, for its ops to come."""
        body = _Body(self._rules, self._unknown)
        body._source, body._values, body._inputs = self._source, [list(value) for value in values], len(values)
        return body

    def _called(self, body: _Body, operands: Sequence[int], outs: Sequence[Aval], outputs: Sequence[int]) -> list[int]:
        return self._emit_all("call", operands, outs, {}, body=body._said(outputs))

    def _inlined(
        self, jaxpr: Mapping[str, Any], inputs: Sequence[int], used: Sequence[bool] | None = None
    ) -> list[int]:
        """Emit what the results that are used need, as JAX does, and give the numbers of the results."""
        env = list(inputs)
        constants = zip(
            jaxpr.get("consts", ()), jaxpr.get("values", [None] * len(jaxpr.get("consts", ()))), strict=True
        )
        env += [self._constant(out, value) for out, value in constants]
        used = [True for _ in jaxpr["outputs"]] if used is None else used
        for eqn, needed in zip(jaxpr["eqns"], _needed(jaxpr, used, len(env)), strict=True):
            if not any(needed):
                env += [_UNUSED for _ in needed]
                continue
            before, self._source = self._source, eqn.get("source", self._source)
            operands = [self._operand(env, value) for value in eqn["in"]]
            env += self._eqn(eqn["op"], eqn["params"], operands, eqn["out"], needed)
            self._source = before
        pairs = zip(jaxpr["outputs"], used, strict=True)
        return [self._operand(env, value) if is_used else _UNUSED for value, is_used in pairs]

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

    def _call(
        self,
        jaxpr: Mapping[str, Any],
        operands: Sequence[int],
        outs: Sequence[Aval],
        needed: Sequence[bool] | None = None,
    ) -> list[int]:
        needed = [True for _ in outs] if needed is None else needed
        taken = [out for out, is_needed in zip(outs, needed, strict=True) if is_needed]
        made = iter(self._emit_all("call", operands, taken, {}, body=self._within([]).of(jaxpr, needed)))
        return [next(made) if is_needed else _UNUSED for is_needed in needed]

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

    def _eqn(
        self, name: str, params: Mapping[str, Any], operands: list[int], outs: Sequence[Aval], needed: Sequence[bool]
    ) -> list[int]:
        if name in self._rules:
            return self._emit_all(name, operands, outs, {}, rule=self._rules[name].to_json())
        if name in NOTHING:
            return list(operands)
        if name in CALLS:
            return self._call(_jaxpr_of(params), operands, outs, needed)
        if name in INLINED:
            if params.get("prevent_cse") and params.get("differentiated"):
                operands = self._emit_all("barrier", operands, [self._values[value] for value in operands], {})
            return self._inlined(_jaxpr_of(params), operands, needed)
        if name == "scan":
            return self._scan(params, operands, outs)
        if name == "while":
            return self._while(params, operands, outs)
        if name == "cond":
            branches = [self._within([]).of(branch["jaxpr"]) for branch in params["branches"]]
            return self._emit_all("case", operands, outs, {}, bodies=branches)
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
        """Return the result of a primitive that has one."""
        shape, dtype = out
        if name in ELEMENTWISE:
            if name == "exp2":
                operands = [self._emit("multiply", [self._full(shape, dtype, math.log(2)), *operands], out)]
            scalars = (0, 2) if name == "clamp" else ()
            taken = [v if at in scalars else self._broadcast(v, shape) for at, v in enumerate(operands)]
            return self._emit(ELEMENTWISE[name], taken, out, **({"direction": name.upper()} if name in ORDER else {}))
        if name.startswith("reduce_") and name[7:] in BODIES:
            start = self._constant([[], dtype], START[BODIES[name[7:]]])
            attributes = {"dimensions": params["axes"], "body": BODIES[name[7:]], "n": 1}
            return self._emit("reduce", [operands[0], start], out, **attributes)
        if name in SCATTERS:
            return self._scatter(SCATTERS[name], params, operands, out)
        if name in CUMULATIVE:
            return self._cumulative(CUMULATIVE[name], params, operands[0], out)
        if name in WINDOWS:
            return self._windows(WINDOWS[name], params, operands[0], out)
        if name in ("argmax", "argmin"):
            return self._argument(name[3:], params, operands[0], out)
        if name in RANDOM:
            return self._random(operands, out)
        if name in ALIKE:
            op, param = ALIKE[name]
            return self._emit(op, operands, out, **({} if param is None else {param: params[param]}))
        method = getattr(self, f"_lower_{name}", None)
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
        inner = self._within(avals)
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
        found = self._emit_all("loop", every, avals, {}, body=inner._said(results), trips=params["length"])
        return found[ends[2] :]

    def _while(self, params: Mapping[str, Any], operands: list[int], outs: Sequence[Aval]) -> list[int]:
        """Make a loop with a test: its values are the constants of the test and of the body, then what is carried."""
        counts = params["cond_nconsts"], params["body_nconsts"]
        of_test, fixed = range(counts[0]), range(sum(counts))
        carried = range(sum(counts), len(operands))
        avals = [self._values[value] for value in operands]
        test, body = self._within(avals), self._within(avals)
        tested = test._inlined(params["cond_jaxpr"]["jaxpr"], [*of_test, *carried])[0]
        made = body._inlined(params["body_jaxpr"]["jaxpr"], [*fixed[counts[0] :], *carried])
        shape = test._shape(tested)
        if shape:
            # Of a batch each goes on by itself: as long as one does, the others keep what they have.
            no, every = (
                test._constant([[], "bool"], False),
                {"dimensions": list(range(len(shape))), "body": "or", "n": 1},
            )
            tested = test._emit("reduce", [tested, no], [[], "bool"], **every)
            goes = body._inlined(params["cond_jaxpr"]["jaxpr"], [*of_test, *carried])[0]
            made = [
                body._emit("select", [body._broadcast(goes, out[0], range(len(shape))), new, old], out)
                for new, old, out in zip(made, carried, outs, strict=True)
            ]
        bodies = [test._said([tested]), body._said([*fixed, *made])]
        return self._emit_all("while", operands, avals, {}, bodies=bodies)[len(fixed) :]

    def _indexed(self, value: int, index: int) -> int:
        """Take the part at an index of the first dim, in a call."""
        shape, dtype = self._values[value]
        body = self._within([[shape, dtype], [[], "int32"]])
        part, out = [[1, *shape[1:]], dtype], [shape[1:], dtype]
        zeros = [body._constant([[], "int32"], 0) for _ in shape[1:]]
        cut = body._emit("dynamic_slice", [0, 1, *zeros], part, slice_sizes=part[0])
        return self._called(body, [value, index], [out], [body._emit("reshape", [cut], out)])[0]

    def _updated(self, value: int, part: int, index: int) -> int:
        """Put a part at an index of the first dim, in a call."""
        shape, dtype = self._values[value]
        body = self._within([[shape, dtype], self._values[part], [[], "int32"]])
        dims = list(range(1, len(shape)))
        wide = body._emit("broadcast_in_dim", [1], [[1, *shape[1:]], dtype], broadcast_dimensions=dims)
        zeros = [body._constant([[], "int32"], 0) for _ in shape[1:]]
        made = body._emit("dynamic_update_slice", [0, wide, 2, *zeros], [shape, dtype])
        return self._called(body, [value, part, index], [[shape, dtype]], [made])[0]

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

    def _lower_gather(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
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
        inner = self._within([out])
        start = inner._constant([[], dtype], START[body])
        start = inner._emit("broadcast_in_dim", [start], [[], dtype], broadcast_dimensions=[])
        window = [size if dim == axis else 1 for dim in range(len(shape))]
        pads = [0, size - 1] if params["reverse"] else [size - 1, 0]
        padding = [pads if dim == axis else [0, 0] for dim in range(len(shape))]
        attributes = {"window_dimensions": window, "window_strides": [1] * len(shape), "padding": padding, "body": body}
        made = inner._emit("reduce_window", [0, start], out, **attributes)
        return self._called(inner, [operand], [out], [made])[0]

    def _windows(self, body: str, params: Mapping[str, Any], operand: int, out: Aval) -> int:
        start = self._constant([[], out[1]], START[body])
        return self._emit("reduce_window", [operand, start], out, **_window_of(params), body=body)

    def _lower_select_and_scatter_add(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        source, operand = operands
        start = self._constant([[], out[1]], 0)
        return self._emit("select_and_scatter", [operand, source, start], out, **_window_of(params))

    def _argument(self, which: str, params: Mapping[str, Any], operand: int, out: Aval) -> int:
        """Reduce elements with their places."""
        shape, dtype = self._values[operand]
        (axis,), body = params["axes"], {"max": "maximum", "min": "minimum"}[which]
        places = self._emit("iota", [], [shape, out[1]], dimension=axis)
        starts = [self._constant([[], dtype], START[body]), self._constant([[], out[1]], 0)]
        attributes = {"dimensions": [axis], "body": body, "n": 2}
        return self._emit_all("reduce", [operand, places, *starts], [[out[0], dtype], out], attributes)[1]

    def _random(self, operands: list[int], out: Aval) -> int:
        """Draw numbers: each element is made of its own counter and of the key, which all devices have."""
        drawn = self._constant(out, None)
        shape, dtype = self._values[operands[0]]
        if dtype != out[1] or len(shape) != 1:
            return drawn
        given = {"start_indices": [0], "limit_indices": [1], "strides": [1]}
        key = self._emit("reshape", [self._emit("slice", [operands[0]], [[1], dtype], **given)], [[], dtype])
        return self._emit("xor", [drawn, self._broadcast(key, out[0])], out)

    def _lower_select_n(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        which, *cases = operands
        if len(cases) != 2:
            raise LayoutError(f"JAX's select_n of {len(cases)} cases is not supported; write it as jax.numpy.where")
        return self._emit("select", [which, cases[1], cases[0]], out)

    def _lower_integer_pow(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
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

    def _lower_convert_element_type(self, _params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        shape, dtype = out
        before = self._values[operands[0]][1]
        if dtype == "bool" and before != "bool":
            operands = [self._emit("compare", [operands[0], self._full(shape, before, 0)], out, direction="NE")]
        return self._emit("convert", operands, out)

    def _lower_slice(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        strides = params.get("strides") or [1] * len(out[0])
        given = {"start_indices": params["start_indices"], "limit_indices": params["limit_indices"]}
        return self._emit("slice", operands, out, **given, strides=strides)

    def _lower_pad(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        low, high, interior = (list(each) for each in zip(*params["padding_config"], strict=True))
        given = {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": interior}
        return self._emit("pad", operands, out, **given)

    def _lower_fft(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        kind = ("FFT", "IFFT", "RFFT", "IRFFT")[params["fft_type"]]
        return self._emit("fft", operands, out, fft_type=kind, fft_length=params["fft_lengths"])

    def _lower_dot_general(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
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

    def _lower_conv_general_dilated(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
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

    def _lower_sharding_constraint(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        spec = params["sharding"]["spec"]
        free = params.get("unconstrained_dims")
        may_grow = sorted(free) if isinstance(free, (list, tuple, set, frozenset)) else []
        axes = [*spec, *[[]] * (len(out[0]) - len(spec))]
        return self._emit("constraint", operands, out, axes=axes, **({"open": may_grow} if may_grow else {}))

    def _lower_reshard(self, params: Mapping[str, Any], operands: list[int], out: Aval) -> int:
        spec = params["dst_sharding"]["spec"]
        return (
            self._lower_sharding_constraint({"sharding": {"spec": spec}}, operands, out) if any(spec) else operands[0]
        )


def _window_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of a primitive as the attributes of an op."""
    for name in ("base_dilation", "window_dilation"):
        if any(size != 1 for size in params.get(name) or ()):
            raise LayoutError(f"a window with {name} {shown(params[name])} is not supported; write it as a convolution")
    return {name: params[name] for name in ("window_dimensions", "window_strides", "padding")}


def _slices(outs: Sequence[Aval]) -> list[Aval]:
    return [[shape[1:], dtype] for shape, dtype in outs]


def _needed(jaxpr: Mapping[str, Any], used: Sequence[bool], count: int) -> list[list[bool]]:
    """Say of each equation which of its results the used ones of a jaxpr with `count` inputs and constants need."""
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
