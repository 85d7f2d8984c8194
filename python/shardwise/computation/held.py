"""A device's parts of an op's tensors, reductions, and padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import Array

__all__ = ["IDENTITY", "REDUCTIONS", "Attributes", "DeviceTensors", "identity", "pad_array", "sum_dtype"]

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class DeviceTensors:
    """A device's parts of an op's tensors; ops that look elements up need their places in the whole."""

    #: The device's part of each operand.
    arrays: Sequence[Array]
    #: The first element of each part in its operand.
    starts: Sequence[tuple[int, ...]]
    #: The shape of each whole operand.
    wholes: Sequence[tuple[int, ...]]
    #: The shapes of the device's parts of the results.
    shapes: Sequence[tuple[int, ...]]
    #: True for the one device, of those with addends, whose addend includes the value that a reduction begins with.
    first: bool = True


REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

#: The neutral element of each reduction; `log_add`, the log of a sum of exponentials, is one of windows only.
IDENTITY = {
    **{"add": 0, "multiply": 1, "maximum": -np.inf, "minimum": np.inf, "and": True, "or": False},
    **{"xor": False, "log_add": -np.inf},
}


def identity(body: str, dtype: np.dtype[Any]) -> Array:
    """Return the neutral element of a reduction in a dtype.

    >>> identity("maximum", np.dtype(np.int8)), identity("maximum", np.dtype(np.float32))
    (array(-128, dtype=int8), array(-inf, dtype=float32))
    """
    value: Any = IDENTITY[body]
    if dtype.kind in "iu" and body in ("maximum", "minimum"):
        value = np.iinfo(dtype).min if body == "maximum" else np.iinfo(dtype).max
    elif dtype.kind in "iub" and body == "and":
        return np.invert(np.zeros((), dtype))
    elif dtype.kind == "b":
        value = value > 0
    return np.array(value, dtype)


def sum_dtype(one: Array, other: Array) -> np.dtype[Any]:
    """Return the dtype in which sums of products are computed; whole numbers wrap when the result takes its own."""
    dtype = np.result_type(one, other)
    return np.dtype({"i": np.int64, "u": np.uint64}.get(dtype.kind, np.float32 if dtype == np.float16 else dtype))


def pad_array(array: Array, sides: Sequence[tuple[int, int, int]], value: Any) -> Array:
    """Return the array with `(low, high, gaps)` elements before, after and between those of its last dims.

    Negative numbers take elements away, as in StableHLO's `pad`.
    """
    for dim, (low, high, gaps) in enumerate(sides, array.ndim - len(sides)):
        sizes = [*array.shape[:dim], max(0, (array.shape[dim] - 1) * (gaps + 1) + 1), *array.shape[dim + 1 :]]
        spread = np.full(sizes, value, array.dtype)
        np.moveaxis(spread, dim, 0)[:: gaps + 1] = np.moveaxis(array, dim, 0)
        widths = [(max(0, low), max(0, high)) if at == dim else (0, 0) for at in range(array.ndim)]
        spread = np.pad(spread, widths, constant_values=value)
        array = np.moveaxis(np.moveaxis(spread, dim, 0)[max(0, -low) : spread.shape[dim] - max(0, -high)], 0, dim)
    return array
