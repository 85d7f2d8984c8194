"""Running the tasks of a plan, each with its receipt, and the commit at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import _core
from ..._arguments import integer
from ...errors import LayoutError, ParseError
from ..engine import check_memory
from ..mapped import MappedFiles
from ..same_files import SameFiles
from .carried import carried_names
from .crew import Crew, Flight, check_retries, crew_for
from .forecast import bytes_to_read, estimated_seconds, runs_to_copy
from .ledger import Ledger
from .place import Recorder, Workplace
from .plan import WritePlan
from .reports import WriteOutline, WriteReport
from .task import CheckpointTask, SourceFile, TaskReceipt

__all__ = ["commit_plan", "numbers_of", "outline_of", "run_part", "run_whole"]

#: The most bytes that the two buffers of a thread take.
_MOST_BUFFERS = 16 * 2**20


def _run(task: CheckpointTask, memory: int, sync: bool) -> TaskReceipt:
    return task.run(memory=memory, sync=sync)


@contextlib.contextmanager
def _crew(plan: WritePlan, executor: Executor | None, memory: int, threads: int | None) -> Iterator[Crew]:
    with crew_for(executor, memory, threads, nbytes=plan.nbytes, tasks=len(plan.tasks)) as crew:
        if not crew.is_here and not plan.is_of_files:
            raise TypeError("tensors in memory are written by threads of this process; give a ThreadPoolExecutor")
        yield crew


def _run_tasks(
    plan: WritePlan,
    numbers: Sequence[int],
    crew: Crew,
    ledger: Ledger,
    recorder: Recorder,
    *,
    sync: bool,
    retries: int,
    progress: Callable[[int, int], object] | None,
    hint: str = "",
) -> int:
    """Run the tasks with these numbers, and give how many were run; `hint` says how another run continues."""
    sizes = plan.grid.bytes[np.asarray(numbers, np.int64)] if len(numbers) else np.zeros(0, np.int64)
    done, total = 0, int(sizes.sum())

    def keep(task: CheckpointTask, receipt: TaskReceipt) -> None:
        ledger.add(receipt, task)
        recorder.add(receipt)

    def shown(task: CheckpointTask) -> None:
        nonlocal done
        done += task.nbytes
        if progress is not None:
            progress(done, total)

    arguments = crew.memory, sync and not crew.is_here
    stays = f"finished tasks stay, and the next run continues{hint}"
    flight: Flight[CheckpointTask, TaskReceipt] = Flight(crew, _run, arguments, retries, keep, stays)
    try:
        return flight.run(map(plan.task, _spread(numbers, sizes, crew.workers)), len(numbers), shown)
    finally:
        recorder.flush()


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


def run_part(
    plan: WritePlan,
    span: range,
    numbers: Sequence[int],
    *,
    is_whole: bool,
    again: bool,
    executor: Executor | None,
    memory: int,
    threads: int | None,
    sync: bool,
    retries: int,
    progress: Callable[[int, int], object] | None,
) -> int:
    """Run tasks of a plan, all within a span, and record their receipts; see `CheckpointPlan.run`."""
    place, ledger = Workplace(plan), Ledger(plan)
    lock = place.locked() if is_whole else nullcontext()
    with lock, _crew(plan, executor, memory, threads) as crew:
        place.begin(parts=True)
        if not again:
            for receipt in place.receipts(span):
                ledger.add(receipt)
            numbers = [number for number in numbers if number not in ledger]
        recorder = place.recorder(span, sync=sync, gather=crew.is_here)
        return _run_tasks(plan, numbers, crew, ledger, recorder, sync=sync, retries=retries, progress=progress)


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
    """Write a checkpoint, from the first task to the last rename; the caller holds its lock."""
    check_retries(retries)
    place = Workplace(plan)
    with _crew(plan, executor, memory, threads) as crew:
        place.claim(resume)
        try:
            ledger, mapped = Ledger(plan), MappedFiles(plan.sources)
            files = SameFiles(source.path for source in plan.sources if isinstance(source, SourceFile))
            place.begin(parts=False)
            for receipt in place.receipts():
                ledger.add(receipt)
            resumed = int(plan.grid.bytes[[number in ledger for number in range(len(plan.tasks))]].sum())
            ledger.bytes_read = ledger.bytes_written = 0
            numbers = [number for number in range(len(plan.tasks)) if number not in ledger]
            recorder = place.recorder(None, sync=sync, gather=crew.is_here)
            _run_tasks(
                plan, numbers, crew, ledger, recorder, sync=sync, retries=retries, progress=progress,
                hint=" (resume=True)",
            )  # fmt: skip
            ledger.check_complete()
            mapped.check()
            files.check()
            place.finish(ledger, sync=sync)
        except (ParseError, LayoutError):
            place.discard()  # Another run would end in the same way.
            raise
        except BaseException:
            if not plan.is_of_files:
                place.discard()  # A run from memory cannot be continued.
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
            place.begin(parts=True)  # Tensors without elements have no tasks.
        if check:
            check_memory(memory)
            place.check_written(ledger, memory)
        place.finish(ledger, sync=sync)
    return _report(plan, ledger, 0)


def outline_of(plan: WritePlan, memory: int, threads: int | None, sync: bool) -> WriteOutline:
    """Say what it takes to run a plan in this process; see `CheckpointPlan.outline`."""
    to_read = bytes_to_read(plan)
    with _crew(plan, None, memory, threads) as crew:
        names = (file.name for file in plan.files)
        return WriteOutline(
            tuple(zip(names, plan.sizes, strict=True)),
            plan.nbytes,
            crew.workers * min(crew.memory, _MOST_BUFFERS),
            crew.workers,
            len(plan.tasks),
            _core.free_space(plan.path.parent),
            to_read,
            runs_to_copy(plan),
            estimated_seconds(plan, to_read, sync=sync),
        )


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
