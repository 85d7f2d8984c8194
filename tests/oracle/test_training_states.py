"""The command that compares training states finds what is equal, what differs, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw

from .corpora import main
from .training_states import compare_case, folders

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
STATES = {"exp_avg": WEIGHT + 1, "exp_avg_sq": WEIGHT + 2}


@pytest.fixture
def case(tmp_path: Path) -> Path:
    folder = tmp_path / "torch" / "adamw"
    folder.mkdir(parents=True)
    arrays: dict[str, Any] = {f"w::{kind}": array for kind, array in {"weight": WEIGHT, **STATES}.items()}
    said = {name[3:]: {"npz": name, "dtype": "float32", "shape": [2, 3]} for name in arrays}
    parameter = {"weight": said.pop("weight"), "state": said, "step": 2.0, "aliases": ["tied"]}
    (folder / "expected.json").write_text(json.dumps({"parameters": {"w": parameter}}), encoding="utf-8")
    np.savez(folder / "expected.npz", **arrays)
    return folder


def tensors() -> dict[str, np.ndarray]:
    named = {f"optim.state.w.{kind}": array for kind, array in STATES.items()}
    return {"model.w": WEIGHT, **named, "optim.state.w.step": np.array(2, np.float32)}


def said(case: Path) -> str:
    ((name, states),) = compare_case(case)
    assert name == "checkpoint"
    return str(states)


def test_equal(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(case / "checkpoint", tensors(), sync=False)
    assert said(case) == "4 equal, 0 different, 0 missing"
    assert main([str(case.parent.parent)]) == 0
    assert capsys.readouterr().out == (
        "torch/adamw checkpoint: 4 equal, 0 different, 0 missing\n1 checkpoints, 1 equal\n"
    )
    assert folders(case.parent.parent, ["torch"]) == folders(case.parent.parent, ["torch/adamw"]) == [case]
    assert folders(case.parent.parent, ["dcp"]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optim.state.w.exp_avg": STATES["exp_avg_sq"]}, "3 equal, 1 different, 0 missing; w, exp_avg is different"),
        ({"optim.state.w.exp_avg": STATES["exp_avg"].astype(np.float64)}, "3 equal, 1 different, 0 missing; w, exp"),
        ({"optim.state.w.exp_avg": STATES["exp_avg"].reshape(3, 2)}, "3 equal, 1 different, 0 missing; w, exp_avg is"),
        ({"optim.state.w.step": np.array(3, np.float32)}, "3 equal, 1 different, 0 missing; w, step is different"),
        ({"optim.state.w.step": None}, "3 equal, 0 different, 1 missing; w, step is missing"),
        ({"model.w": None}, "3 equal, 0 different, 1 missing; w, weight is missing"),
        ({"model.tied": WEIGHT + 1}, "4 equal, 1 different, 0 missing; tied, weight is different"),
        ({"model.tied": WEIGHT}, "5 equal, 0 different, 0 missing"),
    ],
)
def test_what_differs(case: Path, changes: dict[str, np.ndarray | None], expected: str) -> None:
    changed = {name: array for name, array in {**tensors(), **changes}.items() if array is not None}
    sw.save_checkpoint(case / "checkpoint", changed, sync=False)
    assert said(case).startswith(expected)


def test_refused(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case / "checkpoint").mkdir()
    (case / "checkpoint" / "a").touch()
    (case / "checkpoint" / "b").touch()
    assert said(case).startswith("refused: ")
    assert main([str(case.parent.parent)]) == 1
    assert capsys.readouterr().out.endswith("1 checkpoints, 0 equal\n")
