"""The order in which tasks are given to workers: far apart, so that they write to different files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.write.places.regions import FolderSink
from shardwise.store.write.run.run import _spread

TASK = 1 << 16


class Noting(Executor):
    """Runs each task at once, and notes which files it writes to."""

    def __init__(self, workers: int) -> None:
        self._max_workers = workers
        self.files: list[set[str]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.files.append({name for _, name, _ in args[0].files})
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_write_to_different_files(tmp_path: Path, workers: int) -> None:
    """Of as many files of equal size as there are workers, those who are at work at once have one each."""
    rng = np.random.default_rng(workers)
    tensors = {f"{i}": rng.integers(0, 256, (4, TASK), "u1") for i in range(workers)}
    sw.save_checkpoint(tmp_path / "source.safetensors", tensors)
    plan = sw.plan_checkpoint(
        tmp_path / "source.safetensors", tmp_path / "new", to="hf", max_file_bytes=4 * TASK, task_bytes=TASK
    )
    executor = Noting(workers)
    assert plan.run(executor=executor) == 4 * workers
    for begin in range(0, 4 * workers, workers):
        together = executor.files[begin : begin + workers]
        assert len(set.union(*together)) == workers
    plan.commit()
    assert sw.diff_checkpoints(tmp_path / "source.safetensors", tmp_path / "new") == []


@pytest.mark.parametrize("sync", [True, False])
def test_workers_bring_their_data_to_the_disk_before_it_has_receipts(tmp_path: Path, sync: bool) -> None:
    """After a loss of power a receipt is believed; only who asks for no sync may lose what has one."""
    asked: list[bool] = []

    class Elsewhere(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(fn(*args, **kwargs))
            return future

    def fill(self: FolderSink, *args: Any, **more: Any) -> Any:
        asked.append(more["sync"])
        return original(self, *args, **more)

    sw.save_checkpoint(tmp_path / "source.safetensors", {"w": np.arange(TASK, dtype="u2")})
    plan = sw.plan_checkpoint(tmp_path / "source.safetensors", tmp_path / "new", to="hf", task_bytes=TASK)
    original = FolderSink.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSink, "fill", fill)
        plan.run(executor=Elsewhere(), workers=2, sync=sync)
    assert asked == [sync] * len(plan.tasks)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 2**40)), unique_by=lambda pair: pair[0]), st.data())
def test_every_task_once(tasks: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever the sizes: each task once; of one share those in their order."""
    numbers = sorted(number for number, _ in tasks)
    sizes = np.array([size for _, size in tasks], np.int64)
    workers = data.draw(st.integers(1, 70))
    order = list(_spread(numbers, sizes, workers))
    assert sorted(order) == numbers
    # By hand: a task is in the share in which its first byte is.
    total, at, shares = sum(sizes.tolist()), 0, []
    for size in sizes.tolist():
        shares.append(max(share for share in range(workers) if total * share // workers <= at))
        at += size
    queues = [[number for number, of in zip(numbers, shares, strict=True) if of == share] for share in range(workers)]
    expected = []
    while any(queues):
        expected += [queue.pop(0) for queue in queues if queue]
    assert order == expected
