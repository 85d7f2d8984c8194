"""Stored tensors worked out from configurations, beside those of files that the formats' own packages wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.quantized.stated import stated_tensors
from shardwise.rules.model_shapes import model_shapes

from ..checks import refused
from ..oracle.quantized import folders, read_raw

DATA = Path(__file__).parents[1] / "data" / "quantized"
#: Calibrated scales of activations are in files, and nothing of them in some configurations.
ACTIVATIONS = ("input_global_scale",)


@pytest.mark.parametrize(
    "folder", [one for one in folders(DATA) if one.name != "st-low-bit"], ids=lambda folder: folder.name
)
def test_as_the_packages_write_them(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    stored = read_raw(folder / "model.safetensors").outline()
    stated, _ = stated_tensors(model_shapes(config), config)
    expected = {name for name in stored if not name.endswith(ACTIVATIONS)}
    assert stated.keys() == expected
    for name in expected:
        if ".quant_state." not in name:
            assert stated[name][1] == stored[name][1], name
            # Scales in bfloat16 where float16 is usual, and the other way round.
            assert stated[name][0] == stored[name][0] or name.endswith(("scales", "scale")), name


SHAPES = {"a.up_proj.weight": (64, 96), "a.gate.weight": (4, 96), "lm_head.weight": (100, 96), "norm.weight": (96,)}


def named(**given: Any) -> set[str]:
    return {
        name for name, (code, _) in stated_tensors(SHAPES, {"quantization_config": given})[0].items() if code != "BF16"
    }


def test_what_is_left_out() -> None:
    fp8: dict[str, Any] = {"quant_method": "fp8"}
    assert named(**fp8) == {"a.up_proj.weight", "a.up_proj.weight_scale"}
    for key, text in (
        ("modules_to_not_convert", "a.up_proj"),
        ("modules_to_not_convert", "up_proj"),
        ("ignore", "re:.*up_proj"),
        ("exclude_modules", "a.*"),
        ("ignored_layers", "a"),
    ):
        assert named(**fp8, **{key: [text]}) == set(), text
    assert named(**fp8, modules_to_not_convert=["p_proj", "b"]) == named(**fp8)


def compressed(**weights: Any) -> dict[str, Any]:
    group = {
        "format": "float-quantized",
        "targets": ["re:.*up_proj"],
        "weights": {"num_bits": 8, "type": "float", **weights},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_shapes_that_are_no_whole_number_of_blocks() -> None:
    """64 rows and 96 columns in blocks of 40 x 64 are 2 x 2 blocks, the last ones short; one group is the whole row."""

    def shapes(**given: Any) -> dict[str, tuple[int, ...]]:
        stated = stated_tensors({"a.up_proj.weight": (64, 96)}, {"quantization_config": given})[0]
        return {name.removeprefix("a.up_proj."): shape for name, (_, shape) in stated.items()}

    fp8 = shapes(quant_method="fp8", weight_block_size=[40, 64])
    assert fp8 == {"weight": (64, 96), "weight_scale_inv": (2, 2)}
    # AWQ packs 8 values of 4 bits along the columns of its transposed weight; -1 is one group for all of a row.
    whole = shapes(quant_method="awq", bits=4, group_size=-1)
    assert whole == {"qweight": (96, 8), "qzeros": (1, 8), "scales": (1, 64)}
    # compressed-tensors makes one scale for "tensor", one for each row for "channel", for 32 columns for "group".
    assert shapes(**compressed(strategy="tensor"))["weight_scale"] == (1,)
    assert shapes(**compressed(strategy="channel"))["weight_scale"] == shapes(**compressed())["weight_scale"] == (64, 1)
    assert shapes(**compressed(strategy="group", group_size=32))["weight_scale"] == (64, 3)
    assert shapes(**compressed(group_size=32))["weight_scale"] == (64, 3)


def test_what_cannot_be() -> None:
    with refused(sw.ParseError, "quant_method is 'other'"):
        named(quant_method="other")
    with refused(sw.ParseError, "quant_algo is 'W4'"):
        named(quant_method="modelopt", quant_algo="W4")
    with refused(sw.ParseError, "'a.up_proj.weight'", "32 does not divide"):
        stated_tensors(
            {"a.up_proj.weight": (60, 96)}, {"quantization_config": {"quant_method": "awq", "group_size": 32}}
        )
    with refused(sw.ParseError, "needs a search that may take for ever"):
        named(quant_method="fp8", ignore=["re:(a+)+b\\1"])
    with refused(sw.ParseError, "'re:(([a-z.]{1,50}){1,50}){1,50}c0' is too large", "124,999 steps", "1,000"):
        named(quant_method="fp8", ignore=["re:(([a-z.]{1,50}){1,50}){1,50}c0"])
    with refused(sw.ParseError, "'re:(' is not a regular expression"):
        named(quant_method="fp8", ignore=["re:("])
    with refused(sw.ParseError, "surrogate"):
        named(quant_method="fp8", ignore=["\ud800"])
    with refused(sw.ParseError, "quant_method is ['fp8']"):
        named(quant_method=["fp8"])
    with refused(sw.ParseError, "config_groups is [1]; it must be an object"):
        named(quant_method="compressed-tensors", config_groups=[1])
    with refused(sw.ParseError, "targets is 'Linear'; it must be a list of names"):
        named(quant_method="compressed-tensors", config_groups={"0": {"targets": "Linear", "weights": {}}})


@pytest.mark.parametrize("value", ["lm_head", [["lm_head"]], [5], {"lm_head": 1}])
def test_what_is_left_out_is_a_list_of_names(value: object) -> None:
    """A text alone was passed over, so that what it names was taken to be quantized."""
    with refused(sw.ParseError, "ignore is", "it must be a list of names"):
        named(quant_method="fp8", ignore=value)


@pytest.mark.parametrize("size", [10**400, 2**31, 0, -2, "128", True])
def test_blocks_of_sizes_that_none_has(size: Any) -> None:
    with refused(sw.ParseError, "weight_block_size is", "two positive integers of at most 2147483647"):
        named(quant_method="fp8", weight_block_size=[128, size])
    group = {"targets": ["Linear"], "weights": {"num_bits": size, "strategy": "channel"}}
    with refused(sw.ParseError, "num_bits is", "an integer from 1 to 2147483647"):
        named(quant_method="compressed-tensors", format="pack-quantized", config_groups={"0": group})
