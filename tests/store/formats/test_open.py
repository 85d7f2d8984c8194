"""What a path is taken for, what is refused with which sentence, and files that change while they are read."""

import copy
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw
from shardwise.store import StoredCheckpoint
from shardwise.store.data.files import DataFile
from shardwise.store.formats.known import FORMS, Form
from tests.checks import open_below, refused

from ..conftest import encode
from ..torch_files import save, tensor


def test_a_safetensors_file_and_folders_of_them(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, np.int64),
        "s": np.array(2.0),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with sw.open_checkpoint(path) as checkpoint:
            assert (checkpoint.format, dict(checkpoint.metadata)) == ("safetensors", {"format": "pt"})
            assert (checkpoint.given, checkpoint.path) == (path, tmp_path / "model.safetensors")
            assert checkpoint.part(lambda name: name == "a").given == path
            assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
                name: np.asarray(array).tolist() for name, array in arrays.items()
            }
            assert checkpoint["a"].array().tolist() == arrays["a"].tolist()
            assert checkpoint.nbytes == 24 + 32 + 8
            assert (
                repr(checkpoint)
                == f"<StoredCheckpoint {str(tmp_path / 'model.safetensors')!r}: safetensors, 3 tensors>"
            )
            assert repr(checkpoint["a"]) == "<StoredTensor 'a': float32 (2, 3), 1 piece>"
            assert "a" in checkpoint
            assert "z" not in checkpoint
            with pytest.raises(KeyError):
                checkpoint.read("z")
    # Another name, known by its first bytes.
    (tmp_path / "model.safetensors").rename(tmp_path / "weights")
    assert len(sw.open_checkpoint(tmp_path / "weights")) == 3


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "m.safetensors")
    with sw.open_checkpoint(tmp_path) as checkpoint:
        for box in (
            (slice(0, 3), slice(0, 1)),
            (slice(0, 2),),
            (slice(0, 2, 2), slice(0, 1)),
            (slice(-1, 1), slice(0, 1)),
        ):
            with pytest.raises(IndexError):
                checkpoint.read("a", box)
        for out in (np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32).T):
            with pytest.raises(ValueError, match="out"):
                checkpoint.read("a", out=out)
        with pytest.raises(TypeError, match="box"):
            checkpoint.read("a", [0, 1])  # type: ignore[arg-type]
        with pytest.raises(IndexError):
            _ = checkpoint["a"].pieces[1]


