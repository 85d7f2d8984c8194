"""The arrays of a parameter; and flat arrays of parameters one after the other, cut into equal parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._dtypes import bytes_for
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from .optimizers import Optimizer
from .recipe import Local, Recipe, StateShare

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..partition import Partition
    from .recipe import Count

__all__ = [
    "Flat",
    "array_share",
    "flattened",
    "lengths_of",
    "master_and_states",
    "padded_shares",
    "rounded_up",
    "states_of_flat",
    "weight",
]


def weight(part: Local) -> StateShare:
    """Return the array of a parameter's weight, whole."""
    return array_share("weights", "weight", part, part.size, part.bits)


def array_share(kind: str, name: str, part: Local, elements: Any, bits: int) -> StateShare:
    """Return an array of a parameter, without padding; `elements` is a number for all ranks, or one for each."""
    size = bytes_for(elements, bits)
    return StateShare(kind, name, part.tensor, size, size)


def master_and_states(
    recipe: Recipe, part: Local, sizes: tuple[Count, ...], copy: int | None = None
) -> Iterator[StateShare]:
    """Yield the master copy of a parameter, if there is one, and the arrays of its optimizer."""
    assert recipe.optimizer is not None
    bits = copy if recipe.masters is None else recipe.masters
    if bits:
        yield array_share("masters", "master", part, math.prod(sizes), bits)
    for kept in recipe.optimizer.kept(sizes, bits or part.bits, is_matrix=part.is_matrix):
        yield array_share("optimizer", kept.name, part, kept.elements, kept.bits)


class Flat(NamedTuple):
    """Parameters one after the other in an array that is cut into equal parts.

    Attributes:
        starts: The first element of each parameter.
        size: The size of the array, before it is padded to equal parts.
        cuts: The start and stop of each rank's part, within that size.
        chunk: The length of a part.
    """

    starts: tuple[int, ...]
    size: int
    cuts: npt.NDArray[np.int64]
    chunk: int

    def lengths(self, start: int, size: int) -> npt.NDArray[np.int64]:
        """Return the number of a parameter's elements in each rank's part."""
        found: npt.NDArray[np.int64] = np.minimum(self.cuts[:, 1], start + size) - np.maximum(self.cuts[:, 0], start)
        return np.maximum(found, 0)

    def lengths_of_all(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return `lengths` of each parameter, of shape (parameters, ranks)."""
        starts = np.array(self.starts, np.int64)[:, None]
        stops = starts + np.array(sizes, np.int64)[:, None]
        found: npt.NDArray[np.int64] = np.minimum(self.cuts[:, 1], stops) - np.maximum(self.cuts[:, 0], starts)
        return np.maximum(found, 0)


def flattened(sizes: Sequence[int], ways: int, align: int = 1, end: int = 1) -> Flat:
    """Return parameters one after the other, each at a multiple of `align`, with the end at a multiple of `end`."""
    starts, at = [], 0
    for size in sizes:
        at = rounded_up(at, align)
        starts.append(at)
        at += size
    size = rounded_up(at, end)
    partition = _partition(size, ways)
    return Flat(tuple(starts), size, partition.boxes()[:, 0], partition.largest_shard_shape[0])


def rounded_up(size: int, step: int) -> int:
    """Return the least multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def padded_shares(
    kind: str, name: str, pieces: Sequence[tuple[Local, npt.NDArray[np.int64]]], chunk: int, bits: int
) -> Iterator[StateShare]:
    """Yield the pieces of parameters in a flat part of `chunk` elements, and the rest of it as padding."""
    every = np.array([lengths for _, lengths in pieces])
    for (part, _), size in zip(pieces, bytes_for(every, bits), strict=True):
        yield StateShare(kind, name, part.tensor, size, size)
    left = chunk - every.sum(0)
    if np.any(left):
        yield StateShare(kind, "padding", None, np.zeros_like(left), bytes_for(left, bits))


def states_of_flat(
    optimizer: Optimizer, pieces: Sequence[tuple[Local, npt.NDArray[np.int64]]], chunk: int, bits: int
) -> Iterator[StateShare]:
    """Yield the arrays of an optimizer for a flat part; those of its length are divided among its parameters."""
    for kept in optimizer.kept((chunk,), bits):
        if isinstance(kept.elements, int) and kept.elements == chunk and kept.name != "step":
            yield from padded_shares("optimizer", kept.name, pieces, chunk, kept.bits)
        else:
            elements: Any = kept.elements
            size = bytes_for(elements, kept.bits)
            yield StateShare("optimizer", kept.name, None, size, size)


@lru_cache(maxsize=4096)
def _partition(size: int, ways: int, uneven: UnevenRule = "ceil") -> Partition:
    """Return a flat array cut into equal parts, of which the last may be short or empty."""
    return TensorLayout(("ranks",), _ranks(ways)).partition((size,), uneven)


@lru_cache(maxsize=64)
def _ranks(ways: int) -> DeviceMesh:
    return DeviceMesh((ways,), ("ranks",))


@lru_cache(maxsize=4096)
def lengths_of(size: int, ways: int) -> npt.NDArray[np.int64]:
    """Return the number of elements of each rank, of an array cut into equal parts."""
    bounds = _partition(size, ways).boxes()[:, 0]
    lengths: npt.NDArray[np.int64] = bounds[:, 1] - bounds[:, 0]
    lengths.flags.writeable = False
    return lengths
