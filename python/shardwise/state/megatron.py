"""Megatron-Core's buffers: the arrays that its ranks hold and allocate, with its distributed optimizer and without."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._dtypes import bytes_for
from .buckets import buckets
from .flat import array_share, flattened, master_and_states, rounded_up, weight
from .recipe import Local, Recipe, StateShare

if TYPE_CHECKING:
    import numpy.typing as npt


__all__ = ["megatron", "megatron_whole"]


def _buffers(parts: Sequence[Local]) -> Iterator[list[Local]]:
    """Yield the parameters of each of Megatron's buffers: of one chunk, with one dtype of weights and gradients."""
    found: dict[tuple[Hashable, int], list[Local]] = {}
    for part in parts:
        if part.trained:
            found.setdefault((part.unit, part.bits), []).append(part)
    yield from found.values()


def megatron_whole(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays without the distributed optimizer: all whole, with masters of parameters of 16 bits."""
    for part in parts:
        yield weight(part)
        if part.trained and recipe.optimizer is not None:
            yield array_share("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
            yield from master_and_states(recipe, part, part.shape, 32 if part.bits == 16 else 0)


def megatron(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of the distributed optimizer: parameters in buckets from the last to the first, cut equally."""
    for part in parts:
        yield weight(part)
    if recipe.optimizer is None:
        return
    for at, own in enumerate(_buffers(parts)):
        bits, gradients = own[0].bits, recipe.gradients or own[0].bits
        masters = (32 if bits == 16 else 0) if recipe.masters is None else recipe.masters
        size = 0
        for bucket in _buckets(recipe, own[::-1], ways, is_first=at == 0):
            size += bucket.size
            for part, lengths in bucket.pieces:
                yield array_share("gradients", "gradient", part, part.size, gradients)
                is_there = (lengths > 0).astype(np.int64)
                for entry in master_and_states(recipe, part, (lengths,), masters):
                    yield entry._replace(held=entry.held * is_there, allocated=entry.allocated * is_there)
        padding = size - sum(part.size for part in own)
        if padding:
            yield StateShare("weights", "padding", None, 0, bytes_for(padding, bits))
            yield StateShare("gradients", "padding", None, 0, bytes_for(padding, gradients))


class _MegatronBucket(NamedTuple):
    """The size of a bucket, and the elements of each of its parameters on each rank."""

    size: int
    pieces: list[tuple[Local, npt.NDArray[np.int64]]]


def _buckets(recipe: Recipe, parts: Sequence[Local], ways: int, *, is_first: bool) -> Iterator[_MegatronBucket]:
    """Yield buckets as `_ParamAndGradBuffer` fills them: parameters begin at multiples of 64."""
    step = math.lcm(ways, 128, 2**16 if recipe.high_bandwidth else 1)
    most = recipe.bucket if is_first else None
    for bucket in buckets([part.size for part in parts], [part.apart for part in parts], most):
        flat = flattened([rounded_up(bucket.size, step)], ways)
        yield _MegatronBucket(
            flat.size, [(parts[at], flat.lengths(start, parts[at].size)) for at, start in bucket.starts]
        )
