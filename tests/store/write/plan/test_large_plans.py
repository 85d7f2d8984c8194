"""Plans of very many tensors: opened by their head, read as far as a part needs, refused where that is damaged."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.files import DataFile
from tests.store.tasks import forge, unpacked

MESH = sw.DeviceMesh((64,), ("x",))
COUNT = 2000


def rules() -> sw.LayoutMap:
    found = sw.LayoutMap(MESH)
    found["weight"] = ("x", None)
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of 2,000 tensors in 64 files: 128,000 parts. The source has no bytes on the disk."""
    folder = tmp_path_factory.mktemp("large")
    header: dict[str, Any] = {}
    for i in range(COUNT):
        header[f"layers.{i}.weight"] = {"dtype": "F32", "shape": [64, 4], "data_offsets": [1024 * i, 1024 * i + 1024]}
    text = json.dumps(header).encode()
    with (folder / "a.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 1024 * COUNT)
    sw.plan_checkpoint(folder / "a.safetensors", folder / "new", rules(), task_bytes=2**16).save(folder / "new.swplan")
    return folder / "new.swplan"


class Counted:
    """The reads of a file, each of which is of its head or of a block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        read = DataFile.read

        def counted(file: DataFile, offset: int, length: int) -> bytes:
            self.reads += 1
            return read(file, offset, length)

        monkeypatch.setattr(DataFile, "read", counted)


@pytest.mark.heavy
def test_a_part_reads_and_holds_what_its_tasks_need(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2.12 i."""
    counted = Counted(monkeypatch)
    raw = sum(map(len, unpacked(large)[1].values()))
    tracemalloc.start()
    plan = sw.CheckpointPlan.load(large)
    opened = counted.reads, tracemalloc.get_traced_memory()[1]
    tasks = [plan.task(number) for number in plan.part(17, 40)]
    done = counted.reads - opened[0], tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened[0] <= 3
    assert opened[1] < 2**20
    assert len(plan.tasks) == 134  # Of 15 tensors each, with 65 pieces, except for the last.
    assert [task.nbytes for task in tasks] == [15 * 1024] * len(tasks)
    assert raw > 5 * 2**20
    # One or two blocks of each section, which are 256 KiB; of files the names.
    assert done[0] <= 24
    assert done[1] < raw // 2


@pytest.mark.heavy
def test_tasks_of_a_large_plan_are_those_of_the_plan_that_was_saved(large: Path) -> None:
    plan = sw.CheckpointPlan.load(large)
    made = sw.plan_checkpoint(large.parent / "a.safetensors", large.parent / "new", rules(), task_bytes=2**16)
    assert plan.digest == made.digest
    for number in (0, 77, 133):
        assert plan.task(number) == made.task(number)
    plan.check()


@pytest.mark.heavy
@pytest.mark.parametrize("section", ["pieces", "targets", "slots", "files", "runs", "boxes", "tensors"])
def test_a_large_plan_that_is_forged_is_refused_before_anything_has_its_name(
    large: Path, tmp_path: Path, section: str
) -> None:
    """All of it is read by the commit; a part that comes upon what is wrong is refused, or writes to the workplace."""
    head, sections = unpacked(large)
    head["path"] = str(tmp_path / "new")
    numbers = np.frombuffer(sections[section], "<i8").copy()
    numbers[len(numbers) // 2 :] += 1
    forge(tmp_path / "forged", head, {**sections, section: numbers.tobytes()})
    plan = sw.CheckpointPlan.load(tmp_path / "forged")
    with pytest.raises(sw.ParseError, match="the plan cannot be read"):
        plan.commit()
    assert not (tmp_path / "new").exists()
    with contextlib.suppress(sw.ParseError, sw.LayoutError):
        plan.run((40, 40))
    assert {path.name for path in tmp_path.iterdir()} <= {"forged", ".new.partial", ".new.lock"}


@pytest.mark.heavy
def test_a_block_that_is_damaged_is_refused_when_it_is_read(large: Path, tmp_path: Path) -> None:
    data = large.read_bytes()
    at = len(data) - 4000  # In the slots, which tasks for a disk do not read.
    (tmp_path / "damaged").write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
    plan = sw.CheckpointPlan.load(tmp_path / "damaged")
    plan.task(3)
    with pytest.raises(sw.ParseError, match="edited or is damaged"):
        plan.check()
