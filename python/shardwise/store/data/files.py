"""One open data file: read by position, mapped into memory, and checked for changes by others.

Why not the map alone: a page of a map that a truncation removed cannot be read, and the operating system answers an
attempt with SIGBUS, which kills the process. No library can prevent that for an array that numpy code reads on its own;
all that can be done is to look at the file again each time an array is asked for (`DataFile.check`), and to offer reads
that go through the file descriptor and fail with an exception instead (`DataFile.read_into`).

A checkpoint may have more files than a process may have descriptors. A file that is not being read may lose its
descriptor to another; it is opened again for the next read, and must then still be the same file.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..._atomic import naming_file
from ..._fork import ForkLock, importing
from ..._text import shown
from ...errors import ParseError

__all__ = ["SPAN", "DataFile", "FileStatus", "Holder", "ReadsFiles", "is_in_order", "opened_again", "status_of"]

T = TypeVar("T")

# Opening a FIFO without O_NONBLOCK waits for a writer, perhaps forever. Windows has neither the flag nor FIFOs.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}

# The number of files that have a descriptor at a time. A process has 1,024 of them by default, 256 on some systems, and
# needs the rest for itself: the outputs of a job may be open at the same time.
_MOST_OPEN = 256

# Up to here it is cheaper to also read what lies between two runs of the box than to go to the file for each run:
# a column slice of 1/8 takes 4 times as long with 16 KiB. More gains nothing, and does not fit in the processor's
# cache.
SPAN = 512 * 1024


FileStatus = tuple[int, int, int, int, int]
"""Device, inode, size, time of modification and time of the last change of any kind of a file."""

_open_files: OrderedDict[int, weakref.ref[_Descriptor]] = OrderedDict()
# Reentrant: a finalizer may run while it is held.
_open_lock = ForkLock()


class ReadsFiles:
    """A base for objects that read from open files: an object is equal only to itself, and cannot be pickled."""

    __slots__ = ()

    # A mapping would compare its values, which a user of `==` on files does not expect to be read, and have no hash.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{shown(self)} reads from open files, so it cannot be pickled or copied; pass the path of the "
            "checkpoint, and open it there"
        )


class Holder(ReadsFiles, ABC):
    """A file, or an object of a store, that holds the bytes of pieces.

    Attributes:
        path: Its path or URL.
        size: Its size in bytes.
        is_fetched: Whether the bytes come by requests, each of which takes long, so that few large ones are made; the
            I/O engine does not read such holders.
    """

    path: Any
    size: int
    is_fetched = False

    @property
    @abstractmethod
    def version(self) -> str:
        """Return a text that differs for another file of the same name, as far as the file system or store can tell."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; nothing can be read afterwards. Closing twice is allowed."""

    @abstractmethod
    def check(self) -> None:
        """Raise ParseError if the file was replaced or written to after it was opened."""

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from byte `offset` of the file on; ParseError if the file ends before."""

    @abstractmethod
    def read_box(self, start: int, strides: list[int], out: npt.NDArray[Any], span: int = SPAN) -> None:
        """Read a box whose first element is at byte `start`, the dims with the largest strides first.

        Where reads are short, up to `span` bytes are read at once with what lies between.
        """

    @abstractmethod
    def map(self) -> mmap.mmap:
        """Return the file as an array of bytes; ValueError if it cannot be mapped."""

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from byte `offset` on; ParseError if the file ends before."""
        if offset + count > self.size:
            end = offset + count
            raise ParseError(f"{self.path}: has {self.size} bytes; bytes {offset} to {end} were needed")
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)


