"""Arrays that nobody can write to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["frozen"]


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give a copy of an array of numbers in the memory of a `bytes` object, which stays as it is.

    An array that is only marked read-only has a base, the array that owns the memory, and of that anyone can set the
    mark back.

    >>> array = frozen(np.arange(3))
    >>> array.flags.writeable, type(array.base)
    (False, <class 'bytes'>)
    """
    made: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, array.tobytes())
    return made
