"""Weights of Keras made by hand with h5py: what the real ones do not have, and what must not be followed."""

import json
import re
import sys
import zlib
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
    with pytest.raises(sw.ParseError, match="'external' is in other files"):
        sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(other), "layers/a/vars/0", (3,))
        file.create_virtual_dataset("virtual", layout)
    with pytest.raises(sw.ParseError, match="'virtual' is in other files"):
        sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        file.create_group("a")["itself"] = file["/"]
    with pytest.raises(sw.ParseError, match="the group 'a/itself' is '/' under another name"):
        sw.open_checkpoint(path)


def test_groups_with_two_names_each_are_looked_at_once(tmp_path: Path) -> None:
    """40 groups, each twice in the next: 2**40 ways to the innermost."""
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(40):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
    with pytest.raises(sw.ParseError, match=r"the group '(a/)*b' is '(a/)*a' under another name"):
        sw.open_checkpoint(path)
    with h5py.File(path, "w") as file:
        file["a/w"] = np.arange(3.0)
        file["v"] = file["a/w"]
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint["v"].alias_of == "a/w"
        assert checkpoint.read("v").tolist() == [0, 1, 2]


def test_groups_that_are_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(102):
            group = group.create_group("a")
    with pytest.raises(sw.ParseError, match="groups are nested more than 100 deep"):
        sw.open_checkpoint(path)


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2", "|u1", "V2"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}, {"shuffle": True}]
)
def test_chunks_of_any_filters(how: dict[str, Any], checked: bool, dtype: str, tmp_path: Path) -> None:
    """HDF5's own gzip, shuffle and fletcher32, undone here; some chunks are not stored."""
    path = tmp_path / "m.weights.h5"
    values = (np.arange(35 * 22) % 250).astype("<u2" if dtype == "V2" else dtype).reshape(35, 22)
    values = values.view(ml_dtypes.bfloat16) if dtype == "V2" else values
    with h5py.File(path, "w") as file:
        kind = "V2" if dtype == "V2" else dtype
        made = file.create_dataset("w", (35, 22), kind, chunks=(8, 5), fletcher32=checked, **how)
        made[:20, :] = values[:20].view(kind) if dtype == "V2" else values[:20]
        if dtype == "V2":
            made.attrs["dtype"] = "bfloat16"
    values = values.copy()
    values[24:] = np.zeros((), values.dtype)
    values[20:24] = np.zeros((), values.dtype)
    with sw.open_checkpoint(path) as checkpoint:
        native = values.dtype.newbyteorder("=")
        assert checkpoint.read("w").tobytes() == values.astype(native).tobytes()
        assert (
            checkpoint.read("w", (slice(3, 30), slice(4, 17))).tobytes() == values[3:30, 4:17].astype(native).tobytes()
        )
        checkpoint["w"].tiling.check()
    sw.save_checkpoint(tmp_path / "same", {"w": values}, to="dcp", sync=False)
    assert sw.diff_checkpoints(path, tmp_path / "same") == []
    sw.reshard_checkpoint(path, tmp_path / "new.safetensors", sync=False)
    assert sw.diff_checkpoints(path, tmp_path / "new.safetensors") == []
    if checked:
        data = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            at = file["w"].id.get_chunk_info(0).byte_offset
        data[at + 7] ^= 4
        path.write_bytes(data)
        with pytest.raises(sw.ParseError, match="'w'"):
            sw.verify_checkpoint(path)


