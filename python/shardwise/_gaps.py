"""Runs of bytes joined over the gaps between them: the fewest reads for some more bytes, or the fewest bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._arguments import integer
from ._text import shown
from ._types import Numbers
from .errors import LayoutError

__all__ = ["SpareLimit", "joined_over_gaps", "spare_limit"]

#: Offsets in a file, or addresses.
Places = npt.NDArray[Any]
#: The most bytes that are read beyond those that are needed, or the most reads; the other is `None`.
SpareLimit = tuple["int | None", "int | None"]


def spare_limit(over_name: str, over_bytes: object, most_name: str, most: object) -> SpareLimit:
    """Return the limit that a user asks for: at most one of the two, and nothing is read over without one.

    Raises:
        LayoutError: if both are given, or one is below 0.
        TypeError: if one is not an integer.

    >>> spare_limit("over_bytes", None, "max_rows", 5), spare_limit("over_bytes", None, "max_rows", None)
    ((None, 5), (0, None))
    """
    if over_bytes is not None and most is not None:
        raise LayoutError(f"{over_name} and {most_name} are both given; give one of them")
    found = []
    for name, value in ((over_name, over_bytes), (most_name, most)):
        number = None if value is None else integer(name, value)
        if number is not None and number < 0:
            raise LayoutError(f"{name} is {shown(number)}; it must be 0 or more")
        found.append(number)
    return (0, None) if found == [None, None] else (found[0], found[1])


def joined_over_gaps(
    groups: Numbers, starts: Places, stops: Places, limit: SpareLimit, most_name: str = "max_rows"
) -> tuple[npt.NDArray[np.bool_], Places]:
    """Join runs to reads, none of which is of two groups.

    Args:
        groups: The group of each run, such as its file; the runs are in the order of groups and starts.
        starts: Where each run begins in its group.
        stops: Where it ends. Runs may overlap.
        limit: What `spare_limit` gives.
        most_name: The argument that limits the number of reads, in messages.

    Returns:
        For each run whether a read begins with it, and how far the runs up to it reach in its group.

    Raises:
        LayoutError: if no joining has so few reads: each group has one at least.

    A read of several runs costs the gaps between neighbours, and any set of gaps can be read over: each one takes one
    read away, whichever others are taken. So the shortest gaps give the fewest bytes for a number of reads, and as many
    of the shortest as the limit has room for the fewest reads.

    >>> groups, starts = np.zeros(4, int), np.array([0, 10, 13, 30])
    >>> joined_over_gaps(groups, starts, starts + 2, (1, None))[0].tolist()
    [True, True, False, True]
    >>> joined_over_gaps(groups, starts, starts + 2, (None, 2))[0].tolist()
    [True, False, False, True]
    """
    is_first = np.ones(len(starts), np.bool_)
    reach = np.zeros(len(starts), stops.dtype)
    edges = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(starts)], strict=True):
        reach[begin:end] = np.maximum.accumulate(stops[begin:end])
    is_next = groups[1:] == groups[:-1]
    touches = starts[1:] <= reach[:-1]
    # Of unsigned numbers no difference is negative.
    gaps = np.where(touches, 0, starts[1:] - np.minimum(reach[:-1], starts[1:])).astype(np.int64)
    candidates = np.flatnonzero(is_next)
    order = candidates[np.argsort(gaps[candidates], kind="stable")]
    over, most = limit
    if over is not None:
        costs = gaps[order]
        if float(costs.astype(np.float64).sum()) >= 2.0**62:  # Which 64 bits may not hold.
            costs = costs.astype(object)
        joined = order[np.cumsum(costs) <= over] if len(order) else order
    else:
        assert most is not None
        touching = int(np.count_nonzero(gaps[order] == 0))
        least = len(starts) - len(order)
        if most < least:
            raise LayoutError(
                f"{most_name} is {most}, but the runs are in {least} separate files or blocks of memory, and each "
                f"needs a read; give {least} or more"
            )
        joined = order[: max(touching, len(starts) - most)]
    is_first[1 + joined] = False
    return is_first, reach
