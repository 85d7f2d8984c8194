"""One rule cuts a weight and its components."""

from __future__ import annotations

import pickle
import random
import re
import warnings

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from shardwise.quantized import Along, Component, LogicalTensor, component_layouts, find_components
from shardwise.shared_tiling import SharedTiling

from ..checks import refused
from ..prove.against_quantized import FORMS, Weight, check, draw


def fp8(rows: int, columns: int, name: str = "a.weight") -> LogicalTensor:
    scales = (-(-rows // 128), -(-columns // 128))
    tensors = {name: ("F8_E4M3", (rows, columns)), f"{name}_scale_inv": ("F32", scales)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return find_components(tensors, config).tensors[name]


def over(devices: int, *specs: sw.Spec | packed.PackedDim) -> sw.TensorLayout:
    return sw.TensorLayout(specs, sw.DeviceMesh((devices,), ("tp",)))


@pytest.mark.heavy
def test_random_weights_of_all_forms() -> None:
    rng = random.Random(29)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Random bits are NaN and infinite too.
        for _ in range(300):
            case = draw(rng)
            seen.add(case.form)
            check(case)
    assert seen == set(FORMS)


def test_scales_follow_the_weight_under_every_rule() -> None:
    # 576 is 4.5 blocks: DeepSeek-V3's kv_a_proj_with_mqa.
    layouts = component_layouts(fp8(576, 256), over(4, packed.parse("(n@tp/ceil/unit128)"), None))
    weight, scale = (
        layouts[name].partition(shape) for name, shape in (("a.weight", (576, 256)), ("a.weight_scale_inv", (5, 2)))
    )
    assert [weight.shard_shape(i)[0] for i in range(4)] == [256, 256, 64, 0]
    assert [scale.shard_shape(i)[0] for i in range(4)] == [2, 2, 1, 0]
    # Gate and up have padding of their own, and so have their scales.
    halves = packed.parse("gate:(640@tp/unit128/pad128each) + up:(640@tp/unit128/pad128each)")
    layouts = component_layouts(fp8(1280, 256), over(4, halves, None))
    assert layouts["a.weight"].partition((1280, 256)).shard_shape(3) == (512, 256)
    assert layouts["a.weight_scale_inv"].partition((10, 2)).shard_shape(3) == (4, 2)
    assert [piece.box[0] for piece in layouts["a.weight_scale_inv"].partition((10, 2)).pieces(2)] == [
        slice(4, 5),
        slice(9, 10),
    ]


def test_queries_keys_and_values_cut_by_heads() -> None:
    layouts = component_layouts(fp8(10240, 512), over(16, packed.qkv(64, 8, 128, "tp"), None))
    scale = layouts["a.weight_scale_inv"].partition((80, 4))
    assert [piece.box[0] for piece in scale.pieces(5)] == [slice(20, 24), slice(66, 67), slice(74, 75)]
    # Two heads of 64 rows are a block.
    layouts = component_layouts(fp8(1024, 512), over(4, packed.parse("(16@tp 64)"), None))
    assert layouts["a.weight_scale_inv"].partition((8, 4)).shard_shape(1) == (2, 4)
    with refused(sw.LayoutError, "16 units of 64 elements, and is cut at 1, within a block of 128"):
        component_layouts(fp8(1024, 512), over(16, packed.parse("(16@tp 64)"), None))


# vllm-project/vllm 52997, 48173 and 54178: what would fit is named.
@pytest.mark.parametrize(
    ("columns", "devices", "message"),
    [
        (512, 8, "dim 1 has 512 elements, and is cut at 64, within a block of 128 of weight_scale_inv"),
        (512, 8, "whole blocks need a multiple of 1024: it would fit padded to 1024, or cut 1, 2 or 4 ways"),
        (512, 8, "; with shared = true both sides hold the block"),
        (1536, 8, "padded to 2048, or cut 1, 2, 3, 4, 6 or 12 ways"),
        (320, 4, "is cut at 80, within a block of 128"),
    ],
)
def test_a_cut_within_a_block_is_refused(columns: int, devices: int, message: str) -> None:
    with refused(sw.LayoutError, "'down.weight': ", message):
        component_layouts(fp8(256, columns, "down.weight"), over(devices, None, "tp"))


@pytest.mark.parametrize(("columns", "devices"), [(512, 8), (1536, 8), (320, 4), (640, 2)])
def test_each_way_on_of_a_cut_within_a_block_is_cut(columns: int, devices: int) -> None:
    """The padding, each number of ways, and blocks that are shared."""
    with pytest.raises(sw.LayoutError) as caught:
        component_layouts(fp8(256, columns), over(devices, None, "tp"))
    ways = re.search(r"padded to (\d+)(?:, or cut ([\d, or]+) ways)?; with shared = true", str(caught.value))
    assert ways is not None
    component_layouts(fp8(256, int(ways[1])), over(devices, None, "tp"))
    for number in map(int, re.findall(r"\d+", ways[2] or "")):
        layouts = component_layouts(fp8(256, columns), over(number, None, "tp"))
        layouts["a.weight"].partition((256, columns))
    component_layouts(fp8(256, columns), over(devices, None, "tp"), shared=True)


def test_a_block_is_shared_if_the_rule_says_so() -> None:
    layouts = component_layouts(fp8(256, 512), over(8, None, "tp"), shared=True)
    layout = layouts["a.weight_scale_inv"]
    assert isinstance(layout, sw.TensorLayout)
    scale = layout.partition((2, 4))
    assert [scale.pieces(i)[0].box[1].start for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    # Packed values are never cut apart.
    tensors = {"a.weight_packed": ("I32", (4, 1)), "a.weight_scale": ("BF16", (4, 1))}
    weights = {"strategy": "channel", "num_bits": 4}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"format": "pack-quantized", "weights": weights}},
    }
    logical = find_components(tensors, {"quantization_config": config}).tensors["a.weight"]
    with refused(sw.LayoutError, "within 8 values packed together of weight_packed"):
        component_layouts(logical, over(2, None, "tp"), shared=True)


def test_blocks_are_shared_where_shards_are_held_by_several_devices() -> None:
    """By hand: 256 rows in at most 4 shards of 64 on 8 devices: two have each, so four have each block of 128."""
    layouts = component_layouts(fp8(256, 256), over(8, packed.parse("(256@tp/max4)"), None), shared=True)
    layout = layouts["a.weight_scale_inv"]
    assert isinstance(layout, sw.TensorLayout)
    assert [layout.partition((2, 2)).pieces(i)[0].box[0].start for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def rows_of(logical: LogicalTensor, layout: sw.TensorLayout, uneven: sw.UnevenRule = "even") -> list[list[int]]:
    """The rows of scales that each device has, in the order of its own array."""
    tiling = component_layouts(logical, layout, uneven, shared=True)["a.weight_scale_inv"]
    assert isinstance(tiling, SharedTiling)
    tiling.check()
    found = []
    for device in tiling.holders:
        own = np.full(tiling.holder_shape(device), -1)
        for piece in tiling.pieces(device):
            piece.view(own)[...] = np.arange(piece.box[0].start, piece.box[0].stop)[:, None]
        found.append(own[:, 0].tolist())
    return found


def test_neighbours_share_a_block_of_unequal_shares() -> None:
    """By hand: 14,848 rows in 8 are 1,856 each, 14.5 blocks of 128: each touches 15, and every second begins within."""
    found = rows_of(fp8(8 * 1856, 128), over(8, "tp", None))
    assert found == [list(range(29 * i // 2, 29 * i // 2 + 15)) for i in range(8)]
    assert found[:3] == [list(range(15)), list(range(14, 29)), list(range(29, 44))]
    # The same as eight groups of 1,856 rows.
    assert rows_of(fp8(8 * 1856, 128), over(8, packed.parse("(8@tp 1856)"), None)) == found


def test_blocks_are_shared_by_uneven_shards_and_by_devices_without_elements() -> None:
    """By hand: 500 rows by `ceil` in 3 are 167, 167, 166; in 7 of units of 96 they are 96 each, at last 20, and 0."""
    assert rows_of(fp8(500, 128), over(3, "tp", None), "ceil") == [[0, 1], [1, 2], [2, 3]]
    spec = packed.parse("(n@tp/ceil/unit96)")
    assert rows_of(fp8(500, 128), over(7, spec, None)) == [[0], [0, 1], [1, 2], [2], [3], [3], []]


def test_blocks_of_segments_and_of_parts_are_shared() -> None:
    """By hand: shards of 96 rows of 384, three blocks of 128, touch block 0, 0 and 1, 1 and 2, and 2, in each part."""
    expected = [[0, 3], [0, 1, 3, 4], [1, 2, 4, 5], [2, 5]]
    assert rows_of(fp8(768, 128), over(4, packed.parse("(2 384@tp)"), None)) == expected
    assert rows_of(fp8(768, 128), over(4, packed.parse("gate:(384@tp) + up:(384@tp)"), None)) == expected
    # A part that every device has whole comes after.
    spec = packed.parse("q:(384@tp) + k:(128)")
    assert rows_of(fp8(512, 128), over(4, spec, None)) == [[0, 3], [0, 1, 3], [1, 2, 3], [2, 3]]


def test_a_tiling_of_shared_blocks_is_a_value() -> None:
    made = component_layouts(fp8(384, 384), over(2, "tp", None), shared=True)["a.weight_scale_inv"]
    other = component_layouts(fp8(384, 384), over(2, "tp", None), shared=True)["a.weight_scale_inv"]
    turned = component_layouts(fp8(384, 384), over(2, None, "tp"), shared=True)["a.weight_scale_inv"]
    again = pickle.loads(pickle.dumps(made))
    assert made == other == again
    assert len({made, other, again, turned}) == 2
    assert isinstance(again, SharedTiling)
    assert again.layout.axes == ("tp", None)
    # 384 rows in 2 are 192, a block and a half: the second begins within block 1, and has two.
    assert again.begins_within
    assert again.holder_shape("cpu:1") == (2, 3)


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_of_padded_dims_are_not_shared(shared: bool) -> None:
    """Shards of 64 rows, two of each block, of 200 that are padded to 256."""
    message = "blocks of a dim that is padded are not shared"
    with refused(sw.LayoutError, "is cut at 64, within a block of 128", message):
        component_layouts(fp8(200, 256), over(4, packed.parse("(200@tp/pad256)"), None), shared=shared)


def test_parts_of_a_fused_weight_that_share_a_block_are_refused() -> None:
    # Two partitions of 192 rows: three rows of scales for the four that are needed (vllm-project/vllm 52997).
    with refused(sw.LayoutError, "part 1 begins at 192, within a block of 128 of weight_scale_inv"):
        component_layouts(fp8(384, 256), over(2, packed.parse("gate:(192@tp) + up:(192@tp)"), None))


def test_bad_arguments_are_refused() -> None:
    logical = fp8(256, 256)
    with refused(sw.LayoutError, "has 2 dims, but its layout has 1"):
        component_layouts(logical, over(2, "tp"))
    with refused(sw.LayoutError, "has no mesh"):
        component_layouts(logical, sw.TensorLayout(("tp", None)))
    with refused(sw.LayoutError, "do not divide evenly"):
        component_layouts(fp8(256, 384), over(2, None, packed.parse("(n@tp/unit128)")))
    uncut = LogicalTensor(
        "w", (8,), "flat", (Component("w", "U8", (4,), (Along(0, 2, packing=2),)),), ((0, "so it is"),)
    )
    assert component_layouts(uncut, over(1, "tp"))["w"].axes == (None,)
    with refused(sw.LayoutError, "'w': dim 0 cannot be cut: so it is"):
        component_layouts(uncut, over(2, "tp"))


def test_the_layouts_have_the_rule_in_them() -> None:
    layouts = component_layouts(fp8(640, 256), over(4, packed.parse("(n@tp/unit128)"), None), "ceil")
    assert [layouts["a.weight"].partition((640, 256)).shard_shape(i)[0] for i in range(4)] == [256, 256, 128, 0]
    # Where all rules agree they are plain.
    assert component_layouts(fp8(512, 256), over(4, "tp", None), "ceil")["a.weight_scale_inv"].axes == ("tp", None)


def test_a_case_is_written_as_code() -> None:
    case = draw(random.Random(1))
    namespace: dict[str, object] = {}
    exec(case.snippet(), namespace)
    assert all(isinstance(one, Weight) for one in case.simpler())


@pytest.mark.parametrize(("rows", "each"), [(256, 2), (192, None)])
def test_segments_of_a_packed_weight_are_whole_blocks(rows: int, each: int | None) -> None:
    """Two segments of 256 rows are two blocks of 128 each, and every device of two holds one of each; 192 are none."""
    logical, layout = fp8(2 * rows, 128), over(2, packed.concat(packed.part((2, rows), 1, "tp")), None)
    if each is None:
        with refused(sw.LayoutError, "each of its 2 segments has 192 elements, not a multiple of the block of 128"):
            component_layouts(logical, layout)
    else:
        made = component_layouts(logical, layout)["a.weight_scale_inv"].partition((4, 1))
        held = [[piece.box[0].start for piece in made.pieces(label)] for label in made.holders]
        assert held == [[0, 2], [1, 3]]


def test_what_at_most_one_shard_has_is_not_cut() -> None:
    """Two key-value heads that every device has: also where the form allows no cut of the dim."""
    stored = (
        Component("k.weight", "F8_E4M3", (128, 64), (Along(0), Along(1))),
        Component("k.weight_scale_inv", "F32", (1, 1), (Along(0, 128), Along(1, 64))),
    )
    tensor = LogicalTensor("k.weight", (128, 64), "FP8 in blocks", stored, ((0, "its groups are not in order"),))
    made = component_layouts(tensor, over(4, packed.parse("(2@tp/max1 n)"), None))
    for name, shape in (("k.weight", (128, 64)), ("k.weight_scale_inv", (1, 1))):
        layout = made[name]
        assert isinstance(layout, sw.TensorLayout)
        assert {layout.partition(shape).shard_shape(f"cpu:{rank}") for rank in range(4)} == {shape}
    with refused(sw.LayoutError, "dim 0 cannot be cut: its groups are not in order"):
        component_layouts(tensor, over(4, packed.parse("(2@tp/max2 n)"), None))


@pytest.mark.parametrize(("devices", "rows"), [(1, 512), (2, 256)])
def test_scales_are_padded_with_their_weight_on_one_device_too(devices: int, rows: int) -> None:
    """200 rows padded to 512 have a scale for each 128 of these."""
    made = component_layouts(fp8(200, 128), over(devices, packed.parse("(n@tp/pad512)"), None))
    for name, shape, held in (("a.weight", (200, 128), rows), ("a.weight_scale_inv", (2, 1), rows // 128)):
        layout = made[name]
        assert isinstance(layout, sw.TensorLayout)
        assert layout.partition(shape).holder_shape("cpu:0")[0] == held
