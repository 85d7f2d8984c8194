"""Elements converted from one floating-point dtype to another, rounded once; overflow is always counted.

A value is rounded to the nearest value of the new dtype; a tie goes to the even one. Values beyond the largest would
become infinite, or NaN in a dtype without infinities: they are counted, and refused unless the caller allows them.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from ..._arguments import instance
from ..._dtypes import Dtype
from ..._fork import importing
from ..._text import shown
from ...errors import LayoutError
from ..tensors.stored import StoredTensor

__all__ = ["Overflow", "checked_overflow", "converted_values", "is_converted", "is_float", "lost_text"]

#: The treatment of values beyond the range of the new dtype.
Overflow = Literal["refuse", "saturate", "round"]

#: The number of elements converted at a time, so that all temporary arrays stay in the processor's cache.
_BLOCK = 1 << 15


def is_converted(tensor: StoredTensor, dtype: Dtype | None) -> bool:
    """Return whether the tensor must be converted to another floating-point dtype."""
    return dtype is not None and is_float(tensor.known_dtype) and tensor.dtype != dtype.name


def is_float(dtype: Dtype) -> bool:
    """Return whether the dtype is a floating-point one."""
    return "float" in dtype.name


def checked_overflow(overflow: Any) -> Overflow:
    """Return `overflow` if it is a known treatment of values beyond the range.

    Raises:
        LayoutError: if it is not.
    """
    if instance("overflow", overflow, str) not in get_args(Overflow):
        raise LayoutError(
            f"overflow is {shown(overflow)}; it must be one of {', '.join(map(repr, get_args(Overflow)))}"
        )
    answer: Overflow = overflow
    return answer


def converted_values(
    values: np.ndarray[Any, Any], dtype: np.dtype[Any], overflow: Overflow
) -> tuple[np.ndarray[Any, Any], int]:
    """Convert floating-point values, and count those that are beyond the range of the new dtype.

    Args:
        values: The values. NaN stays NaN and is not counted; neither are infinities if the dtype has them.
        dtype: The new dtype.
        overflow: With `"saturate"`, values beyond the range become the largest value of the same sign.

    Raises:
        LayoutError: if there is none of the same sign, as in `float8_e8m0fnu`.

    >>> made, lost = converted_values(np.array([1e6, 1.0]), np.dtype("float16"), "saturate")
    >>> made.tolist(), lost
    ([65504.0, 1.0], 1)
    """
    given = np.ascontiguousarray(values).reshape(-1)
    made = np.empty(given.shape, dtype)
    lost = 0
    with np.errstate(all="ignore"):  # What numpy would warn of is counted.
        for start in range(0, given.size, _BLOCK):
            block = given[start : start + _BLOCK]
            into = made[start : start + _BLOCK]
            into[...] = _rounded_to_odd(block, dtype).astype(dtype)
            if not np.isfinite(into).all():
                is_lost = ~np.isfinite(into) & ~np.isnan(block) & ~(np.isinf(into) & np.isinf(block))
                lost += int(is_lost.sum())
                if overflow == "saturate":
                    largest = np.copysign(np.float64(_largest(dtype)), block[is_lost].astype(np.float64))
                    into[is_lost] = largest.astype(dtype)
                    if not np.isfinite(into[is_lost]).all():
                        raise LayoutError(
                            f"{dtype.name} has no negative values, so negative ones cannot be saturated; "
                            "overflow='round' makes them NaN"
                        )
    return made.reshape(values.shape), lost


def _rounded_to_odd(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values of which a narrower dtype's rounding is the same as of the given ones, even through another dtype.

    ml_dtypes goes from float64 by way of float32, and to float8_e5m2 by way of float16, and would round twice. If the
    first step is inexact, its last bit is set: it stands for all bits that were cut off, because the intermediate dtype
    has at least two bits more than the narrower one.
    """
    if dtype.isbuiltin == 1:
        return values  # numpy rounds to its own once.
    if dtype.name == "float8_e5m2":
        near = values.astype(np.float16)
        values = values if values.dtype.isbuiltin == 1 else values.astype(np.float32)
    elif values.dtype.itemsize > 4:
        near = values.astype(np.float32)
    else:
        return values
    exact = near.astype(values.dtype)
    bits = near.view(f"u{near.itemsize}")
    bits -= np.abs(exact) > np.abs(values)
    bits |= (exact != values) & ~np.isnan(values)
    return near


def _largest(dtype: np.dtype[Any]) -> Any:
    if dtype.isbuiltin == 1:
        return np.finfo(dtype).max
    with importing:
        import ml_dtypes

    return ml_dtypes.finfo(dtype).max


def lost_text(name: str, dtype: Dtype, lost: int, overflow: Overflow) -> str:
    """Return a sentence with the number of a tensor's values beyond the range of its new dtype, and their fate."""
    limit = shown(float(_largest(dtype.numpy())))
    beyond = f"{'1 value is' if lost == 1 else f'{lost} values are'} beyond the range of {dtype.name}"
    became = {
        "refuse": "; overflow='saturate' takes the largest value instead, overflow='round' rounds as IEEE 754 says",
        "saturate": f"; {'it became' if lost == 1 else 'they became'} the largest value of the same sign",
        "round": f"; {'it became' if lost == 1 else 'they became'} infinite, or NaN",
    }[overflow]
    return f"tensor {shown(name)}: {beyond} (up to {limit}){became}"
