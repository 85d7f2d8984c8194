"""Arguments as numpy arrays; called from the compiled module as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import SizeOverflowError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["array_like", "array_of", "int64_array"]

_INT64_MAX = 2**63 - 1


def int64_array(name: str, value: Any) -> npt.NDArray[np.int64]:
    """`value` as a C-contiguous, aligned, native int64 array; copied only if it is not one already."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; give its filled() or compressed() values")
    try:
        array = np.asarray(value)
    except ValueError as error:  # nested lists of unequal lengths
        raise TypeError(f"{name} must be an integer or an array of integers: {error}") from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # numpy makes an empty list a float array
    if array.dtype.kind == "f" and not isinstance(value, np.ndarray):
        # numpy makes floats of integers that none of its integer dtypes holds together.
        exact = np.asarray(value, dtype=object)
        array = exact if all(type(item) is int for item in exact.flat) else array
    if array.dtype == object and all(type(item) is int for item in array.flat):
        wide = next((i for i, item in enumerate(array.flat) if not -_INT64_MAX - 1 <= item <= _INT64_MAX), None)
        if wide is not None:
            raise SizeOverflowError(f"{name}[{wide}] is {array.flat[wide]}, outside the 64-bit range")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers, got dtype {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > _INT64_MAX:
        position = int(np.argmax(array > _INT64_MAX))
        raise SizeOverflowError(f"{name}[{position}] is {array.flat[position]}, over the limit of {_INT64_MAX}")
    return np.require(array, np.int64, ["C_CONTIGUOUS", "ALIGNED"])


def array_like(name: str, value: Any) -> npt.NDArray[Any]:
    """`value` as a numpy array (subclasses kept), where numpy can make one: of nested sequences and numbers too."""
    try:
        array: npt.NDArray[Any] = np.asanyarray(value)
    except ValueError as error:  # Also of an `__array__` that gives no array.
        raise TypeError(f"{name}: numpy cannot make an array of this {type(value).__name__}: {error}") from error
    return array


def array_of(name: str, value: Any) -> npt.NDArray[Any]:
    """`value` as a numpy array (subclasses kept), sharing its memory where numpy can."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return array_like(name, value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, ValueError) as error:
            raise TypeError(f"{name}: numpy cannot take this {type(value).__name__} by DLPack: {error}") from error
    raise TypeError(
        f"{name} must be a numpy array, or have __array__ or __dlpack__, got {type(value).__name__}; "
        "np.asarray makes an array of a sequence"
    )
