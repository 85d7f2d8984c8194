"""Running the tasks of a plan, each with its receipt, and the commit at the end: the same on disks and in stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import integer
from ..._text import shown
from ...errors import LayoutError, ParseError
from ..carried import carried_names
from ..engine import CopyJob, add_digests, check_memory
from ..location import taken
from ..mapped import MappedFiles
from ..pieces import Piece
from ..same_files import SameFiles
from .gather import memory_for
from .ledger import Ending, Ledger, Written, texts_of
from .places.place import Place, Recorder
from .plan import WritePlan
from .task import Progress, Task, TaskReceipt
from .work import Crew, Flight, Work, WriteReport

__all__ = ["check_room", "commit_plan", "crew_of_plan", "numbers_of", "run_part", "run_whole"]

#: The memory for each thread of tasks that read files only: with less, fewer threads with larger buffers are better.
_SMALL = 512 * 2**10


def _run(
    task: Task, memory: int, sync: bool, threads: int | None, check: bool, progress: Progress = None
) -> TaskReceipt:
    if check:
        return task.check(memory=memory, threads=threads, progress=progress)
    return task.run(memory=memory, sync=sync, threads=threads, progress=progress)


@contextmanager
def crew_of_plan(plan: WritePlan, place: Place, work: Work) -> Iterator[Crew]:
    """What runs the tasks.

    Raises:
        LayoutError: if the memory is too little.
        TypeError: if the workers do not see the place or the sources.
    """
    # What a plan file lists is all in stores, or all on disks.
    known = plan.sources[:1] if plan.is_saved else plan.sources
    noted = [source for source in known if not isinstance(source, np.ndarray)]
    inside = place.inside or next((source.inside for source in noted if source.inside), "")
    if inside and work.executor is not None and not isinstance(work.executor, ThreadPoolExecutor):
        raise TypeError(f"{inside}: is in the memory of this process; give a ThreadPoolExecutor")
    is_fetched = any(source.fetched for source in noted)
    with place.crew(work, memory_for(int(plan.grid.bytes.max(initial=0))) if is_fetched else _SMALL) as crew:
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
        numbers: The numbers.
        crew: What runs them.
        ledger: Gets their receipts.
        recorder: Keeps their receipts, some of which it may still hold afterwards; without it, tasks only see that what
            is there is right.
        work: How they are run.
        hint: How another run continues.
    """
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
        ledger.add(receipt, Written(task.written, task.again))
        if recorder is not None:
            recorder.add(receipt)

    arguments = crew.memory, work.sync and not crew.is_here, crew.threads, recorder is None
    stays = f"finished tasks stay, and the next run continues{hint}"
    call = here if crew.is_one else _run
    flight: Flight[Task, TaskReceipt] = Flight(crew, call, arguments, work.retries, keep, stays)
    try:
        order = _spread(numbers, sizes, crew.workers)
        return flight.run(map(plan.task, order), len(numbers), end)
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
    place, ledger = plan.place, Ledger(plan)
    lock = place.locked() if part is None and tasks is None else nullcontext()
    with lock, crew_of_plan(plan, place, work) as crew:
        if place.is_finished():
            _confirm(plan, numbers, crew, ledger, work)
            return 0
        place.begin(parts=True)
        if tasks is None:
            for receipt in place.receipts(span):
                ledger.add(receipt)
            numbers = [number for number in numbers if number not in ledger]
        recorder = place.recorder(span, work, "" if part is None else f"{part[0]}/{part[1]}", crew)
        done = _run_tasks(plan, numbers, crew, ledger, recorder, work)
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


def _confirm(plan: WritePlan, numbers: Sequence[int], crew: Crew, ledger: Ledger, work: Work) -> None:
    """See that the finished checkpoint has what these tasks would write.

    Raises:
        FileExistsError: if it is another one, or the sources are no longer there to tell.
    """
    try:
        _run_tasks(plan, numbers, crew, ledger, None, work)
    except FileExistsError:
        raise
    except (OSError, ParseError) as error:
        raise taken(plan.path, f"exists already, and cannot be compared with what this plan makes: {error}") from error


def _finished(plan: WritePlan, place: Place, crew: Crew, work: Work) -> WriteReport:
    """Report a checkpoint that was finished before, once it is seen that it is the plan's."""
    ledger = Ledger(plan)
    _confirm(plan, range(len(plan.tasks)), crew, ledger, work)
    place.check_finished(_ending(plan, ledger, work.memory))
    place.discard()
    ledger.bytes_written = 0
    return _report(plan, ledger, plan.nbytes)


