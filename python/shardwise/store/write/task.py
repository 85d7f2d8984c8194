"""Tasks: parts of a checkpoint that any process can write, in any order, once or twice, each with a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..._arguments import check_fields
from ..._text import bytes_text, shown
from ..engine import check_memory
from .gather import Gatherer
from .receipts import TaskReceipt, worker_name
from .sources import Source
from .work import MEMORY

__all__ = ["Sink", "Task", "Written"]

Progress = Callable[[int], object] | None


class Written(NamedTuple):
    """What a sink has taken.

    Attributes:
        digests: The digest of each range, as a part of its tensor.
        crcs: The CRC-32 of each, for files that have them; else none.
        nbytes: Bytes that were written.
        made: For an object, its bytes and what distinguishes it from another object of its name; else none.
    """

    digests: list[int]
    crcs: list[int]
    nbytes: int
    made: tuple[int, str] | None = None


class Sink(Protocol):
    """Where a task writes: regions of files in a folder, or an object of a store."""

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Written:
        """Take what the gatherer gives."""

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Written:
        """See that what is there is what the gatherer gives."""


@dataclass(frozen=True, repr=False)
class Task:
    """A part of a checkpoint to write: everything that a worker needs to know, and nothing else.

    It is pickled as a few kilobytes, needs neither its plan nor another task, and can be run any number of times,
    anywhere its files or objects are visible.

    Attributes:
        plan: The digest of its plan.
        number: Its number in the plan.
        sink: Where it writes.
        files: The files that it writes parts of: number in the plan, name, bytes.
        ranges: The ranges that it writes: the file's position in `files`, the tensor's number, first byte, end.
    """

    plan: str
    number: int
    sink: Sink
    files: tuple[tuple[int, str, int], ...]
    ranges: tuple[tuple[int, int, int, int], ...]
    #: Files and objects, or the arrays of a plan of arrays in memory.
    _sources: tuple[Any, ...]
    #: Files and objects that are compared with what is written, and the names of the tensors that they hold again.
    _compared: tuple[Source, ...]
    _names: tuple[tuple[int, str], ...]
    #: The tensors, as the numbers of a program of the I/O engine; destinations are the files, then `_compared`.
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
            threads: How many read and copy; one per core if `None`.
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
            threads: How many read and copy; one per core if `None`.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError, ParseError, OSError: as for `run`.
            FileExistsError: if it has something else.
            FileNotFoundError: if there is none.
        """
        return self._ended(memory, lambda given: self.sink.compare(self, given, memory, threads, progress))

    def _ended(self, memory: int, ask: Callable[[Gatherer], Written]) -> TaskReceipt:
        began = time.perf_counter()
        check_memory(memory)
        gatherer = Gatherer(self._program, len(self.files), self._sources, self._compared, dict(self._names))
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
            made=done.made,
        )
