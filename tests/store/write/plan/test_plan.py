"""Tasks and parts of a plan: each byte in one task, each task in one part."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.write.plan.plan import CheckpointTasks
from tests.store.tasks import TASK, planned

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


@pytest.mark.parametrize(
    ("sizes", "parts", "edges"),
    [
        # The middles are 5, 15 and 25 of 30: the second part begins with 15.
        ([10, 10, 10], 2, [0, 1, 3]),
        # 8, 22 and 30 of 31, which is cut at 15.
        ([16, 13, 2], 2, [0, 1, 3]),
        # 1, 3, 54 of 106, which is cut at 35 and 70: the last part has none.
        ([2, 2, 102], 3, [0, 2, 3, 3]),
        ([7] * 5, 5, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_task_is_of_the_part_in_which_its_middle_is(sizes: list[int], parts: int, edges: list[int]) -> None:
    plan: Any = SimpleNamespace(_cut=None, grid=SimpleNamespace(bytes=np.array(sizes, np.int64)))
    assert CheckpointTasks._edges(plan, parts) == edges


def test_each_byte_is_written_by_one_task(source: Path) -> None:
    plan = planned(source)
    assert len(plan.tasks) > 20
    written = [np.zeros(size, np.uint8) for size in plan.sizes]
    for task in plan.tasks:
        assert 0 < task.nbytes <= TASK
        for file, _, begin, end in task.ranges:
            written[task.files[file][0]][begin:end] += 1
    for made, counts in zip(plan.files, written, strict=True):
        header = made.start
        assert not counts[:header].any()
        assert (counts[header:] == 1).all()


def test_what_replicas_make_parts_read_is_counted(source: Path) -> None:
    checked, first = planned(source).part_bytes(3), planned(source, replicas="first").part_bytes(3)
    assert (checked[:, 1] == first[:, 1]).all()
    assert (first[:, 0] == first[:, 1]).all()
    # Written by one owner each, so this source has no replicas on the disk.
    assert (checked == first).all()


def test_what_plans_refuse(source: Path, tmp_path: Path) -> None:
    for wrong in (0, 100, TASK - 1):
        with pytest.raises(sw.LayoutError, match="task_bytes is"):
            planned(source, task_bytes=wrong)
    with pytest.raises(FileNotFoundError):
        sw.plan_checkpoint(source, tmp_path / "no" / "where")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.heavy
@pytest.mark.parametrize("to_store", [False, True])
@given(st.lists(st.integers(1, 40_000), max_size=12), st.integers(1, 40))
def test_parts_are_all_tasks_once_and_as_equal_as_these_allow(to_store: bool, sizes: list[int], parts: int) -> None:
    """Each task is in one part, which is off its share by a task at most; tasks of like bytes have a part each."""
    tensors = {f"{i}": np.zeros(size, "u1") for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "a.safetensors")
        sw.save_checkpoint(source, tensors, sync=False)
        more: dict[str, Any] = {"max_file_bytes": 1} if to_store else {"task_bytes": 1 << 16}
        plan = sw.plan_checkpoint(source, "memory://parts" if to_store else Path(folder, "b"), to="hf", **more)
    shares = [plan.part(part, parts) for part in range(1, parts + 1)]
    assert [number for share in shares for number in share] == list(range(len(plan.tasks)))
    read, written = plan.part_bytes(parts).T
    assert (read == written).all()
    assert written.tolist() == [sum(plan.task(number).nbytes for number in share) for share in shares]
    assert written.sum() == sum(sizes)
    most = max((task.nbytes for task in plan.tasks), default=1)
    assert (abs(written - sum(sizes) / parts) <= most + 1).all()
    if to_store and sizes and parts == len(sizes) and max(sizes) * 2 * parts < min(sizes) * (2 * parts + 1):
        assert [len(share) for share in shares] == [1] * parts


def test_what_tasks_write_is_what_they_are_said_to_write(tmp_path: Path) -> None:
    """Replicas count for each file; tensors are whole in a task, or cut into several, or without elements."""
    values = {
        "a": np.zeros((600, 256), "f4"),
        "b": np.zeros((7, 3), "i2"),
        "c": np.zeros((0, 4), "f4"),
        "d": np.float32(1),
    }
    values |= {f"e.{at}": np.zeros((40, 64), "f4") for at in range(300)}
    sw.save_checkpoint(tmp_path / "a.safetensors", values)
    layouts = sw.LayoutMap(sw.DeviceMesh((3, 2), ("x", "y")))
    layouts["a"], layouts["e"] = ("x", None), (None, "y")
    plan = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", layouts, to="ranks", task_bytes=65536)
    assert plan.written_bytes.tolist() == [task.nbytes for task in plan.tasks]
    # Twice, once for each "y"; three times, for each "x"; and on all six.
    assert plan.written_bytes.sum() == 2 * 600 * 256 * 4 + 3 * 300 * 40 * 64 * 4 + 6 * (7 * 3 * 2 + 4)
