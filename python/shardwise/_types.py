"""Types of arrays, and of shapes, by the names that annotations have for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Numbers", "Shape"]

#: An array of any dtype.
Array = npt.NDArray[Any]
#: Sizes, offsets and indices.
Numbers = npt.NDArray[np.int64]
#: The sizes of a tensor's dims.
Shape = tuple[int, ...]
