"""The one driver of plans (rule 2.12 f): tasks on disks and in stores, and what follows from their receipts."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from ...._core import joined_crc
from ...._text import shown
from ....errors import LayoutError, ParseError
from ...data.engine import DIGEST_MODULUS
from ...data.location import taken
from ...data.mapped import MappedFiles
from ...data.same_files import SameFiles
from ...formats.sharded import MANIFEST
from ...tensors.companion_files import companion_names
from ..forms.files import FileDigests, WrittenFile
from ..places.gather import memory_for
from ..places.place import Recorder
from ..places.task import Progress, Share, Task, TaskReceipt
from ..places.work import TaskWindow, Work, Workers, WriteReport
from ..plan.plan import CheckpointTasks

__all__ = [
    "Ledger",
    "LedgerCompletion",
    "confirm_tasks",
    "parts_of",
    "report_of",
    "run_tasks",
    "run_whole",
    "see_finished",
    "workers_of_plan",
]

#: The memory for each thread of tasks that read files only: with less, fewer threads with larger buffers are better.
_SMALL = 512 * 2**10
#: The most tasks and the most parts that a message names.
_MOST_SHOWN, _MOST_AGAIN = 5, 20
#: A receipt that names more parts is not believed.
_MOST_PARTS = 2**20


def _run(
    task: Task, memory: int, sync: bool, threads: int | None, check: bool, progress: Progress = None
) -> TaskReceipt:
    if check:
        return task.check(memory=memory, threads=threads, progress=progress)
    return task.run(memory=memory, sync=sync, threads=threads, progress=progress)


@contextmanager
def workers_of_plan(plan: CheckpointTasks, work: Work) -> Iterator[Workers]:
    """Yield the workers that run the tasks.

    Raises:
        LayoutError: if the memory is too little.
        TypeError: if the workers do not see the place or the sources.
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


def run_tasks(
    ledger: Ledger, numbers: Sequence[int], workers: Workers, recorder: Recorder | None, work: Work, *, hint: str = ""
) -> int:
    """Run the tasks with these numbers, and give how many were run; if one fails, the receipts of the others are kept.

    Args:
        ledger: Gets their receipts; it is of the plan that has the tasks.
        numbers: The numbers of the tasks.
        workers: The workers that run them.
        recorder: Keeps their receipts, some of which it may still hold afterwards; without it, tasks only see that what
            is there is right.
        work: The options by which they are run.
        hint: Advice on how another run continues.
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


def confirm_tasks(ledger: Ledger, numbers: Sequence[int], workers: Workers, work: Work) -> None:
    """See that the finished checkpoint has what these tasks would write.

    Raises:
        FileExistsError: if it is another one, or the sources are no longer there to tell.
    """
    try:
        run_tasks(ledger, numbers, workers, None, work)
    except FileExistsError:
        raise
    except (OSError, ParseError) as error:
        raise taken(
            ledger.plan.path, f"exists already, and cannot be compared with what this plan makes: {error}"
        ) from error


def see_finished(plan: CheckpointTasks, workers: Workers, work: Work) -> WriteReport:
    """Report a checkpoint that was finished before, once it is seen that it is the plan's."""
    ledger = Ledger(plan)
    confirm_tasks(ledger, range(len(plan.tasks)), workers, work)
    plan.place.check_finished(LedgerCompletion(plan, ledger, work.memory))
    plan.place.discard()
    ledger.bytes_written = 0
    return report_of(plan, ledger, plan.nbytes)


def run_whole(plan: CheckpointTasks, work: Work) -> WriteReport:
    """Write a checkpoint, from the first task to the last rename; the caller holds its lock."""
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
            place.begin(parts=False)
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
                place.finish(LedgerCompletion(plan, ledger), sync=work.sync)
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
    return report_of(plan, ledger, resumed)


def report_of(plan: CheckpointTasks, ledger: Ledger, resumed: int) -> WriteReport:
    """Say what was written, of which so many bytes by an earlier run."""
    return WriteReport(
        plan.path,
        sum(not tensor.is_object for tensor in plan.tensors),
        plan.nbytes,
        ledger.bytes_read,
        ledger.bytes_written,
        resumed,
        companions=companion_names(plan.texts),
    )


