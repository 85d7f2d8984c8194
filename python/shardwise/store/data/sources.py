"""Sources of a plan: files and objects as they were when it was made, and must still be; and arrays in memory."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from contextlib import closing
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..._arguments import path_of
from ..._text import shown
from ...errors import ParseError
from .engine import CopyJob
from .files import DataFile, opened_again
from .object_files import ObjectFile
from .objects import ObjectPath, ObjectStatus

__all__ = [
    "KeptArray",
    "Source",
    "SourceArray",
    "SourceBytes",
    "SourceFile",
    "SourceObject",
    "check_path",
    "head_digest",
    "source_for",
]

#: The most bytes around the tensors in a file that are digested, at its beginning and at its end.
_MOST_HEAD, _MOST_TAIL = 2**20, 2**16


class Source:
    """A source of a plan: a file or an object as it was when the plan was made, or an array in memory.

    Attributes:
        path: The source's path or URL; empty for an array.
    """

    path: Any

    @property
    def is_kept(self) -> bool:
        """True if a later run finds the same bytes."""
        return True

    @property
    def is_visible(self) -> bool:
        """True if other processes can read the source, so that a plan with it can be saved."""
        return True

    @property
    def is_fetched(self) -> bool:
        """True if the source must be fetched into memory, because the I/O engine cannot read it."""
        return False

    @property
    def fetched(self) -> ObjectFile | None:
        """The object to be fetched; `None` if the I/O engine reads the source."""
        return None

    @property
    def array(self) -> npt.NDArray[Any] | None:
        """The array; `None` for a file or an object."""
        return None

    @property
    def inside(self) -> str:
        """The URL of an object in the memory of this process, which no other process can read; else an empty string."""
        return ""

    @property
    def name(self) -> str:
        """The path of a file that must not be replaced during a job; else an empty string."""
        return ""

    @property
    def data(self) -> range:
        """The range of a file's bytes from the first tensor that is read to the last; else an empty range."""
        return range(0)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`; `b""` for an object or an array."""
        return b""

    def stated(self) -> str:
        """Return the JSON by which a plan file states the source; `null` for an array, which it cannot state."""
        return "null"

    def check(self) -> None:
        """Refuse, with ParseError, a source that has changed after the plan was made.

        There is nothing to do for an object, as every request checks the ETag, and for an array, which the plan holds.
        """

    def read_by(self, job: CopyJob) -> None:
        """Add the source to the sources of a job: of one that is fetched no bytes, as these follow all sources."""
        job.read_array(np.empty(0, np.uint8) if self.array is None else self.array)

    def compared_by(self, job: CopyJob) -> None:
        """Add the source to a job's destinations, to be compared with the data written.

        Of an object it is an unused one, as objects are compared when fetched: so destinations keep their numbers.
        """
        job.discard()


@dataclass(frozen=True)
class SourceFile(Source):
    """A file to read, with the state that it had when the plan was made, and must still have.

    Attributes:
        size: The file's size in bytes.
        modified: The time of the last write (`st_mtime_ns`).
        changed: The time of the last change of any kind (`st_ctime_ns`), which no program can set; `None` for a file
            that each run makes anew.
        begin: The first byte of the first tensor that the plan reads.
        end: The byte after the last tensor that the plan reads.
        digest: The SHA-256 of the bytes before `begin` and after `end`, in hexadecimal; see `head_digest`.
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
        """The modification time, and the change time or `None`."""
        return self.modified, self.changed

    @property
    def is_kept(self) -> bool:
        """True if a later run finds the same file."""
        return self.changed is not None

    @property
    def name(self) -> str:
        """The path, which must belong to the same file during a job."""
        return self.path

    @property
    def data(self) -> range:
        """The range of bytes from the first tensor that is read to the last."""
        return range(self.begin, self.end)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`."""
        with closing(opened_again(self.path, self.size, self.times)) as file:
            return file.read(begin, end - begin)

    def stated(self) -> str:
        """Return the JSON by which a plan file states the file: its attributes, in their order."""
        return json.dumps(astuple(self))

    def check(self) -> None:
        """Refuse, with ParseError, a file with other headers, read once per process; the engine checks size and times.

        A file that each run makes anew has no change time by which the engine knows it: here its size is checked, and
        its headers are read again if the name is given to another file.
        """
        number = 0, 0
        if self.changed is None:
            status = Path(self.path).stat()
            if status.st_size != self.size:
                raise ParseError(f"{self.path}: has {status.st_size} bytes, but had {self.size} when the plan was made")
            number = status.st_dev, status.st_ino
        _check_digest(self, number)

    def read_by(self, job: CopyJob) -> None:
        """Add the file to the sources of a job."""
        job.read_file(self.path, self.size, self.times)

    def compared_by(self, job: CopyJob) -> None:
        """Add the file to a job's destinations, to be compared with the data written."""
        job.compare_file(self.path, self.size, self.times)


