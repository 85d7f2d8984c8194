"""DeepSeek-V3 in blocks of FP8 from Hugging Face's files to Megatron's `torch_dist` and back, by its rules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main

Array = np.ndarray[Any, Any]

LAYERS, EXPERTS, HIDDEN, INNER, WIDTH, HEADS, RANK, WORDS = 2, 3, 256, 512, 256, 4, 128, 130
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": WORDS,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
#: Projections by name, and the sizes of an MLP's.
ATTENTION = {
    "q_a_proj": (RANK, HIDDEN),
    "q_b_proj": (HEADS * 128, RANK),
    "kv_a_proj_with_mqa": (RANK + 64, HIDDEN),
    "kv_b_proj": (HEADS * 256, RANK),
    "o_proj": (HIDDEN, HEADS * 128),
}
NORMS = {
    "self_attn.q_a_layernorm": RANK,
    "self_attn.kv_a_layernorm": RANK,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}


def mlp(width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}


def model() -> dict[str, Array]:
    """Random bytes in Hugging Face's form: a layer with an MLP, one with experts, and one for further tokens."""
    random = np.random.default_rng(20261123)
    made: dict[str, Array] = {}

    def plain(name: str, *shape: int) -> None:
        made[name] = random.standard_normal(shape).astype(ml_dtypes.bfloat16)

    def quantized(name: str, shape: tuple[int, int]) -> None:
        made[f"{name}.weight"] = random.integers(0, 120, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        made[f"{name}.weight_scale_inv"] = random.random((-(-shape[0] // 128), -(-shape[1] // 128)), np.float32)

    for layer in range(LAYERS + 1):
        at = f"model.layers.{layer}"
        for norm, size in NORMS.items():
            plain(f"{at}.{norm}.weight", size)
        for name, shape in ATTENTION.items():
            quantized(f"{at}.self_attn.{name}", shape)
        if layer == 0:
            parts = {"mlp": INNER}
        else:
            parts = {"mlp.shared_experts": WIDTH, **{f"mlp.experts.{e}": WIDTH for e in range(EXPERTS)}}
            plain(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
            made[f"{at}.mlp.gate.e_score_correction_bias"] = random.random(EXPERTS, np.float32)
        for part, width in parts.items():
            for name, shape in mlp(width).items():
                quantized(f"{at}.{part}.{name}", shape)
    for name in ("model.embed_tokens", "lm_head"):
        plain(f"{name}.weight", WORDS, HIDDEN)
    plain("model.norm.weight", HIDDEN)
    further = f"model.layers.{LAYERS}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        plain(f"{further}.{name}.weight", HIDDEN)
    plain(f"{further}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
    made[f"{further}.embed_tokens.weight"] = made["model.embed_tokens.weight"].copy()
    made[f"{further}.shared_head.head.weight"] = made["lm_head.weight"].copy()
    return made


def torch_dist(whole: dict[str, Array]) -> dict[str, Array]:
    """Megatron's form by plain numpy, the blocks' scales as the weights."""
    made: dict[str, Array] = {}
    for layer in range(LAYERS + 1):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        if layer == LAYERS:
            new = "mtp.layers.0.transformer_layer"
        made[f"{new}.input_layernorm.weight"] = whole[f"{old}.input_layernorm.weight"]
        norm = "pre_mlp_layernorm.weight" if layer else "mlp.linear_fc1.layer_norm_weight"
        made[f"{new}.{norm}"] = whole[f"{old}.post_attention_layernorm.weight"]
        to, of = f"{new}.self_attention.linear", f"{old}.self_attn"
        for part in ("q", "kv"):
            made[f"{to}_{part}_up_proj.layer_norm_weight"] = whole[f"{of}.{part}_a_layernorm.weight"]
        if layer:
            made[f"{new}.mlp.router.weight"] = whole[f"{old}.mlp.gate.weight"]
            made[f"{new}.mlp.router.expert_bias"] = whole[f"{old}.mlp.gate.e_score_correction_bias"]
        for tail in ("weight", "weight_scale_inv"):
            for a, b in (("q_down", "q_a"), ("q_up", "q_b"), ("kv_up", "kv_b")):
                made[f"{to}_{a}_proj.{tail}"] = whole[f"{of}.{b}_proj.{tail}"]
            made[f"{to}_kv_down_proj.{tail}"] = whole[f"{of}.kv_a_proj_with_mqa.{tail}"]
            made[f"{to}_proj.{tail}"] = whole[f"{of}.o_proj.{tail}"]

            def fused(part: str, tail: str = tail) -> Array:
                return np.concatenate([whole[f"{part}.{name}_proj.{tail}"] for name in ("gate", "up")])

            own = "mlp.shared_experts" if layer else "mlp"
            made[f"{new}.{own}.linear_fc1.{tail}"] = fused(f"{old}.{own}")
            made[f"{new}.{own}.linear_fc2.{tail}"] = whole[f"{old}.{own}.down_proj.{tail}"]
            if layer:
                experts = [f"{old}.mlp.experts.{e}" for e in range(EXPERTS)]
                both = f"{new}.mlp.experts.experts.linear"
                made[f"{both}_fc1.{tail}"] = np.stack([fused(expert) for expert in experts])
                made[f"{both}_fc2.{tail}"] = np.stack([whole[f"{expert}.down_proj.{tail}"] for expert in experts])
    for old, new in (("model.embed_tokens", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        made[f"{new}.weight"] = np.concatenate(
            [whole[f"{old}.weight"], np.zeros((2 * 128 - WORDS, HIDDEN), ml_dtypes.bfloat16)]
        )
    made["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
    for old, new in (
        ("shared_head.norm", "final_layernorm"),
        *((same, same) for same in ("enorm", "hnorm", "eh_proj")),
    ):
        made[f"mtp.layers.0.{new}.weight"] = whole[f"model.layers.{LAYERS}.{old}.weight"]
    return made


@pytest.mark.heavy
@pytest.mark.parametrize("has_further", [True, False])
def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_further: bool) -> None:
    whole, expected = model(), torch_dist(model())
    if not has_further:
        whole = {name: value for name, value in whole.items() if f".layers.{LAYERS}." not in name}
        expected = {name: value for name, value in expected.items() if not name.startswith("mtp.")}
    source, there, back = (str(tmp_path / name) for name in ("hf", "torch_dist", "back"))
    sw.save_checkpoint(source, whole, sync=False)
    config = Path(source, "config.json")
    config.write_text(json.dumps(CONFIG))
    rules = "torch_dist/deepseek-v3"
    assert main(["reshard", source, there, "--rules", rules, "--mesh", "tp=2", "--to", "dcp", "--no-sync"]) == 0
    with sw.open_checkpoint(there) as checkpoint:
        assert set(checkpoint) == set(expected)
        for name, value in expected.items():
            got = checkpoint.read(name)
            assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
        # Some of the columns of each expert on each rank.
        pieces = checkpoint["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"].pieces
        assert [(piece.box[2].start, piece.box[2].stop) for piece in pieces] == [(0, 128), (128, 256)]
    # It says that there are blocks, too.
    shutil.copy(config, there)
    assert main(["reshard", there, back, "--source-rules", rules, "--no-sync"]) == 0
    assert main(["diff", source, back]) == 0
    assert capsys.readouterr().err == ""


def test_an_embedding_that_differs_from_its_copy_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = model()
    whole[f"model.layers.{LAYERS}.embed_tokens.weight"][5, 7] += 1
    sw.save_checkpoint(tmp_path / "hf", whole, sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    arguments = [str(tmp_path / "hf"), str(tmp_path / "out"), "--rules", "torch_dist/deepseek-v3", "--mesh", "tp=2"]
    assert main(["reshard", *arguments, "--to", "dcp", "--no-sync"]) == 2
    assert "'embedding.word_embeddings.weight': replicas disagree" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
