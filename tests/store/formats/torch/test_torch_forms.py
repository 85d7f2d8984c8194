"""PyTorch's forms made by hand, each with something wrong, or with what the real ones at hand do not have."""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise.store.formats.torch.tensors import named_values

from ...torch_files import STORAGES, Call, Dcp, Global, Storage, ones, save, tensor

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*not written,:shardwise.ShardwiseWarning")


def plain(tmp_path: Path, value: Any, **options: Any) -> sw.store.StoredCheckpoint:
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


@pytest.mark.parametrize("key", [b"}", b"K\x01" + b"2\x86" * 60], ids=["a dict", "pairs of pairs, 60 deep"])
def test_a_dict_with_a_key_that_cannot_be_hashed_is_inert(key: bytes, tmp_path: Path) -> None:
    pickled = b"\x80\x02ccollections\nOrderedDict\n)R" + key + b"K\x01s."
    with pytest.raises(sw.ParseError, match="holds one object"):
        plain(tmp_path, None, data=pickled)


def test_a_view_of_far_more_bytes_than_its_storage_is_not_read(tmp_path: Path) -> None:
    """2**62 bytes of one element: reading, verifying or converting it would not end."""
    one = ones(1)
    values = {
        "w": tensor(one, "0", shape=(2**40, 2**20), strides=(0, 0)),
        "v": tensor(one, "1", shape=(9, 9), strides=(0, 0)),
    }
    checkpoint = plain(tmp_path, values)
    assert list(checkpoint) == ["v"]
    assert "a view of 4611686018427387904 bytes of a storage of 4" in checkpoint.unreadable["w"]
    assert sw.verify_checkpoint(tmp_path / "model.pt").unreadable == ("w",)


def test_windows_of_a_long_storage(tmp_path: Path) -> None:
    """`x.unfold(0, 3, 1)`, whose rows overlap: of more bytes than are read at a time."""
    array = ones(150_000)
    windows = np.lib.stride_tricks.sliding_window_view(array, 3)
    checkpoint = plain(tmp_path, {"w": tensor(array, "0", shape=windows.shape, strides=(1, 1))})
    np.testing.assert_array_equal(checkpoint.read("w"), windows)
    np.testing.assert_array_equal(checkpoint.read("w", (slice(1, 149_000), slice(1, 3))), windows[1:149_000, 1:])


def test_a_large_storage_with_tensors_of_parts_of_it_is_verified(tmp_path: Path) -> None:
    """The CRC-32 is that of the storage, of which a tensor may be a part that begins where it begins."""
    array = ones(5000)
    storage = Storage("0", "torch.FloatStorage", array.tobytes(), array.size)
    parts = {name: tensor(array, "0", storage=storage, shape=(size,)) for name, size in (("a", 4000), ("b", 7))}
    path = tmp_path / "model.pt"
    for made in (parts, {**parts, "whole": tensor(array, "0", storage=storage)}):
        path.write_bytes(save(made))
        crcs = sw.verify_checkpoint(path).crcs
        assert crcs == len(zipfile.ZipFile(path).namelist())
        data = bytearray(path.read_bytes())
        data[path.read_bytes().index(array.tobytes()) + 4 * 4999] ^= 1  # In the last element, which no part has.
        path.write_bytes(data)
        with pytest.raises(sw.ParseError, match="of 20000 bytes is not what was written: its CRC-32 is"):
            sw.verify_checkpoint(path)


