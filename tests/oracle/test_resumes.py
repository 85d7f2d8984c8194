"""Runs that are moved go on in another framework's loader: one more step gives the parameters of the run itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")]


def run(world: int, *jobs: tuple[str, str, Path, Path]) -> None:
    """Let so many processes do what they are told, one after the other."""
    pytest.importorskip("torch")
    if any("zero" in framework for _, framework, _, _ in jobs):
        pytest.importorskip("deepspeed")
    said = json.dumps([[what, framework, str(folder), str(answer)] for what, framework, folder, answer in jobs])
    command = [sys.executable, "-W", "ignore", "-m", "tests.oracle.resumes", str(world), said]
    paths = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def check(found: Path, expected: Path) -> None:
    """All parameters are equal bit by bit."""
    with np.load(found) as ours, np.load(expected) as theirs:
        assert set(ours.files) == set(theirs.files)
        differ = [name for name in theirs.files if ours[name].tobytes() != theirs[name].tobytes()]
        assert not differ, {name: float(abs(ours[name] - theirs[name]).max()) for name in differ}


def test_runs_of_one_process(tmp_path: Path) -> None:
    """PyTorch to ZeRO 1 to 3, ZeRO 2 to PyTorch and to ZeRO 3, bfloat16 with master copies to PyTorch in float32."""
    for name in ("torch", "zero2", "bf16"):
        (tmp_path / name).mkdir()
    run(
        1,
        ("begin", "torch", tmp_path / "torch", tmp_path / "torch.npz"),
        ("begin", "zero2", tmp_path / "zero2", tmp_path / "zero2.npz"),
        ("begin", "zero1-bf16", tmp_path / "bf16", tmp_path / "bf16.npz"),
    )
    sw.reshard_checkpoint(tmp_path / "torch" / "run.pt", tmp_path / "from-torch", to="universal")
    sw.reshard_checkpoint(tmp_path / "zero2" / "run", tmp_path / "from-zero", to="universal")
    for name, source in (("to-torch", "zero2"), ("to-float32", "bf16")):
        (tmp_path / name).mkdir()
        sw.reshard_checkpoint(tmp_path / source / "run", tmp_path / name / "run.pt")
    resumed = {
        "zero1": ("from-torch", "torch"),
        "zero2": ("from-torch", "torch"),
        "zero3": ("from-zero", "zero2"),
        "torch": ("to-torch", "zero2"),
    }
    run(
        1,
        *(
            ("resume", framework, tmp_path / folder, tmp_path / f"{framework}-resumed.npz")
            for framework, (folder, _) in resumed.items()
        ),
        ("resume", "torch", tmp_path / "to-float32", tmp_path / "float32-resumed.npz"),
    )
    for framework, (_, source) in resumed.items():
        check(tmp_path / f"{framework}-resumed.npz", tmp_path / f"{source}.npz")
    check(tmp_path / "float32-resumed.npz", tmp_path / "bf16.npz")


def test_runs_of_two_processes(tmp_path: Path) -> None:
    """FSDP2 to ZeRO and to files of ranks, ZeRO 2 to FSDP2 in all forms: on two ranks from one or two."""
    for name in ("dcp", "zero2"):
        (tmp_path / name).mkdir()
    run(
        2,
        ("begin", "dcp", tmp_path / "dcp", tmp_path / "dcp.npz"),
        ("begin", "zero2", tmp_path / "zero2", tmp_path / "zero2.npz"),
    )
    mesh = sw.DeviceMesh((2,), ("fsdp",))
    moved = {
        "zero2": ("dcp", "universal"),
        "zero3": ("dcp", "universal"),
        "dcp": ("zero2", "dcp"),
        "torchtitan": ("zero2", "dcp"),
        "fsdp2": ("zero2", "fsdp2"),
    }
    for framework, (source, to) in moved.items():
        more = {"mesh": mesh} if to == "fsdp2" else {}
        sw.reshard_checkpoint(tmp_path / source / "run", tmp_path / f"to-{framework}", to=to, **more)  # type: ignore[arg-type]
    run(
        2,
        *(
            ("resume", framework, tmp_path / f"to-{framework}", tmp_path / f"{framework}-resumed.npz")
            for framework in moved
        ),
    )
    for framework, (source, _) in moved.items():
        check(tmp_path / f"{framework}-resumed.npz", tmp_path / f"{source}.npz")
