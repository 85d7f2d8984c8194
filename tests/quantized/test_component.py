"""Logical tensors and their components: what stays together, and what cannot be cut."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, LayoutMap
from shardwise.deploy import positions_of
from shardwise.quantized import Along, LogicalTensor, find_components
from shardwise.quantized.follow import followed

from ..checks import refused

BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
CHANNEL = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    }
}


@pytest.mark.parametrize(("rows", "columns"), [(8, 48), (12, 64), (64, 3), (6, 128), (4, 160), (5, 64)])
def test_rows_of_a_flat_weight_stay_together_up_to_a_block(rows: int, columns: int) -> None:
    """The fewest rows that are whole blocks of 64 flat values; with shared scales, whole bytes of two."""
    state = json.dumps({"shape": [rows, columns], "blocksize": 64, "quant_type": "nf4"}).encode()
    tensors = {
        "a.weight": ("U8", (rows * columns // 2, 1)),
        "a.weight.absmax": ("F32", (rows * columns // 64,)),
        "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(state),)),
    }
    (logical,) = find_components(tensors, BNB, lambda name: state).tensors.values()
    assert logical.shape == (rows, columns)
    for shared, whole in ((False, 64), (True, 2)):
        assert logical.unit(0, shared=shared) == next(n for n in range(1, 65) if n * columns % whole == 0)
    assert not logical.why_uncut(0)
    assert "only be cut along dim 0, in whole rows" in logical.why_uncut(1)
    (unread,) = find_components(tensors, BNB).tensors.values()
    assert math.prod(unread.shape) == rows * columns
    assert all("was not read" in unread.why_uncut(dim) for dim in (0, 1))


@pytest.mark.parametrize(("own", "along"), [((6, 1), (Along(0), Along(None))), ((6,), (Along(0),))])
def test_scales_of_rows_may_have_no_dim_for_the_columns(own: tuple[int, ...], along: tuple[Along, ...]) -> None:
    tensors = {"a.weight": ("F8_E4M3", (6, 16)), "a.weight_scale": ("F32", own)}
    (logical,) = find_components(tensors, CHANNEL).tensors.values()
    scale = next(each for each in logical.components if each.name == "a.weight_scale")
    assert [each.of for each in scale.along] == [each.of for each in along]
    assert logical.unit(0) == logical.unit(1) == 1


@pytest.mark.parametrize(("order", "is_cut"), [("group", False), ("weight", True), (None, True)])
def test_an_order_of_groups_that_was_not_read(order: str | None, is_cut: bool) -> None:
    """Of compressed-tensors only `actorder: group` puts columns in another order than their groups."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": order}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {
        "a.weight_packed": ("I32", (8, 16)),
        "a.weight_scale": ("F16", (8, 4)),
        "a.weight_shape": ("I64", (2,)),
        "a.weight_g_idx": ("I32", (128,)),
    }
    (logical,) = find_components(tensors, {"quantization_config": config}).tensors.values()
    assert (not logical.why_uncut(1)) == is_cut
    order_of_groups = "a.weight_g_idx"
    for values, why in ((range(128), ""), ([0] * 128, "not in order")):
        said = b"".join((value // 32 if values == range(128) else value).to_bytes(4, "little") for value in values)
        shape = b"".join(n.to_bytes(8, "little") for n in (8, 128))
        read = {order_of_groups: said, "a.weight_shape": shape}.__getitem__
        (logical,) = find_components(tensors, {"quantization_config": config}, read).tensors.values()
        assert why in logical.why_uncut(1)
        assert bool(why) == bool(logical.why_uncut(1))


def block_numbers(logical: LogicalTensor, component: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The flat position in a component for each element, put together as a whole array, each number repeated."""
    (one,) = (each for each in logical.components if each.name == component)
    made = np.arange(math.prod(one.shape)).reshape(one.shape)
    for dim, (along, size) in enumerate(zip(one.along, logical.shape, strict=True)):
        made = made.repeat(along.block, axis=dim).take(np.arange(size), axis=dim)
    return made


def test_an_index_names_its_block_and_the_block_is_where_the_scales_are() -> None:
    stored = {"up.weight": ("F8_E4M3", (256, 576)), "up.weight_scale_inv": ("F32", (2, 5))}
    found = find_components(stored, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    logical, offsets = found.tensors["up.weight"], np.random.default_rng(0).permutation(256 * 576)
    for name in stored:
        expected = block_numbers(logical, name).reshape(-1)[offsets]
        np.testing.assert_array_equal(logical.elements_of(name, offsets), expected)
    rules = LayoutMap(DeviceMesh((2,), ("tp",)))
    rules["up"] = ("tp", None)
    places = positions_of(followed(found, rules), {name: shape for name, (_, shape) in stored.items()})
    # The second device has rows from 128 on: the second row of scales.
    (one,) = places.locate(
        "cpu:1", "up.weight_scale_inv", logical.elements_of("up.weight_scale_inv", [0, 200 * 576 + 300])
    )
    assert (one.which.tolist(), one.positions.tolist()) == ([1], [2])


def test_an_index_of_a_flat_weight_names_its_block() -> None:
    state = json.dumps({"shape": [6, 64], "blocksize": 64, "quant_type": "nf4"}).encode()
    tensors = {
        "a.weight": ("U8", (192, 1)),
        "a.weight.absmax": ("F32", (6,)),
        "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(state),)),
    }
    (logical,) = find_components(tensors, BNB, lambda name: state).tensors.values()
    # Two values of 4 bits in a byte, 64 under a scale.
    assert logical.elements_of("a.weight", [0, 1, 2, 383]).tolist() == [0, 0, 1, 191]
    assert logical.elements_of("a.weight.absmax", [63, 64, 383]).tolist() == [0, 1, 5]
    with refused(LayoutError, "'a.weight' has no component 'b'; it has a.weight, a.weight.absmax"):
        logical.elements_of("b", [0])
    with refused(LayoutError, "follows no dim of 'a.weight'"):
        logical.elements_of("a.weight.quant_state.bitsandbytes__nf4", [0])
    with refused(IndexError, "offsets has 384, which is not within 'a.weight' of 384 elements"):
        logical.elements_of("a.weight", [3, 384])
