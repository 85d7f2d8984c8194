"""Tasks: parts of a checkpoint that any process can write, in any order, once or twice, and receipts for them."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..._arguments import check_fields
from ..._atomic import naming
from ..._text import bytes_text, shown
from ...errors import ParseError
from ..engine import CopyJob, check_memory
from ..objects import ObjectPath
from .manifest import differing_replica
from .places.opened import opened_below
from .receipts import check_numbers, line_of, read_line

__all__ = [
    "CheckpointTask",
    "Places",
    "SourceFile",
    "SourceObject",
    "TaskReceipt",
    "check_head",
    "head_digest",
    "receipt_from_line",
    "receipt_line",
    "source_of",
]

#: How many bytes of what surrounds the tensors in a file are digested, at its beginning and at its end.
_MOST_HEAD, _MOST_TAIL = 2**20, 2**16


class SourceFile(NamedTuple):
    """A file to read, as it was when the plan was made, and must still be.

    Attributes:
        path: Where it is.
        size: Its bytes.
        modified: The time when it was last written to (`st_mtime_ns`).
        changed: The time when it was last changed in any way (`st_ctime_ns`), which no program can set; `None` for a
            file that each run makes anew.
        begin: The byte at which the first tensor begins that the plan reads.
        end: The byte at which the last one ends.
        digest: The SHA-256 of what is before and after, in hexadecimal; see `head_digest`.
    """

    path: str
    size: int
    modified: int
    changed: int | None
    begin: int
    end: int
    digest: str

    @property
    def times(self) -> tuple[int, int | None]:
        """Both times."""
        return self.modified, self.changed


class SourceObject(NamedTuple):
    """An object of a store to read: what it was when the plan was made, and must still be.

    Attributes:
        path: Where it is.
        size: Its bytes.
        mark: What tells it from another object of the same name.
    """

    path: ObjectPath
    size: int
    mark: str


class Places:
    """Places by what a plan file calls them; objects of one protocol have one filesystem."""

    def __init__(self) -> None:
        self._filesystems: dict[str, Any] = {}

    def of(self, said: str) -> Path:
        """Give the place of this name."""
        return cast(Path, self.object(said)) if "://" in said and not said.startswith("/") else Path(said)

    def object(self, url: str) -> ObjectPath:
        """Give the object at this URL."""
        protocol = url.partition("://")[0]
        path = ObjectPath(url, filesystem=self._filesystems.get(protocol))
        self._filesystems[protocol] = path.filesystem
        return path


def source_of(said: Any, places: Places) -> SourceFile | SourceObject:
    """Give the source that a plan file says.

    Raises:
        ValueError: if it says none.
    """
    path, size, *rest = said
    sizes = [size, *rest[:-1]]
    if not all(isinstance(text, str) for text in (path, rest[-1])) or not all(type(each) is int for each in sizes):
        raise ValueError("it has a source that is neither a file nor an object")
    if not rest[:-1]:
        return SourceObject(places.object(path), size, rest[-1])
    source = SourceFile(*said)
    if not 0 <= source.begin <= source.end <= source.size < 1 << 63:
        raise ValueError(f"it has a source of {source.size} bytes, with tensors from {source.begin} to {source.end}")
    return source


def head_digest(path: str | Path, size: int, begin: int, end: int) -> str:
    """Digest what a file holds before its byte `begin`, up to 1 MiB, and after `end`, the last 64 KiB: its headers."""
    digest = hashlib.sha256()
    head, tail = min(begin, _MOST_HEAD), min(size - end, _MOST_TAIL)
    if head or tail:
        with naming(path), Path(path).open("rb") as stream:
            digest.update(stream.read(head))
            stream.seek(size - tail)
            digest.update(stream.read(tail))
    return digest.hexdigest()


class TaskReceipt(NamedTuple):
    """What a task has written.

    Attributes:
        plan: The digest of the plan.
        task: The number of the task.
        ranges: For each range that was written: the file's number in the plan, the first byte, and the one after
            the last.
        digests: The digest of each, as a part of its tensor.
        crcs: The CRC-32 of each, for files that have them; else none.
        bytes_read: Bytes read from files.
        bytes_written: Bytes written.
        seconds: The time it took.
        worker: Who wrote it: host and process.
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


