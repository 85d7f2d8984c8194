import math
from pathlib import Path

import pytest

from shardwise._dtypes import CODES
from shardwise.cli import main

from ..store.conftest import encode

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_checkpoint(path: Path, tensors: Tensors) -> Path:
    """A safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * CODES[dtype].bits // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    data = encode(header)
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(len(data) + end)
    return path


def bert(layers: int, width: int, vocabulary: int = 30522) -> Tensors:
    """Names and shapes as transformers' BertModel saves them."""
    tensors: Tensors = {
        "embeddings.position_ids": ("I64", (1, 512)),
        "embeddings.word_embeddings.weight": ("F32", (vocabulary, width)),
        "embeddings.position_embeddings.weight": ("F32", (512, width)),
        "embeddings.token_type_embeddings.weight": ("F32", (2, width)),
    }
    linear = {
        **{f"attention.self.{name}": (width, width) for name in ("query", "key", "value")},
        "attention.output.dense": (width, width),
        "intermediate.dense": (4 * width, width),
        "output.dense": (width, 4 * width),
    }
    dense = {f"encoder.layer.{layer}.{name}": shape for layer in range(layers) for name, shape in linear.items()}
    for name, (rows, columns) in {**dense, "pooler.dense": (width, width)}.items():
        tensors |= {f"{name}.weight": ("F32", (rows, columns)), f"{name}.bias": ("F32", (rows,))}
    blocks = [f"encoder.layer.{layer}.{part}" for layer in range(layers) for part in ("attention.output", "output")]
    for name in ["embeddings", *blocks]:
        tensors |= {f"{name}.LayerNorm.{part}": ("F32", (width,)) for part in ("weight", "bias")}
    return tensors


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardwise: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    """Three layers with names as GPT-2 has them."""
    tensors: Tensors = {}
    for layer in (0, 1, 2):
        tensors[f"h.{layer}.attn.c_attn.weight"] = ("F32", (16, 48))
        tensors[f"h.{layer}.ln_1.bias"] = ("F32", (16,))
    tensors["wte.weight"] = ("BF16", (50, 16))
    return write_checkpoint(tmp_path / "gpt.safetensors", tensors)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(
        r"""
        [rules]
        'c_attn\.weight$' = [[], "model"]
        'ln_\d\.bias$' = [[]]
        'wte' = [[], ["data", "model"]]
        """
    )
    return path
