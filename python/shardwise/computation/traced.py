"""Computations of functions of JAX, which it traces to jaxprs; they are read as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._fork import importing
from .computation import Computation
from .factor_rule import FactorRule
from .jaxpr import computation_of_jaxpr
from .lowering import Aval

__all__ = ["computation_from_jax"]

#: The most elements of a constant that are kept.
_MOST = 4096


def computation_from_jax(
    function: Callable[..., Any],
    *shapes: Any,
    rules: Mapping[str, FactorRule] | None = None,
    unknown: Literal["whole"] | None = None,
) -> Computation:
    """Return the computation of a function of JAX, by tracing it; needs JAX, and no devices.

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
    return computation_of_jaxpr(_read(closed.jaxpr, closed.consts) | {"names": paths}, rules=rules, unknown=unknown)


def _read(jaxpr: Any, consts: Sequence[Any] = ()) -> dict[str, Any]:
    """Read a jaxpr of JAX, with the values of its constants."""
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
    """Return the elements of a constant, if they are not too many."""
    return array.tolist() if hasattr(array, "tolist") and math.prod(array.shape) <= _MOST else None


def _aval(aval: Any) -> Aval:
    shape, dtype = list(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "float32"))
    words = _words(aval)
    return [[*shape, *words], "uint32"] if words else [shape, dtype]


def _words(aval: Any) -> tuple[int, ...]:
    """Return the shape of a key of random numbers, which is some words."""
    return getattr(getattr(getattr(aval, "dtype", None), "_impl", None), "key_shape", ())


def _add_words(name: str, params: dict[str, Any], words: tuple[int, ...], rank: int) -> list[Any]:
    """Give a primitive that takes parts of keys the last dim, of words, in its params; return operands to add."""
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
    """Read a param: numbers, words, jaxprs, layouts, and what is made of them."""
    if isinstance(given, (bool, int, float, str)) or given is None:
        return given
    if isinstance(given, np.generic):
        return given.item()
    if hasattr(given, "eqns"):
        return {"jaxpr": _read(given.jaxpr, given.consts) if hasattr(given, "jaxpr") else _read(given)}
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


def _place(eqn: Any) -> str:
    """Return the innermost line that an equation is from outside of installed packages, or else outside of JAX."""
    with importing:
        from jax._src import source_info_util
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [frame for frame in frames if not {"site-packages", "dist-packages"} & {*Path(frame.file_name).parts}]
    return next((f"{frame.file_name}:{frame.start_line}" for frame in [*own, *frames]), "")
