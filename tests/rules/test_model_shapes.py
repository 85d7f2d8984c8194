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


@pytest.mark.parametrize("file", sorted(DATA.glob("*.json.gz")), ids=lambda file: file.name.partition(".")[0])
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "more than"),
        ("hidden_size", -8, "it must be at least 1"),
        ("vocab_size", 2**62, "words is"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'"),
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
