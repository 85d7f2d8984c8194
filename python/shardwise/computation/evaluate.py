"""Ops in plain numpy, on whole arrays or on one device's views of them.

`DeviceTensors.starts` says where the views of a device begin in the arrays: an op that looks things up does so in what
it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import Array

__all__ = ["IDENTITY", "OPS", "REDUCTIONS", "Attributes", "DeviceTensors", "identity"]

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class DeviceTensors:
    """A device's part: its views, where each begins in its array, and the shapes of its results."""

    arrays: Sequence[Array]
    #: The place where each begins, and the shapes of the whole arrays.
    starts: Sequence[tuple[int, ...]]
    wholes: Sequence[tuple[int, ...]]
    #: The shapes of its results.
    shapes: Sequence[tuple[int, ...]]
    #: True for the one of those with addends that begins with the operand's own values.
    first: bool = True


REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}
#: The value that changes no other.
IDENTITY = {"add": 0, "multiply": 1, "maximum": -np.inf, "minimum": np.inf, "and": True, "or": False}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def _along(dim: int, start: int | None = None, stop: int | None = None, step: int | None = None) -> tuple[slice, ...]:
    """Return the index of a part of a dim."""
    return (*[slice(None)] * dim, slice(start, stop, step))


def identity(body: str, dtype: np.dtype[Any]) -> Array:
    """Return the value of a dtype that changes no other when the two are reduced.

    >>> identity("maximum", np.dtype(np.int8)), identity("maximum", np.dtype(np.float32))
    (array(-128, dtype=int8), array(-inf, dtype=float32))
    """
    value: Any = IDENTITY[body]
    if dtype.kind in "iu" and body in ("maximum", "minimum"):
        value = np.iinfo(dtype).min if body == "maximum" else np.iinfo(dtype).max
    elif dtype.kind == "b":
        value = value > 0
    return np.array(value, dtype)


