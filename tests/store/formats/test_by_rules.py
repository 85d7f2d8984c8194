"""Bare files of ranks are one checkpoint by the rules of their mesh; what does not add up is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule

from ...oracle.families.models import numbered, read


@pytest.mark.parametrize("model", ["llama-1", "gemma2-0", "qwen2-0", "mixtral-0"])
def test_what_an_engine_saved_goes_back_to_hugging_face(tmp_path: Path, model: str) -> None:
    """Files of vLLM's loader, of which nothing but names and arrays is left: fused, padded, repeated heads."""
    said = read(model)
    tensors = {name: value.view(np.float32) for name, value in numbered(said["tensors"]).items()}
    sw.save_checkpoint(tmp_path / "hf", tensors, to="hf", sync=False)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(said["config"]))
    family = model.rpartition("-")[0]
    for ranks in (2, 4):
        if "refused" in said["engines"]["vllm"]["ranks"][str(ranks)]:
            continue
        there, bare = tmp_path / f"vllm-{ranks}", tmp_path / f"bare-{ranks}"
        command = ["reshard", str(tmp_path / "hf"), str(there), "--for", f"vllm({ranks})", "--no-sync", "--quiet"]
        assert main(command) == 0
        bare.mkdir()
        for file in there.glob("model-rank-*.safetensors"):
            save_file(load_file(file), bare / file.name)  # Without the metadata.
        back = ["reshard", str(bare), str(tmp_path / f"back-{ranks}"), "--to", "hf", "--no-sync", "--quiet"]
        back += ["--source-rules", f"vllm/{family}", "--config", str(config)]
        assert main([*back, "--source-mesh", f"tp={ranks}"]) == 0
        found = sw.diff_checkpoints(tmp_path / "hf", tmp_path / f"back-{ranks}")
        assert [one for one in found if one.name != "lm_head.weight"] == []
        assert main([*back, "--source-mesh", f"tp={ranks * 2}"]) == 2


def ranks_of(path: Path, cut: dict[str, int], whole: dict[str, np.ndarray], count: int = 2) -> None:
    path.mkdir()
    for rank in range(count):
        own = {n: np.split(a, count, cut[n])[rank] if n in cut else a for n, a in whole.items()}
        save_file({n: np.ascontiguousarray(a) for n, a in own.items()}, path / f"consolidated.{rank:02}.safetensors")


WHOLE = {
    "w": np.arange(32, dtype="f4").reshape(8, 4),
    "v": np.arange(16, dtype="f4").reshape(4, 4),
    "n": np.ones(3, "f4"),
}


def rules(count: int = 2) -> sw.LayoutMap:
    made = sw.LayoutMap(sw.DeviceMesh((count,), ("tp",)))
    made["^w$"], made["^v$"], made["^n$"] = ("tp", None), (None, "tp"), (None,)
    return made


def test_files_are_put_together(tmp_path: Path) -> None:
    ranks_of(tmp_path / "a", {"w": 0, "v": 1}, WHOLE)
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", source_layouts=rules(), to="hf", sync=False)
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert all(np.array_equal(checkpoint.read(name), array) for name, array in WHOLE.items())
        assert set(checkpoint) == set(WHOLE)
    plan = sw.plan_checkpoint(tmp_path / "a", tmp_path / "c", source_layouts=rules(), to="hf")
    plan.run(sync=False)
    plan.commit(sync=False)
    assert sw.diff_checkpoints(tmp_path / "b", tmp_path / "c") == []


def test_what_does_not_add_up_is_named(tmp_path: Path) -> None:
    ranks_of(tmp_path / "a", {"w": 0, "v": 1}, WHOLE)
    second = tmp_path / "a" / "consolidated.01.safetensors"
    good = load_file(second)

    def refused(pattern: str, layouts: Any = None, **changed: np.ndarray | None) -> None:
        held = {name: value for name, value in {**good, **changed}.items() if value is not None}
        save_file(held, second)
        with pytest.raises((sw.ParseError, sw.LayoutError), match=pattern):
            sw.reshard_checkpoint(tmp_path / "a", tmp_path / "no", source_layouts=layouts or rules(), to="hf")
        save_file(good, second)

    rows = np.ones((5, 2), "f4")
    refused("'v' is of shape .5, 2. on rank 1, but the rules give it .4, 2. of the whole, .4, 4.", v=rows)
    refused("rank 1 .cpu:1. lacks tensor 'w'", w=None)
    refused("tensor 'w' is float32 of shape .4, 4. on rank 0, and float64", w=np.ones((4, 4)))
    refused("'n'.*(disagree|differ)", n=np.zeros(3, "f4"))  # Copies are compared.
    refused("has files of 2 ranks, and the mesh has 4 devices; rank 2 is missing", rules(4))
    loose = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    loose["^w$"] = ("tp", None)
    refused("'v'.*(disagree|differ)", loose)  # Taken for two copies of one.
    at = {"w": {"pp": 0}, "v": {"pp": 1}, "n": {"pp": 0}}
    stages = Deployment(2, sw.DeviceMesh((2,), ("pp",)), dict.fromkeys("wv", (None, None)) | {"n": (None,)}, at=at)
    refused("rank 1 has tensor '[wn]', which the rules place elsewhere", stages)
    none = Deployment(2, sw.DeviceMesh((2,), ("tp",)), {"w": DeploymentRule(("tp", None))})
    refused("no rule is for tensor '[vn]'", none)
    with pytest.raises(sw.LayoutError, match="have no mesh, so the number of ranks is not known"):
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "no", source_layouts={}, to="hf")
    shutil.rmtree(tmp_path / "a")
    sw.save_checkpoint(tmp_path / "a", WHOLE, to="hf", sync=False)
    with pytest.raises(sw.ParseError, match="has no files of ranks"):
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "no", source_layouts=rules(), to="hf")
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "no"), "--source-mesh", "tp=2"]) == 2


