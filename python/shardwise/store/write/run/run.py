"""The one driver of plans (rule 2.12 f): runs the tasks on disks and in stores, and finishes the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from ....errors import LayoutError, ParseError
from ...data.location import taken
from ...data.mapped import MappedFiles
from ...data.same_files import SameFiles
from ...tensors.companion_files import companion_names
from ..forms.forms import WRITTEN
from ..places.fetch import memory_for
from ..places.place import Recorder
from ..places.report import WriteReport
from ..places.task import Progress, Task, TaskReceipt
from ..places.work import TaskWindow, Work, Workers
from ..plan.plan import CheckpointTasks
from .ledger import Ledger, completion_of

__all__ = [
    "confirm_tasks",
    "report_of",
    "run_tasks",
    "run_whole",
    "see_finished",
    "workers_of_plan",
]

#: The memory for each thread of tasks that read files only: with less, fewer threads with larger buffers are better.
_SMALL = 512 * 2**10


def _run(
    task: Task, memory: int, sync: bool, threads: int | None, check: bool, progress: Progress = None
) -> TaskReceipt:
    if check:
        return task.check(memory=memory, threads=threads, progress=progress)
    return task.run(memory=memory, sync=sync, threads=threads, progress=progress)


@contextmanager
def workers_of_plan(plan: CheckpointTasks, work: Work) -> Iterator[Workers]:
    """Yield the workers that run a plan's tasks.

    Raises:
        LayoutError: if the memory is too little.
        TypeError: if an executor's workers cannot see the place or the sources.
    """
    # What a plan file lists is all in stores, or all on disks.
    known = plan.sources[:1] if plan.is_saved else plan.sources
    inside = plan.place.inside or next((source.inside for source in known if source.inside), "")
    if inside and work.executor is not None and not isinstance(work.executor, ThreadPoolExecutor):
        raise TypeError(f"{inside}: is in the memory of this process; give a ThreadPoolExecutor")
    is_fetched = any(source.is_fetched for source in known)
    with plan.place.workers(work, memory_for(int(plan.grid.bytes.max(initial=0))) if is_fetched else _SMALL) as workers:
        if not workers.is_here and not plan.is_of_files:
            raise TypeError("tensors in memory are written by threads of this process; give a ThreadPoolExecutor")
        yield workers


class _Stopped(BaseException):
    """Wraps an exception of the caller's `progress` function, so that the task is not retried for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Shown:
    """Progress: the bytes of finished tasks, and, if one task runs at a time, those of the current one."""

    def __init__(self, show: Callable[[int, int], object] | None, total: int) -> None:
        self._show, self._total = show, total
        self._ended = self._part = self._last = 0

    def begin(self) -> None:
        """Begin a task, or begin it again: none of its bytes are done."""
        self._part = 0

    def more(self, nbytes: int) -> None:
        """Add bytes of the current task."""
        self._part += nbytes
        try:
            self._tell()
        except Exception as error:
            raise _Stopped(error) from None

    def end(self, nbytes: int) -> None:
        """End the current task, which had `nbytes` bytes."""
        self._ended, self._part = self._ended + nbytes, 0
        self._tell()

    def _tell(self) -> None:
        done = min(self._ended + self._part, self._total)
        if self._show is not None and done > self._last:
            self._last = done
            self._show(done, self._total)


def run_tasks(
    ledger: Ledger, numbers: Sequence[int], workers: Workers, recorder: Recorder | None, work: Work, *, hint: str = ""
) -> int:
    """Run the tasks with these numbers, and return how many were run; if one fails, the others' receipts are kept.

    Args:
        ledger: The ledger of the plan; the receipts are added to it.
        numbers: The numbers of the tasks.
        workers: The workers that run the tasks.
        recorder: Stores the receipts, some perhaps only at its next `flush`; if `None`, tasks write nothing, and
            compare the finished checkpoint instead.
        work: The options by which the tasks are run.
        hint: Text for the error about a broken executor: how to continue.
    """
    plan = ledger.plan
    sizes = plan.bytes_of(numbers)
    by_number = np.argsort(numbers)
    in_order = np.asarray(numbers, np.int64)[by_number]
    shown = _Shown(work.progress, int(sizes.sum()))

    def here(task: Task, memory: int, sync: bool, threads: int | None, check: bool) -> TaskReceipt:
        shown.begin()
        return _run(task, memory, sync, threads, check, shown.more)

    def end(task: Task) -> None:
        shown.end(int(sizes[by_number[np.searchsorted(in_order, task.number)]]))

    def keep(task: Task, receipt: TaskReceipt) -> None:
        ledger.add(receipt, task)
        if recorder is not None:
            recorder.add(receipt)

    arguments = workers.memory, work.sync and not workers.is_here, workers.threads, recorder is None
    first = plan.place.unfinished(0) if len(plan.sizes) else None
    stays = f"finished tasks stay{'' if first is None else f' in {first.parent}'}, and the next run continues{hint}"
    call = here if workers.is_one else _run
    window: TaskWindow[Task, TaskReceipt] = TaskWindow(workers, call, arguments, work.retries, keep, stays)
    try:
        order = _spread(numbers, sizes, workers.count)
        return window.run(map(plan.task, order), len(numbers), end)
    except BaseException as error:
        if recorder is not None:
            recorder.flush()
        if isinstance(error, _Stopped):
            raise error.error from None
        raise


