"""Arrays that nobody can write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["frozen", "frozen_objects", "handed_out"]


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array of numbers in the memory of a `bytes` object, which stays as it is.

    An array that is only marked read-only has a base, the array that owns the memory, and of that anyone can set the
    mark back.

    >>> array = frozen(np.arange(3))
    >>> array.flags.writeable, type(array.base)
    (False, <class 'bytes'>)
    """
    made: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, array.tobytes())
    return made


class _HeldMemory:
    """The memory of an array, for arrays of the same memory that nobody can make writeable."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # Keeps the memory.
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, True)}


def frozen_objects(array: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """Return a read-only array of the same objects, whose base is not an array; nothing is copied.

    `frozen` copies numbers into bytes; objects cannot be there.

    >>> made = frozen_objects(np.array(["cpu:0", ("gpu", 1)], dtype=object))
    >>> made[1], made.flags.writeable, isinstance(made.base, np.ndarray)
    (('gpu', 1), False, False)
    """
    return np.asarray(_HeldMemory(array))


def handed_out(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array that a value keeps to a caller: another one of the same memory.

    An array that cannot be written to can still be given another shape or dtype in place.

    >>> kept = frozen(np.arange(4))
    >>> handed_out(kept).shape = (2, 2)
    >>> kept.shape
    (4,)
    """
    another: npt.NDArray[Any] = array.view()
    return another
