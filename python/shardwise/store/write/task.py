"""Tasks: parts of a checkpoint that any process can write, in any order, once or twice, each with a receipt.

A receipt is a line of JSON with a digest of itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..._arguments import check_fields
from ..._text import bytes_text, shown
from ...errors import ParseError
from ..engine import DIGEST_MODULUS, check_memory
from ..sources import Source
from .gather import Gatherer
from .work import MEMORY

__all__ = [
    "Sink",
    "Task",
    "TaskReceipt",
    "Written",
    "parts_of",
    "receipt_from_line",
    "receipt_line",
    "refuse_missing",
    "worker_name",
]

_MOST_SHOWN = 5
#: A receipt that names more parts is not believed.
_MOST_PARTS = 2**20


class TaskReceipt(NamedTuple):
    """The receipt of a task: what it has written.

    Attributes:
        plan: The digest of the plan.
        task: The number of the task.
        ranges: For each range that was written: the file's number in the plan, the first byte, and the one after
            the last.
        digests: The digest of each, as a part of its tensor.
        crcs: The CRC-32 of each, for files that have them; else none.
        bytes_read: Bytes read from files and objects.
        bytes_written: Bytes written.
        seconds: The time it took.
        worker: Who wrote it: host and process.
        part: The part of the plan that it was run in, as `"3/16"`; empty if it was run otherwise.
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
    made: tuple[int, str] | None = None

    @property
    def contents(self) -> tuple[Any, ...]:
        """The part that any run of the task says alike."""
        return self.ranges, self.digests, self.crcs


def receipt_line(receipt: TaskReceipt) -> bytes:
    """Write a receipt as a line."""
    said = [*receipt[:3], [f"{digest:x}" for digest in receipt.digests], *receipt[4:]]
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(text), text)


def receipt_from_line(line: bytes, where: object) -> TaskReceipt:
    """Read a receipt.

    Raises:
        ParseError: if the line is not what `receipt_line` wrote.
    """
    with _read(line, where) as said:
        plan, task, ranges, digests, crcs, read, written, seconds, worker, part, made = said
        receipt = TaskReceipt(
            str(plan),
            task,
            tuple((file, begin, end) for file, begin, end in ranges),
            tuple(int(digest, 16) for digest in digests),
            tuple(crcs),
            read,
            written,
            float(seconds),
            str(worker),
            str(part),
            None if made is None else _made(*made),
        )
        numbers = [number for row in receipt.ranges for number in row]
        sizes = [] if receipt.made is None else [receipt.made[0]]
        if not all(type(number) is int for number in (task, read, written, *numbers, *sizes, *receipt.crcs)):
            raise ValueError
        if not all(0 <= digest < DIGEST_MODULUS for digest in receipt.digests):
            raise ValueError
        if not all(0 <= crc < 2**32 for crc in receipt.crcs):
            raise ValueError
    return receipt


def _made(size: int, mark: str) -> tuple[int, str]:
    return size, str(mark)


@contextmanager
def _read(line: bytes, where: object) -> Iterator[Any]:
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if _digest(text) != digest:
        raise ParseError(f"{where}: a receipt is not what was written: it was edited or is damaged")
    try:
        yield json.loads(text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ParseError(f"{where}: a receipt has contents that no task writes") from None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()


def refuse_missing(path: object, missing: Sequence[int], total: int, hint: str = "") -> None:
    """Raise ParseError if receipts of the `total` tasks of a checkpoint are missing; names some, and what to do."""
    if len(missing):
        some = ", ".join(map(str, missing[:_MOST_SHOWN]))
        more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
        raise ParseError(f"{path}: receipts of {len(missing)} of {total} tasks are missing: {some}{more}{hint}")


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


def worker_name() -> str:
    """Say who works here: host and process."""
    return _worker(os.getpid())


@functools.lru_cache(maxsize=4)
def _worker(process: int) -> str:
    return f"{socket.gethostname()}:{process}"


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