SENTENCES: dict[str, tuple[dict[str, bytes], str]] = {
    "nothing": ({}, "not a checkpoint of any known format; the folder is empty"),
    "something else": ({"readme.txt": b"", "b": b""}, "it holds 'b, readme.txt'"),
    "fsdp1 of torchtune": ({"x_fsdp_1_rank_3.pt": b""}, "flat parameters of FSDP1.*save it once with"),
    "fsdp2 without a model": ({"optim_world_size_1_rank_0.pt": b""}, "no files of the model, which have the names"),
    "vllm": ({"model-rank-0-part-0.safetensors": b""}, "an engine's sharded state"),
    "deepspeed's own folder": (
        {"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": b""},
        r"has no \*_model_states\.pt: files are missing",
    ),
    "meta": ({"consolidated.00.pth": b"", "consolidated.01.pth": b""}, "a file for each rank; .* but rules can"),
    "metaseq": ({"reshard-model_part-0.pt": b"", "reshard-model_part-1.pt": b""}, "a file for each rank"),
    "mixtral": ({f"consolidated.0{i}.pt": b"" for i in range(8)}, "a file for each rank"),
    "tensorflow": ({"m.ckpt.index": b"", "m.ckpt.data-00000-of-00001": b"", "checkpoint": b""}, "of TensorFlow"),
    "paddle": ({"model_state.pdparams": b"\x80\4", "config.json": b""}, "of PaddlePaddle"),
    "mlx": ({"weights.npz": b"PK\3\4", "config.json": b"{}"}, r"its file 'weights\.npz' is an archive of numpy\.savez"),
    "torchtune": (
        {f"hf_model_000{i}_0.pt": b"PK\3\4" for i in (1, 2)},
        r"by itself, one of 2 \.pt files, and nothing",
    ),
    "fairseq": ({"checkpoint_best.pt": b"PK\3\4", "dict.txt": b""}, "'checkpoint_best.pt' can be opened by itself$"),
    "nemo": ({"m.nemo": b"./".ljust(257, b"\0") + b"ustar"}, r"its file 'm\.nemo' is an archive of NeMo"),
    "easylm": ({"streaming_train_state": b"\x92"}, "is a stream of EasyLM"),
    "by hand": ({"model_rank0.pth": b"", "model_rank1.pth": b"", "config.json": b""}, "a file for each rank"),
    "tensor parallel": ({"tp_00.bin": b"", "tp_01.bin": b""}, "a file for each rank"),
    "dcp without its index": ({"__0_0.distcp": b""}, r"no \.metadata, which is written last"),
    "dcp of ranks": ({"__0.metadata": b"", "__0_0.distcp": b""}, "use_collectives=False"),
    "orbax unfinished": ({"1.orbax-checkpoint-tmp-7": b""}, "it only has an interrupted save of Orbax"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_cannot_be_read_is_refused_with_a_sentence(case: str, tmp_path: Path) -> None:
    names, message = SENTENCES[case]
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert len(str(caught.value)) < 450 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.keras", b"PK\3\4", r"unzip it and open the model\.weights\.h5"),
        ("m.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", r"before 1\.6"),
        ("m.pt", b"sys_info".ljust(257, b"\0") + b"ustar", r"before 1\.6"),
        ("m.tar", b"README.md".ljust(257, b"\0") + b"ustar", "it is a tar archive"),
        ("m.pt", b"", "it is empty"),
        ("m.txt", b"hello there", "it is text: 'hello there'"),
        ("m.gguf", b"GGUF\3\0\0\0", "is a GGUF file, as used by llama.cpp.*gguf_file=NAME"),
        ("m.npz", b"PK\3\4", r"numpy\.savez; save_checkpoint"),
        ("m.nemo", b"./".ljust(257, b"\0") + b"ustar", r"an archive of NeMo; unpack it \(tar xf FILE\)"),
        ("flax_model.msgpack", b"\x81", "is a file of Flax; save_checkpoint"),
        ("streaming_params_27", b"\x92", r"is a stream of EasyLM's; save_checkpoint"),
        ("m.ckpt.data-00000-of-00001", b"\0" * 9, r"tf\.train\.load_checkpoint"),
        ("model_state.pdparams", b"\x80\4", r"paddle\.load\(FILE, return_numpy=True\)"),
        ("m.zst", b"\x28\xb5\x2f\xfd" + bytes(20), "it is compressed by zstd"),
        ("m.pkl", b"\x80\4" + bytes([149, 255, 254, 3]), "it is a Python pickle"),
        ("m.bin", b"\xfe\xdc\xba" * 9, "it is of an unknown kind, beginning with b'"),
        ("m.json", b' {"a": 1}', "it is JSON: '"),
    ],
)
def test_files_that_cannot_be_read(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(tmp_path / name)


def test_paths_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path / "nul\0", "\ud800"):
        with pytest.raises(OSError, match=r"No such file|no file can have this name"):
            sw.open_checkpoint(path)
    wrong: Any
    for wrong in (5, None):
        with pytest.raises(TypeError):
            sw.open_checkpoint(wrong)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo.safetensors")
        with pytest.raises(sw.ParseError, match="is a FIFO"):
            sw.open_checkpoint(tmp_path / "fifo.safetensors")


