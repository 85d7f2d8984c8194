"""Folders that are written as Megatron's are loaded by Megatron-Core itself, on other ranks than the source's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main

from ..store.formats.test_megatron_states import unpacked
from . import engines

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dp_reshardable_pp_buckets", "core014_fully_sharded_model_space_tp"])
def test_megatron_loads_what_is_written(case: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks load a state of two stages, and one that 0.16.1 refuses as 0.14 wrote it."""
    pytest.importorskip("megatron.core")
    source = unpacked(case, tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "made", to="megatron")
    with sw.open_checkpoint(source) as checkpoint:
        weights = {name: tensor for name, tensor in checkpoint.items() if not name.startswith("optimizer.")}
        expected = {name: checkpoint.read(name).astype(np.float32) for name in weights}
        for name in weights:
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                had = [
                    f"optimizer.state.{name}.{'master' if kind == 'param' else kind}",
                    f"optimizer.state.{kind}.{name}",
                ]
                had.append(f"optimizer.state.fp32_param.{name}")
                expected[f"optimizer.state.{kind}.{name}"] = checkpoint.read(
                    next(each for each in had if each in checkpoint)
                )
        cuts = {
            name: (
                array.shape,
                weights[name].dtype if name in weights else "float32",
                array.ndim - 1 if array.ndim > 1 else None,
            )
            for name, array in expected.items()
        }
        steps = checkpoint.objects["optimizer.param_groups.0.step"].value()
    answer = tmp_path / "answer.npz"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.oracle.megatron_load",
        str(tmp_path / "made"),
        json.dumps(cuts),
    ]
    done = subprocess.run([*command, str(answer)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with np.load(answer) as found:
        assert json.loads(str(found["common"])) == [2, 2, [[0.01, 1.0, steps], [0.01, 0.0, steps]]]
        assert set(found.files) == {*expected, "common"}
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes()


@pytest.mark.slow
def test_megatron_loads_what_one_command_makes_of_hugging_face(tmp_path: Path) -> None:
    """For two stages of two ranks; what it loads is what its own names and orders of the model are."""
    pytest.importorskip("megatron.core")
    whole = engines.hugging_face("llama", 0)
    sw.save_checkpoint(tmp_path / "hf", whole, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**engines.config("llama"), "model_type": "llama"}))
    command = ["reshard", str(tmp_path / "hf"), str(tmp_path / "made"), "--for", "megatron(tp=2, pp=2)", "--no-sync"]
    assert main([*command, "--quiet"]) == 0
    expected = engines.ENGINES["torch_dist"]("llama", whole)
    cuts = {name: (array.shape, "float32", None) for name, array in expected.items()}
    answer = tmp_path / "answer.npz"
    command = [sys.executable, "-W", "ignore", "-m", "tests.oracle.megatron_load", str(tmp_path / "made")]
    done = subprocess.run([*command, json.dumps(cuts), str(answer)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with np.load(answer) as found:
        assert set(found.files) == {*expected, "common"}
        for name, array in expected.items():
            assert found[name].tobytes() == array.astype(np.float32).tobytes()
