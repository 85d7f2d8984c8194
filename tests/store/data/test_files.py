"""A descriptor is open as long as someone uses it, and no longer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.store.data import files
from shardwise.store.data.files import DataFile, _Descriptor
from shardwise.store.data.location import hidden_name
from tests.checks import open_below


def is_open(number: int, folder: Path) -> bool:
    """Whether the number is that of the file still: another thread of the tests may have it by now."""
    try:
        return os.path.samestat(os.fstat(number), (folder / "file").stat())
    except OSError:
        return False


def made(folder: Path) -> tuple[int, _Descriptor]:
    (folder / "file").write_bytes(b"data")
    number = os.open(folder / "file", os.O_RDONLY)
    descriptor = _Descriptor(number)
    descriptor.end(idle_only=True)
    assert is_open(number, folder)  # Its maker uses it.
    descriptor.put()
    return number, descriptor


def test_it_is_closed_at_once_without_users(tmp_path: Path) -> None:
    number, descriptor = made(tmp_path)
    descriptor.end()
    assert not is_open(number, tmp_path)
    assert descriptor.take() is None


@pytest.mark.parametrize("users", [1, 2])
def test_it_is_closed_by_the_last_of_its_users(tmp_path: Path, users: int) -> None:
    number, descriptor = made(tmp_path)
    for _ in range(users):
        assert descriptor.take() == number
    descriptor.end(idle_only=True)
    assert descriptor.take() == number
    descriptor.put()
    descriptor.end()
    for _ in range(users):
        assert is_open(number, tmp_path)
        assert descriptor.take() is None
        descriptor.put()
    assert not is_open(number, tmp_path)


def test_it_stays_open_between_users(tmp_path: Path) -> None:
    number, descriptor = made(tmp_path)
    descriptor.take()
    descriptor.put()
    assert is_open(number, tmp_path)
    descriptor.end(idle_only=True)
    assert not is_open(number, tmp_path)


def test_one_that_was_just_opened_again_is_not_taken_away_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader was told that the file was replaced. Here none may stay open, as if others were opened meanwhile."""
    resource = pytest.importorskip("resource")
    (tmp_path / "file").write_bytes(b"data")
    file = DataFile(tmp_path / "file")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
    for _ in range(3):
        files._end_idle(0)
        assert open_below(tmp_path) in (0, None)
        assert file.read(0, 4) == b"data"
    assert DataFile(tmp_path / "file").read(0, 4) == b"data"


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="counts what is open as Linux lists it")
@pytest.mark.parametrize("limit", [64, 20])
def test_a_process_that_may_have_few_descriptors(tmp_path: Path, limit: int) -> None:
    """64 are a system's default; a checkpoint took them all, and what the program opened next failed.

    A quarter of them is for the files: of 20 it is 5.
    """
    (tmp_path / "files").mkdir()
    for number in range(100):
        (tmp_path / "files" / f"{number}").write_bytes(bytes([number]) * 10)
    code = """
import os, resource, sys
from pathlib import Path
from shardwise.store.data.files import DataFile
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
held = [DataFile(Path(sys.argv[1], str(number))) for number in range(100)]
print(sum(os.path.islink(f"/proc/self/fd/{number}") for number in range(3, limit)) <= limit // 4)
taken = []
try:
    while True:
        taken.append(os.open(sys.argv[1], os.O_RDONLY))
except OSError:
    pass
print(all(file.read(0, 10) == bytes([number]) * 10 for number, file in enumerate(held)))
os.close(taken.pop())
print(bytes(held[0].map()) == bytes(10), bytes(DataFile(Path(sys.argv[1], "7")).map()) == b"\\7" * 10)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "files"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert (done.stdout.split(), done.stderr) == (["True"] * 4, "")


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit as Linux does")
@pytest.mark.parametrize(("limit", "files"), [(64, 150), (24, 50)])
def test_more_files_than_a_process_may_open(tmp_path: Path, limit: int, files: int) -> None:
    """Each file that was written took a descriptor of its folder too: a system's 1,024 were too few for 1,100 files."""
    code = """
import resource, sys
import numpy as np
import shardwise as sw
folder, limit, files = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
given = np.arange(files * 2, dtype="i4").reshape(files, 2)
sw.save_checkpoint(folder + "/whole", {"w": given}, to="hf")
rules = sw.LayoutMap(sw.DeviceMesh((files,), ("x",)))
rules["w"] = ("x", None)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sw.reshard_checkpoint(folder + "/whole", folder + "/cut", rules, to="sharded")
sw.reshard_checkpoint(folder + "/cut", folder + "/merged", to="hf")
print((sw.open_checkpoint(folder + "/merged")["w"].read() == given).all())
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(limit), str(files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert (done.stdout.split(), done.stderr) == (["True"], "")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == files


def bytes_of(file: DataFile) -> bytes:
    with file.descriptor() as number:
        return os.pread(number, file.size, 0)


@pytest.mark.heavy
def test_a_file_goes_to_another_process_where_it_is_opened_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    file = DataFile(tmp_path / "file")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
        assert others.submit(bytes_of, file).result() == b"data"
    (tmp_path / "file").write_bytes(b"other data")
    with pytest.raises(sw.ParseError, match="is not the file that was opened"):
        pickle.loads(pickle.dumps(file))


def test_bytes_past_the_end_take_no_memory(tmp_path: Path) -> None:
    """A length that a file claims may be any number."""
    (tmp_path / "file").write_bytes(b"data")
    file = DataFile(tmp_path / "file")
    assert file.read(1, 3) == b"ata"
    for offset, count in ((2, 3), (0, 2**50), (2**50, 1)):
        message = f"has 4 bytes; bytes {offset} to {offset + count} were needed"
        with pytest.raises(sw.ParseError, match=message):
            file.read(offset, count)


def test_hidden_names_leave_room_for_24_bytes_more() -> None:
    """File systems allow for 255 bytes."""
    assert hidden_name("m" * 230) == "." + "m" * 230
    for letter in ("m", "é", "語"):
        names = [letter * count for count in range(1, 255 // len(letter.encode()) + 1)]
        hidden = [hidden_name(name) for name in names]
        assert all(name.startswith(".") and len(name.encode()) <= 255 - 24 for name in hidden)
        assert len(set(hidden)) == len(names)
