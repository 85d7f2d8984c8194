"""Tensors whose elements are ranges of flat arrays, on one rank or several, as ZeRO and FSDP keep them.

A range of a flattened tensor consists of a few boxes, each contiguous in the array (`Tiling.from_flat_ranges`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...tiling import Tiling

__all__ = ["FlatBoxes", "flat_boxes"]


class FlatBoxes(NamedTuple):
    """The boxes that ranges of a flattened tensor consist of, in the order of the ranges.

    Attributes:
        boxes: int64 of shape (boxes, dims, 2).
        ranges: For each box, the number of its range.
        begins: For each box, its first element in its range; the others follow in C order.
    """

    boxes: npt.NDArray[np.int64]
    ranges: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]


@lru_cache(1024)
def _boxes(shape: tuple[int, ...], ranges: tuple[tuple[int, int], ...]) -> FlatBoxes:
    core = Tiling.from_flat_ranges(shape, ranges).core_tiling()
    rows: list[list[int]] = []
    for number, (start, stop) in enumerate(ranges):
        for box, begin in core.pieces(number) if start < stop else ():
            at = begin if isinstance(begin, int) else 0
            rows.append([number, at, *(edge for side in box for edge in (side.start, side.stop))])
    table = np.array(rows, np.int64).reshape(len(rows), 2 + 2 * len(shape))
    table.flags.writeable = False
    return FlatBoxes(table[:, 2:].reshape(len(rows), len(shape), 2), table[:, 0], table[:, 1])


def flat_boxes(shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> FlatBoxes:
    """Return the boxes that ranges of a flattened tensor consist of; an empty range has none.

    Args:
        shape: The shape of the tensor.
        ranges: Start and stop of each range, counted in elements in C order.

    Raises:
        LayoutError: if a range is not within the flattened tensor.

    >>> flat_boxes((3, 4), [(0, 6), (6, 12)]).boxes.tolist()
    [[[0, 1], [0, 4]], [[1, 2], [0, 2]], [[1, 2], [2, 4]], [[2, 3], [0, 4]]]
    """
    return _boxes(shape, tuple(ranges))
