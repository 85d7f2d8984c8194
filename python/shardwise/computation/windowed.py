"""Ops of windows in numpy: convolutions, reductions, and the gradients of pooling."""

from __future__ import annotations

import math

import numpy as np

from .._types import Array
from .held import REDUCTIONS, Attributes, DeviceTensors, identity, pad_array, sum_dtype

__all__ = ["convolution", "select_and_scatter", "windows"]


def windows(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return the reduction of each window."""
    operand, (shape,) = has.arrays[0], has.shapes
    window = attributes["window_dimensions"]
    strides = attributes["window_strides"] or [1] * len(window)
    reduction = np.logaddexp if attributes["body"] == "log_add" else REDUCTIONS[attributes["body"]]
    neutral = identity(attributes["body"], operand.dtype)
    operand = pad_array(operand, [(low, high, 0) for low, high in attributes["padding"]], neutral)
    result = np.full(shape, neutral, operand.dtype)
    for place in np.ndindex(*window):
        part = operand[tuple(slice(at, None, stride) for at, stride in zip(place, strides, strict=True))]
        result = reduction(result, part[tuple(slice(0, size) for size in shape)])
    return [result]


def convolution(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return a convolution; a device may have only the groups of its outputs."""
    names = attributes["lhs_spec"], attributes["rhs_spec"], attributes["out_spec"]
    spatial = range(len(names[0]) - 2)
    lhs = has.arrays[0].transpose([names[0].index(name) for name in ("b", "f", *spatial)])
    rhs = has.arrays[1].transpose([names[1].index(name) for name in ("o", "i", *spatial)])
    order = [names[2].index(name) for name in ("b", "f", *spatial)]
    shape = [has.shapes[0][at] for at in order]
    if 0 in (*lhs.shape, *rhs.shape):
        # A device may have no channel.
        return [np.zeros(has.shapes[0], lhs.dtype)]
    ones = [1] * len(spatial)
    between, apart = (attributes.get(name) or ones for name in ("lhs_dilation", "rhs_dilation"))
    pads = zip(attributes["padding"], between, strict=True)
    lhs = pad_array(lhs, [(low, high, by - 1) for (low, high), by in pads], 0)
    rhs = pad_array(rhs, [(0, 0, by - 1) for by in apart], 0)
    batches = int(attributes.get("batch_group_count") or 1)
    # A device may have some of the groups of batches only: those of its part of the outputs.
    batches //= math.gcd(batches, has.wholes[1][attributes["rhs_spec"].index("o")] // rhs.shape[0])
    groups = batches if batches > 1 else lhs.shape[1] // rhs.shape[1]
    result = np.zeros(shape, sum_dtype(lhs, rhs))
    outputs, features, rows = rhs.shape[0] // groups, rhs.shape[1], lhs.shape[0] // batches
    strides = attributes.get("window_strides") or [1] * len(spatial)
    for group in range(groups):
        of_batch = slice(group * rows, (group + 1) * rows) if batches > 1 else slice(None)
        of_input = slice(None) if batches > 1 else slice(group * features, (group + 1) * features)
        of_output = slice(group * outputs, (group + 1) * outputs)
        for place in np.ndindex(*rhs.shape[2:]):
            sides = [slice(at, at + (n - 1) * by + 1, by) for at, by, n in zip(place, strides, shape[2:], strict=True)]
            of_lhs, of_rhs = (of_batch, of_input, *sides), (of_output, slice(None), *place)
            part = np.einsum("bi...,oi->bo...", lhs[of_lhs], rhs[of_rhs], dtype=result.dtype, casting="unsafe")
            result[:, of_output] += part
    return [result.transpose(np.argsort(order))]


def select_and_scatter(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return the source's elements, each added at the first largest or smallest element of its window."""
    operand, source, start = has.arrays
    body = attributes.get("body", "maximum")
    better = np.greater if body == "maximum" else np.less
    pads = attributes["padding"]
    padded = pad_array(operand, [(low, high, 0) for low, high in pads], identity(body, operand.dtype))
    steps = list(zip(source.shape, attributes["window_strides"] or [1] * source.ndim, strict=True))
    windows = [
        tuple(slice(at, at + (size - 1) * by + 1, by) for at, (size, by) in zip(place, steps, strict=True))
        for place in np.ndindex(*attributes["window_dimensions"])
    ]
    best, chosen = padded[windows[0]], np.zeros(source.shape, int)
    for number, window in enumerate(windows[1:], 1):
        is_better = better(padded[window], best)
        best, chosen = np.where(is_better, padded[window], best), np.where(is_better, number, chosen)
    result = np.full(padded.shape, start, source.dtype)
    for number, window in enumerate(windows):
        result[window] += np.where(chosen == number, source, 0)
    return [pad_array(result, [(-low, -high, 0) for low, high in pads], 0)]
