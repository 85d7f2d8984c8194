"""Our collectives move no more bytes than those that XLA compiles the same change of layout to."""

from __future__ import annotations

import importlib.util
import random

import pytest

from tests.oracle.worker_xla import collectives
from tests.prove import against_xla

#: More of them in `make prove`.
CASES = 100


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_no_more_bytes_than_xla() -> None:
    rng = random.Random(13)
    cases = [against_xla.random_pair(rng) for _ in range(CASES)]
    try:
        pairs = [against_xla.both(*pair) for pair in zip(cases, against_xla.answers(cases), strict=True)]
    finally:
        against_xla.XLA.stop()
    more = [(case, pair) for case, pair in zip(cases, pairs, strict=True) if pair[0] > pair[1]]
    assert not more
    # That both count the same: where one collective does it, there is nothing to choose.
    assert sum(ours == theirs > 0 for ours, theirs in pairs) > CASES / 3


def test_bytes_are_read_off_the_text_of_a_program() -> None:
    # By hand. A gather in groups of 2 of 8 x 4 elements: half of 128 bytes. Exchanges of two pieces of 16 elements,
    # in groups of 2 along an axis of that size: half of 128. A permute of 16 elements, and one that moves nothing.
    program = """
      %a = f32[8,4]{1,0} all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
      %b = (f32[4,4]{1,0}, f32[4,4]{1,0}) all-to-all(%x, %y), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]) {'a'}
      %c = f32[16]{0} all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
      %d = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,2}}
      %e = f32[16]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}
      %f = f32[16]{0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(1)4}, to_apply=%sum
      %g = f32[4]{0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
      %h = f32[16]{0} fusion(%all-gather), kind=kLoop
    """
    assert collectives(program) == [
        ("all-gather", 64),
        ("all-to-all", 64),
        ("all-to-all", 48),
        ("collective-permute", 64),
        ("collective-permute", 0),
        ("all-reduce", 96),
        ("reduce-scatter", 48),
    ]
