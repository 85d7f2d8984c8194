"""Ops in plain numpy, on whole arrays or on one device's views of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._text import shown
from .._types import Array
from ..errors import LayoutError
from .held import REDUCTIONS, Attributes, DeviceTensors, identity, pad_array, sum_dtype
from .indexed import dynamic_slice, dynamic_update_slice, looked_up, scatter
from .windowed import convolution, select_and_scatter, windows

__all__ = ["OPS", "better_with_places"]

_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def reduce(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    function: Any = REDUCTIONS[attributes["body"]]
    count, dims = len(has.shapes), tuple(attributes["dimensions"])
    # A device may have no element.
    neutral = [identity(attributes["body"], array.dtype) for array in has.arrays[:count]]
    found = [function.reduce(array, axis=dims, initial=one) for array, one in zip(has.arrays, neutral, strict=False)]
    return list(map(function, found, has.arrays[count:])) if has.first else found


def reduce_with_places(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return the largest or smallest elements along a dim and their places, the first of equal ones."""
    (dim,), values = attributes["dimensions"], has.arrays[0]
    choose = np.argmax if attributes["body"] == "maximum" else np.argmin
    shape = [1 if at == dim else size for at, size in enumerate(values.shape)]
    # The starts come last, for a device may have no element.
    both = [
        np.concatenate([array, np.broadcast_to(start, shape)], dim)
        for array, start in zip(has.arrays[:2], has.arrays[2:], strict=True)
    ]
    chosen = choose(both[0], dim, keepdims=True)
    return [np.take_along_axis(array, chosen, dim).squeeze(dim) for array in both]


def better_with_places(body: str, one: Sequence[Array], other: Sequence[Array]) -> list[Array]:
    """Return the larger or smaller of two elements with its place; the first of equal ones, and NaN before all."""
    (a, place), (b, other_place) = one, other
    is_better = (b > a if body == "maximum" else b < a) | ((a == a) & (b != b))
    is_before = (other_place < place) & ((a == b) | ((a != a) & (b != b)))
    return [np.where(is_better | is_before, new, old) for old, new in zip(one, other, strict=True)]


