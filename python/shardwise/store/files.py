"""One open data file: read by position, mapped into memory, and checked for changes made behind our back.

Why not the map alone: a page of a map that a truncation took away cannot be read, and the operating system answers an
attempt with SIGBUS, which kills the process. No library can prevent that for an array that numpy code reads on its own;
what can be done is to look at the file again each time an array is asked for (`DataFile.check`), and to offer reads
that go through the file descriptor and fail with an exception instead (`DataFile.read_into`).
"""

import mmap
import os
import stat
import weakref
from pathlib import Path

from ..errors import ParseError

__all__ = ["DataFile"]

# Opening a FIFO without O_NONBLOCK waits for a writer, perhaps for ever. Windows has neither flag, and no FIFO either.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


class DataFile:
    """A regular file, open for reading.

    Raises:
        OSError: the file cannot be opened.
        ParseError: it is a directory, a FIFO, a socket or a device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _FLAGS)
        # Closes once: at `close()`, or when nobody refers to the file any more.
        self.close = weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
            raise ParseError(f"{path}: is {kind}; a regular file is needed")
        self.size = status.st_size
        self._modified = status.st_mtime_ns
        self._map: mmap.mmap | None = None

    def check(self) -> None:
        """Raise ParseError if the file's size or time of modification changed since it was opened."""
        status = os.fstat(self._descriptor)
        if status.st_size != self.size:
            raise ParseError(f"{self.path}: had {self.size} bytes when it was opened, has {status.st_size} now")
        if status.st_mtime_ns != self._modified:
            raise ParseError(f"{self.path}: was written to after it was opened")

    def map(self) -> mmap.mmap:
        """Map the file into memory, read-only; made once, and alive as long as any array refers to it."""
        self.check()
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
        return self._map

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from the file's byte `offset` on; ParseError if the file ends before."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                end = offset + len(buffer)
                raise ParseError(f"{self.path}: ends at byte {offset + done}; bytes {offset} to {end} were needed")
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """Read `count` bytes from the file's byte `offset` on; ParseError if the file ends before."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)
