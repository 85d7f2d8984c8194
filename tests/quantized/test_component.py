"""Logical tensors and their components: what stays together, and what cannot be cut."""

from __future__ import annotations

import json
import math

import pytest

from shardwise.quantized import Along, find_components

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
    assert "only whole rows" in logical.why_uncut(1)
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
