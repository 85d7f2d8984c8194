"""PyTorch's distributed checkpoints, written: their zips read by Python's own, their index by Python's own pickle."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import packed
from shardwise._core import joined_crc
from shardwise.store.data.files import DataFile
from shardwise.store.formats.torch.archive import Archive
from shardwise.store.write.forms.dcp import DcpFile, envelope_of
from shardwise.store.write.forms.files import NO_DIGESTS, FileDigests, Headers
from shardwise.store.write.forms.pickles import Call, Global, Items, New, pickled

from ...torch_files import Dcp, save, tensor

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*not written,:shardwise.ShardwiseWarning")

MESH = sw.DeviceMesh((2, 2), ("x", "y"))
ROWS = sw.TensorLayout(("x", None), MESH)


class Box:
    """Stands for every class of PyTorch's."""

    args: Any
    fqn: Any
    module = ""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:  # Of an index, which is the key of a dict.
        return hash(self.fqn)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return {"OrderedDict": OrderedDict, "Size": tuple}.get(name, type(name, (Box,), {"module": module}))

    def persistent_load(self, pid: Any) -> Any:
        return pid


def loaded(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data)).load()


def containers(folder: Path) -> Iterator[tuple[Any, Any, zipfile.ZipFile, int]]:
    """Each entry of the index, its place, the container there, and where its elements begin in the file."""
    index = loaded((folder / ".metadata").read_bytes())
    for key, place in index.storage_data.items():
        data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert archive.testzip() is None
        info = archive.getinfo("archive/data/0")
        assert info.compress_type == zipfile.ZIP_STORED
        header = data[info.header_offset :]
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        yield key, place, archive, place.offset + info.header_offset + 30 + skipped


def test_the_index_and_the_containers_are_what_pytorch_writes(tmp_path: Path) -> None:
    values = {
        "w": np.arange(30, dtype="f4").reshape(6, 5),
        "n": np.array(7, "i8"),
        "u": np.arange(3, dtype="u2"),
        "none": np.zeros((0, 4), "f2"),
        "z": np.array([1 - 2j], "c16"),
    }
    layouts = {"w": ROWS, "u": sw.TensorLayout(("y",), MESH)}
    sw.save_checkpoint(tmp_path / "a", values, layouts, to="dcp", uneven="chunk")
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "shardwise.json"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names

    index = loaded((tmp_path / "a" / ".metadata").read_bytes())
    assert (type(index).__name__, index.version, index.storage_meta) == ("Metadata", "1.0.0", None)
    assert index.planner_data == {name: (name,) for name in values}
    for name, value in values.items():
        said = index.state_dict_metadata[name]
        dtype, layout, requires_grad, memory_format, pinned = said.properties.state
        # A class, which stands for a dtype here.
        assert (dtype.__name__, dtype.module, said.size) == (value.dtype.name, "torch", value.shape)
        assert (layout.args, requires_grad, memory_format.args, pinned) == (("torch.strided",), False, (0,), False)
    boxes = [(chunk.offsets, chunk.sizes) for chunk in index.state_dict_metadata["w"].chunks]
    assert boxes == [((0, 0), (3, 5)), ((3, 0), (3, 5))]
    assert [chunk.sizes for chunk in index.state_dict_metadata["u"].chunks] == [(2,), (1,)]

    storages = {"w": "FloatStorage", "n": "LongStorage", "u": "UntypedStorage", "none": "HalfStorage"}
    found = []
    for key, _, archive, start in containers(tmp_path / "a"):
        value = values[key.fqn]
        chunk = index.state_dict_metadata[key.fqn].chunks[key.index]
        assert (chunk.offsets, start % 64) == (key.offset, 0)
        part = value[tuple(slice(at, at + count) for at, count in zip(chunk.offsets, chunk.sizes, strict=True))]
        assert archive.read("archive/data/0") == part.tobytes()
        rebuilt = loaded(archive.read("archive/data.pkl"))
        (_, kind, storage, device, count), at, shape, strides, *rest = rebuilt.args
        assert (kind.__name__, storage, device) == (storages.get(key.fqn, "ComplexDoubleStorage"), "0", "cpu")
        assert count == (part.nbytes if key.fqn == "u" else part.size)
        assert (at, shape, rest[:2]) == (0, part.shape, [False, OrderedDict()])
        contiguous = np.empty([max(extent, 1) for extent in part.shape], "u1").strides
        assert strides == contiguous
        assert type(rebuilt).__name__ == ("_rebuild_tensor_v3" if key.fqn == "u" else "_rebuild_tensor_v2")
        found.append(key.fqn)
    assert sorted(found) == ["n", "none", "u", "u", "w", "w", "z"]


