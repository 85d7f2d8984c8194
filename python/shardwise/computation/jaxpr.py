"""Computations of jaxprs: JAX's primitives as the ops of StableHLO that JAX lowers them to.

Jaxprs are data here, so that only tracing needs JAX: `{"inputs": [[shape, dtype]], "consts", "eqns", "outputs"}`, each
of `eqns` with `op`, `params`, `in`, `out` and perhaps `source`. A value is a number (inputs, constants, results in
order) or a literal, `{"lit": number, "aval": [shape, dtype]}`; a param that is a jaxpr is `{"jaxpr": ...}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from .computation import Computation
from .factor_rule import FactorRule, check_unknown
from .lookups import lowered_gather, lowered_scatter
from .lowering import INDEX, Eqn, Lowered, Lowering
from .primitives import ALIKE, BODIES, CALLS, CUMULATIVE, ELEMENTWISE, INLINED, NOTHING, ORDER, RANDOM

__all__ = ["computation_of_jaxpr"]


def computation_of_jaxpr(
    jaxpr: Mapping[str, Any], *, rules: Mapping[str, FactorRule] | None = None, unknown: Literal["whole"] | None = None
) -> Computation:
    """Return the computation of a jaxpr as data, in the form that this module's docstring describes.

    Args:
        jaxpr: the jaxpr; its `names` are those of the inputs.
        rules: as for `computation_from_jax`.
        unknown: as for `computation_from_jax`.

    Raises:
        LayoutError: as for `computation_from_jax`.

    >>> tanh = {"op": "tanh", "params": {}, "in": [0], "out": [[[4], "float32"]]}
    >>> computation_of_jaxpr({"inputs": [[[4], "float32"]], "eqns": [tanh], "outputs": [1]}).ops[0].name
    'tanh'
    """
    said = Lowering((), Lowered(_LOWERED, rules or {}, check_unknown(unknown))).of(jaxpr)
    return Computation.from_json(said | {"names": jaxpr.get("names", ())})


def _inlined(body: Lowering, eqn: Eqn) -> list[int]:
    operands = eqn.operands
    if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
        operands = body.emit_all("barrier", operands, [body.values[value] for value in operands], {})
    return body.inlined(eqn.jaxpr, operands, eqn.needed)


def _scan(body: Lowering, eqn: Eqn) -> list[int]:
    """Add a loop over scanned values, constants, a counter, carried values and stacked results, as JAX does."""
    params, outs = eqn.params, eqn.outs
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carries = eqn.operands[:consts], eqn.operands[consts : consts + carried]
    scanned = eqn.operands[consts + carried :]
    counter = body.constant(INDEX, 0)
    stacked = [body.full(shape, dtype, 0) for shape, dtype in outs[carried:]]
    if not params["length"]:
        return [*carries, *stacked]
    every = [*scanned, *fixed, counter, *carries, *stacked]
    avals = [body.values[value] for value in every]
    inner = body.within(avals)
    at = len(scanned) + consts
    index = at
    if params.get("reverse"):
        index = inner.emit("subtract", [inner.constant(INDEX, params["length"]), index], INDEX)
        index = inner.emit("subtract", [index, inner.constant(INDEX, 1)], INDEX)
    slices = [inner.indexed(x, index) for x in range(len(scanned))]
    taken = [*range(len(scanned), at), *range(at + 1, at + 1 + carried), *slices]
    made = inner.call(eqn.jaxpr, taken, [*outs[:carried], *([shape[1:], dtype] for shape, dtype in outs[carried:])])
    pairs = zip(range(at + 1 + carried, len(every)), made[carried:], strict=True)
    updated = [inner.updated(y, part, index) for y, part in pairs]
    step = inner.emit("add", [at, inner.constant(INDEX, 1)], INDEX)
    results = [*range(at), step, *made[:carried], *updated]
    found = body.emit_all("loop", every, avals, {}, body=inner.said(results), trips=params["length"])
    return found[at + 1 :]


def _while(body: Lowering, eqn: Eqn) -> list[int]:
    """Add a loop with a test, over the constants of the test and of the body and the carried values."""
    params, operands = eqn.params, eqn.operands
    of_test, fixed = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carried = range(fixed, len(operands))
    avals = [body.values[value] for value in operands]
    test, inner = body.within(avals), body.within(avals)
    condition = params["cond_jaxpr"]["jaxpr"]
    tested = test.inlined(condition, [*range(of_test), *carried])[0]
    made = inner.inlined(params["body_jaxpr"]["jaxpr"], [*range(of_test, fixed), *carried])
    shape = test.shape(tested)
    if shape:
        # In a batch of loops, those that have ended keep their values until all have.
        dims = range(len(shape))
        tested = test.reduce("or", tested, test.constant([[], "bool"], False), dims, [[], "bool"])
        goes = inner.inlined(condition, [*range(of_test), *carried])[0]
        made = [
            inner.emit("select", [inner.broadcast(goes, out[0], dims), new, old], out)
            for new, old, out in zip(made, carried, eqn.outs, strict=True)
        ]
    bodies = [test.said([tested]), inner.said([*range(fixed), *made])]
    return body.emit_all("while", operands, avals, {}, bodies=bodies)[fixed:]


def _cond(body: Lowering, eqn: Eqn) -> list[int]:
    branches = [body.of(branch["jaxpr"]) for branch in eqn.params["branches"]]
    return body.emit_all("case", eqn.operands, eqn.outs, {}, bodies=branches)


def _linear_solve(body: Lowering, eqn: Eqn) -> list[int]:
    """Add the solution of a linear equation by its own solver, as JAX does."""
    constants = eqn.params["const_lengths"]
    first = constants["matvec"] + constants["vecmat"]
    operands = eqn.operands[first : first + constants["solve"]] + eqn.operands[sum(constants.values()) :]
    return body.inlined(eqn.params["jaxprs"]["solve"]["jaxpr"], operands, eqn.needed)


def _split(body: Lowering, eqn: Eqn) -> list[int]:
    first, found = 0, []
    for size in eqn.params["sizes"]:
        found.append(body.part(eqn.operands[0], eqn.params["axis"], first, size))
        first += size
    return found


def _stack(body: Lowering, eqn: Eqn) -> int:
    shape, dim = eqn.out[0], eqn.params["axis"]
    others = [at for at in range(len(shape)) if at != dim]
    parts = [body.broadcast(value, [*shape[:dim], 1, *shape[dim + 1 :]], others) for value in eqn.operands]
    return body.emit("concatenate", parts, eqn.out, dimension=dim)


def _unstack(body: Lowering, eqn: Eqn) -> list[int]:
    parts = [body.part(eqn.operands[0], eqn.params["axis"], at, 1) for at in range(len(eqn.outs))]
    return [body.emit("reshape", [part], out) for part, out in zip(parts, eqn.outs, strict=True)]


def _tile(body: Lowering, eqn: Eqn) -> int:
    (value,), dtype = eqn.operands, eqn.out[1]
    pairs = list(zip(eqn.params["reps"], body.shape(value), strict=True))
    alone = body.emit("reshape", [value], [[n for _, size in pairs for n in (1, size)], dtype])
    return body.emit("reshape", [body.broadcast(alone, [n for pair in pairs for n in pair])], eqn.out)


def _conjugate(body: Lowering, eqn: Eqn) -> int:
    of_part = [eqn.out[0], {"complex64": "float32"}.get(eqn.out[1], "float64")]
    real, imaginary = (body.emit(name, eqn.operands, of_part) for name in ("real", "imag"))
    return body.emit("complex", [real, body.emit("negate", [imaginary], of_part)], eqn.out)


def _platform_index(body: Lowering, eqn: Eqn) -> int:
    """Add the number of the default branch, or the last."""
    platforms = eqn.params["platforms"]
    return body.constant(eqn.out, platforms.index(None) if None in platforms else len(platforms) - 1)


def _eigh(body: Lowering, eqn: Eqn) -> list[int] | None:
    if eqn.params.get("subset_by_index"):
        return None
    return body.emit_all("eigh", eqn.operands, eqn.outs, {"lower": eqn.params["lower"]})


def _top_k(body: Lowering, eqn: Eqn) -> list[int]:
    order = list(range(len(eqn.out[0])))
    axis = eqn.params.get("axis", order[-1])
    order[axis], order[-1] = order[-1], order[axis]
    outs = [[[shape[dim] for dim in order], dtype] for shape, dtype in eqn.outs]
    found = body.emit_all("top_k", [body.transposed(eqn.operands[0], order)], outs, {})
    return [body.transposed(each, order) for each in found]


def _sort(body: Lowering, eqn: Eqn) -> list[int]:
    given = {"dimension": eqn.params["dimension"], "n": len(eqn.operands), "num_keys": eqn.params.get("num_keys", 1)}
    return body.emit_all("sort", eqn.operands, eqn.outs, given)


def _elementwise(body: Lowering, eqn: Eqn) -> int:
    operands, (shape, dtype) = eqn.operands, eqn.out
    if eqn.name == "exp2":
        operands = [body.emit("multiply", [body.full(shape, dtype, math.log(2)), *operands], eqn.out)]
    scalars = (0, 2) if eqn.name == "clamp" else ()
    taken = [value if at in scalars else body.broadcast(value, shape) for at, value in enumerate(operands)]
    direction = {"direction": eqn.name[:2].upper()} if eqn.name in ORDER else {}
    # JAX numbers the ways to round: away from zero, to even.
    is_away = eqn.name == "round" and eqn.params.get("rounding_method") in (0, "AWAY_FROM_ZERO")
    return body.emit("round_nearest_afz" if is_away else ELEMENTWISE[eqn.name], taken, eqn.out, **direction)


def _alike(body: Lowering, eqn: Eqn) -> list[int]:
    (op, attributes), operands = ALIKE[eqn.name], eqn.operands
    if eqn.name == "reshape" and eqn.params.get("dimensions"):
        # The dims are put in this order first.
        operands = [body.transposed(operands[0], eqn.params["dimensions"])]
    return body.emit_all(op, operands, eqn.outs, {name: eqn.params[name] for name in attributes})


def _reduce(body: Lowering, eqn: Eqn, by: str) -> int:
    return body.reduce(by, eqn.operands[0], body.start(by, eqn.out[1]), eqn.params["axes"], eqn.out)


def _reduce_by_function(body: Lowering, eqn: Eqn) -> list[int] | None:
    """Add a reduction by a jaxpr that is one op of each pair of values."""
    count, eqns = len(eqn.outs), eqn.jaxpr["eqns"]
    pairs = [([at, count + at], [count + at, at]) for at in range(count)]
    is_paired = len(eqns) == count and all(one["in"] in pair for one, pair in zip(eqns, pairs, strict=True))
    bodies = {BODIES.get(one["op"]) for one in eqns}
    if not is_paired or eqn.jaxpr["outputs"] != [*range(2 * count, 3 * count)] or len(bodies) > 1 or None in bodies:
        return None
    given = {"dimensions": eqn.params["dimensions"], "body": bodies.pop(), "n": count}
    return body.emit_all("reduce", eqn.operands, eqn.outs, given)


def _reduce_window(body: Lowering, eqn: Eqn, by: str) -> int | None:
    if any(size != 1 for name in ("base_dilation", "window_dilation") for size in eqn.params.get(name) or ()):
        return None
    return body.emit("reduce_window", [eqn.operands[0], body.start(by, eqn.out[1])], eqn.out, **eqn.window, body=by)


def _select_and_scatter(body: Lowering, eqn: Eqn) -> int:
    source, operand = eqn.operands
    start = body.constant([[], eqn.out[1]], 0)
    by = "minimum" if eqn.params.get("select_prim") == "le" else "maximum"
    return body.emit("select_and_scatter", [operand, source, start], eqn.out, **eqn.window, body=by)


def _cumulative(body: Lowering, eqn: Eqn, by: str) -> int:
    shape, dtype = eqn.out
    axis, size = eqn.params["axis"], shape[eqn.params["axis"]]
    if not size:
        return eqn.operands[0]
    inner = body.within([eqn.out])
    start = inner.emit("broadcast_in_dim", [inner.start(by, dtype)], [[], dtype], broadcast_dimensions=[])
    pads = [0, size - 1] if eqn.params["reverse"] else [size - 1, 0]
    window = {
        "window_dimensions": [size if dim == axis else 1 for dim in range(len(shape))],
        "window_strides": [1] * len(shape),
        "padding": [pads if dim == axis else [0, 0] for dim in range(len(shape))],
    }
    return body.called(inner, eqn.operands, inner.emit("reduce_window", [0, start], eqn.out, **window, body=by))


def _argument(body: Lowering, eqn: Eqn, by: str) -> int:
    """Add a reduction of elements together with their places."""
    shape, dtype = body.values[eqn.operands[0]]
    (axis,), out = eqn.params["axes"], eqn.out
    places = body.emit("iota", [], [shape, out[1]], dimension=axis)
    starts = [body.start(by, dtype), body.constant([[], out[1]], 0)]
    attributes = {"dimensions": [axis], "body": by, "n": 2, "with_places": True}
    return body.emit_all("reduce", [*eqn.operands, places, *starts], [[out[0], dtype], out], attributes)[1]


def _random(body: Lowering, eqn: Eqn) -> int:
    """Add random numbers: a constant of unknown value, combined with the key so that it is not one."""
    drawn = body.constant(eqn.out, None)
    shape, dtype = body.values[eqn.operands[0]]
    if dtype != eqn.out[1] or len(shape) != 1:
        return drawn
    key = body.emit("reshape", [body.part(eqn.operands[0], 0, 0, 1)], [[], dtype])
    return body.emit("xor", [drawn, body.broadcast(key, eqn.out[0])], eqn.out)


def _select_n(body: Lowering, eqn: Eqn) -> int:
    which, *cases = eqn.operands
    shape, dtype = body.values[which]

    def among(first: int, last: int) -> int:
        if last - first == 1:
            return cases[first]
        middle = (first + last) // 2
        is_before = body.emit("compare", [which, body.full(shape, dtype, middle)], [shape, "bool"], direction="LT")
        return body.emit("select", [is_before, among(first, middle), among(middle, last)], eqn.out)

    if dtype == "bool" and len(cases) == 2:
        return body.emit("select", [which, cases[1], cases[0]], eqn.out)
    return among(0, len(cases))


def _integer_pow(body: Lowering, eqn: Eqn) -> int:
    (value,), power, made = eqn.operands, abs(eqn.params["y"]), None
    while power:
        if power & 1:
            made = value if made is None else body.emit("multiply", [made, value], eqn.out)
        power >>= 1
        value = body.emit("multiply", [value, value], eqn.out) if power else value
    if made is None or eqn.params["y"] < 0:
        one = body.full(eqn.out[0], eqn.out[1], 1)
        return one if made is None else body.emit("divide", [one, made], eqn.out)
    return made


def _convert(body: Lowering, eqn: Eqn) -> int:
    (value,), (shape, dtype) = eqn.operands, eqn.out
    before = body.values[value][1]
    if dtype == "bool" and before != "bool":
        value = body.emit("compare", [value, body.full(shape, before, 0)], eqn.out, direction="NE")
    return body.emit("convert", [value], eqn.out)


def _slice(body: Lowering, eqn: Eqn) -> int:
    given = {name: eqn.params[name] for name in ("start_indices", "limit_indices")}
    strides = eqn.params.get("strides") or [1] * len(eqn.out[0])
    return body.emit("slice", eqn.operands, eqn.out, **given, strides=strides)


def _pad(body: Lowering, eqn: Eqn) -> int:
    low, high, interior = (list(each) for each in zip(*eqn.params["padding_config"], strict=True))
    given = {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": interior}
    return body.emit("pad", eqn.operands, eqn.out, **given)


def _fft(body: Lowering, eqn: Eqn) -> int:
    kind = ("FFT", "IFFT", "RFFT", "IRFFT")[eqn.params["fft_type"]]
    return body.emit("fft", eqn.operands, eqn.out, fft_type=kind, fft_length=eqn.params["fft_lengths"])


def _dot_general(body: Lowering, eqn: Eqn) -> int:
    kinds = zip(("contracting", "batching"), eqn.params["dimension_numbers"], strict=True)
    given = {
        f"{side}_{kind}_dimensions": dims
        for kind, both in kinds
        for side, dims in zip(("lhs", "rhs"), both, strict=True)
    }
    return body.emit("dot_general", eqn.operands, eqn.out, **given)


def _convolution(body: Lowering, eqn: Eqn) -> int:
    def names(spec: Sequence[int], first: str) -> list[Any]:
        of_dim: dict[int, Any] = dict(zip(spec, [*first, *range(len(spec) - 2)], strict=True))
        return [of_dim[dim] for dim in sorted(of_dim)]

    said = eqn.params["dimension_numbers"]
    given = {name: names(said[name], "oi" if name == "rhs_spec" else "bf") for name in said}
    for name in (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation"),
        *("feature_group_count", "batch_group_count"),
    ):
        given[name] = eqn.params[name]
    return body.emit("convolution", eqn.operands, eqn.out, **given)


def _constrained(body: Lowering, eqn: Eqn, spec: Sequence[Any], free: Any) -> int:
    may_grow = sorted(free) if isinstance(free, (list, tuple, set, frozenset)) else []
    axes = [*spec, *[[]] * (len(eqn.out[0]) - len(spec))]
    return body.emit("constraint", eqn.operands, eqn.out, axes=axes, **({"open": may_grow} if may_grow else {}))


def _sharding_constraint(body: Lowering, eqn: Eqn) -> int:
    return _constrained(body, eqn, eqn.params["sharding"]["spec"], eqn.params.get("unconstrained_dims"))


def _reshard(body: Lowering, eqn: Eqn) -> int:
    spec = eqn.params["dst_sharding"]["spec"]
    return _constrained(body, eqn, spec, None) if any(spec) else eqn.operands[0]


#: The function that lowers each primitive, to the number of its result or those of several.
_LOWERED: dict[str, Callable[[Lowering, Eqn], int | list[int] | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(ALIKE, _alike),
    **dict.fromkeys(NOTHING, lambda _, eqn: eqn.operands),
    **dict.fromkeys(CALLS, lambda body, eqn: body.call(eqn.jaxpr, eqn.operands, eqn.outs, eqn.needed)),
    **dict.fromkeys(INLINED, _inlined),
    **dict.fromkeys(RANDOM, _random),
    **dict.fromkeys(("empty", "empty2"), lambda body, eqn: body.full(eqn.out[0], eqn.out[1], 0)),
    **{name: partial(_cumulative, by=by) for name, by in CUMULATIVE.items()},
    **{f"reduce_{name}": partial(_reduce, by=by) for name, by in BODIES.items()},
    **{f"reduce_window_{name}": partial(_reduce_window, by=by) for name, by in BODIES.items()},
    **{f"scatter-{name}": partial(lowered_scatter, by=by) for name, by in BODIES.items()},
    "scatter": partial(lowered_scatter, by="assign"),
    "scatter-sub": partial(lowered_scatter, by="add"),
    "argmax": partial(_argument, by="maximum"),
    "argmin": partial(_argument, by="minimum"),
    "cond": _cond,
    "conj": _conjugate,
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "custom_linear_solve": _linear_solve,
    "dot_general": _dot_general,
    "eigh": _eigh,
    "fft": _fft,
    "gather": lowered_gather,
    "integer_pow": _integer_pow,
    "pad": _pad,
    "platform_index": _platform_index,
    "reduce": _reduce_by_function,
    "reshard": _reshard,
    "scan": _scan,
    "select_and_scatter_add": _select_and_scatter,
    "select_n": _select_n,
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "unstack": _unstack,
    "while": _while,
}
