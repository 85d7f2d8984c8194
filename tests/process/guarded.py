"""Memory between pages that may not be touched, and arrays placed in it: one byte outside is a crash."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
PROT_NONE = 0

#: What the bytes of a mapping are that belong to no array.
CANARY = 0xA5

#: How the elements of a placed array lie: rows side by side, columns side by side, rows with a gap behind or before
#: them, every second element, backwards.
FORMS = ("C", "F", "gap", "stepped", "backwards")


def guarded(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes between two pages that may not be touched."""
    pages = -(-nbytes // PAGE)
    mapping = mmap.mmap(-1, (pages + 2) * PAGE)
    whole = np.frombuffer(mapping, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = whole.__array_interface__["data"][0]
    for page in (start, start + (pages + 1) * PAGE):
        if protect(page, PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return whole[PAGE:-PAGE]


class Placed:
    """A copy of an array that begins right behind a forbidden page, or ends right before one.

    Whatever the size of its elements, so its alignment is odd more often than not.
    """

    def __init__(self, array: npt.NDArray[Any], form: str, at_end: bool, gap: int = 1) -> None:
        shape = list(array.shape)
        if form == "gap" and shape:
            shape[-1] += gap
        elif form == "stepped":
            shape = [max(2 * n - 1, 0) for n in shape]
        nbytes = math.prod(shape) * array.dtype.itemsize
        self.memory = guarded(max(nbytes, 1))
        self.memory[:] = CANARY
        part = self.memory[self.memory.size - nbytes :] if at_end else self.memory[:nbytes]
        # A structured dtype would take its bytes by field, and leave those between the fields.
        whole: Any = np.ndarray(shape, f"V{array.dtype.itemsize}", part.data, order="F" if form == "F" else "C")
        if form == "gap" and array.ndim:
            whole = whole[..., gap:] if at_end else whole[..., : shape[-1] - gap]
        elif form != "C" and form != "F":
            step = 2 if form == "stepped" else -1
            whole = whole[(slice(None, None, step),) * array.ndim + (...,)]
        whole[...] = array.view(whole.dtype) if array.dtype.itemsize else array
        self._outside = np.ones(self.memory.size, np.bool_)
        first = self.memory.__array_interface__["data"][0]
        offsets = np.full((), whole.__array_interface__["data"][0] - first, np.int64)
        for n, stride in zip(whole.shape, whole.strides, strict=True):
            offsets = offsets[..., None] + np.arange(n) * stride
        self._outside[(offsets[..., None] + np.arange(array.dtype.itemsize)).ravel()] = False
        #: The array.
        self.array: npt.NDArray[Any] = whole.view(array.dtype)

    def is_untouched_outside(self) -> bool:
        """Whether no byte of the mapping was written but the array's."""
        return bool((self.memory[self._outside] == CANARY).all())
