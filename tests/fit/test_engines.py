"""The limits of engines: each check at the sizes that it refuses, and at those beside them that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.fit import fits_tensors
from shardwise.fit.engines import limits_of
from shardwise.fit.roles import role_of
from shardwise.quantized import find_components

Outline = dict[str, tuple[str, tuple[int, ...]]]

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
VLLM, SGLANG, TRT = "vLLM", "SGLang", "TensorRT-LLM"


def limits(outline: Outline, config: dict[str, Any], name: str, per_rank: int, ways: int) -> list[tuple[str, str]]:
    tensor = find_components(outline, config).tensors[name]
    found = limits_of(tensor, role_of(name, len(tensor.shape)), per_rank, ways)
    return [(limit.engine.rpartition(" ")[0], limit.why) for limit in found]


def fp8(name: str, rows: int, columns: int) -> Outline:
    blocks = -(-rows // 128), -(-columns // 128)
    return {name: ("F8_E4M3", (rows, columns)), f"{name}_scale_inv": ("F32", blocks)}


def test_blocks_of_dense_layers_matter_only_where_they_are_cut() -> None:
    """`validate_fp8_block_shape` of vLLM looks at layers that are cut; `quantization/fp8.py` of SGLang as well."""
    name = "layers.0.mlp.down_proj.weight"
    outline = fp8(name, 256, 640)
    assert limits(outline, FP8, name, 640, 1) == []
    assert limits(fp8(name, 256, 320), FP8, name, 320, 1) == []
    why = "Weight input_size_per_partition = 320 is not divisible by weight quantization block_k = 128"
    assert limits(outline, FP8, name, 320, 2) == [(VLLM, why), (SGLANG, why)]
    name = "layers.0.mlp.up_proj.weight"
    why = "Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128"
    assert limits(fp8(name, 128, 256), FP8, name, 64, 2) == [(VLLM, why), (SGLANG, why)]


def test_blocks_of_experts_matter_along_rows_always() -> None:
    """The fused kernels ask for whole blocks of rows also of what is not cut, and of columns where it is."""
    name = "layers.0.mlp.experts.3.up_proj.weight"
    aligned = "an intermediate size of 320 is not aligned with blocks of 128"
    why = "The output_size of gate's and up's weight = 320 is not divisible by weight quantization block_n = 128"
    for ways in (1, 2):
        found = limits(fp8(name, 320, 256), FP8, name, 320, ways)
        assert found == [(TRT, aligned), (VLLM, why), (SGLANG, why)]
    assert limits(fp8(name, 384, 256), FP8, name, 384, 1) == []
    name = "layers.0.mlp.experts.3.down_proj.weight"
    why = "The input_size of down's weight = 320 is not divisible by weight quantization block_k = 128"
    assert limits(fp8(name, 256, 320), FP8, name, 320, 1) == [(TRT, aligned)]
    assert limits(fp8(name, 256, 640), FP8, name, 320, 2) == [(TRT, aligned), (VLLM, why), (SGLANG, why)]


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_on_one_rank_merged_matrices_end_on_blocks(method: str) -> None:
    """10,944 rows are 85.5 blocks: vLLM 0.33 asks all but the last of merged matrices for whole blocks, SGLang all."""
    why = "Weight output_partition_size = 10944 is not divisible by weight quantization block_n = 128"
    scale = "weight_scale_inv" if method == "fp8" else "weight_scale"
    config: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    if method != "fp8":
        weights = {"strategy": "block", "block_structure": [128, 128], "num_bits": 8, "type": "float"}
        group = {"format": "float-quantized", "targets": ["Linear"], "weights": weights}
        config = {"quantization_config": {"quant_method": method, "config_groups": {"group_0": group}}}

    def refused_by(*parts: tuple[str, int]) -> dict[str, set[str]]:
        outline: Outline = {}
        for name, rows in parts:
            outline[f"layers.0.mlp.{name}.weight"] = ("F8_E4M3", (rows, 2048))
            outline[f"layers.0.mlp.{name}.{scale}"] = ("F32" if method == "fp8" else "BF16", (-(-rows // 128), 16))
        (size,) = fits_tensors(outline, config, (1,)).sizes
        assert size.verdict == "fits"
        found: dict[str, set[str]] = {}
        for cut in size.cuts:
            engines = {limit.engine.rpartition(" ")[0] for limit in cut.limits if limit.why == why}
            found.setdefault(cut.name.split(".")[-2], set()).update(engines)
        return found

    assert refused_by(("gate_proj", 10944), ("up_proj", 10944)) == {"gate_proj": {VLLM, SGLANG}, "up_proj": {SGLANG}}
    assert refused_by(("gate_up_proj", 2 * 10944)) == {"gate_up_proj": {VLLM, SGLANG}}
    assert refused_by(("up_proj", 10944)) == {"up_proj": set()}
    assert refused_by(("gate_proj", 10880), ("up_proj", 10880)) == {"gate_proj": set(), "up_proj": set()}


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("layers.0.mlp.up_proj.weight", 32, []),  # Gate and up together are 64.
        ("layers.0.mlp.up_proj.weight", 64, []),
        ("layers.0.mlp.up_proj.weight", 96, []),
        ("layers.0.mlp.up_proj.weight", 48, ["size_n = 96 is not divisible by tile_n_size = 64"]),
        ("layers.0.mlp.up_proj.weight", 63, ["size_n = 126 is not divisible by tile_n_size = 64"]),
        ("layers.0.mlp.experts.0.up_proj.weight", 64, []),
        ("layers.0.mlp.experts.0.up_proj.weight", 96, ["gate and up of 96 rows", "128 of each"]),
    ],
)
def test_tiles_of_nvfp4(name: str, rows: int, expected: list[str]) -> None:
    outline: Outline = {
        name: ("U8", (rows, 32)),
        f"{name}_scale": ("F8_E4M3", (rows, 4)),
        f"{name}_scale_2": ("F32", ()),
    }
    found = " ".join(why for _, why in limits(outline, NVFP4, name, rows, 2))
    assert bool(found) == bool(expected)
    assert all(text in found for text in expected)


def test_of_a_shard_that_is_no_whole_number_the_fraction_is_told() -> None:
    """10 in 4 is 2.5 each; 12 in 4 is 3, and a whole number; JSON has both, beside the blocks."""
    outline: Outline = {
        "layers.0.mlp.down_proj.weight": ("BF16", (8, 10)),
        "layers.0.mlp.up_proj.weight": ("BF16", (12, 8)),
    }
    answer = fits_tensors(outline, {}, (4,))
    told = {cut.name: cut.per_rank for cut in answer.sizes[0].cuts}
    assert list(map(repr, told.values())) == ["2.5", "3"]
    (problem,) = answer.as_json()["sizes"][0]["problems"]
    assert (problem["size"], problem["ways"], problem["per_rank"], problem["blocks"]) == (10, 4, 2.5, {})


def test_the_output_of_linear_attention_is_cut_along_its_columns() -> None:
    """Qwen3-Next's `linear_attn.out_proj` is row-parallel as any output; `out_proj` of other blocks is too."""
    assert role_of("model.layers.0.linear_attn.out_proj.weight", 2)[:2] == (-1, "linear")
    assert role_of("model.layers.0.self_attn.out_proj.weight", 2)[:2] != (-1, "linear")


def test_weights_of_exaone_are_those_of_a_linear_layer_where_gpt2_has_them_transposed() -> None:
    """As the plan of transformers 5.24 cuts them: `c_fc_0` and `c_fc_1` by columns of its layers, `c_proj` by rows."""
    for name, dim in (("c_fc_0", -2), ("c_fc_1", -2), ("c_proj", -1)):
        assert role_of(f"transformer.h.0.mlp.{name}.weight", 2, "exaone")[:2] == (dim, "")
    assert role_of("transformer.h.0.mlp.c_proj.weight", 2, "gpt2").dim == -2
