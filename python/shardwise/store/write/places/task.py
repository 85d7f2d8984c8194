"""Tasks: parts of a checkpoint that any process writes, in any order, once or twice, with a receipt (rule 2.12 c).

A task assembles its boxes from files, objects and arrays, in files or in memory. The I/O engine reads files and arrays;
pieces of objects are fetched first.
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
from ...._text import bytes_text, counted, shown
from ...data.engine import check_job_memory
from ...data.sources import Source
from .gatherer import Gatherer
from .work import MEMORY

__all__ = ["Outcome", "Share", "Sink", "Task", "TaskReceipt", "worker_name"]

#: A task's part of an object that several tasks make: the file's number, the first byte, the byte after the last, the
#: part's ETag.
Share = tuple[int, int, int, str]


class TaskReceipt(NamedTuple):
    """The receipt of a task: the ranges that it has written, and their digests.

    Attributes:
        plan: The digest of the plan.
        task: The number of the task.
        ranges: For each range that was written: the file's number in the plan, the first byte, and the byte after the
            last.
        digests: The digest of each range, as a part of its tensor.
        crcs: The CRC-32 of each range, if the files state it; else empty.
        bytes_read: Bytes read from files and objects.
        seconds: The duration of the task.
        worker: The host and the process that ran the task.
        part: The part of the plan that was run, as `"3/16"`; empty if tasks were not run by parts.
        shares: The parts of objects shared with other tasks: the file's number, the first byte, the byte after the
            last, and the part's ETag; without an ETag the bytes are in the remainder, which `uploaded` describes.
        uploaded: The size in bytes and the ETag of the object that the task made in a store; else `None`.
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
    uploaded: tuple[int, str] | None = None

    @property
    def contents(self) -> tuple[Any, ...]:
        """The fields that do not depend on the time and place of the run; two receipts of a task must agree on them."""
        return self.ranges, self.digests, self.crcs


def worker_name() -> str:
    """Return the host and the process id of this worker, as a text."""
    return _worker(os.getpid())


@functools.lru_cache(maxsize=4)
def _worker(process: int) -> str:
    return f"{socket.gethostname()}:{process}"


Progress = Callable[[int], object] | None


class Outcome(NamedTuple):
    """The outcome of one task in its sink.

    Attributes:
        digests: The digest of each range, as a part of its tensor.
        crcs: The CRC-32 of each range, if the files state it; else empty.
        nbytes: Bytes that were written.
        uploaded: The size in bytes and the ETag of the object that the task made; else `None`.
        shares: The parts of shared objects that were uploaded.
    """

    digests: list[int]
    crcs: list[int]
    nbytes: int
    uploaded: tuple[int, str] | None = None
    shares: tuple[Share, ...] = ()


class Sink(Protocol):
    """The destination of a task: regions of files in a folder, an object of a store, or parts of several."""

    def count(self, task: Task) -> int:
        """Return the number of the sink's destinations in the task's program."""

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Write the task's tensors, assembled by the gatherer."""

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """Compare the finished checkpoint with the assembled tensors."""


@dataclass(frozen=True, repr=False)
class Task:
    """A part of a checkpoint to write: everything that a worker needs to know, and nothing else.

    A pickled task has a few kilobytes, needs neither its plan nor another task, and can be run any number of times,
    anywhere its files or objects are visible.

    Attributes:
        plan: The digest of the task's plan.
        number: The task's number in the plan.
        sink: The destination into which the task writes.
        files: The files of which the task writes parts: number in the plan, name, size in bytes.
        ranges: The ranges that the task writes: the file's position in `files`, the tensor's number, first byte, byte
            after the last.
    """

    plan: str
    number: int
    sink: Sink
    files: tuple[tuple[int, str, int], ...]
    ranges: tuple[tuple[int, int, int, int], ...]
    _sources: tuple[Source, ...]
    #: Files and objects with replicas, which are compared; and the names of the tensors that have replicas.
    _compared: tuple[Source, ...]
    _names: tuple[tuple[int, str], ...]
    #: The tensors, as a program of the I/O engine; its destinations are those of the sink, and then `_compared`.
    _program: bytes
    #: The positions of ranges with the same elements as an earlier range, or one of another task.
    _again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, plan=str, number=int, files=tuple, ranges=tuple, _sources=tuple)
        check_fields(self, _compared=tuple, _names=tuple, _program=bytes, _again=tuple)
        for row in self.ranges:
            if not (isinstance(row, tuple) and len(row) == 4 and isinstance(row[2], int) and isinstance(row[3], int)):
                raise TypeError(f"ranges must be tuples of four integers, got {shown(row)}")

    @property
    def nbytes(self) -> int:
        """The bytes of tensors that the task writes."""
        return sum(end - begin for _, _, begin, end in self.ranges)

    @property
    def written(self) -> tuple[tuple[int, int, int, int], ...]:
        """The ranges that the task writes: the file's and the tensor's number in the plan, first byte, and end."""
        return tuple((self.files[file][0], tensor, begin, end) for file, tensor, begin, end in self.ranges)

    @property
    def again(self) -> frozenset[int]:
        """The positions of ranges with the same elements as an earlier range, or one of another task."""
        return frozenset(self._again)

    def __repr__(self) -> str:
        files = counted(len(self.files), "file")
        return f"<Task {self.number}: {bytes_text(self.nbytes)} of {files}>"

    def run(
        self, *, memory: int = MEMORY, sync: bool = True, threads: int | None = 1, progress: Progress = None
    ) -> TaskReceipt:
        """Write the task's part of the checkpoint; an object that exists already is compared instead.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            sync: Whether to sync the data to disk before this returns; a store does so anyway.
            threads: The number of threads that read and copy; one per core if `None`.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if a source has changed since the plan was made, or replicas disagree.
            FileExistsError: if another object is there.
            FileNotFoundError: if the files do not exist: the plan was not begun, or was committed or given up.
            OSError: if a file cannot be read or written, or a store fails.
        """
        return self._ended(
            memory, lambda given: self.sink.fill(self, given, memory, threads, sync=sync, progress=progress)
        )

    def check(self, *, memory: int = MEMORY, threads: int | None = 1, progress: Progress = None) -> TaskReceipt:
        """Compare the finished checkpoint with the data that the task would write; nothing is written.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            threads: The number of threads that read and copy; one per core if `None`.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError, ParseError, OSError: as for `run`.
            FileExistsError: if the checkpoint has other data.
            FileNotFoundError: if there is no checkpoint.
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
            uploaded=done.uploaded,
        )
