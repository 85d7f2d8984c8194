"""Layouts that do not do what they seem to say: the report of a reshard warns of them, `strict` refuses them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main

#: These tests are about what is said so, in the reports and in other ways.
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")

LLAMA = {f"model.layers.{i}.self_attn.q_proj.weight": np.ones((8, 8), "f4") for i in (0, 1)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "llama.safetensors", LLAMA, sync=False)
    return tmp_path / "llama.safetensors"


def command(source: Path, target: Path, *options: object, verb: str = "reshard") -> int:
    return main([verb, str(source), str(target), "--no-sync", *map(str, options)])


def test_rules_of_another_model(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = ["--rules", "gpt2", "--mesh", "model=4"]
    assert command(source, tmp_path / "out", *gpt2) == 0
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("shardwise: warning: ") for line in said)
    assert [line for line in said if " rules apply to no name: " in line] == said[1:]
    assert sum("2 names match no rule" in line for line in said) == 1
    for more in ([], ["--workers", "2"], ["--save", tmp_path / "a.swplan"]):
        assert command(source, tmp_path / "none", *gpt2, *more, verb="plan") == 0
        assert capsys.readouterr().err.splitlines() == said
    for verb in ("reshard", "plan"):
        assert command(source, tmp_path / "none", *gpt2, "--strict", verb=verb) == 1
        refused = capsys.readouterr()
        assert refused.out == ""
        assert refused.err.splitlines() == [line.replace("warning", "error", 1) for line in said]
    assert not (tmp_path / "none").exists()


def test_one_misspelt_rule(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "[mesh]\nshape = [2]\naxis_names = ['tp']\n[rules]\n'q_proj' = ['tp', []]\n'v_porj' = ['tp', []]\n"
    )
    assert command(source, tmp_path / "out", "--rules", rules, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["warnings"] == ["rule 'v_porj' applies to no name"]
    assert printed.err == "shardwise: warning: rule 'v_porj' applies to no name\n"


def test_a_rule_for_tensors_that_are_left_out_is_not_unused(source: Path, tmp_path: Path) -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    rules[r"layers\.0"] = ("tp", None)
    rules[r"layers\.1"] = ("tp", None)
    assert sw.reshard_checkpoint(source, tmp_path / "out", rules, only="layers.1").warnings == ()


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_a_mesh_for_what_is_written_whole(source: Path, tmp_path: Path, form: str) -> None:
    rules = {name: sw.TensorLayout(("tp", None), sw.DeviceMesh((2,), ("tp",))) for name in LLAMA}
    suffix = ".safetensors" if form == "safetensors" else ""
    target = tmp_path / f"out{suffix}"
    to = None if suffix else form
    with pytest.raises(sw.LayoutError, match=f"the layouts cut 2 tensors, but '{form}' holds tensors whole"):
        sw.reshard_checkpoint(source, target, rules, to=to, strict=True)  # type: ignore[arg-type]
    assert not target.exists()
    outline = sw.plan_checkpoint(source, target, rules, to=to).outline()  # type: ignore[arg-type]
    report = sw.reshard_checkpoint(source, target, rules, to=to)  # type: ignore[arg-type]
    assert outline.warnings == report.warnings != ()


def test_layouts_for_names_that_are_not_there(source: Path, tmp_path: Path) -> None:
    layouts = {"model.norm": sw.TensorLayout(("tp",), sw.DeviceMesh((2,), ("tp",)))}
    report = sw.reshard_checkpoint(source, tmp_path / "out", layouts)
    assert report.warnings == ("layouts has a name that no tensor has: 'model.norm'",)
    plan = sw.plan_checkpoint(source, tmp_path / "other", layouts)
    assert plan.warnings == report.warnings
    with pytest.raises(sw.LayoutError, match=r"model\.norm"):
        sw.plan_checkpoint(source, tmp_path / "other", layouts, strict=True)


def test_a_rename_that_changes_no_name(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each after those before it: what an earlier one has replaced is no longer there."""
    said = f"rename has {{!r}}, which changes no name of {source}"
    for verb in ("reshard", "plan"):
        renames = "--rename", r"^model\.=", "--rename", r"^model\.=m.", "--rename", "q_prj=q", "--rename", "q_proj=q"
        assert command(source, tmp_path / verb, *renames, verb=verb) == 0
        lines = capsys.readouterr().err.splitlines()
        assert lines == [f"shardwise: warning: {said.format(text)}" for text in (r"^model\.", "q_prj")]
    with sw.open_checkpoint(tmp_path / "reshard") as checkpoint:
        assert sorted(checkpoint) == [f"layers.{i}.self_attn.q.weight" for i in (0, 1)]
    assert command(source, tmp_path / "none", "--rename", "q_prj=q", "--strict") == 1
    assert capsys.readouterr().err == f"shardwise: error: {said.format('q_prj')}\n"
    assert not (tmp_path / "none").exists()