def windows(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    operand, (shape,) = has.arrays[0], has.shapes
    window, strides = attributes["window_dimensions"], attributes["window_strides"]
    neutral = identity(attributes["body"], operand.dtype)
    operand = pad_array(operand, [(low, high, 0) for low, high in attributes["padding"]], neutral)
    result = np.full(shape, neutral, operand.dtype)
    for place in np.ndindex(*window):
        part = operand[tuple(slice(at, None, stride) for at, stride in zip(place, strides, strict=True))]
        result = REDUCTIONS[attributes["body"]](result, part[tuple(slice(0, size) for size in shape)])
    return [result]


def convolution(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    names = attributes["lhs_spec"], attributes["rhs_spec"], attributes["out_spec"]
    spatial = range(len(names[0]) - 2)
    lhs = has.arrays[0].transpose([names[0].index(name) for name in ("b", "f", *spatial)])
    rhs = has.arrays[1].transpose([names[1].index(name) for name in ("o", "i", *spatial)])
    order = [names[2].index(name) for name in ("b", "f", *spatial)]
    shape = [has.shapes[0][at] for at in order]
    ones = [1] * len(spatial)
    between, apart = (attributes.get(name) or ones for name in ("lhs_dilation", "rhs_dilation"))
    pads = zip(attributes["padding"], between, strict=True)
    lhs = pad_array(lhs, [(low, high, by - 1) for (low, high), by in pads], 0)
    rhs = pad_array(rhs, [(0, 0, by - 1) for by in apart], 0)
    batches = int(attributes.get("batch_group_count") or 1)
    # A device may have some of the groups of batches only: those of its part of the outputs.
    batches //= math.gcd(batches, has.wholes[1][attributes["rhs_spec"].index("o")] // rhs.shape[0])
    groups = batches if batches > 1 else lhs.shape[1] // rhs.shape[1]
    result = np.zeros(shape, np.result_type(lhs, rhs))
    outputs, features, rows = rhs.shape[0] // groups, rhs.shape[1], lhs.shape[0] // batches
    strides = attributes.get("window_strides") or [1] * len(spatial)
    for group in range(groups):
        of_batch = slice(group * rows, (group + 1) * rows) if batches > 1 else slice(None)
        of_input = slice(None) if batches > 1 else slice(group * features, (group + 1) * features)
        of_output = slice(group * outputs, (group + 1) * outputs)
        for place in np.ndindex(*rhs.shape[2:]):
            sides = [slice(at, at + (n - 1) * by + 1, by) for at, by, n in zip(place, strides, shape[2:], strict=True)]
            of_lhs, of_rhs = (of_batch, of_input, *sides), (of_output, slice(None), *place)
            result[:, of_output] += np.einsum("bi...,oi->bo...", lhs[of_lhs], rhs[of_rhs])
    return [result.transpose(np.argsort(order))]


def lookups(attributes: Attributes, indices: Array, slices: tuple[int, ...], rank: int) -> list[Any]:
    """Return for each dim of the operand the places of all elements of the slices."""
    offset, collapsed, batch = (
        attributes[name] for name in ("offset_dims", "collapsed_slice_dims", "operand_batching_dims")
    )
    vector, grid = attributes["index_vector_dim"], np.indices(slices, sparse=True)
    batches = [places for dim, places in enumerate(grid) if dim not in offset]
    found: list[Any] = [0] * rank
    for at, dim in enumerate(attributes["start_index_map"]):
        index: Any = (*batches[:vector], at, *batches[vector:])
        found[dim] = indices[index].astype(np.int64)
    numbers = [dim for dim in range(indices.ndim) if dim != vector]
    for dim, of_indices in zip(batch, attributes["start_indices_batching_dims"], strict=True):
        found[dim] = batches[numbers.index(of_indices)]
    whole = [dim for dim in range(rank) if dim not in collapsed and dim not in batch]
    for dim, of_slices in zip(whole, offset, strict=True):
        found[dim] = found[dim] + grid[of_slices]
    return [np.broadcast_to(places, slices) for places in found]


def inside(places: Sequence[Array], array: Array) -> Array:
    """Say which places are those of elements of an array."""
    there = np.ones(places[0].shape if places else (), bool)
    for at, size in zip(places, array.shape, strict=True):
        there &= (at >= 0) & (at < size)
    return there


def looked_up(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    operand, indices = has.arrays
    result = np.zeros(has.shapes[0], operand.dtype)
    # Dims that a window has whole are cut alike on both sides, as batch dims are; others are looked up in what is held.
    looked_up = [dim for dim, size in enumerate(attributes["slice_sizes"]) if size != has.wholes[0][dim]]
    looked_up = sorted({*looked_up, *attributes["collapsed_slice_dims"]} - {*attributes["operand_batching_dims"]})
    # A slice that would not fit begins where it does.
    clamped = np.array(indices)
    for at, dim in enumerate(attributes["start_index_map"]):
        index: Any = (*(slice(None) for _ in range(attributes["index_vector_dim"])), at)
        clamped[index] = np.clip(clamped[index], 0, has.wholes[0][dim] - attributes["slice_sizes"][dim])
    found = lookups(attributes, clamped, has.shapes[0], operand.ndim)
    local = [at - has.starts[0][dim] if dim in looked_up else at for dim, at in enumerate(found)]
    there = inside(local, operand)
    result[there] = operand[tuple(at[there] for at in local)]
    return [result]


def scatter(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    operand, indices, updates = has.arrays
    body, inserted = attributes["body"], attributes["collapsed_slice_dims"]
    result = operand.copy() if has.first or body == "assign" else np.full_like(operand, identity(body, operand.dtype))
    found = lookups(attributes, indices, updates.shape, operand.ndim)
    local = [at - has.starts[0][dim] if dim in inserted else at for dim, at in enumerate(found)]
    there = inside(local, operand)
    places = tuple(at[there] for at in local)
    if body == "assign":
        result[places] = updates[there]
    else:
        function: Any = REDUCTIONS[body]
        function.at(result, places, updates[there])
    return [result]


def fitting(at: Array, whole: int, part: int) -> int:
    """Return where a part of a dim begins: where it fits, if it would not at this place."""
    return min(max(int(at), 0), whole - part)


def dynamic_update_slice(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    result, update = has.arrays[0].copy(), has.arrays[1]
    # Of a dim that is updated in part the update is whole.
    partly = [part != whole for part, whole in zip(has.wholes[1], has.wholes[0], strict=True)]
    places = [fitting(at, whole, part) for at, whole, part in zip(has.arrays[2:], *has.wholes[:2], strict=True)]
    first = [at - start if cut else 0 for at, start, cut in zip(places, has.starts[0], partly, strict=True)]
    sides = [
        (max(at, 0), max(min(at + part, size), 0))
        for at, part, size in zip(first, update.shape, result.shape, strict=True)
    ]
    to = tuple(slice(low, high) for low, high in sides)
    of = tuple(slice(low - at, max(high - at, 0)) for at, (low, high) in zip(first, sides, strict=True))
    result[to] = update[of]
    return [result]


def reduce(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    function: Any = REDUCTIONS[attributes["body"]]
    # A device may have no element.
    neutral = identity(attributes["body"], has.arrays[0].dtype)
    found = function.reduce(has.arrays[0], axis=tuple(attributes["dimensions"]), initial=neutral)
    return [function(found, has.arrays[1]) if has.first else found]


def pad(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return [pad_array(has.arrays[0], list(zip(*(attributes[name] for name in names), strict=True)), has.arrays[1])]


def pad_array(array: Array, sides: Sequence[tuple[int, int, int]], value: Any) -> Array:
    """Return the array with so many elements before, behind and between those of its last dims, or fewer."""
    for dim, (low, high, gaps) in enumerate(sides, array.ndim - len(sides)):
        sizes = [*array.shape[:dim], max(0, (array.shape[dim] - 1) * (gaps + 1) + 1), *array.shape[dim + 1 :]]
        spread = np.full(sizes, value, array.dtype)
        spread[_along(dim, step=gaps + 1)] = array
        widths = [(max(0, low), max(0, high)) if at == dim else (0, 0) for at in range(array.ndim)]
        spread = np.pad(spread, widths, constant_values=value)
        array = spread[_along(dim, max(0, -low), spread.shape[dim] - max(0, -high))]
    return array


def slices(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    sides = zip(*(attributes[name] for name in ("start_indices", "limit_indices", "strides")), strict=True)
    # A dim that is not sliced may be cut.
    parts = [
        slice(None) if size == whole and stride == 1 else slice(start, stop, stride)
        for (start, stop, stride), size, whole in zip(sides, has.shapes[0], has.arrays[0].shape, strict=True)
    ]
    return [has.arrays[0][tuple(parts)]]


def dynamic_slice(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    sides = zip(has.arrays[1:], has.shapes[0], has.arrays[0].shape, strict=True)
    parts = [
        slice(None) if size == whole else slice(fitting(at, whole, size), fitting(at, whole, size) + size)
        for at, size, whole in sides
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
    result: Array = np.einsum(f"{''.join(names[0])},{''.join(names[1])}->{''.join(batch + free)}", lhs, rhs)
    return [result]


def broadcast_in_dim(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    shape = [1] * len(has.shapes[0])
    for dim, size in zip(attributes["broadcast_dimensions"], has.arrays[0].shape, strict=True):
        shape[dim] = size
    return [np.broadcast_to(has.arrays[0].reshape(shape), has.shapes[0])]


def triangular_solve(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    a, b = has.arrays
    a = np.tril(a)
    a = a.swapaxes(-1, -2) if attributes["transpose_a"] else a
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
    order = np.argsort(has.arrays[0], dim, kind="stable")
    return [np.take_along_axis(array, order, dim) for array in has.arrays]


def top_k(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    order = np.argsort(-has.arrays[0], -1, kind="stable")[..., : has.shapes[0][-1]]
    return [np.take_along_axis(has.arrays[0], order, -1), order.astype(np.int32)][: len(has.shapes)]


def fourier(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    kinds = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}
    function: Any = kinds[attributes["fft_type"]]
    sizes = attributes["fft_length"]
    return [function(has.arrays[0], s=sizes, axes=range(-len(sizes), 0))]


def integer_division(a: Array, b: Array) -> Array:
    if not np.issubdtype(np.result_type(a, b), np.integer):
        return np.divide(a, b)
    return np.trunc(np.divide(a, b)).astype(a.dtype)


def of_arrays(function: Callable[..., Any]) -> Callable[[DeviceTensors, Attributes], list[Array]]:
    return lambda has, _attributes: [np.asarray(function(*has.arrays))]


#: Ops of elements at one place.
_ELEMENTS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in ("add", "subtract", "multiply", "maximum", "minimum", "power", "tanh", "tan")
    },
    **{name: getattr(np, name) for name in ("floor", "ceil", "sign", "sqrt", "cbrt", "log", "sinh", "cosh", "square")},
    **{name: getattr(np, name) for name in ("abs", "real", "imag")},
    "and": lambda a, b: a & b,
    "atan2": np.arctan2,
    "clamp": lambda low, x, high: np.clip(x, low, high),
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
    "not": lambda x: ~x,
    "or": lambda a, b: a | b,
    "remainder": np.fmod,
    "round_nearest_even": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select": lambda choice, a, b: np.where(choice > 0, a, b),
    "sine": np.sin,
    "xor": lambda a, b: a ^ b,
}

#: Each op as a function of what a device has and of the op's attributes.
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
    "convolution": convolution,
    "reduce": reduce,
    "reduce_window": windows,
    "gather": looked_up,
    "scatter": scatter,
    "sort": sort,
    "top_k": top_k,
    "cholesky": lambda has, _: [np.linalg.cholesky(has.arrays[0])],
    "triangular_solve": triangular_solve,
    "fft": fourier,
    "batch_norm_inference": batch_norm,
}
