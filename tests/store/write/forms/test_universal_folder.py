"""Universal checkpoints that are written: file by file beside DeepSpeed's own, by hand, and what it cannot hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.location import open_file
from shardwise.store.formats.torch.pickles import Record
from shardwise.store.formats.torch.tensors import Container
from tests.checks import extracted
from tests.store.formats.torch.test_deepspeed import EXPECTED, FLAT, check, unpacked
from tests.store.real import DATA

W = np.arange(6, dtype=np.float32).reshape(2, 3)


def said_by(path: Path) -> Any:
    """What a file says, with tensors as arrays, and inert records for other objects: read apart from names."""
    file = open_file(path)
    try:
        container = Container(file)

        def made(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: made(held) for key, held in value.items()}
            if isinstance(value, list):
                return [made(held) for held in value]
            saved = container.tensor(value, "") if isinstance(value, Record) and "_rebuild" in value.name else None
            if saved is None:
                return value
            extent = container.piece(saved, "", tuple((0, size) for size in saved.shape)).extent()
            data = file.read(extent.offset, int(np.prod(saved.shape)) * saved.dtype.bits // 8)
            return np.frombuffer(data, saved.dtype.numpy()).reshape(saved.shape)

        return made(container.read_objects())
    finally:
        file.close()


def folder_of(path: Path) -> Path:
    folder = path / (path / "latest_universal").read_text()
    assert folder.is_dir()
    return folder


def inside(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", FLAT)
def test_a_training_state_is_written(case: str, tmp_path: Path) -> None:
    """Every weight, master and moment, of the live tensors; from there to another one, with the same bytes."""
    sw.reshard_checkpoint(unpacked(case, tmp_path), tmp_path / "new", to="universal")
    sw.reshard_checkpoint(tmp_path / "new", tmp_path / "again", to="universal")
    folder = folder_of(tmp_path / "new")
    expected = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero/optimizer_state.pt"}
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.format == "universal"
        for name, said in EXPECTED[case].items():
            for each in (name, *said["aliases"]):
                check(checkpoint.read(each), said["weight"], each)
                assert checkpoint[each].alias_of == (None if each == name else name)
            for kind, held in said["state"].items():
                check(checkpoint.read(f"optimizer.state.{name}.{kind}"), held, f"{name}.{kind}")
            if said["state"]:
                assert checkpoint.read(f"optimizer.state.{name}.step").tolist() == said["step"]
                assert name in checkpoint.objects[f"optimizer.param_groups.{said['group']}.params"].value()
                files = ("fp32", *(kind for kind in said["state"] if kind != "master"), "step")
                expected |= {f"zero/{name}/{file}.pt" for file in files}
        assert checkpoint.objects["consumed"].value() == 1234
    assert inside(folder) == expected
    report = sw.verify_checkpoint(tmp_path / "new")
    assert report.digests == report.tensors - sum("master" in said["state"] for said in EXPECTED[case].values()) - sum(
        len(said["aliases"]) for said in EXPECTED[case].values()
    )
    names = inside(tmp_path / "new") - {"shardwise.json"}
    assert names == inside(tmp_path / "again") - {"shardwise.json"}
    differ = [
        name for name in names if (tmp_path / "new" / name).read_bytes() != (tmp_path / "again" / name).read_bytes()
    ]
    assert not differ


@pytest.mark.parametrize("case", ["zero2_tp", "zero3_bf16"])
def test_files_are_as_those_of_deepspeed(case: str, tmp_path: Path) -> None:
    """Of its own folder: the same names and elements; of stage 3 these are flat, and the step is not beside them."""
    extracted(DATA / "deepspeed" / f"{case}.tar.xz", tmp_path)
    sw.reshard_checkpoint(tmp_path / "universal", tmp_path / "new", to="universal")
    own, ours = folder_of(tmp_path / "universal"), folder_of(tmp_path / "new")
    assert own.name == ours.name
    files = [name for name in inside(own) if name.startswith("zero/") and name.count("/") == 2]
    for name in files:
        if name == "zero/lm_head.weight/fp32.pt":  # A tied weight: DeepSpeed writes a copy, and loads none.
            assert not (ours / name).exists()
            continue
        expected, found = said_by(own / name), said_by(ours / name)
        expected, found = ((each["param"] if isinstance(each, dict) else each) for each in (expected, found))
        assert found.reshape(-1).tobytes() == expected.reshape(-1).tobytes(), name
    common, theirs = said_by(ours / "zero" / "optimizer_state.pt"), said_by(own / "zero" / "optimizer_state.pt")
    assert [{**group, "params": 0} for group in common["param_groups"]] == [
        {**group, "params": 0} for group in theirs["param_groups"]
    ]
    (scaler,) = {common["loss_scaler"].name, theirs["loss_scaler"].name}
    assert scaler == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert common["loss_scaler"].state == theirs["loss_scaler"].state
    first = next(iter(own.glob("*_model_states.pt")))
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        found, expected = said_by(ours / name), said_by(first)
        for key in ("global_steps", "skipped_steps", "ds_version", "lr_scheduler", "consumed"):
            assert found[key] == expected[key]
        assert (found["dp_world_size"], found["mp_world_size"]) == (1, 1)


def written(tmp_path: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    sw.save_checkpoint(tmp_path / "new", tensors, to="universal", **settings)
    return folder_of(tmp_path / "new")


def test_by_hand(tmp_path: Path) -> None:
    """A master copy is the parameter's file, in its dtype; a weight without states is in the model's file."""
    tensors = {
        "w": W.astype(np.float16),
        "frozen": W[0],
        "optimizer.state.w.master": W + 0.25,
        "optimizer.state.w.exp_avg": W + 1,
        "optimizer.state.w.step": np.float32(7),
        "rng.cpu": np.arange(3, dtype=np.uint8),
    }
    folder = written(tmp_path, tensors)
    assert folder.name == "global_step7_universal"
    assert said_by(folder / "zero" / "w" / "fp32.pt")["param"].tolist() == (W + 0.25).tolist()
    assert said_by(folder / "zero" / "w" / "exp_avg.pt")["param"].tolist() == (W + 1).tolist()
    step = said_by(folder / "zero" / "w" / "step.pt")
    assert (step.dtype.name, step.shape, step.tolist()) == ("float32", (), 7.0)
    states = said_by(folder / "mp_rank_00_model_states.pt")
    assert {name: array.tolist() for name, array in states["module"].items()} == {"frozen": [0, 1, 2]}
    assert [list(group) for group in states["param_shapes"]] == [["w"]]
    common = said_by(folder / "zero" / "optimizer_state.pt")
    # Nothing says the groups: DeepSpeed loads the parameters of as many groups as there are here.
    assert common["param_groups"] == [{}] * 64
    assert common["optimizer_state_dict"]["state"][0]["step"].tolist() == 7
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert set(checkpoint) == {*tensors}
        assert checkpoint["optimizer.state.w.master"].alias_of == "w"
        assert checkpoint.read("rng.cpu").tolist() == [0, 1, 2]
    assert not (folder / "zero" / "frozen").exists()


def test_tied_weights_are_said(tmp_path: Path) -> None:
    tensors = {
        "head": W,
        "embed": W,
        "optimizer.state.embed.exp_avg": W + 1,
        "optimizer.state.embed.step": np.float32(1),
    }
    folder = written(tmp_path, tensors)
    assert said_by(folder / "mp_rank_00_model_states.pt")["shared_params"] == {"head": "embed"}
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint["head"].alias_of == "embed"


def test_the_dim_that_tensor_parallel_ranks_cut_is_said(tmp_path: Path) -> None:
    mesh = sw.DeviceMesh((3,), ("model",))
    layouts = {"w": sw.TensorLayout((None, "model"), mesh)}
    states = {"optimizer.state.w.exp_avg": W, "optimizer.state.w.step": np.float32(1)}
    folder = written(tmp_path, {"w": W, **states}, layouts=layouts)
    for file in ("fp32", "exp_avg"):
        found = said_by(folder / "zero" / "w" / f"{file}.pt")
        assert (found["cat_dim"], found["param"].shape) == (1, (2, 3))
    both = sw.DeviceMesh((2, 3), ("a", "b"))
    with pytest.raises(sw.LayoutError, match="tensor 'w' is not cut along one dim"):
        sw.save_checkpoint(tmp_path / "x", {"w": W}, {"w": sw.TensorLayout(("a", "b"), both)}, to="universal")


def test_values_that_differ_between_groups_are_not_those_of_all(tmp_path: Path) -> None:
    """With stage 3 DeepSpeed gives all groups what it finds of the first."""
    source = unpacked("zero2_bf16_round_robin", tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "new", to="universal")
    common = said_by(folder_of(tmp_path / "new") / "zero" / "optimizer_state.pt")
    first, second = common["param_groups"]
    assert (first["lr"], second["lr"], first["weight_decay"], second["weight_decay"]) == (0.01, 0.005, 0.1, 0.0)
    (group,) = common["optimizer_state_dict"]["param_groups"]
    assert group == {key: value for key, value in first.items() if key not in ("lr", "weight_decay")}
    assert isinstance(common["loss_scaler"], Record)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"optimizer.state.w.row": W[0]},
            r"the state 'row' of 'w' has the shape \(3,\), but the parameter has \(2, 3\)",
        ),
        ({"optimizer.state.v.exp_avg": W}, "'v', but no group has their parameters|has no weight among the tensors"),
        ({"optimizer.0.state.w.exp_avg": W, "optimizer.1.state.v.exp_avg": W}, "there are 2 optimizers, and DeepSpeed"),
        ({"v": W, "optimizer.state.v.exp_avg_sq": W}, "has the state 'exp_avg.*' of '[wv]' but not of '[wv]'"),
        ({"a/b": W, "optimizer.state.a/b.exp_avg": W}, "'a/b' cannot name a folder"),
    ],
)
def test_what_deepspeed_cannot_hold_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = {} if "optimizer.0.state.w.exp_avg" in more else {"optimizer.state.w.exp_avg": W}
    if "optimizer.state.w.row" in more:
        own["optimizer.state.w.exp_avg"] = W
    with pytest.raises(sw.LayoutError, match=message):
        sw.save_checkpoint(tmp_path / "new", {"w": W, **own, **more}, to="universal")
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_killed_while_files_go_to_their_folders_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if killed at each of the renames in turn; another run goes on, and the bytes are those of one."""
    tensors = {f"{name}.w": W + at for at, name in enumerate("abc")}
    sw.save_checkpoint(tmp_path / "src", tensors)
    sw.reshard_checkpoint(tmp_path / "src", tmp_path / "whole", to="universal")
    real = os.rename
    for last in range(5):
        plan = sw.plan_checkpoint(tmp_path / "src", tmp_path / "new", to="universal")
        plan.run()
        count = iter(range(last))

        def rename(*args: Any, count: Any = count, **more: Any) -> None:
            if next(count, None) is None:
                raise KeyboardInterrupt
            real(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            if last < 4:
                with pytest.raises(KeyboardInterrupt):
                    plan.commit()
                assert not (tmp_path / "new").exists()
        plan.commit(check=True)
        names = inside(tmp_path / "whole")
        assert names == inside(tmp_path / "new")
        assert all((tmp_path / "new" / each).read_bytes() == (tmp_path / "whole" / each).read_bytes() for each in names)
        for path in sorted((tmp_path / "new").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "new").rmdir()


def test_what_lies_among_unfinished_folders_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sw.save_checkpoint(tmp_path / "src", {"a.w": W, "b.w": W + 1})
    plan = sw.plan_checkpoint(tmp_path / "src", tmp_path / "new", to="universal")
    plan.run()

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shardwise.store.write.places.folder.publish", killed)
        with pytest.raises(KeyboardInterrupt):
            plan.commit()
    (folder,) = tmp_path.glob(".new*/*/data/global_step0_universal")
    (folder / "zero" / "a.w" / "evil.pt").write_bytes(b"")
    with pytest.raises(FileExistsError, match=r"evil\.pt"):
        plan.commit()
    (folder / "zero" / "a.w" / "evil.pt").unlink()
    plan.commit()
    assert json.loads((tmp_path / "new" / "shardwise.json").read_text())["form"] == "universal"