class _Descriptor:
    """A file descriptor with a count of its users; it is closed only when nobody uses it."""

    __slots__ = ("__weakref__", "_ended", "_lock", "_number", "_users")

    def __init__(self, number: int) -> None:
        self._number = number
        self._users = 1  # Its opener, which alone gives it back.
        self._ended = False
        self._lock = ForkLock()
        with _open_lock:
            _open_files[id(self)] = weakref.ref(self)
        _end_idle(_most_open())

    def take(self) -> int | None:
        """Return the descriptor for use until `put`; `None` if it was closed."""
        with self._lock:
            if self._ended:
                return None
            self._users += 1
            return self._number

    def put(self) -> None:
        with self._lock:
            self._users -= 1
            if self._ended and not self._users:
                os.close(self._number)

    def end(self, *, idle_only: bool = False) -> None:
        """Close the descriptor once its last user has returned it; with `idle_only`, only if it has no user now."""
        with self._lock:
            if self._ended or (idle_only and self._users):
                return
            self._ended = True
            if not self._users:
                os.close(self._number)
        with _open_lock:
            _open_files.pop(id(self), None)


def _most_open() -> int:
    """Return how many files may have a descriptor: a quarter of the process's limit."""
    try:
        with importing:
            import resource
    except ImportError:  # Windows has no such limit.
        return _MOST_OPEN
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if allowed == resource.RLIM_INFINITY else min(_MOST_OPEN, allowed // 4)


def _end_idle(most: int) -> None:
    """Close descriptors that nobody uses, the longest open first, until at most `most` are left."""
    with _open_lock:
        idle = [ref() for ref in list(_open_files.values())[: max(0, len(_open_files) - most)]]
    for other in idle:
        if other is not None:
            other.end(idle_only=True)


def _where_there_is_room(take: Callable[[], T]) -> T:
    """Call a function that opens a descriptor; if the process has none left, close all idle ones and call it again."""
    try:
        return take()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    _end_idle(0)
    return take()


class DataFile(Holder):
    """A regular file, open for reading.

    Attributes:
        size: The file's size in bytes.
        status: Device, inode, size, time of modification and time of change when it was opened.

    Raises:
        OSError: if the file cannot be opened.
        ParseError: if it is a directory, a FIFO, a socket or a device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ForkLock()
        self._closed = False
        self._map: mmap.mmap | None = None
        number, self.status = self._open()
        self._descriptor = _Descriptor(number)
        self._descriptor.put()
        self.size = self.status[2]
        self._finalize = weakref.finalize(self, _end, [self._descriptor])

    def _open(self) -> tuple[int, FileStatus]:
        number = _where_there_is_room(lambda: os.open(self.path, _FLAGS))
        try:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
                raise ParseError(f"{self.path}: is {kind}; a regular file is needed")
            return number, status_of(status)
        except BaseException:
            os.close(number)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # For a worker: opened there, and refused if it is a different file. Only size and times are the same on all
        # hosts.
        return opened_again, (os.path.abspath(self.path), self.size, self.times)  # noqa: PTH100

    @property
    def version(self) -> str:
        """Return the size and the time of modification when the file was opened, as a text."""
        return f"{self.size} bytes of {self.status[3]} ns"

    @property
    def times(self) -> tuple[int, int | None]:
        """Return the times of modification and of change when the file was opened; see `SourceFile`."""
        return self.status[3], self.status[4]

    def close(self) -> None:
        """Close the file, once all reads of it are done; maps stay valid. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            self._descriptor.end()

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the file's descriptor, which stays open until the block ends.

        Raises:
            ValueError: if the file was closed.
            ParseError: if the file had to be opened again, and is a different one now.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path}: this checkpoint is closed")
            held, number = self._descriptor, self._descriptor.take()
            if number is None:
                held, number = self._reopen()
        try:
            yield number
        finally:
            held.put()

    def _reopen(self) -> tuple[_Descriptor, int]:
        number, status = self._open()
        if status != self.status:
            os.close(number)
            raise ParseError(f"{self.path}: is not the file that was opened: it was replaced or written to")
        self._descriptor = descriptor = _Descriptor(number)
        self._finalize.detach()
        self._finalize = weakref.finalize(self, _end, [descriptor])
        return descriptor, number

    def check(self) -> None:
        """Raise ParseError if the file's size or time of modification changed since it was opened."""
        with self.descriptor() as number:
            status = os.fstat(number)
        if status.st_size != self.size:
            raise ParseError(f"{self.path}: had {self.size} bytes when it was opened, but has {status.st_size} now")
        if status.st_mtime_ns != self.status[3]:
            raise ParseError(f"{self.path}: was written to after it was opened")

    def map(self) -> mmap.mmap:
        """Return a read-only map of the file; it is made once, and stays alive as long as an array refers to it."""
        self.check()
        with naming_file(self.path), self.descriptor() as number, self._lock:
            if self._map is None:
                try:
                    self._map = _where_there_is_room(lambda: mmap.mmap(number, self.size, access=mmap.ACCESS_READ))
                except ValueError as error:  # It was truncated after `check`, or is empty.
                    raise ParseError(f"{self.path}: cannot be mapped into memory: {error}") from None
            return self._map

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from the file's byte `offset` on; ParseError if the file ends before."""
        with naming_file(self.path), self.descriptor() as number:
            done = 0
            while done < len(buffer):
                count = os.preadv(number, [buffer[done:]], offset + done)
                if count == 0:
                    end = offset + len(buffer)
                    raise ParseError(f"{self.path}: ends at byte {offset + done}; bytes {offset} to {end} were needed")
                done += count

    def read_box(self, start: int, strides: list[int], out: npt.NDArray[Any], span: int = SPAN) -> None:
        """Read a box whose first element is at byte `start`, the dims with the largest strides first.

        Where reads are short, up to `span` bytes are read at once with what lies between.
        """
        _read(self, start, strides, out, np.empty(span, np.uint8))


