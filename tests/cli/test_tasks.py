"""The commands of plans: plan, run and commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from tests.store.tasks import saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path)


@pytest.mark.heavy
def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.toml").write_text('[rules]\nwide = ["x", []]\n')

    def run(*arguments: object, status: int = 0) -> str:
        assert main([*map(str, arguments)]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    rules = (tmp_path / "rules.toml", "--mesh", "x=4", "--task-bytes", "64KiB")
    common = ("plan", source, tmp_path / "new", "--rules", *rules)
    if "error" in (text := run(*common, "--workers", 4)):
        raise AssertionError(text)
    assert "1/4" in text
    assert "4 parts: each reads" in text
    assert not (tmp_path / "new").exists()
    assert "tasks of up to" in run(*common, "--save", tmp_path / "new.swplan")
    nothing = run("commit", tmp_path / "new.swplan", status=2)
    assert nothing.endswith("; `shardwise run` without --part, or CheckpointPlan.run(), does them\n")
    assert json.loads(run("run", tmp_path / "new.swplan", "--part", "2/2", "--json", "--quiet"))["tasks"] > 1
    missing = run("commit", tmp_path / "new.swplan", status=2)
    assert "are missing: 0" in missing
    assert missing.endswith("; run again part 1/2\n")
    assert "PART/PARTS" in run("run", tmp_path / "new.swplan", "--part", "2", status=2)
    assert "counted from 1" in run("run", tmp_path / "new.swplan", "--part", "3/2", status=2)
    assert "done" in run("run", tmp_path / "new.swplan", "--quiet")
    assert "were done before" in run("run", tmp_path / "new.swplan", "--quiet")
    assert "tensors" in run("commit", tmp_path / "new.swplan", "--check")
    assert "the checkpoint is finished" in run("run", tmp_path / "new.swplan", "--quiet")
    assert run("diff", source, tmp_path / "new", "--quiet").strip() == "the same tensors"
    other = ("plan", source, tmp_path / "other", "--rules", *rules, "--dtype", "float16")
    assert "in all" not in run(*other)
    for option in (("--save", "p"), ("--workers", 4)):
        assert "is converted; tasks copy bytes" in run(*other, *option, status=2)
    assert not (tmp_path / "p").exists()
