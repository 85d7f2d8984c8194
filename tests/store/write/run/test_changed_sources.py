"""A source that is cut short, grown, written to or replaced in the middle of a reshard."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.store.stores import Store

FORMS = ("safetensors", "hf", "sharded", "dcp")


def tensors(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"h.{i}.w": rng.standard_normal((64, 128)).astype("f4") for i in range(8)}


def rules() -> sw.LayoutMap:
    layouts = sw.LayoutMap(sw.DeviceMesh((4,), ("x",)))
    layouts["w"] = ("x", None)
    return layouts


def written(folder: Path, to: Any, seed: int) -> Path:
    folder.mkdir()
    path = folder / ("made.safetensors" if to == "safetensors" else "made")
    settings: dict[str, Any] = {"max_file_bytes": 1 << 17} if to == "hf" else {}
    layouts = rules() if to in ("sharded", "dcp") else None
    sw.save_checkpoint(path, tensors(seed), layouts, to=to, sync=False, **settings)
    return path


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".distcp")) or [path]


def with_times(file: Path, status: os.stat_result) -> None:
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def another_checkpoint(file: Path, other: bytes) -> None:
    """Of the same model: only the elements differ."""
    status, new = file.stat(), file.with_name("new")
    assert len(other) == status.st_size
    new.write_bytes(other)
    with_times(new, status)
    while new.stat().st_ctime_ns <= status.st_ctime_ns:  # The clock of a file system ticks some times a second only.
        with_times(new, status)
    new.replace(file)


def another_header(file: Path, other: bytes) -> None:
    """Other bytes everywhere, but as many, and written at the same time."""
    another_checkpoint(file, other[::-1])


def some_bytes(file: Path, other: bytes) -> None:
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:
        with file.open("r+b") as stream:
            stream.seek(-9, os.SEEK_END)
            stream.write(b"x" * 9)


def longer(file: Path, other: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(b"more")


CHANGES: dict[str, Callable[[Path, bytes], object]] = {
    "a third": lambda file, _: os.truncate(file, file.stat().st_size // 3),
    "shorter": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "longer": longer,
    "written to": some_bytes,
    "gone": lambda file, _: file.unlink(),
    "another checkpoint": another_checkpoint,
    "another header": another_header,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_source_that_changes_meanwhile_is_named(tmp_path: Path, form: str, to: Any, change: str) -> None:
    source, other = written(tmp_path / "source", form, 0), written(tmp_path / "other", form, 1)
    file, with_it = files_of(source)[-1], files_of(other)[-1]
    data, status = file.read_bytes(), file.stat()
    rest = {each: each.read_bytes() for each in source.rglob("*") if each.is_file() and each != file}
    out = tmp_path / "out"
    out.mkdir()
    new = out / ("new.safetensors" if to == "safetensors" else "new")
    changed: list[int] = []

    def progress(done: int, total: int) -> None:
        if 0 < done < total and not changed:
            changed.append(done)
            CHANGES[change](file, with_it.read_bytes())

    settings: dict[str, Any] = {"to": to, "threads": 1, "memory": 1 << 16, "task_bytes": 1 << 16, "sync": False}
    layouts = rules() if to == "dcp" else None
    with pytest.raises((sw.ParseError, OSError), match=file.name):
        sw.reshard_checkpoint(source, new, layouts, progress=progress, **settings)
    assert changed
    assert not new.exists()
    assert rest == {each: each.read_bytes() for each in source.rglob("*") if each.is_file() and each != file}
    file.write_bytes(data)
    with_times(file, status)
    anew = pytest.warns(sw.ShardwiseWarning, match="nothing is resumed: .* its source has changed")
    with anew if change == "gone" else nullcontext():  # It is another file then.
        sw.reshard_checkpoint(source, new, layouts, resume=True, **settings)
    with sw.open_checkpoint(new) as checkpoint:
        for name, value in tensors(0).items():
            assert checkpoint.read(name).tobytes() == value.tobytes()
    assert list(out.iterdir()) == [new]


@pytest.mark.parametrize("at", [0.1, 0.5, 0.75])
def test_a_source_that_gets_its_old_time_back_is_named(tmp_path: Path, at: float) -> None:
    """No program can set the time of the last change of any kind."""
    source = written(tmp_path / "source", "safetensors", 0)
    changed: list[int] = []

    def progress(done: int, total: int) -> None:
        if at * total <= done < total and not changed:
            status = source.stat()
            changed.append(status.st_ctime_ns)
            while source.stat().st_ctime_ns == changed[0]:
                with source.open("r+b") as stream:
                    stream.seek(-9, os.SEEK_END)
                    stream.write(b"x" * 9)
                with_times(source, status)
            assert (status.st_size, status.st_mtime_ns) == (source.stat().st_size, source.stat().st_mtime_ns)

    with pytest.raises(sw.ParseError, match="its change time differs"):
        sw.reshard_checkpoint(
            source, tmp_path / "new.safetensors", progress=progress, threads=1, memory=1 << 16, task_bytes=1 << 16
        )
    assert changed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_gets_its_old_time_back_between_two_parts_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "safetensors", 0)
    plan = sw.plan_checkpoint(source, tmp_path / "new.safetensors", task_bytes=1 << 16)
    plan.run((1, 2))
    status = source.stat()
    while source.stat().st_ctime_ns == status.st_ctime_ns:
        with source.open("r+b") as stream:
            stream.seek(-9, os.SEEK_END)
            stream.write(b"x" * 9)
        with_times(source, status)
    with pytest.raises(sw.ParseError, match="its change time differs"):
        plan.run((2, 2))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("replaced", [getattr(os, "mkfifo", None), os.mkdir], ids=["FIFO", "directory"])
@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_is_no_file_any_more_is_refused_without_waiting(
    tmp_path: Path, form: str, replaced: Callable[[Path], None]
) -> None:
    source = written(tmp_path / "source", form, 0)
    plan = sw.plan_checkpoint(source, tmp_path / "new", to="hf")
    file = files_of(source)[-1]
    file.unlink()
    replaced(file)
    with pytest.raises(sw.ParseError, match=rf"{file.name}: is a .*; a regular file is needed"):
        plan.run()


@pytest.mark.parametrize("to", ["safetensors", "sharded"])
def test_a_source_that_is_replaced_on_its_way_to_a_store_is_named(tmp_path: Path, memory: Store, to: Any) -> None:
    """Between two parts of one object, and between two objects."""
    source, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, value in ((source, 1), (other, 2)):
        sw.save_checkpoint(path, {f"{i}.w": np.full((4, 1 << 20), value, "u1") for i in range(4)}, sync=False)
    place = memory.place("new.safetensors" if to == "safetensors" else "new")
    changed: list[int] = []

    def progress(done: int, total: int) -> None:
        if 0 < done < total and not changed:
            changed.append(done)
            another_checkpoint(source, other.read_bytes())

    layouts = rules() if to == "sharded" else None
    with pytest.raises(sw.ParseError, match=r"a\.safetensors:? was (changed or )?replaced"):
        sw.reshard_checkpoint(source, place, layouts, to=to, memory=32 << 20, progress=progress)
    assert changed
    with pytest.raises((FileNotFoundError, sw.ParseError)):
        sw.open_checkpoint(place)


def test_a_source_that_is_replaced_between_two_tasks_is_named(tmp_path: Path, memory: Store) -> None:
    source, other = (written(tmp_path / name, "safetensors", seed) for seed, name in enumerate("ab"))
    plan = sw.plan_checkpoint(source, memory.place("new"), rules(), to="sharded")
    assert plan.run(tasks=[0]) == 1
    another_header(source, other.read_bytes())
    with pytest.raises(sw.ParseError, match="its change time differs"):
        plan.run(tasks=[1])


@pytest.mark.parametrize("to", FORMS)
def test_a_source_that_is_replaced_when_all_of_it_was_read_does_not_count(tmp_path: Path, to: Any) -> None:
    """What is written is not what is there then: a source is the same at the end, or the copy does not count."""
    source, other = written(tmp_path / "a", to, 1), written(tmp_path / "b", to, 2)
    file, new = files_of(source)[0], files_of(other)[0]

    def replace(done: int, total: int) -> None:
        if done == total and new.exists():
            new.replace(file)

    with pytest.raises(sw.ParseError, match=r"replaced|changed|is not the file"):
        sw.reshard_checkpoint(source, tmp_path / "new", to="hf", threads=1, task_bytes=1 << 16, progress=replace)
    assert not new.exists()
    assert not (tmp_path / "new").exists()