def status_of(status: os.stat_result) -> FileStatus:
    """Return device, inode, size, and times of modification and change: they identify a file and its state."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def opened_again(path: str, size: int, times: tuple[int, int | None]) -> DataFile:
    """Open a file that must have this size, this time of modification and, if given, this time of change.

    Raises:
        ParseError: if the file has others.
        OSError: if the file cannot be opened.
    """
    file = DataFile(Path(path))
    if file.size != size or any(each not in (None, found) for each, found in zip(times, file.times, strict=True)):
        file.close()
        raise ParseError(f"{path}: is not the file that was opened or planned: it was replaced or written to")
    return file


def _end(descriptors: list[_Descriptor]) -> None:
    for descriptor in descriptors:
        descriptor.end()


def _read(
    file: DataFile, start: int, strides: list[int], out: npt.NDArray[Any], scratch: npt.NDArray[np.uint8]
) -> None:
    span = out.itemsize + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    if span == out.nbytes and out.flags.c_contiguous and is_in_order(strides, out):
        # The box is one run. Bytes, because a memoryview knows nothing of bfloat16.
        file.read_into(out.reshape(-1).view(np.uint8).data, start)
    elif span <= len(scratch):
        file.read_into(scratch[:span].data, start)
        out[...] = np.ndarray(out.shape, out.dtype, scratch.data, strides=strides)
    else:
        # Along the outermost dim, as many rows at a time as fit in a span. The pieces of `out` are runs of its
        # memory if `out` is one, since every dim before this one has size 1.
        dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
        row_span = span - (out.shape[dim] - 1) * strides[dim]
        # Rows that overlap may span more than their stride.
        rows = max(1, (len(scratch) - row_span) // strides[dim] + 1)
        for row in range(0, out.shape[dim], rows):
            piece = out[(slice(None),) * dim + (slice(row, row + rows),)]
            _read(file, start + row * strides[dim], strides, piece, scratch)


def is_in_order(strides: Sequence[int], out: npt.NDArray[Any]) -> bool:
    """Return whether elements with these strides in a file follow one another there as they do in an array."""
    # Overlapping strides may span as many bytes as the box has elements and still be another order of them.
    return all(size == 1 or have == want for size, have, want in zip(out.shape, strides, out.strides, strict=True))