class Ledger:
    """The tasks that are done, and the sum of the digests of what they wrote.

    Attributes:
        plan: The plan that has the tasks.
        bytes_read: Bytes that they read from files.
        bytes_written: Bytes that they wrote.
        made: For tasks that made an object of a store, its bytes and its ETag.
        own: Those of them that put it there; the others found it, made by another run perhaps.
        shares: For tasks that made parts of objects, what they have put.
    """

    def __init__(self, plan: CheckpointTasks) -> None:
        self.plan = plan
        # For each finished task a number made from its contents, to compare with a second receipt.
        self._seen = np.zeros(len(plan.tasks), np.uint64)
        # Sums of digests, by file and tensor, and by tensor; what is asked for is modulo `DIGEST_MODULUS`.
        self._digests: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._whole = [0] * len(plan.tensors)
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self._parts: Counter[str] = Counter()
        self.made: dict[int, tuple[int, str]] = {}
        self.own: dict[int, tuple[int, str]] = {}
        self.shares: dict[int, tuple[Share, ...]] = {}
        self.bytes_read = self.bytes_written = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._seen[number])

    def add(self, receipt: TaskReceipt, task: Task | None = None) -> None:
        """Check a receipt and add it, once.

        Args:
            receipt: A receipt of this plan, by this run or another.
            task: Its task, if that was made.

        Raises:
            ParseError: if it is of another plan, or contradicts its task or an earlier receipt.
        """
        if receipt.plan != self.plan.digest:
            raise ParseError(f"a receipt is of another plan, {shown(receipt.plan)}, not of {self.plan.digest[:16]}")
        number = receipt.task
        if not 0 <= number < len(self._seen):
            raise ParseError(f"a receipt is of task {number}; the plan has {len(self._seen)}")
        written, again = self.plan.written_by(number) if task is None else (task.written, task.again)
        if receipt.ranges != tuple((file, begin, end) for file, _, begin, end in written):
            raise ParseError(f"the receipt of task {number} says that it wrote ranges that are not the plan's")
        if len(receipt.digests) != len(receipt.ranges):
            raise ParseError(f"the receipt of task {number} has {len(receipt.digests)} digests for its ranges")
        files = self.plan.files
        has_crcs = any(files[file].needs_crcs for file, _, _ in receipt.ranges)
        if len(receipt.crcs) != (len(receipt.ranges) if has_crcs else 0):
            raise ParseError(f"the receipt of task {number} has {len(receipt.crcs)} CRC-32 for its ranges")
        if receipt.made is not None:
            self.made[number] = receipt.made
            if receipt.bytes_written:
                self.own[number] = receipt.made
        if receipt.shares:
            self.shares[number] = receipt.shares
        if number in self:
            if not self.agrees(receipt):
                raise ParseError(
                    f"two receipts of task {number} disagree: one is not of this checkpoint, or a source changed"
                )
            return
        self._seen[number] = _fingerprint(receipt)
        self._parts[receipt.part] += 1
        for at, ((file, tensor, _, _), digest) in enumerate(zip(written, receipt.digests, strict=True)):
            self._digests[file, tensor] += digest
            if at not in again:
                self._whole[tensor] += digest
        for (file, begin, end), crc in zip(receipt.ranges, receipt.crcs, strict=False):
            self._crcs.setdefault(file, []).append((begin, end, crc))
        self.bytes_read += receipt.bytes_read
        self.bytes_written += receipt.bytes_written

    def agrees(self, receipt: TaskReceipt) -> bool:
        """Return whether a receipt says the same as the first one of its task."""
        return int(self._seen[receipt.task]) == _fingerprint(receipt)

    @property
    def is_complete(self) -> bool:
        """True if there is a receipt of each task."""
        return bool((self._seen != 0).all())

    def check_complete(self) -> None:
        """Raise ParseError if receipts are missing; names some, and the parts that are to be run again."""
        missing = np.flatnonzero(self._seen == 0)
        parts, hint = parts_of(self._parts), ""
        if parts is not None and len(missing):
            ends = np.array([self.plan.part(part, parts).stop for part in range(1, parts + 1)], np.int64)
            again = (np.unique(np.searchsorted(ends, missing, side="right")) + 1).tolist()
            some = ", ".join(f"{part}/{parts}" for part in again[:_MOST_AGAIN])
            more = f" and {len(again) - _MOST_AGAIN} more" if len(again) > _MOST_AGAIN else ""
            hint = f"; run again part {some}{more}"
        if len(missing):
            some = ", ".join(map(str, missing[:_MOST_SHOWN]))
            more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
            text = f"receipts of {len(missing)} of {len(self._seen)} tasks are missing: {some}{more}{hint}"
            raise ParseError(f"{self.plan.path}: {text}")

    def file_digests(self, number: int) -> FileDigests:
        """Return the digests of what a file holds."""
        file = self.plan.files[number]
        sums = self._digests
        own = {tensor: sums.get((number, tensor), 0) % DIGEST_MODULUS for tensor in set(file.slots.tensors.tolist())}
        return FileDigests(own, self._crcs_of(number) if file.needs_crcs else {})

    def _crcs_of(self, number: int) -> dict[int, int]:
        """The CRC-32 of each slot of a file, by its position."""
        file, found = self.plan.files[number], sorted(self._crcs.get(number, []))
        begins = [begin for begin, _, _ in found]
        crcs = {}
        for position, slot in enumerate(file.slots):
            crc = 0
            first, end = (bisect_left(begins, file.start + at) for at in (slot.begin, slot.end))
            for begin, stop, more in found[first:end]:
                crc = joined_crc(crc, more, stop - begin)
            crcs[position] = crc
        return crcs

    @property
    def digests(self) -> list[int]:
        """The digest of each tensor, of which every element counts once."""
        return [total % DIGEST_MODULUS for total in self._whole]

    def digest(self, file: int, tensor: int) -> int:
        """The digest of what a file has of a tensor."""
        return self._digests.get((file, tensor), 0) % DIGEST_MODULUS


