"""Names and shapes from configurations, beside those of models that transformers wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.rules.model_shapes import model_shapes

from ..checks import refused

DATA = Path(__file__).parents[1] / "data" / "families"
#: Families whose tensors are not known from their configuration alone.
UNKNOWN = {"bert", "falcon", "gpt_neox", "mamba2", "nemotron_h"}
#: Without the layers that predict further tokens, which transformers does not write.
FILES = [file for file in sorted(DATA.glob("*.json.gz")) if "-mtp-" not in file.name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_as_transformers_writes_them(file: Path) -> None:
    said = json.loads(gzip.decompress(file.read_bytes()))
    family = said["config"]["model_type"]
    if family in UNKNOWN:
        with refused(sw.ParseError, f"model_type is '{family}'", "known of", "qwen3_moe"):
            model_shapes(said["config"])
        return
    assert model_shapes(said["config"]) == {name: tuple(shape) for name, shape in said["tensors"].items()}
    nested = {"model_type": "with_images", "text_config": said["config"]}
    assert model_shapes(nested) == model_shapes(said["config"])


def test_what_a_configuration_lacks_is_named() -> None:
    with refused(sw.LayoutError, "intermediate_size"):
        model_shapes(
            {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 4}
        )
    with refused(sw.ParseError, "model_type is None"):
        model_shapes({})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "more than"),
        ("hidden_size", -8, "it must be from 1 to"),
        ("vocab_size", 2**62, "words is"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'"),
        ("model_type", ["llama"], "model_type is ['llama']"),
        ("model_type", {}, "model_type is {}"),
    ],
)
def test_sizes_that_cannot_be(key: str, value: object, said: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 4,
    }
    with refused(sw.ParseError, said):
        model_shapes({**config, "intermediate_size": 16, key: value})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_next", "full_attention_interval", "4"),
        ("qwen3_next", "full_attention_interval", [4]),
        ("qwen3_next", "full_attention_interval", float("nan")),
        ("qwen3_next", "layer_types", "linear_attention"),
        ("qwen3_moe", "decoder_sparse_step", -2),
        ("qwen3_moe", "mlp_only_layers", {"0": 1}),
        ("deepseek_v3", "first_k_dense_replace", True),
        ("deepseek_v3", "moe_layer_freq", [1]),
        ("llama4_text", "interleave_moe_layer_step", 2.0),
        ("llama4_text", "moe_layers", 3),
    ],
)
def test_what_layers_are_is_said_by_numbers_and_lists(family: str, key: str, value: object) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 4, "intermediate_size": 16}
    with refused(sw.ParseError, f"{key} is {value!r}"):
        model_shapes({"model_type": family, "n_routed_experts": 2, **sizes, key: value})


def test_a_number_that_is_null_is_not_there() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 4, "head_dim": 4}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "num_experts": 2, "moe_intermediate_size": 8}
    null = {"decoder_sparse_step": None, "mlp_only_layers": None}
    assert model_shapes(config) == model_shapes(config | null)
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in model_shapes(config)
