"""Quantized checkpoints are recognised, and what does not agree is refused."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.errors import ParseError
from shardwise.quantized import Along, Component, LogicalTensor, find_components
from shardwise.quantized.forms import find_kinds

from ..checks import refused
from ..oracle.quantized import check_checkpoint, folders, read_raw

DATA = Path(__file__).parents[1] / "data" / "quantized"
Outline = dict[str, tuple[str, tuple[int, ...]]]


@pytest.mark.heavy
@pytest.mark.parametrize("folder", folders(DATA), ids=lambda folder: folder.name)
def test_a_checkpoint_is_recognised_cut_merged_and_dequantized(folder: Path) -> None:
    found = check_checkpoint(folder, (1, 2, 3, 4, 8))
    assert found.weights == len(json.loads((folder / "expected.json").read_text())["tensors"]) or not found.weights
    assert found.cuts >= found.weights


def of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], **config: Any) -> LogicalTensor:
    (logical,) = find_components(tensors, {"quantization_config": config} if config else {}).tensors.values()
    return logical


def packed_scheme(**weights: Any) -> dict[str, Any]:
    scheme = {"strategy": "group", "group_size": 32, "num_bits": 4, **weights}
    group = {"format": "pack-quantized", "targets": ["Linear"], "weights": scheme}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: Outline = {"a.weight_packed": ("I32", (64, 16)), "a.weight_scale": ("BF16", (64, 4))}
NF4: Outline = {"a.weight": ("U8", (64, 1)), "a.weight.absmax": ("F32", (2,))}
GPTQ: Outline = {
    "a.qweight": ("I32", (16, 64)),
    "a.qzeros": ("I32", (4, 8)),
    "a.scales": ("F16", (4, 64)),
    "a.g_idx": ("I32", (128,)),
}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"a.weight": ("F8_E4M3", (256, 256))}, FP8, "'a.weight' is F8_E4M3, and its weight_scale_inv is missing"),
        ({"a.weight_scale_inv": ("F32", (2, 2))}, FP8, "has no weight next to it"),
        (
            {"a.weight": ("F8_E4M3", (256, 300)), "a.weight_scale_inv": ("F32", (2, 2))},
            FP8,
            "has the shape (2, 2); for a weight of (256, 300) in blocks of 128 x 128 it must be (2, 3)",
        ),
        (
            {"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))},
            {**FP8, "weight_block_size": [64, 128]},
            "in blocks of 64 x 128 it must be (4, 2)",
        ),
        (
            {"a.weight": ("F8_E4M3", (256,)), "a.weight_scale_inv": ("F32", (2, 2))},
            FP8,
            "it must have at least two dims",
        ),
        (
            {"a.weight": ("BF16", (4, 4)), "a.weight_scale_inv": ("F32", (1, 1))},
            FP8,
            "is BF16, and has a weight_scale_inv",
        ),
        (
            {"a.weight": ("F8_E4M3", (4, 4)), "a.weight_scale": ("F32", (3,))},
            {"quant_method": "fp8"},
            "expected one scale for the whole of (4, 4)",
        ),
        ({}, {"quant_method": "hqq"}, "quant_method is 'hqq'; known are auto-round, awq"),
        (
            {"a.weight": ("F8_E4M3", (4, 4)), "a.weight_scale_inv": ("F32", (1, 1))},
            {**FP8, "weight_block_size": [0, 128]},
            "weight_block_size is [0, 128]; it must be two positive integers",
        ),
        ({"a.weight_packed": ("I32", (64, 16))}, packed_scheme(), "its weight_scale is missing"),
        (INT4, packed_scheme(group_size=64), "in blocks of 1 x 64 it must be (64, 2)"),
        (INT4, packed_scheme(num_bits=8), "in blocks of 1 x 32 it must be (64, 2)"),
        (INT4, packed_scheme(num_bits=9), "num_bits is 9; packed integers have 1 to 8"),
        (INT4, packed_scheme(group_size=None), "group_size is missing"),
        (INT4, packed_scheme(group_size="many"), "group_size is 'many'; it must be an integer"),
        (INT4, packed_scheme(strategy="row"), "strategy is 'row'"),
        ({**INT4, "a.weight_packed": ("F32", (64, 16))}, packed_scheme(), "weight_packed is F32; expected I32 or U8"),
        (
            {**INT4, "a.weight_zero_point": ("I32", (9, 4))},
            packed_scheme(),
            "has the shape (9, 4); for a weight of (64, 128) it must be (8, 4)",
        ),
        ({**INT4, "a.weight_g_idx": ("I32", (127,))}, packed_scheme(), "it must be (128,)"),
        ({**INT4, "a.weight_g_idx": ("I32", (2, 64))}, packed_scheme(), "it must have 1 dim"),
        (GPTQ, {"quant_method": "gptq", "bits": 4}, "group_size is missing"),
        (GPTQ, {"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits is 5; known are 2, 3, 4 and 8"),
        (GPTQ, {"quant_method": "gptq", "bits": 4, "group_size": 64}, "a.scales' has the shape (4, 64)"),
        ({"a.qzeros": ("I32", (4, 8))}, {"quant_method": "gptq", "group_size": 32}, "has no qweight next to it"),
        ({"a.qweight": ("I32", (16, 64))}, {"quant_method": "awq", "group_size": 32}, "its scales is missing"),
        (GPTQ, {"quant_method": "awq", "group_size": 32, "version": "gemv"}, "version is 'gemv'"),
        ({"a_blocks": ("U8", (4, 64, 3, 16))}, {"quant_method": "mxfp4"}, "its scales is missing"),
        (
            {"a_blocks": ("U8", (4, 64, 3, 16)), "a_scales": ("U8", (4, 64, 2))},
            {"quant_method": "mxfp4"},
            "its scales have the shape (4, 64, 2)",
        ),
        (
            {"a_blocks": ("U8", (4, 64, 48)), "a_scales": ("U8", (4, 64, 3))},
            {"quant_method": "mxfp4"},
            "expected (…, rows, blocks, 16)",
        ),
        (
            {"a.weight": ("U8", (64, 32)), "a.weight_scale": ("F8_E4M3", (64, 4))},
            {"quant_method": "modelopt"},
            "its weight_scale_2 is missing",
        ),
        (
            {"a.weight": ("U8", (64, 32)), "a.weight_scale": ("F32", (64, 4)), "a.weight_scale_2": ("F32", ())},
            {"quant_method": "modelopt"},
            "only NVFP4 of ModelOpt's 4-bit forms is known",
        ),
        (NF4, {"quant_method": "bitsandbytes"}, "its quant_state is missing"),
        (
            {**NF4, "a.weight.absmax": ("F32", (3,)), "a.weight.quant_state.bitsandbytes__nf4": ("U8", (9,))},
            {"quant_method": "bitsandbytes"},
            "its absmax has the shape (3,)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_refused(tensors: Outline, config: dict[str, Any], message: str) -> None:
    with refused(ParseError, message):
        find_components(tensors, {"quantization_config": config})


def test_names_tell_the_method_where_the_configuration_does_not() -> None:
    scales: Outline = {"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))}
    assert of(scales).form == "FP8 in blocks of 128 x 128"
    assert of({"a.weight": ("U8", (64, 32)), "a.weight_scale": ("F8_E4M3", (64, 4)), "a.weight_scale_2": ("F32", ())})
    found = find_components({"a.weight": ("BF16", (4, 4)), "b": ("F32", ())}, {})
    assert (found.method, found.tensors, found.plain) == (None, {}, ("a.weight", "b"))


def test_stacked_experts_have_components_of_their_own() -> None:
    one = of({"x.gate_up_proj": ("F8_E4M3", (8, 512, 256)), "x.gate_up_proj_scale_inv": ("F32", (8, 4, 2))}, **FP8)
    assert (one.name, one.shape, one.unit(0), one.unit(1), one.unit(2)) == (
        "x.gate_up_proj",
        (8, 512, 256),
        1,
        128,
        128,
    )


def test_of_several_schemes_the_target_decides() -> None:
    config = packed_scheme()
    config["config_groups"]["group_1"] = {
        "format": "pack-quantized",
        "targets": [r"re:.*\.down_proj$"],
        "weights": {"strategy": "group", "group_size": 64, "num_bits": 4},
    }
    tensors: Outline = {
        "up_proj.weight_packed": ("I32", (64, 16)),
        "up_proj.weight_scale": ("BF16", (64, 4)),
        "mlp.down_proj.weight_packed": ("I32", (64, 16)),
        "mlp.down_proj.weight_scale": ("BF16", (64, 2)),
    }
    # A class of modules has no name; what is named comes first.
    found = find_components(tensors, {"quantization_config": config}).tensors
    assert (found["up_proj.weight"].unit(1), found["mlp.down_proj.weight"].unit(1)) == (32, 64)
    config["config_groups"]["group_1"]["targets"] = [r"re:(a+)+\1$"]
    with refused(ParseError, "needs a search that may take for ever"):
        find_components(tensors, {"quantization_config": config})


def test_the_values_of_small_tensors_are_read_where_shapes_do_not_tell() -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}}
    groups = np.arange(128, dtype="<i4") // 32

    def why(order: np.ndarray[Any, Any] | None) -> str:
        read = None if order is None else lambda name: order.tobytes()
        return find_components(GPTQ, config, read).tensors["a.weight"].why_uncut(1)

    assert why(groups) == ""
    assert "is not in order (desc_act)" in why(groups[::-1].copy())
    assert "were not read" in why(None)
    # Only what says that groups are in order is taken at its word.
    for desc_act, message in ((None, "were not read"), (False, "")):
        stated = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        stated |= {} if desc_act is None else {"desc_act": desc_act}
        found = find_components(GPTQ, {"quantization_config": stated}).tensors["a.weight"].why_uncut(1)
        assert (message in found, bool(found)) == (True, bool(message))
    for said, message in ((b"", "has 0 bytes"), (np.array([64, 130], "<i8").tobytes(), "says (64, 130)")):
        tensors: Outline = {**INT4, "a.weight_shape": ("I64", (2,))}
        with refused(ParseError, message):
            find_components(tensors, {"quantization_config": packed_scheme()}, lambda name, said=said: said)  # type: ignore[misc]


@pytest.mark.parametrize(
    "state", [b"{", b"[]", b"{}", b'{"shape": [4, -4], "blocksize": 64}', b'{"shape": 4, "blocksize": 64}']
)
def test_a_bad_quant_state_is_refused(state: bytes) -> None:
    tensors: Outline = {
        "a.weight": ("U8", (64, 1)),
        "a.weight.absmax": ("F32", (2,)),
        "a.weight.quant_state.bitsandbytes__nf4": ("U8", (len(state),)),
    }
    with refused(ParseError, "quant_state"):
        find_components(tensors, {"quantization_config": {"quant_method": "bitsandbytes"}}, lambda name: state)


def test_values_are_values() -> None:
    raw = read_raw(DATA / "gptq" / "model.safetensors")
    config = json.loads((DATA / "gptq" / "config.json").read_text())
    for logical in find_components(raw.outline(), config).tensors.values():
        assert pickle.loads(pickle.dumps(logical)) == logical
        assert eval(repr(logical), {"Along": Along, "Component": Component, "LogicalTensor": LogicalTensor}) == logical
        assert hash(logical) == hash(pickle.loads(pickle.dumps(logical)))
        assert (logical.unit(1), logical.unit(1, shared=True)) == (math.lcm(8, 32), 8)


def test_a_configuration_of_nonsense_is_not_followed() -> None:
    tensors: Outline = {
        "a.weight": ("U8", (64, 32)),
        "a.weight_scale": ("F8_E4M3", (64, 4)),
        "a.weight_scale_2": ("F32", ()),
    }
    several: list[Any] = [[], {"a": 3}, {"a": {"weights": 3}}, {"a": {"weights": {"group_size": None}}}]
    for groups in several:
        assert of(tensors, quant_method="modelopt", config_groups=groups).unit(1) == 16


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "modelopt"])
def test_scales_of_other_things_are_plain(method: str) -> None:
    """Those of caches, and of logits."""
    others = ("attn.k_proj.k_scale", "attn.v_scale", "attn.q_proj.output_scale", "logit_scale")
    found = find_components(
        dict.fromkeys(others, ("F32", ())) | {"w.weight": ("BF16", (4, 4))},
        {"quantization_config": {"quant_method": method}},
    )
    assert found.plain == (*others, "w.weight")


def test_stacked_experts_of_modelopt() -> None:
    tensors: Outline = {
        "experts.gate_up_proj": ("U8", (16, 64, 128)),
        "experts.gate_up_proj_weight_scale": ("F8_E4M3", (16, 64, 16)),
        "experts.gate_up_proj_weight_scale_2": ("F32", (16,)),
        "experts.gate_up_proj_input_scale": ("F32", ()),
    }
    one = of(tensors, quant_method="modelopt")
    assert (one.name, one.shape, one.unit(2), len(one.components)) == ("experts.gate_up_proj", (16, 64, 256), 16, 4)


@pytest.mark.parametrize("said", [{}, {"desc_act": True}])
def test_an_order_of_groups_is_read_for_each_weight_unless_it_is_in_order_by_what_is_said(said: dict[str, Any]) -> None:
    """GPTQ's `desc_act` is not said in old files: then `g_idx` tells, and of two weights one may be out of order."""
    tensors = {
        f"{name}.{tail}": what for name in ("h.0.a", "h.1.a") for key, what in GPTQ.items() for tail in [key[2:]]
    }
    orders = {"h.0.a.g_idx": np.arange(128) // 32, "h.1.a.g_idx": np.arange(128)[::-1] // 32}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, **said}}
    found = find_components(tensors, config, lambda name: orders[name].astype("<i4").tobytes())
    assert [bool(found.tensors[f"{name}.weight"].why_uncut(1)) for name in ("h.0.a", "h.1.a")] == [False, True]
    # Tensors that are alike are looked at once, but not these; and each is of one kind, whatever it is.
    plain = {f"{name}.norm": ("BF16", (4,)) for name in ("h.0.a", "h.1.a")}
    kinds = find_kinds({**tensors, **plain}, config, lambda name: orders[name].astype("<i4").tobytes())[1]
    uncut = {name: bool(kind.tensor.why_uncut(1)) for kind in kinds for name in kind.names if name not in plain}
    assert uncut == {"h.0.a.weight": False, "h.1.a.weight": True}
    assert [kind.names for kind in kinds if kind.tensor.name in plain] == [("h.0.a.norm", "h.1.a.norm")]


@pytest.mark.parametrize("columns", [1, 4])
def test_zero_points_have_the_groups_of_their_scales(columns: int) -> None:
    """Also where one group is all of a row; 64 rows of zero points of 4 bits are 8 words."""
    tensors: Outline = {
        "a.weight_packed": ("I32", (64, 16)),
        "a.weight_scale": ("BF16", (64, columns)),
        "a.weight_zero_point": ("I32", (8, columns)),
    }
    logical = of(tensors, **packed_scheme(group_size=128 // columns, symmetric=False))
    zero = next(one for one in logical.components if one.name == "a.weight_zero_point")
    assert (zero.along[0].block, zero.along[0].packing) == (8, 8)
    assert zero.along[1] == Along(1, 128 // columns)
    stated = of(INT4 | {"a.weight_shape": ("I64", (2,))}, **packed_scheme()).stated
    assert stated == (("a.weight_shape", "the shape of the whole weight"),)


def test_a_state_of_no_dims_is_refused() -> None:
    tensors = {"a.weight": ("U8", (1, 1)), "a.weight.absmax": ("F32", (1,))}
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = ("U8", (9,))
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    with refused(ParseError, "has a shape of 0 dims"):
        find_components(tensors, config, lambda name: b'{"shape": [], "blocksize": 64}')
