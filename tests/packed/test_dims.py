"""Packed dims in Python: the design's numbers, text that reads back, shards, plans between orders, bad input."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import packed
from shardwise.interop.hlo import from_hlo, to_hlo
from shardwise.interop.megatron import to_rank_offsets
from shardwise.interop.shardy import to_shardy
from shardwise.interop.torch import to_placements
from shardwise.interop.translation import translate

from ..checks import poisoned_memory, refused

ROOT = Path(__file__).parents[2]


def line(size: int) -> sw.DeviceMesh:
    return sw.DeviceMesh((size,), ("tp",))


def rows(dim: packed.PackedDim, n: int, devices: int, device: int, rule: sw.UnevenRule = "even") -> list[list[int]]:
    partition = sw.TensorLayout((dim,), line(devices)).partition((n,), rule)
    return [[piece.box[0].start, piece.box[0].stop] for piece in partition.pieces(f"cpu:{device}")]


@pytest.mark.parametrize(
    ("dim", "n", "devices", "device", "expected"),
    [
        (packed.qkv(64, 8, 128, "tp"), 10240, 8, 3, [[3072, 4096], [8576, 8704], [9600, 9728]]),
        (packed.qkv(64, 8, 128, "tp"), 10240, 16, 5, [[2560, 3072], [8448, 8576], [9472, 9600]]),
        (
            packed.parse("(64@tp 128) + (8@tp:(1)8 128) + (8@tp:(1)8 128)"),
            10240,
            16,
            5,
            [[2560, 3072], [8448, 8576], [9472, 9600]],
        ),
        (packed.qkv(32, 4, 128, "tp"), 5120, 8, 5, [[2560, 3072], [4352, 4480], [4864, 4992]]),
        (packed.gate_up("tp"), 28672, 8, 1, [[1792, 3584], [16128, 17920]]),
        (packed.parse("(3 h@tp d)", h=12, d=64), 2304, 4, 1, [[192, 384], [960, 1152], [1728, 1920]]),
        (packed.parse("(3 4@tp 2)"), 24, 4, 1, [[2, 4], [10, 12], [18, 20]]),
    ],
)
def test_the_numbers_of_the_design(
    dim: packed.PackedDim, n: int, devices: int, device: int, expected: list[list[int]]
) -> None:
    assert rows(dim, n, devices, device) == expected


@st.composite
def dims(draw: st.DrawFn) -> packed.PackedDim:
    parts = []
    free = draw(st.booleans())
    for i in range(draw(st.integers(1, 4))):
        factors: list[int | None] = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        if free and draw(st.booleans()):
            factors[draw(st.integers(0, len(factors) - 1))] = None
        options: dict[str, Any] = {"name": draw(st.sampled_from([None, f"t{i}"]))}
        if None in factors:
            options["ratio"] = draw(st.integers(1, 3))
        if draw(st.booleans()):
            options["cut"] = draw(st.integers(0, len(factors) - 1))
            options["axes"] = draw(st.sampled_from(["tp", ("dp", "tp"), "tp:(2)4", ("x\u00e9", "tp"), "a b"]))
            options["uneven"] = draw(st.sampled_from([None, "even", "ceil", "chunk", "balanced", "floor"]))
            options["at_most"] = draw(st.none() | st.integers(1, 9))
            options["split"] = draw(st.booleans())
            options["pad_to"] = None if options["split"] else draw(st.none() | st.integers(1, 9))
            options["pad_each"] = options["pad_to"] is not None and draw(st.booleans())
        parts.append(packed.part(factors, **options))
    return packed.concat(*parts)


@given(dims())
def test_text_reads_back(dim: packed.PackedDim) -> None:
    assert eval(repr(dim), {"packed": packed}) == dim
    assert pickle.loads(pickle.dumps(dim)) == dim
    assert hash(pickle.loads(pickle.dumps(dim))) == hash(dim)
    layout = sw.TensorLayout((dim, None))
    assert eval(repr(layout), {"packed": packed, "TensorLayout": sw.TensorLayout}) == layout


def test_the_repr_is_the_notation_where_that_says_all() -> None:
    for text in ("(8)", "(2*n@tp) + (n@tp)", "q:(n 4@tp/ceil/max2) + (3 [k:1 v:2])"):
        assert repr(packed.parse(text)) == f"packed.parse({text!r})"
    for one in (
        packed.part(4, name="a b"),
        packed.part(4, axes="a)"),
        packed.part(4, ratio=2),
        packed.part(4, pad_to=8),
    ):
        assert repr(packed.concat(one)) == f"packed.concat({one!r})"
        assert eval(repr(one), {"packed": packed}) == one
    for one in (packed.part(4, name="a b"), packed.part(4, axes="a)")):
        with refused(sw.LayoutError, "cannot be written in the notation"):
            str(packed.concat(one))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_views_and_gather(devices: int) -> None:
    layout = sw.TensorLayout((packed.qkv(8, 4, 2, "tp"), None), line(devices))
    array = np.arange(32 * 3, dtype="int32").reshape(32, 3)
    partition = layout.partition(array.shape)
    views = partition.views(array)
    sharded = sw.distribute_tensor(array, layout)
    for device, (label, own) in enumerate(zip(partition.holders, views, strict=True)):
        assert all(np.shares_memory(view, array) for view in own)
        assert np.array_equal(np.concatenate(own), sharded.shard(label))
        assert partition.shard_shape(label) == sharded.shard(label).shape
        assert partition.nbytes("int32")[device] == sharded.shard(label).nbytes
        assert not sharded.shard(label).flags.writeable
    again = sw.ShardedArray(partition, [shard.data for shard in sharded.shards])
    assert np.array_equal(again.numpy(), array)
    assert np.array_equal(sw.array.gather(again), array)
    assert np.array_equal(again.reshard(sw.TensorLayout((None, None), line(1))).shard("cpu:0"), array)


def test_replicas_of_a_part_that_differ_are_named() -> None:
    layout = sw.TensorLayout((packed.qkv(4, 2, 1, "tp"),), line(4))
    sharded = sw.distribute_tensor(np.arange(8), layout)
    shards = [shard.data.copy() for shard in sharded.shards]
    shards[3][1] += 1  # the second key head, which device 2 holds as well
    with refused(sw.LayoutError, "(5,)", "cpu:3"):
        sw.ShardedArray(layout.partition((8,)), shards).numpy()


def test_padding_is_never_read() -> None:
    layout = sw.TensorLayout((packed.padded_vocab(10, "tp", 8), None), line(4))
    partition = layout.partition((10, 2))
    assert [partition.shard_shape(label) for label in partition.holders] == [(4, 2)] * 4
    array = np.arange(20.0).reshape(10, 2)
    shards = [shard.data.copy() for shard in sw.distribute_tensor(array, layout).shards]
    shards[2][2:] = np.nan
    shards[3][:] = np.nan
    assert np.array_equal(sw.ShardedArray(partition, shards).numpy(), array)
    whole = sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("w",), ["w"])).partition((10, 2))
    assert np.array_equal(sw.plan_reshard(partition, whole).run(shards)[0], array)
    with refused(IndexError, "padding"):
        partition.global_offset(3, 0)


def orders(ranks: int, order: Any, heads: int = 8, kv: int = 4, d: int = 3) -> sw.Partition:
    dim = packed.qkv(heads, kv, d, "tp", order=order)
    return sw.TensorLayout((dim, None), line(ranks)).partition(((heads + 2 * kv) * d, 5))


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
    needed = sum(math.prod(shape) for shape in dst._shapes()) * 8
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


def test_at_most_so_many_shards_over_two_axes() -> None:
    """Neighbours in groups of 12 / n hold the same shard, where such groups are along axes or parts of them."""
    mesh = sw.DeviceMesh((3, 4), ("x", "y"))
    for axes, sizes, possible in ((("x", "y"), "3 × 4", (1, 3, 6, 12, 24)), (("y", "x"), "4 × 3", (1, 2, 4, 12, 24))):
        for most in (1, 2, 3, 4, 6, 12, 24):
            dim = packed.concat(packed.part(12, axes=axes, at_most=most))
            if most not in possible:
                with refused(sw.LayoutError, f"at most {most} shards by axes of {sizes} devices", "neither divides"):
                    sw.TensorLayout((dim,), mesh)
                continue
            shards = min(most, 12)
            boxes = sw.TensorLayout((dim,), mesh).partition((12,)).devices_indices_map()
            for device, (x, y) in zip(mesh.devices.flat, mesh.coordinates().tolist(), strict=True):
                shard = (x * 4 + y if axes == ("x", "y") else y * 3 + x) // (12 // shards)
                assert boxes[device] == (slice(shard * 12 // shards, (shard + 1) * 12 // shards),)


@pytest.mark.heavy
def test_text_of_too_many_parts_or_factors_is_refused_before_it_is_read() -> None:
    """So that what is wrong otherwise is not found."""
    with refused(sw.LayoutError, "parts", "65536"):
        packed.parse("? + " + " + ".join(["(8@tp:(1)4+dp)"] * (2**16 + 1)))
    assert len(packed.parse("+".join(["(8@tp:(1)4+dp)"] * 2**16)).parts) == 2**16
    with refused(sw.LayoutError, "factors", "64"):
        packed.parse("(" + "1 " * 65 + "?)")
    assert len(packed.parse("(" + "1 " * 64 + ")").parts[0].factors) == 64


def test_orders_that_differ_or_are_not_stated_are_refused() -> None:
    with refused(sw.LayoutError, "the shape is the same", "plan_refit"):
        sw.plan_reshard(orders(4, "interleaved"), orders(4, "blocked"))
    unnamed = sw.TensorLayout((packed.parse("(16@tp 3)"), None), line(4)).partition((48, 5))
    with refused(sw.LayoutError, "order is not stated"):
        sw.plan_refit(unnamed, orders(4, "blocked"))
    with refused(sw.LayoutError, "gate"):
        sw.plan_refit(orders(4, "blocked"), sw.TensorLayout((packed.gate_up("tp"), None), line(4)).partition((48, 5)))
    with refused(sw.LayoutError, "shape"):
        sw.plan_refit(orders(4, "blocked"), orders(4, "blocked", heads=12, kv=2))


@pytest.mark.parametrize(
    ("make", "n", "said"),
    [
        (lambda: packed.qkv(8, 4, 2, "tp"), 33, ("33 elements", "add up to 32")),
        (lambda: packed.gate_up("tp"), 33, ("33 elements",)),
        (lambda: packed.parse("(6@tp 2)"), 12, ("part 0", "6", "4 shards do not divide")),
        (lambda: packed.qkv(12, 3, 2, "tp"), 36, ("part 1", "at most 3 shards by 4")),
        (lambda: packed.qkv(12, 3, 2, "tp", order="interleaved"), 36, ("part 0", "is 3, which 4 shards")),
        (lambda: packed.qkv(1, 1, 1, "tp", order="interleaved"), 3, ("part 0", "is 3, which 4 shards")),
        (lambda: packed.parse("(8@tp+tp)"), 8, ("uses already",)),
        (lambda: packed.parse("(8@tp+tp:(1)2)"), 8, ("overlaps",)),
        (lambda: packed.parse("(8@tp:(1)3)"), 8, ("does not divide axis",)),
        (lambda: packed.parse("(8@pp)"), 8, ("pp",)),
        (lambda: packed.parse(f"({2**62} 4@tp)"), 4, ("over the limit",)),
        (lambda: packed.parse(f"(n@tp/pad{2**62})"), 2**62 + 1, ("over the limit",)),
    ],
)
def test_what_does_not_fit_its_mesh_or_shape(make: Any, n: int, said: tuple[str, ...]) -> None:
    with pytest.raises((sw.LayoutError, sw.SizeOverflowError)) as caught:
        sw.TensorLayout((make(),), line(4)).partition((n,))
    assert all(text in str(caught.value) for text in said), caught.value
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: packed.part((2, 3), cut=(0, 1), axes="tp"), sw.LayoutError),  # type: ignore[arg-type]
        (lambda: packed.part((2, 3), cut=2, axes="tp"), sw.LayoutError),
        (lambda: packed.part((2, -3), axes="tp"), sw.LayoutError),
        (lambda: packed.part((2, 2**63), axes="tp"), sw.SizeOverflowError),
        (lambda: packed.part((None, None), axes="tp"), sw.LayoutError),
        (lambda: packed.part((2.5,), axes="tp"), TypeError),  # type: ignore[arg-type]
        (lambda: packed.part((True,), axes="tp"), TypeError),
        (lambda: packed.part((2,), axes=3), TypeError),  # type: ignore[arg-type]
        (lambda: packed.part((2,), None, "tp"), sw.LayoutError),
        (lambda: packed.part((2,), None, split=True), sw.LayoutError),
        (lambda: packed.part((2,), axes="tp", split=True, pad_to=4), sw.LayoutError),
        (lambda: packed.part((2,), axes="tp", split=1), TypeError),  # type: ignore[arg-type]
        (lambda: packed.parse("(3@tp/split/split)"), sw.ParseError),
        (lambda: packed.part((2,), 0, "tp", "odd"), sw.LayoutError),
        (lambda: packed.part((2, 5), 0, "tp", blocks=[("q", 2)]), sw.LayoutError),
        (lambda: packed.part((4, 3), 1, "tp", blocks=[("q", 2), ("k", 1)]), sw.LayoutError),
        (lambda: packed.part((2, 3), axes="tp", ratio=0), sw.LayoutError),
        (lambda: packed.part((2, 3), axes="tp", at_most=0), sw.LayoutError),
        (lambda: packed.concat(), sw.LayoutError),
        (lambda: packed.concat(3), TypeError),  # type: ignore[arg-type]
        (lambda: packed.concat(*[packed.part(1)] * 10**6), sw.LayoutError),
        (lambda: packed.qkv(8, 3, 2, "tp"), sw.LayoutError),
        (lambda: packed.qkv(8, 4, 2, "tp", order="mixed"), sw.LayoutError),  # type: ignore[arg-type]
        (lambda: packed.qkv(8, 4, 2, "tp", v_head_dim=0), sw.LayoutError),
        (lambda: packed.gate_up("tp", order="mixed"), sw.LayoutError),  # type: ignore[arg-type]
        (lambda: packed.experts(8, "tp", cut="rows"), sw.LayoutError),  # type: ignore[arg-type]
        (lambda: packed.experts(0, "tp"), sw.LayoutError),
        (lambda: packed.experts(8, "tp", fused=0), sw.LayoutError),
        (lambda: packed.parse("(3 a@tp b@tp)", a=2, b=2), sw.LayoutError),
        (lambda: packed.parse("(a@tp b)"), sw.LayoutError),
        (lambda: packed.parse("(a@tp) + (b@tp)"), sw.LayoutError),
        (lambda: packed.parse("(a@tp)", b=3), sw.LayoutError),
        (lambda: packed.parse("(a=2) + (a=3)"), sw.LayoutError),
        (lambda: packed.parse(3), TypeError),  # type: ignore[arg-type]
        *[
            (lambda text=text: packed.parse(text), sw.ParseError)
            for text in (
                "",
                "(",
                "()x",
                "(3",
                "3",
                "(3) (4)",
                "(3h=4)",
                "(3) +",
                "(3@)",
                "(3@tp/)",
                "(3@tp/half)",
                "(3@tp/max2/max3)",
                "(-1)",
                "(3 [q:2] 4)",
                "(\ud800)",
                "(" * 10**5,
            )
        ],
    ],
)
def test_bad_input(make: Any, error: type[BaseException]) -> None:
    with pytest.raises((error, sw.LayoutError) if error is sw.ParseError else error) as caught:
        make()
    assert len(str(caught.value)) < 400


def test_devices_with_several_pieces_have_no_one_box() -> None:
    partition = sw.TensorLayout((packed.gate_up("tp"),), line(2)).partition((8,))
    for ask in (
        lambda: partition.box("cpu:0"),
        lambda: partition.shard_box(0),
        partition.boxes,
        partition.devices_indices_map,
    ):
        with refused(sw.LayoutError, "2 pieces", "pieces("):
            ask()


@pytest.mark.parametrize("dialect", [to_placements, to_shardy, to_hlo, to_rank_offsets])
def test_dialects_refuse(dialect: Any) -> None:
    with refused(sw.LayoutError, "packed dim"):
        dialect(sw.TensorLayout((packed.qkv(8, 2, 4, "tp"),), line(2)))


@pytest.mark.parametrize(
    ("dim", "why"),
    [
        (packed.experts(8, "tp"), ""),
        (packed.qkv(8, 4, 4, "tp", order="interleaved"), ""),
        (packed.qkv(8, 2, 4, "tp", order="interleaved"), ""),
        (packed.parse("(n@tp)"), ""),
        (packed.parse("(n@tp 1)"), ""),
        (packed.parse("(8@tp/max4 2)"), ""),
        (packed.parse("(8) + (8)"), ""),
        (packed.parse("(8@tp:(1)2+tp:(2)2 3)"), ""),
        (packed.gate_up("tp"), "cut separately"),
        (packed.parse("(2 n@tp)"), "several stretches"),
        (packed.padded_vocab(16, "tp", 16), "padded"),
        (packed.parse("(n@tp 2)"), "units are whole"),
        (packed.parse("(6@tp/ceil 2)"), "units are whole"),
        (packed.parse("(n@tp/floor)"), "uneven rule of its own"),
        (packed.parse("(2@tp/max2 8)"), "at most 2"),
    ],
)
def test_dims_that_are_cut_as_plain_ones_are_said_by_all(dim: packed.PackedDim, why: str) -> None:
    layout = sw.TensorLayout((dim,), line(4))
    if why:
        with refused(sw.LayoutError, "packed dim", why):
            to_hlo(layout)
        assert translate(layout)["jax"].startswith("cannot express: axes[0] is a packed dim")
        return
    n = dim.size or 16

    def held(layout: sw.TensorLayout) -> list[list[int]]:
        pieces = [layout.partition((n,)).pieces(f"cpu:{i}") for i in range(4)]
        return [[row for one in own for row in range(one.box[0].start, one.box[0].stop)] for own in pieces]

    for text in (to_hlo(layout), to_hlo(layout, iota=False)):
        assert held(from_hlo(text, line(4), 1)) == held(layout)
    spec = "'tp'" if dim.axis_names else "None"
    assert translate(layout, "jax")["jax"] == f"PartitionSpec({spec})"
    assert translate(layout, "keras")["keras"] == repr(sw.TensorLayout(("tp" if dim.axis_names else None,), line(4)))


def test_by_no_axes_nothing_is_cut_but_what_is_padded_is_padded() -> None:
    assert packed.part((8, 2), 0, (), "ceil", at_most=2, split=True) == packed.part((8, 2), None)
    layout = sw.TensorLayout((packed.padded_vocab(10, (), 8),), line(2))
    assert layout.partition((10,)).shard_shape("cpu:1") == (16,)
    assert eval(repr(packed.concat(packed.part((10,), 0, (), "ceil", pad_to=8))), {"packed": packed}).parts[0].cut == 0


def test_the_refined_layout_is_the_same() -> None:
    layout = sw.TensorLayout((packed.qkv(8, 2, 3, "tp"), None), line(8))
    refined = layout.refined()
    assert refined.device_mesh is not None
    assert refined.device_mesh.shape == (2, 4)
    one, two = (side.partition((36, 2)).all_pieces() for side in (layout, refined))
    assert np.array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1])


def test_pictures_show_the_pieces() -> None:
    layout = sw.TensorLayout((packed.parse("(3 4@tp 2)"), None), line(4))
    assert sw.draw(layout, (24, 8)).count("<title>[") == 12


def test_reports() -> None:
    rules = sw.LayoutMap(line(4))
    rules["qkv"] = (packed.qkv(8, 2, 4, "tp"), None)
    report = rules.report({"qkv": ((48, 6), "float32")})
    # Two query heads, one key and one value head of 4 rows of 6 numbers of 4 bytes.
    assert report.tensors[0].bytes_per_device == 4 * 4 * 6 * 4
    assert report.to_dict()["tensors"][0]["layout"] == [{"packed": str(packed.qkv(8, 2, 4, "tp"))}, None]


@pytest.mark.parametrize("wrong", [3, None, 1.5])
def test_axes_that_are_not_names(wrong: Any) -> None:
    with pytest.raises(TypeError, match="axes must be an axis name or a sequence of them"):
        packed.part((2, 3), 0, wrong)


@pytest.mark.parametrize("wrong", [["a"], [None], [("a",)], "ab"])
def test_blocks_that_are_not_pairs(wrong: Any) -> None:
    with pytest.raises(TypeError, match="blocks must be pairs of a name and a size"):
        packed.part((2, 3), 0, "tp", blocks=wrong)


def test_a_size_whose_index_is_no_integer_is_refused() -> None:
    class Text:
        def __index__(self) -> Any:
            return "3"

    with refused(TypeError, "heads", "integer"):
        packed.qkv(Text(), 1, 1, "tp")  # type: ignore[arg-type]
    with refused(TypeError, "heads", "integer"):
        packed.qkv(np.array([3, 4]), 1, 1, "tp")  # type: ignore[arg-type]


def test_blocks_may_all_be_times_the_unknown() -> None:
    """The same as with the size that the shape gives, 36 = 2 * (4 + 1 + 1) * 3."""
    dim, known = packed.parse("(2@tp [q:4*n k:n v:n])"), packed.parse("(2@tp [q:12 k:3 v:3])")
    assert str(dim) == "(2@tp [q:4*n k:n v:n])"
    assert eval(repr(dim), {"packed": packed}) == dim
    assert dim.names == ("q", "k", "v")
    assert dim.size is None
    assert list(dim.segments(36)) == list(known.segments(36))
    mesh = sw.DeviceMesh((2,), ("tp",))
    one, other = (sw.TensorLayout((each,), mesh).partition((36,)) for each in (dim, known))
    assert [one.pieces(device) for device in one.holders] == [other.pieces(device) for device in other.holders]
    assert packed.parse("q:(n) + (2 [k:n v:2*n])").sizes(14) == (2, 12)
    with refused(sw.LayoutError, "the dim has 37 elements"):
        list(dim.segments(37))
    with refused(sw.LayoutError, "some are known and some are n", "times n"):
        packed.parse("(2 [q:4*n k:3])")
    with refused(sw.LayoutError, "n and m are both unknown"):
        packed.parse("(2 [q:4*n k:m])")
    with refused(sw.LayoutError, "blocks add up to 5, but the last factor, which they make up, is 6 times the unknown"):
        packed.part((2, None), None, ratio=6, blocks=[("q", 4), ("k", 1)])
