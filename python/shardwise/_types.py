"""Types of arrays, and of shapes, by the names that annotations have for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Numbers", "Shape", "Table"]

#: An array of any dtype.
Array = npt.NDArray[Any]
#: Sizes, offsets and indices.
Numbers = npt.NDArray[np.int64]
#: The sizes of a tensor's dims.
Shape = tuple[int, ...]
#: A structured array: rows with named columns.
Table = npt.NDArray[np.void]
