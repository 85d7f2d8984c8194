"""Orbax's forms made by hand: zarr arrays and OCDBT databases, each with something wrong or something rare in it."""

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise._core import crc32c
from shardwise.store.data import codecs
from shardwise.store.formats.orbax import ocdbt, zarr

from ...orbax_files import PACK, Database, entries_of, file_table, item, node, shared, uleb, zarr2, zarr3


def numbers(*shape: int, dtype: Any = "<f4") -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 100 + 1).astype(dtype).reshape(shape)


@pytest.mark.heavy
@pytest.mark.parametrize("compressor", [None, "zstd", "gzip", "zlib", "bz2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_zarr_2(compressor: str | None, order: str, tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    how = {"compressor": compressor and {"id": compressor}, "order": order}
    arrays = {
        "uneven": (numbers(7, 5), (3, 2)), "whole": (numbers(4, 6), (4, 6)), "scalar": (numbers(), ()),
        "big": (numbers(5, 4, dtype=">i4"), (2, 4)), "bf16": (numbers(6, dtype=ml_dtypes.bfloat16), (4,)),
        "bool": (numbers(9, dtype="?"), (4,)), "complex": (numbers(3, dtype="<c16"), (2,)),
        "none": (numbers(0, 3), (2, 3)),
        "deep": (numbers(2, 1, 3, 1, 2, 1, 2, 2), (1, 1, 2, 1, 2, 1, 1, 2)), "bytes": (numbers(9, dtype="|u1"), (9,)),
    }  # fmt: skip
    for name, (array, chunks) in arrays.items():
        zarr2(folder, name, array, chunks, **how)
    with sw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint) == set(arrays)
        for name, (array, _) in arrays.items():
            assert checkpoint.read(name).tolist() == array.tolist(), name
            assert checkpoint.read(name).dtype == array.dtype.newbyteorder("=")
            box = tuple(slice(n // 3, n) for n in array.shape)
            assert checkpoint.read(name, box).tolist() == array[box].tolist()
            checkpoint[name].tiling.check()
        addressable = compressor is None
        assert checkpoint["uneven"].pieces[0].is_addressable == addressable
        for piece in checkpoint["uneven"].pieces:
            assert piece.key == f"uneven/{piece.box[0].start // 3}.{piece.box[1].start // 2}"
        if addressable:
            assert checkpoint["whole"].array().tolist() == arrays["whole"][0].tolist()
            assert not checkpoint["big"].pieces[0].is_addressable
    # Compared without JAX and without merging: a scalar and a tensor without elements like all others.
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, (array, _) in arrays.items()}
    sw.save_checkpoint(tmp_path / "same", native, to="dcp", sync=False)
    assert sw.diff_checkpoints(folder, tmp_path / "same") == []
    native["scalar"] = native["scalar"] + 1
    sw.save_checkpoint(tmp_path / "other", native, to="dcp", sync=False)
    assert [found.name for found in sw.diff_checkpoints(folder, tmp_path / "other")] == ["scalar"]


def test_other_separators_and_nested_names(tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    zarr2(folder, "a/b", numbers(4, 4), (2, 2), dimension_separator="/")
    zarr2(folder, "c", numbers(4, 4), (2, 2), dimension_separator="/")
    with sw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint) == {"a/b", "c"}
        assert checkpoint.read("a/b").tolist() == checkpoint.read("c").tolist() == numbers(4, 4).tolist()
    # Zarr 3: the separator is a slash if left out, but a dot in the keys of version 2.
    for name, encoding, key in (
        ("default", {"name": "default"}, "c/{}/{}"),
        ("dots", {"name": "default", "configuration": {"separator": "."}}, "c.{}.{}"),
        ("two", {"name": "v2"}, "{}.{}"),
        ("slashes", {"name": "v2", "configuration": {"separator": "/"}}, "{}/{}"),
    ):
        path = zarr3(folder, name, numbers(4, 4), (2, 2), chunk_key_encoding=encoding)
        for cell in np.ndindex(2, 2):
            (path / key.format(*cell)).parent.mkdir(exist_ok=True)
            path.joinpath("c", *map(str, cell)).rename(path / key.format(*cell))
        with sw.open_checkpoint(folder) as checkpoint:
            assert checkpoint.read(name).tolist() == numbers(4, 4).tolist(), name


@pytest.mark.parametrize("codecs", [(), ("zstd",), ("gzip",), ("crc32c",), ("crc32c", "zstd"), ("zstd", "crc32c")])
@pytest.mark.parametrize("first", [False, True])
def test_zarr_3(codecs: tuple[str, ...], first: bool, tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    array = numbers(10, 7)
    zarr3(folder, "plain", array, (4, 4), codecs=codecs)
    zarr3(folder, "sharded", array, (6, 4), (3, 2), codecs=codecs, first=first)
    zarr3(folder, "scalar", numbers(), (), (), codecs=codecs, first=first)
    zarr3(folder, "bf16", numbers(8, dtype=ml_dtypes.bfloat16), (8,), (4,), codecs=codecs)
    with sw.open_checkpoint(folder) as checkpoint:
        for name in ("plain", "sharded"):
            assert checkpoint.read(name).tolist() == array.tolist()
            assert checkpoint.read(name, (slice(2, 9), slice(3, 6))).tolist() == array[2:9, 3:6].tolist()
        assert checkpoint.read("scalar") == 1
        assert checkpoint.read("bf16").tolist() == numbers(8).tolist()
        assert len(checkpoint["sharded"].pieces) == 4


@pytest.mark.heavy
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_of_any_grid(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    inner = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    shard = tuple(n * data.draw(st.integers(1, 3)) for n in inner)
    array = numbers(*shape)
    folder = item(tmp_path_factory.mktemp("zarr") / "item")
    zarr2(folder, "two", array, shard, compressor=data.draw(st.sampled_from([None, {"id": "zlib"}])))
    zarr3(folder, "three", array, shard, inner, codecs=data.draw(st.sampled_from([(), ("gzip",)])))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        box.append(slice(start, data.draw(st.integers(start, size))))
    with sw.open_checkpoint(folder) as checkpoint:
        for name in ("two", "three"):
            assert checkpoint.read(name, tuple(box)).tolist() == array[tuple(box)].tolist()


def test_chunks_that_are_not_there(tmp_path: Path) -> None:
    """They are the fill value, unless the writer says that it stores all of them."""
    array = numbers(4, 4)
    for stored, name in ((False, "sparse"), (True, "complete")):
        folder = item(tmp_path / name, store_array_data_equal_to_fill_value=stored)
        (zarr2(folder, "two", array, (2, 2), fill_value=1.5) / "1.0").unlink()
        (zarr3(folder, "three", array, (2, 2), fill_value="NaN") / "c/1/0").unlink()
        zarr3(folder, "inner", array, (4, 4), (2, 2), leave_out=(2,), fill_value="0x3fc00000")
        if stored:
            with pytest.raises(sw.ParseError, match=r"the chunk 'three/c/1/0' is missing"):
                sw.open_checkpoint(folder)
            continue
        with sw.open_checkpoint(folder) as checkpoint:
            for name, fill in (
                ("two", 1.5),
                ("three", np.nan),
                ("inner", 1.5),
            ):
                wanted = array.copy()
                wanted[2:, :2] = fill
                np.testing.assert_array_equal(checkpoint.read(name), wanted)
    folder = item(tmp_path / "other fills", store_array_data_equal_to_fill_value=False)
    for name, dtype, fill in (("one", "<i4", 1), ("true", "|b1", True), ("big", ">i4", 258), ("float", ">f8", -1.5)):
        (zarr2(folder, name, numbers(4, dtype=dtype), (2,), fill_value=fill) / "1").unlink()
        with sw.open_checkpoint(folder) as checkpoint:
            assert checkpoint.read(name).tolist() == [*numbers(2, dtype=dtype).tolist(), fill, fill]
    folder = item(tmp_path / "no fill")
    (zarr2(folder, "two", array, (2, 2)) / "1.0").unlink()
    with pytest.raises(sw.ParseError, match=r"array 'two': the chunk 'two/1\.0' is missing"):
        sw.open_checkpoint(folder)
    folder = item(tmp_path / "inner", store_array_data_equal_to_fill_value=True)
    zarr3(folder, "inner", array, (4, 4), (2, 2), leave_out=(2,))
    with sw.open_checkpoint(folder) as checkpoint, pytest.raises(sw.ParseError, match="its chunk 2 is missing"):
        checkpoint.read("inner")


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "filters": ({"filters": [{"id": "delta"}]}, "with filters"),
    "another compressor": ({"compressor": {"id": "blosc"}}, "the compressor 'blosc' is not supported"),
    "another dtype": ({"dtype": "<M8[s]"}, "the dtype '<M8"),
    "no dtype": ({"dtype": [["a", "<f4"]]}, "the dtype"),
    "another order": ({"order": "A"}, "order 'A'"),
    "another separator": ({"dimension_separator": ":"}, "dimension_separator ':'"),
    "chunks of another rank": ({"chunks": [2]}, r"chunks of \[2\]"),
    "chunks without elements": ({"chunks": [0, 2]}, r"chunks of \[0, 2\]"),
    "huge chunks": ({"chunks": [2**40, 2**40]}, "more than 2.*63 - 1 bytes"),
    "a negative size": ({"shape": [-1, 4]}, "not sizes"),
    "a huge shape": ({"shape": [2**60, 2**60]}, "more than 2.*63 - 1 bytes"),
    "chunks that are not there": ({"shape": [2**30, 2**30]}, r"the chunk 'w/0\.2' is missing"),
    "65 dims": ({"shape": [1] * 65, "chunks": [1] * 65}, "has 65 dims"),
    "another version": ({"zarr_format": 4}, "zarr_format 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_arrays_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_ARRAYS[case]
    folder = item(tmp_path / "item")
    path = zarr2(folder, "w", numbers(4, 4), (2, 2))
    said = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps(said | changes))
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(folder)["w"]
    assert str(folder) in str(caught.value)
    assert "'w'" in str(caught.value)


WRONG_ARRAYS_3: dict[str, tuple[dict[str, Any], str]] = {
    "another grid": ({"chunk_grid": {"name": "rectilinear"}}, "chunk_grid 'rectilinear'"),
    "other keys": ({"chunk_key_encoding": {"name": "hash"}}, "chunk_key_encoding 'hash'"),
    "another codec": ({"codecs": [{"name": "bytes"}, {"name": "blosc"}]}, "codecs .*'blosc'"),
    "a transposition": ({"codecs": [{"name": "transpose"}, {"name": "bytes"}]}, "codecs .*'transpose'"),
    "no codecs": ({"codecs": []}, "codecs"),
    "another type": ({"data_type": "int4"}, "data_type 'int4'"),
    "storage transformers": ({"storage_transformers": [1]}, "not the metadata"),
    "codecs around a shard": ({"codecs": [{"name": "sharding_indexed"}, {"name": "zstd"}]}, "around a shard"),
    "chunks that do not fit a shard": (
        {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 2]}}]}, "not a whole number"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_ARRAYS_3)
def test_arrays_of_zarr_3_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_ARRAYS_3[case]
    folder = item(tmp_path / "item")
    path = zarr3(folder, "w", numbers(4, 4), (2, 2)) / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(folder)["w"]


@pytest.mark.parametrize("dtype", ["int4", "int2", "uint4", "float4_e2m1fn"])
@pytest.mark.filterwarnings("ignore:.*dropped by the rules:shardwise.ShardwiseWarning")
def test_an_array_that_cannot_be_read_does_not_close_the_others(dtype: str, tmp_path: Path) -> None:
    tree = {
        f"('{key}',)": {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
        for key in ("packed", "w")
    }
    folder = item(tmp_path / "item", tree_metadata=tree)
    zarr3(folder, "w", numbers(4, 4), (2, 2))
    path = zarr3(folder, "packed", numbers(4, 4), (2, 2)) / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data_type": dtype}))
    reason = f"array 'packed': the data_type '{dtype}' is not supported"
    with sw.open_checkpoint(folder) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert list(checkpoint.unreadable) == ["packed"]
        assert reason in checkpoint.unreadable["packed"]
        assert checkpoint.read("w").tolist() == numbers(4, 4).tolist()
        for ask in (checkpoint.__getitem__, checkpoint.read):
            with pytest.raises(sw.ParseError, match=reason):
                ask("packed")
    with pytest.raises(sw.ParseError, match=reason):
        sw.reshard_checkpoint(folder, tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()
    sw.reshard_checkpoint(folder, tmp_path / "new.safetensors", only="^w$")
    # It cannot be compared either.
    assert [(found.name, found.what) for found in sw.diff_checkpoints(folder, tmp_path / "new.safetensors")] == [
        ("packed", "unreadable")
    ]
    assert sw.verify_checkpoint(folder).unreadable == ("packed",)
    # Nor after a rewrite, unless that leaves it out.
    for drop in ((), ("packed",)):
        rewrites = sw.Rewrites([{"from": "w", "to": "v"}], drop=drop)
        sw.reshard_checkpoint(tmp_path / "new.safetensors", tmp_path / f"v{len(drop)}", rename={"w": "v"}, to="hf")
        found = sw.diff_checkpoints(folder, tmp_path / f"v{len(drop)}", rewrites=rewrites)
        assert [(each.name, each.what) for each in found] == ([] if drop else [("packed", "unreadable")])


# What metadata claims costs nothing.


@pytest.mark.parametrize("shape", [[2**31, 0], [0, 2**33], [2**62, 0], [0, 2**62, 4]])
def test_no_elements_of_huge_dims(shape: list[int], tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    path = zarr2(folder, "w", numbers(2, 2), (1, 1)) / ".zarray"
    said = json.loads(path.read_text()) | {"shape": shape, "chunks": [1] * len(shape)}
    path.write_text(json.dumps(said))
    assert sw.verify_checkpoint(folder).bytes == 0
    with sw.open_checkpoint(folder) as checkpoint:
        assert checkpoint["w"].shape == tuple(shape)
        assert len(checkpoint["w"].pieces) == 0
        checkpoint["w"].tiling.check()
    assert sw.diff_checkpoints(folder, folder) == []


@pytest.mark.parametrize("fill", [0, 2.5])
def test_chunks_that_nobody_stored_cost_nothing(fill: float, tmp_path: Path) -> None:
    """2**50 elements, of which three chunks of four are stored: neither listed nor read."""
    folder = item(tmp_path / "item")
    shape = [2**25, 2**25]
    path = zarr2(folder, "w", numbers(2, 4), (2, 2), fill_value=fill)
    (path / ".zarray").write_text(json.dumps(json.loads((path / ".zarray").read_text()) | {"shape": shape}))
    (path / "77.12345").write_bytes(numbers(2, 2).tobytes())
    (path / f"{2**24}.0").write_bytes(b"outside")
    with sw.open_checkpoint(folder) as checkpoint:
        tensor = checkpoint["w"]
        tensor.tiling.check()
        assert len(tensor.pieces) < 20
        rows = slice(153, 156), slice(24689, 24693)
        expected = np.full((3, 4), fill, "f4")
        expected[1:, 1:3] = numbers(2, 2)
        assert checkpoint.read("w", rows).tolist() == expected.tolist()
        assert (
            tensor.read((slice(0, 2), slice(0, 6))).tolist()
            == np.hstack([numbers(2, 4), np.full((2, 2), fill)]).tolist()
        )
    assert sw.verify_checkpoint(folder).bytes == 4 * 2**50
    assert sw.diff_checkpoints(folder, folder) == []


@pytest.mark.heavy
@pytest.mark.parametrize("fill", [0, 2.5, "NaN"])
@pytest.mark.parametrize("name", ["<f4", "<i2", "|u1", "<c16", ">f8"])
def test_the_digest_of_what_nobody_stored(name: str, fill: Any, tmp_path: Path) -> None:
    """It is that of the tensor with the fill value in its place."""
    dtype = np.dtype(name)
    if fill == "NaN" and dtype.kind != "f":
        return
    fill = int(fill) if dtype.kind in "iu" else fill
    folder = item(tmp_path / "item")
    array = numbers(41, 57, dtype=dtype)
    path = zarr2(folder, "w", array, (5, 6), fill_value=fill)
    for cell in ("0.0", "3.3", "3.4", "8.9", "5.0"):
        (path / cell).unlink()
        row, column = (int(text) for text in cell.split("."))
        array[5 * row : 5 * row + 5, 6 * column : 6 * column + 6] = np.nan if fill == "NaN" else fill
    sw.save_checkpoint(tmp_path / "same", {"w": array}, to="dcp", sync=False)
    assert sw.diff_checkpoints(folder, tmp_path / "same") == []
    array[15, 20] += 1
    array[40, 0] += 1
    if fill != "NaN":
        sw.save_checkpoint(tmp_path / "other", {"w": array}, to="dcp", sync=False)
        (found,) = sw.diff_checkpoints(folder, tmp_path / "other")
        assert (found.what, found.index, found.count) == ("values", (15, 20), 2)
    sw.reshard_checkpoint(folder, tmp_path / "new", to="dcp", sync=False)
    assert sw.diff_checkpoints(folder, tmp_path / "new") == []


@pytest.mark.heavy
def test_chunks_of_a_shard_that_nobody_stored_cost_nothing(tmp_path: Path) -> None:
    """2**20 chunks of 2**20 elements in a shard, of which an index of 16 MB says that two are stored."""
    folder = item(tmp_path / "item")
    path = zarr3(folder, "w", np.ones(8, "u1"), (8,), (4,), codecs=(), leave_out=(1,), fill_value=7)
    said = json.loads((path / "zarr.json").read_text())
    said |= {"shape": [2**40], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40]}}}
    said["codecs"][0]["configuration"]["chunk_shape"] = [2**20]
    (path / "zarr.json").write_text(json.dumps(said))
    index = np.full((2**20, 2), 2**64 - 1, "<u8")
    index[5], index[2**19] = (0, 2**20), (2**20, 2**20)
    data = bytes([1]) * 2**20 + bytes([2]) * 2**20 + index.tobytes()
    (path / "c" / "0").write_bytes(data + struct.pack("<I", crc32c(index.tobytes())))
    assert sw.verify_checkpoint(folder, memory=4 << 20).bytes == 2**40
    with sw.open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("w", (slice(6 * 2**20 - 2, 6 * 2**20 + 2),)).tolist() == [1, 1, 7, 7]


@pytest.mark.heavy
@pytest.mark.parametrize("fill", [0, 3])
def test_shards_in_part(fill: int, tmp_path: Path) -> None:
    """What nobody stored of a shard is the fill value everywhere, and is compared as that."""
    array = numbers(20, 14, dtype="<i4")
    folder = item(tmp_path / "item")
    path = zarr3(folder, "w", array, (8, 6), (4, 2), codecs=("zstd",), leave_out=(1, 4), fill_value=fill)
    (path / "c" / "0" / "1").unlink()
    with sw.open_checkpoint(folder) as checkpoint:
        expected = checkpoint.read("w")
    assert (expected != array).any()
    sw.save_checkpoint(tmp_path / "same", {"w": expected}, to="dcp", sync=False)
    assert sw.diff_checkpoints(folder, tmp_path / "same") == []
    sw.reshard_checkpoint(folder, tmp_path / "new", sync=False)
    assert sw.diff_checkpoints(tmp_path / "new", tmp_path / "same") == []
    expected[1, 3] += 1
    expected[0, 7] += 1
    sw.save_checkpoint(tmp_path / "other", {"w": expected}, to="dcp", sync=False)
    for pair in ((folder, tmp_path / "other"), (tmp_path / "other", folder)):
        (found,) = sw.diff_checkpoints(*pair)
        assert (found.index, found.count) == ((0, 7), 2)
        assert abs(int(found.first) - int(found.second)) == 1


def test_two_tensors_that_nobody_stored(tmp_path: Path) -> None:
    for name, fill in (("a", 1), ("b", 2)):
        path = zarr2(item(tmp_path / name), "w", numbers(2, 2), (1, 1), fill_value=fill)
        (path / ".zarray").write_text(
            json.dumps(json.loads((path / ".zarray").read_text()) | {"shape": [2**25, 2**25]})
        )
        for cell in ("0.0", "0.1", "1.0", "1.1"):
            (path / cell).unlink()
    (found,) = sw.diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert (found.index, found.count, float(found.first), float(found.second)) == ((0, 0), 2**50, 1, 2)


# Chunks and memory.


@pytest.mark.parametrize("compressor", PACK)
def test_a_chunk_larger_than_the_memory_is_refused_at_the_start(compressor: str, tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    path = zarr2(folder, "w", numbers(4), (4,), compressor={"id": compressor}) / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chunks": [2**28]}))
    zarr2(folder, "v", numbers(4), (4,))
    message = r"memory is 16.0 MiB; tensor 'w' is stored in chunks of 1.0 GiB, .* at least 2.0 GiB are needed"
    for call in (
        lambda: sw.verify_checkpoint(folder, memory=16 << 20),
        lambda: sw.diff_checkpoints(folder, folder, memory=16 << 20),
        lambda: sw.reshard_checkpoint(folder, tmp_path / "new", memory=16 << 20),
        lambda: sw.plan_checkpoint(folder, tmp_path / "new", memory=16 << 20),
        lambda: sw.store.learn_rewrites(folder, folder, memory=16 << 20),
    ):
        with pytest.raises(sw.LayoutError, match=message):
            call()
    # Where nobody says how much, 256 MiB: a few elements must not take as much as a chunk claims to be.
    with sw.open_checkpoint(folder) as checkpoint:
        for read in (checkpoint["w"].read, partial(checkpoint.read, "w"), checkpoint["w"].pieces[0].decode):
            with pytest.raises(sw.LayoutError, match=r"memory is 256.0 MiB; .* chunks of 1.0 GiB, .* 2.0 GiB are need"):
                read((slice(0, 4),))
            with pytest.raises(sw.LayoutError, match=r"memory is 1.0 GiB; .* at least 2.0 GiB are needed"):
                read(memory=1 << 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["item"]
    # Nor is what cannot be true decoded when nobody names a memory.
    with (
        sw.open_checkpoint(folder) as checkpoint,
        pytest.raises(sw.ParseError, match="cannot give the 1073741824 bytes"),
    ):
        checkpoint.read("w", memory=2 << 30)


@pytest.mark.heavy
@pytest.mark.parametrize("chunks", [(50, 40), (7, 40), (50, 3), (16, 16)])
def test_each_chunk_is_decoded_once(chunks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(2000.0).reshape(50, 40)
    folder = item(tmp_path / "item")
    zarr2(folder, "two", array, chunks, compressor={"id": "zlib"})
    zarr3(
        folder,
        "three",
        array,
        tuple(-(-n // 2) * 2 for n in chunks),
        tuple(-(-n // 2) for n in chunks),
        codecs=("zstd",),
    )
    seen: list[str] = []
    real = codecs.decompress

    def counted(name: str, data: bytes, size: int, where: str) -> Any:
        seen.append(data.hex())
        return real(name, data, size, where)

    monkeypatch.setattr(zarr, "decompress", counted)
    whole = sum(1 for _ in folder.glob("two/[0-9]*"))
    memory = 40_000
    sw.verify_checkpoint(folder, memory=memory)
    counts = len(seen)
    assert len(set(seen)) == counts >= whole
    seen.clear()
    sw.reshard_checkpoint(folder, tmp_path / "new", memory=memory, sync=False)
    assert len(seen) == counts
    assert sw.diff_checkpoints(folder, tmp_path / "new", memory=memory) == []
    sw.reshard_checkpoint(folder, tmp_path / "half", memory=memory, dtype="float32", sync=False)
    with sw.open_checkpoint(tmp_path / "half") as checkpoint:
        for name in ("two", "three"):
            assert checkpoint.read(name).tolist() == array.astype("f4").tolist()
    array[0, 1] = -1
    sw.save_checkpoint(tmp_path / "other", {"two": array, "three": array}, sync=False)
    seen.clear()
    found = sw.diff_checkpoints(folder, tmp_path / "other", memory=memory)
    assert [(one.name, one.index, one.count) for one in found] == [("three", (0, 1), 1), ("two", (0, 1), 1)]
    assert len(seen) == 2 * counts  # Once for the digest, and once for the values.


def test_chunks_that_are_damaged(tmp_path: Path) -> None:
    array = numbers(4, 4)
    folder = item(tmp_path / "item")
    chunk = zarr2(folder, "w", array, (4, 4), compressor={"id": "zstd"}) / "0.0"
    plain = zarr2(folder, "p", array, (4, 4)) / "0.0"
    checked = zarr3(folder, "c", array, (4, 4), codecs=("crc32c",)) / "c/0/0"
    inner = zarr3(folder, "i", array, (4, 4), (2, 2)) / "c/0/0"
    good = {path: path.read_bytes() for path in (chunk, plain, checked, inner)}

    def refused(name: str, path: Path, data: bytes, message: str) -> None:
        path.write_bytes(data)
        with sw.open_checkpoint(folder) as checkpoint, pytest.raises(sw.ParseError, match=message):
            checkpoint.read(name)
        path.write_bytes(good[path])

    refused("w", chunk, b"", "not zstd data|64 were expected")
    refused("w", chunk, b"xyz", "not zstd data")
    refused("w", chunk, good[chunk][:-3], "not zstd data|64 were expected")
    refused("w", chunk, PACK["zstd"](bytes(63)), "gives 63 bytes when decompressed; 64 were expected")
    refused("w", chunk, PACK["zstd"](bytes(65)), "claims 65 bytes")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**6))
    refused("w", chunk, unsized, "gives more bytes when decompressed; 64 were expected")
    refused("w", chunk, bytes(10**6), "a value of 1000000 bytes, over the limit of")
    refused("p", plain, bytes(63), "has 63 bytes; 64 were expected")
    refused("p", plain, bytes(65), "has 65 bytes; 64 were expected")
    refused("c", checked, b"\1" + good[checked][1:], "the checksum of the chunk is wrong")
    refused("c", checked, b"abc", "the checksum of the chunk is wrong")
    refused("i", inner, good[inner][:20], "a shard of 20 bytes with an index of 68")
    refused("i", inner, good[inner][:-1] + b"\0", "the checksum of the shard's index is wrong")
    index = good[inner][-68:-20] + struct.pack("<QQ", 100, 10**6)
    refused("i", inner, good[inner][:-68] + index + struct.pack("<I", crc32c(index)), "its chunk 3 is at bytes 100 to ")
    # Nor is the index, which comes first here, taken for elements.
    first = zarr3(folder, "f", array, (4, 4), (2, 2), codecs=(), first=True) / "c/0/0"
    good[first] = first.read_bytes()
    index = struct.pack("<QQ", 67, 16) + good[first][16:64]
    refused("f", first, index + struct.pack("<I", crc32c(index)) + good[first][68:], "its chunk 0 is at bytes 67 to 83")
    with sw.open_checkpoint(folder) as checkpoint:
        for name in "wpcif":
            assert checkpoint.read(name).tolist() == array.tolist()


def test_chunks_that_share_bytes_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    array = numbers(4, 4)
    for first in (False, True):
        folder = item(tmp_path / f"item{first}")
        shard = zarr3(folder, "i", array, (4, 4), (2, 2), first=first) / "c/0/0"
        good, begin = shard.read_bytes(), 68 if first else 0
        entries = [list(struct.unpack_from("<QQ", good[:68] if first else good[-68:], 16 * at)) for at in range(4)]
        for changed in (
            [entries[0]] * 4,  # All of them the same bytes.
            [*entries[:3], entries[0]],
            [*entries[:3], [begin, sum(length for _, length in entries)]],  # One that is all the others.
            [entries[0], [entries[1][0] - 1, entries[1][1]], *entries[2:]],
        ):
            index = b"".join(struct.pack("<QQ", *entry) for entry in changed)
            index += struct.pack("<I", crc32c(index))
            shard.write_bytes(index + good[68:] if first else good[:-68] + index)
            with pytest.raises(sw.ParseError, match=r"'i/c/0/0': chunks of the shard share bytes: byte \d+ of it"):
                sw.open_checkpoint(folder)
        # In another order, and with one that is not there, they are as good.
        shard.write_bytes(good)
        with sw.open_checkpoint(folder) as checkpoint:
            assert checkpoint.read("i").tolist() == array.tolist()


def test_values_of_a_database_that_share_bytes_are_refused(tmp_path: Path) -> None:
    array = numbers(4)
    for is_shared in (False, True):
        base = Database(item(tmp_path / f"item{is_shared}"))
        said = {
            "zarr_format": 2, "shape": [4], "chunks": [2], "compressor": None, "dtype": "<f4", "fill_value": None,
            "filters": None, "order": "C",
        }  # fmt: skip
        base.values = array[: 2 if is_shared else 4].astype("<f4").tobytes()
        keys, at = [b"w/.zarray", b"w/0", b"w/1"], [0, 0 if is_shared else 8]
        text = json.dumps(said).encode()
        prefixes, suffixes = shared(keys)
        leaf = b"\0" + file_table(["d/values"]) + uleb(3, *prefixes[1:], *map(len, suffixes)) + b"".join(suffixes)
        leaf += uleb(len(text), 8, 8) + bytes([0, 1, 1]) + uleb(0, 0, *at) + text
        base.manifest(0, base.add(leaf))
        if is_shared:
            with pytest.raises(sw.ParseError, match=r"chunks of the array 'w' share bytes: byte 0 of .*values"):
                sw.open_checkpoint(base.folder)
            continue
        with sw.open_checkpoint(base.folder) as checkpoint:
            assert checkpoint.read("w").tolist() == array.tolist()


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("more", [-1, 1, 10**5])
def test_a_chunk_of_another_length(name: str, more: int, tmp_path: Path) -> None:
    """What a chunk gives beyond its elements is not left out in silence."""
    folder = item(tmp_path / "item")
    chunk = zarr2(folder, "w", numbers(16), (16,), compressor={"id": name}) / "0"
    chunk.write_bytes(PACK[name](bytes(64 + more)))
    message = r"w/0'?: .* bytes when decompressed; (64 |the limit is 64)"
    with sw.open_checkpoint(folder) as checkpoint, pytest.raises(sw.ParseError, match=message):
        checkpoint.read("w")


def test_a_bomb_does_not_go_off(tmp_path: Path) -> None:
    """A frame that says that it gives 2**40 bytes, and one that gives 2**30 without saying so."""
    folder = item(tmp_path / "item")
    chunk = zarr2(folder, "w", numbers(4), (4,), compressor={"id": "zstd"}) / "0"
    frame = bytearray(PACK["zstd"](bytes(300)))
    huge = bytes([*frame[:4], 0xC0 | 0x20, *struct.pack("<Q", 2**40)]) + bytes(10)
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    large = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1 << 6)) + compressor.flush()
    for data in (huge, large):
        chunk.write_bytes(data)
        with sw.open_checkpoint(folder) as checkpoint, pytest.raises(sw.ParseError):
            checkpoint.read("w")


def test_folders_that_cannot_be_opened(tmp_path: Path) -> None:
    folder = item(tmp_path / "item", use_ocdbt=True)
    with pytest.raises(sw.ParseError, match=r"has no manifest\.ocdbt: the databases of the processes were not merged"):
        sw.open_checkpoint(folder)
    folder = item(tmp_path / "item2")
    zarr2(folder, "w", numbers(4), (4,))
    (folder / "commit_success.txt").unlink()
    with pytest.raises(sw.ParseError, match=r"has no commit_success\.txt, which Orbax writes last"):
        sw.open_checkpoint(folder)
    unfinished = folder.rename(tmp_path / "7.orbax-checkpoint-tmp-1234")
    with pytest.raises(sw.ParseError, match="interrupted save of Orbax"):
        sw.open_checkpoint(unfinished)
    folder = item(tmp_path / "item3", tree_metadata={"('w',)": {
        "key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}})  # fmt: skip
    with pytest.raises(sw.ParseError, match="its tree names the array 'w', which does not exist"):
        sw.open_checkpoint(folder)


def test_two_arrays_of_one_name_are_not_read(tmp_path: Path) -> None:
    """The keys `a`, `b` and the key `a.b`: Orbax 0.12.8 saves both arrays in `a.b`, and restores one as both."""
    tree = {
        f"{keys}": {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array"},
        }
        for keys in (("a", "b"), ("a.b",), ("w",))
    }
    folder = item(tmp_path / "item", tree_metadata=tree)
    for name in ("a.b", "w"):
        zarr2(folder, name, numbers(4), (4,))
    with sw.open_checkpoint(folder) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert "two arrays of its tree have the name 'a.b'" in checkpoint.unreadable["a.b"]


def test_what_a_tree_names_besides_arrays(tmp_path: Path) -> None:
    def folder(name: str, tree: Any) -> Path:
        path = item(tmp_path / name, tree_metadata=tree)
        zarr2(path, "w", numbers(4), (4,))
        return path

    def entry(key: str, **value: Any) -> dict[str, Any]:
        return {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": value}

    fine = {
        "('w',)": entry("w", value_type="jax.Array"),
        "('none',)": entry("none", value_type="None", skip_deserialize=True),
        "('left',)": entry("left", value_type="jax.Array", skip_deserialize=True),
        "('text',)": entry("text", value_type="string"),
    }
    with sw.open_checkpoint(folder("fine", fine)) as checkpoint:
        assert list(checkpoint) == ["w"]
    for number, kind in enumerate(("jax.Array", "np.ndarray", "scalar")):
        path = folder(f"lacking {number}", {**fine, "('v',)": entry("v", value_type=kind)})
        with pytest.raises(sw.ParseError, match="its tree names the array 'v', which does not exist"):
            sw.open_checkpoint(path)
    for number, wrong in enumerate((5, {"value_metadata": {}}, {"key_metadata": [], "value_metadata": 5})):
        with pytest.raises(sw.ParseError, match="tree_metadata does not describe a tree"):
            sw.open_checkpoint(folder(f"wrong {number}", {"('w',)": wrong}))
    path = folder("no object", {})
    (path / "_METADATA").write_text("[]")
    with pytest.raises(sw.ParseError, match="_METADATA: is not a JSON object"):
        sw.open_checkpoint(path)


def test_steps_none_of_which_is_complete(tmp_path: Path) -> None:
    for step in (3, 4):
        folder = item(tmp_path / "run" / str(step) / "params")
        zarr2(folder, "w", numbers(4) * step, (2,))
        (folder / "commit_success.txt").unlink()
        (folder.parent / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "run" / "metrics").mkdir()
    (tmp_path / "run" / "5").write_text("a file")
    with pytest.raises(sw.ParseError, match=r"none of its 2 steps has a commit_success\.txt, which is written last"):
        sw.open_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "3" / "commit_success.txt").write_text("")
    with sw.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.metadata["step"] == 3
        assert checkpoint.read("w").tolist() == (numbers(4) * 3).tolist()


def test_steps_and_items(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step, done in ((9, True), (10, True), (11, False)):
        for name in ("params", "state"):
            folder = item(root / f"ckpt_{step}" / name)
            zarr2(folder, "w", numbers(4) * step, (2,))
            (folder / "_strings.json").write_text('{"name": "x"}')
            (folder / "commit_success.txt").unlink()
        (root / f"ckpt_{step}" / "_CHECKPOINT_METADATA").write_text("{}")
        if done:
            (root / f"ckpt_{step}" / "commit_success.txt").write_text("")
    with sw.open_checkpoint(root) as checkpoint:
        assert checkpoint.metadata["step"] == 10
        assert set(checkpoint) == {"params.w", "state.w"}
        assert checkpoint.read("state.w").tolist() == (numbers(4) * 10).tolist()
        assert checkpoint.objects["params.name"].value() == "x"
    with sw.open_checkpoint(root / "ckpt_9" / "state") as checkpoint:
        assert checkpoint.read("w").tolist() == (numbers(4) * 9).tolist()
    with pytest.raises(sw.ParseError, match="commit_success"):
        sw.open_checkpoint(root / "ckpt_11")


# OCDBT.


@pytest.mark.parametrize("kind", [0, 1])
def test_a_tree_of_three_levels(kind: int, tmp_path: Path) -> None:
    plain = item(tmp_path / "plain")
    arrays = {f"layer_{i}.w": numbers(3, 5) + i for i in range(5)} | {"scalar": numbers()}
    for name, array in arrays.items():
        zarr2(
            plain,
            name,
            array,
            tuple(max(1, n - 1) for n in array.shape),
            compressor={"id": "zstd"} if "3" in name else None,
        )
    entries = entries_of(plain)
    folder = item(tmp_path / "item", use_ocdbt=True)
    base = Database(folder)
    middle: list[tuple[bytes, int, tuple[int, int]]] = []
    for start in range(0, len(entries), 12):
        children = []
        for at in range(start, min(start + 12, len(entries)), 4):
            part = entries[at : at + 4]
            common = shared([part[0][0], part[-1][0]])[0][1]
            children.append((part[0][0], common, base.leaf(part, common)))
        middle.append((children[0][0], 0, base.interior(1, children)))
    base.manifest(2, base.interior(2, middle), kind=kind)
    with sw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint) == set(arrays)
        for name, array in arrays.items():
            assert checkpoint.read(name).tolist() == array.tolist()
        assert any(piece.is_addressable for piece in checkpoint["layer_1.w"].pieces)


def test_an_empty_database(tmp_path: Path) -> None:
    folder = item(tmp_path / "item")
    base = Database(folder)
    base.manifest(0, base.leaf([]))
    assert len(sw.open_checkpoint(folder)) == 0


def simple(tmp_path: Path) -> tuple[Database, list[tuple[bytes, bytes]]]:
    plain = item(tmp_path / "plain")
    zarr2(plain, "w", numbers(30), (30,))
    return Database(item(tmp_path / "item")), entries_of(plain)


def test_the_last_version_of_a_database_counts(tmp_path: Path) -> None:
    base, entries = simple(tmp_path)
    zarr2(item(tmp_path / "other"), "w", numbers(30) + 1, (30,))
    zarr2(tmp_path / "other", "v", numbers(3), (3,))
    old, new = base.leaf(entries), base.leaf(entries_of(tmp_path / "other"))
    base.manifest(0, new, older=(old, old))
    with sw.open_checkpoint(base.folder) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
            "v": numbers(3).tolist(),
            "w": (numbers(30) + 1).tolist(),
        }
    base.manifest(0, old, older=((0, 0), new))
    with sw.open_checkpoint(base.folder) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {"w": numbers(30).tolist()}
    base.manifest(1, base.interior(1, [(entries[0][0], 0, base.leaf(entries))]), older=(new,))
    with sw.open_checkpoint(base.folder) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {"w": numbers(30).tolist()}
    base.manifest(0, (0, 0), older=(old, new))
    assert len(sw.open_checkpoint(base.folder)) == 0


def test_keys_that_take_too_much_memory(tmp_path: Path) -> None:
    base, entries = simple(tmp_path)
    base.manifest(0, base.leaf(entries))
    least = sum(len(key) for key, _ in entries)
    with pytest.raises(sw.ParseError, match=f"keys and paths of more than {least} bytes"):
        ocdbt.OcdbtStore(base.folder, least)


def test_databases_that_are_damaged(tmp_path: Path) -> None:
    base, entries = simple(tmp_path)
    base.manifest(0, base.leaf(entries))
    folder = base.folder
    assert sw.open_checkpoint(folder).read("w").tolist() == numbers(30).tolist()
    manifest, nodes = folder / "manifest.ocdbt", folder / "d/nodes"
    for path in (manifest, nodes):
        data = path.read_bytes()
        for at in range(0, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            with pytest.raises(sw.ParseError):
                sw.open_checkpoint(folder)
        for length in range(0, len(data), 7):
            path.write_bytes(data[:length])
            with pytest.raises(sw.ParseError):
                sw.open_checkpoint(folder)
        path.write_bytes(data)
    (folder / "d/values").write_bytes(b"")
    with pytest.raises(sw.ParseError, match=r"bytes 0 to .* were needed"):
        sw.open_checkpoint(folder).read("w")
    (folder / "d/nodes").unlink()
    with pytest.raises(sw.ParseError, match="does not exist"):
        sw.open_checkpoint(folder)


def test_the_files_of_a_node_lie_in_the_base_path_of_its_own(tmp_path: Path) -> None:
    """Base paths go on from node to node: the manifest's is x/, and the other tables add nothing to it."""
    base, entries = simple(tmp_path)
    base.manifest(1, base.interior(1, [(b"w", 0, base.leaf(entries))]), files=["x/d/nodes"], base=2)
    (base.folder / "x").mkdir()
    (base.folder / "d").rename(base.folder / "x" / "d")
    assert sw.open_checkpoint(base.folder).read("w").tolist() == numbers(30).tolist()


def test_of_several_versions_the_last_one_counts(tmp_path: Path) -> None:
    """In a manifest, and of the manifests that have numbers; what is beside them has other names."""
    base, entries = simple(tmp_path)
    folder = base.folder
    value = numbers(30).tolist()
    old, new = base.leaf([]), base.leaf(entries)
    base.manifest(0, new, older=(old, old))
    assert sw.open_checkpoint(folder).read("w").tolist() == value
    base.manifest(0, old, older=(new,))
    assert list(sw.open_checkpoint(folder)) == []
    # In a tree of height 1, only the last version's height says so.
    base.manifest(1, base.interior(1, [(b"", 0, new)]), older=(old,))
    assert sw.open_checkpoint(folder).read("w").tolist() == value
    base.manifest(0, old, kind=1)
    (folder / "manifest.0000000000000007").rename(folder / "manifest.000000000000000f")
    base.manifest(0, new, kind=1)
    (folder / "manifest.0000000000000007").rename(folder / "manifest.0000000000000010")
    (folder / "manifest.ffffffffffffffff.tmp").write_bytes(b"not yet")
    (folder / "manifest.fff").write_bytes(b"of something else")
    assert sw.open_checkpoint(folder).read("w").tolist() == value
    # One without entries: the database is empty.
    base.manifest(0, (0, 0))
    assert list(sw.open_checkpoint(folder)) == []


def test_databases_that_lie(tmp_path: Path) -> None:
    """Right checksums, wrong contents."""
    base, entries = simple(tmp_path)
    folder = base.folder

    def refused(message: str) -> None:
        with pytest.raises(sw.ParseError, match=message) as caught:
            sw.open_checkpoint(folder)
        assert str(folder) in str(caught.value)

    leaf = base.leaf(entries)
    for outside in ("../nodes", "/etc/passwd", "d/../../x"):
        base.manifest(0, leaf, files=[outside])
        refused("outside its own folder")
    base.manifest(1, leaf)
    refused("the height is not the one in the tree, 1")
    base.manifest(99, leaf)
    refused("a tree of height 99")
    base.manifest(0, (0, 10**6))
    refused("bytes 0 to 1000000 were needed")
    base.manifest(0, leaf, files=[])
    refused("file 0 of 0")
    base.manifest(1, base.interior(1, [(b"w", 0, leaf), (b"x", 0, leaf)]))
    refused("the node is twice in the tree")
    base.manifest(1, base.interior(1, [(b"w", 5, leaf)]))
    refused("a common prefix longer than its first key")
    base.manifest(1, base.interior(1, [(b"w", 0, base.leaf(entries)), (b"w", 0, base.leaf(entries))]))
    refused("is twice in the tree")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(2**40)))
    refused("integers in")
    for number in (b"\xff" * 10, b"\x80" * 9 + b"\2"):  # Without an end, and 2**64.
        base.manifest(0, base.add(bytes([0]) + file_table([]) + number))
        refused("not an integer of 64 bits")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(1, 3) + b"a\xff\xff" + uleb(0, 0)))
    refused("not UTF-8")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(1, 1) + b"a" + uleb(9, 2)))
    refused("neither in the node nor in a file")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(1, 1) + b"a" + uleb(9, 0) + b"xy"))
    refused("9 bytes are needed, but 2 are left")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(1, 1) + b"a" + uleb(0, 0) + b"more"))
    refused("4 bytes after its end")
    base.manifest(0, base.add(bytes([0]) + file_table([]) + uleb(2, 9, 1, 1) + b"ab" + uleb(0, 0, 0, 0)))
    refused("shares more characters with the previous .* than that has")
    (folder / "manifest.ocdbt").write_bytes(node(0x0CDB3A2A, bytes(16) + uleb(1, 0, 0) + bytes([4]) + uleb(0)))
    refused("no numbered manifest")
    (folder / "manifest.ocdbt").write_bytes(node(0x0CDB3A2A, bytes(16) + uleb(7, 0, 0) + bytes([4]) + uleb(0)))
    refused("a manifest of kind 7")


def test_without_zstandard_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    folder = item(tmp_path / "item")
    zarr2(folder, "w", numbers(4), (4,), compressor={"id": "zstd"})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with sw.open_checkpoint(folder) as checkpoint:
        assert checkpoint["w"].shape == (4,)
        with pytest.raises(ImportError, match=r"pip install 'shardwise\[orbax\]'"):
            checkpoint.read("w")
