"""Runs of a plan: their options, and their workers.

The workers that run tasks are threads, or a caller's executor. A few tasks are under way at a time, and a task that
fails is retried if that may help.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ...._arguments import integer
from ...._text import counted
from ...._threads import Threads
from ....errors import LayoutError, ShardwiseError
from ...data.engine import LEAST_MEMORY, check_threads

__all__ = [
    "MEMORY",
    "RETRIES",
    "TaskWindow",
    "Work",
    "Workers",
    "executor_workers",
    "one_worker",
    "worker_count",
    "workers_for",
]

#: The defaults of `memory`, in bytes, and of `retries`.
MEMORY = 256 * 2**20
RETRIES = 2
#: The number of tasks per worker that are under way or waiting.
_WINDOW = 2
#: The least memory per thread: with less, fewer threads with larger buffers are better.
_SMALL = 512 * 2**10
#: The work, in bytes, that one thread does in the time that another takes to start.
_PARALLEL_FROM = 4 * 2**20
_MOST_THREADS = 256
#: System errors that would only occur again in a retry.
_LASTING = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The options by which a plan is run.

    Attributes:
        executor: The executor that runs the tasks; threads of this process if `None`.
        workers: The number of workers of the executor; if `None`, the number that it states.
        memory: Bytes for the buffers of all workers of a host.
        threads: The number of threads, if there is no executor; one per core if `None`.
        sync: Whether data is synced to the disk before its receipt is written; a store does so anyway.
        retries: The most retries of a task that fails with an error of the system or of its worker.
        timeout: Seconds without a finished task after which an executor's workers are given up; `None` for no limit.
        progress: Called now and then with the bytes that are done and the bytes in all.
        resume: Whether work of an interrupted run is kept.
        record_bytes: Receipts of tasks run in this process are written after this many bytes of data,
        record_seconds: or after this many seconds.

    Raises:
        LayoutError, TypeError: if a number is too small, or of another type.
    """

    executor: Executor | None = None
    workers: int | None = None
    memory: int = MEMORY
    threads: int | None = None
    sync: bool = True
    retries: int = RETRIES
    timeout: float | None = None
    progress: Callable[[int, int], object] | None = None
    resume: bool = False
    record_bytes: int = 2**30
    record_seconds: float = 5.0

    def __post_init__(self) -> None:
        integer("memory", self.memory)
        check_threads(self.threads)
        if integer("retries", self.retries) < 0:
            raise LayoutError(f"retries is {self.retries}; it must be at least 0")
        if self.workers is not None and integer("workers", self.workers) < 1:
            raise LayoutError(f"workers is {self.workers}; it must be at least 1")
        if self.timeout is not None:
            if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
                raise TypeError(f"timeout must be a number of seconds, got {type(self.timeout).__name__}")
            if not self.timeout > 0:
                raise LayoutError(f"timeout is {self.timeout}; it must be more than 0 seconds")
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(self.executor).__name__}")


Submitted = TypeVar("Submitted")
Result = TypeVar("Result")


class _Here(Executor):
    """An executor that runs each function at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Workers:
    """The workers that run the tasks.

    Attributes:
        executor: Takes functions to run.
        count: The number of tasks that run at a time.
        memory: Bytes for the buffers of each.
        is_here: Whether they run in this process.
        window: The number of tasks that are under way or waiting.
        threads: The number of threads of each task; one per core if `None`.
        timeout: Seconds without a finished task after which the workers are given up.
    """

    executor: Executor
    count: int
    memory: int
    is_here: bool
    window: int
    threads: int | None = 1
    timeout: float | None = None

    @property
    def is_one(self) -> bool:
        """True if one task at a time runs in the caller's thread."""
        return isinstance(self.executor, _Here)


def executor_workers(work: Work) -> Workers:
    """Return the workers of a caller's executor.

    Raises:
        LayoutError: if the memory is too little.
    """
    assert work.executor is not None
    workers, sharing = (work.workers,) * 2 if work.workers is not None else _workers(work.executor)
    is_here = isinstance(work.executor, ThreadPoolExecutor)
    budget = _budget(work.memory, sharing)
    return Workers(work.executor, workers, budget, is_here, _WINDOW * workers, timeout=work.timeout)


def worker_count(work: Work) -> int:
    """Return the number of the executor's workers that share the memory of a host; 1 without an executor."""
    return 1 if work.executor is None else work.memory // executor_workers(work).memory


def one_worker(work: Work) -> Workers:
    """Return the caller's thread as the only worker: one task after the other, each with all memory and all threads."""
    return Workers(_Here(), 1, _budget(work.memory, 1), True, 1, threads=work.threads)