def test_a_form_is_one_entry_and_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    module = type(sys)("shardwise.store.formats.mine")
    module.open_form = lambda path: StoredCheckpoint(path, "mine", {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardwise.store.formats.mine", module)
    mine = Form("mine", lambda target: "mine.json" in target.names, "mine")
    FORMS.insert(0, mine)
    request.addfinalizer(lambda: FORMS.remove(mine))
    (tmp_path / "mine.json").write_text("{}")
    assert sw.open_checkpoint(tmp_path).format == "mine"


def test_limits_of_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"

    def refused(header: Any, message: str, data: bytes = b"") -> None:
        path.write_bytes(encode(header, data))
        with pytest.raises(sw.ParseError, match=message) as caught:
            sw.open_checkpoint(path)
        assert len(str(caught.value)) < 600

    refused(
        {"a": {"dtype": "F32", "shape": [1] * 50_000, "data_offsets": [0, 4]}},
        "has 50000 dims, over the limit of 64",
        bytes(4),
    )
    refused(
        {"n" * 5000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, "is not text of at most 4096 bytes", b"1"
    )
    path.write_bytes(encode({"a": {"dtype": "F32", "shape": [1] * 64, "data_offsets": [0, 4]}}, bytes(4)))
    assert sw.open_checkpoint(path)["a"].ndim == 64


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize("part", [b"[],", b"{},", b'"":0,', b"0,"])
def test_a_long_header_takes_memory_in_proportion(part: bytes, tmp_path: Path) -> None:
    """A header of 30 MB of nothing but empty lists took 900 MB before the error."""
    import subprocess

    text = (b'{"a":[' if part[0] in b"[{0" else b'{"a":{') + part * (15_000_000 // len(part))
    text += b"0]}" if part[0] in b"[{0" else b'"b":0}}'
    path = tmp_path / "m.safetensors"
    path.write_bytes(encode(text))
    code = (
        "import sys, resource, shardwise as sw\n"
        "sw.open_checkpoint\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (200 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "try: sw.open_checkpoint(sys.argv[1])\n"
        "except sw.ParseError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=3600, check=True
    )
    assert "m.safetensors" in done.stdout


# Files that change while they are read.


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one size and one time, of ones and of twos."""
    paths = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for value, path in enumerate(paths, 1):
        safetensors.numpy.save_file({"w": np.full(1 << 20, value, np.float32)}, path)
        os.utime(path, ns=(10**18, 10**18))
    return paths


def test_closing_in_one_thread_does_not_swap_the_file_under_another(tmp_path: Path) -> None:
    """The descriptor that `close` gave back went to the next file, and reads went on with it."""
    one, two = pair(tmp_path)
    out = np.empty(1 << 20, np.float32)
    wrong: list[Any] = []
    finished = 0
    for _ in range(60):
        checkpoint = sw.open_checkpoint(one)
        ready = threading.Event()

        def read(checkpoint: Any = checkpoint, ready: threading.Event = ready) -> None:
            nonlocal finished
            ready.set()
            try:
                checkpoint.read("w", out=out)
                finished += 1
            except ValueError as error:
                if "closed" not in str(error):
                    wrong.append(error)
                return
            if not (out == 1).all():
                wrong.append(np.unique(out))

        thread = threading.Thread(target=read)
        thread.start()
        ready.wait()
        checkpoint.close()
        others = [sw.open_checkpoint(two) for _ in range(8)]
        thread.join()
        for other in others:
            other.close()
    assert wrong == []


def test_a_read_that_is_under_way_keeps_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1" * 100)
    file = DataFile(path)
    with file.descriptor() as number:
        file.close()
        (tmp_path / "g").write_bytes(b"2" * 100)
        other = DataFile(tmp_path / "g")
        assert os.pread(number, 100, 0) == b"1" * 100
        with pytest.raises(ValueError, match="closed"), file.descriptor():
            pass
        assert other.read(0, 100) == b"2" * 100
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_more_files_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of those that the process may have."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    held = []
    for number in range(50):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes([number]) * 10)
        held.append(DataFile(path))
    assert open_below(tmp_path) in (8, None)
    for number, file in enumerate(held):
        assert file.read(0, 10) == bytes([number]) * 10
    # One that lost its descriptor is known again, unless it is another file now.
    replaced = tmp_path / "new"
    replaced.write_bytes(bytes([1]) * 10)
    os.utime(replaced, ns=(0, held[0].status[3]))
    replaced.rename(tmp_path / "0")
    with pytest.raises(sw.ParseError, match="is not the file that was opened"):
        held[0].read(0, 10)
    (tmp_path / "2").unlink()
    with pytest.raises(FileNotFoundError):
        held[2].read(0, 10)
    for file in held:
        file.close()


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float32)
    path = tmp_path / "m.pt"
    for grow in (-1, 1, 0):
        path.write_bytes(save({"w": tensor(array, "0")}))
        checkpoint = sw.open_checkpoint(path)
        data, before = path.read_bytes(), path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:  # Some file systems tell times apart in seconds only.
            path.write_bytes(data[:grow] if grow < 0 else data + bytes(grow))
            time.sleep(0.01)
        for get in (checkpoint["w"].read, checkpoint["w"].array):
            with pytest.raises(sw.ParseError, match=r"m\.pt: (had|was written to|ends at)"):
                get()


def test_an_array_that_races_a_truncation_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is cut between the look at its size and the map of it, which was a plain ValueError."""
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.ones(1000, np.float32)}, path)
    checkpoint = sw.open_checkpoint(path)
    real = DataFile.check

    def check(self: DataFile) -> None:
        real(self)
        os.truncate(path, 100)

    monkeypatch.setattr(DataFile, "check", check)
    with pytest.raises(sw.ParseError, match="cannot be mapped into memory"):
        checkpoint["w"].array()


def test_metadata_of_names_that_are_json(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(encode({"__metadata__": {"k": json.dumps({"a": 1})}}))
    with sw.open_checkpoint(path) as checkpoint:
        assert (len(checkpoint), dict(checkpoint.metadata)) == (0, {"k": '{"a": 1}'})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no FIFOs")
def test_what_is_not_a_file_is_called_what_it_is(tmp_path: Path) -> None:
    """Nothing is read from it, so it is not "empty" either."""
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a character device")):
        for call in (sw.open_checkpoint, sw.verify_checkpoint):
            with pytest.raises(sw.ParseError, match=f"is {kind}; a regular file is needed"):
                call(path)


def test_what_reads_from_files_is_equal_to_itself_alone_and_stays_in_its_process(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(4.0), "b": np.arange(2.0)}, path)
    with sw.open_checkpoint(path) as stored:
        tensor = stored["a"]
        with sw.open_checkpoint(path) as other:
            for one, another in ((stored, other), (stored, dict(stored))):
                assert one != another
                assert (one == another) is False
            assert (tensor == other["a"]) is False
        for opened in (stored, tensor, tensor.pieces[0], tensor.pieces[0].extent().holder):
            assert opened == opened
            assert {opened: 1}[opened] == 1
        for opened in (stored, tensor, tensor.pieces[0]):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with refused(TypeError, "cannot be pickled or copied; pass the path of the checkpoint, and open it"):
                    copied(opened)


def test_boxes_are_given_away_as_copies(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.arange(4.0)}, tmp_path / "model.safetensors")
    mesh = sw.DeviceMesh((2,), ("x",))
    sw.reshard_checkpoint(
        tmp_path / "model.safetensors", tmp_path / "dcp", {"a": sw.TensorLayout(("x",), mesh)}, to="dcp"
    )
    with sw.open_checkpoint(tmp_path / "dcp") as stored:
        assert stored["a"].boxes.tolist() == [[[0, 2]], [[2, 4]]]
        stored["a"].boxes[:] = 0
        assert stored.read("a").tolist() == [0, 1, 2, 3]