def test_only_opcodes_that_weights_only_takes(tmp_path: Path) -> None:
    # torch/_weights_only_unpickler.py, of PyTorch 2.15.
    known = {
        "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MARK", "TUPLE", "TUPLE1",
        "TUPLE2", "TUPLE3", "NONE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BINPERSID",
        "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1", "BINPUT", "LONG_BINPUT",
        "BINGET", "LONG_BINGET", "PROTO", "STOP", "NEWTRUE",
    }  # fmt: skip
    sw.save_checkpoint(tmp_path / "a", {"w": np.zeros((1,) * 8, "u8"), "b": np.zeros(70_000, "?")}, to="dcp")
    for *_, archive, _ in containers(tmp_path / "a"):
        data = archive.read("archive/data.pkl")
        assert data[:2] == b"\x80\x02"
        assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= known


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_python_reads_what_is_pickled(value: Any) -> None:
    assert pickle.loads(pickled(value)) == value


def test_pickles_of_many_items_and_of_objects() -> None:
    texts = [f"{i % 600}" for i in range(2500)]
    assert pickle.loads(pickled(iter(texts))) == texts
    pairs = {(i, -i): i << 20 for i in range(2500)}
    assert pickle.loads(pickled(Items(iter(pairs.items())))) == pairs
    made = loaded(pickled([New(Global("a.b", "C"), {"x": Call(Global("torch", "Size"), ((1, 2),))})] * 2))
    assert [(type(each).__name__, each.x) for each in made] == [("C", (1, 2))] * 2
    assert pickle.loads(pickled([np.str_("a"), "a"])) == ["a", "a"]
    with pytest.raises(TypeError, match="bytearray"):
        pickled(bytearray())


