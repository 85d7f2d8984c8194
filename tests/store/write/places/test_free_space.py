"""A checkpoint that does not fit on the disk is refused before it is begun; what an interrupted run left makes room."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.store.write.places import leftovers as disk
from tests.store.trips import Stopped

MIB = 2**20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "src.safetensors", {f"{i}": np.full(MIB // 4, i, "f4") for i in range(4)})
    return tmp_path / "src.safetensors"


def stop(done: int, total: int) -> None:
    if done > total // 2:
        raise Stopped


def reshard(source: Path, **settings: Any) -> Any:
    return sw.reshard_checkpoint(source, source.parent / "new", to="hf", task_bytes=2**16, threads=1, **settings)


def left(folder: Path) -> int:
    """The bytes on the disk of what a run has left."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob(".new.partial/*/data/*"))


@pytest.mark.parametrize("resume", [False, True])
def test_what_an_interrupted_run_left_makes_room(source: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    """After a kill, or an error of the disk, the same command is not refused for its own unfinished files."""
    with pytest.raises(Stopped):
        reshard(source, progress=stop)
    taken = left(source.parent)
    assert taken >= 4 * MIB
    monkeypatch.setattr(disk, "free_space", lambda _: 4 * MIB + 2**17 - taken)
    assert (reshard(source, resume=resume).bytes_resumed > 0) == resume


def test_a_resumed_run_with_other_arguments_says_that_it_begins_anew(source: Path) -> None:
    with pytest.raises(Stopped):
        reshard(source, progress=stop)
    with pytest.warns(sw.ShardwiseWarning, match="new: nothing is resumed: the interrupted run had other arguments"):
        report = reshard(source, resume=True, max_file_bytes=2 * MIB)
    assert (report.bytes_resumed, len(report.warnings)) == (0, 1)
    with pytest.raises(Stopped):
        sw.reshard_checkpoint(source, source.parent / "other", to="hf", task_bytes=2**16, threads=1, progress=stop)
    again = sw.reshard_checkpoint(source, source.parent / "other", to="hf", task_bytes=2**16, threads=2, resume=True)
    assert (again.bytes_resumed > 0, again.warnings) == (True, ())


def test_the_message_names_what_is_left_and_how_to_go_on(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        reshard(source, progress=stop)
    monkeypatch.setattr(disk, "free_space", lambda _: 5)
    with pytest.raises(
        OSError, match=r"are free, besides the 4\.\d MiB that an interrupted run has left in \.new"
    ) as no:
        reshard(source)
    assert no.value.errno == errno.ENOSPC
    assert left(source.parent) >= 4 * MIB
    assert main(["reshard", str(source), str(source.parent / "new"), "--to", "hf"]) == 2
    assert ".new.partial; --resume goes on with that" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("to", ["hf", "sharded", "dcp"])
def test_the_manifest_and_the_index_need_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    """Of many small tensors they are larger than these; without room for them the run would fail at its very end."""
    tensors = {f"layer.{i}.weight": np.arange(2, dtype="u1") for i in range(500)}
    sw.save_checkpoint(tmp_path / "src.safetensors", tensors)
    outline = sw.plan_checkpoint(tmp_path / "src.safetensors", tmp_path / "new", to=to).outline()
    sw.reshard_checkpoint(tmp_path / "src.safetensors", tmp_path / "whole", to=to)
    files = list((tmp_path / "whole").iterdir())
    whole = sum(file.stat().st_size for file in files)
    assert whole > outline.bytes + 500 * 50
    monkeypatch.setattr(disk, "free_space", lambda _: whole)
    with pytest.raises(OSError, match="the checkpoint takes"):
        sw.reshard_checkpoint(tmp_path / "src.safetensors", tmp_path / "new", to=to)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(disk, "free_space", lambda _: whole + 4096 * (len(files) + 8))
    sw.reshard_checkpoint(tmp_path / "src.safetensors", tmp_path / "new", to=to)


def test_two_sizes_that_read_alike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_space", lambda _: 16 * MIB)
    with pytest.raises(OSError, match=r"takes 16,79\d,\d\d\d bytes, but 16,777,216 bytes are free"):
        sw.save_checkpoint(tmp_path / "new.safetensors", {"w": np.zeros(16 * MIB, "u1")})
