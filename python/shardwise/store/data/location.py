"""Locations of checkpoints: paths on a disk and URLs of stores, with the questions that both answer.

This and `write.places` are the only modules that ask which of the two a location is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..._arguments import path_of
from ..._threads import Threads
from ...errors import ParseError
from .files import DataFile, Holder
from .object_files import WINDOW, ObjectFile
from .objects import ObjectPath

__all__ = [
    "LOCATIONS",
    "Location",
    "absolute",
    "entries_of",
    "first_bytes",
    "hidden_name",
    "hub_hint",
    "is_sampled",
    "location_of",
    "names_in",
    "open_file",
    "opening",
    "read_unlinked",
    "refuse_options",
    "refuse_other",
    "taken",
    "unlisted",
    "version_at",
    "workplace_of",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
#: The name of a repository of Hugging Face, and the ends of names of files.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILES = (".bin", ".ckpt", ".gguf", ".h5", ".json", ".pt", ".pth", ".safetensors", ".swplan", ".toml")
#: The target of a link in a snapshot of Hugging Face's cache, `models--ORG--NAME/snapshots/COMMIT/`.
_BLOB = re.compile(r"\.\.[/\\]\.\.[/\\]blobs[/\\]([0-9a-f]{40}|[0-9a-f]{64})")
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

# The longest name that leaves room for a dot before it and 24 bytes after it, and how much is kept of a longer one.
_LONGEST_NAME = 230
_BEGINNING = 200

#: The classes of locations.
LOCATIONS = (Path, ObjectPath)
#: A path of either kind, and what is beside it of the same.
Beside = TypeVar("Beside", Path, ObjectPath)


class Location(Protocol):
    """A path, or a URL: what the formats need of either."""

    @property
    def name(self) -> str:
        """The last part."""

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""

    @property
    def parent(self) -> Location:
        """All but the last part."""

    def __truediv__(self, name: str, /) -> Location: ...
    def __lt__(self, other: Any, /) -> bool: ...

    def with_name(self, name: str, /) -> Location:
        """Give the location with another last part."""

    def exists(self) -> bool:
        """Return whether the path names anything."""

    def is_file(self) -> bool:
        """Return whether the path names a file, or an object."""

    def is_dir(self) -> bool:
        """Return whether the path names a folder."""

    def stat(self) -> Any:
        """Give its status; OSError if there is nothing."""

    def iterdir(self) -> Iterator[Location]:
        """List what lies directly below."""

    def glob(self, pattern: str, /) -> Iterator[Location]:
        """List what lies directly below, and matches a pattern."""


def location_of(path: Any) -> Any:
    """Give the location that a path or URL means: a `Path`, or an `ObjectPath`.

    >>> location_of("file:///models/a").as_posix()
    '/models/a'
    """
    if isinstance(path, ObjectPath):
        return path
    match = _URL.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        return path_of(path)
    return path_of(match[2]) if match[1].lower() in _LOCAL else ObjectPath(path)


def absolute(location: Location) -> Location:
    """Give the same location, whatever the current folder is."""
    return location.absolute() if isinstance(location, Path) else location


def refuse_options(locations: Iterable[object], what: str) -> None:
    """Refuse, with TypeError, options of stores that URLs and the environment do not give; `what` keeps the URLs."""
    paths = [location for location in locations if isinstance(location, ObjectPath)]
    for path in {id(path.filesystem): path for path in paths}.values():
        path.refuse_options(what)


def is_sampled(location: Location) -> bool:
    """Return whether the time to read a sample of the checkpoint there says how long the rest takes."""
    return isinstance(location, Path)


def hub_hint(path: object) -> str:
    """Say what to do if a path that is not there looks like a repository of Hugging Face; else nothing.

    >>> hub_hint("models/llama.safetensors"), hub_hint("models/llama/8b")
    ('', '')
    """
    text = str(path)
    if not _REPOSITORY.fullmatch(text) or text.endswith(_FILES) or os.path.lexists(text.partition("/")[0]):
        return ""
    return (
        f"; if it is a repository of Hugging Face, download it (hf download {text} --local-dir FOLDER) and give FOLDER"
    )


def refuse_other(location: Location) -> None:
    """Refuse, with ParseError, what is neither a file nor a folder."""
    if isinstance(location, Path) and not (location.is_dir() or location.is_file()):
        DataFile(location)  # Says what it is instead.


def entries_of(folder: Location) -> Iterator[tuple[str, bool]]:
    """List what lies directly in a folder: names, and whether each is a folder."""
    if isinstance(folder, ObjectPath):
        yield from folder.names()
        return
    with os.scandir(str(folder)) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir()


def names_in(folder: Location, said: Iterable[str]) -> Iterable[str]:
    """Give the names in a folder; in a store, whose listings may lag behind, those that its manifest `said`."""
    return said if isinstance(folder, ObjectPath) else (name for name, _ in entries_of(folder))


def unlisted(folder: Location, wanted: Iterable[str]) -> set[str]:
    """Give those of these names that lie in a folder although its listing lags behind, as that of a store may."""
    if isinstance(folder, ObjectPath):
        return {name for name in wanted if (folder / name).is_file()}
    return set()


def open_file(location: Location) -> Holder:
    """Open a file or an object.

    Raises:
        OSError: if it cannot be opened.
        ParseError: if it is not a regular file.
    """
    return ObjectFile(location) if isinstance(location, ObjectPath) else DataFile(Path(str(location)))


def version_at(location: Location) -> str:
    """Give the version (`Holder.version`) of the file or the object that is there now.

    Raises:
        OSError: if there is none.
        ParseError: if it is not a regular file.
    """
    file = open_file(location)
    try:
        return file.version
    finally:
        file.close()


def first_bytes(location: Location, most: int) -> bytes:
    """Read a file or an object, up to so many bytes of it.

    Raises:
        OSError: if it cannot be opened or read.
        ParseError: if it is not a regular file.
    """
    file = open_file(location)
    try:
        return file.read(0, min(file.size, most))
    finally:
        file.close()


def read_unlinked(location: Location, most: int) -> bytes | None:
    """Read a regular file, or an object, of at most so many bytes; `None` for a link, and for anything else.

    A file with a second name, a hard link, may be one that its owner could not have read, and counts as a link. One
    within Hugging Face's cache is the file that it stands for.
    """
    if isinstance(location, ObjectPath):
        file = ObjectFile(location)
        try:
            return file.read(0, file.size) if file.size <= most else None
        finally:
            file.close()
    path = _in_cache(Path(str(location)))
    try:
        number = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENOENT):
            return None
        raise
    try:
        # A folder can be opened as well, but not read.
        status = os.fstat(number)
        is_one = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
        if not is_one or status.st_size > most or path.is_symlink():
            return None
        with os.fdopen(number, "rb", closefd=False) as stream:
            data = stream.read(most + 1)
    finally:
        os.close(number)
    return data if len(data) <= most else None


def _in_cache(path: Path) -> Path:
    """The blob that a file of a snapshot in Hugging Face's cache stands for; any other path as it is."""
    if not path.is_symlink():
        return path
    model = path.parent.resolve().parent.parent
    blob = _BLOB.fullmatch(str(path.readlink()))
    is_snapshot = path.parent.resolve().parent.name == "snapshots" and model.name.startswith("models--")
    is_own = is_snapshot and not (model / "blobs").is_symlink()
    return model / "blobs" / blob[1] if blob and is_own else path


