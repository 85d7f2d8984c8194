"""Folders of our own in places that others can write to: opened step by step, without links, recognised by a marker.

The names that a run uses next to a checkpoint are predictable, so anything may be there already: a link to another
folder, a folder of the user's, a file with a second name. Each step is therefore opened from its parent without
following links, must be a real folder that belongs to the user, and is only removed if it has our marker: a small file
that is made first and removed last, so that a process that is killed in between leaves a folder that is still
recognised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = [
    "MadeFolders",
    "OpenFolder",
    "make_marked",
    "opened_below",
    "refuse_stranger",
    "refuse_unmarked",
    "remove_marked",
    "write_all",
]

#: The name of the marker in a folder of ours; no file of a checkpoint has this name.
_MARKER = "shardwise.mark"
#: The most bytes of a marker.
_MOST_MARKER = 256
_NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_FILE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | _NOT_THROUGH_LINKS
#: False on Windows, which has no descriptors of folders: paths are used there.
_HAS_DESCRIPTORS = os.open in os.supports_dir_fd and os.listdir in os.supports_fd


class _NamedErrors:
    """A block whose system errors name the whole path; a class, as each task of a plan enters a dozen."""

    __slots__ = ("_folder", "_name")

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            whole = str(self._folder / self._name)
            if error.filename != whole:
                raise OSError(error.errno, error.strerror, whole) from None


class OpenFolder:
    """A folder that is held open; its entries are reached by their names from it.

    Attributes:
        path: The folder's path, for messages.
        descriptor: Its descriptor; `None` where the system has none for folders.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    def at(cls, path: Path) -> OpenFolder:
        """Open a folder that the user named; links are followed."""
        return cls(path, os.open(path, _FOLDER | getattr(os, "O_CLOEXEC", 0)) if _HAS_DESCRIPTORS else None)

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, without following a link; `None` if there is none of this name."""
        try:
            with self._naming(name):
                return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the names of the entries, sorted."""
        with self._naming():
            return sorted(os.listdir(self.path if self.descriptor is None else self.descriptor))  # noqa: PTH208

    def enter(self, name: str) -> OpenFolder:
        """Open a folder inside.

        Raises:
            FileNotFoundError: if there is none.
            FileExistsError: if it is a link, no folder, or another user's.
        """
        found = self.status(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))
        if not stat.S_ISDIR(found.st_mode):
            raise refuse_stranger(self.path / name)
        if not self._is_own(found):
            raise refuse_stranger(self.path / name, "belongs to another user")
        if self.descriptor is None:
            return OpenFolder(self.path / name, None)
        with self._naming(name):
            return OpenFolder(self.path / name, os.open(name, _FOLDER | _NOT_THROUGH_LINKS, dir_fd=self.descriptor))

    def make(self, name: str, mode: int = 0o777) -> None:
        """Make a folder inside.

        Raises:
            FileExistsError: if something has this name.
        """
        with self._naming(name):
            os.mkdir(self._at(name), mode, dir_fd=self.descriptor)

    @contextlib.contextmanager
    def file(self, name: str, flags: int) -> Iterator[IO[bytes]]:
        """Open a file inside; it must be a regular file with no second name.

        Args:
            name: The file's name.
            flags: The flags of `os.open`.

        Raises:
            FileExistsError: if it is something else.
        """
        found = self.status(name)
        if found is not None and not _is_one_file(found):
            raise refuse_stranger(self.path / name)
        with self._naming(name):
            number = os.open(self._at(name), flags | _FILE, 0o666, dir_fd=self.descriptor)
            mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "ab" if flags & os.O_APPEND else "r+b"
            try:
                if not _is_one_file(os.fstat(number)):
                    raise refuse_stranger(self.path / name)
                opened = os.fdopen(number, mode, buffering=0)
            except BaseException:
                os.close(number)
                raise
            with opened as stream:
                yield stream

    def write(self, name: str, text: bytes, *, sync: bool) -> None:
        """Write a file inside with this text, over one that exists."""
        with self.file(name, os.O_RDWR | os.O_CREAT) as stream:
            os.ftruncate(stream.fileno(), 0)  # Repeated when a signal interrupts it, as the stream's own is not.
            write_all(stream, text)
            if sync:
                os.fsync(stream.fileno())

    def rename(self, name: str, new: str) -> None:
        """Rename an entry, and sync the folder to the disk."""
        with self._naming(new):
            os.rename(self._at(name), self._at(new), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        self.sync()

    def move(self, name: str, folder: OpenFolder, new: str) -> None:
        """Move an entry to another folder, under another name."""
        with self._naming(name):
            os.rename(self._at(name), folder._at(new), src_dir_fd=self.descriptor, dst_dir_fd=folder.descriptor)

    def sync(self) -> None:
        """Sync the folder's entries (not their contents) to the disk."""
        if self.descriptor is not None:
            with self._naming():
                os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove an entry and everything in it; links are not followed."""
        found = self.status(name)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            with self.enter(name) as folder:
                for each in folder.names():
                    folder.remove(each)
            self.remove_empty(name)
            return
        with self._naming(name):
            os.unlink(self._at(name), dir_fd=self.descriptor)

    def remove_empty(self, name: str) -> None:
        """Remove an empty folder inside."""
        with self._naming(name):
            os.rmdir(self._at(name), dir_fd=self.descriptor)

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)

    def _naming(self, name: str = "") -> _NamedErrors:
        """Make system errors in the block name the whole path."""
        return _NamedErrors(self.path, name)

    def _is_own(self, status: os.stat_result) -> bool:
        """Return whether an entry belongs to the user; on some servers all users' files belong to one user."""
        if not hasattr(os, "geteuid") or status.st_uid == os.geteuid():
            return True
        name = f".shardwise-{secrets.token_hex(8)}.tmp"
        try:
            with self.file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as stream:
                return os.fstat(stream.fileno()).st_uid == status.st_uid
        finally:
            with contextlib.suppress(OSError):
                self.remove(name)


class MadeFolders:
    """Folders below a given one, made when a file in them is needed; one folder per level is open at a time.

    Args:
        folder: The folder, which stays open.
    """

    def __init__(self, folder: OpenFolder) -> None:
        self._open, self._names = [folder], list[str]()
        self._made: dict[str, None] = {}

    def __enter__(self) -> MadeFolders:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(0)

    def of(self, path: str) -> tuple[OpenFolder, str]:
        """Return the folder of a file, given the file's relative path with `/`, and the file's name in it."""
        *names, last = path.split("/")
        common = 0
        while common < min(len(names), len(self._names)) and names[common] == self._names[common]:
            common += 1
        self._leave(common)
        for name in names[common:]:
            with contextlib.suppress(FileExistsError):
                self._open[-1].make(name)
            self._open.append(self._open[-1].enter(name))
            self._names.append(name)
            self._made["/".join(self._names)] = None
        return self._open[-1], last

    def sync(self) -> None:
        """Sync the entries of all these folders to the disk."""
        for path in list(self._made):
            self.of(f"{path}/")[0].sync()
        self._leave(0)
        self._open[0].sync()

    def _leave(self, depth: int) -> None:
        while len(self._names) > depth:
            self._names.pop()
            self._open.pop().__exit__()


def write_all(stream: IO[bytes], text: bytes) -> None:
    """Write all bytes of a text to an unbuffered file."""
    rest = memoryview(text)
    while rest:
        rest = rest[stream.write(rest) :]


def _is_one_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def refuse_stranger(path: Path, what: str = "") -> FileExistsError:
    """Return the error for a path that a run needs, but that is not ours."""
    if not what:
        is_file = path.is_file()
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file" if is_file else "no file"
        what = f"is {kind} that no run of shardwise has made"
        if is_file and not path.is_symlink() and path.stat().st_nlink > 1:
            what = "is a file with a second name (a hard link)"
    return FileExistsError(
        errno.EEXIST, f"{what}; nothing is written through it or removed: move it, or use another name", str(path)
    )


@contextlib.contextmanager
def opened_below(path: Path, steps: int) -> Iterator[OpenFolder]:
    """Open a folder. Its last `steps` names are folders of ours, where links are not followed."""
    names = path.parts[len(path.parts) - steps :]
    folder = OpenFolder.at(path.parents[steps - 1] if steps else path)
    try:
        for name in names:
            inner = folder.enter(name)
            folder.__exit__()
            folder = inner
        yield folder
    finally:
        folder.__exit__()


def make_marked(parent: OpenFolder, name: str, marker: str) -> OpenFolder:
    """Make a folder with a marker, closed to other users, or open it if it exists.

    Raises:
        FileExistsError: if something else has the name.
    """
    try:
        parent.make(name, 0o700)
    except FileExistsError:
        with parent.enter(name) as folder:
            refuse_unmarked(folder, marker)
    folder = parent.enter(name)
    try:
        # The same bytes as any other process writes, so that at any time the file has the first of them.
        with folder.file(_MARKER, os.O_RDWR | os.O_CREAT) as stream:
            if os.fstat(stream.fileno()).st_size < len(marker):
                write_all(stream, marker.encode())
    except BaseException:
        folder.__exit__()
        raise
    return folder


def refuse_unmarked(folder: OpenFolder, marker: str) -> None:
    """Refuse a folder without this marker; an empty one, or one with a half-written marker, is accepted as ours."""
    names = folder.names()
    if not names:
        return
    if _MARKER in names:
        with folder.file(_MARKER, os.O_RDONLY) as stream:
            found = stream.read(_MOST_MARKER)
        if found == marker.encode() or (names == [_MARKER] and marker.encode().startswith(found)):
            return
    raise refuse_stranger(folder.path)


def remove_marked(parent: OpenFolder, name: str, marker: str) -> None:
    """Remove a folder with this marker and everything in it, the marker last; do nothing if there is none.

    Raises:
        FileExistsError: if something else has the name.
    """
    try:
        folder = parent.enter(name)
    except FileNotFoundError:
        return
    with folder:
        refuse_unmarked(folder, marker)
        for each in folder.names():
            if each != _MARKER:
                folder.remove(each)
        folder.remove(_MARKER)
    parent.remove_empty(name)
