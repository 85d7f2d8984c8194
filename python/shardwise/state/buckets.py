"""Megatron's buffers: parameters from the last to the first, in buckets, as `_ParamAndGradBuffer` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PARAMETER_ALIGNMENT", "Bucket", "buckets"]

#: Parameters begin at multiples of this many elements.
PARAMETER_ALIGNMENT = 64


class Bucket(NamedTuple):
    """A bucket without the padding at its end.

    Attributes:
        size: Its number of elements. If the next parameter begins a bucket of its own, this one ends at that beginning.
        starts: The number of each parameter in it, and the parameter's first element in the bucket.
    """

    size: int
    starts: list[tuple[int, int]]


def buckets(sizes: Sequence[int], apart: Sequence[bool], most: int | None) -> list[Bucket]:
    """Return the buckets of the parameters of one buffer.

    Args:
        sizes: The elements of each parameter, from the last to the first.
        apart: For each parameter, whether it has a bucket of its own, as the tied embedding has in a pipeline.
        most: The number of elements at which a bucket is full; `None` for one bucket.

    >>> buckets([16, 128, 16, 32], [False, False, False, True], None)
    [Bucket(size=256, starts=[(0, 0), (1, 64), (2, 192)]), Bucket(size=32, starts=[(3, 0)])]
    >>> [bucket.size for bucket in buckets([16, 128, 16, 32], [False] * 4, 100)]
    [192, 96]
    """
    found: list[Bucket] = []
    own: list[tuple[int, int]] = []
    at = 0
    for number, (size, is_apart) in enumerate(zip(sizes, apart, strict=True)):
        at = -(-at // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if is_apart and own:
            found.append(Bucket(at, own))
            own, at = [], 0
        own.append((number, at))
        at += size
        if is_apart or (most is not None and at >= most):
            found.append(Bucket(at, own))
            own, at = [], 0
    return [*found, Bucket(at, own)] if own else found
