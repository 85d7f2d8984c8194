"""A part of a checkpoint is not read as a whole one: interrupted copies, lost indexes and manifests, failed uploads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw
from shardwise.store.data.objects import ObjectPath
from tests.store.stores import Store

from ..torch_files import ones, save, tensor

MODEL = sw.DeviceMesh((4,), ("model",))
VALUES = {"w": np.arange(64.0).reshape(16, 4), "b": np.arange(3.0), "v": np.arange(40.0)}
ROWS = {"w": sw.TensorLayout(("model", None), MODEL)}
INDEX = "model.safetensors.index.json"


def cut(folder: Path) -> Path:
    sw.save_checkpoint(folder, VALUES, ROWS, to="sharded", sync=False)
    return folder


def several(folder: Path) -> Path:
    sw.save_checkpoint(folder, VALUES, to="hf", max_file_bytes=400, sync=False)
    assert (folder / "model-00001-of-00002.safetensors").exists()
    return folder


def refused(path: Path, *messages: str) -> None:
    """Refused by everything that reads, with what is missing; `verify` calls it damaged."""
    calls: list[Callable[[], Any]] = [
        lambda: sw.open_checkpoint(path),
        lambda: sw.verify_checkpoint(path),
        lambda: sw.reshard_checkpoint(path, path.parent / "new.safetensors"),
        lambda: sw.diff_checkpoints(path, path),
    ]
    for call in calls:
        with pytest.raises(sw.ParseError) as caught:
            call()
        for message in messages:
            assert message in str(caught.value)
    assert not (path.parent / "new.safetensors").exists()


def test_files_of_ours_without_their_manifest(tmp_path: Path) -> None:
    """Half of the files were a model of half the rows; all of them may still be those of an interrupted run."""
    folder = cut(tmp_path / "d4")
    (folder / "shardwise.json").unlink()
    refused(folder, "has no shardwise.json, which is written last")
    files = sorted(folder.iterdir())
    assert len(files) == 4
    for file in files[2:]:
        file.unlink()
    refused(folder, "has no shardwise.json", "2 of its 4 files are missing too")
    files[0].unlink()
    refused(folder, "has no shardwise.json", "3 of its 4 files are missing too")


def test_files_of_ours_with_their_manifest(tmp_path: Path) -> None:
    folder = cut(tmp_path / "d4")
    name = "shard-00003-model-00001-of-00001.safetensors"
    (folder / name).unlink()
    refused(folder, f"names the file '{name}', which is missing")


@pytest.mark.parametrize("name", ["shard-00003-model-00001-of-00001.safetensors", "renamed.safetensors"])
def test_one_file_of_a_folder(name: str, tmp_path: Path) -> None:
    """It is refused by its own name, and under another by its header; it can be opened on purpose."""
    folder = cut(tmp_path / "d4")
    path = tmp_path / name
    shutil.copy(folder / "shard-00003-model-00001-of-00001.safetensors", path)
    refused(path, "files of a checkpoint", "open the folder that has all parts")
    with sw.open_checkpoint(path, part=True) as checkpoint:
        assert checkpoint.read("w").tolist() == VALUES["w"][8:12].tolist()


def test_a_file_of_pytorch_s_says_where_its_parts_begin(tmp_path: Path) -> None:
    info = {"w": {"saved_offsets": [8, 0]}}
    path = tmp_path / "part.safetensors"
    safetensors.numpy.save_file({"w": np.ones((8, 4))}, path, {"DCP_SHARDING_INFO": json.dumps(info)})
    refused(path, "holds a part of 'w', from [8, 0] on")
    assert len(sw.open_checkpoint(path, part=True)) == 1
    info = {"w": {"saved_offsets": [0, 0]}}  # As it writes whole tensors on one rank.
    safetensors.numpy.save_file({"w": np.ones((8, 4))}, path, {"DCP_SHARDING_INFO": json.dumps(info)})
    assert sw.open_checkpoint(path)["w"].shape == (8, 4)


def test_what_can_be_checked_of_pytorch_s_own_files(tmp_path: Path) -> None:
    """They have no mark: numbers that are missing between others, and gaps. Not the last ranks."""
    for rank in range(4):
        name = f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        info = {"w": {"saved_offsets": [4 * rank, 0]}}
        safetensors.numpy.save_file({"w": np.ones((4, 4))}, tmp_path / name, {"DCP_SHARDING_INFO": json.dumps(info)})
    assert sw.open_checkpoint(tmp_path)["w"].shape == (16, 4)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(sw.ParseError, match="but no file of shard 2"):
        sw.open_checkpoint(tmp_path)
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").rename(
        tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    )
    (tmp_path / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(sw.ParseError, match=r"'w' of shape \(12, 4\): the boxes leave a gap: none holds \[4:8, 0:4\]"):
        sw.open_checkpoint(tmp_path)


@pytest.mark.parametrize("lost", [(INDEX,), (INDEX, "shardwise.json")])
def test_half_a_hugging_face_folder(lost: tuple[str, ...], tmp_path: Path) -> None:
    folder = several(tmp_path / "hf")
    for name in (*lost, "model-00002-of-00002.safetensors"):
        (folder / name).unlink()
    refused(folder, "model-00002-of-00002.safetensors", "missing")
    refused(folder / "model-00001-of-00002.safetensors", "is file 1 of 2 of a checkpoint")
    with sw.open_checkpoint(folder / "model-00001-of-00002.safetensors", part=True) as checkpoint:
        assert 0 < len(checkpoint) < 3


def test_a_hugging_face_folder_without_its_index(tmp_path: Path) -> None:
    """All files are there: of others they are a checkpoint, of ours also if the manifest says so."""
    folder = several(tmp_path / "hf")
    (folder / "shardwise.json").unlink()
    whole = tmp_path / "whole.safetensors"
    sw.save_checkpoint(whole, VALUES, sync=False)
    assert sw.diff_checkpoints(folder, whole) == []  # With its index it is whole.
    (folder / INDEX).unlink()
    refused(folder, f"has neither {INDEX} nor shardwise.json, which are written last")
    for file in folder.glob("*.safetensors"):
        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file, {"format": "pt"})
    assert sw.diff_checkpoints(folder, whole) == []
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00001-of-00003.safetensors")
    refused(folder, "files of 2 checkpoints")


def test_numbers_that_files_claim(tmp_path: Path) -> None:
    for name, message in (
        ("model-00001-of-999999999999999999.safetensors", "and 999999999999999994 more are missing"),
        ("model-00003-of-00002.safetensors", "are missing"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        safetensors.numpy.save_file({"a": np.ones(2)}, folder / name)
        refused(folder, message)


def test_a_shard_s_name_that_claims_many_files(tmp_path: Path) -> None:
    name = "shard-00001-model-00001-of-100000000000000000.safetensors"
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})}
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / name, info)
    with pytest.raises(sw.ParseError, match="shard 1 should have 100,000,000,000,000,000 files, but has 1"):
        sw.open_checkpoint(tmp_path)


def test_files_of_torch_save(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for number in (1, 2):
        data = save({f"w{number}": tensor(ones(4), "0")})
        (folder / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(data)
    with sw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint) == {"w1", "w2"}
    refused(folder / "pytorch_model-00001-of-00002.bin", "is file 1 of 2 of a checkpoint")
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    refused(folder, "has 1 of the 2 files of a checkpoint", "pytorch_model-00001-of-00002.bin is missing")
    sw.save_checkpoint(tmp_path / "dcp", VALUES, ROWS, to="dcp", sync=False)
    refused(tmp_path / "dcp" / "__1_0.distcp", "is one file of a PyTorch distributed checkpoint", "open its folder")


def test_files_of_keras(tmp_path: Path) -> None:
    folder = tmp_path / "keras"
    folder.mkdir()
    for number in range(2):
        with h5py.File(folder / f"model_0000{number}.weights.h5", "w") as file:
            file[f"layers/a{number}/vars/0"] = np.ones(3)
    (folder / "model_00001.weights.h5").unlink()
    refused(folder, "its name says that it is one of several files of a checkpoint")
    with sw.open_checkpoint(folder / "model_00000.weights.h5", part=True) as checkpoint:
        assert list(checkpoint) == ["layers/a0/vars/0"]


def test_objects_that_a_failed_run_left(store: Store) -> None:
    """An object is whole; without the manifest, which comes last, they are not a checkpoint."""
    for form, lost in (("sharded", ["shardwise.json"]), ("hf", ["shardwise.json", INDEX]), ("dcp", [".metadata"])):
        place = store.place(f"halves-{form}")
        assert isinstance(place, ObjectPath)
        layouts = None if form == "hf" else ROWS
        sw.save_checkpoint(place, VALUES, layouts, to=form, max_file_bytes=400)  # type: ignore[arg-type]
        sw.open_checkpoint(place).close()
        for name in lost:
            place.filesystem.rm_file((place / name).key)
        for _ in range(2):
            with pytest.raises(sw.ParseError, match=r"written last|is missing: the copy was interrupted"):
                sw.open_checkpoint(place)
            kept = sorted(name for name, _ in place.names() if name.endswith((".safetensors", ".distcp")))
            place.filesystem.rm_file((place / kept[-1]).key)