def test_tensors_side_by_side_in_one_storage_are_not_tied(tmp_path: Path) -> None:
    """As the weights of `torch.nn.LSTM`: four of 5 elements, of which each is read before or after its neighbours."""
    array = np.arange(20, dtype="f4")
    storage = Storage("0", "torch.FloatStorage", array.tobytes(), array.size)

    def part(at: int, count: int) -> Any:
        return tensor(array, "0", storage=storage, shape=(count,), offset=at)

    parts = {"b": (5, 5), "a": (0, 5), "d": (15, 5), "c": (10, 5), "in b": (6, 3), "c and d": (14, 2), "none": (7, 0)}
    checkpoint = plain(tmp_path, {name: part(*place) for name, place in parts.items()})
    for name, (at, count) in parts.items():
        assert checkpoint.read(name).tolist() == array[at : at + count].tolist()
    ties = {name: stored.alias_of for name, stored in checkpoint.items() if stored.alias_of is not None}
    assert ties == {"in b": "b", "c and d": "c"}


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
    "a negative stride": (lambda: tensor(ones(2), "0", strides=(-1,)), "wrong arguments"),
    "a negative size": (lambda: tensor(ones(2), "0", shape=(-2,), strides=(1,)), "not sizes"),
    "a negative offset": (lambda: tensor(ones(2), "0", offset=-1), "wrong arguments"),
    "65 dims": (lambda: tensor(ones(1), "0", shape=(1,) * 65, strides=(1,) * 65), "has 65 dims, over the limit of 64"),
    "strides of another rank": (lambda: tensor(ones(2), "0", strides=(1, 1)), "wrong arguments"),
    "too few arguments": (lambda: Call("torch._utils", "_rebuild_tensor_v2", 1), "wrong arguments"),
    "no storage": (lambda: tensor(ones(2), "0", storage=5), "not one of this container"),  # type: ignore[arg-type]
    "a storage of another kind": (
        lambda: tensor(ones(2), "0", storage=Storage("0", "torch.Size", b"12345678", 2)), "of an unsupported kind"
    ),
    "no dtype": (
        lambda: tensor(ones(2), "0", storage=Storage("0", "torch.storage.UntypedStorage", bytes(8), 8)),
        "wrong arguments of .*_rebuild_tensor_v2",
    ),
    "a storage of a negative size": (
        lambda: tensor(ones(2), "0", storage=Storage("0", "torch.FloatStorage", b"12345678", -2)), "unsupported kind"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit_their_storage(case: str, tmp_path: Path) -> None:
    make, message = WRONG_TENSORS[case]
    with pytest.raises(sw.ParseError, match=rf"model.pt: tensor 'w'.*{message}"):
        plain(tmp_path, {"w": make(), "other": 1})["w"]


@pytest.mark.parametrize("array", [np.ones(3, "c8"), np.ones(3, "u2")], ids=["v2", "v3"])
@pytest.mark.parametrize("change", ["conj", "neg"])
def test_elements_that_pytorch_changes_as_it_reads_them(tmp_path: Path, array: np.ndarray, change: str) -> None:
    """`torch.save` writes the memory of `x.conj()` as that of x, and notes down that it is not x."""
    message = f"tensor 'w': is a view .* changes when it reads them .{change}.; save its tensor.resolve_{change}"
    with pytest.raises(sw.ParseError, match=message):
        plain(tmp_path, {"w": tensor(array, "0", metadata={change: True})})["w"]
    checkpoint = plain(tmp_path, {"w": tensor(array, "0", metadata={change: False})})
    assert checkpoint.read("w").tolist() == array.tolist()
    with pytest.raises(sw.ParseError, match="wrong arguments"):
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
        ("torch._utils", "_rebuild_sparse_tensor", r"a sparse tensor; save tensor.to_dense\(\)"),
        ("torch._utils", "_rebuild_nested_tensor", "a nested tensor"),
        ("torch._utils", "_rebuild_qtensor", "a quantised tensor"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage", "of the device meta"),
        ("torch.nn.modules.linear", "Linear", r"a module as a whole; save its state_dict\(\)"),
        ("my.own", "Subclass", "has no meaning here"),
    ],
)
def test_what_is_no_dense_tensor_is_named_and_the_others_are_read(
    tmp_path: Path, module: str, name: str, message: str
) -> None:
    checkpoint = plain(tmp_path, {"w": Call(module, name, tensor(ones(3), "1")), "x": tensor(ones(2), "0")})
    assert list(checkpoint) == ["x"]
    assert checkpoint.read("x").tolist() == [0, 1]
    for ask in (checkpoint.__getitem__, checkpoint.read):
        with pytest.raises(sw.ParseError, match=rf"model.pt: 'w' is not read: .*{module}.{name}.*{message}"):
            ask("w")
    new = tmp_path / "new.safetensors"
    with pytest.raises(sw.ParseError, match="'w' is not read"):
        sw.reshard_checkpoint(tmp_path / "model.pt", new)
    assert not new.exists()
    sw.reshard_checkpoint(tmp_path / "model.pt", new, only="x")


def test_values_of_any_class_beside_tensors_do_not_close_a_file(tmp_path: Path) -> None:
    """As `torch.save({"args": parser.parse_args(), ...})` writes them; nothing of them is imported or called."""
    scalar = Call("numpy._core.multiarray", "scalar", Call("numpy", "dtype", "f8", False, True), b"12345678")
    values = {
        "w": tensor(ones(2), "0"),
        "args": Call("argparse", "Namespace", state={"lr": 0.1}),
        "loss": scalar,
        "seen": Call("collections", "defaultdict", Global("builtins", "list"), items=[("v", tensor(ones(3), "1"))]),
        "sampler": Call("shardwise_canary", "Sampler", state={"seed": 5}),
    }
    checkpoint = plain(tmp_path, values)
    assert set(checkpoint) == {"w", "seen.v"}
    assert set(checkpoint.objects) == {"args", "loss", "sampler"}
    assert not checkpoint.unreadable
    assert checkpoint.objects["args"].value().state == {"lr": 0.1}
    assert checkpoint.read("seen.v").tolist() == [0, 1, 2]
    assert "shardwise_canary" not in sys.modules
    sw.reshard_checkpoint(tmp_path / "model.pt", tmp_path / "new.safetensors")
    # What serves to run programs is refused wherever it is.
    with pytest.raises(sw.ParseError, match=r"names 'os\.system', which serves to run programs"):
        plain(tmp_path, {**values, "x": Call("os", "system", "true")})


def test_elements_that_share_a_byte_are_named(tmp_path: Path) -> None:
    message = r'names "torch\.float4_e2m1fn_x2", .*two elements to a byte; save tensor\.view\(torch\.uint8\)'
    made = Dcp()
    made.add("w", (4,), [((0,), ones(4))])
    made.entries["w"].state["properties"] = made.properties("float4_e2m1fn_x2")
    folder = made.write(tmp_path / "dcp")
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(folder)


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
        with pytest.raises(sw.ParseError, match=message if root != "archive" else "1 byte needed"):
            sw.open_checkpoint(path)
    np.savez(tmp_path / "arrays.npz", w=np.ones(2))
    with pytest.raises(sw.ParseError, match=r"arrays\.npz: is an archive of numpy\.savez"):
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


def test_no_more_values_than_the_pickle_has_bytes() -> None:
    values = {"a": [1, 2], "b": 3}
    assert list(named_values(values, "m.pt", 3)) == [("a.0", 1), ("a.1", 2), ("b", 3)]
    with pytest.raises(sw.ParseError, match=r"m\.pt: more than 2 values in a pickle of 2 bytes"):
        list(named_values(values, "m.pt", 2))