@given(
    st.lists(st.tuples(st.sampled_from(["list", "tuple"]), st.lists(st.booleans() | st.integers(-1, 1), max_size=2)))
)
def test_python_makes_the_calls_that_are_pickled(calls: list[tuple[str, list[int]]]) -> None:
    """Equal arguments are written once and named again; True and 1 are equal, and are not the same."""
    made = pickle.loads(pickled([Call(Global("builtins", kind), (tuple(values),)) for kind, values in calls]))
    assert repr(made) == repr([list(values) if kind == "list" else tuple(values) for kind, values in calls])


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_joined_crcs_are_those_of_the_bytes_together(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = joined_crc(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("size", [0, 1, 2**32 - 1, 2**32, 5 * 2**30])
def test_containers_of_any_size(tmp_path: Path, size: int) -> None:
    """The directory of a zip64 is read by Python's own; the file has a hole for the elements."""
    head, tail = envelope_of(b"pickle", size, 0x12345678)
    assert len(head) % 64 == 0
    assert [len(part) for part in envelope_of(b"pickle", size, 0)] == [len(head), len(tail)]
    if size >= 2**32 - 1:
        # What Python does not look at, by sections 4.5.3 and 4.3.15 of PKWARE's description: the sizes in the header
        # before the elements, and the locator: the record's disk and byte, and how many disks there are.
        behind_the_name = head[head.index(b"archive/data/0") + len("archive/data/0") :]
        assert struct.unpack_from("<2H2Q", behind_the_name) == (1, 16, size, size)
        record = len(head) + size + tail.rindex(b"PK\6\6")
        assert struct.unpack("<4sLQL", tail[-42:-22]) == (b"PK\6\7", 0, record, 1)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(head)
        file.seek(size, os.SEEK_CUR)
        file.write(tail)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.compress_size, info.CRC) == (size, size, 0x12345678)
        assert archive.read("archive/data.pkl") == b"pickle"
        assert archive.read("archive/version") == b"3\n"
        with archive.open("archive/data/0"):  # Which compares the header with the directory.
            pass
    ours = DataFile(path)
    try:
        member = Archive(ours).members["archive/data/0"]
        assert (member.size, Archive(ours).start(member)) == (size, len(head))
    finally:
        ours.close()


def test_tied_tensors_lie_in_one_place(tmp_path: Path) -> None:
    shared = np.arange(8.0).reshape(4, 2)
    sw.save_checkpoint(tmp_path / "a", {"a": shared, "b": shared, "c": shared[:2]}, {"a": ROWS}, to="dcp")
    places: dict[str, list[Any]] = {}
    for key, place, *_ in containers(tmp_path / "a"):
        places.setdefault(key.fqn, []).append((place.relative_path, place.offset, place.length))
    assert places["a"] == places["b"]
    assert not set(places["a"]) & set(places["c"])
    (tmp_path / "a" / "shardwise.json").unlink()
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        assert [checkpoint[name].alias_of for name in "abc"] == [None, "a", None]
        assert checkpoint.read("b").tobytes() == shared.tobytes()


def test_what_is_no_tensor_and_where_all_of_it_lay_is_kept(tmp_path: Path) -> None:
    dcp = Dcp()
    dcp.add("optim.state.0", (2,), [((0,), np.arange(2, dtype="f4"))])
    dcp.add_object("optim.step", 7)
    dcp.add("model.w", (2,), [((0,), np.arange(2, dtype="f4"))])
    dcp.add_object("model.note", {"a": [1, "b"]}, "__1_0.distcp")
    dcp.extra["planner_data"] = {
        "optim.state.0": ("optim", "state", 0),
        "optim.step": ("optim", "step"),
        "model.w": ("model", "w"),
        "model.note": ("model", "note"),
    }
    source = dcp.write(tmp_path / "a")
    report = sw.reshard_checkpoint(source, tmp_path / "b", to="dcp", rename={"model": "net"})
    assert isinstance(report, sw.store.WriteReport)
    assert report.tensors == 2
    index = loaded((tmp_path / "b" / ".metadata").read_bytes())
    assert index.planner_data == {
        "optim.state.0": ("optim", "state", 0),
        "net.w": ("net.w",),
        "optim.step": ("optim", "step"),
        "net.note": ("net.note",),
    }
    assert type(index.state_dict_metadata["net.note"]).__name__ == "BytesStorageMetadata"
    assert [vars(key) for key in index.storage_data if key.fqn == "optim.step"] == [
        {"fqn": "optim.step", "index": None}
    ]
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        values = {name: each.value() for name, each in checkpoint.objects.items()}
    assert values == {"optim.step": 7, "net.note": {"a": [1, "b"]}}
    assert sw.verify_checkpoint(tmp_path / "b").digests == 2
    # Bytes are copied as they are.
    with sw.open_checkpoint(source) as one, sw.open_checkpoint(tmp_path / "b") as other:
        held = []
        for checkpoint, name in ((one, "model.note"), (other, "net.note")):
            extent = checkpoint.objects[name].extent
            assert extent is not None
            held.append(extent[0].read(extent[1], extent[2]))
        assert held[0] == held[1]
    with pytest.raises(sw.LayoutError, match=r"rename gives 'optim\.state\.0' and 'optim\.step' the same name, 'x'"):
        sw.reshard_checkpoint(source, tmp_path / "c", to="dcp", rename={"optim.*": "x"})
    sw.reshard_checkpoint(source, tmp_path / "c", to="dcp", only="model")
    with sw.open_checkpoint(tmp_path / "c") as checkpoint:
        assert (list(checkpoint), list(checkpoint.objects)) == (["model.w"], ["model.note"])
    sw.reshard_checkpoint(source, tmp_path / "d", to="hf")
    with sw.open_checkpoint(tmp_path / "d") as checkpoint:
        assert sorted(checkpoint) == ["model.w", "optim.state.0"]


def test_several_boxes_of_a_device_lie_in_its_file(tmp_path: Path) -> None:
    # Queries, keys and values side by side, four columns each: of every device two columns of each.
    fused = sw.TensorLayout((None, packed.concat(packed.part((3, 2, 2), cut=1, axes="x"))), MESH)
    value = np.arange(24, dtype="i4").reshape(2, 12)
    sw.save_checkpoint(tmp_path / "a", {"qkv": value}, {"qkv": fused}, to="dcp")
    held: dict[str, list[Any]] = {}
    for key, place, archive, _ in containers(tmp_path / "a"):
        columns = slice(key.offset[1], key.offset[1] + 2)
        assert archive.read("archive/data/0") == value[:, columns].tobytes()
        held.setdefault(place.relative_path, []).append(key.offset[1])
    assert held == {"__0_0.distcp": [0, 4, 8], "__1_0.distcp": [2, 6, 10]}
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.read("qkv").tolist() == value.tolist()


def test_nothing_at_all(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {}, to="dcp")
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        assert (checkpoint.format, len(checkpoint)) == ("dcp", 0)
    assert sw.verify_checkpoint(tmp_path / "a").crcs == 0


def test_what_pytorch_lacks_is_refused(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="tensor 'x' is float8_e3m4, which PyTorch does not have"):
        sw.save_checkpoint(tmp_path / "a", {"x": np.zeros(3, ml_dtypes.float8_e3m4)}, to="dcp")
    with pytest.raises(TypeError, match="complex128, which a safetensors file cannot hold"):
        sw.save_checkpoint(tmp_path / "a", {"x": np.zeros(3, "c16")}, to="hf")
    with pytest.raises(sw.LayoutError, match="metadata is given"):
        sw.save_checkpoint(tmp_path / "a", {"x": np.zeros(3)}, to="dcp", metadata={"a": "b"})
    assert list(tmp_path.iterdir()) == []


def test_replicas_that_lie_strided_are_compared(tmp_path: Path) -> None:
    """A replica that is not one run of bytes has no CRC-32 of its own, and is compared nevertheless."""
    value = np.arange(6, dtype="f4").reshape(2, 3)
    folder = tmp_path / "ranks"
    folder.mkdir()

    def write(of_rank_1: np.ndarray[Any, Any]) -> None:
        strided = tensor(of_rank_1.T.copy(), "0", shape=(2, 3), strides=(1, 2))
        for rank, each in enumerate((tensor(value, "0"), strided)):
            (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(save({"w": each}))

    write(value)
    sw.reshard_checkpoint(folder, tmp_path / "a", to="dcp")
    assert sw.diff_checkpoints(folder, tmp_path / "a") == []
    assert sw.verify_checkpoint(folder).crcs == sum(len(zipfile.ZipFile(path).namelist()) for path in folder.iterdir())
    write(np.where(value == 4, 9, value))
    with pytest.raises(sw.ParseError, match=r"tensor 'w': replicas disagree.*rank_1\.pt that differs is \(1, 1\)"):
        sw.reshard_checkpoint(folder, tmp_path / "b", to="dcp")
    sw.reshard_checkpoint(folder, tmp_path / "b", to="dcp", replicas="first")
    assert sw.diff_checkpoints(tmp_path / "a", tmp_path / "b") == []


@pytest.mark.heavy
@pytest.mark.parametrize("with_manifest", [True, False])
def test_verify_checks_the_crc_of_every_member(tmp_path: Path, with_manifest: bool) -> None:
    values = {"w": np.arange(30_000, dtype="f4").reshape(6, 5000), "n": np.array(7, "i8"), "big": np.arange(9000)}
    folder = tmp_path / "a"
    sw.save_checkpoint(folder, values, {"w": ROWS}, to="dcp")
    if not with_manifest:
        (folder / "shardwise.json").unlink()
    report = sw.verify_checkpoint(folder)
    assert (report.crcs, report.digests) == (16, 3 if with_manifest else 0)
    members = [
        (folder / place.relative_path, place.offset, archive.getinfo(name), name)
        for _, place, archive, _ in containers(folder)
        for name in archive.namelist()
    ]
    assert len(members) == 16
    for path, offset, info, name in members:
        good = path.read_bytes()
        header = good[offset + info.header_offset :]
        start = offset + info.header_offset + 30
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        for at in {start, start + info.file_size - 1, start + info.file_size // 2}:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(sw.ParseError, match=path.name) as caught:
                sw.verify_checkpoint(folder)
            if name.endswith("data/0"):
                assert f"'{name}' of {info.file_size} bytes is not what was written: its CRC-32" in str(caught.value)
        path.write_bytes(good)
    assert sw.verify_checkpoint(folder) == report


def test_verify_checks_the_files_of_torch_save(tmp_path: Path) -> None:
    values = {
        "a": tensor(np.arange(2000.0), "0"),
        "t": tensor(np.arange(6, dtype="i4"), "1", shape=(2, 3), strides=(1, 2)),
    }
    path = tmp_path / "m.pt"
    path.write_bytes(save(values))
    assert sw.verify_checkpoint(path).crcs == 5
    good = path.read_bytes()
    for part in (np.arange(2000.0).tobytes(), np.arange(6, dtype="i4").tobytes()):
        at = good.index(part) + 9
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(sw.ParseError, match=r"m\.pt: byte \d+: 'archive/data/\d' of .* CRC-32"):
            sw.verify_checkpoint(path)


def test_verify_reads_the_index(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {"w": np.arange(6)}, to="dcp")
    path = tmp_path / "a" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"1.0.0", b"1.0.1"))
    with pytest.raises(sw.ParseError, match=r"\.metadata: it is not what was written"):
        sw.verify_checkpoint(tmp_path / "a")


def test_segments_that_are_shared_must_be_one_tensor(tmp_path: Path) -> None:
    def shared(shapes: dict[str, tuple[int, ...]], dtypes: str = "ff") -> Path:
        dcp = Dcp()
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True):
            dcp.add(name, shape, [((0,) * len(shape), np.zeros(shape, dtype))])
        first = next(iter(dcp.places.values()))
        for place in dcp.places.values():
            place.state = first.state
        return dcp.write(tmp_path / "a")

    with sw.open_checkpoint(shared({"a": (6,), "b": (6,)})) as checkpoint:
        assert checkpoint["b"].alias_of == "a"
    wrong: list[tuple[dict[str, tuple[int, ...]], str]] = [
        ({"a": (6,), "b": (2, 3)}, "ff"),
        ({"a": (6,), "b": (6,)}, "fi"),
    ]
    for shapes, dtypes in wrong:
        with pytest.raises(sw.ParseError, match=r"'b' is at bytes 0 to .*overlaps"):
            sw.open_checkpoint(shared(shapes, dtypes))
    dcp = Dcp()
    dcp.add("a", (6,), [((0,), np.zeros(3, "f4")), ((3,), np.zeros(3, "f4"))])
    first = next(iter(dcp.places.values()))
    for place in dcp.places.values():
        place.state = first.state
    with pytest.raises(sw.ParseError, match="overlaps"):
        sw.open_checkpoint(dcp.write(tmp_path / "a"))
    dcp = Dcp()
    dcp.add("a", (6,), [((0,), np.zeros(6, "f4"))])
    dcp.add_object("o", 1)
    first = next(iter(dcp.places.values()))
    for place in dcp.places.values():
        place.state = first.state
    with pytest.raises(sw.ParseError, match="overlaps"):
        sw.open_checkpoint(dcp.write(tmp_path / "a"))