def test_a_file_that_is_a_copy_of_another_ranks_is_named(tmp_path: Path) -> None:
    """Nothing else tells, as the shapes are right. Parts that are equal in some tensors, or of one value, are taken."""
    cut = {"w": 0, "v": 1}
    ranks_of(tmp_path / "a", cut, WHOLE)
    second = tmp_path / "a" / "consolidated.01.safetensors"
    good = load_file(second)
    shutil.copy(tmp_path / "a" / "consolidated.00.safetensors", second)
    with pytest.raises(
        sw.ParseError, match=r"ranks 0 and 1 begin with the same values in all 2 tensors.* a copy of the other"
    ):
        sw.open_checkpoint(tmp_path / "a", layouts=rules())
    save_file({**good, "w": WHOLE["w"][:4]}, second)
    with sw.open_checkpoint(tmp_path / "a", layouts=rules()) as checkpoint:
        assert np.array_equal(checkpoint.read("w")[4:], WHOLE["w"][:4])
    ranks_of(tmp_path / "zeros", cut, {name: np.zeros_like(array) for name, array in WHOLE.items()})
    with sw.open_checkpoint(tmp_path / "zeros", layouts=rules()) as checkpoint:
        assert not checkpoint.read("w").any()


def test_every_verb_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Described, compared, verified and reported as one checkpoint; a copy that differs is damage."""
    bare, whole, cut = tmp_path / "bare", tmp_path / "whole", tmp_path / "cut.toml"
    ranks_of(bare, {"w": 0, "v": 1}, WHOLE)
    sw.save_checkpoint(whole, WHOLE, sync=False)
    cut.write_text("[rules]\n'^w$' = ['tp', []]\n'^v$' = [[], 'tp']\n'^n$' = [[]]\n")
    how = ["--source-rules", str(cut), "--source-mesh", "tp=2"]

    def said(*arguments: str, status: int = 0) -> Any:
        assert main([*arguments, *how, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    found = said("inspect", str(bare))["tensors"]
    assert {name: one["shape"] for name, one in found.items()} == {"w": [8, 4], "v": [4, 4], "n": [3]}
    assert found["n"]["replicas"] == 1
    assert said("verify", str(bare))["damaged"] == []
    assert said("diff", str(bare), str(whole)) == []
    report = said("report", str(bare), "--mesh", "tp=4", "--rules", str(cut))
    assert {one["name"]: one["shape"] for one in report["tensors"]} == {"w": [8, 4], "v": [4, 4], "n": [3]}
    with sw.open_checkpoint(bare, layouts=rules()) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
            n: a.tolist() for n, a in WHOLE.items()
        }
    with pytest.raises(sw.LayoutError, match="padded and parameter_names are for files that say how they are cut"):
        sw.open_checkpoint(bare, layouts=rules(), padded=True)
    second = bare / "consolidated.01.safetensors"
    good = load_file(second)
    save_file({**good, "n": np.array([1, 2, 1], "f4")}, second)
    (damage,) = said("verify", str(bare), status=3)["damaged"]
    assert (damage["tensor"], damage["file"]) == ("n", str(second))
    assert "differs from another rank's" in damage["problem"]
    save_file({**good, "w": good["w"] + 1}, second)
    (difference,) = said("diff", str(bare), str(whole), status=1)
    assert (difference["name"], difference["index"]) == ("w", [4, 0])
    second.unlink()
    assert "rank 1 is missing" in said("verify", str(bare), status=3)["damaged"][0]["problem"]
    for command in ("inspect", "verify"):
        assert main([command, str(bare), *how[:2]]) == 2
        assert "with --source-mesh" in capsys.readouterr().err
        assert main([command, str(bare), *how[2:]]) == 2
        assert "give --source-rules too" in capsys.readouterr().err


def test_our_own_files_for_ranks_are_told_apart_by_rank(tmp_path: Path) -> None:
    """Not by the last number in their names, which is a coordinate: `rank-00002-dp-1-tp-0`."""
    values = np.arange(32, dtype="f4").reshape(8, 4)
    layouts = sw.LayoutMap(sw.DeviceMesh((2, 2), ("dp", "tp")), replicated=["dp"])
    layouts["w"] = ("tp", None)
    sw.save_checkpoint(tmp_path / "ranks", {"w": values}, layouts, to="ranks", sync=False)
    sw.reshard_checkpoint(tmp_path / "ranks", tmp_path / "w.safetensors", source_layouts=layouts, sync=False)
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["w"], values)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_file_of_a_rank_next_to_another_ranks_is_not_a_whole_checkpoint(tmp_path: Path, ending: str) -> None:
    values = np.arange(32, dtype="f4").reshape(8, 4)
    for rank in range(2):
        sw.save_checkpoint(tmp_path / f"rank{rank}.{ending}", {"w": values[4 * rank :][:4]}, sync=False)
    with pytest.raises(sw.ParseError, match=r"it is the part of one rank.*part=True"):
        sw.open_checkpoint(tmp_path / f"rank1.{ending}")
    with sw.open_checkpoint(tmp_path / f"rank1.{ending}", part=True) as checkpoint:
        assert checkpoint["w"].shape == (4, 4)
    (tmp_path / f"rank0.{ending}").unlink()
    with sw.open_checkpoint(tmp_path / f"rank1.{ending}") as checkpoint:
        assert checkpoint["w"].shape == (4, 4)