@dataclass(frozen=True)
class SourceObject(Source):
    """An object of a store to read, with the state that it had when the plan was made, and must still have.

    Attributes:
        size: The object's size in bytes.
        etag: The ETag or its equivalent, which another object of the same name does not have.
    """

    path: ObjectPath
    size: int
    etag: str
    is_fetched: ClassVar[bool] = True

    @property
    def fetched(self) -> ObjectFile:
        """The opened object, to be fetched into memory; equal sources share one `ObjectFile`."""
        return _opened(self)

    @property
    def inside(self) -> str:
        """The URL of an object in the memory of this process, which no other process can read; else an empty string."""
        return str(self.path) if self.path.protocol == "memory" else ""

    def stated(self) -> str:
        """Return the JSON by which a plan file states the object: its attributes, in their order."""
        return json.dumps([str(self.path), self.size, self.etag])


@dataclass(frozen=True, eq=False)
class SourceArray(Source):
    """An array in memory, which the engine reads directly.

    Only this process sees it, and another run may have another array. `MappedFiles` checks the arrays of files.
    """

    _array: npt.NDArray[Any]
    path: str = field(default="", init=False)
    is_kept: ClassVar[bool] = False
    is_visible: ClassVar[bool] = False

    @property
    def array(self) -> npt.NDArray[Any]:
        """The array."""
        return self._array


class KeptArray(np.ndarray):
    """Bytes in memory that the plan states itself, so that every run has them: a pickle, or a value."""

    @classmethod
    def of(cls, data: bytes) -> KeptArray:
        """Return these bytes as an array."""
        return np.frombuffer(data, np.uint8).view(cls)


@dataclass(frozen=True, eq=False)
class SourceBytes(SourceArray):
    """Bytes in memory that the plan itself states; the array owns them, so the engine asks for no file of theirs."""

    #: The plan states the bytes, so every run and every process has them.
    is_kept: ClassVar[bool] = True
    is_visible: ClassVar[bool] = True

    def stated(self) -> str:
        """Return the JSON by which a plan file states the bytes."""
        return json.dumps({"bytes": base64.b64encode(self.array.tobytes()).decode()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceBytes) and self.array.tobytes() == other.array.tobytes()

    def __hash__(self) -> int:
        return hash(self.array.tobytes())


@functools.lru_cache(maxsize=4096)
def _opened(source: SourceObject) -> ObjectFile:
    return ObjectFile(source.path, ObjectStatus(source.size, source.etag))


@functools.lru_cache(maxsize=4096)
def _check_digest(source: SourceFile, _number: tuple[int, int]) -> None:
    if head_digest(source.path, source.size, source.begin, source.end) != source.digest:
        raise ParseError(f"{source.path}: is not the same file as when the plan was made: its headers differ")


def head_digest(path: str | Path, size: int, begin: int, end: int) -> str:
    """Return the SHA-256 of a file's headers: up to 1 MiB before byte `begin`, and the last 64 KiB after `end`.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if it is not a regular file, or has another size.
    """
    digest = hashlib.sha256()
    head, tail = min(begin, _MOST_HEAD), min(size - end, _MOST_TAIL)
    if head or tail:
        with closing(DataFile(Path(path))) as file:
            if file.size != size:
                raise ParseError(f"{path}: has {file.size} bytes, but had {size} when the plan was made")
            digest.update(file.read(0, head))
            digest.update(file.read(size - tail, tail))
    return digest.hexdigest()


def source_for(holder: Any, begin: int, end: int) -> Source:
    """Return the source for the holder of pieces: an open file or object, or an array.

    `begin` and `end` are the range of the holder's bytes that has the tensors.
    """
    if isinstance(holder, KeptArray):
        return SourceBytes(np.array(holder))
    if isinstance(holder, np.ndarray):
        return SourceArray(holder)
    if holder.is_fetched:
        return SourceObject(*holder.noted)
    path = os.path.abspath(holder.path)  # noqa: PTH100 (a Path would follow `..` through links another way)
    begin, end = min(begin, holder.size), min(end, holder.size)
    modified, changed = holder.times
    return SourceFile(path, holder.size, modified, changed, begin, end, head_digest(path, holder.size, begin, end))


def check_path(path: str) -> None:
    """Refuse, with ValueError, a path that no file can have."""
    try:
        path_of(path)
    except OSError as error:
        raise ValueError(f"it has the path {shown(path)}: {error.strerror}") from None
