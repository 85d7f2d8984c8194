"""The examples: the demo runs, and the rules fit the models they are made for, of every size."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main

from ..cli.conftest import Tensors, write_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_demo(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / "demo.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=3600)


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


def gpt2(prefix: str, **sizes: int) -> Tensors:
    arrays = runpy.run_path(str(EXAMPLES / "demo.py"))["gpt2_tensors"](**sizes)
    return {prefix + name: ("F32", array.shape) for name, array in arrays.items()}


@pytest.mark.parametrize("mesh", ["model=4", "data=2,model=4", "model=2,data=3"])
@pytest.mark.parametrize(
    ("rules", "tensors"),
    [
        ("bert", bert(layers=6, width=384)),
        ("bert", {f"bert.{name}": info for name, info in bert(layers=2, width=768).items()}),
        ("gpt2", gpt2("", layers=2, width=64, context=8)),
        ("gpt2", gpt2("transformer.", layers=2, width=96, context=8)),
    ],
    ids=["minilm", "bert", "gpt2", "gpt2-lm"],
)
def test_rules_fit_their_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rules: str, tensors: Tensors, mesh: str
) -> None:
    file = write_checkpoint(tmp_path / "model.safetensors", tensors)
    status = main(["report", str(file), "--mesh", mesh, "--rules", rules, "--strict"])
    said = capsys.readouterr().out
    # The rules cut along `model` only; an axis besides is said, and is all that is.
    has_data = "data" in mesh
    assert (status, said.count("warning"), said.count("error:")) == (has_data, 0, has_data)
    assert said.count("uses the axis 'data'") == has_data


@pytest.mark.heavy
def test_the_demo() -> None:
    done = run_demo()
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning" not in done.stdout
    for text in (
        "target/demo/model.safetensors stays there",
        "82 tensors",
        "cpu:3",
        "bit for bit",
        "no element was copied",
    ):
        assert text in done.stdout


@pytest.mark.heavy
def test_the_demo_on_a_checkpoint_of_ones_own(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "model.safetensors", bert(layers=2, width=32))
    done = run_demo(file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "by the rules of bert?" in done.stdout
    assert "bit for bit" in done.stdout
    uncut = run_demo(write_checkpoint(tmp_path / "other.safetensors", {"x": ("F32", (3,)), "y": ("F4", (4,))}))
    assert uncut.returncode == 0
    assert "cut no tensor" in uncut.stdout
    for wrong in (tmp_path / "gone", EXAMPLES):
        done = run_demo(wrong)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith("demo: ")


def test_the_demo_ends_where_a_check_fails() -> None:
    demo: dict[str, Any] = runpy.run_path(str(EXAMPLES / "demo.py"))
    with pytest.raises(SystemExit, match="demo: a shard was copied"):
        demo["check"](False, "a shard was copied")
