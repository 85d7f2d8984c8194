"""What the README counts: the same work with other tools does run, ends the same, and has as many lines."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benches" / "elsewhere"


def lines(path: Path) -> int:
    """Lines with code: no blank ones, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())
    found: set[int] = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT)
        if token.type not in silent and not is_docstring:
            found.update(range(token.start[0], token.end[0] + 1))
        previous = previous if token.type in (tokenize.NL, tokenize.COMMENT) else token.type
    return len(found)


def test_the_readme_counts_right() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("by_hand.py", "with_dcp.py"):
        said = re.search(rf"\[(\d+) lines\]\(benches/elsewhere/{re.escape(name)}\)", readme)
        assert said is not None, name
        assert int(said[1]) == lines(FOLDER / name)
    said = re.search(r"\[(\d+) lines\]\(benches/elsewhere/shardwise\.sh\)", readme)
    assert said is not None
    assert int(said[1]) == lines(FOLDER / "shardwise.sh") + lines(FOLDER / "rules.toml")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (16, 16) for part in "qkvo"}
        shapes |= {f"{at}.mlp.{part}_proj.weight": (24, 16) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (16, 24), f"{at}.input_layernorm.weight": (16,)}
    path = tmp_path / "model.safetensors"
    sw.save_checkpoint(path, {name: rng.random(shape, np.float32) for name, shape in shapes.items()}, sync=False)
    return path


def run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_by_hand(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    run(tmp_path, sys.executable, str(FOLDER / "by_hand.py"), model.name, ".")
    assert sw.diff_checkpoints(model, tmp_path / "merged" / "rank0.safetensors") == []


@pytest.mark.slow
def test_with_pytorchs_distributed_checkpoints(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    script = str(FOLDER / "with_dcp.py")
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    run(tmp_path, *start, "4", script, "cut", model.name, "for-4")
    run(tmp_path, *start, "8", script, "again", "for-4", "for-8")
    run(tmp_path, sys.executable, script, "merge", "for-8", "merged.safetensors", model.name)
    assert sw.diff_checkpoints(model, tmp_path / "merged.safetensors") == []


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform == "win32", reason="a script of a POSIX shell")
def test_with_shardwise(model: Path, tmp_path: Path) -> None:
    command = tmp_path / "shardwise"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardwise "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(FOLDER / "shardwise.sh"), model.name, "."], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert sw.diff_checkpoints(model, tmp_path / "merged.safetensors") == []
