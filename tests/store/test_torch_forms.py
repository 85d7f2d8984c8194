"""PyTorch's forms made by hand, each with something wrong, or with what the real ones at hand do not have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.interop import torch as placements

from .conftest import encode
from .torch_files import META, STORAGES, Call, Dcp, Global, Storage, new, save, size, tensor

Chunk = tuple[tuple[int, ...], np.ndarray]
F4 = np.dtype(np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=F4).reshape(shape)


def plain(tmp_path: Path, value: Any, **options: Any) -> sw.StoredCheckpoint:
    path = tmp_path / "model.pt"
    path.write_bytes(save(value, **options))
    return sw.open_checkpoint(path)


@pytest.mark.parametrize(
    "name", [*STORAGES, "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)
def test_every_dtype(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.frombuffer(bytes([0, 1] * 3 * dtype.itemsize), dtype).reshape(2, 3)
    checkpoint = plain(tmp_path, {"w": tensor(array, "0"), "s": tensor(array[0, 0], "1"), "e": tensor(array[:0], "2")})
    assert checkpoint["w"].dtype == name
    assert checkpoint.read("w").tobytes() == array.tobytes()
    assert checkpoint.read("s").shape == ()
    assert checkpoint.read("e").shape == (0, 3)
    folder = Dcp()
    folder.add("w", (4, 3), [((0, 0), array), ((2, 0), array)])
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as sharded:
        assert sharded.read("w").tobytes() == array.tobytes() * 2


def test_rank_8_and_strides_of_all_kinds(tmp_path: Path) -> None:
    array = np.arange(2**8 * 3, dtype=np.int64)
    storage = Storage("0", "torch.LongStorage", array.tobytes(), array.size)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
        "rank 8": ((2,) * 8, tuple(2**i for i in range(8)), 0),
        "expanded": ((5, 3), (0, 1), 7),
        "overlapping": ((10, 4), (1, 1), 0),
        "diagonal": ((4,), (9,), 2),
        "a part in another order": ((3, 2, 4), (1, 100, 7), 11),
    }
    made = {
        name: tensor(array, "0", storage=storage, shape=shape, strides=strides, offset=offset)
        for name, (shape, strides, offset) in shapes.items()
    }
    checkpoint = plain(tmp_path, made)
    for name, (shape, strides, offset) in shapes.items():
        wanted = np.lib.stride_tricks.as_strided(array[offset:], shape, tuple(8 * stride for stride in strides))
        assert checkpoint.read(name).tolist() == wanted.tolist()
        assert checkpoint[name].array().tolist() == wanted.tolist()
        box = tuple(slice(n // 3, n - n // 4) for n in shape)
        assert checkpoint.read(name, box).tolist() == wanted[box].tolist()


def test_parameters_and_subclasses(tmp_path: Path) -> None:
    array = ones(2, 3)
    parameter = Call("torch._utils", "_rebuild_parameter", tensor(array, "0"), True, {})
    stateful = Call("torch._utils", "_rebuild_parameter_with_state", tensor(array, "1"), True, {}, {})
    inner = tensor(array, "2")
    kind = Global("torch.nn.parameter", "Buffer")
    subclass = Call(
        "torch._tensor", "_rebuild_from_type_v2", Global("torch._utils", "_rebuild_tensor_v2"), kind, inner.args, {}
    )
    checkpoint = plain(tmp_path, {"a": parameter, "b": stateful, "c": subclass})
    for name in "abc":
        assert checkpoint.read(name).tolist() == array.tolist()


WRONG_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "elements past the storage": (lambda: tensor(ones(2, 3), "0", shape=(2, 4)), "end at byte 32 of a storage of 24"),
    "an offset past the storage": (lambda: tensor(ones(6), "0", offset=1), "end at byte 28 of a storage of 24"),
    "a stride past the storage": (lambda: tensor(ones(2, 3), "0", strides=(4, 1)), "end at byte 28"),
    "a huge shape": (lambda: tensor(ones(2), "0", shape=(2**40, 2**40), strides=(1, 1)), "more than 2.*bytes"),
    "a huge stride": (lambda: tensor(ones(2), "0", strides=(2**62,)), "end at byte"),
    "a negative stride": (lambda: tensor(ones(2), "0", strides=(-1,)), "not the arguments"),
    "a negative size": (lambda: tensor(ones(2), "0", shape=(-2,), strides=(1,)), "not sizes"),
    "a negative offset": (lambda: tensor(ones(2), "0", offset=-1), "not the arguments"),
    "65 dims": (lambda: tensor(ones(1), "0", shape=(1,) * 65, strides=(1,) * 65), "has 65 dims, over the limit of 64"),
    "strides of another rank": (lambda: tensor(ones(2), "0", strides=(1, 1)), "not the arguments"),
    "too few arguments": (lambda: Call("torch._utils", "_rebuild_tensor_v2", 1), "not the arguments"),
    "no storage": (lambda: tensor(ones(2), "0", storage=5), "not one of this container"),  # type: ignore[arg-type]
    "a storage of another kind": (
        lambda: tensor(ones(2), "0", storage=Storage("0", "torch.Size", b"12345678", 2)), "of an unsupported kind"
    ),
    "a storage of a negative size": (
        lambda: tensor(ones(2), "0", storage=Storage("0", "torch.FloatStorage", b"12345678", -2)), "unsupported kind"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit_their_storage(case: str, tmp_path: Path) -> None:
    make, message = WRONG_TENSORS[case]
    with pytest.raises(sw.ParseError, match=rf"model.pt: tensor 'w'.*{message}"):
        plain(tmp_path, {"w": make()})


@pytest.mark.parametrize("array", [np.ones(3, "c8"), np.ones(3, "u2")], ids=["v2", "v3"])
@pytest.mark.parametrize("change", ["conj", "neg"])
def test_elements_that_pytorch_changes_as_it_reads_them(tmp_path: Path, array: np.ndarray, change: str) -> None:
    """`torch.save` writes the memory of `x.conj()` as that of x, and notes down that it is not x."""
    message = f"tensor 'w': is a view .* changes when it reads them .{change}.; save its tensor.resolve_{change}"
    with pytest.raises(sw.ParseError, match=message):
        plain(tmp_path, {"w": tensor(array, "0", metadata={change: True})})
    checkpoint = plain(tmp_path, {"w": tensor(array, "0", metadata={change: False})})
    assert checkpoint.read("w").tolist() == array.tolist()
    with pytest.raises(sw.ParseError, match="not the arguments"):
        plain(tmp_path, {"w": tensor(array, "0", metadata=5)})


def test_a_chunk_that_pytorch_changes_as_it_reads_it(tmp_path: Path) -> None:
    made = Dcp()
    made.add("w", (4,), [((0,), np.ones(4, "c8"))])
    made.files.clear()
    made.places.clear()
    made.place("w", (0,), save(tensor(np.ones(4, "c8"), "0", metadata={"conj": True})), "__0_0.distcp")
    made.write(tmp_path)
    with sw.open_checkpoint(tmp_path) as checkpoint, pytest.raises(sw.ParseError, match="resolve_conj"):
        checkpoint.read("w")


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("torch._utils", "_rebuild_sparse_tensor", r"this is a sparse tensor; save tensor.to_dense\(\)"),
        ("torch._utils", "_rebuild_nested_tensor", "this is a nested tensor"),
        ("torch._utils", "_rebuild_qtensor", "this is a quantised tensor"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage", "of the device meta"),
        ("torch.nn.modules.linear", "Linear", r"a module as a whole: save its state_dict\(\)"),
    ],
)
def test_what_is_no_dense_tensor_is_named(tmp_path: Path, module: str, name: str, message: str) -> None:
    with pytest.raises(sw.ParseError, match=rf'names "{module}.{name}", .*{message}'):
        plain(tmp_path, {"w": Call(module, name, ()), "x": tensor(ones(2), "0")})


def test_a_storage_that_is_not_as_long_as_the_pickle_says(tmp_path: Path) -> None:
    long = Storage("0", "torch.FloatStorage", bytes(8), 3)
    checkpoint = plain(tmp_path, {"w": tensor(ones(3), "0", storage=long)})
    for get in (checkpoint["w"].read, checkpoint["w"].array):
        with pytest.raises(sw.ParseError, match="its storage has 8 bytes, but its pickle says 12"):
            get()
    (tmp_path / "model.pt").write_bytes(save({"w": tensor(ones(3), "0")}).replace(b"archive/data/0", b"archive/data/1"))
    with pytest.raises(sw.ParseError, match="its storage '0' is not in the container"):
        sw.open_checkpoint(tmp_path / "model.pt")


def test_containers_that_cannot_be_read(tmp_path: Path) -> None:
    good = {"w": tensor(ones(2), "0")}
    with pytest.raises(sw.ParseError, match="big-endian machine"):
        plain(tmp_path, good, byteorder=b"big")
    for root, message in (("x/y", "without data.pkl"), ("archive", "ends")):
        path = tmp_path / "model.pt"
        path.write_bytes(save(good, root=root) if root != "archive" else save(good, data=b"\x80\x02N"))
        with pytest.raises(sw.ParseError, match=message if root != "archive" else "bytes are needed"):
            sw.open_checkpoint(path)
    np.savez(tmp_path / "arrays.npz", w=np.ones(2))
    with pytest.raises(sw.ParseError, match=r"arrays\.npz: is a numpy\.savez archive"):
        sw.open_checkpoint(tmp_path / "arrays.npz")
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    with pytest.raises(sw.ParseError, match=r"before 1\.6.*load and save it once with torch\.save"):
        sw.open_checkpoint(path)
    with pytest.raises(sw.ParseError, match=r"two values have the name 'a\.b'"):
        plain(tmp_path, {"a": {"b": 1}, "a.b": 2})
    shared: Any = [1]
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(sw.ParseError, match=r"more than .* values in a pickle of"):
        plain(tmp_path, shared)


def test_a_folder_of_bin_files(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / f"pytorch_model-{number}.bin").write_bytes(save({name: tensor(ones(number + 1), "0")}))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"pytorch_model-{i}.bin" for i, name in enumerate("ab")}}))
    for path in (tmp_path, index):
        with sw.open_checkpoint(path) as checkpoint:
            assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {"a": [0], "b": [0, 1]}
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-0.bin", "b": "pytorch_model-0.bin"}}))
    with pytest.raises(sw.ParseError, match=r"lists 'b' in 'pytorch_model-0\.bin', which does not hold it"):
        sw.open_checkpoint(tmp_path)
    for outside in ("../x.bin", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(sw.ParseError, match="outside the index's own folder"):
            sw.open_checkpoint(tmp_path)


# Distributed checkpoints.


def dcp(tmp_path: Path, shape: tuple[int, ...], chunks: list[Chunk]) -> Path:
    folder = Dcp()
    folder.add("w", shape, chunks)
    return folder.write(tmp_path / "dcp")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tiling_is_read_and_a_spoilt_one_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes: list[tuple[tuple[int, int], ...]] = [tuple((0, n) for n in shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        cut = data.draw(st.integers(start, stop))
        boxes += [(*box[:dim], (start, cut), *box[dim + 1 :]), (*box[:dim], (cut, stop), *box[dim + 1 :])]
    filled = [box for box in dict.fromkeys(boxes) if all(start < stop for start, stop in box)]
    array = ones(*shape)
    chunks: list[Chunk] = [
        (tuple(start for start, _ in box), array[tuple(slice(start, stop) for start, stop in box)]) for box in filled
    ]
    path = dcp(tmp_path_factory.mktemp("dcp"), shape, chunks)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        part = tuple(slice(n // 3, n) for n in shape)
        assert checkpoint.read("w", part).tolist() == array[part].tolist()
    victim = data.draw(st.integers(0, len(chunks) - 1))
    if len(chunks) > 1:
        path = dcp(tmp_path_factory.mktemp("dcp"), shape, chunks[:victim] + chunks[victim + 1 :])
        with pytest.raises(sw.ParseError, match=r"\.metadata: tensor 'w' of shape .*leave a gap: none holds \["):
            sw.open_checkpoint(path)


def test_chunks_that_overlap_or_lie_outside(tmp_path: Path) -> None:
    over = dcp(tmp_path, (5,), [((0,), ones(3)), ((2,), ones(3))])
    with pytest.raises(sw.ParseError, match=r"boxes\[0\] and boxes\[1\] overlap: both hold \[2:3\] \(.*__0_0\.distcp"):
        sw.open_checkpoint(over)
    outside = dcp(tmp_path, (5,), [((0,), ones(5)), ((5,), ones(1))])
    with pytest.raises(sw.ParseError, match=r"__0_0.distcp holds \[5:6\], which is outside it"):
        sw.open_checkpoint(outside)
    with pytest.raises(sw.ParseError, match="leave a gap: none holds"):
        sw.open_checkpoint(dcp(tmp_path, (3, 4), []))


def test_empty_chunks_and_tensors_without_elements(tmp_path: Path) -> None:
    folder = Dcp()
    folder.add("w", (4,), [((0,), ones(4)), ((4,), ones(0))])
    folder.add("none", (0, 4), [])
    folder.add("one", (0, 4), [((0, 0), ones(0, 4))])
    folder.add("scalar", (), [((), np.float32(2.5).reshape(()))])
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
        assert [checkpoint.read(name).shape for name in ("none", "one", "scalar")] == [(0, 4), (0, 4), ()]
        assert checkpoint.read("scalar") == 2.5


def test_an_index_of_an_older_version(tmp_path: Path) -> None:
    """Five fields in the state of the properties, from another module, and no version."""
    folder = Dcp()
    folder.add("w", (2,), [((0,), ones(2))])
    module = "torch.distributed._shard.sharded_tensor.metadata"
    encoding = Call(module, "MEM_FORMAT_ENCODING", 0)
    state = (
        Global("torch", "float32"),
        Call("torch.serialization", "_get_layout", "torch.strided"),
        False,
        encoding,
        False,
    )
    chunks = [new(META, "ChunkStorageMetadata", offsets=size(0), sizes=size(2))]
    folder.entries["w"] = new(
        META,
        "TensorStorageMetadata",
        properties=Call(module, "TensorProperties", state=state),
        size=size(2),
        chunks=chunks,
    )
    with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1]


def changed(**info: Any) -> Callable[[Dcp], None]:
    def change(folder: Dcp) -> None:
        place = next(iter(folder.places.values()))
        place.state = {**place.state, **info}

    return change


def entry(**attributes: Any) -> Callable[[Dcp], None]:
    return lambda folder: folder.entries["w"].state.update(attributes)


WRONG_INDEXES: dict[str, tuple[Callable[[Dcp], Any], str]] = {
    "a file outside": (changed(relative_path="../x"), "outside its own folder"),
    "an absolute file": (changed(relative_path="/etc/passwd"), "outside its own folder"),
    "no such file": (changed(relative_path="gone"), "'gone', which does not exist"),
    "an offset past the end": (changed(offset=10**6), "in a file of"),
    "an offset past any end": (changed(offset=2**63 - 1, length=2**63 - 1), "in a file of"),
    "a length past the end": (changed(length=10**6), "in a file of"),
    "a negative offset": (changed(offset=-1), "not a stretch"),
    "an offset that is no number": (changed(offset="1"), "not a stretch"),
    "a transformed chunk": (changed(transform_descriptors=["zstd"]), "save it without extensions"),
    "overlapping stretches": (lambda folder: list(folder.places.values())[1].state.update(offset=5), "overlaps"),
    "a chunk without a place": (lambda folder: folder.places.popitem(), "storage_data has no"),
    "two places for a chunk": (
        lambda folder: folder.place("w", (0,), b"", "__0_0.distcp"),
        "two places for one chunk",
    ),
    "a shape of text": (entry(size="x"), "has no shape"),
    "a negative size": (entry(size=size(-4)), "has no shape"),
    "65 dims": (entry(size=size(*[1] * 65), chunks=[]), "has 65 dims"),
    "too many bytes": (entry(size=size(2**62, 8), chunks=[]), "more than"),
    "chunks of another rank": (entry(size=size(4, 1)), "has a chunk of 1 and 1 dims, and 2 itself"),
    "chunks beyond all": (
        entry(chunks=[new(META, "ChunkStorageMetadata", offsets=size(2**63 - 1), sizes=size(2))]), "a chunk beyond"
    ),
    "no chunks": (entry(chunks=None), "has no list of chunks"),
    "a chunk that is none": (entry(chunks=[5]), "a chunk that is not one"),
    "no properties": (entry(properties=None), "has no dtype"),
    "a dtype of its own": (
        lambda folder: folder.entries["w"].state.update(properties=folder.properties("quint8")), "quint8"
    ),
    "an entry that is none": (lambda folder: folder.entries.update(w=5), "neither a tensor nor an object"),
    "an object without a place": (
        lambda folder: folder.entries.update(o=Call(META, "BytesStorageMetadata", state={})),
        "storage_data has no .*\"o\"",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_INDEXES)
def test_wrong_indexes_are_refused(case: str, tmp_path: Path) -> None:
    change, message = WRONG_INDEXES[case]
    folder = Dcp()
    folder.add("w", (4,), [((0,), ones(2)), ((2,), ones(2))])
    change(folder)
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(folder.write(tmp_path / "dcp"))
    assert str(caught.value).startswith(f"{tmp_path / 'dcp' / '.metadata'}: ")
    assert len(str(caught.value)) < 600


def test_an_item_that_is_not_what_the_index_says(tmp_path: Path) -> None:
    for array, message in (
        (ones(3), r"float32 of shape \(3,\), but .*chunk \[2:4\] of 'w', float32 of shape \(2,\)"),
        (np.zeros(2, np.int32), "int32"),
    ):
        folder = Dcp()
        folder.add("w", (4,), [((0,), ones(2)), ((2,), array[:2].astype(F4))])
        last = list(folder.places.values())[-1]
        data = save(tensor(array, "0"))
        start = last.state["offset"]
        folder.files["__0_0.distcp"] = folder.files["__0_0.distcp"][:start] + data
        last.state["length"] = len(data)
        with sw.open_checkpoint(folder.write(tmp_path / "dcp")) as checkpoint:
            assert checkpoint.read("w", (slice(0, 2),)).tolist() == [0, 1]
            with pytest.raises(sw.ParseError, match=message):
                checkpoint.read("w")


def test_unfinished_checkpoints_are_refused(tmp_path: Path) -> None:
    path = dcp(tmp_path, (2,), [((0,), ones(2))])
    (path / ".metadata").rename(path / ".metadata.tmp")
    with pytest.raises(sw.ParseError, match=r"no \.metadata, which is written last.*take the last complete"):
        sw.open_checkpoint(path)
    (path / "__0.metadata").write_bytes(b"")
    with pytest.raises(sw.ParseError, match="use_collectives=False"):
        sw.open_checkpoint(path)


def test_megatron_folders_that_cannot_be_read(tmp_path: Path) -> None:
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, message in (
        ("7", "no folder iter_0000007"),
        ("../../x", "is neither an iteration"),
        ("9" * 60, "is neither an iteration"),
        ("release", "no metadata.json"),
    ):
        latest.write_text(text)
        with pytest.raises(sw.ParseError, match=message):
            sw.open_checkpoint(tmp_path)
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    latest.write_text("7\n")
    with pytest.raises(sw.ParseError, match=r"no metadata.json.*interrupted"):
        sw.open_checkpoint(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(sw.ParseError, match="of the format 'zarr'"):
        sw.open_checkpoint(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(sw.ParseError, match=r"has no \.metadata"):
        sw.open_checkpoint(tmp_path)


# The same as safetensors.


def shard(path: Path, rank: int, tensors: dict[str, tuple[tuple[int, ...], np.ndarray]], name: str = "") -> None:
    header: dict[str, Any] = {}
    data = b""
    for key, (_, array) in tensors.items():
        code = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        header[key] = {"dtype": code, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    info = {key: {"saved_offsets": offsets} for key, (offsets, _) in tensors.items()}
    header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    (path / (name or f"shard-{rank:05}-model-00001-of-00001.safetensors")).write_bytes(encode(header, data))


def test_shards_as_safetensors(tmp_path: Path) -> None:
    array = ones(5, 4)
    shard(tmp_path, 1, {"w": ((0, 0), array[:3]), "same": ((0,), ones(2))})
    shard(tmp_path, 2, {"w": ((3, 0), array[3:]), "same": ((0,), ones(2)), "own": ((), ones())})
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        assert (len(checkpoint["same"].pieces), len(checkpoint["same"].replicas)) == (1, 1)
        assert checkpoint.read("own").shape == ()
        assert (checkpoint.metadata["ranks"], checkpoint.metadata["format"]) == (2, "pt")


def test_shards_that_were_not_consolidated(tmp_path: Path) -> None:
    (tmp_path / "sharded").mkdir()
    shard(tmp_path / "sharded", 1, {"w": ((0,), ones(2))})
    with pytest.raises(
        sw.ParseError, match="was to be consolidated by PyTorch, but was not; the shards in its folder sharded"
    ):
        sw.open_checkpoint(tmp_path)
    with sw.open_checkpoint(tmp_path / "sharded") as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1]


def test_shards_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        shard(path, 1, {"w": ((0,), ones(2))})
        return path

    path = folder("a middle one")
    shard(path, 3, {"w": ((4,), ones(2))})
    with pytest.raises(sw.ParseError, match="no file of shard 2"):
        sw.open_checkpoint(path)
    path = folder("a gap")
    shard(path, 2, {"w": ((3,), ones(2))})
    with pytest.raises(sw.ParseError, match=r"leave a gap: none holds \[2:3\]"):
        sw.open_checkpoint(path)
    path = folder("an overlap")
    shard(path, 2, {"w": ((1,), ones(2))})
    with pytest.raises(sw.ParseError, match=r"overlap: both hold \[1:2\] \(.*shard-00001.*shard-00002"):
        sw.open_checkpoint(path)
    path = folder("another dtype")
    shard(path, 2, {"w": ((2,), np.zeros(2, np.int64))})
    with pytest.raises(sw.ParseError, match=r"'w' is F32 of shape .* in shard-00001.* but I64 of shape"):
        sw.open_checkpoint(path)
    path = folder("another rank")
    shard(path, 2, {"w": ((2, 0), ones(2, 2))})
    with pytest.raises(sw.ParseError, match="'w' is F32 of shape"):
        sw.open_checkpoint(path)
    path = folder("parts")
    shard(path, 2, {"w": ((2,), ones(2))}, "shard-00002-model-00001-of-00002.safetensors")
    with pytest.raises(sw.ParseError, match="shard 2 should have 2 files, but has 1"):
        sw.open_checkpoint(path)
    for number, (info, message) in enumerate(
        ((None, "has no DCP_SHARDING_INFO"), ("{}", "does not list the tensor 'w'"), ("[", "not JSON"),
         ("[]", "not a JSON"),
         ('{"w": {"saved_offsets": [-1]}}', "the offsets of 'w'"), ('{"w": 5}', "the offsets of 'w'"))
    ):  # fmt: skip
        path = folder(f"wrong info {number}")
        header: dict[str, Any] = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        header["__metadata__"] = {} if info is None else {"DCP_SHARDING_INFO": info}
        (path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(encode(header, bytes(4)))
        with pytest.raises(sw.ParseError, match=message):
            sw.open_checkpoint(path)


# One file for each rank.

PLACEMENTS = "torch.distributed.tensor.placement_types"


def placed(placement: Any) -> Call:
    if isinstance(placement, placements.Shard):
        return new(PLACEMENTS, "Shard", dim=placement.dim)
    if isinstance(placement, placements.StridedShard):
        return new(PLACEMENTS, "_StridedShard", dim=placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, placements.Partial):
        return new(PLACEMENTS, "Partial", reduce_op=placement.reduce_op)
    return new(PLACEMENTS, "Replicate")


def dtensor(
    local: np.ndarray, key: str, shape: tuple[int, ...], mesh: tuple[int, ...], at: Any, how: list[Any], **spec: Any
) -> Call:
    axes = tuple(new("torch.distributed._mesh_layout", "_FlatLayout", shape=(n,), stride=(1,)) for n in mesh)
    layout = new("torch.distributed._mesh_layout", "_MeshLayout", axes=axes)
    where = {"_layout": layout, "_coordinate_on_dim": at, "_mesh_dim_names": ("a", "b", "c")[: len(mesh)]}
    where |= spec.pop("mesh_state", {})
    meta = Call(
        "torch.distributed.tensor._dtensor_spec", "TensorMeta", size(*shape), (), Global("torch", local.dtype.name)
    )
    state = {
        "mesh": Call("torch.distributed.device_mesh", "DeviceMesh", state=where),
        "placements": tuple(map(placed, how)),
    }
    state |= {"tensor_meta": meta, **spec}
    held = Call("torch.distributed.tensor._dtensor_spec", "DTensorSpec", state=state)
    function = Global("torch._utils", "_rebuild_wrapper_subclass")
    kind = Global("torch.distributed.tensor", "DTensor")
    return Call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        function,
        kind,
        (),
        (None, {"_local_tensor": tensor(local, key), "_spec": held}),
    )


def ranks(tmp_path: Path, states: list[dict[str, Any]], name: str = "model_world_size_{}_rank_{}.pt") -> Path:
    path = tmp_path / "fsdp"
    path.mkdir(exist_ok=True)
    for file in path.iterdir():
        file.unlink()
    for rank, state in enumerate(states):
        (path / name.format(len(states), rank)).write_bytes(save(state))
    return path


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_each_rank_holds_is_put_where_pytorch_has_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the arithmetic of DTensor in `interop.torch`, which is compared with PyTorch's own."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    mesh = sw.DeviceMesh(sizes, tuple("abc"[: len(sizes)]))
    how = []
    for axis in range(len(sizes)):
        dim = data.draw(st.integers(0, len(shape) - 1))
        factor = data.draw(st.integers(1, max(1, mesh.size // sizes[axis])))
        kinds: list[Any] = [placements.Replicate(), placements.Shard(dim), placements.StridedShard(dim, factor)]
        how.append(data.draw(st.sampled_from(kinds)))
    array = ones(*shape)
    # Each element's own number, followed along each dim through the cuts.
    held = [placed_rows(how, mesh, shape, dim) for dim in range(len(shape))]
    states = []
    for rank in range(mesh.size):
        local = array[np.ix_(*(held[dim][rank] for dim in range(len(shape))))]
        states.append({"w": dtensor(local, "0", shape, sizes, mesh.coordinate(rank), how), "b": tensor(ones(2), "1")})
    with sw.open_checkpoint(ranks(tmp_path_factory.mktemp("r"), states)) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        assert checkpoint.read("b").tolist() == [0, 1]
        assert len(checkpoint["b"].replicas) == mesh.size - 1
        checkpoint["w"].tiling.check()


def placed_rows(how: list[Any], mesh: sw.DeviceMesh, shape: tuple[int, ...], dim: int) -> list[np.ndarray]:
    """The positions along a dim that each rank holds, by chunking arrays of positions as PyTorch chunks tensors."""
    rows = []
    for rank in range(mesh.size):
        held = np.arange(shape[dim])
        for axis, placement in enumerate(how):
            if getattr(placement, "dim", None) != dim:
                continue
            count, index = mesh.shape[axis], mesh.coordinate(rank)[axis]
            factor = getattr(placement, "split_factor", 1)
            parts = [chunk(part, count) for part in chunk(held, factor)]
            held = np.concatenate([part[index] for part in parts if index < len(part)] or [held[:0]])
        rows.append(held)
    return rows


def chunk(array: np.ndarray, count: int) -> list[np.ndarray]:
    """`torch.chunk`: parts of ceil(n / count), as many as there are elements for."""
    step = -(-len(array) // count)
    return [array[start : start + step] for start in range(0, len(array), max(step, 1))] or [array]


def test_an_order_of_the_mesh_s_own(tmp_path: Path) -> None:
    """`shard_order` cuts by the second mesh dim first."""
    array, how = ones(8), [placements.Shard(0), placements.Shard(0)]
    entry = Call("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", 0, (1, 0))
    states = []
    for a, b in np.ndindex(2, 2):
        local = array.reshape(2, 2, 2)[b, a]  # The second mesh dim cuts in halves, the first cuts these.
        states.append({"w": dtensor(local, "0", (8,), (2, 2), (a, b), how, shard_order=(entry,))})
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()


def test_a_mesh_as_older_versions_have_it(tmp_path: Path) -> None:
    numbers = np.arange(2, dtype=np.int64)
    states = [
        {"w": dtensor(ones(4)[2 * rank :][:2], "0", (4,), (2,), [rank], [placements.Shard(0)],
                      mesh_state={"_layout": None, "mesh": tensor(numbers, "m")})}
        for rank in range(2)
    ]  # fmt: skip
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]


def pair(**changes: Any) -> list[dict[str, Any]]:
    """Two ranks of a sharded tensor; `changes` are those of the second."""
    made = []
    for rank in range(2):
        options: dict[str, Any] = {
            "local": ones(4)[2 * rank :][:2], "key": "0", "shape": (4,), "mesh": (2,), "at": (rank,),
            "how": [placements.Shard(0)],
        }  # fmt: skip
        made.append({"w": dtensor(**{**options, **(changes if rank else {})})})
    return made


INT32 = Global("torch", "int32")
WRONG_RANKS: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
    "partial sums": (lambda: [{"w": dtensor(ones(4), "0", (4,), (1,), (0,), [placements.Partial()])}], "partial sums"),
    "another shape": (lambda: pair(shape=(5,)), "is not sharded as in model_world_size_2_rank_0.pt"),
    "other placements": (lambda: pair(how=[placements.Replicate()], local=ones(4)), "is not sharded as in"),
    "another local shape": (lambda: pair(local=ones(3)), r"this rank \(2,\) of \(4,\), but its local tensor is \(3"),
    "one coordinate twice": (lambda: pair(at=(0,), local=ones(2)), r"leave a gap: none holds \[2:4\]"),
    "a coordinate off the mesh": (lambda: pair(at=(2,)), r"the coordinate \(2,\) is not on the mesh"),
    "a coordinate of another rank": (lambda: pair(at=(1, 0)), "is not on the mesh"),
    "a larger mesh": (lambda: pair(mesh=(3,)), "must have at most 2 ranks"),
    "more placements": (lambda: pair(how=[placements.Shard(0)] * 2), "placed on a mesh of 1 dims"),
    "a dim that is not there": (lambda: pair(how=[placements.Shard(1)]), "have no boxes"),
    "a plain tensor on one rank": (lambda: [pair()[0], {"w": tensor(ones(4), "0")}], "is plain, float32"),
    "plain tensors that differ": (
        lambda: [{"w": tensor(ones(2), "0")}, {"w": tensor(ones(3), "0")}], r"is plain, float32 of shape \(3,\)"
    ),
    "a tensor and a number": (lambda: [{"w": tensor(ones(2), "0")}, {"w": 5}], "is not a tensor, but is one in"),
    "a number and a tensor": (lambda: [{"w": 5}, {"w": tensor(ones(2), "0")}], "a tensor in some files"),
    "flat parameters": (lambda: [{"a._flat_param": tensor(ones(2), "0")}], "a flat parameter of FSDP1"),
    "a dtype that differs": (
        lambda: [{"w": dtensor(ones(4), "0", (4,), (1,), (0,), [placements.Replicate()],
                               tensor_meta=Call("torch.distributed.x", "TensorMeta", size(4), (), INT32))}],
        "a DTensor of int32 with a local tensor of float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_RANKS)
def test_ranks_that_do_not_fit_together(case: str, tmp_path: Path) -> None:
    make, message = WRONG_RANKS[case]
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(ranks(tmp_path, make()))
    assert "'w'" in str(caught.value) or "_flat_param" in str(caught.value)


def test_folders_that_are_not_of_all_ranks(tmp_path: Path) -> None:
    path = ranks(tmp_path, pair())
    (path / "model_world_size_2_rank_1.pt").rename(path / "model_world_size_2_rank_2.pt")
    with pytest.raises(sw.ParseError, match="there is no file of rank 1"):
        sw.open_checkpoint(path)
    path = ranks(tmp_path, pair())
    (path / "model_world_size_4_rank_1.pt").write_bytes(b"")
    with pytest.raises(sw.ParseError, match="several kinds or world sizes"):
        sw.open_checkpoint(path)
    path = ranks(tmp_path, pair())
    with pytest.raises(sw.ParseError, match=r"one rank's part of a tensor \(DTensor\); open the folder"):
        sw.open_checkpoint(path / "model_world_size_2_rank_1.pt")


def test_a_rank_that_is_not_on_the_mesh_has_no_part(tmp_path: Path) -> None:
    states = [
        *pair(),
        {"w": dtensor(ones(0), "0", (4,), (2,), None, [placements.Shard(0)]), "own": tensor(ones(3), "1")},
    ]
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
        assert checkpoint.read("own").tolist() == [0, 1, 2]
