"""`CheckpointPlan`: a plan of a new checkpoint that can be saved, run in parts anywhere, and committed.

The outline of a plan states the bytes that it would read and copy, and about how long that would take.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...._arguments import integer, path_of
from ...._drawn import Worded
from ...._text import bytes_text, counted, shown
from ....errors import LayoutError, ParseError
from ....pieces import LocatedPiece
from ....rules.left_out import LeftOut
from ...data.engine import CopyJob, add_digests, check_job_memory
from ...data.location import refuse_options
from ..places.place import Completion
from ..places.report import WriteOutline, WriteReport
from ..places.work import MEMORY, RETRIES, Work
from ..plan.data import said_by
from ..plan.file import check_plan, load_plan, save_plan
from ..plan.plan import CheckpointTasks
from .ledger import Ledger, completion_of
from .run import confirm_tasks, report_of, run_tasks, see_finished, workers_of_plan

__all__ = ["CheckpointPlan", "bytes_to_read", "estimated_seconds", "runs_to_copy"]


class CheckpointPlan(Worded, CheckpointTasks):
    """A new checkpoint as tasks that any process can do, in any order; `plan_checkpoint` makes it.

    For a checkpoint in an object store a task makes an object, and receipts are objects next to it.

    Attributes:
        path: The place of the new checkpoint.
        task_bytes: The most bytes of tensors that a task writes; has no meaning for stores.
        tasks: The tasks, each made when it is asked for.
        digest: The digest of the plan; no other plan has it.
        nbytes: Bytes of all files.
        warnings: As in `WriteReport`; a file of a plan does not keep them.
        left_out: As in `WriteReport`; a file of a plan does not keep it.
        obstacle: The reason why the plan's tasks cannot be run alone; empty if they can.
        is_sampled: Whether the time is estimated from a sample of the source; not possible for a source in a store.
    """

    warnings: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    is_sampled: bool = True

    def noted(
        self, *, warnings: tuple[str, ...], left_out: tuple[LeftOut, ...], obstacle: str, is_sampled: bool
    ) -> CheckpointPlan:
        """Return the same plan with the warnings and obstacles that were found when it was made."""
        made = copy.copy(self)
        made.warnings, made.left_out, made.obstacle, made.is_sampled = warnings, left_out, obstacle, is_sampled
        return made

    def outline(self, memory: int = MEMORY, threads: int | None = None, *, sync: bool = True) -> WriteOutline:
        """Return the cost of running the plan in this process.

        The speed is measured on a sample of up to 16 MiB, which is written to a file without a name next to the
        destination; nothing else is written.

        Args:
            memory: Bytes for the buffers of all workers.
            threads: The number of threads; one per core if left out.
            sync: Whether the data is to be synced to disk.

        Raises:
            LayoutError: if the memory is too little.
            OSError: if the folder for the checkpoint does not exist.
        """
        outline = _outline(self, Work(memory=memory, threads=threads, sync=sync))
        seconds = outline.seconds if self.is_sampled else None
        return replace(outline, warnings=self.warnings, left_out=self.left_out, seconds=seconds)

    def explain(self) -> str:
        """Describe the plan in a few lines: files, tasks, bytes, and things left out; nothing is written or read.

        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from shardwise import plan_checkpoint, save_checkpoint
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = save_checkpoint(folder / "a.safetensors", {"w": np.zeros((8, 8), "f4")})
        >>> print(plan_checkpoint(folder / "a.safetensors", folder / "b", to="hf").explain().replace(str(folder), "…"))
        …/b: 1 tensor in 1 file, 360 B.
        1 task reads 256 B and writes up to 256 B of tensors.
        """
        files, tasks = len(self.files), len(self.tasks)
        read = bytes_text(bytes_to_read(self))
        lines = [
            f"{self.path}: {counted(len(self.tensors), 'tensor')} in {counted(files, 'file')}, "
            f"{bytes_text(self.nbytes)}.",
            f"{counted(tasks, 'task')} {'reads' if tasks == 1 else 'read'} {read} and "
            f"{'writes' if tasks == 1 else 'write'} up to {bytes_text(sum(self.written_bytes.tolist()))} of tensors.",
        ]
        if self.obstacle:
            lines.append(f"The tasks cannot be run by themselves: {self.obstacle}.")
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"left out: {each}" for each in self.left_out]
        return "\n".join(lines)

    def is_finished(self) -> bool:
        """Return whether any checkpoint has the plan's name; `run` and `commit` check whether it is the plan's."""
        return self.place.is_finished()

    def check(self) -> None:
        """Check that the contents of a plan read from a file agree with one another; `commit` does so too.

        Raises:
            ParseError: if the contents contradict each other.
        """
        if self._file is not None:
            with said_by(self._file):
                check_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which `load` reads on any machine that sees the plan's files.

        Raises:
            TypeError: if a tensor must be put together first (see `plan_checkpoint`), or is in memory or a temporary
                file; if a filesystem of fsspec has options that its URL and the environment do not give.
            OSError: if the file cannot be written.
        """
        self.check_tasks()
        if not self.is_of_files:
            raise TypeError("a plan whose tensors are in memory, or in temporary files, cannot be saved")
        refuse_options([self.path, *(source.path for source in self.sources)], "a plan file")
        save_plan(self, path_of(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckpointPlan:
        """Read a plan that `save` wrote.

        Raises:
            ParseError: if the file is not a plan, has another version, or was damaged or edited.
            OSError: if the file cannot be read.
        """
        return load_plan(path_of(path), cls)

    def run(
        self,
        part: tuple[int, int] | None = None,
        *,
        tasks: Sequence[int] | None = None,
        executor: Executor | None = None,
        workers: int | None = None,
        memory: int = MEMORY,
        threads: int | None = None,
        sync: bool = True,
        retries: int = RETRIES,
        timeout: float | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Run tasks of the plan, and record their receipts next to the files; `commit` finishes the checkpoint.

        Args:
            part: The part, counted from 1, and the number of parts, as in `(3, 16)`; all tasks if left out.
            tasks: Numbers of tasks instead, which are run even if there are receipts for them.
            executor: The executor that runs the tasks; threads of this process if left out. See `reshard_checkpoint`.
            workers: The number of workers of the executor; by default the number that it states.
            memory: Bytes for the buffers of all workers of this host.
            threads: The number of threads, if there is no executor; one per core if left out.
            sync: Whether to sync the data to disk before writing its receipt; a store does so anyway.
            retries: The most retries of a task that fails with a system error.
            timeout: Seconds after which workers of an executor are given up if none has ended a task.
            progress: Called now and then with the bytes done and the bytes in all.

        Returns:
            The number of tasks that were run; those with a receipt from an earlier run are not run again. If the
            checkpoint is finished, what these tasks would write is compared with it, and none is run.

        Raises:
            FileExistsError: if there is something else under the checkpoint's name, or in the way of its files.
            ParseError: if a source has changed, replicas disagree, or a receipt contradicts the data.
            LayoutError: if there is no such part or task, or the memory is too little.
            TypeError: if a tensor must be put together first; see `plan_checkpoint`.
            BrokenExecutor: if a worker died and its executor with it; finished tasks stay, and the next run continues.
            TimeoutError: if workers were given up; finished tasks stay too.
            OSError: if a file cannot be read or written.
        """
        work = Work(
            executor=executor, workers=workers, memory=memory, threads=threads, sync=sync, retries=retries,
            timeout=timeout, progress=progress,
        )  # fmt: skip
        self.check_tasks()
        span, numbers = _numbers_of(self, part, tasks)
        place, ledger = self.place, Ledger(self)
        lock = place.locked() if part is None and tasks is None else nullcontext()
        with lock, workers_of_plan(self, work) as running:
            if place.is_finished():
                confirm_tasks(ledger, numbers, running, work)
                return 0
            place.begin_parts()
            if tasks is None:
                for receipt in place.receipts(span):
                    ledger.add(receipt)
                numbers = [number for number in numbers if number not in ledger]
            recorder = place.recorder(span, work, "" if part is None else f"{part[0]}/{part[1]}", running)
            done = run_tasks(ledger, numbers, running, recorder, work)
            recorder.flush()
            return done

    def commit(self, *, check: bool = False, memory: int = MEMORY, sync: bool = True) -> WriteReport:
        """Finish the checkpoint: write headers and manifest, and give it its name.

        Args:
            check: Whether to read back all that was written and compare it with the receipts; in a store also with the
                sources. Without it the receipts are believed: only `verify_checkpoint` finds data that another program
                or the loss of a disk's cache changed after it was written.
            memory: Bytes for buffers while checking.
            sync: Whether to sync the data to disk before the checkpoint gets its name.

        Returns:
            What was written: nothing if the checkpoint was finished before; it is then compared with the sources.

        Raises:
            FileExistsError: if there is something else under the checkpoint's name.
            BlockingIOError: if another process is working on the checkpoint.
            ParseError: if a receipt is missing (the message says which parts to run again), damaged, of another plan,
                or contradicts its task or another receipt for it; or, with `check`, if the data is not what a receipt
                says. Nothing is changed, except that an object that several tasks have made on S3 has its name already.
            OSError: if a file cannot be written.
        """
        self.check_tasks()
        self.check()
        work, place, ledger = Work(memory=memory, sync=sync), self.place, Ledger(self)
        with place.locked():
            is_finished = place.is_finished()
            for receipt in () if is_finished else place.receipts():
                ledger.add(receipt)
            # By another process, perhaps, since the first look.
            if is_finished or (not ledger.is_complete and place.is_finished()):
                with workers_of_plan(self, work) as workers:
                    return see_finished(self, workers, work)
            ledger.check_complete()
            completion = _checked(self, ledger, work) if check else completion_of(self, ledger)
            place.finish(completion, sync=work.sync)
        return report_of(self, ledger, 0)


def _numbers_of(
    plan: CheckpointTasks, part: tuple[int, int] | None, tasks: Sequence[int] | None
) -> tuple[range, Sequence[int]]:
    """Return the numbers of the tasks of a part, or those asked for; and a range that contains all of them.

    Raises:
        LayoutError: if there is no such part or task.
        TypeError: if both are given, or something else.
    """
    if tasks is None and part is None:
        return range(len(plan.tasks)), range(len(plan.tasks))
    if tasks is None:
        if not isinstance(part, tuple) or len(part) != 2:
            raise TypeError(f"part must be a tuple (part, parts), got {type(part).__name__}")
        span = plan.part(integer("part", part[0]), integer("parts", part[1]))
        return span, span
    if part is not None:
        raise TypeError("part and tasks cannot both be given")
    numbers = [integer("a task", number) for number in tasks]
    wrong = next((number for number in numbers if not 0 <= number < len(plan.tasks)), None)
    if wrong is not None:
        raise LayoutError(f"tasks: there is no task {wrong}; the plan has {counted(len(plan.tasks), 'task')}")
    return range(min(numbers, default=0), max(numbers, default=-1) + 1), numbers


def _checked(plan: CheckpointTasks, ledger: Ledger, work: Work) -> Completion:
    """Read back the written files and compare them with the receipts; `finish` of a store compares its objects.

    Raises:
        ParseError: if the data differs; the message names the tensor and the file.
    """
    check_job_memory(work.memory)
    job, slots = CopyJob(), []
    nowhere = job.discard()
    for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
        path = plan.place.unfinished(number)
        if path is None:
            return completion_of(
                plan, ledger, work.memory, is_checked=True
            )  # By the place, when its objects are there.
        holder = job.read_file(path, size)
        for at, slot in enumerate(file.slots):
            if slot.end > slot.begin:
                tensor = plan.tensors[slot.tensor]
                piece = LocatedPiece(slot.box, holder, file.start + slot.begin, file.slots.strides(at))
                kept = LocatedPiece.dense(slot.box, nowhere, 0, tensor.itemsize)
                job.add_tensor(tensor.shape, tensor.itemsize, [piece], [kept], digest=True)
                slots.append((path, number, slot.tensor))
    found: dict[tuple[Path, int, int], int] = {}
    for key, digest in zip(slots, job.run(budget=work.memory).digests, strict=True):
        found[key] = add_digests([found.get(key, 0), digest])
    for (path, number, held), digest in found.items():
        if digest != ledger.digest(number, held):
            raise ParseError(f"{path}: tensor {shown(plan.tensors[held].name)} is not what the receipts say")
    return completion_of(plan, ledger)


def _outline(plan: CheckpointTasks, work: Work) -> WriteOutline:
    """Return the cost of running a plan in this process."""
    place = plan.place
    free = place.free()
    files = tuple((file.name, size) for file, size in zip(plan.files, plan.sizes, strict=True))
    with workers_of_plan(plan, work) as workers:
        count = workers.threads if workers.threads is not None and workers.is_one else workers.count
        outline = WriteOutline(files, plan.nbytes, place.buffers(work, workers), count, len(plan.tasks), 2**63 - 1)
    if free is None:
        return outline
    to_read = bytes_to_read(plan)
    is_fetched = any(source.is_fetched for source in plan.sources)
    # A sample of files does not tell how fast a store is.
    folder = Path(str(plan.path.parent))
    seconds = None if is_fetched else estimated_seconds(plan, folder, free, to_read, sync=work.sync)
    return replace(outline, free=free, bytes_read=to_read, operations=runs_to_copy(plan), seconds=seconds)


#: The bytes of a sample, and of each of its reads.
_SAMPLE, _BLOCK = 16 * 2**20, 2**20


def bytes_to_read(plan: CheckpointTasks) -> int:
    """Return the bytes of the tensors in the sources, and of the replicas that are compared with them."""
    return sum(
        sum(pieces.volumes.tolist()) * tensor.itemsize
        for tensor in plan.tensors
        for pieces in (tensor.sources, tensor.replicas)
    )


def runs_to_copy(plan: CheckpointTasks) -> int:
    """Return the number of copies, each of bytes that are contiguous both in a source and in a new file."""
    return sum(tensor.sources.runs_into(tensor.targets, tensor.itemsize) for tensor in plan.tensors)


def estimated_seconds(plan: CheckpointTasks, folder: Path, free: int, to_read: int, *, sync: bool) -> float | None:
    """Return an estimate of the time to run a plan of files, from copying a sample to a file without a name.

    Tensors that are converted first count as further bytes. Return `None` if the sample cannot be read or written.
    """
    in_memory = sum(source.array.nbytes for source in plan.sources if source.array is not None)
    written = plan.nbytes
    most = min(_SAMPLE, free // 4, max(written, 1))
    if most < 1:
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as sample:
            began = time.perf_counter()
            blocks = list(_sample(plan, most))
            read_in = time.perf_counter() - began
            is_read = bool(blocks)
            blocks = blocks or [os.urandom(min(_BLOCK, most))] * max(1, most // _BLOCK)
            began = time.perf_counter()
            for block in blocks:
                sample.write(block)
            sample.flush()
            if sync:
                os.fsync(sample.fileno())
            written_in = time.perf_counter() - began
    except (OSError, ParseError):
        return None
    size = sum(map(len, blocks))
    if not is_read:
        read_in = written_in
    return ((to_read + in_memory) * read_in + (written + in_memory) * written_in) / size


def _sample(plan: CheckpointTasks, most: int) -> Iterator[bytes]:
    """Yield blocks of the sources' tensors, spread as widely as possible."""
    files = [source for source in plan.sources if len(source.data)]
    total = sum(len(file.data) for file in files)
    most = min(most, total)
    count = -(-most // _BLOCK)
    ends = np.cumsum([len(file.data) for file in files])
    for number in range(count):
        at = (total - min(_BLOCK, most)) * number // max(count - 1, 1)
        place, left = int(np.searchsorted(ends, at, side="right")), min(_BLOCK, most)
        begin = files[place].data.stop - (int(ends[place]) - at)
        while left and place < len(files):
            file = files[place]
            begin = max(begin, file.data.start)
            data = file.read(begin, min(begin + left, file.data.stop))
            yield data
            left, place, begin = left - len(data), place + 1, 0
