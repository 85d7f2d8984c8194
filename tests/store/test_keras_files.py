"""Weights of Keras made by hand with h5py: what the real ones do not have, and what must not be followed."""

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest

import shardwise as sw


def weights(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[f"layers/{name}/vars/0"] = array
    return path


def test_datasets_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    rows = np.arange(60, dtype="f4").reshape(6, 10)
    with h5py.File(path, "w") as file:
        file["plain"] = rows
        file.create_dataset("packed", data=rows, chunks=(4, 4), compression="gzip", shuffle=True)
        file["big"] = rows.astype(">f8")
        half = file.create_dataset("half", data=rows.astype(ml_dtypes.bfloat16).view("V2"))
        half.attrs["dtype"] = "bfloat16"
        file["flags"] = rows > 20
        file["complex"] = rows.astype("c8")
        file["scalar"] = np.int64(7)
        file["none"] = rows[:0]
        file["text"] = "words"
        file["null"] = h5py.Empty("f4")
        file.create_dataset("unwritten", shape=(3,), dtype="f4", fillvalue=2.5)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("plain").tolist() == rows.tolist()
        assert checkpoint["plain"].array().tolist() == rows.tolist()
        for name in ("packed", "big"):
            assert not checkpoint[name].pieces[0].is_addressable
            assert checkpoint.read(name).tolist() == rows.tolist()
            assert checkpoint.read(name, (slice(1, 5), slice(3, 9))).tolist() == rows[1:5, 3:9].tolist()
        assert (checkpoint["half"].dtype, checkpoint["half"].pieces[0].is_addressable) == ("bfloat16", True)
        assert checkpoint.read("half").tolist() == rows.tolist()
        assert checkpoint.read("flags").tolist() == (rows > 20).tolist()
        assert checkpoint.read("complex").tolist() == rows.tolist()
        assert checkpoint.read("scalar") == 7
        assert checkpoint.read("none").shape == (0, 10)
        assert checkpoint.read("unwritten").tolist() == [2.5] * 3
        assert set(checkpoint.objects) == {"text", "null"}
        assert checkpoint.objects["text"].value() == b"words"


def test_links_and_other_files_are_not_followed(tmp_path: Path) -> None:
    other = weights(tmp_path / "other.h5", a=np.ones(3))
    path = tmp_path / "m.weights.h5"
    for link in (h5py.ExternalLink("other.h5", "/layers"), h5py.ExternalLink("/etc/passwd", "/"), h5py.SoftLink("/a")):
        with h5py.File(path, "w") as file:
            file["a"] = np.ones(3)
            file["link"] = link
        with pytest.raises(sw.ParseError, match="'link' is a link to another place; links are not followed"):
            sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        file.create_dataset("external", (8,), "u1", external=[(str(other), 0, 8)])
    with pytest.raises(sw.ParseError, match="'external' lies in other files"):
        sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(other), "layers/a/vars/0", (3,))
        file.create_virtual_dataset("virtual", layout)
    with pytest.raises(sw.ParseError, match="'virtual' lies in other files"):
        sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        file.create_group("a")["itself"] = file["/"]
    with pytest.raises(sw.ParseError, match="groups are nested more than 100 deep"):
        sw.open_checkpoint(path)


def index(folder: Path, **said: object) -> Path:
    path = folder / "m.weights.json"
    path.write_text(json.dumps(said))
    return path


def test_several_files(tmp_path: Path) -> None:
    weights(tmp_path / "m_0.weights.h5", a=np.ones(3), b=np.ones((2, 2)))
    weights(tmp_path / "m_1.weights.h5", c=np.zeros(1))
    places = {
        "/layers/a/vars": "m_0.weights.h5",
        "/layers/b/vars": ["m_0.weights.h5"],
        "/layers/c/vars": ["m_1.weights.h5"],
    }
    path = index(tmp_path, metadata={"total_size": 64.0}, weight_map=places)
    for given in (path, tmp_path):
        with sw.open_checkpoint(given) as checkpoint:
            assert set(checkpoint) == {f"layers/{name}/vars/0" for name in "abc"}
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"metadata": {"total_size": 63.0}, "weight_map": places},
            "says that the weights have 63 bytes, but the files hold 64",
        ),
        (
            {"weight_map": {**places, "/layers/d/vars": ["m_1.weights.h5"]}},
            "'/layers/d/vars' in 'm_1.weights.h5', which does not hold any of it",
        ),
        ({"weight_map": {**places, "/layers/c/vars": ["m_0.weights.h5"]}}, "which does not hold any of it"),
        ({"weight_map": {**places, "/layers/c/vars": ["gone.h5"]}}, "'gone.h5', which does not exist"),
        ({"weight_map": {"/layers/a/vars": ["../m_0.weights.h5"]}}, "outside the index's own folder"),
        ({"weight_map": {"/layers/a/vars": [5]}}, "names no files"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
    ]
    for said, message in wrong:
        with pytest.raises(sw.ParseError, match=message.replace(".", r"\.")):
            sw.open_checkpoint(index(tmp_path, **said))
    weights(tmp_path / "m_1.weights.h5", a=np.zeros(1), c=np.zeros(1))
    index(tmp_path, weight_map=places)
    with pytest.raises(sw.ParseError, match="is also in another file of the checkpoint"):
        sw.open_checkpoint(tmp_path)


def test_files_that_are_not_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    for data in (b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(1000)):
        path.write_bytes(data)
        with pytest.raises(sw.ParseError, match="is not an HDF5 file that can be read"):
            sw.open_checkpoint(path)


def test_without_h5py_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights(tmp_path / "m.weights.h5", a=np.ones(3))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'shardwise\[h5\]'"):
        sw.open_checkpoint(path)