def pad(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return [pad_array(has.arrays[0], list(zip(*(attributes[name] for name in names), strict=True)), has.arrays[1])]


def slices(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    starts, limits = attributes["start_indices"], attributes["limit_indices"]
    sides = zip(starts, limits, attributes["strides"] or [1] * len(starts), strict=True)
    # A dim that is not sliced may be cut.
    parts = [
        slice(None) if size == whole and stride == 1 else slice(start, stop, stride)
        for (start, stop, stride), size, whole in zip(sides, has.shapes[0], has.arrays[0].shape, strict=True)
    ]
    return [has.arrays[0][tuple(parts)]]


def dot_general(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    lhs, rhs = has.arrays
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names = [[next(letters) for _ in range(array.ndim)] for array in (lhs, rhs)]
    for kind in ("batching", "contracting"):
        for left, right in zip(*(attributes[f"{side}_{kind}_dimensions"] for side in ("lhs", "rhs")), strict=True):
            names[1][right] = names[0][left]
    batch = [names[0][dim] for dim in attributes["lhs_batching_dimensions"]]
    summed = [names[0][dim] for dim in attributes["lhs_contracting_dimensions"]]
    free = [name for side in names for name in side if name not in batch and name not in summed]
    text = f"{''.join(names[0])},{''.join(names[1])}->{''.join(batch + free)}"
    # The result may be of a wider dtype than the operands.
    result: Array = np.einsum(text, lhs, rhs, dtype=sum_dtype(lhs, rhs), casting="unsafe")
    return [result]


def broadcast_in_dim(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    shape = [1] * len(has.shapes[0])
    for dim, size in zip(attributes["broadcast_dimensions"], has.arrays[0].shape, strict=True):
        shape[dim] = size
    return [np.broadcast_to(has.arrays[0].reshape(shape), has.shapes[0])]


def triangular_solve(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    a, b = has.arrays
    a = np.tril(a) if attributes.get("lower", True) else np.triu(a)
    if attributes.get("unit_diagonal"):
        a = np.where(np.eye(a.shape[-1], dtype=bool), 1, a)
    a = a.swapaxes(-1, -2) if attributes["transpose_a"] else a
    a = a.conj() if attributes.get("conjugate_a") else a
    if attributes["left_side"]:
        return [np.linalg.solve(a, b)]
    return [np.linalg.solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)]


def batch_norm(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    operand, *others = has.arrays
    shape = [1] * operand.ndim
    shape[attributes["feature_index"]] = -1
    scale, offset, mean, variance = (other.reshape(shape) for other in others)
    return [(operand - mean) / np.sqrt(variance + attributes.get("epsilon", 0.001)) * scale + offset]


def sort(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    dim = attributes["dimension"]
    order = np.lexsort(has.arrays[: attributes.get("num_keys", 1)][::-1], dim)
    return [np.take_along_axis(array, order, dim) for array in has.arrays]


def top_k(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    # From the largest down, NaN before all, and the first of equal ones first.
    upwards = np.argsort(np.flip(has.arrays[0], -1), -1, kind="stable")
    order = (has.arrays[0].shape[-1] - 1 - np.flip(upwards, -1))[..., : has.shapes[0][-1]]
    return [np.take_along_axis(has.arrays[0], order, -1), order.astype(np.int32)][: len(has.shapes)]


def lu(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    """Return both triangles in one matrix, the row that each step takes, and the order of the rows."""
    found = np.array(has.arrays[0])
    steps, order = min(found.shape[-2:]), np.tile(np.arange(found.shape[-2], dtype=np.int32), (*found.shape[:-2], 1))
    pivots = np.zeros((*found.shape[:-2], steps), np.int32)
    for at in range(steps):
        pivots[..., at] = at + np.abs(found[..., at:, at]).argmax(-1)
        places = pivots[..., at, None, None].astype(np.int64)
        for rows in (found, order[..., None]):
            chosen, first = np.take_along_axis(rows, places, -2), rows[..., at : at + 1, :].copy()
            np.put_along_axis(rows, places, first, -2)
            rows[..., at : at + 1, :] = chosen
        pivot = found[..., at, at, None]
        found[..., at + 1 :, at] /= np.where(pivot == 0, 1, pivot)
        found[..., at + 1 :, at + 1 :] -= found[..., at + 1 :, at, None] * found[..., at, None, at + 1 :]
    return [found, pivots, order]


def svd(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    if len(has.shapes) == 1:
        return [np.linalg.svd(has.arrays[0], compute_uv=False)]
    is_full = all(shape[-2] == shape[-1] for shape in has.shapes[1:])
    u, values, v = np.linalg.svd(has.arrays[0], full_matrices=is_full)
    return [values, u, v]


def qr(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    """Return both factors, or Householder's reflections in one matrix and their scales."""
    first, other = has.shapes
    if len(first) > len(other):
        reflections, scales = np.linalg.qr(has.arrays[0], "raw")
        return [reflections.swapaxes(-1, -2), scales]
    return list(np.linalg.qr(has.arrays[0], "complete" if first[-1] == first[-2] else "reduced"))


def fourier(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    kinds = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}
    function: Any = kinds.get(attributes["fft_type"])
    if function is None:
        raise LayoutError(f"fft_type is {shown(attributes['fft_type'])}; it must be one of {shown([*kinds])}")
    sizes = attributes["fft_length"]
    return [function(has.arrays[0], s=sizes, axes=range(-len(sizes), 0))]


def integer_division(a: Array, b: Array) -> Array:
    if not np.issubdtype(np.result_type(a, b), np.integer):
        return np.divide(a, b)
    # Towards zero, and -1 for a divisor of zero, as in StableHLO.
    found = a // b + ((a % b != 0) & ((a < 0) != (b < 0)))
    return np.where(b == 0, np.array(-1).astype(found.dtype), found)


def remainder(a: Array, b: Array) -> Array:
    found = np.fmod(a, b)
    return np.where(b == 0, a, found) if np.issubdtype(found.dtype, np.integer) else found


def round_away(x: Array) -> Array:
    """Return the nearest whole numbers, of two the one farther from zero."""
    whole = np.trunc(x)
    found: Array = whole + np.sign(x) * (np.abs(x - whole) >= 0.5)
    return found


def reduce_precision(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return the nearest elements with these bits of exponent and mantissa, of two the even one."""
    bits, largest = attributes["mantissa_bits"] + 1, 1 << (attributes["exponent_bits"] - 1)
    fractions, exponents = np.frexp(has.arrays[0])
    found = np.ldexp(np.rint(np.ldexp(fractions, bits)), exponents - bits)
    exponents = np.frexp(found)[1]
    found = np.where(exponents > largest, np.copysign(np.inf, found), found)
    return [np.where(exponents < 3 - largest, np.copysign(0, found), found)]


def of_arrays(function: Callable[..., Any]) -> Callable[[DeviceTensors, Attributes], list[Array]]:
    return lambda has, _attributes: [np.asarray(function(*has.arrays))]


_SAME_NAME = (
    "abs add cbrt ceil cosh floor imag log maximum minimum multiply power real sign sinh sqrt square subtract tan tanh"
)
#: Elementwise ops.
_ELEMENTS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_NAME.split()},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "and": lambda a, b: a & b,
    "atan2": np.arctan2,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "complex": lambda a, b: a + 1j * b,
    "cosine": np.cos,
    "divide": integer_division,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "identity": lambda x: x,
    "is_finite": np.isfinite,
    "lgamma": np.vectorize(math.lgamma, otypes=[float]),
    "log_plus_one": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "negate": np.negative,
    "next_after": np.nextafter,
    "not": lambda x: ~x,
    "or": lambda a, b: a | b,
    "remainder": remainder,
    "round_nearest_afz": round_away,
    "round_nearest_even": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": lambda choice, a, b: np.where(choice > 0, a, b),
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": lambda a, b: (a.view(f"u{a.itemsize}") >> b.astype(f"u{b.itemsize}")).view(a.dtype),
    "sine": np.sin,
    "xor": lambda a, b: a ^ b,
}

#: Functions from a device's parts and the op's attributes to its parts of the results, by the op's name.
OPS: dict[str, Callable[[DeviceTensors, Attributes], list[Array]]] = {
    **{name: of_arrays(function) for name, function in _ELEMENTS.items()},
    "compare": lambda has, attributes: [_COMPARISONS[attributes.get("direction", "LT")](*has.arrays)],
    "convert": lambda has, _: [has.arrays[0]],
    "transpose": lambda has, attributes: [has.arrays[0].transpose(attributes["permutation"])],
    "reshape": lambda has, _: [has.arrays[0].reshape(has.shapes[0])],
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": lambda has, attributes: [np.concatenate(has.arrays, attributes["dimension"])],
    "slice": slices,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "reverse": lambda has, attributes: [np.flip(has.arrays[0], tuple(attributes["dimensions"]))],
    "dot_general": dot_general,
    "eigh": lambda has, given: list(np.linalg.eigh(has.arrays[0], "L" if given.get("lower", True) else "U")[::-1]),
    "convolution": convolution,
    "reduce": lambda has, given: (reduce_with_places if given.get("with_places") else reduce)(has, given),
    "reduce_precision": reduce_precision,
    "reduce_window": windows,
    "gather": looked_up,
    "scatter": scatter,
    "select_and_scatter": select_and_scatter,
    "sort": sort,
    "top_k": top_k,
    "lu": lu,
    "qr": qr,
    "svd": svd,
    "cholesky": lambda has, _: [np.linalg.cholesky(has.arrays[0])],
    "triangular_solve": triangular_solve,
    "fft": fourier,
    "batch_norm_inference": batch_norm,
}
