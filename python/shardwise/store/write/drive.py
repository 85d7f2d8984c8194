"""Tasks given to whatever runs functions: so many at a time, again where that may help, each with its receipt."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from ... import _core
from ..._arguments import integer
from ...errors import LayoutError, ParseError, ShardwiseError
from .ledger import Ledger
from .place import Recorder, Workplace
from .plan import WritePlan
from .reports import WriteOutline, WriteReport
from .task import CheckpointTask, TaskReceipt

__all__ = ["commit_plan", "outline_of", "run_part", "run_whole"]

#: Of each worker, how many tasks are under way or wait for it.
_WINDOW = 2
#: With less memory than the first, fewer threads with larger buffers are better; the other is what one needs.
_SMALL, _LEAST = 512 * 2**10, 16 * 2**10
#: What the two buffers of a thread take at most.
_MOST_BUFFERS = 16 * 2**20
#: What one thread has done before another has started.
_PARALLEL_FROM = 4 * 2**20
_MOST_THREADS = 256
#: Errors of the system that are the same the next time.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}


class _Here(Executor):
    """Runs each function at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Crew:
    """Who runs the tasks.

    Attributes:
        executor: What takes functions.
        workers: How many run at a time.
        memory: Bytes for the buffers of each.
        is_here: Whether they run in this process.
        window: How many tasks are under way or wait.
    """

    executor: Executor
    workers: int
    memory: int
    is_here: bool
    window: int


