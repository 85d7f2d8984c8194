"""Dims split, merged and permuted, as text; the sizes are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.rules.arrangement import Arrangement, parse_arrangement

HEADS = parse_arrangement("(heads d) hidden -> heads d hidden", {"d": 4})


def heads_with(**sizes: int) -> Arrangement:
    return replace(HEADS, sizes=tuple({**dict(HEADS.sizes), **sizes}.items()))


def test_what_is_unknown_is_what_is_left_of_its_dim() -> None:
    assert HEADS.solved(HEADS.stored, (12, 5)) == {"heads": 3, "d": 4, "hidden": 5}
    assert HEADS.solved(HEADS.stored, (0, 5)) == {"heads": 0, "d": 4, "hidden": 5}
    assert HEADS.solved(HEADS.common, (3, 4, 5)) == {"heads": 3, "d": 4, "hidden": 5}
    one = parse_arrangement("a -> a 1")
    assert one.solved(one.common, (7, 1)) == {"a": 7}
    assert heads_with(heads=3).solved(HEADS.stored, (12, 5)) == {"heads": 3, "d": 4, "hidden": 5}


@pytest.mark.parametrize(
    ("shape", "more", "message"),
    [
        ((13, 5), {}, r"dim 0 has 13 elements, and is \(heads d\), where d = 4"),
        ((12, 5), {"heads": 4}, r"dim 0 has 12 elements, and is \(heads d\), where heads = 4, d = 4"),
        ((12, 5), {"d": 0}, r"dim 0 has 12 elements, and is \(heads d\), where d = 0"),
        ((0, 5), {"d": 0}, r"dim 0 has 0 elements, and is \(heads d\), where d = 0"),
        ((12, 5), {"hidden": 6}, r"dim 1 has 5 elements, and is hidden, where hidden = 6"),
        ((12,), {}, "it has 1 dim; .* is for 2"),
    ],
)
def test_what_does_not_fit_is_named(shape: tuple[int, ...], more: dict[str, int], message: str) -> None:
    with pytest.raises(sw.LayoutError, match=message):
        heads_with(**more).solved(HEADS.stored, shape)


def test_two_unknown_in_one_dim_are_named() -> None:
    both = parse_arrangement("(heads d) -> heads d")
    with pytest.raises(sw.LayoutError, match=r"dim 0 is \(heads d\), but the size of neither heads nor d is given"):
        both.solved(both.stored, (12,))
