"""Runs that are interrupted, or whose workers hang: what is left, what is said, and how the next run goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.write.work import Work, crew_for
from tests.store.stores import Store
from tests.store.tasks import TASK, contents, direct, planned, rules, saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_says_what_is_done_and_how_to_go_on(source: Path, threads: int) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    new = source.parent / "new"
    said = r"^interrupted after \d+ of \d+ tasks; finished tasks stay, and the next run continues \(resume=True\)$"
    with pytest.raises(KeyboardInterrupt, match=said):
        sw.reshard_checkpoint(source, new, rules(), task_bytes=TASK, threads=threads, progress=stop)
    report = sw.reshard_checkpoint(source, new, rules(), task_bytes=TASK, resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_resumed > 0
    assert contents(new) == direct(source)


def test_ctrl_c_in_a_store(source: Path, memory: Store) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    place = memory.place("new")
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after \d+ of \d+ tasks; .* \(resume=True\)"):
        sw.reshard_checkpoint(source, place, rules(), progress=stop)
    report = sw.reshard_checkpoint(source, place, rules(), resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_resumed > 0
    assert memory.objects(place) == direct(source)


class Hanging(Executor):
    """Runs the first tasks, and never ends another."""

    _max_workers = 2

    def __init__(self, ends: int) -> None:
        self.ends = ends

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.ends -= 1
        if self.ends >= 0:
            future.set_result(fn(*args, **kwargs))
        return future


def test_workers_that_hang_are_given_up(source: Path) -> None:
    new = source.parent / "new"
    said = r"no worker has ended a task for 0\.1 seconds, and 4 are under way; finished tasks stay"
    with pytest.raises(TimeoutError, match=said):
        sw.reshard_checkpoint(source, new, rules(), task_bytes=TASK, executor=Hanging(5), timeout=0.1)
    report = sw.reshard_checkpoint(source, new, rules(), task_bytes=TASK, resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert 4 * TASK <= report.bytes_resumed <= 5 * TASK
    assert contents(new) == direct(source)
    plan = planned(source, "other")
    with pytest.raises(TimeoutError, match=r"the next run continues$"):
        plan.run(executor=Hanging(3), timeout=0.1)
    assert plan.run() == len(plan.tasks) - 3


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"record_bytes": 2**60, "record_seconds": 1e9}, 0),
        ({"record_bytes": 2**60, "record_seconds": 0}, 3),
        ({"record_bytes": 1, "record_seconds": 1e9}, 3),
        ({"record_bytes": 2 * TASK, "record_seconds": 1e9}, 2),
    ],
)
def test_receipts_are_written_after_some_bytes_or_some_time(source: Path, options: dict[str, Any], kept: int) -> None:
    """So a part that is killed goes on where it was, not where the last GiB ended."""
    plan = planned(source)
    place, work = plan.place, Work(**options)
    place.begin(parts=True)
    with crew_for(work, nbytes=1, tasks=1) as crew:
        recorder = place.recorder(None, work, "1/2", crew)
    for number in range(1, 4):  # Of 64 KiB each.
        recorder.add(plan.task(number).run())
    assert len(list(place.receipts())) == kept
    recorder.flush()
    assert [receipt.part for receipt in place.receipts()] == ["1/2"] * 3
    assert Work().record_seconds <= 10


def test_retries_mean_the_same_in_a_store(source: Path, memory: Store) -> None:
    """Without an executor too: a task that fails once is run again."""
    place, failed = memory.place("new"), []
    pipe = place.filesystem.pipe_file

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(place.filesystem, name)

        def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
            if path.endswith(".safetensors") and path not in failed:
                failed.append(path)
                raise OSError(5, "not this time")
            return pipe(path, *args, **kwargs)

    once = sw.ObjectPath(str(place), filesystem=Failing(), attempts=1)
    sw.reshard_checkpoint(source, once, rules(), retries=1)
    assert len(failed) > 2
    assert memory.objects(place) == direct(source)
    failed.clear()
    other = sw.ObjectPath(str(memory.place("other")), filesystem=Failing(), attempts=1)
    with pytest.raises(OSError, match="not this time"):
        sw.reshard_checkpoint(source, other, rules(), retries=0)