@contextlib.contextmanager
def crew_for(plan: WritePlan, executor: Executor | None, memory: int, threads: int | None) -> Iterator[Crew]:
    """Give who runs the tasks of a plan: a caller's executor, or threads for as long as this lasts.

    Raises:
        LayoutError: if the memory is too little.
        TypeError: if `executor` is not one, or the plan's sources are in memory and it is not of threads.
    """
    memory = integer("memory", memory)
    if executor is not None:
        is_here = isinstance(executor, ThreadPoolExecutor)
        if not isinstance(executor, Executor):
            raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}")
        if not is_here and not plan.is_of_files:
            raise TypeError("tensors in memory are written by threads of this process; give a ThreadPoolExecutor")
        workers, sharing = _workers(executor)
        yield Crew(executor, workers, _budget(memory, sharing), is_here, _WINDOW * workers)
        return
    workers = _threads(plan, memory, threads)
    budget = _budget(memory, workers)
    if workers == 1:
        yield Crew(_Here(), 1, budget, True, 1)
        return
    with ThreadPoolExecutor(workers, "shardwise") as pool:
        try:
            yield Crew(pool, workers, budget, True, _WINDOW * workers)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _threads(plan: WritePlan, memory: int, threads: int | None) -> int:
    if threads is not None and integer("threads", threads) < 1:
        raise LayoutError(f"threads is {threads}; it must be at least 1")
    if plan.nbytes < _PARALLEL_FROM:
        return 1
    wanted = threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads or os.cpu_count()
    return max(min(wanted or 1, len(plan.tasks), memory // _SMALL, _MOST_THREADS), 1)


def _budget(memory: int, workers: int) -> int:
    if memory // workers < _LEAST:
        needed = f"at least {_LEAST} bytes are needed" + (f" for each of {workers} workers" if workers > 1 else "")
        raise LayoutError(f"memory is {memory} bytes; {needed}")
    return memory // workers


def _workers(executor: Executor) -> tuple[int, int]:
    """How many workers an executor has, and how many of them, at most, share the memory of one host."""
    client = getattr(executor, "_client", None)
    if client is not None and hasattr(client, "nthreads"):  # Dask's: addresses such as tcp://10.0.0.1:4711.
        hosts: dict[str, int] = {}
        for address, count in client.nthreads().items():
            host = str(address).rpartition("/")[2].rpartition(":")[0]
            hosts[host] = hosts.get(host, 0) + int(count)
        return max(sum(hosts.values()), 1), max([1, *hosts.values()])
    # The first is that of the standard library, the second that of mpi4py, which says nothing of hosts.
    for name in ("_max_workers", "num_workers"):
        count = getattr(executor, name, None)
        if isinstance(count, int) and count > 0:
            return count, count
    return (os.cpu_count() or 1,) * 2


def _run(task: CheckpointTask, memory: int, sync: bool) -> TaskReceipt:
    return task.run(memory=memory, sync=sync)


class _Drive:
    """Tasks of a plan under way."""

    def __init__(
        self, plan: WritePlan, crew: Crew, ledger: Ledger, recorder: Recorder, sync: bool, retries: int
    ) -> None:
        self._plan, self._crew, self._ledger, self._recorder = plan, crew, ledger, recorder
        self._sync = sync and not crew.is_here
        self._retries = retries
        self._ended: SimpleQueue[tuple[CheckpointTask, int, Future[TaskReceipt]]] = SimpleQueue()
        self._under_way: set[Future[TaskReceipt]] = set()

    def run(self, numbers: Sequence[int], progress: Callable[[int, int], object] | None) -> int:
        """Run these tasks, and give how many were."""
        sizes = self._plan.grid.bytes[np.asarray(numbers, np.int64)] if len(numbers) else np.zeros(0, np.int64)
        done, total, count = 0, int(sizes.sum()), 0
        waiting = iter(numbers)
        try:
            while True:
                while len(self._under_way) < self._crew.window:
                    number = next(waiting, None)
                    if number is None:
                        break
                    self._submit(self._plan.task(number), 0)
                if not self._under_way:
                    break
                task = self._next()
                if task is not None:
                    count, done = count + 1, done + task.nbytes
                    if progress is not None:
                        progress(done, total)
        except (BrokenExecutor, CancelledError) as error:
            self._drain()
            raise BrokenExecutor(
                f"a worker died, and the executor with it ({type(error).__name__}), after {count} of {len(numbers)} "
                "tasks; what is done stays, and the next run goes on with it (resume=True)"
            ) from error
        except Exception:
            self._drain()
            raise
        finally:
            for future in self._under_way:
                future.cancel()
            self._recorder.flush()
        return count

    def _submit(self, task: CheckpointTask, attempt: int) -> None:
        future = self._crew.executor.submit(_run, task, self._crew.memory, self._sync)
        self._under_way.add(future)
        future.add_done_callback(lambda ended: self._ended.put((task, attempt, ended)))

    def _next(self) -> CheckpointTask | None:
        """The next task that is done; `None` if one failed and is tried again."""
        task, attempt, future = self._ended.get()
        self._under_way.discard(future)
        try:
            receipt = future.result()
        except Exception as error:
            if attempt >= self._retries or not _may_pass(error):
                raise
            self._submit(task, attempt + 1)
            return None
        self._ledger.add(receipt, task)
        self._recorder.add(receipt)
        return task

    def _drain(self) -> None:
        """After an error: what has begun is waited for, and recorded if it is done."""
        for future in list(self._under_way):
            future.cancel()
        while self._under_way:
            task, _, future = self._ended.get()
            self._under_way.discard(future)
            if not future.cancelled() and future.exception() is None:
                self._ledger.add(future.result(), task)
                self._recorder.add(future.result())


def _may_pass(error: Exception) -> bool:
    """Whether the same task may succeed another time, perhaps elsewhere."""
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return not isinstance(
        error, (ShardwiseError, ValueError, TypeError, MemoryError, ImportError, BrokenExecutor, CancelledError)
    )


def run_part(
    plan: WritePlan,
    part: tuple[int, int] | None,
    tasks: Sequence[int] | None,
    *,
    executor: Executor | None,
    memory: int,
    threads: int | None,
    sync: bool,
    retries: int,
    progress: Callable[[int, int], object] | None,
) -> int:
    """Run tasks of a plan and record their receipts; see `CheckpointPlan.run`."""
    _check_retries(retries)
    place, ledger = Workplace(plan), Ledger(plan)
    numbers: Sequence[int]
    if tasks is not None:
        if part is not None:
            raise TypeError("part and tasks cannot both be given")
        numbers = [integer("a task", number) for number in tasks]
        wrong = next((number for number in numbers if not 0 <= number < len(plan.tasks)), None)
        if wrong is not None:
            raise LayoutError(f"tasks: there is no task {wrong}; the plan has {len(plan.tasks)}")
        span = range(min(numbers, default=0), max(numbers, default=-1) + 1)
    else:
        span = range(len(plan.tasks)) if part is None else _part(plan, part)
        numbers = span
    lock = place.locked() if part is None and tasks is None else nullcontext()
    with lock, crew_for(plan, executor, memory, threads) as crew:
        place.begin(parts=True)
        if tasks is None:
            for receipt in place.receipts(span):
                ledger.add(receipt)
            numbers = [number for number in span if number not in ledger]
        recorder = place.recorder(span, sync=sync, gather=crew.is_here)
        return _Drive(plan, crew, ledger, recorder, sync, retries).run(numbers, progress)


def _part(plan: WritePlan, part: Any) -> range:
    if not isinstance(part, tuple) or len(part) != 2:
        raise TypeError(f"part must be a tuple (part, parts), got {type(part).__name__}")
    return plan.part(integer("part", part[0]), integer("parts", part[1]))


def run_whole(
    plan: WritePlan,
    *,
    executor: Executor | None,
    memory: int,
    threads: int | None,
    sync: bool,
    resume: bool,
    retries: int,
    progress: Callable[[int, int], object] | None,
) -> WriteReport:
    """Write a checkpoint, from the first task to the last rename."""
    _check_retries(retries)
    place = Workplace(plan)
    with crew_for(plan, executor, memory, threads) as crew, place.locked():
        place.claim(resume)
        try:
            ledger = Ledger(plan)
            place.begin(parts=False)
            for receipt in place.receipts():
                ledger.add(receipt)
            resumed = int(plan.grid.bytes[[number in ledger for number in range(len(plan.tasks))]].sum())
            ledger.bytes_read = ledger.bytes_written = 0
            numbers = [number for number in range(len(plan.tasks)) if number not in ledger]
            recorder = place.recorder(None, sync=sync, gather=crew.is_here)
            _Drive(plan, crew, ledger, recorder, sync, retries).run(numbers, progress)
            ledger.check_complete()
            place.finish(ledger, sync=sync)
        except (ParseError, LayoutError):
            place.discard()  # Another run of the same would end the same.
            raise
        except BaseException:
            if not plan.is_of_files:
                place.discard()  # Nobody can go on with what was in memory.
            raise
    return _report(plan, ledger, resumed)


def commit_plan(plan: WritePlan, *, check: bool, memory: int, sync: bool) -> WriteReport:
    """Finish a checkpoint whose tasks were run; see `CheckpointPlan.commit`."""
    place, ledger = Workplace(plan), Ledger(plan)
    with place.locked():
        place.refuse_existing()
        for receipt in place.receipts():
            ledger.add(receipt)
        ledger.check_complete()
        if not len(plan.tasks):
            place.begin(parts=True)  # Of tensors without elements no task was run.
        if check:
            place.check_written(ledger, memory)
        place.finish(ledger, sync=sync)
    return _report(plan, ledger, 0)


def outline_of(plan: WritePlan, memory: int, threads: int | None) -> WriteOutline:
    """Say what it takes to run a plan in this process; see `CheckpointPlan.outline`."""
    with crew_for(plan, None, memory, threads) as crew:
        names = (file.name for file in plan.files)
        return WriteOutline(
            tuple(zip(names, plan.sizes, strict=True)),
            plan.nbytes,
            crew.workers * min(crew.memory, _MOST_BUFFERS),
            crew.workers,
            len(plan.tasks),
            _core.free_space(plan.path.parent),
        )


def _check_retries(retries: int) -> None:
    if integer("retries", retries) < 0:
        raise LayoutError(f"retries is {retries}; it must be at least 0")


def _report(plan: WritePlan, ledger: Ledger, resumed: int) -> WriteReport:
    return WriteReport(
        plan.path,
        sum(not tensor.is_object for tensor in plan.tensors),
        plan.nbytes,
        ledger.bytes_read,
        ledger.bytes_written,
        resumed,
    )
