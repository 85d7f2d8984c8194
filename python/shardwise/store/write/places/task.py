"""Tasks: parts of a checkpoint that any process writes, in any order, once or twice, with a receipt (rule 2.12 c).

What a task reads, from files, objects and arrays, is put where it belongs: into files, or into memory. The I/O engine
reads files and arrays; what objects have is fetched before.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...._arguments import check_fields
from ...._text import bytes_text, shown
from ...data.engine import check_job_memory
from ...data.sources import Source
from .gatherer import Gatherer
from .work import MEMORY

__all__ = ["Outcome", "Share", "Sink", "Task", "TaskReceipt", "worker_name"]

#: A task's part of an object that several make: the file's number, the first byte, the one after the last, the part's
#: ETag.
Share = tuple[int, int, int, str]


class TaskReceipt(NamedTuple):
    """The receipt of a task: what it has written.

    Attributes:
        plan: The digest of the plan.
        task: The number of the task.
        ranges: For each range that was written: the file's number in the plan, the first byte, and the one after
            the last.
        digests: The digest of each, as a part of its tensor.
        crcs: The CRC-32 of each range, if the files have them; else empty.
        bytes_read: Bytes read from files and objects.
        bytes_written: Bytes written.
        seconds: The time it took.
        worker: The host and the process that wrote it.
        part: The part of the plan that it was run in, as `"3/16"`; empty if it was run otherwise.
        shares: Of objects that several tasks make, what it has put: the file's number, the first byte, the one after
            the last, and the ETag of the part; without one it is in the remainder, which it has `made`.
        made: For an object of a store, its bytes and what distinguishes it from another object of its name; else none.
    """

    plan: str
    task: int
    ranges: tuple[tuple[int, int, int], ...]
    digests: tuple[int, ...]
    crcs: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    seconds: float
    worker: str
    part: str = ""
    shares: tuple[Share, ...] = ()
    made: tuple[int, str] | None = None

    @property
    def contents(self) -> tuple[Any, ...]:
        """The fields that do not depend on when and where the task ran; used to compare two receipts."""
        return self.ranges, self.digests, self.crcs


def worker_name() -> str:
    """Say who works here: host and process."""
    return _worker(os.getpid())


@functools.lru_cache(maxsize=4)
def _worker(process: int) -> str:
    return f"{socket.gethostname()}:{process}"


Progress = Callable[[int], object] | None


class Outcome(NamedTuple):
    """The outcome of one task in its sink.

    Attributes:
        digests: The digest of each range, as a part of its tensor.
        crcs: The CRC-32 of each range, if the files have them; else empty.
        nbytes: Bytes that were written.
        made: For an object, its bytes and what distinguishes it from another object of its name; else none.
        shares: The parts that were put of objects that several tasks make.
    """

    digests: list[int]
    crcs: list[int]
    nbytes: int
    made: tuple[int, str] | None = None
    shares: tuple[Share, ...] = ()


class Sink(Protocol):
    """The destination of a task: regions of files in a folder, an object of a store, or parts of several."""

    def count(self, task: Task) -> int:
        """The number of its own destinations in the task's program."""

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Take what the gatherer gives."""

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """See that what is there is what the gatherer gives."""


@dataclass(frozen=True, repr=False)
class Task:
    """A part of a checkpoint to write: everything that a worker needs to know, and nothing else.

    It is pickled as a few kilobytes, needs neither its plan nor another task, and can be run any number of times,
    anywhere its files or objects are visible.

    Attributes:
        plan: The digest of its plan.
        number: Its number in the plan.
        sink: The destination into which it writes.
        files: The files that it writes parts of: number in the plan, name, bytes.
        ranges: The ranges that it writes: the file's position in `files`, the tensor's number, first byte, end.
    """

    plan: str
    number: int
    sink: Sink
    files: tuple[tuple[int, str, int], ...]
    ranges: tuple[tuple[int, int, int, int], ...]
    _sources: tuple[Source, ...]
    #: Files and objects that are compared with what is written, and the names of the tensors that they hold again.
    _compared: tuple[Source, ...]
    _names: tuple[tuple[int, str], ...]
    #: The tensors, as the numbers of a program of the I/O engine; destinations are those of the sink, then `_compared`.
    _program: bytes
    #: The positions of ranges that hold what earlier ones, or those of other tasks, hold.
    _again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, plan=str, number=int, files=tuple, ranges=tuple, _sources=tuple)
        check_fields(self, _compared=tuple, _names=tuple, _program=bytes, _again=tuple)
        for row in self.ranges:
            if not (isinstance(row, tuple) and len(row) == 4 and isinstance(row[2], int) and isinstance(row[3], int)):
                raise TypeError(f"ranges must be tuples of four integers, got {shown(row)}")

    @property
    def nbytes(self) -> int:
        """The bytes of tensors that it writes."""
        return sum(end - begin for _, _, begin, end in self.ranges)

    @property
    def written(self) -> tuple[tuple[int, int, int, int], ...]:
        """The ranges that it writes: the file's number in the plan, the tensor's number, first byte, end."""
        return tuple((self.files[file][0], tensor, begin, end) for file, tensor, begin, end in self.ranges)

    @property
    def again(self) -> frozenset[int]:
        """The positions of ranges that hold what earlier ones hold."""
        return frozenset(self._again)

    def __repr__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"<Task {self.number}: {bytes_text(self.nbytes)} of {files}>"

    def run(
        self, *, memory: int = MEMORY, sync: bool = True, threads: int | None = 1, progress: Progress = None
    ) -> TaskReceipt:
        """Write it; an object that was made already is compared with what it should be.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            sync: Whether to sync the data to disk before this returns; a store does so anyway.
            threads: The number of threads that read and copy; one per core if `None`.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if a source is not what it was when the plan was made, or replicas disagree.
            FileExistsError: if another object is there.
            FileNotFoundError: if the files do not exist: the plan was not begun, or was committed or given up.
            OSError: if a file cannot be read or written, or a store fails.
        """
        return self._ended(
            memory, lambda given: self.sink.fill(self, given, memory, threads, sync=sync, progress=progress)
        )

    def check(self, *, memory: int = MEMORY, threads: int | None = 1, progress: Progress = None) -> TaskReceipt:
        """See that the finished checkpoint has what it would write; nothing is written.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            threads: The number of threads that read and copy; one per core if `None`.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError, ParseError, OSError: as for `run`.
            FileExistsError: if it has something else.
            FileNotFoundError: if there is none.
        """
        return self._ended(memory, lambda given: self.sink.compare(self, given, memory, threads, progress))

    def _ended(self, memory: int, ask: Callable[[Gatherer], Outcome]) -> TaskReceipt:
        began = time.perf_counter()
        check_job_memory(memory)
        gatherer = Gatherer(self._program, self.sink.count(self), self._sources, self._compared, dict(self._names))
        done = ask(gatherer)
        return TaskReceipt(
            self.plan,
            self.number,
            tuple((file, begin, end) for file, _, begin, end in self.written),
            tuple(done.digests),
            tuple(done.crcs),
            gatherer.bytes_read,
            done.nbytes,
            round(time.perf_counter() - began, 6),
            worker_name(),
            shares=done.shares,
            made=done.made,
        )