@pytest.mark.parametrize("runs", [0, 1, 3, 4])
def test_a_run_that_ends_while_the_headers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """What stands around the elements is written when all of them are there; it is written again by the next run."""
    value, source, target = np.arange(600, dtype="f4").reshape(6, 100), tmp_path / "a.safetensors", tmp_path / "b"
    sw.save_checkpoint(source, {"w": value, "n": np.array(7)})
    whole = DcpFile.headers
    written: list[tuple[int, bytes]] = []

    def headers(file: DcpFile, digests: FileDigests = NO_DIGESTS) -> Headers:
        for run in whole(file, digests):
            if len(written) == runs:
                raise OSError(28, "No space left on device")
            written.append(run)
            yield run
        return file.headers_digest(digests)

    with monkeypatch.context() as patched:
        patched.setattr(DcpFile, "headers", headers)
        with pytest.raises(OSError, match=r"No space left on device: (['\"]).*__[01]_0\.distcp\1"):
            sw.reshard_checkpoint(source, target, {"w": ROWS}, to="dcp")
    assert not target.exists()
    report = sw.reshard_checkpoint(source, target, {"w": ROWS}, to="dcp", resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert (report.bytes_resumed, report.bytes_read) == (value.nbytes + 8, 0)
    assert sw.diff_checkpoints(source, target) == []
    assert sw.verify_checkpoint(target).crcs == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; skipped without the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux":
        pytest.skip("tmpfs is mounted on Linux only")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("without the right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_a_full_disk(tmp_path: Path, small_disk: Path, to: Any) -> None:
    source, target = tmp_path / "a.safetensors", small_disk / "made"
    sw.save_checkpoint(source, {"w": np.arange(3 << 17, dtype="f8").reshape(6, -1)})  # 3 MiB
    before = source.read_bytes()
    other = small_disk / "other"
    other.write_bytes(bytes(2 << 20))
    layouts = {"w": ROWS} if to in ("sharded", "dcp") else None
    with pytest.raises(OSError, match=r"takes 3\.\d MiB, but 2\.0 MiB are free: '.*made'"):
        sw.reshard_checkpoint(source, target, layouts, to=to)
    # 750 KiB once beside the checkpoint, and once in it; the lock takes a page.
    shrunk: dict[str, Any] = {"dtype": "bfloat16", "memory": 1 << 20}
    other.write_bytes(bytes(3 << 20))
    with pytest.raises(
        OSError, match=r"written next to it first, takes 1\.5 MiB, but 10\d\d\.\d KiB are free: '.*made'"
    ):
        sw.reshard_checkpoint(source, target, layouts, to=to, **shrunk)
    assert list(small_disk.iterdir()) == [other]
    other.write_bytes(bytes(2 << 20))
    sw.reshard_checkpoint(source, small_disk / "shrunk", layouts, to=to, **shrunk)
    (shutil.rmtree if (small_disk / "shrunk").is_dir() else Path.unlink)(small_disk / "shrunk")
    # Asked to go on it does not ask for room, of which it may have taken a part already.
    with pytest.raises(OSError, match=str(small_disk)) as caught:
        sw.reshard_checkpoint(source, target, layouts, to=to, resume=True)
    assert caught.value.errno == 28
    assert not target.exists()
    assert source.read_bytes() == before
    other.unlink()
    sw.reshard_checkpoint(source, target, layouts, to=to, resume=True)
    assert sw.diff_checkpoints(source, target) == []
    sw.verify_checkpoint(target)
    assert [path.name for path in small_disk.iterdir()] == ["made"]


def test_the_crc_of_a_member_that_many_tasks_write(tmp_path: Path) -> None:
    """512 KiB in tasks of 64 KiB: each half, of one device, is written by four, and zip's own reader agrees."""
    whole = np.random.default_rng(5).integers(0, 2**32, (4, 2**15), "u4").view("f4")
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": whole}, sync=False)
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    rules["w"] = ("x", None)
    plan = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "new", rules, to="dcp", task_bytes=2**16)
    assert plan.run() == len(plan.tasks) == 8
    plan.commit(sync=False)
    members = 0
    for path in (tmp_path / "new").glob("*.distcp"):
        with zipfile.ZipFile(path) as container:
            assert container.testzip() is None
            members += len(container.namelist())
    assert sw.verify_checkpoint(tmp_path / "new").crcs == members
