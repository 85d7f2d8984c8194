"""Sizes that fit: heads, experts, fused weights, forms; and that the answer is what the layouts of components allow."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.errors import LayoutError, ParseError
from shardwise.fit import SizeFit, fits, fits_tensors
from shardwise.fit.roles import heads_of, role_of
from shardwise.quantized import component_layouts, find_components

from ..checks import refused
from ..oracle.quantized import folders
from ..prove.against_quantized import draw, written

DATA = Path(__file__).parents[1] / "data" / "quantized"
Outline = dict[str, tuple[str, tuple[int, ...]]]

#: The plans of transformers 5.23, `base_model_tp_plan`: rows of out are "colwise" there.
PLANS = {
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj mlp.fc1": "colwise",
    "mlp.shared_expert.gate_proj mlp.shared_experts.up_proj attention.query_key_value mlp.dense_h_to_4h": "colwise",
    "self_attn.qkv_proj mlp.gate_up_proj linear_attn.in_proj_qkvz linear_attn.in_proj_ba": "colwise",
    "self_attn.o_proj mlp.down_proj mlp.shared_expert.down_proj mlp.fc2 self_attn.dense attention.dense": "rowwise",
    "mlp.dense_4h_to_h": "rowwise",
    "self_attn.q_norm mlp.gate self_attn.q_a_proj self_attn.kv_a_proj_with_mqa": "whole",
}


@pytest.mark.parametrize(("names", "style"), PLANS.items())
def test_what_is_cut_is_what_plans_of_transformers_cut(names: str, style: str) -> None:
    for name in names.split():
        assert role_of(f"model.layers.3.{name}.weight", 2).dim == {"colwise": -2, "rowwise": -1, "whole": None}[style]


def test_experts_may_be_stacked_and_transposed() -> None:
    # mixtral in transformers 5: packed_colwise; llama4: packed_rowwise.
    assert role_of("layers.0.mlp.experts.gate_up_proj", 3)[:4] == (-2, "", 2, "stacked")
    assert role_of("layers.0.feed_forward.experts.gate_up_proj", 3, transposed=True).dim == -1
    assert role_of("layers.0.feed_forward.experts.down_proj", 3, transposed=True).dim == -2
    assert role_of("model.visual.blocks.0.mlp.down_proj.weight", 2).dim is None
    tensors: Outline = {"layers.0.mlp.experts.down_proj": ("BF16", (8, 2880, 64))}
    (size,) = fits_tensors(tensors, {"model_type": "gpt_oss"}, (64,)).sizes
    assert [(cut.size, cut.verdict) for cut in size.cuts] == [(2880, "fits")]


def attention(heads: int, kv: int, tp: int, head_dim: int = 128) -> SizeFit:
    tensors: Outline = {
        f"layers.{i}.self_attn.{name}_proj.weight": ("BF16", (count * head_dim, 64))
        for i in range(2)
        for name, count in (("q", heads), ("k", kv), ("v", kv))
    }
    return fits_tensors(tensors, {"num_attention_heads": heads, "num_key_value_heads": kv}, (tp,)).sizes[0]


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "verdict", "why"),
    [
        (64, 8, 8, "fits", ""),
        (64, 8, 16, "fits", ""),  # Two ranks hold the same head.
        (40, 8, 16, "refused", "40 heads do not divide into 16"),
        (48, 8, 12, "refused", "8 key-value heads do not divide into 12"),
        (14, 2, 4, "refused", "14 heads do not divide into 4"),
    ],
)
def test_heads_stay_whole(heads: int, kv: int, tp: int, verdict: str, why: str) -> None:
    size = attention(heads, kv, tp)
    assert (size.verdict, next((cut.why for cut in size.problems), "")) == (verdict, why)
    assert {cut.tensors for cut in size.cuts} == {2}


def test_what_is_not_padded_says_no_size_and_no_shards() -> None:
    """Whole blocks need no padding, cut or not; and engines cut single elements evenly or not at all."""
    tensors: Outline = {
        "mlp.up_proj.weight": ("F8_E4M3", (256, 128)),
        "mlp.up_proj.weight_scale_inv": ("F32", (2, 1)),
        "other.mlp.up_proj.weight": ("BF16", (10, 64)),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    one, two, four = fits_tensors(tensors, config, (1, 2, 4)).sizes
    assert [cut.padded for size in (one, two) for cut in size.cuts] == [None] * 4
    # 10 in 4 are padded to 12, 256 in 4 to blocks of 128: 512; of those the last two ranks have none.
    assert {cut.size: (cut.padded, cut.ceil) for cut in four.problems} == {10: (12, ()), 256: (512, (128, 128, 0, 0))}


@pytest.mark.parametrize(
    ("rows", "tp", "why"),
    [
        (16 * 12, 4, ""),
        (16 * 12, 3, "16 heads of linear attention do not divide into 3"),
        (100, 4, ""),  # Not of so many heads: elements.
        (100, 3, "100 elements do not divide into 3"),
    ],
)
def test_heads_of_linear_attention_stay_whole(rows: int, tp: int, why: str) -> None:
    tensors: Outline = {"layers.0.linear_attn.in_proj_qkvz.weight": ("BF16", (rows, 8))}
    (size,) = fits_tensors(tensors, {"num_attention_heads": 8, "linear_num_key_heads": 16}, (tp,)).sizes
    assert next((cut.why for cut in size.problems), "") == why


def test_vocabularies_are_cut_along_their_rows() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert role_of(name, 2).dim == -2
        assert role_of(name, 2).vocabulary


def test_tensors_without_elements_fit() -> None:
    assert attention(8, 8, 8, head_dim=0).verdict == "fits"


def test_heads_on_blocks() -> None:
    """Heads of 64 rows, of which two are a block: whole heads, but not whole blocks, on each of 7 ranks."""
    tensors: Outline = {"q_proj.weight": ("F8_E4M3", (14 * 64, 128)), "q_proj.weight_scale_inv": ("F32", (7, 1))}
    config = {
        "num_attention_heads": 14,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    answer = fits_tensors(tensors, config, (2, 7, 14))
    assert [size.verdict for size in answer.sizes] == ["refused", "fits", "shared"]
    assert answer.sizes[0].problems[0].why == "896 in 2 is 448 each, within blocks of 128 of weight_scale_inv"
    assert answer.sizes[0].problems[0].padded is None  # Heads cannot be padded.


def test_parts_of_a_fused_weight() -> None:
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }

    def verdicts(name: str, rows: int, *tp: int) -> list[str]:
        tensors: Outline = {
            f"{name}.weight": ("F8_E4M3", (rows, 128)),
            f"{name}.weight_scale_inv": ("F32", (-(-rows // 128), 1)),
        }
        return [size.verdict for size in fits_tensors(tensors, config, tp).sizes]

    assert verdicts("qkv_proj", 12 * 128, 1, 2, 4, 16) == ["fits", "fits", "fits", "refused"]
    # Keys begin within a block: heads of 48 rows.
    assert verdicts("qkv_proj", 12 * 56, 1, 2) == ["fits", "refused"]
    assert verdicts("gate_up_proj", 1280, 1, 5, 2) == ["fits", "fits", "padded"]
    assert verdicts("gate_up_proj", 384, 1, 2) == ["fits", "refused"]


@pytest.mark.parametrize("folder", folders(DATA), ids=lambda folder: folder.name)
def test_real_files(folder: Path) -> None:
    answer = fits(folder)
    config = json.loads((folder / "config.json").read_text())
    assert answer.method == config.get("quantization_config", {}).get("quant_method")
    assert answer.sizes[0].verdict == "fits"
    assert json.loads(json.dumps(answer.as_json()))["method"] == answer.method
    if folder.name == "gptq-actorder":
        assert any("g_idx is not in order" in cut.why for cut in answer.sizes[1].problems)
    if folder.name == "gptq":
        assert not any("g_idx" in cut.why for size in answer.sizes for cut in size.cuts)


def test_the_answer_is_what_the_layouts_of_components_allow() -> None:
    rng = random.Random(7)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(300):
            case = draw(rng)
            raw, config = written(case)
            name = "gate_proj" if case.dim == 0 else "down_proj"
            parts = {old.replace("m.", f"{name}.", 1): old for old in raw.tensors}
            if case.form == "gpt-oss":
                parts = {f"{name}_{old.rpartition('_')[2]}": old for old in raw.tensors}
            outline = {new: raw.tensors[old][:2] for new, old in parts.items()}

            def read(new: str, raw: Any = raw, parts: Any = parts) -> bytes:
                return raw.tensors[parts[new]][2]  # type: ignore[no-any-return]

            (size,) = fits_tensors(outline, {"quantization_config": config}, (case.devices,), read=read).sizes
            (logical,) = find_components(outline, {"quantization_config": config}, read).tensors.values()
            layout = sw.TensorLayout(("tp", None)[:: 1 - 2 * case.dim], sw.DeviceMesh((case.devices,), ("tp",)))
            found = "refused"
            for shared in (False, True):
                try:
                    layout.partition(logical.shape)
                    component_layouts(logical, layout, shared=shared)
                except LayoutError:
                    continue
                found = ("fits", "shared")[shared]
                break
            verdict = size.verdict
            seen.add(verdict)
            assert (verdict if verdict in ("fits", "shared") else "refused") == found, case
    assert seen == {"fits", "shared", "padded", "refused"}


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with refused(LayoutError, "tp is 0; it must be at least 1"):
        fits_tensors({}, {}, (0,))
    with refused(TypeError, "ep"):
        fits_tensors({}, {}, ep=("2",))  # type: ignore[arg-type]
    with refused(ParseError, "num_attention_heads is -4; it must be from 1 to 2147483647"):
        heads_of({"num_attention_heads": -4})
    with refused(ParseError, f"num_attention_heads is {2**31}"):
        heads_of({"num_attention_heads": 2**31})
    assert heads_of({"num_attention_heads": 2**31 - 1}).q == 2**31 - 1
    with refused(ParseError, "num_attention_heads must be an integer"):
        heads_of({"num_attention_heads": "many"})
    sw.save_checkpoint(tmp_path / "m", {"w": np.zeros((2, 2), "float32")})
    for text, message in (("{", "not JSON"), ("[]", "an object of JSON")):
        (tmp_path / "m" / "config.json").write_text(text)
        with refused(ParseError, message):
            fits(tmp_path / "m")
    assert fits(tmp_path / "m", config={}).sizes[0].verdict == "fits"
    with pytest.raises(FileNotFoundError):
        fits(tmp_path / "gone")


def test_other_formats_are_read_too(tmp_path: Path) -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    layouts = {"mlp.down_proj.weight": sw.TensorLayout((None, "tp"), mesh)}
    sw.save_checkpoint(
        tmp_path / "dcp", {"mlp.down_proj.weight": np.zeros((4, 12), "float16")}, layouts=layouts, to="dcp"
    )
    assert [size.verdict for size in fits(tmp_path / "dcp", (2, 4, 8)).sizes] == ["fits", "fits", "padded"]