def run_whole(plan: WritePlan, work: Work) -> WriteReport:
    """Write a checkpoint, from the first task to the last rename; the caller holds its lock."""
    place = plan.place
    with crew_of_plan(plan, place, work) as crew:
        if work.resume and place.is_finished():
            return _finished(plan, place, crew, work)
        check_room(plan)
        place.claim(work.resume)
        ledger = Ledger(plan)
        try:
            mapped = MappedFiles(plan.sources)
            noted = (source for source in plan.sources if not isinstance(source, np.ndarray))
            files = SameFiles(source.name for source in noted if source.name)
            place.begin(parts=False)
            if work.resume:
                for receipt in place.receipts():
                    ledger.add(receipt)
            known = [number for number in range(len(plan.tasks)) if number in ledger]
            resumed = int(plan.bytes_of(known).sum())
            ledger.bytes_read = ledger.bytes_written = 0
            numbers = [number for number in range(len(plan.tasks)) if number not in ledger]
            recorder = place.recorder(None, work, "", crew)
            _run_tasks(plan, numbers, crew, ledger, recorder, work, hint=" (resume=True)")
            try:
                ledger.check_complete()
                mapped.check()
                files.check()
                # The last receipts are needed only if this fails: with them every file would be synced once more.
                place.finish(_ending(plan, ledger, None), sync=work.sync)
            except BaseException:
                with suppress(OSError, ParseError):
                    recorder.flush()
                raise
        except (ParseError, LayoutError):
            place.discard(ledger.own)  # Another run would end in the same way.
            raise
        except BaseException:
            if not plan.is_of_files:
                place.discard(ledger.own)  # A run from memory cannot be continued.
            raise
    return _report(plan, ledger, resumed)


def check_room(plan: WritePlan) -> None:
    """Refuse, with OSError, a plan for which there is no room."""

    def beside() -> Iterator[int]:
        return map(len, texts_of(plan, [0] * len(plan.tensors)).values() if plan.is_folder else ())

    plan.place.check_room(beside)


def _ending(plan: WritePlan, ledger: Ledger, memory: int | None) -> Ending:
    """What follows from the receipts; what is compared with its sources is in so much memory."""

    def confirm(number: int) -> None:
        task = plan.task(number)
        try:
            ledger.add(task.check() if memory is None else task.check(memory=memory, threads=None))
        except ParseError as error:
            if "two receipts" not in str(error):
                raise
            name = plan.path / plan.files[number].name if plan.is_folder else plan.path
            raise ParseError(f"{name}: is not what its receipt says") from None

    return Ending(plan, ledger, confirm)


def _check_written(plan: WritePlan, place: Place, ledger: Ledger, work: Work) -> None:
    """Read all that was written, and compare it with the receipts; what has its name already also with the sources.

    Raises:
        ParseError: if it is not what they say; names the tensor and the file.
    """
    check_memory(work.memory)
    ending, job, slots = _ending(plan, ledger, work.memory), CopyJob(), []
    nowhere = job.discard()
    for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
        path = place.unfinished(number)
        if path is None:
            ending.confirm(number)
            continue
        holder = job.read_file(path, size)
        for at, slot in enumerate(file.slots):
            if slot.end > slot.begin:
                tensor = plan.tensors[slot.tensor]
                piece = Piece(slot.box, holder, file.start + slot.begin, file.slots.strides(at))
                kept = Piece.dense(slot.box, nowhere, 0, tensor.itemsize)
                job.add_tensor(tensor.shape, tensor.itemsize, [piece], [kept], digest=True)
                slots.append((path, number, slot.tensor))
    found: dict[tuple[Path, int, int], int] = {}
    for key, digest in zip(slots, job.run(budget=work.memory).digests, strict=True):
        found[key] = add_digests([found.get(key, 0), digest])
    for (path, number, held), digest in found.items():
        if digest != ledger.digest(number, held):
            raise ParseError(f"{path}: tensor {shown(plan.tensors[held].name)} is not what the receipts say")


def commit_plan(plan: WritePlan, *, check: bool, work: Work) -> WriteReport:
    """Finish a checkpoint whose tasks were run; see `CheckpointPlan.commit`."""
    place, ledger = plan.place, Ledger(plan)
    with place.locked():
        if place.is_finished():
            with crew_of_plan(plan, place, work) as crew:
                return _finished(plan, place, crew, work)
        for receipt in place.receipts():
            ledger.add(receipt)
        if not ledger.is_complete and place.is_finished():  # By another process, meanwhile.
            with crew_of_plan(plan, place, work) as crew:
                return _finished(plan, place, crew, work)
        ledger.check_complete()
        if check:
            _check_written(plan, place, ledger, work)
        place.finish(_ending(plan, ledger, None), sync=work.sync)
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
