"""Objects of a store that several tasks make together: the parts that each task uploads."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...._text import bytes_text, counted
from ...._threads import Threads
from ....errors import LayoutError, ParseError
from ...data.engine import LEAST_MEMORY, CopyJob
from ...data.location import taken
from ...data.objects import ObjectPath
from .gatherer import Gatherer, GatherOutcome
from .part_sizes import LIMITS, WINDOW, Limits
from .receipts import unsealed
from .task import Outcome, Progress, Share, Task
from .uploads import Multipart, put_object
from .whole_objects import has_bytes, small_object

__all__ = ["PartsSink", "names_of_uploads", "too_little", "upload_tag"]


@dataclass(frozen=True)
class PartsSink:
    """The sink of a task that makes parts of objects of a store.

    Attributes:
        path: The checkpoint.
        is_folder: Whether the checkpoint is a folder of objects; otherwise it is one object.
        uploads: The object with the list of multipart uploads.
        remainder: The object for bytes that are too short for a part.
        shares: The task's shares: the number of the file, the first byte, the byte after the last, and the first byte
            that is in a part of its own.
        texts: For each share, the bytes before the file's first tensor; empty if the share does not include them.
        limits: The limits of the store on parts.
    """

    path: ObjectPath
    is_folder: bool
    uploads: ObjectPath
    remainder: ObjectPath
    shares: tuple[tuple[int, int, int, int], ...]
    texts: tuple[bytes, ...]
    limits: Limits = LIMITS

    def count(self, task: Task) -> int:
        """Return the number of shares."""
        return len(self.shares)

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Upload the task's parts; if the objects are complete already, compare them instead.

        Raises:
            FileNotFoundError: if there are no uploads: the plan was not begun, or was given up.
        """
        try:
            names = names_of_uploads(self.uploads, task.plan)
        except FileNotFoundError:
            if not self._are_made(task):
                raise
            return self.compare(task, gatherer, memory, threads, None)
        if max(file for file, *_ in self.shares) >= len(names):
            raise ParseError(f"{self.uploads}: the list of uploads has only {counted(len(names), 'entry', 'entries')}")
        done, buffers = self._gathered(gatherer, memory, threads)
        try:
            shares, made = self._put(task, names, buffers, progress)
        except FileNotFoundError:
            if not self._are_made(task):
                why = f"the store has dropped an upload of it; remove {self.uploads}, and run all parts again"
                raise FileNotFoundError(errno.ENOENT, why, str(self.path)) from None
            return self.compare(task, gatherer, memory, threads, None)
        nbytes = sum(end - begin for _, begin, end, _ in self.shares)
        return Outcome(done.digests, done.crcs, nbytes, made, shares)

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """Compare the objects with the assembled tensors.

        Raises:
            FileExistsError, FileNotFoundError: if an object differs, or does not exist.
        """
        done, buffers = self._gathered(gatherer, memory, threads)
        for (file, begin, _, _), data in zip(self.shares, buffers, strict=True):
            there = self._object(task, file)
            status = there.status()
            if status.size != self._file(task, file)[1] or not has_bytes(there, status, begin, data):
                raise taken(there)
            if progress is not None:
                progress(len(data))
        return Outcome(done.digests, done.crcs, 0)

    def _are_made(self, task: Task) -> bool:
        """Return whether another run has already completed the objects."""
        return all(self._upload(task, file).is_made() for file, *_ in self.shares)

    def _file(self, task: Task, file: int) -> tuple[str, int]:
        return next((name, size) for number, name, size in task.files if number == file)

    def _object(self, task: Task, file: int) -> ObjectPath:
        return self.path / self._file(task, file)[0] if self.is_folder else self.path

    def _upload(self, task: Task, file: int, name: str = "") -> Multipart:
        return Multipart(self._object(task, file), upload_tag(task.plan, file), name)

    def _gathered(self, gatherer: Gatherer, memory: int, threads: int | None) -> tuple[GatherOutcome, list[bytearray]]:
        """Assemble all shares in memory."""
        nbytes = sum(end - begin for _, begin, end, _ in self.shares)
        if nbytes + LEAST_MEMORY > memory:
            raise too_little(memory, nbytes)
        buffers = [bytearray(end - begin) for _, begin, end, _ in self.shares]
        for data, text in zip(buffers, self.texts, strict=True):
            data[: len(text)] = text

        def destinations(job: CopyJob) -> None:
            for data in buffers:
                job.write_array(np.frombuffer(data, np.uint8))

        return gatherer.into_files(destinations, memory - nbytes, threads, sync=False), buffers

    def _put(
        self, task: Task, names: Sequence[str], buffers: list[bytearray], progress: Progress
    ) -> tuple[tuple[Share, ...], tuple[int, str] | None]:
        shares: list[Share] = []
        remainder, parts = bytearray(), []
        for (file, begin, end, part), data in zip(self.shares, buffers, strict=True):
            if part > begin:
                remainder += data[: part - begin]
                shares.append((file, begin, part, ""))
                del data[: part - begin]  # Which moves nothing.
            if end > part:
                parts.append((file, part, end, data))

        def sent(item: tuple[int, int, int, bytearray]) -> Share:
            file, begin, end, data = item
            number = self.limits.part_number(self._file(task, file)[1], begin)
            upload = self._upload(task, file, names[file])
            try:
                return file, begin, end, upload.put(number, data)
            except FileNotFoundError:
                # A commit that was interrupted has made some of the objects; if it has made all, nothing is put.
                if not upload.is_made() or self._are_made(task):
                    raise
            there = self._object(task, file)
            status = there.status()
            if not has_bytes(there, status, begin, data):
                raise taken(there)
            return file, begin, end, status.etag

        with Threads(WINDOW, "shardwise-write") as pool:
            for share in pool.map(sent, parts):
                shares.append(share)
                if progress is not None:
                    progress(share[2] - share[1])
        made: tuple[int, str] | None = None
        if remainder:
            put_object(self.remainder, remainder, is_new=False)
            made = self.remainder.status()
            if progress is not None:
                progress(len(remainder))
        return tuple(sorted(shares)), made


def upload_tag(plan: str, file: int) -> str:
    """Return the tag that an object made by the tasks of a plan carries, to recognise it."""
    return f"{plan[:32]}-{file}"


def names_of_uploads(path: ObjectPath, plan: str) -> list[str]:
    """Read the store's names of a plan's uploads, one for each of its files.

    Raises:
        FileNotFoundError: if there are none: the plan was not begun, or was committed or given up.
        ParseError: if the list is damaged, or is of another plan.
    """
    line = small_object(path)
    if line is None:
        raise FileNotFoundError(
            errno.ENOENT, "does not exist: the plan was not begun, or was committed or given up", str(path)
        )
    with unsealed(line, path, "the list of uploads") as (of, names):
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError
    if of != plan:
        raise ParseError(f"{path}: the list of uploads is of another plan")
    return list(names)


def too_little(memory: int, nbytes: int) -> LayoutError:
    """Return the error for a memory that is too small for a task that makes parts of objects."""
    return LayoutError(
        f"memory is {bytes_text(memory)} for each worker; a task that makes {bytes_text(nbytes)} of parts of objects "
        "needs more than that: give more, or make the plan with smaller task_bytes"
    )