@contextmanager
def opening(locations: Iterable[Location]) -> Iterator[tuple[Callable[[Location], Holder], list[Holder]]]:
    """Give a function that opens these files, and the files that it has opened, which are closed if this fails.

    Objects are opened together before, and their first block is read.
    """
    give, files = _opener(locations), list[Holder]()

    def open_next(location: Location) -> Holder:
        files.append(give(location))
        return files[-1]

    try:
        yield open_next, files
    except BaseException:
        for file in files:
            file.close()
        raise


def _opener(locations: Iterable[Location]) -> Callable[[Location], Holder]:
    objects = [location for location in locations if isinstance(location, ObjectPath)]
    if len(objects) < 2:
        return open_file

    def start(path: ObjectPath) -> Holder | Exception:
        try:
            file = ObjectFile(path)
            file.read(0, min(file.size, 1))
            return file
        except (OSError, ParseError) as error:
            return error

    with Threads(WINDOW, "shardwise-open") as pool:
        opened: dict[Any, Holder | Exception] = dict(zip(objects, pool.map(start, objects), strict=True))

    def give(location: Location) -> Holder:
        found = opened.get(location)
        if isinstance(found, Exception):
            raise found
        return open_file(location) if found is None else found

    return give


def hidden_name(name: str) -> str:
    """Give the beginning of the names of what lies hidden beside a file or folder while it is written.

    A file system allows for 255 bytes; where the name leaves no room for an ending, a digest stands for its end.

    >>> hidden_name("model"), len(hidden_name("m" * 255))
    ('.model', 217)
    """
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_NAME:
        return f".{name}"
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return f".{encoded[:_BEGINNING].decode(errors='ignore')}{digest}"


def workplace_of(path: Beside) -> Beside:
    """The folder beside a checkpoint in which each of its plans has a folder."""
    return path.with_name(f"{hidden_name(path.name)}.partial")


def taken(path: object, what: str = "exists already; a checkpoint is written to a new name") -> FileExistsError:
    """Give the error for a name that is taken."""
    return FileExistsError(errno.EEXIST, what, str(path))
