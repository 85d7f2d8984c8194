"""Loaders that do odd things, compared with cuts by hand: recorded exactly, their rules right or refused by name.

The loaders move whole arrays, as engines do. The cuts by hand say, element by element, which tensor and which index is
at each place of a rank's parameter.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise.deploy import Recording
from shardwise.store import RecordedModel, learn_rules

Array = npt.NDArray[Any]
Config = dict[str, int]
#: At a place of a parameter of a rank: a tensor and an index, or `None` for padding.
ByHand = Callable[[Config, int, int, tuple[int, ...]], "tuple[str, tuple[int, ...]] | None"]

SIZES = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
         "num_experts")  # fmt: skip
FIRST: Config = dict(zip(SIZES, (16, 6, 8, 4, 40, 70, 4), strict=True))
SECOND: Config = dict(zip(SIZES, (24, 10, 16, 8, 56, 150, 8), strict=True))
THIRD: Config = dict(zip(SIZES, (20, 14, 12, 4, 44, 90, 12), strict=True))
#: Of which nothing is recorded.
ANOTHER: Config = dict(zip(SIZES, (32, 8, 24, 8, 72, 200, 16), strict=True))


def shapes_of(config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    hidden, d, heads, groups, inner, words, experts = (config[name] for name in SIZES)
    found: dict[str, tuple[int, ...]] = {
        "embed": (words, hidden), "q": (heads * d, hidden), "k": (groups * d, hidden), "v": (groups * d, hidden),
        "up": (inner, hidden), "norm": (hidden,),
    }  # fmt: skip
    found |= {f"experts.{e}": (inner, hidden) for e in range(experts)}
    return {name: (shape, "float32") for name, shape in found.items()}


class Odd(NamedTuple):
    """A loader of one parameter, the same by hand, and what is made of it: rules, or a refusal."""

    load: Callable[[Mapping[str, Array], Config, int, int], Array]
    by_hand: ByHand
    is_learned: bool


def heads_with_remainder(config: Config, ranks: int, rank: int) -> range:
    """The first ranks have one head more."""
    each, more = divmod(config["num_attention_heads"], ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def uneven_heads(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    own, d = heads_with_remainder(config, ranks, rank), config["head_dim"]
    found: Array = tensors["q"][own.start * d : own.stop * d].copy()
    return found


def in_place(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    """A buffer that is filled by copies, of which one overwrites a part of another."""
    rows = config["intermediate_size"] // ranks
    buffer = np.zeros((rows + 4, config["hidden_size"]), np.float32)
    buffer[: rows + 4] = tensors["embed"][: rows + 4]
    np.copyto(buffer[:rows], tensors["up"][rank * rows : (rank + 1) * rows])
    return buffer


def halves(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    """Rows of each head from interleaved pairs to two halves, as rotary positions need it."""
    d, hidden = config["head_dim"], config["hidden_size"]
    own = np.split(tensors["q"], ranks)[rank].reshape(-1, d // 2, 2, hidden)
    found: Array = own.transpose(0, 2, 1, 3).reshape(-1, hidden).copy()
    return found


def pairs(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    """Queries and keys of each group one after the other: q, q, k, q, q, k, …"""
    d, groups, hidden = config["head_dim"], config["num_key_value_heads"], config["hidden_size"]
    q, k = (tensors[name].reshape(groups, -1, hidden) for name in "qk")
    return np.split(np.concatenate([q, k], 1), ranks)[rank].reshape(-1, hidden).copy() if d else q


def pair_by_hand(config: Config, ranks: int, rank: int, at: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    d, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    each = heads // groups
    group, row = divmod(at[0], (each + 1) * d)
    group += rank * groups // ranks
    return ("q", (group * each * d + row, at[1])) if row < each * d else ("k", (group * d + row - each * d, at[1]))


def round_robin(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    return np.stack([tensors[f"experts.{e}"].T for e in range(rank, config["num_experts"], ranks)])


def three(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    """Three tensors side by side, transposed."""
    return np.concatenate([np.split(tensors[name], ranks)[rank].T for name in "qkv"], 1)


def three_by_hand(config: Config, ranks: int, rank: int, at: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    column = at[1]
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        own = config[heads] * config["head_dim"] // ranks
        if column < own:
            return name, (rank * own + column, at[0])
        column -= own
    raise AssertionError("there are three")


def padded(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Array:
    words = tensors["embed"]
    own: Array = np.split(np.pad(words, ((0, -len(words) % 64), (0, 0))), ranks)[rank].copy()
    return own


def padded_by_hand(config: Config, ranks: int, rank: int, at: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    row = rank * (-(-config["vocab_size"] // 64) * 64 // ranks) + at[0]
    return ("embed", (row, at[1])) if row < config["vocab_size"] else None


ODD = {
    "every other row": Odd(
        lambda tensors, config, ranks, rank: tensors["up"][rank::ranks].copy(),
        lambda config, ranks, rank, at: ("up", (at[0] * ranks + rank, at[1])),
        is_learned=False,
    ),
    "heads with a remainder": Odd(
        uneven_heads,
        lambda config, ranks, rank, at: (
            "q", (heads_with_remainder(config, ranks, rank).start * config["head_dim"] + at[0], at[1])
        ),
        is_learned=True,
    ),
    "copies in place": Odd(
        in_place,
        lambda config, ranks, rank, at: (
            ("up", (rank * (config["intermediate_size"] // ranks) + at[0], at[1]))
            if at[0] < config["intermediate_size"] // ranks
            else ("embed", at)
        ),
        is_learned=False,
    ),
    "pairs to halves": Odd(
        halves,
        lambda config, ranks, rank, at: (
            "q",
            (
                rank * config["num_attention_heads"] * config["head_dim"] // ranks
                + at[0] // config["head_dim"] * config["head_dim"]
                + at[0] % config["head_dim"] % (config["head_dim"] // 2) * 2
                + at[0] % config["head_dim"] // (config["head_dim"] // 2),
                at[1],
            ),
        ),
        is_learned=True,
    ),
    "queries and keys by group": Odd(pairs, pair_by_hand, is_learned=True),
    "experts in turn": Odd(
        round_robin,
        lambda config, ranks, rank, at: (f"experts.{rank + at[0] * ranks}", (at[2], at[1])),
        is_learned=False,
    ),
    "three side by side": Odd(three, three_by_hand, is_learned=True),
    "rows twice": Odd(
        lambda tensors, config, ranks, rank: np.take(
            np.split(tensors["k"], ranks)[rank], np.repeat(np.arange(len(tensors["k"]) // ranks), 2), 0
        ),
        lambda config, ranks, rank, at: (
            "k", (rank * config["num_key_value_heads"] * config["head_dim"] // ranks + at[0] // 2, at[1])
        ),
        is_learned=False,
    ),
    "tiled": Odd(
        lambda tensors, config, ranks, rank: np.tile(tensors["norm"], 3),
        lambda config, ranks, rank, at: ("norm", (at[0] % config["hidden_size"],)),
        is_learned=False,
    ),
    "padded words": Odd(padded, padded_by_hand, is_learned=True),
    "another tensor than its name says": Odd(
        lambda tensors, config, ranks, rank: np.split(tensors["v"], ranks)[rank].copy(),
        lambda config, ranks, rank, at: (
            "v", (rank * config["num_key_value_heads"] * config["head_dim"] // ranks + at[0], at[1])
        ),
        is_learned=True,
    ),
}  # fmt: skip


def recorded_rank(odd: Odd, config: Config, ranks: int, rank: int) -> Recording:
    return sw.record(shapes_of(config), lambda tensors: {"k": odd.load(tensors, config, ranks, rank)}, rank)


def numbers_by_hand(odd: Odd, config: Config, ranks: int, rank: int, shape: tuple[int, ...]) -> Array:
    starts, end = {}, 1
    shapes = shapes_of(config)
    for name, (own, _) in shapes.items():
        starts[name] = end
        end += math.prod(own)
    found = np.zeros(shape, np.int64)
    for at in np.ndindex(*shape):
        place = odd.by_hand(config, ranks, rank, at)
        if place is not None:
            name, index = place
            found[at] = starts[name] + int(np.ravel_multi_index(index, shapes[name][0]))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", ODD)
def test_a_recording_is_what_it_is_by_hand(name: str) -> None:
    odd = ODD[name]
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            numbers = recorded_rank(odd, FIRST, ranks, rank).element_numbers("k")
            assert np.array_equal(numbers, numbers_by_hand(odd, FIRST, ranks, rank, numbers.shape)), (ranks, rank)


def recorded(odd: Odd, config: Config) -> RecordedModel:
    counts = (1, 2, 4)
    return RecordedModel(
        config, {ranks: [recorded_rank(odd, config, ranks, rank) for rank in range(ranks)] for ranks in counts}
    )


@pytest.mark.heavy
@pytest.mark.parametrize("name", ODD)
def test_rules_are_right_for_another_size_or_refused_by_name(name: str) -> None:
    odd = ODD[name]
    learned = learn_rules([recorded(odd, one) for one in (FIRST, SECOND, THIRD)])
    if not odd.is_learned:
        assert set(learned.unexplained) == {"k"}
        assert "'^k$'" not in learned.text
        return
    assert learned.unexplained == {}, learned.unexplained
    ranks = 8
    layouts = sw.LayoutMap.from_toml(io.StringIO(learned.text), sw.DeviceMesh((ranks,), ("tp",)), config=ANOTHER)
    rank_shape = odd.load({n: np.zeros(s, np.float32) for n, (s, _) in shapes_of(ANOTHER).items()}, ANOTHER, 1, 0).shape
    whole = numbers_by_hand(odd, ANOTHER, 1, 0, rank_shape)
    partition = layouts.partition("k", whole.shape)
    for rank in range(ranks):
        own = np.zeros(partition.holder_shape(f"cpu:{rank}"), np.int64)
        for piece in partition.pieces(f"cpu:{rank}"):
            piece.view(own)[...] = whole[piece.box]
        assert np.array_equal(own, numbers_by_hand(odd, ANOTHER, ranks, rank, own.shape)), rank
