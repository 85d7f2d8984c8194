"""Running the tasks of a plan, each with its receipt, and the commit at the end: the same on disks and in stores."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import integer
from ...errors import LayoutError, ParseError
from ..mapped import MappedFiles
from ..same_files import SameFiles
from .crew import Crew, Flight
from .formats.carried import carried_names
from .ledger import Ledger, Written
from .places.place import Place, Recorder, place_of_plan
from .plans.plan import WritePlan
from .receipts import TaskReceipt
from .reports import WriteReport
from .task import SourceFile
from .work import Work

__all__ = ["commit_plan", "numbers_of", "run_part", "run_whole"]


def _run(task: Any, memory: int, sync: bool, threads: int | None, check: str | None) -> TaskReceipt:
    receipt: TaskReceipt = task.run(memory=memory, sync=sync, threads=threads, check=check)
    return receipt


@contextmanager
def _crew(plan: WritePlan, place: Place, work: Work) -> Iterator[Crew]:
    with place.crew(work) as crew:
        if not crew.is_here and not plan.is_of_files:
            raise TypeError("tensors in memory are written by threads of this process; give a ThreadPoolExecutor")
        yield crew


class _Stopped(BaseException):
    """An exception of the caller's, from the progress of a task that is under way: the task is not run again for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Shown:
    """Progress: the bytes of finished tasks, and of the one under way if there is only one."""

    def __init__(self, show: Callable[[int, int], object] | None, total: int) -> None:
        self._show, self._total = show, total
        self._ended = self._part = self._last = 0

    def begin(self) -> None:
        """Another task, or the same once more, is under way."""
        self._part = 0

    def more(self, nbytes: int) -> None:
        """Bytes of it are done."""
        self._part += nbytes
        try:
            self._tell()
        except Exception as error:
            raise _Stopped(error) from None

    def end(self, nbytes: int) -> None:
        """A task of so many bytes is done."""
        self._ended, self._part = self._ended + nbytes, 0
        self._tell()

    def _tell(self) -> None:
        done = min(self._ended + self._part, self._total)
        if self._show is not None and done > self._last:
            self._last = done
            self._show(done, self._total)


def _run_tasks(
    plan: WritePlan,
    place: Place,
    numbers: Sequence[int],
    crew: Crew,
    ledger: Ledger,
    recorder: Recorder | None,
    work: Work,
    *,
    hint: str = "",
) -> int:
    """Run the tasks with these numbers, and give how many were run; if one fails, the receipts of the others are kept.

    Args:
        plan: The plan.
        place: Its place.
        numbers: The numbers.
        crew: What runs them.
        ledger: Gets their receipts.
        recorder: Keeps their receipts, some of which it may still hold afterwards; without it, tasks only see that what
            is there is right.
        work: How they are run.
        hint: How another run continues.
    """
    sizes = place.task_bytes(numbers)
    shown = _Shown(work.progress, int(sizes.sum()))
    check = None if recorder is not None else place.finished

    def here(task: Any, memory: int, sync: bool, threads: int | None, check: str | None) -> TaskReceipt:
        shown.begin()
        receipt: TaskReceipt = task.run(memory=memory, sync=sync, threads=threads, check=check, progress=shown.more)
        return receipt

    def keep(task: Any, receipt: TaskReceipt) -> None:
        ledger.add(receipt, Written(task.written, task.again))
        if recorder is not None:
            recorder.add(receipt)

    arguments = crew.memory, work.sync and not crew.is_here, crew.threads, check
    stays = f"finished tasks stay, and the next run continues{hint}"
    flight: Flight[Any, TaskReceipt] = Flight(crew, here if crew.is_one else _run, arguments, work.retries, keep, stays)
    try:
        order = _spread(numbers, sizes, crew.workers)
        return flight.run(map(plan.task, order), len(numbers), lambda task: shown.end(task.nbytes))
    except BaseException as error:
        if recorder is not None:
            recorder.flush()
        if isinstance(error, _Stopped):
            raise error.error from None
        raise


