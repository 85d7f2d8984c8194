"""Packed dims in Python: the design's numbers, text that reads back, shards, plans between orders, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from shardwise.interop.hlo import from_hlo, to_hlo
from shardwise.interop.megatron import to_rank_offsets
from shardwise.interop.shardy import to_shardy
from shardwise.interop.torch import to_placements
from shardwise.interop.translation import translate

from ..checks import refused

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
        (packed.parse("(2 n@tp)"), "several segments"),
        (packed.padded_vocab(16, "tp", 16), "padded"),
        (packed.parse("(n@tp 2)"), "units stay whole"),
        (packed.parse("(6@tp/ceil 2)"), "units stay whole"),
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
    with refused(sw.LayoutError, "some are known and some are n", "multiple of n"):
        packed.parse("(2 [q:4*n k:3])")
    with refused(sw.LayoutError, "n and m are both unknown"):
        packed.parse("(2 [q:4*n k:m])")
    with refused(sw.LayoutError, "blocks add up to 5, but must make up the last factor, 6 times the unknown"):
        packed.part((2, None), None, ratio=6, blocks=[("q", 4), ("k", 1)])


def test_a_part_without_a_size_may_be_empty() -> None:
    dim = packed.concat(packed.part(4), packed.part(None))
    assert (dim.sizes(4), dim.sizes(5)) == ((4, 0), (4, 1))
    with refused(sw.LayoutError, "3"):
        dim.sizes(3)


def test_gate_and_up_in_turn_are_cut_in_pairs() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    dim = packed.gate_up("tp", order="interleaved")
    pieces = sw.TensorLayout((dim,), mesh).partition((8,)).pieces("cpu:1")
    assert pieces == [sw.Piece((slice(4, 8),), (0,))]
    assert list(dim.segments(4)) == [("gate", 0, 0, 1), ("up", 0, 1, 1), ("gate", 1, 2, 1), ("up", 1, 3, 1)]


@pytest.mark.parametrize("heads", [(0, 1, 8), (1, 0, 8), (1, 1, 0)])
def test_there_is_a_head_at_least(heads: tuple[int, int, int]) -> None:
    with refused(sw.LayoutError, "is 0; it must be at least 1"):
        packed.qkv(*heads, "tp")


def test_vocabularies_are_padded_as_vllm_pads_them() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    assert sw.TensorLayout((packed.padded_vocab(100, "tp"),), mesh).partition((100,)).shard_shape("cpu:1") == (64,)


def test_padding_to_one_is_none() -> None:
    with refused(sw.LayoutError, "pad_to", "0"):
        packed.part(10, axes="x", pad_to=0)
    layout = sw.TensorLayout((packed.concat(packed.part(10, axes="x", pad_to=1)),), sw.DeviceMesh((1,), ("x",)))
    assert layout.partition((10,)).shard_shape("cpu:0") == (10,)


def test_padding_is_zero_after_a_reshard() -> None:
    mesh = sw.DeviceMesh((2,), ("x",))
    padded = sw.TensorLayout((packed.padded_vocab(5, "x", 4, per_shard=True),), mesh).partition((5,))
    source = sw.distribute_tensor(np.arange(1, 6), sw.TensorLayout((None,), mesh))
    made = sw.plan_reshard(source.partition, padded).run(source)
    # As Megatron pads: 5 to 8, which is 4 for each.
    assert [shard.tolist() for shard in made] == [[1, 2, 3, 4], [5, 0, 0, 0]]
    # New memory is often 0 by itself: what has to be made so is known.
    covered = padded.covered()
    assert covered is not None
    assert covered.tolist() == [True, False]
