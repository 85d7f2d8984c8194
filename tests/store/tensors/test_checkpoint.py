"""Arrays of a checkpoint: bit for bit what the safetensors package reads, and not one copy."""

import builtins
import gc
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ParseError, SizeOverflowError, open_checkpoint, reshard_checkpoint
from shardwise._dtypes import CODES
from shardwise.fit import fits
from shardwise.store.data.boxes import Reads, read_piece
from shardwise.store.data.engine import CopyJob
from shardwise.store.tensors.stored import StoredTensor
from tests.checks import open_below

from ..conftest import Write, encode, peer

# What safetensors calls each dtype when it writes, and the numpy type that the bytes mean.
NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "C64": np.complex64, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
PACKED = {"F4", "F6_E2M3", "F6_E3M2"}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "h.0.weight": random.standard_normal((6, 35), dtype=np.float32),
        "h.0.bias": random.integers(0, 255, 7, dtype=np.uint8),
        "scale": np.array(2.5),
        "nothing": np.zeros((0, 4), np.float16),
        "cube": random.integers(-9, 9, (3, 4, 5)),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, {"format": "np", "note": "é"})
    return path, tensors


def test_files_that_the_package_writes_are_read_bit_for_bit(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, tensors = model
    with open_checkpoint(path) as checkpoint:
        assert dict(checkpoint.metadata) == {"format": "np", "note": "é"}
        assert set(checkpoint) == set(tensors)
        assert len(checkpoint) == 5
        for name, expected in tensors.items():
            array = checkpoint[name].array()
            assert type(array) is np.ndarray
            assert array.dtype == expected.dtype
            assert array.shape == expected.shape
            assert array.tobytes() == expected.tobytes()
            assert checkpoint[name].nbytes == expected.nbytes
            start = checkpoint[name].pieces[0].extent().offset
            assert path.read_bytes()[start : start + expected.nbytes] == expected.tobytes()


def test_every_dtype_of_the_package(write: Write) -> None:
    assert set(NUMPY_TYPES) | PACKED == set(CODES)
    for code, (_, bits, *_) in CODES.items():
        data = bytes([0, 1, 1, 0, 1, 0, 1, 1] if code == "BOOL" else range(100, 100 + bits))
        header = {"x": {"dtype": code, "shape": [len(data) * 8 // bits], "data_offsets": [0, len(data)]}}
        assert peer(encode(header, data)) == {"x": (code, (len(data) * 8 // bits,))}
        checkpoint = open_checkpoint(write(header, data, f"{code}.safetensors"))
        if code in PACKED:
            assert checkpoint["x"].nbytes == len(data)
            for get in (checkpoint["x"].array, checkpoint["x"].read):
                with pytest.raises(TypeError, match=f"tensor 'x' is {code}, {bits} bits an element"):
                    get()
        else:
            assert checkpoint["x"].numpy_dtype == NUMPY_TYPES[code]
            assert checkpoint["x"].array().dtype == NUMPY_TYPES[code]
            assert checkpoint["x"].array().tobytes() == data
            assert checkpoint.read("x").tobytes() == data


def test_without_ml_dtypes_only_the_array_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, bytes(4))
    real = builtins.__import__

    def fail(name: str, *args: Any) -> Any:
        if name == "ml_dtypes":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", fail)
    checkpoint = open_checkpoint(path)
    assert "x" in checkpoint
    assert (checkpoint["x"].bits, checkpoint["x"].shape) == (16, (2,))
    with pytest.raises(ImportError, match=r"tensor 'x' is bfloat16.*pip install 'shardwise\[dtypes\]'"):
        checkpoint["x"].array()


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0, 2**61, 4], [2**61, 0, 4]])
def test_shapes_that_no_array_has(write: Write, tmp_path: Path, shape: list[int]) -> None:
    """2**61 * 4 float32 are 2**65 bytes; numpy multiplies all sizes but those that are 0."""
    path = write({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    with open_checkpoint(path) as stored:
        tensor = stored["a"]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("float32", tuple(shape), 0)
        for get in (partial(stored.read, "a"), tensor.read, tensor.array):
            with pytest.raises(SizeOverflowError, match=r"tensor 'a' of \(.*: numpy has no such array"):
                get()
    # It has no bytes, so there is nothing to convert.
    reshard_checkpoint(path, tmp_path / "out", to="hf", dtype="bfloat16")
    with open_checkpoint(tmp_path / "out") as stored:
        assert (stored["a"].dtype, stored["a"].shape) == ("bfloat16", tuple(shape))


def test_arrays_are_views_of_the_file_and_read_only(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(model[0])
    first, second = checkpoint["cube"].array(), checkpoint["cube"].array()
    assert np.shares_memory(first, second)
    assert first.__array_interface__["data"][0] == second.__array_interface__["data"][0]
    assert not first.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        first.flags.writeable = True


def test_arrays_outlive_the_checkpoint(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, tensors = model
    checkpoint = open_checkpoint(path)
    array = checkpoint["cube"].array()
    checkpoint.close()
    checkpoint.close()
    del checkpoint
    gc.collect()
    path.unlink()
    assert (array == tensors["cube"]).all()


def test_a_closed_checkpoint_still_knows_its_header(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    with open_checkpoint(model[0]) as checkpoint:
        pass
    assert checkpoint["cube"].shape == (3, 4, 5)
    for get in (checkpoint["cube"].array, checkpoint["cube"].read, lambda: checkpoint.read("cube")):
        with pytest.raises(ValueError, match="closed"):
            get()


def test_descriptors_are_given_back(model: tuple[Path, dict[str, np.ndarray]], write: Write) -> None:
    bad = write({"x": 1}, name="bad.safetensors")
    checkpoint = open_checkpoint(model[0])
    if not open_below(model[0].parent):
        pytest.skip("counts descriptors in /proc")
    del checkpoint
    for _ in range(5):
        open_checkpoint(model[0])["cube"].array()
        with pytest.raises(ParseError):
            open_checkpoint(bad)
    gc.collect()
    assert open_below(model[0].parent) == 0


def made(names: set[str]) -> int:
    """The number of tensors of these names that there are."""
    return sum(type(each) is StoredTensor and each.name in names for each in gc.get_objects())


@pytest.mark.parametrize("files", [1, 3])
def test_tensors_are_made_when_they_are_asked_for(tmp_path: Path, files: int) -> None:
    names = [f"made when asked for {number}" for number in range(60)]
    index: dict[str, str] = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05}-of-{files:05}.safetensors"
        held = {name: np.full((2, 3), at, np.int16) for at, name in enumerate(names) if at % files == number}
        safetensors.numpy.save_file(held, tmp_path / file, {"shardwise.aliases": json.dumps({"tied": names[0]})})
        index |= dict.fromkeys(held, file)
    if files > 1:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    known = {*names, "tied"}
    with open_checkpoint(tmp_path) as checkpoint:
        assert (len(checkpoint), set(checkpoint), checkpoint.nbytes) == (61, known, 61 * 12)
        assert fits(tmp_path).sizes[0].verdict == "fits"
        assert made(known) == 0
        tensor = checkpoint[names[7]]
        assert made(known) == 1
        assert checkpoint[names[7]] is tensor
        assert (tensor.dtype, tensor.shape, tensor.read().tolist()) == ("int16", (2, 3), [[7] * 3] * 2)
        assert (checkpoint["tied"].alias_of, checkpoint["tied"].read().tolist()) == (names[0], [[0] * 3] * 2)
        assert made(known) == 2
        assert sum(tensor.nbytes for tensor in checkpoint.values()) == checkpoint.nbytes
        assert made(known) == 61


def test_names_that_are_not_there(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(model[0])
    assert "x" not in checkpoint
    for get in (checkpoint.__getitem__, checkpoint.read):
        with pytest.raises(KeyError, match="has no tensor 'x'"):
            get("x")
        with pytest.raises(KeyError, match=r"has no tensor 'h\.0\.wieght'; did you mean 'h\.0\.weight'"):
            get("h.0.wieght")
    assert checkpoint.get("x") is None
    assert repr(checkpoint) == f"<StoredCheckpoint {str(model[0])!r}: safetensors, 5 tensors>"


# --- reads that copy ----------------------------------------------------------------------------------------------


SHAPES = [(), (9,), (5, 7), (3, 4, 5), (40, 90_000), (3, 50, 7000), (2, 300_000), (0, 3)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], tuple[Path, np.ndarray]]:
    """By its shape, a tensor and its file."""
    found = {}
    for shape in SHAPES:
        values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        path = tmp_path_factory.mktemp("read") / "model.safetensors"
        safetensors.numpy.save_file({"x": values}, path)
        found[shape] = path, values
    return found


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_read_gives_what_slicing_gives(
    data: st.DataObject, written: dict[tuple[int, ...], tuple[Path, np.ndarray]]
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    path, values = written[shape]
    ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    box = tuple(slice(*end) for end in ends)
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.read("x", box), values[box])
        # Of a small box too by the engine, which larger ones with long runs are for.
        read = np.full_like(values[box], -1, order="C")
        read_piece(checkpoint["x"].pieces[0].extent(), [start for start, _ in ends], read, Reads(1, 1))
        assert np.array_equal(read, values[box])
        out = np.full_like(values, -1)
        assert checkpoint.read("x", out=out) is out
        assert np.array_equal(out, values)


@pytest.mark.parametrize(
    ("box", "error", "message"),
    [
        ((slice(0, 1),), IndexError, r"has 1 slice; the tensor has 2 dims"),
        ((slice(0, 7), slice(None)), IndexError, r"slice\(0, 7, None\) of dim 0 is not within 0 to 6"),
        ((slice(None), slice(-1, 3)), IndexError, "dim 1"),
        ((slice(3, 2), slice(None)), IndexError, "dim 0"),
        ((slice(0, 4, 2), slice(None)), IndexError, "step 1"),
        ((slice(0, 1.0), slice(None)), TypeError, "float"),
        ((0, slice(None)), TypeError, "tuple of slices"),
        (slice(None), TypeError, "tuple of slices"),
    ],
)
def test_boxes_that_do_not_fit(
    model: tuple[Path, dict[str, np.ndarray]], box: Any, error: type[Exception], message: str
) -> None:
    with open_checkpoint(model[0]) as checkpoint, pytest.raises(error, match=message):
        checkpoint.read("h.0.weight", box)


def test_outputs_that_do_not_fit(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    frozen = np.empty((6, 35), np.float32)
    frozen.flags.writeable = False
    with open_checkpoint(model[0]) as checkpoint:
        for out in (np.empty((6, 34), np.float32), np.empty((6, 35)), np.empty((35, 6), np.float32).T, frozen):
            with pytest.raises(ValueError, match="out "):
                checkpoint.read("h.0.weight", out=out)
        with pytest.raises(TypeError, match="out must be a numpy array, got list"):
            checkpoint.read("h.0.weight", out=[])  # type: ignore[arg-type]


def test_a_column_slice_of_a_large_tensor_is_read_by_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(600 * 4096, dtype=np.int32).reshape(600, 4096)
    path = tmp_path / "model.safetensors"
    near = values.reshape(4800, 512)
    safetensors.numpy.save_file({"near": near, "x": values}, path)
    read: list[int] = []
    run = CopyJob.run

    def counted(job: CopyJob, **options: Any) -> Any:
        report = run(job, **options)
        read.append(report.bytes_read)
        return report

    monkeypatch.setattr(CopyJob, "run", counted)
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("x", (slice(0, 600), slice(512, 1024))), values[:, 512:1024])
        np.testing.assert_array_equal(checkpoint.read("x", (slice(0, 600), slice(8, 16))), values[:, 8:16])
        np.testing.assert_array_equal(checkpoint.read("near", (slice(0, 4800), slice(8, 16))), near[:, 8:16])
        np.testing.assert_array_equal(checkpoint.read("x", (slice(3, 600), slice(0, 4096))), values[3:])
        np.testing.assert_array_equal(checkpoint.read("x", (slice(0, 60), slice(8, 16))), values[:60, 8:16])
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(ParseError, match=r"model\.safetensors"):
            checkpoint.read("x", (slice(0, 600), slice(512, 1024)))
    # Only what is needed is read. What lies in short runs near to one another, in one, or in few is read otherwise.
    assert read == [600 * 512 * 4, 600 * 8 * 4]


# --- a file that changes under our hands ---------------------------------------------------------------------------


def test_a_truncated_file_is_an_error_and_not_a_signal(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, tensors = model
    checkpoint = open_checkpoint(path)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ParseError, match=f"had {size} bytes when it was opened, but has {size - 1} now"):
        checkpoint["cube"].array()
    last = max(tensors, key=lambda name: (checkpoint[name].pieces[0].extent().offset, tensors[name].size))
    with pytest.raises(ParseError, match=f"ends at byte {size - 1}"):
        checkpoint.read(last)


def test_a_file_written_to_is_noticed(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = model
    checkpoint = open_checkpoint(path)
    os.utime(path, ns=(0, 1))
    for get in (checkpoint["cube"].array, checkpoint["cube"].read):
        with pytest.raises(ParseError, match="was written to after it was opened"):
            get()


def test_a_file_replaced_by_renaming_does_not_matter(model: tuple[Path, dict[str, np.ndarray]], write: Write) -> None:
    path, tensors = model
    checkpoint = open_checkpoint(path)
    write({}, name="other").rename(path)
    assert (checkpoint["cube"].array() == tensors["cube"]).all()
    assert (checkpoint.read("cube") == tensors["cube"]).all()


# --- what is not a file ----------------------------------------------------------------------------------------------


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            open_checkpoint(path)
        except ParseError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(600)
    assert "is a FIFO; a regular file is needed" in str(caught[0])


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_refused(device: str) -> None:
    with pytest.raises(ParseError, match="is a character device"):
        open_checkpoint(device)


def test_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        open_checkpoint(tmp_path / "gone.safetensors")
    with pytest.raises(ParseError, match="the folder is empty"):
        open_checkpoint(tmp_path)
    for path in (None, 3, b"x"):
        with pytest.raises(TypeError):
            open_checkpoint(path)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="null byte"):
        open_checkpoint("a\0b")
    with pytest.raises(OSError, match="surrogate pair"):
        open_checkpoint("a\ud800b")