def _spread(numbers: Sequence[int], sizes: npt.NDArray[np.int64], workers: int) -> Sequence[int]:
    """Put tasks in an order in which those under way at once lie far apart, and mostly in different files.

    Most file systems let one writer at a time into a file. So there are as many shares of like bytes as workers, each
    of tasks that follow one another, and each share gives a task in turn.
    """
    if workers < 2 or not len(numbers):
        return numbers
    before = np.cumsum(sizes) - sizes
    edges = [int(before[-1] + sizes[-1]) * share // workers for share in range(workers)]
    share = np.searchsorted(np.array(edges, np.int64), before, side="right") - 1
    position = np.arange(len(sizes)) - np.searchsorted(share, share)
    order: list[int] = np.asarray(numbers, np.int64)[np.lexsort((share, position))].tolist()
    return order


def run_part(plan: WritePlan, part: tuple[int, int] | None, tasks: Sequence[int] | None, work: Work) -> int:
    """Run tasks of a plan and record their receipts; see `CheckpointPlan.run`."""
    span, numbers = numbers_of(plan, part, tasks)
    place, ledger = place_of_plan(plan), Ledger(plan)
    lock = place.locked() if part is None and tasks is None else nullcontext()
    with lock, _crew(plan, place, work) as crew:
        if place.is_finished():
            _confirm(plan, place, numbers, crew, ledger, work)
            return 0
        place.begin(parts=True)
        if tasks is None:
            for receipt in place.receipts(span):
                ledger.add(receipt)
            numbers = [number for number in numbers if number not in ledger]
        recorder = place.recorder(span, work, "" if part is None else f"{part[0]}/{part[1]}", crew)
        done = _run_tasks(plan, place, numbers, crew, ledger, recorder, work)
        recorder.flush()
        return done


def numbers_of(
    plan: WritePlan, part: tuple[int, int] | None, tasks: Sequence[int] | None
) -> tuple[range, Sequence[int]]:
    """Give the numbers of the tasks of a part, or those asked for, and a range that they are within.

    Raises:
        LayoutError: if there is no such part or task.
        TypeError: if both are given, or something else.
    """
    if tasks is None:
        span = range(len(plan.tasks)) if part is None else _part(plan, part)
        return span, span
    if part is not None:
        raise TypeError("part and tasks cannot both be given")
    numbers = [integer("a task", number) for number in tasks]
    wrong = next((number for number in numbers if not 0 <= number < len(plan.tasks)), None)
    if wrong is not None:
        raise LayoutError(f"tasks: there is no task {wrong}; the plan has {len(plan.tasks)}")
    return range(min(numbers, default=0), max(numbers, default=-1) + 1), numbers


def _part(plan: WritePlan, part: Any) -> range:
    if not isinstance(part, tuple) or len(part) != 2:
        raise TypeError(f"part must be a tuple (part, parts), got {type(part).__name__}")
    return plan.part(integer("part", part[0]), integer("parts", part[1]))


def _confirm(plan: WritePlan, place: Place, numbers: Sequence[int], crew: Crew, ledger: Ledger, work: Work) -> None:
    """See that the finished checkpoint has what these tasks would write.

    Raises:
        FileExistsError: if it is another one, or the sources are no longer there to tell.
    """
    try:
        _run_tasks(plan, place, numbers, crew, ledger, None, work)
    except FileExistsError:
        raise
    except (OSError, ParseError) as error:
        text = f"exists already, and cannot be compared with what this plan makes: {error}"
        raise FileExistsError(errno.EEXIST, text, str(plan.path)) from error


def _finished(plan: WritePlan, place: Place, crew: Crew, work: Work) -> WriteReport:
    """Report a checkpoint that was finished before, once it is seen that it is the plan's."""
    ledger = Ledger(plan)
    _confirm(plan, place, range(len(plan.tasks)), crew, ledger, work)
    place.check_finished(ledger)
    place.discard()
    ledger.bytes_written = 0
    return _report(plan, ledger, plan.nbytes)


def run_whole(plan: WritePlan, work: Work) -> WriteReport:
    """Write a checkpoint, from the first task to the last rename; the caller holds its lock."""
    place = place_of_plan(plan)
    with _crew(plan, place, work) as crew:
        if work.resume and place.is_finished():
            return _finished(plan, place, crew, work)
        place.check_room()
        place.claim(work.resume)
        ledger = Ledger(plan)
        try:
            mapped = MappedFiles(plan.sources)
            files = SameFiles(source.path for source in plan.sources if isinstance(source, SourceFile))
            place.begin(parts=False)
            if work.resume:
                for receipt in place.receipts():
                    ledger.add(receipt)
            known = [number for number in range(len(plan.tasks)) if number in ledger]
            resumed = int(place.task_bytes(known).sum())
            ledger.bytes_read = ledger.bytes_written = 0
            numbers = [number for number in range(len(plan.tasks)) if number not in ledger]
            recorder = place.recorder(None, work, "", crew)
            _run_tasks(plan, place, numbers, crew, ledger, recorder, work, hint=" (resume=True)")
            try:
                ledger.check_complete()
                mapped.check()
                files.check()
                # The last receipts are needed only if this fails: with them every file would be synced once more.
                place.finish(ledger, sync=work.sync)
            except BaseException:
                with suppress(OSError, ParseError):
                    recorder.flush()
                raise
        except (ParseError, LayoutError):
            place.discard(ledger)  # Another run would end in the same way.
            raise
        except BaseException:
            if not plan.is_of_files:
                place.discard(ledger)  # A run from memory cannot be continued.
            raise
    return _report(plan, ledger, resumed)


def commit_plan(plan: WritePlan, *, check: bool, work: Work) -> WriteReport:
    """Finish a checkpoint whose tasks were run; see `CheckpointPlan.commit`."""
    place, ledger = place_of_plan(plan), Ledger(plan)
    with place.locked():
        if place.is_finished():
            with _crew(plan, place, work) as crew:
                return _finished(plan, place, crew, work)
        for receipt in place.receipts():
            ledger.add(receipt)
        if not ledger.is_complete and place.is_finished():  # By another process, meanwhile.
            with _crew(plan, place, work) as crew:
                return _finished(plan, place, crew, work)
        ledger.check_complete()
        if check:
            place.check_written(ledger, work)
        place.finish(ledger, sync=work.sync)
    return _report(plan, ledger, 0)


def _report(plan: WritePlan, ledger: Ledger, resumed: int) -> WriteReport:
    return WriteReport(
        plan.path,
        sum(not tensor.is_object for tensor in plan.tensors),
        plan.nbytes,
        ledger.bytes_read,
        ledger.bytes_written,
        resumed,
        carried=carried_names(plan.texts),
    )
