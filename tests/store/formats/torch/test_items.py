"""Folders of `torch_checkpointing` have the tensors that the trainer had; halves and forgeries are refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw

from ....checks import extracted, sha256_of
from ...torch_files import save, tensor

CASES = Path(__file__).parents[3] / "data" / "states" / "torch_checkpointing"


def unpacked(case: str, folder: Path) -> Path:
    return extracted(CASES / case / "checkpoint.tar.xz", folder) / "checkpoint"


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("case", ["by_number", "flat_tp"])
def test_each_tensor_is_what_the_trainer_had(case: str, indexed: bool, tmp_path: Path) -> None:
    """Without an index, which is written where an item has a resharder, ranks' parts say where they are."""
    folder = unpacked(case, tmp_path)
    if not indexed:
        (folder / "metadata.pkl").unlink()
    with sw.open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "torch_checkpointing"
        assert (checkpoint.unreadable, checkpoint.unread, checkpoint.doubts) == ({}, (), ())
        for name, said in json.loads((CASES / case / "expected.json").read_text()).items():
            kinds = dict(checkpoint.training.parameters[name].states)
            assert sha256_of(checkpoint.read(f"model.{name}")) == said["weight"], name
            assert kinds.pop("step")
            assert {kind: sha256_of(checkpoint.read(each)) for kind, each in kinds.items()} == said["state"], name
            assert checkpoint.training.step(name) == said["step"]
        assert checkpoint["model.lm_head.weight"].alias_of == "model.model.embed_tokens.weight"
        assert checkpoint.objects["train_state.step"].value() == 2


@pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")
def test_it_goes_on_elsewhere(tmp_path: Path) -> None:
    """Converted for other ranks it is the same, and `verify` finds nothing."""
    folder = unpacked("by_number", tmp_path)
    mesh = sw.DeviceMesh((3,), ("fsdp",))
    sw.reshard_checkpoint(folder, tmp_path / "ranks", mesh=mesh, to="fsdp2", sync=False)
    assert sw.diff_checkpoints(folder, tmp_path / "ranks") == []
    sw.verify_checkpoint(folder)


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads((folder / "metadata.pkl").read_bytes())
    return found


def first(index: dict[str, Any]) -> dict[str, Any]:
    """The group of the first tensor of the model."""
    groups: dict[str, Any] = next(iter(index["metadata"]["model"]["nested_path_to_metadata"].values()))[0]
    return groups


def with_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        index = index_of(folder)
        change(index)
        (folder / "metadata.pkl").write_bytes(pickle.dumps(index))

    return changed


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


