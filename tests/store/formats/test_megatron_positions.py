"""Places of parameters in Megatron's buffers, by every bucket size that there may have been."""

from __future__ import annotations

import random

import pytest

from shardwise._dtypes import DTYPES
from shardwise.state.buckets import buckets
from shardwise.store.formats.megatron.parameters import Parameter
from shardwise.store.formats.megatron.positions import in_buckets, in_sequence


def parameters(sizes: list[int], shared: int | None = None) -> list[Parameter]:
    return [
        Parameter(f"p{at}", DTYPES["float32"], (((0, size),),), is_shared=at == shared) for at, size in enumerate(sizes)
    ]


def test_places_by_hand() -> None:
    """Megatron's: from the last to the first, each from a multiple of 64; a shared one alone; sizes 30, 100, 16."""
    assert in_buckets(parameters([30, 100, 16]), [222]) == [[(2, 0), (1, 64), (0, 192)]]
    assert in_buckets(parameters([30, 100, 16], shared=0), [192, 30]) == [[(2, 0), (1, 64)], [(0, 0)]]
    # A bucket of 100 elements is full with the second; the third begins without the padding of 28 elements.
    assert in_buckets(parameters([30, 100, 16]), [164, 30]) == [[(2, 0), (1, 64)], [(0, 0)]]
    assert in_buckets(parameters([30, 100, 16]), [165, 30]) is None
    assert in_sequence(parameters([30, 100, 16]), 194) == [[164, 64, 0]]
    assert in_sequence(parameters([30, 100, 16]), 222) == [[192, 64, 0]]
    assert in_sequence(parameters([30, 100, 16]), 223) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_bucket_size_is_among_those_that_are_tried(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([16, 64, 128, draw.randrange(1, 400)]) for _ in range(draw.randrange(1, 14))]
    shared = draw.choice([None, 0, len(sizes) - 1])
    most = draw.choice([None, draw.randrange(1, 1500)])
    own = parameters(sizes, shared)
    made = buckets(sizes[::-1], [each.is_shared for each in reversed(own)], most)
    places = in_buckets(own, [bucket.size for bucket in made])
    assert places == [[(len(sizes) - 1 - at, start) for at, start in bucket.starts] for bucket in made]
    at, starts = 0, dict[int, int]()
    for bucket in made:
        starts.update((len(sizes) - 1 - number, at + start) for number, start in bucket.starts)
        at += bucket.size
    assert [starts[number] for number in range(len(sizes))] in in_sequence(own, at)
