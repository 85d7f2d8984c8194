"""The dtypes of the safetensors format: their bits per element, and what numpy calls them.

The list is that of safetensors 0.8. Sizes are known without ml_dtypes, so that a checkpoint can be planned from its
header alone; only an array of a dtype that numpy lacks needs it.
"""

from typing import Any, NamedTuple

import numpy as np

__all__ = ["DTYPES", "Dtype", "numpy_dtype"]


class Dtype(NamedTuple):
    """Bits per element, and the name in numpy or in ml_dtypes; neither for elements packed into parts of bytes."""

    bits: int
    numpy: str | None = None
    ml_dtypes: str | None = None


DTYPES = {
    "BOOL": Dtype(8, "?"),
    "U8": Dtype(8, "u1"),
    "I8": Dtype(8, "i1"),
    "U16": Dtype(16, "<u2"),
    "I16": Dtype(16, "<i2"),
    "U32": Dtype(32, "<u4"),
    "I32": Dtype(32, "<i4"),
    "U64": Dtype(64, "<u8"),
    "I64": Dtype(64, "<i8"),
    "F16": Dtype(16, "<f2"),
    "F32": Dtype(32, "<f4"),
    "F64": Dtype(64, "<f8"),
    "C64": Dtype(64, "<c8"),
    "BF16": Dtype(16, ml_dtypes="bfloat16"),
    "F8_E4M3": Dtype(8, ml_dtypes="float8_e4m3fn"),
    "F8_E4M3FNUZ": Dtype(8, ml_dtypes="float8_e4m3fnuz"),
    "F8_E5M2": Dtype(8, ml_dtypes="float8_e5m2"),
    "F8_E5M2FNUZ": Dtype(8, ml_dtypes="float8_e5m2fnuz"),
    "F8_E8M0": Dtype(8, ml_dtypes="float8_e8m0fnu"),
    "F6_E2M3": Dtype(6),
    "F6_E3M2": Dtype(6),
    "F4": Dtype(4),
}


def numpy_dtype(code: str, tensor: str) -> np.dtype[Any]:
    """Give the numpy dtype for a safetensors dtype code; errors name the tensor that was asked for.

    Raises:
        ImportError: the dtype is one of ml_dtypes, which is not installed (or too old to have it).
        TypeError: the elements are packed, several to a byte, which no numpy array can express.

    >>> numpy_dtype("F32", "bias")
    dtype('float32')
    """
    dtype = DTYPES[code]
    if dtype.numpy is not None:
        return np.dtype(dtype.numpy)
    if dtype.ml_dtypes is None:
        raise TypeError(
            f"tensor {tensor!r} is {code}, {dtype.bits} bits an element: numpy has no array of packed elements"
        )
    try:
        import ml_dtypes

        scalar: type[Any] = getattr(ml_dtypes, dtype.ml_dtypes)
    except (ImportError, AttributeError):
        message = f"tensor {tensor!r} is {code}, which needs ml_dtypes: pip install 'shardwise[dtypes]'"
        raise ImportError(message, name="ml_dtypes") from None
    return np.dtype(scalar)