LAYOUT = {"file_path": "../model_0.pt", "serialization_format": {"type": "TorchSerialization"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "model_1.pt").unlink(),
            "the file 'model_1.pt' is missing: it has the part of 'model' on rank 1",
        ),
        (lambda folder: (folder / "optimizer_0.pt").unlink(), "'optimizer_0.pt' is missing"),
        (lambda folder: (folder / "train_state_0.pt").unlink(), "no file train_state_0.pt, though rank 1 has one"),
        (lambda folder: shutil.copy(folder / "model_0.pt", folder / "model_1.pt"), "tensor"),
        (lambda folder: shutil.copy(folder / "optimizer_0.pt", folder / "model_0.pt"), "not of one checkpoint"),
        (lambda folder: (folder / "model_1.pt").write_bytes(b"PK\x03\x04" + bytes(80)), "model_1.pt"),
        (with_index(lambda index: index.update(version="1.0")), "is of version '1.0'; only 2.0 is known"),
        (with_index(lambda index: index.update(world_size=1 << 40)), "world_size is 1099511627776"),
        (with_index(lambda index: index.update(world_size=3)), "does not have the ranks 0 to 2"),
        (with_index(lambda index: index["metadata"]["model"]["rank_to_layout_info"].update({0: LAYOUT})), "own folder"),
        (
            with_index(lambda index: first(index).update(ranks=(0, 5))),
            "its ranks are (0, 5), which is not valid in a world of 2",
        ),
        (with_index(lambda index: first(index).update(ranks=(0,))), "but metadata.pkl says otherwise"),
        (
            with_index(lambda index: first(index)["sharding_metadata"]["data"].update(global_shape=[1 << 62, 1 << 62])),
            "not of one checkpoint",
        ),
        (
            with_index(lambda index: first(index)["sharding_metadata"]["data"].update(dtype="torch.int8")),
            "not of one checkpoint",
        ),
        (
            with_index(lambda index: first(index)["sharding_metadata"]["data"]["mesh_spec"].update(mesh_shape=(7,))),
            "do not fit a mesh of (7,)",
        ),
        (with_index(lambda index: index["metadata"].update(more=Runs())), "print"),
    ],
)
def test_halves_and_forgeries_are_refused(
    change: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked("by_number", tmp_path)
    change(folder)
    with pytest.raises(sw.ParseError) as caught:
        sw.open_checkpoint(folder)
    assert message in str(caught.value)
    assert capsys.readouterr().out == ""


def test_an_optimizer_of_another_run_is_refused(tmp_path: Path) -> None:
    folder, other = unpacked("by_number", tmp_path / "a"), unpacked("flat_tp", tmp_path / "b")
    shutil.copy(other / "optimizer_1.pt", folder / "optimizer_1.pt")
    with pytest.raises(sw.ParseError, match="not of one checkpoint"):
        sw.open_checkpoint(folder)


def test_steps_of_a_model_are_no_ranks(tmp_path: Path) -> None:
    """`model_1000.pt` and `model_2000.pt`, or differing copies, are not taken for one checkpoint of several ranks."""
    for step in (0, 1):
        array = np.full(3, step, np.float32)
        (tmp_path / f"model_{step}.pt").write_bytes(save({"w": tensor(array, "0")}))
    with pytest.raises(sw.ParseError, match="not the same on all ranks, and nothing says how it is cut"):
        sw.open_checkpoint(tmp_path)
    (tmp_path / "model_0.pt").rename(tmp_path / "model_1000.pt")
    with pytest.raises(sw.ParseError, match="not a checkpoint of any known format"):
        sw.open_checkpoint(tmp_path)


def test_one_rank_without_an_index(tmp_path: Path) -> None:
    """By default `torch_checkpointing` writes no index; what ranks have of other items is each rank's own."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    for rank in range(2):
        (tmp_path / f"model_{rank}.pt").write_bytes(save({"w": tensor(w, "0")}))
        (tmp_path / f"step_{rank}.pt").write_bytes(save(7))
        (tmp_path / f"loader_{rank}.json").write_text(json.dumps({"at": 3, "rank": rank}), encoding="utf-8")
        (tmp_path / f"rng_{rank}.pt").write_bytes(save({"state": tensor(np.full(2, rank, np.uint8), "0")}))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["model.w", "rng.rank_0.state", "rng.rank_1.state"]
        assert checkpoint.read("model.w").tolist() == w.tolist()
        assert checkpoint.read("rng.rank_1.state").tolist() == [1, 1]
        values = {name: value.value() for name, value in checkpoint.objects.items()}
        assert values == {"step": 7, "loader.at": 3, "loader.rank_0.rank": 0, "loader.rank_1.rank": 1}


def said(shape: list[int], placements: list[dict[str, Any]], mesh: tuple[int, ...], ranks: tuple[int, ...]) -> Any:
    spec = {"device_type": "cpu", "mesh_shape": mesh, "mesh_data": ranks, "mesh_dim_names": None}
    data = {"global_shape": shape, "dtype": "torch.float32", "stride": [], "mesh_spec": spec, "placements": placements}
    return [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}]


def test_safetensors_are_cut_as_the_index_says(tmp_path: Path) -> None:
    """Ranks 0 and 2 have one copy, ranks 1 and 3 another; five rows in two parts are three and two."""
    w = np.arange(10, dtype=np.float32).reshape(5, 2)
    ranks = (0, 2, 1, 3)  # Row-major on a mesh of 2 x 2: replicas, then parts.
    layouts = {
        rank: {"file_path": f"w/{rank}.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
        for rank in range(4)
    }
    placements: list[dict[str, Any]] = [{"type": "Replicate"}, {"type": "Shard", "dim": 0}]
    tensors = {'["w"]': said([5, 2], placements, (2, 2), ranks)}
    item = {"nested_path_to_metadata": tensors, "rank_to_layout_info": layouts}
    index = {"metadata": {"model": item}, "world_size": 4, "version": "2.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(index))
    (tmp_path / "w").mkdir()
    for rank, rows in {0: w[:3], 2: w[3:], 1: w[:3], 3: w[3:]}.items():
        safetensors.numpy.save_file({"w": rows}, tmp_path / "w" / f"{rank}.safetensors")
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.unread == ()
        assert checkpoint.read("model.w").tolist() == w.tolist()
        assert checkpoint.read("model.w", (slice(2, 4), slice(None))).tolist() == w[2:4].tolist()
        assert len(checkpoint["model.w"].replicas) == 2
    sw.verify_checkpoint(tmp_path)
    safetensors.numpy.save_file({"w": w[3:]}, tmp_path / "w" / "1.safetensors")
    with pytest.raises(sw.ParseError, match="its placements give this rank"):
        sw.open_checkpoint(tmp_path)
