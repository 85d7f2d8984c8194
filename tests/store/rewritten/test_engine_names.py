"""The names and dims that the restatement has are those of the engines themselves, where these are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw

from ...oracle import engines

ROOT = Path(__file__).parents[3]
#: Of each model what `transformers` calls its class; and its settings, besides those of all.
CLASSES = {
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": engines.EXPERTS}),
}
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": engines.LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
}


def dims(model: str, engine: str) -> dict[str, int]:
    whole = engines.hugging_face(model, 0)
    return {name: value.ndim for name, value in engines.ENGINES[engine](model, whole).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", CLASSES)
def test_hugging_face(tmp_path: Path, model: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    kind, extra = CLASSES[model]
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra)
    name = f"{kind}LMHeadModel" if model == "gpt2" else f"{kind}ForCausalLM"
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert {name: tensor.ndim for name, tensor in checkpoint.items()} == dims(model, "hf")


def test_megatron() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", "-m", "tests.oracle.megatron_names"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Megatron's own layers call the norm before the experts as that before one MLP; Transformer Engine's, which are
    # what models are trained with, do not.
    found["mixtral"]["decoder.layers.pre_mlp_layernorm.weight"] = found["mixtral"].pop(
        "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    )
    assert found == {model: dims(model, "torch_dist") for model in engines.HEADS}