@dataclass(frozen=True, repr=False)
class CheckpointTask:
    """A part of a checkpoint to write: everything that a worker needs to know, and nothing else.

    It is pickled as a few kilobytes, needs no other task, and can be run any number of times, anywhere its files are
    visible.

    Attributes:
        plan: The digest of its plan.
        number: Its number in the plan.
        folder: The folder of the unfinished files.
        files: The files that it writes parts of: number in the plan, name, bytes.
        ranges: The ranges that it writes: the file's position in `files`, the tensor's number, first byte, end.
    """

    plan: str
    number: int
    folder: str
    files: tuple[tuple[int, str, int], ...]
    ranges: tuple[tuple[int, int, int, int], ...]
    #: Files, or the arrays of a plan of arrays in memory.
    _sources: tuple[Any, ...]
    #: Files that are compared with what is written; for each piece of them its tensor's name and shape, and its number
    #: among all destination pieces.
    _compared: tuple[SourceFile, ...]
    _replicas: tuple[tuple[int, int, str, tuple[int, ...]], ...]
    #: For each range, its number among all destination pieces.
    _numbers: tuple[int, ...]
    #: The numbers of a `CopyJob`.
    _program: bytes

    def __post_init__(self) -> None:
        check_fields(self, plan=str, number=int, folder=str, files=tuple, ranges=tuple, _sources=tuple)
        check_fields(self, _compared=tuple, _replicas=tuple, _numbers=tuple, _program=bytes)
        for row in self.ranges:
            if not (isinstance(row, tuple) and len(row) == 4 and isinstance(row[2], int) and isinstance(row[3], int)):
                raise TypeError(f"ranges must be tuples of four integers, got {shown(row)}")

    @property
    def nbytes(self) -> int:
        """The bytes that it writes."""
        return sum(end - begin for _, _, begin, end in self.ranges)

    def __repr__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"<CheckpointTask {self.number}: {bytes_text(self.nbytes)} of {files}>"

    def run(self, *, memory: int = 64 * 2**20, sync: bool = True) -> TaskReceipt:
        """Write it, in one thread.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            sync: Whether to sync the data to disk before this returns.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if a source is not what it was when the plan was made, or replicas disagree.
            FileNotFoundError: if the files do not exist: the plan was not begun, or was committed or given up.
            OSError: if a file cannot be read or written.
        """
        began = time.perf_counter()
        check_memory(memory)
        job = CopyJob.of_program(np.frombuffer(self._program, np.int64))
        for source in self._sources:
            if isinstance(source, SourceFile):
                check_head(source)
                job.read_file(source.path, source.size, source.times)
            else:
                job.read_array(source)
        with opened_below(Path(self.folder), 3) as folder:
            for _, name, size in self.files:
                job.fill_file(folder.path / name, size, folder.descriptor)
            for other in self._compared:
                job.compare_file(other.path, other.size, other.times)
            done = job.run(budget=memory, threads=1, sync=sync)
        for piece, element in done.differences:
            raise ParseError(self._difference(piece, element))
        return TaskReceipt(
            self.plan,
            self.number,
            tuple((self.files[file][0], begin, end) for file, _, begin, end in self.ranges),
            tuple(done.digests[number] for number in self._numbers),
            tuple(done.crcs[number] for number in self._numbers) if done.crcs else (),
            done.bytes_read,
            done.bytes_written,
            round(time.perf_counter() - began, 6),
            worker_name(),
        )

    def _difference(self, piece: int, element: int) -> str:
        file, _, name, shape = next(replica for replica in self._replicas if replica[1] == piece)
        return differing_replica(name, shape, self._compared[file].path, element)


def check_head(source: SourceFile) -> None:
    """Refuse a file whose headers are not those of the plan; the engine looks at the time.

    They are read once in a process, and once more if the name is given to another file.
    """
    status = Path(source.path).stat()
    if status.st_size != source.size:
        raise ParseError(f"{source.path}: has {status.st_size} bytes, but had {source.size} when the plan was made")
    _check_digest(source, status.st_dev, status.st_ino)


@functools.lru_cache(maxsize=4096)
def _check_digest(source: SourceFile, _device: int, _number: int) -> None:
    if head_digest(source.path, source.size, source.begin, source.end) != source.digest:
        raise ParseError(f"{source.path}: is not the same file as when the plan was made: its headers differ")


def worker_name() -> str:
    """Say who works here: host and process."""
    return _worker(os.getpid())


@functools.lru_cache(maxsize=4)
def _worker(process: int) -> str:
    return f"{socket.gethostname()}:{process}"


def receipt_line(receipt: TaskReceipt) -> bytes:
    """Write a receipt as a line."""
    return line_of([*receipt[:3], [f"{digest:x}" for digest in receipt.digests], *receipt[4:]])


def receipt_from_line(line: bytes, where: object) -> TaskReceipt:
    """Read a receipt.

    Raises:
        ParseError: if the line is not what `receipt_line` wrote.
    """
    with read_line(line, where) as said:
        plan, task, ranges, digests, crcs, read, written, seconds, worker = said
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
        )
        numbers = (number for row in receipt.ranges for number in row)
        check_numbers([task, read, written, *numbers], receipt.digests, receipt.crcs)
    return receipt


def program_of(itemsize: int, shape: tuple[int, ...], pieces: list[npt.NDArray[np.int64]], flags: int) -> Any:
    """The numbers of one tensor of a `CopyJob`: its source pieces are `pieces[0]`, the others are destinations.

    Of `flags`, 1 asks for digests and 2 for CRC-32.
    """
    rows = [part.reshape(-1) for part in pieces]
    head = [itemsize, flags, len(shape), len(pieces[0]), sum(map(len, pieces[1:])), *shape]
    return np.concatenate([np.array(head, np.int64), *rows])