def _spread(numbers: Sequence[int], sizes: npt.NDArray[np.int64], workers: int) -> Sequence[int]:
    """Return the tasks in an order in which those that run at the same time are far apart, mostly in different files.

    Most file systems let one writer at a time into a file. So the tasks are divided into one group of consecutive tasks
    per worker, with about equal bytes, and the groups are interleaved.
    """
    if workers < 2 or not len(numbers):
        return numbers
    before = np.cumsum(sizes) - sizes
    edges = [int(before[-1] + sizes[-1]) * share // workers for share in range(workers)]
    share = np.searchsorted(np.array(edges, np.int64), before, side="right") - 1
    position = np.arange(len(sizes)) - np.searchsorted(share, share)
    order: list[int] = np.asarray(numbers, np.int64)[np.lexsort((share, position))].tolist()
    return order


def confirm_tasks(ledger: Ledger, numbers: Sequence[int], workers: Workers, work: Work) -> None:
    """Check that the finished checkpoint has the data that these tasks would write.

    Raises:
        FileExistsError: if it has other data, or the sources can no longer be read.
    """
    try:
        run_tasks(ledger, numbers, workers, None, work)
    except FileExistsError:
        raise
    except (OSError, ParseError) as error:
        raise taken(
            ledger.plan.path, f"exists already, and cannot be compared with the result of this plan: {error}"
        ) from error


def see_finished(plan: CheckpointTasks, workers: Workers, work: Work) -> WriteReport:
    """Report on a checkpoint that was finished earlier, after checking that it is the plan's."""
    ledger = Ledger(plan)
    confirm_tasks(ledger, range(len(plan.tasks)), workers, work)
    plan.place.check_finished(completion_of(plan, ledger, work.memory))
    plan.place.discard()
    ledger.bytes_written = 0
    return report_of(plan, ledger, plan.nbytes)


def run_whole(plan: CheckpointTasks, work: Work) -> WriteReport:
    """Write a checkpoint, from the first task to the final rename; the caller holds its lock."""
    place = plan.place
    with workers_of_plan(plan, work) as workers:
        if work.resume and place.is_finished():
            return see_finished(plan, workers, work)
        plan.check_room()
        place.claim(work.resume)
        ledger = Ledger(plan)
        try:
            mapped = MappedFiles(source.array for source in plan.sources if source.array is not None)
            files = SameFiles(source.name for source in plan.sources if source.name)
            place.begin()
            if work.resume:
                for receipt in place.receipts():
                    ledger.add(receipt)
            known = [number for number in range(len(plan.tasks)) if number in ledger]
            resumed = int(plan.bytes_of(known).sum())
            ledger.bytes_read = ledger.bytes_written = 0
            numbers = [number for number in range(len(plan.tasks)) if number not in ledger]
            recorder = place.recorder(None, work, "", workers)
            run_tasks(ledger, numbers, workers, recorder, work, hint=" (resume=True)")
            try:
                ledger.check_complete()
                mapped.check()
                files.check()
                # The last receipts are needed only if this fails: with them every file would be synced once more.
                place.finish(completion_of(plan, ledger), sync=work.sync)
            except BaseException:
                with suppress(OSError, ParseError):
                    recorder.flush()
                raise
        except (ParseError, LayoutError):
            place.withdraw(ledger.own)  # Another run would end in the same way.
            raise
        except BaseException:
            if not plan.is_of_files:
                place.withdraw(ledger.own)  # A run from memory cannot be continued.
            raise
    return report_of(plan, ledger, resumed)


def report_of(plan: CheckpointTasks, ledger: Ledger, resumed: int) -> WriteReport:
    """Return the report on a written checkpoint; `resumed` of its bytes were written by an earlier run."""
    return WriteReport(
        plan.path,
        sum(not tensor.is_object for tensor in plan.tensors),
        plan.nbytes,
        ledger.bytes_read,
        ledger.bytes_written,
        resumed,
        companions=companion_names(plan.texts, WRITTEN[plan.form].beside),
    )
