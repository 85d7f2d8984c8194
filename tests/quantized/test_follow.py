"""Layouts of components from rules for their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, LayoutMap, LayoutRule, ParseError, TensorLayout, Tiling
from shardwise.quantized import LogicalTensor, component_layouts, find_components, followers
from shardwise.quantized.follow import followed

from ..checks import refused

MESH = DeviceMesh((4,), ("tp",))
STORED = {"down.weight": ("F8_E4M3", (256, 512)), "down.weight_scale_inv": ("F32", (2, 4))}
FOUND = find_components(STORED, {})


def test_a_mapping_by_the_names_of_weights_or_of_components() -> None:
    columns, rows = TensorLayout((None, "tp"), MESH), TensorLayout(("tp", None), MESH)
    made = followed(FOUND, {"down.weight": columns})
    assert {name: getattr(layout, "axes", None) for name, layout in made.items()} == dict.fromkeys(STORED, (None, "tp"))
    assert followed(FOUND, {"other": columns}) == {}
    # Components with layouts of their own follow nothing.
    assert followed(FOUND, {"down.weight": rows, "down.weight_scale_inv": rows}) == {}


def test_sums_are_refused() -> None:
    with refused(LayoutError, "'down.weight'", "values of quantized weights cannot be partial sums over"):
        followed(FOUND, {"down.weight": TensorLayout((None, None), MESH, unreduced=("tp",))})


def test_the_rule_of_a_map_goes_before_the_one_that_is_given() -> None:
    """1,022 columns are no equal shares; by `ceil` they are 256 and at last 254: two blocks each."""
    found = find_components({"down.weight": ("F8_E4M3", (256, 1022)), "down.weight_scale_inv": ("F32", (2, 8))}, {})
    plain = LayoutMap(MESH)
    plain["down"] = (None, "tp")
    with refused(LayoutError, "1022"):
        followed(found, plain)
    made = followed(found, plain, "ceil")
    layout = made["down.weight_scale_inv"]
    assert isinstance(layout, TensorLayout)
    boxes = layout.partition((2, 8)).boxes()[:, 1].tolist()
    assert boxes == [[0, 2], [2, 4], [4, 6], [6, 8]]
    of_the_map = LayoutMap(MESH)
    of_the_map["down"] = LayoutRule((None, "tp"), uneven="ceil")
    assert followed(found, of_the_map, "even") == made


@pytest.mark.parametrize(
    ("scales", "unit"),
    [((), 1), ((1,), 1), ((1, 1), 1), ((2, 4), 128), ((2, 2), None), ((4, 8), None), ((2,), None)],
)
def test_scales_of_modelopt_are_of_the_whole_or_of_blocks(scales: tuple[int, ...], unit: int | None) -> None:
    """`FP8_PB_WO` has blocks of 128 x 128; all others have one scale."""
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO" if unit == 128 else "FP8"}}
    tensors = {"a.weight": ("F8_E4M3", (256, 512)), "a.weight_scale": ("F32", scales)}
    if unit is None:
        with refused(ParseError, f"has the shape {scales}"):
            find_components(tensors, config)
    else:
        (logical,) = find_components(tensors, config).tensors.values()
        assert logical.unit(0) == logical.unit(1) == unit


@pytest.mark.parametrize("scales", [(), (1,), (1, 1, 1), (3,), (3, 1), (3, 1, 1)])
def test_scales_of_stacked_weights_are_of_all_or_of_each(scales: tuple[int, ...]) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    tensors = {"a.weight": ("F8_E4M3", (3, 256, 512)), "a.weight_scale": ("F32", scales)}
    (logical,) = find_components(tensors, config).tensors.values()
    cut = component_layouts(logical, TensorLayout((None, "tp", None), MESH))
    assert [cut[name].axes for name in tensors] == [(None, "tp", None), (None,) * len(scales)]
    experts = component_layouts(logical, TensorLayout(("tp", None, None), DeviceMesh((3,), ("tp",))))
    assert experts["a.weight_scale"].axes == (("tp",) if scales[:1] == (3,) else (None,) * len(scales[:1])) + (
        None,
    ) * (len(scales) - 1)


def test_weights_of_a_mapping_share_no_blocks() -> None:
    """That is for rules to allow, and a mapping has none: 512 columns in 8 are 64 each, half a block."""
    wide = DeviceMesh((8,), ("tp",))
    with refused(LayoutError, "within a block of 128"):
        followed(FOUND, {"down.weight": TensorLayout((None, "tp"), wide)})


@pytest.mark.parametrize("is_stacked", [True, False])
def test_a_shape_that_is_stated_for_each_expert(is_stacked: bool) -> None:
    config: dict[str, Any] = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
                }
            },
        }
    }
    lead = (3,) if is_stacked else ()
    tensors = {
        "a.weight_packed": ("I32", (*lead, 8, 5)),
        "a.weight_scale": ("F16", (*lead, 8, 1)),
        "a.weight_shape": ("I64", (*lead, 2)),
    }
    stated = np.array([[8, 38]] * (3 if is_stacked else 1), "<i8")
    (logical,) = find_components(tensors, config, lambda name: stated.tobytes()).tensors.values()
    assert logical.shape == (*lead, 8, 38)
    if is_stacked:
        stated[1, 1] = 39
        with refused(ParseError, "says different sizes for two experts"):
            find_components(tensors, config, lambda name: stated.tobytes())
    with refused(ParseError, "its weight_shape has 8 bytes"):
        find_components(tensors, config, lambda name: bytes(8))


def test_what_they_follow_is_a_layout() -> None:
    cut = TensorLayout((None, "tp"), MESH)
    assert followers(FOUND, {"down.weight": cut.partition((256, 512))}) == followers(FOUND, {"down.weight": cut})
    with refused(TypeError, "the layout of 'down.weight', which its components follow, is a Tiling"):
        followers(FOUND, {"down.weight": Tiling.from_boxes((256, 512), {"a": [[(0, 256), (0, 512)]]})})
    with refused(TypeError, "config must be a Mapping, got list"):
        find_components(STORED, [])  # type: ignore[arg-type]
    report = LayoutMap(MESH).report
    wrong: Any
    for wrong in ("down", ("down",), ("down", 5)):
        with refused(TypeError, "followers['a'] must be the name of a tensor and a layout"):
            report({"a": (4,)}, followers={"a": wrong})
    with refused(TypeError, "followers must be a Mapping, got int"):
        report({"a": (4,)}, followers=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "columns", "data", "said"),
    [("I16", 64, b"\0" * 128, "128 bytes; expected 64 integers"), ("U8", 64, b"abc", "3 bytes; expected 64 integers")],
)
def test_orders_of_groups_of_other_sizes_are_refused(dtype: str, columns: int, data: bytes, said: str) -> None:
    with refused(ParseError, "'w.weight': its g_idx has", said):
        gptq(dtype, columns, data)


def test_orders_of_groups_of_64_bits_and_of_no_columns() -> None:
    assert not gptq("I64", 64, np.repeat([0, 1], 32).astype("<i8").tobytes()).why_uncut(1)
    assert "not in order" in gptq("I64", 64, np.tile([0, 1], 32).astype("<i8").tobytes()).why_uncut(1)
    assert not gptq("I32", 0, b"").why_uncut(1)


def gptq(dtype: str, columns: int, data: bytes) -> LogicalTensor:
    groups = columns // 32
    stored = {
        **{"w.qweight": ("I32", (columns // 8, 8)), "w.scales": ("F16", (groups, 8)), "w.qzeros": ("I32", (groups, 1))},
        "w.g_idx": (dtype, (columns,)),
    }
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    return find_components(stored, config, lambda name: data).tensors["w.weight"]
