"""Runs of plans: what each of their numbers, names and settings does, where nothing goes wrong."""

from __future__ import annotations

import gzip
import os
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.compare.diff import Difference
from shardwise.store.data.codecs import decompress
from shardwise.store.write.places.task import Task
from shardwise.store.write.places.uploads import Comparison
from tests.store.stores import Store
from tests.store.tasks import TASK, contents, direct, folder_of, planned, rules

from ...torch_files import save as torch_file
from ...torch_files import tensor

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_share_the_memory_that_was_asked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    run, asked = Task.run, []

    def noted(self: Task, **settings: Any) -> Any:
        asked.append(settings["memory"])
        return run(self, **settings)

    monkeypatch.setattr(Task, "run", noted)
    settings: dict[str, Any] = {"memory": 1 << 19, "task_bytes": TASK}
    sw.reshard_checkpoint(source, source.parent / "new", rules(), threads=workers, **settings)
    assert set(asked) == {1 << 19}  # One worker, whatever the number of its threads.
    asked.clear()
    with ThreadPoolExecutor(workers) as executor:
        sw.reshard_checkpoint(source, source.parent / "other", rules(), executor=executor, **settings)
    assert len(asked) > workers
    assert set(asked) == {(1 << 19) // workers}


def test_a_name_that_is_taken_is_refused_when_it_is_planned(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("there", "file"):
        with pytest.raises(FileExistsError, match=name):
            sw.plan_checkpoint(source, tmp_path / name, rules())
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "there").iterdir())


def test_receipts_of_zeros(tmp_path: Path) -> None:
    """Zeros have the digest 0, and of four bytes the CRC-32 can be 0 too: both are read back from receipts."""
    none = bytes.fromhex("9d0ad96d")
    assert zlib.crc32(none) == 0
    tensors = {"z": np.zeros((64, 64), "f4"), "c": np.frombuffer(none, "u1").copy()}
    sw.save_checkpoint(tmp_path / "src.safetensors", tensors)
    for to in ("hf", "sharded", "dcp"):
        plan = sw.plan_checkpoint(tmp_path / "src.safetensors", tmp_path / to, to=to)
        plan.run()
        plan.commit()
        assert sw.diff_checkpoints(tmp_path / "src.safetensors", tmp_path / to) == []
        assert not sw.verify_checkpoint(tmp_path / to).damaged


def test_a_receipt_says_who_worked_and_how_long(source: Path) -> None:
    plan = planned(source)
    plan.run(tasks=[1])
    began = time.perf_counter()
    receipt = plan.tasks[0].run()
    assert receipt.worker == f"{socket.gethostname()}:{os.getpid()}"
    assert 0 <= receipt.seconds <= time.perf_counter() - began
    with pytest.raises(TypeError, match="ranges must be tuples of four integers"):
        Task(**{**plan.tasks[0].__dict__, "ranges": ((1, 2, 3),)})


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists what is open")
def test_nothing_stays_open(source: Path) -> None:
    sw.reshard_checkpoint(source, source.parent / "first", rules())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(5):
        sw.reshard_checkpoint(source, source.parent / f"new{number}", rules())
        with pytest.raises(FileExistsError):
            sw.reshard_checkpoint(source, source.parent / f"new{number}", rules())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_texts_that_a_killed_commit_has_left_are_replaced(source: Path) -> None:
    """Of any length, and whatever they say."""
    plan = planned(source)
    plan.run()
    (folder_of(plan).folder / "shardwise.json").write_bytes(b"x" * 100_000)
    plan.commit()
    assert contents(source.parent / "new") == direct(source)


def test_a_single_object_that_was_not_committed_is_resumed(source: Path, memory: Store) -> None:
    place = memory.place("one.safetensors")
    plan = sw.plan_checkpoint(source, place, to="safetensors")
    plan.run()
    with pytest.raises(FileExistsError, match="resume=True"):
        sw.reshard_checkpoint(source, place, to="safetensors")
    report = sw.reshard_checkpoint(source, place, to="safetensors", resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_resumed > 0
    assert sw.diff_checkpoints(source, place) == []
    assert list(memory.objects(place)) == [""]


def test_an_object_is_compared_part_by_part(memory: Store) -> None:
    place, data = memory.place("object"), bytes(range(256)) * 40
    place.filesystem.pipe_file(place.key, data)

    def compared(*parts: bytes) -> None:
        comparison = Comparison(place)
        assert not comparison.any_order  # Each part is compared with what follows the one before.
        for number, part in enumerate(parts):
            comparison.put(number, bytearray(part))
        comparison.commit()

    compared(data)
    compared(data[:3000], data[3000:3001], b"", data[3001:])
    for wrong in (
        (data[:-1],),
        (data, b"1"),
        (data[3000:], data[:3000]),
        (data[:-1], b"\x00"),
        (b"\x01" + data[1:],),
        (data[:5000], data[5000:5001] * 2, data[5002:]),
        (),
    ):
        with pytest.raises(FileExistsError, match="exists already"):
            compared(*wrong)


@pytest.mark.parametrize(("name", "pack", "end"), [("zlib", zlib.compress, 4), ("gzip", gzip.compress, 8)])
def test_compressed_data_that_lacks_only_its_checksum(name: str, pack: Any, end: int) -> None:
    """All elements are there, but nothing says that they are right."""
    packed = pack(bytes(range(200)))
    assert bytes(decompress(name, packed, 200, "x")) == bytes(range(200))
    for cut in range(1, end + 1):
        with pytest.raises(sw.ParseError, match=f"is truncated: its {name} data has no end"):
            decompress(name, packed[:-cut], 200, "x")


def test_a_wrong_crc_names_the_tensor_that_it_is_of(tmp_path: Path) -> None:
    """And only then: of a member that holds none nothing more is said."""
    values = np.arange(64, dtype="f4")
    data = torch_file({"w": tensor(values, "0")})
    path = tmp_path / "m.pt"
    for member, is_told in ((values.tobytes(), True), (b"archive/version3\n", False)):
        at = data.index(member) + len(member) - 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(sw.ParseError, match="is not what was written: its CRC-32 is") as caught:
            sw.verify_checkpoint(path)
        assert ("; it holds 'w'" in str(caught.value)) == is_told


def test_what_could_not_be_compared_says_why() -> None:
    assert str(Difference("w", "unreadable", first="lost")) == "'w' cannot be compared: lost"
    assert str(Difference("w", "unreadable", second="gone")) == "'w' cannot be compared: gone"
