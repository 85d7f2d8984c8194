"""Computations of functions of JAX: JAX traces them to jaxprs, which are read as data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._arguments import instance
from .._fork import importing
from .._text import shown
from .computation import Computation
from .factor_rule import FactorRule, check_unknown
from .jaxpr import computation_of_jaxpr
from .lowering import Aval

__all__ = ["computation_from_jax"]

#: The most elements of a constant whose value is kept.
_MOST = 4096


def computation_from_jax(
    function: Callable[..., Any],
    *shapes: Any,
    rules: Mapping[str, FactorRule] | None = None,
    unknown: Literal["whole"] | None = None,
) -> Computation:
    """Return the computation of a function of JAX, which JAX traces; it needs no devices, and compiles nothing.

    A function of a whole training step is traced with its gradients and its optimizer. The `names` of the inputs are
    those of the function's parameters, with paths as `jax.tree_util.keystr` writes them: `x`, `params['w']`. Without a
    signature they begin with a number: `[0]['w']`. The place of an op is the innermost line of its traceback outside
    of JAX and of installed packages.

    Args:
        function: a function that `jax.jit` can trace.
        shapes: the arguments of the function: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
        rules: the factor rules of primitives that are not known here, by the primitives' names.
        unknown: `"whole"` to take all other primitives as ops that need their operands whole, with a warning.

    Raises:
        LayoutError: if a primitive is not known; the error names it, its place, and both ways to continue.
        TypeError: if `function` cannot be called, or a rule is not a `FactorRule`. JAX's own errors are raised as they
            are.

    Examples are in the page "Which line causes this all-gather", which the tests run:

        computation = computation_from_jax(step, weights, x)
    """
    if not callable(function):
        raise TypeError(f"function must be a function of JAX, got {shown(function)}")
    for name, rule in (rules or {}).items():
        instance(f"rules[{name!r}]", rule, FactorRule)
    check_unknown(unknown)
    with importing:
        import jax
        from jax import tree_util
    closed = jax.make_jaxpr(function)(*shapes)
    names = [
        name + tree_util.keystr(path)
        for name, tree in zip(_parameters(function, shapes), shapes, strict=True)
        for path, _ in tree_util.tree_flatten_with_path(tree)[0]
    ]
    return computation_of_jaxpr(_read(closed.jaxpr, closed.consts) | {"names": names}, rules=rules, unknown=unknown)


def _parameters(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    """Return the names that a function has for its arguments, or their numbers, as in `[0]`."""
    try:
        bound = inspect.signature(function).bind(*range(len(arguments)))
    except (TypeError, ValueError):
        return [f"[{at}]" for at in range(len(arguments))]
    names: list[str] = []
    for name, given in bound.arguments.items():
        names += [f"{name}[{at}]" for at in range(len(given))] if isinstance(given, tuple) else [name]
    return names


def _read(jaxpr: Any, consts: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a jaxpr of JAX and its constants as data."""
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
        params = {name: _param(given) for name, given in eqn.params.items() if given is not None}
        if eqn.invars and (words := _words(eqn.invars[0].aval)):
            taken += _add_words(eqn.primitive.name, params, words, len(eqn.outvars[0].aval.shape))
        eqns.append(
            {
                "op": eqn.primitive.name,
                "params": params,
                "in": taken,
                "out": [_aval(variable.aval) for variable in eqn.outvars],
            }
            | ({"source": place} if (place := _place(eqn)) else {})
        )
    return {
        "inputs": [_aval(variable.aval) for variable in jaxpr.invars],
        "consts": [_aval(variable.aval) for variable in jaxpr.constvars],
        "values": [_listed(array) for array in consts],
        "eqns": eqns,
        "outputs": [value(variable) for variable in jaxpr.outvars],
    }


def _listed(array: Any) -> Any:
    """Return the elements of a constant, or `None` if they are too many."""
    return array.tolist() if hasattr(array, "tolist") and math.prod(array.shape) <= _MOST else None


def _aval(aval: Any) -> Aval:
    shape, dtype = list(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "float32"))
    words = _words(aval)
    return [[*shape, *words], "uint32"] if words else [shape, dtype]


def _words(aval: Any) -> tuple[int, ...]:
    """Return the shape of a key of random numbers in words, empty for anything else."""
    return getattr(getattr(getattr(aval, "dtype", None), "_impl", None), "key_shape", ())


def _add_words(name: str, params: dict[str, Any], words: tuple[int, ...], rank: int) -> list[Any]:
    """Add the dim of a key's words to the params of a primitive that takes keys apart; return operands to add."""
    if name == "slice":
        params["start_indices"] += [0]
        params["limit_indices"] += words
        if "strides" in params:
            params["strides"] += [1]
    elif name in ("broadcast_in_dim", "transpose"):
        params["permutation" if name == "transpose" else "broadcast_dimensions"] += [rank]
    elif name == "dynamic_slice":
        params["slice_sizes"] += words
        return [{"lit": 0, "aval": [[], "int32"]}]
    return []


def _param(given: Any) -> Any:
    """Return a param as data: numbers, words, jaxprs, layouts, and lists and mappings of these."""
    if isinstance(given, (bool, int, float, str)) or given is None:
        return given
    if isinstance(given, np.generic):
        return given.item()
    if hasattr(given, "eqns"):
        return {"jaxpr": _read(given.jaxpr, given.consts) if hasattr(given, "jaxpr") else _read(given)}
    if hasattr(given, "spec"):
        # `None` and `UNCONSTRAINED` are no axes; the param `unconstrained_dims` tells them apart.
        spec = [
            [axes] if isinstance(axes, str) else axes if isinstance(axes, (tuple, list)) else () for axes in given.spec
        ]
        return {"spec": [list(axes) for axes in spec]}
    if hasattr(given, "_asdict") or hasattr(given, "__dataclass_fields__"):
        names = given._fields if hasattr(given, "_asdict") else given.__dataclass_fields__
        return {name: _param(getattr(given, name)) for name in names}
    if isinstance(given, (tuple, list, set, frozenset)):
        return [_param(each) for each in given]
    return str(given)


def _place(eqn: Any) -> str:
    """Return the innermost line of an equation outside of installed packages, or else outside of JAX."""
    with importing:
        from jax._src import source_info_util
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [frame for frame in frames if not {"site-packages", "dist-packages"} & {*Path(frame.file_name).parts}]
    return next((f"{frame.file_name}:{frame.start_line}" for frame in [*own, *frames]), "")
