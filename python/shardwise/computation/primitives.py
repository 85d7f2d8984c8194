"""Names of JAX's primitives, by the way in which they are lowered to ops of StableHLO."""

__all__ = ["ALIKE", "BODIES", "CALLS", "CUMULATIVE", "ELEMENTWISE", "INLINED", "NOTHING", "ORDER", "RANDOM"]

#: Comparisons; the last are those of a total order, in which NaN and the sign of zero count.
ORDER = ("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to")
#: Elementwise primitives whose names are StableHLO's.
_SAME_NAME = (
    "abs sign floor ceil tanh tan sinh cosh asin acos atan asinh acosh atanh cbrt sqrt rsqrt log logistic "
    "is_finite not erf erf_inv erfc lgamma digamma real imag square add atan2 and or xor complex shift_left "
    "shift_right_arithmetic shift_right_logical clamp bessel_i0e bessel_i1e igamma igamma_grad_a "
    "igammac polygamma regularized_incomplete_beta zeta"
)
#: Elementwise primitives and their ops; operands are broadcast to the result.
ELEMENTWISE = {
    **{name: name for name in _SAME_NAME.split()},
    **{"neg": "negate", "exp": "exponential", "exp2": "exponential", "log1p": "log_plus_one", "sin": "sine"},
    **{"expm1": "exponential_minus_one", "cos": "cosine", "round": "round_nearest_even", "clz": "count_leading_zeros"},
    **{"population_count": "popcnt", "add_any": "add", "sub": "subtract", "mul": "multiply", "div": "divide"},
    **{"rem": "remainder", "max": "maximum", "min": "minimum", "pow": "power", "nextafter": "next_after"},
    **dict.fromkeys(ORDER, "compare"),
}
#: Primitives that are an op of the same operands: its name, and its attributes, which are params of the same names.
ALIKE: dict[str, tuple[str, tuple[str, ...]]] = {
    "bitcast_convert_type": ("bitcast_convert", ()),
    "broadcast_in_dim": ("broadcast_in_dim", ("broadcast_dimensions",)),
    "concatenate": ("concatenate", ("dimension",)),
    "dynamic_slice": ("dynamic_slice", ("slice_sizes",)),
    "dynamic_update_slice": ("dynamic_update_slice", ()),
    "iota": ("iota", ("dimension",)),
    "optimization_barrier": ("barrier", ()),
    "reduce_precision": ("reduce_precision", ("exponent_bits", "mantissa_bits")),
    "reshape": ("reshape", ()),
    "rev": ("reverse", ("dimensions",)),
    "squeeze": ("reshape", ()),
    "transpose": ("transpose", ("permutation",)),
    "triangular_solve": (
        "triangular_solve",
        ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"),
    ),
}
#: The ops of reductions, by their names after `reduce_`, `reduce_window_` or `scatter-`.
BODIES = {
    **{"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply", "and": "and", "or": "or"},
    **{"add": "add", "mul": "multiply", "xor": "xor"},
}
#: The ops of cumulative reductions.
CUMULATIVE = {
    **{"cumsum": "add", "cumprod": "multiply", "cummax": "maximum", "cummin": "minimum"},
    "cumlogsumexp": "log_add",
}
#: Random numbers, and keys made of other keys.
RANDOM = ("random_bits", "random_seed", "random_split", "random_fold_in", "random_clone")
#: Primitives that give their operands unchanged.
NOTHING = (
    *("stop_gradient", "copy", "copy_p", "device_put", "pvary", "optimization_barrier_p", "name"),
    *("random_wrap", "random_unwrap"),
)
#: Primitives that compute a jaxpr: in a call, and in place.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_lin")
INLINED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "checkpoint", "remat")