def _fingerprint(receipt: TaskReceipt) -> int:
    """A number made from what a receipt says that was written, never 0."""
    contents = repr((receipt.digests, receipt.crcs)).encode()
    return int.from_bytes(hashlib.sha256(contents).digest()[:8], "little") | 1


def parts_of(receipts: Mapping[str, int]) -> int | None:
    """The number of parts in which most tasks were run; `None` if none was run in one.

    >>> parts_of({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 7, "": 40, "1/" + "9" * 5000: 20})
    16
    >>> parts_of({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 17})
    2
    """
    counts: Counter[int] = Counter()
    for part, count in receipts.items():
        parts = part.partition("/")[2]
        if parts.isdecimal() and len(parts) <= len(str(_MOST_PARTS)) and 0 < int(parts) <= _MOST_PARTS:
            counts[int(parts)] += count
    return counts.most_common(1)[0][0] if counts else None


class LedgerCompletion:
    """The bytes that follow from the receipts of all tasks: around tensors, of the manifest, of the other files.

    Args:
        plan: The plan that has the tasks.
        ledger: The receipts.
        memory: Bytes in which `confirm` compares, with all threads; without it one thread does.

    Attributes:
        names: The names of the further files of a folder.
        made: For tasks that made an object of a store, its bytes and its ETag.
        shares: For tasks that made parts of objects, what they have put.
        is_checked: Whether all that a store has is compared with its sources.
    """

    def __init__(
        self, plan: CheckpointTasks, ledger: Ledger, memory: int | None = None, *, is_checked: bool = False
    ) -> None:
        self._plan, self._ledger, self._memory, self.is_checked = plan, ledger, memory, is_checked
        self._headers: dict[int, str] = {}
        self.names = [MANIFEST, *plan.texts]
        self.made, self.shares = ledger.made, ledger.shares

    def headers(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes around the tensors of a file, each run with the byte at which it begins."""
        # Their digest is kept for the manifest: they are not made once more for it.
        self._headers[number] = yield from self._plan.files[number].headers(self._ledger.file_digests(number))

    def texts(self) -> dict[str, bytes]:
        """The further files of a folder, with the manifest."""
        return self._plan.texts_of(self._ledger.digests, map(self._written, range(len(self._plan.files))))

    def _written(self, number: int) -> WrittenFile:
        file, digests = self._plan.files[number], self._ledger.file_digests(number)
        headers = self._headers.get(number)
        return WrittenFile(file, digests, file.headers_digest(digests) if headers is None else headers)

    def confirm(self, number: int) -> None:
        """Compare what a task has made with its sources and its receipt.

        Raises:
            FileExistsError, FileNotFoundError: if something else is there, or nothing.
            ParseError: if it is not what the receipt says.
        """
        task = self._plan.task(number)
        receipt = task.check() if self._memory is None else task.check(memory=self._memory, threads=None)
        if not self._ledger.agrees(receipt):
            name = self._plan.path / task.files[0][1] if self._plan.is_folder else self._plan.path
            raise ParseError(f"{name}: is not what its receipt says")
