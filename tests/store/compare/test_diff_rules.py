"""Somebody else's conversion is checked: one checkpoint by its rules against another, without writing anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from tests.checks import swapped

from ...oracle import engines

Tensors = dict[str, np.ndarray[Any, Any]]


def written(folder: Path, model: str = "llama", engine: str = "vllm") -> tuple[Path, Path, Tensors]:
    """A model in Hugging Face's form, and its conversion as an engine makes it."""
    whole = engines.hugging_face(model, 0)
    sw.save_checkpoint(folder / "hf", whole, sync=False)
    (folder / "hf" / "config.json").write_text(json.dumps(engines.config(model)))
    converted = {name: value.copy() for name, value in engines.ENGINES[engine](model, whole).items()}
    return folder / "hf", folder / "converted", converted


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("engine", ["vllm", "torch_dist"])
def test_a_right_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, engine: str) -> None:
    source, target, converted = written(tmp_path, model, engine)
    sw.save_checkpoint(target, converted, sync=False)
    rules = f"{engine}/{model}"
    assert main(["diff", str(source), str(target), "--rules", rules, "--quiet"]) == 0
    assert capsys.readouterr().out == "the same tensors\n"
    config = str(source / "config.json")
    assert main(["diff", str(target), str(source), "--source-rules", rules, "--config", config, "--quiet"]) == 0


def gate_and_up(converted: Tensors) -> tuple[str, list[tuple[int, int]]]:
    name = "model.layers.1.mlp.gate_up_proj.weight"
    half = len(converted[name]) // 2
    swapped(converted[name], slice(half), slice(half, 2 * half))
    return name, [(0, 2 * half)]


def two_heads(converted: Tensors) -> tuple[str, list[tuple[int, int]]]:
    name, d = "model.layers.0.self_attn.qkv_proj.weight", engines.HEADS["llama"][2]
    swapped(converted[name], slice(d, 2 * d), slice(3 * d, 4 * d))
    return name, [(d, 2 * d), (3 * d, 4 * d)]


@pytest.mark.parametrize("plant", [gate_and_up, two_heads])
def test_a_planted_swap_is_named_with_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: Callable[[Tensors], tuple[str, list[tuple[int, int]]]]
) -> None:
    source, target, converted = written(tmp_path)
    name, rows = plant(converted)
    sw.save_checkpoint(target, converted, sync=False)
    assert main(["diff", str(source), str(target), "--rules", "vllm/llama", "--quiet"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{name!r}: ")
    assert said.count("\n") == 1
    assert f"in the rows {', '.join(f'{start}:{stop}' for start, stop in rows)}" in said
    assert main(["diff", str(source), str(target), "--rules", "vllm/llama", "--quiet", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["rows"] == [list(one) for one in rows]


def test_rows_of_a_difference(tmp_path: Path) -> None:
    one, other = np.zeros((40, 3), "i4"), np.zeros((40, 3), "i4")
    other[[0, 1, 7, 39], [0, 2, 1, 2]] = 5
    vector = np.arange(4.0)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": one, "v": vector})
    sw.save_checkpoint(tmp_path / "b.safetensors", {"w": other, "v": vector[::-1].copy()})
    found = {one.name: one for one in sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")}
    assert (found["w"].rows, found["w"].count, found["v"].rows) == (((0, 2), (7, 8), (39, 40)), 4, ())
    other[:] = np.arange(40)[:, None] % 2  # More ranges than are named.
    sw.save_checkpoint(tmp_path / "c.safetensors", {"w": other, "v": vector})
    (many,) = sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert many.rows == tuple((2 * i + 1, 2 * i + 2) for i in range(8))
    assert str(many).endswith("15:16 and more")


def test_rewrites_that_do_not_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, converted = written(tmp_path)
    sw.save_checkpoint(target, converted, sync=False)
    config = str(source / "config.json")
    assert main(["diff", str(target), str(source), "--rules", "vllm/llama", "--config", config, "--quiet"]) == 2
    assert "rewrite" in capsys.readouterr().err
    with pytest.raises(TypeError, match="rewrites must be a Rewrites"):
        sw.diff_checkpoints(source, target, rewrites="vllm/llama")  # type: ignore[arg-type]
