"""How many workers there are and what memory each has, by hand; and which failures are tried again."""

from __future__ import annotations

import errno
import os
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.write.places.work import TaskWindow, Work, Workers, _Here, executor_workers, workers_for

KIB, MIB = 2**10, 2**20


def of(executor: Executor, memory: int, **more: Any) -> Workers:
    return executor_workers(Work(executor=executor, memory=memory, **more))


@pytest.mark.parametrize(
    ("memory", "threads", "nbytes", "tasks", "workers"),
    [
        (8 * MIB, 3, 4 * MIB, 10, 3),
        (8 * MIB, 3, 4 * MIB - 1, 10, 1),  # Too little to do for a second thread.
        (8 * MIB, 3, 4 * MIB, 2, 2),
        (8 * MIB, 3, 4 * MIB, 0, 1),
        (MIB, 3, 4 * MIB, 10, 2),  # Half a MiB at least for each.
        (MIB - 1, 3, 4 * MIB, 10, 1),
        (16 * KIB, 3, 4 * MIB, 10, 1),
        (1024 * MIB, 300, 4 * MIB, 1000, 256),
        (1024 * MIB, 1, 4 * MIB, 1000, 1),
    ],
)
def test_threads_and_their_memory(memory: int, threads: int, nbytes: int, tasks: int, workers: int) -> None:
    with workers_for(Work(memory=memory, threads=threads), nbytes=nbytes, tasks=tasks) as found:
        assert (found.count, found.memory, found.is_here) == (workers, memory // workers, True)
        assert found.window == (1 if workers == 1 else 2 * workers)
        assert found.executor.submit(lambda: 7).result() == 7
        assert isinstance(found.executor, ThreadPoolExecutor) == (workers > 1)


def test_a_thread_for_each_core_if_nothing_is_said() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with workers_for(Work(memory=1024 * MIB), nbytes=4 * MIB, tasks=1000) as workers:
        assert workers.count == min(cores, 256)


def test_what_cannot_be() -> None:
    def asked(memory: Any, threads: Any = None, executor: Any = None) -> None:
        with workers_for(Work(executor=executor, memory=memory, threads=threads), nbytes=4 * MIB, tasks=10):
            raise AssertionError("refused")

    for threads in (0, -1):
        with pytest.raises(sw.LayoutError, match=f"threads is {threads}; it must be at least 1"):
            asked(MIB, threads)
    with pytest.raises(TypeError, match="threads must be an integer"):
        asked(MIB, 2.5)
    with pytest.raises(sw.LayoutError, match=r"memory is 16383 bytes; at least 16384 bytes are needed$"):
        asked(16 * KIB - 1)
    with pytest.raises(TypeError, match=r"executor must be a concurrent\.futures\.Executor, got int"):
        asked(MIB, executor=3)
    with ThreadPoolExecutor(5) as pool:
        with pytest.raises(sw.LayoutError, match="threads is 0; it must be at least 1"):
            asked(MIB, 0, pool)
        assert of(pool, 80 * KIB).memory == 16 * KIB
        with pytest.raises(sw.LayoutError, match="at least 16384 bytes are needed for each of 5 workers"):
            of(pool, 80 * KIB - 1)


class Given(_Here):
    """Runs functions at once; what it is like is given."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Client:
    """Of Dask: the threads of each worker."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts

    def nthreads(self) -> dict[str, int]:
        return self._counts


def test_executors_of_others() -> None:
    with ThreadPoolExecutor(3) as pool:
        workers = of(pool, 3 * MIB)
        assert (workers.executor, workers.count, workers.memory, workers.is_here, workers.window) == (
            pool,
            3,
            MIB,
            True,
            6,
        )
    with ProcessPoolExecutor(2) as processes:
        workers = of(processes, 3 * MIB)
        assert (workers.count, workers.memory, workers.is_here) == (2, 3 * MIB // 2, False)
    mpi = of(Given(num_workers=4), 4 * MIB)
    assert (mpi.count, mpi.memory) == (4, MIB)
    said = of(Given(num_workers=4), 6 * MIB, workers=3)
    assert (said.count, said.memory, said.window) == (3, 2 * MIB, 6)
    unknown = of(Given(num_workers=0), 2**40)
    assert unknown.count == os.cpu_count()
    # Two workers of 2 and 4 threads share one host, one of 3 has the other: 9 in all, and 6 share memory.
    hosts = {"tcp://10.0.0.1:4711": 2, "tcp://10.0.0.1:4712": 4, "tcp://10.0.0.2:4711": 3}
    dask = of(Given(_client=Client(hosts)), 6 * MIB)
    assert (dask.count, dask.memory, dask.window) == (9, MIB, 18)
    nobody = of(Given(_client=Client({})), MIB)
    assert (nobody.count, nobody.memory) == (1, MIB)


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError(errno.EIO, "input"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError("slow"), True),
        (RuntimeError("odd"), True),
        (OSError(errno.ENOSPC, "full"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (FileNotFoundError(errno.ENOENT, "gone"), False),
        (sw.ParseError("wrong"), False),
        (ValueError("wrong"), False),
        (TypeError("wrong"), False),
        (MemoryError("none"), False),
    ],
)
def test_failures_that_may_pass_are_tried_again(error: Exception, may_pass: bool, failures: int) -> None:
    calls: Counter[int] = Counter()
    kept: list[tuple[int, int]] = []
    shown: list[int] = []

    def call(task: int, factor: int) -> int:
        calls[task] += 1
        if task == 2 and calls[task] <= failures:
            raise error
        return task * factor

    window: TaskWindow[int, int] = TaskWindow(
        of(Given(num_workers=1), MIB), call, (10,), 2, lambda task, receipt: kept.append((task, receipt)), "hint"
    )
    if failures <= (2 if may_pass else 0):
        assert window.run(iter([1, 2, 3, 4]), 4, shown.append) == 4
        assert sorted(kept) == [(1, 10), (2, 20), (3, 30), (4, 40)]
        assert sorted(shown) == [1, 2, 3, 4]
        assert calls == {1: 1, 2: failures + 1, 3: 1, 4: 1}
    else:
        with pytest.raises(type(error)) as caught:
            window.run(iter([1, 2, 3, 4]), 4, shown.append)
        assert caught.value is error
        assert calls[2] == (3 if may_pass else 1)
        # What has ended well is kept.
        assert (1, 10) in kept
        assert {task for task, _ in kept} == calls.keys() - {2}


def test_a_worker_that_dies_is_named_as_such() -> None:
    def call(task: int) -> int:
        if task == 3:
            raise BrokenExecutor("gone")
        return task

    kept: list[int] = []
    window: TaskWindow[int, int] = TaskWindow(
        of(Given(num_workers=1), MIB), call, (), 2, lambda task, receipt: kept.append(task), "they stay"
    )
    said = r"a worker died, and the executor with it \(BrokenExecutor\), after 2 of 4 tasks; they stay$"
    with pytest.raises(BrokenExecutor, match=said):
        window.run(iter([1, 2, 3, 4]), 4, lambda task: None)
    assert kept[:2] == [1, 2]


class Hanging(Executor):
    """Ends the first tasks at once, and no other."""

    def __init__(self, ends: int) -> None:
        self._max_workers, self._ends = 2, ends

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._ends -= 1
        if self._ends >= 0:
            future.set_result(fn(*args, **kwargs))
        return future


def test_workers_that_end_no_task_are_given_up() -> None:
    kept: list[int] = []
    window: TaskWindow[int, int] = TaskWindow(
        of(Hanging(3), MIB, timeout=0.05), lambda task: task, (), 2, lambda task, _: kept.append(task), "they stay"
    )
    said = r"no worker has ended a task for 0\.05 seconds; under way: 4 tasks; they stay"
    with pytest.raises(TimeoutError, match=said) as caught:
        window.run(iter(range(9)), 9, lambda task: None)
    assert caught.value.errno == errno.ETIMEDOUT
    assert kept == [0, 1, 2]


def test_after_an_error_workers_that_hang_are_not_waited_for_either() -> None:
    def call(task: int) -> int:
        raise sw.ParseError("wrong")

    window: TaskWindow[int, int] = TaskWindow(of(Hanging(0), MIB, timeout=0.05), call, (), 0, lambda *_: None, "")
    window._workers.executor._ends = 1  # type: ignore[attr-defined]
    with pytest.raises((sw.ParseError, TimeoutError)):
        window.run(iter(range(9)), 9, lambda task: None)


def test_an_interruption_says_what_is_done() -> None:
    def call(task: int) -> int:
        if task == 2:
            raise KeyboardInterrupt
        return task

    kept: list[int] = []
    window: TaskWindow[int, int] = TaskWindow(
        Workers(_Here(), 1, MIB, True, 1), call, (), 2, lambda task, _: kept.append(task), "they stay"
    )
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted after 2 of 4 tasks; they stay$"):
        window.run(iter(range(4)), 4, lambda task: None)
    assert kept == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"retries": -1}, sw.LayoutError, "retries is -1; it must be at least 0"),
        ({"workers": 0}, sw.LayoutError, "workers is 0; it must be at least 1"),
        ({"timeout": 0}, sw.LayoutError, "timeout is 0; it must be more than 0 seconds"),
        ({"timeout": float("nan")}, sw.LayoutError, "timeout is nan; it must be more than 0 seconds"),
        ({"timeout": "1"}, TypeError, "timeout must be a number of seconds, got str"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"memory": 1.5}, TypeError, "memory must be an integer"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Work(**wrong)
