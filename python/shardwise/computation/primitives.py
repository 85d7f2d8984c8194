"""JAX's primitives by their names: which op of StableHLO each is, where no more than the name or a param is another."""

from __future__ import annotations

import math

__all__ = [
    "ALIKE",
    "BODIES",
    "CALLS",
    "CUMULATIVE",
    "ELEMENTWISE",
    "INLINED",
    "NOTHING",
    "ORDER",
    "RANDOM",
    "SCATTERS",
    "START",
    "WINDOWS",
]

#: Comparisons.
ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
#: Primitives of their own names in StableHLO.
_SAME_NAME = (
    "abs sign floor ceil tanh tan sinh cosh asin acos atan asinh acosh atanh cbrt sqrt rsqrt log logistic "
    "is_finite not erf erf_inv erfc lgamma digamma real imag square add atan2 and or xor complex shift_left "
    "shift_right_arithmetic shift_right_logical clamp reduce_precision"
)
#: Primitives that are an op of as many operands, each broadcast to the result.
ELEMENTWISE = {
    **{name: name for name in _SAME_NAME.split()},
    **{"neg": "negate", "exp": "exponential", "exp2": "exponential", "log1p": "log_plus_one", "sin": "sine"},
    **{"expm1": "exponential_minus_one", "cos": "cosine", "round": "round_nearest_even", "clz": "count_leading_zeros"},
    **{"population_count": "popcnt", "add_any": "add", "sub": "subtract", "mul": "multiply", "div": "divide"},
    **{"rem": "remainder", "max": "maximum", "min": "minimum", "pow": "power"},
    **dict.fromkeys(ORDER, "compare"),
}
#: Primitives that are an op of the same operands, with one param or none as its attribute.
ALIKE = {
    "bitcast_convert_type": ("bitcast_convert", None),
    "broadcast_in_dim": ("broadcast_in_dim", "broadcast_dimensions"),
    "concatenate": ("concatenate", "dimension"),
    "dynamic_slice": ("dynamic_slice", "slice_sizes"),
    "dynamic_update_slice": ("dynamic_update_slice", None),
    "iota": ("iota", "dimension"),
    "reshape": ("reshape", None),
    "rev": ("reverse", "dimensions"),
    "squeeze": ("reshape", None),
    "transpose": ("transpose", "permutation"),
}
#: Reductions: the op that puts two elements together.
BODIES = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply", "and": "and", "or": "or"}
#: The value that a reduction begins with.
START = {"add": 0, "multiply": 1, "maximum": -math.inf, "minimum": math.inf, "and": True, "or": False}
#: Cumulative ones.
CUMULATIVE = {"cumsum": "add", "cumprod": "multiply", "cummax": "maximum", "cummin": "minimum"}
#: Reductions of windows.
WINDOWS = {"reduce_window_sum": "add", "reduce_window_max": "maximum", "reduce_window_min": "minimum"}
#: Numbers drawn at random, and keys made of others.
RANDOM = ("random_bits", "random_seed", "random_split", "random_fold_in", "random_clone")
#: Scatters: the op that puts an update to what is there.
SCATTERS = {
    "scatter": "assign",
    "scatter-add": "add",
    "scatter-mul": "multiply",
    "scatter-max": "maximum",
    "scatter-min": "minimum",
}
#: Primitives that are their operand as far as layouts go.
NOTHING = (
    *("stop_gradient", "copy", "copy_p", "pvary", "optimization_barrier_p", "name"),
    *("random_wrap", "random_unwrap"),
)
#: Primitives that are the jaxpr that they have: as a call, and in place.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_lin")
INLINED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "checkpoint", "remat")