@contextlib.contextmanager
def workers_for(work: Work, *, nbytes: int, tasks: int, each: int = _SMALL) -> Iterator[Workers]:
    """Yield the workers for this many tasks of this many bytes: a caller's executor, or threads within this block.

    There are only as many threads as can have `each` bytes of the memory.

    Raises:
        LayoutError: if the memory is too little.
    """
    if work.executor is not None:
        yield executor_workers(work)
        return
    workers = _threads(nbytes, tasks, work.memory // each, work.threads)
    budget = _budget(work.memory, workers)
    if workers == 1:
        yield Workers(_Here(), 1, budget, True, 1)
        return
    with Threads(workers) as pool:
        try:
            yield Workers(pool, workers, budget, True, _WINDOW * workers)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _threads(nbytes: int, tasks: int, most: int, threads: int | None) -> int:
    if nbytes < _PARALLEL_FROM:
        return 1
    wanted = threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads or os.cpu_count()
    return max(min(wanted or 1, tasks, most, _MOST_THREADS), 1)


def _budget(memory: int, workers: int) -> int:
    if memory // workers < LEAST_MEMORY:
        each = f" for each of {workers} workers" if workers > 1 else ""
        given = f"{memory} byte{'s' * (memory != 1)}"
        raise LayoutError(f"memory is {given}; at least {LEAST_MEMORY} bytes are needed{each}")
    return memory // workers


def _workers(executor: Executor) -> tuple[int, int]:
    """Return the number of workers of an executor, and the most of them that share the memory of one host."""
    client = getattr(executor, "_client", None)
    if client is not None and hasattr(client, "nthreads"):  # Dask's: addresses such as tcp://10.0.0.1:4711.
        hosts: dict[str, int] = {}
        for address, count in client.nthreads().items():
            host = str(address).rpartition("/")[2].rpartition(":")[0]
            hosts[host] = hosts.get(host, 0) + int(count)
        return max(sum(hosts.values()), 1), max([1, *hosts.values()])
    # The first is that of the standard library, the second that of mpi4py, which does not tell hosts apart.
    for name in ("_max_workers", "num_workers"):
        count = getattr(executor, name, None)
        if isinstance(count, int) and count > 0:
            return count, count
    return (os.cpu_count() or 1,) * 2


class _GivenUp(TimeoutError):
    """Raised when no worker has finished a task within the timeout."""


class TaskWindow(Generic[Submitted, Result]):
    """The tasks that are under way, a few at a time.

    Args:
        workers: The workers that run them.
        call: A function from a task to its receipt; it is sent to the workers with its arguments.
        arguments: The arguments of `call` after the task.
        retries: The most retries of a task.
        keep: Called with each finished task and its receipt, even if the run ends with another task's error.
        hint: Text for the error about a broken executor: what happens to finished tasks, and how to continue.
    """

    def __init__(
        self,
        workers: Workers,
        call: Callable[..., Result],
        arguments: tuple[Any, ...],
        retries: int,
        keep: Callable[[Submitted, Result], object],
        hint: str,
    ) -> None:
        self._workers, self._call, self._arguments = workers, call, arguments
        self._retries, self._keep, self._hint = retries, keep, hint
        self._ended: SimpleQueue[tuple[Submitted, int, Future[Result]]] = SimpleQueue()
        self._under_way: set[Future[Result]] = set()

    def run(self, tasks: Iterable[Submitted], total: int, shown: Callable[[Submitted], object]) -> int:
        """Run these `total` tasks, and return how many were run; `shown` is called after each task."""
        count = 0
        waiting = iter(tasks)
        try:
            while True:
                while len(self._under_way) < self._workers.window:
                    task = next(waiting, None)
                    if task is None:
                        break
                    self._submit(task, 0)
                if not self._under_way:
                    break
                task = self._next()
                if task is not None:
                    count += 1
                    shown(task)
        except (BrokenExecutor, CancelledError) as error:
            self._drain()
            raise BrokenExecutor(
                f"a worker died, and the executor with it ({type(error).__name__}), after {count} of "
                f"{counted(total, 'task')}; "
                f"{self._hint}"
            ) from error
        except _GivenUp:
            raise
        except KeyboardInterrupt:
            if self._workers.is_here:
                self._drain()
            raise KeyboardInterrupt(f"interrupted after {count} of {counted(total, 'task')}; {self._hint}") from None
        except Exception:
            self._drain()
            raise
        finally:
            for future in self._under_way:
                future.cancel()
        return count

    def _submit(self, task: Submitted, attempt: int) -> None:
        future = self._workers.executor.submit(self._call, task, *self._arguments)
        self._under_way.add(future)
        future.add_done_callback(lambda ended: self._ended.put((task, attempt, ended)))

    def _next(self) -> Submitted | None:
        """Wait for the next finished task; `None` if one failed and is retried."""
        try:
            task, attempt, future = self._ended.get(timeout=self._workers.timeout)
        except Empty:
            raise _GivenUp(
                errno.ETIMEDOUT,
                f"no worker has ended a task for {self._workers.timeout:g} seconds; under way: "
                f"{counted(len(self._under_way), 'task')}; {self._hint}",
            ) from None
        self._under_way.discard(future)
        try:
            receipt = future.result()
        except Exception as error:
            if attempt >= self._retries or not _may_pass(error):
                raise
            self._submit(task, attempt + 1)
            return None
        self._keep(task, receipt)
        return task

    def _drain(self) -> None:
        """Wait, after an error, for the tasks that have begun, and keep those that finish."""
        for future in list(self._under_way):
            future.cancel()
        while self._under_way:
            try:
                task, _, future = self._ended.get(timeout=self._workers.timeout)
            except Empty:
                return
            self._under_way.discard(future)
            if not future.cancelled() and future.exception() is None:
                self._keep(task, future.result())


def _may_pass(error: Exception) -> bool:
    """Return whether a task that failed with this error may succeed when it is retried, perhaps elsewhere."""
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return not isinstance(
        error, (ShardwiseError, ValueError, TypeError, MemoryError, ImportError, BrokenExecutor, CancelledError)
    )
