"""The holder of a plan that each process is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._arguments import integer
from .._text import shown
from ..errors import LayoutError

__all__ = ["ranks_of"]


def ranks_of(peers: Sequence[Any], ranks: Any, size: int) -> list[int]:
    """Give the rank of each holder: by label, in their order, or as they are numbered.

    Raises:
        LayoutError: if one is missing, given twice, or not there.
        TypeError: if one is not an integer.

    >>> ranks_of(["a", "b"], {"b": 0, "a": 2}, 3)
    [2, 0]
    """
    if ranks is None:
        found = list(range(len(peers)))
    elif isinstance(ranks, Mapping):
        missing = [label for label in peers if label not in ranks]
        if missing:
            raise LayoutError(f"ranks has no rank for {shown(missing[0])}")
        found = [integer(f"ranks[{shown(label)}]", ranks[label]) for label in peers]
    else:
        found = [integer(f"ranks[{number}]", rank) for number, rank in enumerate(ranks)]
    if len(found) != len(peers) or len(set(found)) != len(found):
        raise LayoutError(f"ranks has {len(set(found))} different ranks for {len(peers)} holders")
    for rank in found:
        if not 0 <= rank < size:
            raise LayoutError(f"rank {rank} is not there: there are {size} processes")
    return found
