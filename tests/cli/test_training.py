"""Weights and training state apart on the command line: totals, and each of the two alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from tests.store.tasks import files

TENSORS = {
    "model.w": np.ones((2, 3), "f4"),
    "model.frozen": np.ones(2, "f4"),
    "optim.state.w.exp_avg": np.full((2, 3), 2, "f4"),
    "optim.state.w.step": np.array(7, "f4"),
}
TOTALS = "2 weights, 32 B; training state: 2 tensors, 28 B (1 exp_avg, 24 B; 1 step, 4 B)"
COUNTS = {
    "weights": {"tensors": 2, "bytes": 32},
    "state": {
        "tensors": 2,
        "bytes": 28,
        "kinds": {"exp_avg": {"tensors": 1, "bytes": 24}, "step": {"tensors": 1, "bytes": 4}},
    },
}
RULES = 'default = "replicated"\nreplicated = ["tp"]\n[rules]\n[mesh]\nshape = [2]\naxis_names = ["tp"]\n'
BARE = "1 weight is without an optimizer state, as if it was frozen or tied: 'model.frozen'"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    sw.save_checkpoint("a.safetensors", TENSORS, sync=False)

    def run(*arguments: str) -> tuple[int, list[str], str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


def test_inspect(run: Any) -> None:
    status, lines, _ = run("inspect", "a.safetensors")
    assert (status, lines[1], lines[-1]) == (0, TOTALS, BARE)
    status, lines, _ = run("inspect", "a.safetensors", "--strict")
    assert (status, lines[-1]) == (1, f"error: {BARE}")
    status, lines, said = run("inspect", "a.safetensors", "--json")
    found = json.loads("\n".join(lines))
    assert (status, said, found["training"]) == (0, "", COUNTS)
    assert [each["kind"] for each in found["left_out"]] == ["untrained"]
    kinds = {name: (tensor.get("state"), tensor.get("weight")) for name, tensor in found["tensors"].items()}
    assert kinds == {
        "model.w": (None, None),
        "model.frozen": (None, None),
        "optim.state.w.exp_avg": ("exp_avg", "model.w"),
        "optim.state.w.step": ("step", "model.w"),
    }
    status, _, said = run("inspect", "a.safetensors", "--json", "--strict")
    assert (status, said) == (1, f"shardwise: error: {BARE}\n")


def test_verify(run: Any) -> None:
    assert run("verify", "a.safetensors")[1][1] == TOTALS
    assert json.loads(run("verify", "a.safetensors", "--json")[1][0])["training"] == COUNTS
    status, lines, _ = run("verify", "a.safetensors", "--weights-only", "--strict")
    assert status == 0
    assert lines[0] == "a.safetensors: safetensors, 2 tensors, 32 B: all 2 digests are right"
    assert lines[1].startswith("2 tensors are left out, as --weights-only says: ")
    assert run("verify", "a.safetensors", "--state-only")[1][1].startswith("0 weights, 0 B; training state: 2 tensors")


def test_reshard_and_diff(run: Any) -> None:
    for option, names in (("--weights-only", ("model.w", "model.frozen")), ("--state-only", tuple(TENSORS)[2:])):
        target = f"{option[2:]}.safetensors"
        assert run("reshard", "a.safetensors", target, option, "--no-sync", "--strict")[0] == 0
        with sw.open_checkpoint(target) as made:
            assert set(made) == set(names)
        same = "the same weights" if option == "--weights-only" else "the same training state"
        status, lines, _ = run("diff", "a.safetensors", target, option, "--strict")
        assert (status, lines[0]) == (0, same)
        status, lines, _ = run("diff", "a.safetensors", target)
        assert status == 1
    assert lines[:2] == ["'model.frozen' is only in the first checkpoint", "'model.w' is only in the first checkpoint"]
    lines = run("diff", "a.safetensors", "weights-only.safetensors")[1]
    assert lines[-1] == "the second has no training state; the first has 2 tensors of it"
    (*_, row) = json.loads(run("diff", "a.safetensors", "weights-only.safetensors", "--json")[1][0])
    assert row == {
        "name": None,
        "what": "training",
        "first": COUNTS,
        "second": {"weights": COUNTS["weights"], "state": {"tensors": 0, "bytes": 0, "kinds": {}}},
        "text": lines[-1],
    }
    assert run("diff", "a.safetensors", "a.safetensors")[1] == [
        "the same tensors: 2 weights and 2 of the training state"
    ]
    status, _, said = run("verify", "weights-only.safetensors", "--state-only")
    assert (status, said) == (
        2,
        "shardwise: error: --state-only, but weights-only.safetensors has no training state that is recognised by its "
        "names\n",
    )
    lonely = "warning: 2 optimizer states are there without their weights: "
    assert run("verify", "state-only.safetensors")[1][-1].startswith(lonely)
    assert run("verify", "state-only.safetensors", "--strict")[0] == 1
    assert run("verify", "state-only.safetensors", "--state-only", "--strict")[0] == 0


def test_extract_and_plan(run: Any) -> None:
    Path("rules.toml").write_text(RULES, encoding="utf-8")
    rules = "--rules", "rules.toml"
    status, _, said = run("extract", "a.safetensors", "r", *rules, "--rank", "0", "--weights-only", "--no-sync")
    assert (status, said) == (0, "")
    assert set(sw.open_checkpoint("r", part=True)) == {"model.w", "model.frozen"}
    planned = json.loads("\n".join(run("plan", "a.safetensors", "p", "--state-only", "--json")[1]))
    assert [(each["kind"], each["count"]) for each in planned["left_out"]] == [("asked", 2)]


def test_report(run: Any) -> None:
    Path("rules.toml").write_text(RULES, encoding="utf-8")
    _, lines, _ = run("report", "a.safetensors", "--rules", "rules.toml")
    assert TOTALS in lines
    found = json.loads("\n".join(run("report", "a.safetensors", "--rules", "rules.toml", "--json")[1]))
    assert found["training"] == COUNTS


def test_both(run: Any) -> None:
    assert "not allowed with argument" in run("verify", "a.safetensors", "--weights-only", "--state-only")[2]


def test_files_of_ranks_of_fsdp2_need_no_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fully_shard` cuts every tensor alike: dim 0 over the last axis of the mesh, most rows on the first ranks."""
    source, new = tmp_path / "a.safetensors", tmp_path / "new"
    tensors = {"b": np.arange(1, dtype="f4"), "w": np.arange(10, dtype="f4").reshape(5, 2)}
    sw.save_checkpoint(source, tensors, sync=False)
    assert main(["reshard", str(source), str(new), "--to", "fsdp2", "--mesh", "ddp=2,fsdp=3", "--no-sync"]) == 0
    assert "warning" not in capsys.readouterr().err
    with sw.open_checkpoint(new) as checkpoint:
        rows = [[piece.box[0].start, piece.box[0].stop] for piece in checkpoint["w"].pieces]
        assert rows == [[0, 2], [2, 4], [4, 5]]
        assert len(checkpoint["w"].replicas) == 3
        assert all((checkpoint.read(name) == value).all() for name, value in tensors.items())
    mesh = sw.DeviceMesh((2, 3), ("ddp", "fsdp"))
    sw.reshard_checkpoint(source, tmp_path / "python", mesh=mesh, to="fsdp2", sync=False)
    sw.save_checkpoint(tmp_path / "saved", tensors, mesh=mesh, to="fsdp2", sync=False)
    for other in ("python", "saved"):
        assert files(tmp_path / other) == files(new)
