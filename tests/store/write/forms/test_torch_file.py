"""Files of `torch.save` that are written: zip containers, and nested dicts as PyTorch's own classes load them."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.location import open_file
from shardwise.store.formats.torch.tensors import Container
from shardwise.store.write.forms.archives import Member, directory_entry, end_of, local

from ...formats.torch.test_optimizers import SHAPES, TWO, adam, model, written
from ...torch_files import Call, tensor

#: These tests are about something else, but for those that say which warnings they expect.
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")


def tree_of(path: Path) -> Any:
    """What the pickle says, with inert records for tensors: read apart from names."""
    file = open_file(path)
    try:
        return Container(file).read()
    finally:
        file.close()


def test_a_container_is_a_zip_whose_elements_are_aligned(tmp_path: Path) -> None:
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.float64(3), "e": np.zeros((0, 2), np.int8)}
    sw.save_checkpoint(tmp_path / "model.pt", tensors)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == sorted(
            [f"archive/{name}" for name in ("data.pkl", "data/0", "data/1", "data/2", "byteorder", "version")]
        )
        assert archive.read("archive/data/0") == tensors["w"].tobytes()
    with sw.open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
            name: np.asarray(array).tolist() for name, array in tensors.items()
        }
        begins = [piece.extent().offset for each in checkpoint.values() for piece in each.pieces]
        assert [begin % 64 for begin in begins] == [0, 0, 0]
        assert len(list(checkpoint.sums())) == 6
    sw.verify_checkpoint(tmp_path / "model.pt")
    with pytest.raises(sw.LayoutError, match="PyTorch's file has no place for it"):
        sw.save_checkpoint(tmp_path / "other.pt", tensors, metadata={"a": "b"})


def test_more_members_than_16_bits_count() -> None:
    count, data, entries = (1 << 16) + 3, bytearray(), bytearray()
    for number in range(count):
        member = Member(f"archive/data/{number}".encode(), len(data), 0, 0)
        data += local(member)
        entries += directory_entry(member)
    begin = len(data)
    data += entries + end_of(count, begin, begin + len(entries))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(archive.namelist()) == count


def groups_of(tree: Any) -> list[dict[str, Any]]:
    return [dict(group) for group in tree["optimizer"]["param_groups"]]


def run(tmp_path: Path, **more: Any) -> Path:
    value = {"model": model(**TWO), "optimizer": adam(SHAPES, 2, 2), "epoch": 3, "lr_scheduler": {"last": [1, 2.5]}}
    return written(tmp_path / "run.pt", {**value, **more})


def test_a_run_is_written_as_it_was(tmp_path: Path) -> None:
    """Numbers and groups, names beside them, values in their places; and again the same by a detour."""
    source = run(tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "new.pt", strict=True)
    tree = tree_of(tmp_path / "new.pt")
    assert set(tree) == {"model", "optimizer", "epoch", "lr_scheduler"}
    assert list(tree["model"]) == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert {number: sorted(held) for number, held in tree["optimizer"]["state"].items()} == {
        number: ["exp_avg", "step"] for number in range(4)
    }
    assert groups_of(tree) == [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "param_names": ["b.weight", "a.weight"]},
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [2, 3], "param_names": ["b.bias", "a.bias"]},
    ]
    assert (tree["epoch"], tree["lr_scheduler"]) == (3, {"last": [1, 2.5]})
    assert sw.diff_checkpoints(source, tmp_path / "new.pt") == []
    # By PyTorch's distributed checkpoint, and renamed: the groups say so too.
    sw.reshard_checkpoint(source, tmp_path / "dcp", to="dcp", strict=True)
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "again.pt", strict=True)
    assert sw.diff_checkpoints(source, tmp_path / "again.pt") == []
    assert groups_of(tree_of(tmp_path / "again.pt")) == groups_of(tree)
    for before, target in (("run.pt", "x.pt"), ("dcp", "y.pt")):
        sw.reshard_checkpoint(tmp_path / before, tmp_path / target, rename={r"\bb\.": "c."}, strict=True)
        renamed = tree_of(tmp_path / target)
        assert list(renamed["model"]) == ["c.weight", "c.bias", "a.weight", "a.bias"]
        assert [group["param_names"] for group in groups_of(renamed)] == [
            ["c.weight", "a.weight"],
            ["c.bias", "a.bias"],
        ]
        assert renamed["optimizer"]["state"].keys() == {0, 1, 2, 3}


def test_two_optimizers_stay_two(tmp_path: Path) -> None:
    source = run(tmp_path, optimizer=[adam(SHAPES[:2]), adam(SHAPES[2:], key="n")])
    sw.reshard_checkpoint(source, tmp_path / "new.pt", strict=True)
    tree = tree_of(tmp_path / "new.pt")
    assert [each["param_groups"][0]["params"] for each in tree["optimizer"]] == [[0, 1], [0, 1]]
    assert sw.diff_checkpoints(source, tmp_path / "new.pt") == []


def test_states_are_never_tied_and_weights_stay_so(tmp_path: Path) -> None:
    """An optimizer steps each state by itself: one tensor of steps for all would be counted up once for each."""
    step = tensor(np.float32(2), "step")
    held = adam(SHAPES, 2, 2)
    for states in held["state"].values():
        states["step"] = step
    weights = model(**TWO)
    source = run(tmp_path, model={**weights, "tied.weight": weights["b.weight"]}, optimizer=held)
    with sw.open_checkpoint(source) as checkpoint:
        assert checkpoint["optimizer.state.a.weight.step"].alias_of is not None
    sw.reshard_checkpoint(source, tmp_path / "new.pt")
    with sw.open_checkpoint(tmp_path / "new.pt") as checkpoint:
        assert [name for name, each in checkpoint.items() if each.alias_of is not None] == ["model.tied.weight"]


def test_what_a_source_does_not_say_is_said(tmp_path: Path) -> None:
    def states(name: str) -> dict[str, Any]:
        return {f"optimizer.state.{name}.exp_avg": np.zeros(3, np.float32)}

    bare = {"w": np.ones(3, np.float32), **states("w")}
    sw.save_checkpoint(tmp_path / "bare.safetensors", bare)
    with pytest.warns(sw.ShardwiseWarning, match="does not say the hyperparameters"):
        sw.reshard_checkpoint(tmp_path / "bare.safetensors", tmp_path / "bare.pt")
    (group,) = groups_of(tree_of(tmp_path / "bare.pt"))
    assert group == {"params": [0], "param_names": ["w"]}
    master = {**bare, "optimizer.state.w.master": np.full(3, 2, np.float32)}
    sw.save_checkpoint(tmp_path / "master.safetensors", master)
    with pytest.warns(sw.ShardwiseWarning, match="master copies, which PyTorch's optimizers do not use"):
        sw.reshard_checkpoint(tmp_path / "master.safetensors", tmp_path / "float16.pt", dtype="float16")
    with sw.open_checkpoint(tmp_path / "float16.pt") as checkpoint:
        assert checkpoint.read("model.w").tolist() == [1, 1, 1]
        assert checkpoint.read("optimizer.state.w.master").tolist() == [2, 2, 2]
    with pytest.warns(sw.ShardwiseWarning, match="does not say the hyperparameters"):
        sw.reshard_checkpoint(tmp_path / "master.safetensors", tmp_path / "master.pt")
    with sw.open_checkpoint(tmp_path / "master.pt") as checkpoint:
        assert checkpoint.read("model.w").tolist() == [2, 2, 2]
        assert "optimizer.state.w.master" not in checkpoint
    # An object of a class of the writer's own is no value that every reader takes.
    source = run(tmp_path, thing=Call("package", "Thing"))
    with pytest.warns(
        sw.ShardwiseWarning, match="1 value is not written, because a copy of it cannot be made: 'thing'"
    ):
        sw.reshard_checkpoint(source, tmp_path / "thing.pt")
    assert "thing" not in tree_of(tmp_path / "thing.pt")


def test_a_state_in_no_group_is_refused(tmp_path: Path) -> None:
    """As it would have no learning rate."""
    held = adam(SHAPES)["state"]
    named = dict(zip(("b.weight", "a.weight", "b.bias", "a.bias"), held.values(), strict=True))
    groups = [{"lr": 0.1, "params": ["b.weight", "a.weight"]}, {"lr": 0.2, "params": ["b.bias"]}]
    source = run(tmp_path, optimizer={"state": named, "param_groups": groups})
    with pytest.raises(sw.LayoutError, match=r"states of 'a\.bias', but no group has their parameters"):
        sw.reshard_checkpoint(source, tmp_path / "new.pt")


def test_a_saved_plan_has_the_pickle(tmp_path: Path) -> None:
    """So that tasks on other machines write it."""
    sw.plan_checkpoint(written(tmp_path / "m.pt", {"model": model(w=(3,)), "n": [1]}), tmp_path / "new.pt").save(
        tmp_path / "p.swplan"
    )
    plan = sw.CheckpointPlan.load(tmp_path / "p.swplan")
    plan.run()
    plan.commit()
    assert tree_of(tmp_path / "new.pt")["n"] == [1]
