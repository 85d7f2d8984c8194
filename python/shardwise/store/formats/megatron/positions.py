"""The places of parameters in a rank's buffers. No file states them: they are worked out as Megatron computes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....state.buckets import Bucket, buckets
from .parameters import Parameter

__all__ = ["by_buffer", "in_buckets", "in_sequence"]

#: The most ways to cut a buffer into buckets that are tried.
_MOST_WAYS = 4096


def by_buffer(chunks: Iterable[Sequence[Parameter]]) -> list[list[Parameter]]:
    """Return the parameters of each buffer: of one chunk of the model and one dtype, in the order of the model."""
    found: list[list[Parameter]] = []
    for chunk in chunks:
        by_dtype: dict[str, list[Parameter]] = {}
        for parameter in chunk:
            by_dtype.setdefault(parameter.dtype.name, []).append(parameter)
        found += by_dtype.values()
    return found


def in_buckets(parameters: Sequence[Parameter], lengths: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """Return for each bucket its parameters, by their numbers, and their first elements in the bucket.

    Args:
        parameters: The parameters of the buffer, in the order of the model.
        lengths: The elements of each bucket without the padding at its end.

    Returns:
        `None` if no bucket size gives buckets of these lengths.
    """
    for ways in _ways(parameters):
        if [bucket.size for bucket in ways] == list(lengths):
            return [_forwards(parameters, bucket) for bucket in ways]
    return None


def in_sequence(parameters: Sequence[Parameter], total: int) -> list[list[int]]:
    """Return the possible places of parameters in an array of all buckets without padding, one after the other.

    Args:
        parameters: The parameters of the buffer, in the order of the model.
        total: The elements of the array.

    Returns:
        Each list of first elements for which the array has this number of elements.
    """
    found: list[list[int]] = []
    for ways in _ways(parameters):
        if sum(bucket.size for bucket in ways) != total:
            continue
        starts, at = [0] * len(parameters), 0
        for bucket in ways:
            for number, start in _forwards(parameters, bucket):
                starts[number] = at + start
            at += bucket.size
        if starts not in found:
            found.append(starts)
    return found


def _ways(parameters: Sequence[Parameter]) -> Iterator[list[Bucket]]:
    """Yield the ways to cut a buffer into buckets: without a bucket size, and for all bucket sizes that differ."""
    sizes = [parameter.size for parameter in reversed(parameters)]
    apart = [parameter.is_shared for parameter in reversed(parameters)]
    whole = buckets(sizes, apart, None)
    yield whole
    most, before = 1, None
    for _ in range(_MOST_WAYS):
        ways = buckets(sizes, apart, most)
        if ways != before:
            yield ways
        before = ways
        # A larger bucket size gives other buckets as soon as one is no longer full.
        full = [bucket.size for bucket in ways if bucket.size >= most]
        if not full or ways == whole:
            return
        most = min(full) + 1


def _forwards(parameters: Sequence[Parameter], bucket: Bucket) -> list[tuple[int, int]]:
    return [(len(parameters) - 1 - number, start) for number, start in bucket.starts]
