"""A device's part of an op's tensors, and the reductions that ops have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import Array

__all__ = ["IDENTITY", "REDUCTIONS", "Attributes", "DeviceTensors", "along", "identity", "pad_array"]

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
IDENTITY = {
    **{"add": 0, "multiply": 1, "maximum": -np.inf, "minimum": np.inf, "and": True, "or": False},
    "log_add": -np.inf,
}


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


def along(dim: int, start: int | None = None, stop: int | None = None, step: int | None = None) -> tuple[slice, ...]:
    """Return the index of a part of a dim."""
    return (*[slice(None)] * dim, slice(start, stop, step))


def pad_array(array: Array, sides: Sequence[tuple[int, int, int]], value: Any) -> Array:
    """Return the array with so many elements before, behind and between those of its last dims, or fewer."""
    for dim, (low, high, gaps) in enumerate(sides, array.ndim - len(sides)):
        sizes = [*array.shape[:dim], max(0, (array.shape[dim] - 1) * (gaps + 1) + 1), *array.shape[dim + 1 :]]
        spread = np.full(sizes, value, array.dtype)
        spread[along(dim, step=gaps + 1)] = array
        widths = [(max(0, low), max(0, high)) if at == dim else (0, 0) for at in range(array.ndim)]
        spread = np.pad(spread, widths, constant_values=value)
        array = spread[along(dim, max(0, -low), spread.shape[dim] - max(0, -high))]
    return array
