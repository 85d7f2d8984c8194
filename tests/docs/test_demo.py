"""The demo: on a model of its own and on a checkpoint of the user's."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import bert, write_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_demo(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / "demo.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=3600)


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