def test_what_chunks_claim(tmp_path: Path) -> None:
    """A chunk that gives more than it should, one larger than the memory, and chunks that nobody stored."""
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("w", (4,), "f4", chunks=(4,), compression="gzip")
        made.id.write_direct_chunk((0,), zlib.compress(bytes(50_000_000)))
        file.create_dataset("v", data=np.ones(3))
    with sw.open_checkpoint(path) as checkpoint:
        with pytest.raises(sw.ParseError, match="'w': gives more bytes when decompressed; 16 were expected"):
            checkpoint.read("w")
        assert checkpoint.read("v").tolist() == [1, 1, 1]
    with h5py.File(path, "w") as file:
        made = file.create_dataset("w", (2**28,), "f4", chunks=(2**28,), compression="gzip")
        made.id.write_direct_chunk((0,), zlib.compress(bytes(1000)))
    with pytest.raises(sw.LayoutError, match=r"tensor 'w' is stored in chunks of 1\.0 GiB, .* at least 2\.0 GiB"):
        sw.verify_checkpoint(path, memory=16 << 20)
    with pytest.raises(sw.LayoutError, match=r"memory is 16\.0 MiB; .* at least 2\.0 GiB"):
        sw.store.learn_rewrites(path, path, memory=16 << 20)
    with (
        sw.open_checkpoint(path) as checkpoint,
        pytest.raises(sw.LayoutError, match=r"memory is 256\.0 MiB; .* at least 2\.0 GiB"),
    ):
        checkpoint.read("w", (slice(0, 4),))
    with h5py.File(path, "w") as file:
        file.create_dataset("w", (2**40, 2**18), "f4", chunks=(1, 1), fillvalue=3.5)
        file.create_dataset("v", (2**40, 2**18), "f4", fillvalue=1.5)
        file.create_dataset("lzf", data=np.ones((4, 4)), compression="lzf")
    with sw.open_checkpoint(path) as checkpoint:
        assert len(checkpoint["w"].pieces) == len(checkpoint["v"].pieces) == 1
        assert checkpoint["w"].read((slice(5, 6), slice(7, 9))).tolist() == [[3.5, 3.5]]
        assert checkpoint["v"].read((slice(5, 6), slice(7, 9))).tolist() == [[1.5, 1.5]]
        assert "HDF5's filter 32000, which is not read" in checkpoint.unreadable["lzf"]
    assert sw.verify_checkpoint(path).tensors == 2


def test_chunks_and_datasets_that_share_bytes(tmp_path: Path) -> None:
    """A few bytes of a table could make any number of tensors of the same ones."""
    path = tmp_path / "m.weights.h5"
    places: list[int] = []
    with h5py.File(path, "w") as file:
        made = file.create_dataset("w", data=np.arange(8.0), chunks=(4,))
        made.id.chunk_iter(lambda info: places.append(info.byte_offset))
        places += [file.create_dataset(name, data=np.arange(64.0) + at).id.get_offset() for at, name in enumerate("ab")]
    good = path.read_bytes()
    for one, other in ((0, 1), (2, 3), (3, 2)):
        address = places[one].to_bytes(8, "little")
        assert good.count(address) == 1
        path.write_bytes(good.replace(address, places[other].to_bytes(8, "little")))
        with pytest.raises(sw.ParseError, match=f"share bytes: byte {places[other]} of the file"):
            sw.open_checkpoint(path)
    path.write_bytes(good)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("w").tolist() == list(range(8))


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


@pytest.mark.parametrize("suffix", [".weights.h5", ".weights.json"])
def test_of_several_in_a_folder_one_is_opened(tmp_path: Path, suffix: str) -> None:
    for name in "ab":
        weights(tmp_path / f"{name}.weights.h5", **{name: np.ones(3)})
        if suffix.endswith("json"):
            text = json.dumps({"weight_map": {f"/layers/{name}/vars": f"{name}.weights.h5"}})
            (tmp_path / f"{name}{suffix}").write_text(text)
    said = rf"2 \*{re.escape(suffix)} files \(a{re.escape(suffix)}, b{re.escape(suffix)}, ...\); open one of them"
    with pytest.raises(sw.ParseError, match=said):
        sw.open_checkpoint(tmp_path)
    for name in "ab":
        with sw.open_checkpoint(tmp_path / f"{name}{suffix}") as checkpoint:
            assert list(checkpoint) == [f"layers/{name}/vars/0"]


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


def test_an_index_of_any_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.json"
    with path.open("wb") as file:
        file.truncate(300_000_000)
    with pytest.raises(sw.ParseError, match="300000000 bytes of JSON, over the limit of 100000000"):
        sw.open_checkpoint(path)
