"""Refits: from one order of a packed dim to another, from tensors apart to one and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from tests.checks import poisoned_memory, refused


def line(size: int) -> sw.DeviceMesh:
    return sw.DeviceMesh((size,), ("tp",))


def orders(ranks: int, order: Any, heads: int = 8, kv: int = 4, d: int = 3) -> sw.Partition:
    dim = packed.qkv(heads, kv, d, "tp", order=order)
    return sw.TensorLayout((dim, None), line(ranks)).partition(((heads + 2 * kv) * d, 5))


def test_the_bytes_of_a_refit_are_those_of_its_tensors() -> None:
    one, two = (sw.DeviceMesh((size,), ("tp",)) for size in (1, 2))
    here = sw.TensorLayout((packed.qkv(4, 2, 1, "tp", order="interleaved"),), one).partition((8,))
    there = sw.TensorLayout((packed.qkv(4, 2, 1, "tp"),), two).partition((8,))
    plan = sw.plan_refit(here, there)
    # All is on the first device, and half of it goes to the second: two heads of q, one of k, one of v.
    assert plan.bytes_received("int16").tolist() == [0, 8]
    assert plan.total_bytes("int16") == 8


def test_shards_of_two_dtypes_are_not_put_into_one() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    fused = sw.TensorLayout((packed.gate_up("tp"),), mesh).partition((8,))
    parts = {name: sw.TensorLayout(("tp",), mesh).partition((4,)) for name in ("gate", "up")}
    plan = sw.plan_refit(parts, fused)
    gate, up = ([np.full(2, value, np.float32)] * 2 for value in (1, 2))
    assert [array.tolist() for array in plan.run({"gate": gate, "up": up})] == [[1, 1, 2, 2]] * 2
    with refused(sw.LayoutError, "src_shards['up'] is of dtype float64", "others are of float32"):
        plan.run({"gate": gate, "up": [array.astype(np.float64) for array in up]})


def test_a_refit_names_what_it_cannot_take() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    part = sw.TensorLayout(("tp",), mesh).partition((4,))
    for wrong in ({3: part}, {"gate": 3}):
        with pytest.raises(TypeError):
            sw.plan_refit(wrong, part)  # type: ignore[arg-type]
    longer = sw.TensorLayout(("tp",), mesh).partition((6,))
    with refused(sw.LayoutError, "gate", "(4,)", "(6,)"):
        sw.plan_refit({"gate": part}, {"gate": longer})


# Interleaved on eight ranks, half a group each.
@pytest.mark.parametrize("before", [1, 2, 4, 8])
@pytest.mark.parametrize("after", [1, 2, 4, 8])
def test_from_one_order_to_another_and_back(before: int, after: int) -> None:
    q, k, v = (np.random.default_rng(i).integers(0, 10**9, (heads * 3, 5)) for i, heads in enumerate((8, 4, 4)))
    groups = [part.reshape(4, -1, 5) for part in (q, k, v)]
    interleaved = np.concatenate([part[g] for g in range(4) for part in groups])
    blocked = np.concatenate([q, k, v])
    src, dst = orders(before, "interleaved"), orders(after, "blocked")
    plan = sw.plan_refit(src, dst)
    moved = plan.run(sw.distribute_tensor(interleaved, src.layout))
    assert np.array_equal(sw.ShardedArray(dst, moved).numpy(), blocked)
    back = sw.plan_refit(dst, src).run(moved)
    assert np.array_equal(sw.ShardedArray(src, back).numpy(), interleaved)
    alone = {
        name: sw.TensorLayout(("tp", None), line(2)).partition((rows, 5))
        for name, rows in (("q", 24), ("k", 12), ("v", 12))
    }
    apart = sw.plan_refit(src, alone).run(back)
    for name, whole in (("q", q), ("k", k), ("v", v)):
        assert np.array_equal(sw.ShardedArray(alone[name], apart[name]).numpy(), whole)
    joined = sw.plan_refit(alone, dst).run(apart)
    assert np.array_equal(sw.ShardedArray(dst, joined).numpy(), blocked)
    needed = sum(math.prod(shape) for shape in dst.holder_shapes()) * 8
    kept = sum(int(one.bytes_kept("int64").sum()) for one in plan.plans.values())
    assert plan.total_bytes("int64") + kept == needed


def test_tensors_apart_may_be_on_devices_of_their_own() -> None:
    """Gate whole on both devices, up on one of each of four: totals over all tensors have no common devices then."""
    src = sw.TensorLayout((packed.gate_up("tp"),), line(2)).partition((8,))
    dst = {
        "gate": sw.TensorLayout((None,), line(2)).partition((4,)),
        "up": sw.TensorLayout(("tp",), line(4)).partition((4,)),
    }
    plan = sw.plan_refit(src, dst)
    moved = plan.run([np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])])
    assert [array.tolist() for array in moved["gate"]] == [[0, 1, 2, 3]] * 2
    assert [array.tolist() for array in moved["up"]] == [[4], [5], [6], [7]]
    with refused(sw.LayoutError, "the tensors of dst are on different devices"):
        plan.bytes_received("int64")
    alone = {**dst, "up": sw.TensorLayout((None,), line(2)).partition((4,))}
    assert sw.plan_refit(src, alone).bytes_received("int64").tolist() == [32, 32]
    ranges = sw.Tiling.from_flat_ranges((8,), [(0, 8)])
    with refused(sw.LayoutError, "src_shards is not cut as the plan's source is"):
        plan.run(sw.ShardedArray(ranges, [np.arange(8)]))


@pytest.mark.parametrize("names", ["qkv", "vkq"])
def test_replicas_share_the_sending_over_the_tensors_of_a_refit(names: str) -> None:
    """Two replicas of each quarter, of q 8 rows, of k and v 2 each: one sends q, the other k and v, in any order."""
    sizes = {"q": 32, "k": 8, "v": 8}
    trainers, engines = sw.DeviceMesh((2, 4), ("dp", "fsdp")), sw.DeviceMesh((4,), ("tp",), list("abcd"))
    apart = {name: sw.TensorLayout(("fsdp", None), trainers).partition((sizes[name], 5)) for name in names}
    fused = sw.TensorLayout((packed.qkv(32, 8, 1, "fsdp"), None), trainers).partition((48, 5))
    dst = sw.TensorLayout((packed.qkv(32, 8, 1, "tp", order="blocked"), None), engines).partition((48, 5))
    for src in (apart, fused):
        plan = sw.plan_refit(src, dst)
        sent = np.sum([one.bytes_sent("int8") for one in plan.plans.values()], axis=0).reshape(2, 4)
        assert np.sort(sent, axis=0).tolist() == [[2 * 2 * 5] * 4, [8 * 5] * 4]
        assert plan.bytes_received("int8").tolist() == [12 * 5] * 4
        same = sw.plan_refit(dict(reversed(src.items())) if isinstance(src, dict) else src, dst)
        assert same == plan
        assert same.plans == plan.plans


def test_the_padding_of_a_refit_is_zero() -> None:
    """1000 elements over 4 devices, padded to 1200: the last has 100 of each tensor, and then room for 200."""
    dim = packed.concat(*(packed.part(1000, axes="tp", pad_to=1200, name=name) for name in ("gate", "up")))
    dst = sw.TensorLayout((dim,), line(4)).partition((2000,))
    src = {name: sw.TensorLayout((None,), line(1)).partition((1000,)) for name in ("gate", "up")}
    poisoned_memory((600,), "f8")
    last = sw.plan_refit(src, dst).run({name: [np.ones(1000)] for name in src})[3]
    assert last.tolist() == ([1.0] * 100 + [0.0] * 200) * 2


def test_orders_that_differ_or_are_not_stated_are_refused() -> None:
    with refused(sw.LayoutError, "the shape is the same", "plan_refit"):
        sw.plan_reshard(orders(4, "interleaved"), orders(4, "blocked"))
    unnamed = sw.TensorLayout((packed.parse("(16@tp 3)"), None), line(4)).partition((48, 5))
    with refused(sw.LayoutError, "nothing states their order"):
        sw.plan_refit(unnamed, orders(4, "blocked"))
    with refused(sw.LayoutError, "gate"):
        sw.plan_refit(orders(4, "blocked"), sw.TensorLayout((packed.gate_up("tp"), None), line(4)).partition((48, 5)))
    with refused(sw.LayoutError, "shape"):
        sw.plan_refit(orders(4, "blocked"), orders(4, "blocked", heads=12, kv=2))
