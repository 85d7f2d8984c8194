"""Small files, read as a whole, and replaced as a whole or not at all: the only way to replace a file here."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ._arguments import path_of
from ._fork import importing
from .errors import ParseError

if sys.platform != "win32":
    import fcntl

__all__ = ["naming_file", "read_file", "replace_file", "replacing"]

#: The name of a temporary file: whose it is, in as many characters for any name, and which one.
_TEMPORARY = ".shardwise-{digest}-{token}.tmp"

#: The folders where the system shows the open files of a process by their numbers.
_DESCRIPTORS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd|/dev/fd")


def read_file(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Read a file, of at most so many bytes.

    Raises:
        ParseError: if it is not a regular file, or has more: a pipe may block forever, and a device never end.
        OSError: if the file cannot be read.

    >>> read_file(os.devnull)
    Traceback (most recent call last):
    shardwise.errors.ParseError: '/dev/null' is not a regular file
    """
    given = path_of(path)
    if given.exists() and not given.is_file():
        raise ParseError(f"{str(given)!r} is not a regular file")
    with naming_file(given), given.open("rb") as file:
        data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise ParseError(f"{str(given)!r} has over {most} bytes")
    return data


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file with these bytes; see `replacing`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, "rules.toml"), b"[rules]")
    ...     Path(folder, "rules.toml").read_text()
    '[rules]'
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a new file to write to, which replaces the one at `path` at the end of the body.

    It lies in the same folder, is synced to disk and then renamed, so that a reader of the path sees either the old
    bytes or the new ones. Mode, owner and group are those of the old file, and a link keeps pointing to it. Leftovers
    of killed writers are removed. A path that names an open file, such as `/dev/stdout`, is written to in place.

    Raises:
        OSError: if the file cannot be written, is not a regular file, or has an owner that a new file cannot get. The
            old file is unchanged, and the new one is removed. There is one exception, and its message says so: if the
            folder cannot be synced, the file has been replaced.

    An error in the body, or an interruption before the rename, also leaves only the old file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "rules.toml")) as file:
    ...         _ = file.write(b"[rules]")
    ...     [path.name for path in Path(folder).iterdir()]
    ['rules.toml']
    """
    given = path_of(path)
    descriptor = _descriptor(given)
    if descriptor is not None:
        with _open_file(descriptor, given) as file:
            yield file
        return
    target = Path(os.path.realpath(given))
    old = _status(target)
    _remove_stale(target)
    with _new_file(target) as (file, temporary):
        try:
            with naming_file(target):
                if old is not None:
                    _take_over(file.fileno(), old, target)
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            # Already gone if it was renamed, even when `replace` was interrupted. What cannot be removed is stale.
            with contextlib.suppress(OSError):
                temporary.unlink()
    try:
        _sync_folder(target.parent)
    except OSError as error:
        reason = f"{error.strerror}; the file has been replaced, but a loss of power may bring the old one back"
        raise OSError(error.errno, reason, str(target)) from None


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of a file to system errors that name none, such as those of writing to an open file.

    >>> with naming_file("model.safetensors"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'model.safetensors'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from None
        raise


def _status(target: Path) -> os.stat_result | None:
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{str(target)!r} is not a regular file")
    return status


def _prefix(target: Path) -> str:
    with importing:
        import hashlib

    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
    return _TEMPORARY.format(digest=digest, token="\0").partition("\0")[0]


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Return a new file next to the target, locked while it is open: the lock shows that its writer is alive."""
    with importing:
        import secrets

    while True:
        temporary = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")
        try:
            # Exclusive, so that it is ours to remove; the process's umask applies to a new file.
            opened = temporary.open("xb")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        with opened as file:
            try:
                _lock(file.fileno(), wait=True)
                # Another writer may have thought it stale before it was locked.
                if temporary.exists() and os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                    yield file, temporary
                    return
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file, waiting or not; return whether it is locked, which it never is on Windows."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_stale(target: Path) -> None:
    """Remove the temporary files of this target whose writers are gone: the system has released their locks."""
    prefix = _prefix(target)
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), Path(entry.path).open("rb") as file:
                    if _lock(file.fileno(), wait=False):
                        Path(entry.path).unlink()


def _take_over(descriptor: int, old: os.stat_result, target: Path) -> None:
    """Give the new file the owner, the group and the mode of the old one."""
    if sys.platform == "win32":
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError as error:
            reason = (
                f"{error.strerror}: a new file cannot get the owner {old.st_uid} and group {old.st_gid} of this one"
            )
            raise OSError(error.errno, reason, str(target)) from None
    # After the owner, because changing the owner clears bits of the mode.
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that the path names, directly or through links."""
    seen = path.absolute()
    for _ in range(40):
        folder = os.path.realpath(seen.parent)
        found = _DESCRIPTORS.fullmatch(folder)
        if found and (found[1] is None or int(found[1]) == os.getpid()) and seen.name.isdecimal():
            return int(seen.name)
        if not seen.is_symlink():
            return None
        seen = Path(folder, seen.readlink())
    return None


@contextlib.contextmanager
def _open_file(descriptor: int, path: Path) -> Iterator[IO[bytes]]:
    """Yield an open file object that writes at the descriptor's position."""
    for stream in (sys.stdout, sys.stderr):
        # What was printed earlier must come first.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.fileno() == descriptor:
                stream.flush()
    try:
        own = os.dup(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    with open(own, "wb") as file:  # noqa: PTH123 (a descriptor is not a path)
        yield file


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # Only there can a folder be opened and synced.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
