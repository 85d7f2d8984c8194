"""Types of models of which `fits` knows the tensors and what their names mean, from a configuration alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.fit import fits
from shardwise.fit.roles import TYPES
from shardwise.rules.model_shapes import _FAMILIES, _tables

ALL = _tables().keys() | _FAMILIES.keys()
#: Types of several models; that of the language model in them is known.
WHOLE = {"aria", "emu3", "glm4v", "glm_ocr", "qwen3_5", "qwen3_5_moe", "qwen3_vl"}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 96}
_SIZES = {**_HEADS, "intermediate_size": 160, "vocab_size": 320, "num_hidden_layers": 4}


def cuts(config: dict[str, Any], tp: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """By the names of what is cut: the dim, and the elements of each of its parts."""
    answer = fits(config, (tp,))
    assert answer.unknown == ()
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for cut in answer.sizes[0].cuts:
        name = cut.name.removeprefix("model.").removeprefix("layers.*.").removesuffix(".weight")
        found[name] = cut.dim, (*found.get(name, (0, ()))[1], cut.size)
    return found


def test_what_the_names_of_each_type_mean_is_known() -> None:
    assert sorted(ALL - TYPES - WHOLE) == []


def test_the_default_configuration_of_each_type_has_a_verdict() -> None:
    transformers = pytest.importorskip("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for name in sorted(ALL & {*known}):
        config = json.loads(json.dumps(known[name]().to_dict(), default=str)) | {"model_type": name}
        answer = fits(config, (1, 2))
        assert answer.unknown == (), name
        assert {size.verdict for size in answer.sizes} <= {"fits", "padded"}, name


def test_qwen_3_5_cuts_queries_keys_and_values_of_linear_attention_each_by_heads() -> None:
    """4 key heads of 32 and 8 value heads of 48 make rows of 128, 128 and 384, as vLLM 0.33 merges them."""
    config = _SIZES | {
        **{"model_type": "qwen3_5_text", "linear_num_key_heads": 4, "linear_key_head_dim": 32},
        **{"linear_num_value_heads": 8, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 4},
        **{"layer_types": ["linear_attention", "full_attention"] * 2, "tie_word_embeddings": False},
    }
    found = cuts(config, 4)
    assert found["linear_attn.in_proj_qkv"] == (0, (128,) * 5)
    assert found["linear_attn.in_proj_z"] == (0, (384,))
    assert found["linear_attn.in_proj_a"] == found["linear_attn.in_proj_b"] == (0, (8,))
    assert found["linear_attn.out_proj"] == (1, (384,))
    assert found["self_attn.q_proj"] == (0, (256,))  # With a gate for each element of a query.
    assert [size.verdict for size in fits(config, (4, 8)).sizes] == ["fits", "refused"]  # 4 key heads.
    # In blocks of 32 two ranks have 64 rows of keys, and four have one block each; eight values of 384 are 96 for each.
    said = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantized = fits(config | {"quantization_config": said}, (2, 4)).sizes
    blocks = [cut.verdict for size in quantized for cut in size.cuts if "in_proj_qkv" in cut.name]
    assert blocks == ["fits"] * 10
    said = {"quant_method": "fp8", "weight_block_size": [64, 32]}  # 32 rows of keys for each of four are half a block.
    two, four = fits(config | {"quantization_config": said}, (2, 4)).sizes
    assert {cut.verdict for cut in two.cuts if "in_proj_qkv" in cut.name} == {"fits"}
    assert {cut.verdict for cut in four.cuts if "in_proj_qkv" in cut.name} == {"shared"}


def test_granites_experts_are_stacked_with_gate_and_up_one_after_the_other() -> None:
    config = _SIZES | {"model_type": "granitemoe", "num_local_experts": 6}
    found = cuts(config, 2)
    assert found["block_sparse_moe.input_linear"] == (1, (160, 160))
    assert found["block_sparse_moe.output_linear"] == (2, (160,))
    one, two = fits(config, (4,), (3, 4)).sizes
    assert (one.verdict, two.verdict) == ("fits", "refused")
    assert two.problems[0].why == "6 experts are not divisible by 4"


def test_diffllama_has_its_attention_whole() -> None:
    config = _SIZES | {"model_type": "diffllama"}
    assert {*cuts(config, 3)} == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert [size.verdict for size in fits(config, (2, 3)).sizes] == ["fits", "padded"]


def test_the_tower_of_gemma_4_is_cut_by_heads() -> None:
    config = _HEADS | {
        **{"model_type": "gemma4_vision", "num_hidden_layers": 2, "intermediate_size": 160, "patch_size": 4},
        "position_embedding_size": 64,
    }
    found = cuts(config, 2)
    prefix = "encoder.layers.*."
    assert found[f"{prefix}self_attn.k_proj.linear"] == (0, (64,))
    assert found[f"{prefix}self_attn.o_proj.linear"] == (1, (128,))
    assert found[f"{prefix}mlp.down_proj.linear"] == (1, (160,))
    assert fits(config, (3,)).sizes[0].verdict == "refused"
