"""Arrays that nobody can write to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["frozen"]


def frozen(array: npt.NDArray[Any], dtype: Any = None) -> npt.NDArray[Any]:
    """Give a copy of an array in the memory of a `bytes` object, which stays as it is.

    An array that is only marked read-only has a base, the array that owns the memory, and of that anyone can set the
    mark back.

    Args:
        array: of numbers.
        dtype: a structured one of which each row of the array is one element, if there is to be one.

    >>> array = frozen(np.arange(3))
    >>> array.flags.writeable, type(array.base)
    (False, <class 'bytes'>)
    """
    shape = array.shape if dtype is None else array.shape[:1]
    made: npt.NDArray[Any] = np.ndarray(shape, array.dtype if dtype is None else dtype, array.tobytes())
    return made
