"""Tasks: parts of a checkpoint that any process can write, in any order, once or twice, and receipts for them."""

from __future__ import annotations

import errno
import functools
import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..._arguments import check_fields
from ..._atomic import naming
from ..._text import bytes_text, shown
from ...errors import ParseError
from ..engine import LEAST_MEMORY, CopyJob, check_memory
from ..objects import ObjectPath
from .fetch import Compared, SourceObject, add_sources, fetch_pieces, is_remote
from .formats.manifest import differing_replica
from .places.opened import opened_below
from .receipts import TaskReceipt, worker_name

__all__ = [
    "CheckpointTask",
    "Places",
    "SourceFile",
    "SourceObject",
    "check_head",
    "head_digest",
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
    #: Files and objects, or the arrays of a plan of arrays in memory.
    _sources: tuple[Any, ...]
    #: Files and objects that are compared with what is written; for each piece of them its tensor's name and shape,
    #: and its number among all destination pieces.
    _compared: tuple[SourceFile | SourceObject, ...]
    _replicas: tuple[tuple[int, int, str, tuple[int, ...]], ...]
    #: For each range, its number among all destination pieces.
    _numbers: tuple[int, ...]
    #: The numbers of a `CopyJob`.
    _program: bytes
    #: The positions of ranges that hold what earlier ones hold.
    _again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, plan=str, number=int, folder=str, files=tuple, ranges=tuple, _sources=tuple)
        check_fields(self, _compared=tuple, _replicas=tuple, _numbers=tuple, _program=bytes, _again=tuple)
        for row in self.ranges:
            if not (isinstance(row, tuple) and len(row) == 4 and isinstance(row[2], int) and isinstance(row[3], int)):
                raise TypeError(f"ranges must be tuples of four integers, got {shown(row)}")

    @property
    def nbytes(self) -> int:
        """The bytes that it writes."""
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
        return f"<CheckpointTask {self.number}: {bytes_text(self.nbytes)} of {files}>"

    def run(
        self,
        *,
        memory: int = 64 * 2**20,
        sync: bool = True,
        threads: int | None = 1,
        check: str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> TaskReceipt:
        """Write it.

        Args:
            memory: Bytes for buffers; at least 16 KiB.
            sync: Whether to sync the data to disk before this returns.
            threads: How many copy; one per core if `None`.
            check: The folder of the finished files, to see that they have what it would write; nothing is written.
            progress: Called now and then with the bytes that were done since the last time.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if a source is not what it was when the plan was made, or replicas disagree.
            FileExistsError: if a finished file has something else.
            FileNotFoundError: if the files do not exist: the plan was not begun, or was committed or given up.
            OSError: if a file cannot be read or written.
        """
        began = time.perf_counter()
        check_memory(memory)
        program = np.frombuffer(self._program, np.int64)
        fetched: list[npt.NDArray[Any]] = []
        again: list[Compared] = []
        nbytes = 0
        if is_remote([*self._sources, *self._compared]):
            program = program.copy()
            parts = program, self._sources, self._compared, len(self.files), memory
            fetched, again, nbytes = fetch_pieces(*parts)
        for source in self._sources:
            if isinstance(source, SourceFile):
                check_head(source)
        job = CopyJob.of_program(program)
        add_sources(job, [*self._sources, *fetched])
        own = {*self._numbers} if check is not None else set()
        with ExitStack() as stack:
            if check is None:
                folder = stack.enter_context(opened_below(Path(self.folder), 3))
                for _, name, size in self.files:
                    job.fill_file(folder.path / name, size, folder.descriptor)
            else:
                for _, name, size in self.files:
                    job.compare_file(Path(check, name), size)
            for other in self._compared:
                if isinstance(other, SourceObject):
                    job.discard()
                else:
                    job.compare_file(other.path, other.size, other.times)
            for number, compare in again:
                element = compare()
                if element is not None:
                    raise ParseError(self._difference(number, element))
            budget = max(memory - nbytes, LEAST_MEMORY)
            done = job.run(budget=budget, threads=threads, sync=sync and check is None, progress=_counted(progress))
        for piece, element in done.differences:
            if piece in own:
                raise FileExistsError(
                    errno.EEXIST, "exists already, and has other values than this plan gives it", check
                )
            raise ParseError(self._difference(piece, element))
        return TaskReceipt(
            self.plan,
            self.number,
            tuple((file, begin, end) for file, _, begin, end in self.written),
            tuple(done.digests[number] for number in self._numbers),
            tuple(done.crcs[number] for number in self._numbers) if done.crcs else (),
            done.bytes_read + nbytes,
            done.bytes_written,
            round(time.perf_counter() - began, 6),
            worker_name(),
        )

    def _difference(self, piece: int, element: int) -> str:
        file, _, name, shape = next(replica for replica in self._replicas if replica[1] == piece)
        return differing_replica(name, shape, self._compared[file].path, element)


def _counted(progress: Callable[[int], object] | None) -> Callable[[int, int], object] | None:
    """Progress from the bytes that are done, told as what was added."""
    if progress is None:
        return None
    last = 0

    def more(done: int, _: int) -> None:
        nonlocal last
        progress(done - last)
        last = done

    return more


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


def program_of(itemsize: int, shape: tuple[int, ...], pieces: list[npt.NDArray[np.int64]], flags: int) -> Any:
    """The numbers of one tensor of a `CopyJob`: its source pieces are `pieces[0]`, the others are destinations.

    Of `flags`, 1 asks for digests and 2 for CRC-32.
    """
    rows = [part.reshape(-1) for part in pieces]
    head = [itemsize, flags, len(shape), len(pieces[0]), sum(map(len, pieces[1:])), *shape]
    return np.concatenate([np.array(head, np.int64), *rows])
