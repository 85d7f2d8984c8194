"""Locations of checkpoints: paths on a disk and URLs of stores, with operations that work for both.

Apart from `write.places`, only this module asks which of the two a location is.
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
from ..._json import MAX_JSON, strict_json
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
    "json_in",
    "location_of",
    "names_in",
    "open_file",
    "opening",
    "read_json",
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
#: A name of the form that Hugging Face's repositories have; and endings that mark a file instead.
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
#: The kind of a path, which a path next to it has too.
Beside = TypeVar("Beside", Path, ObjectPath)


class Location(Protocol):
    """A path or a URL, with the operations that readers of formats need."""

    @property
    def name(self) -> str:
        """The last part of the path."""

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on, with the dot."""

    @property
    def parent(self) -> Location:
        """The path without its last part."""

    def __truediv__(self, name: str, /) -> Location: ...
    def __lt__(self, other: Any, /) -> bool: ...

    def with_name(self, name: str, /) -> Location:
        """Return the path with another last part."""

    def exists(self) -> bool:
        """Return whether the path names anything."""

    def is_file(self) -> bool:
        """Return whether the path names a file, or an object."""

    def is_dir(self) -> bool:
        """Return whether the path names a folder."""

    def stat(self) -> Any:
        """Return a status with `st_size`; OSError if nothing is there."""

    def iterdir(self) -> Iterator[Location]:
        """Yield the paths directly in the folder."""

    def glob(self, pattern: str, /) -> Iterator[Location]:
        """Yield the paths directly in the folder whose names match a pattern."""


def location_of(path: Any) -> Any:
    """Return the location that a path or URL means: a `Path`, or an `ObjectPath`.

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
    """Return the location as one that does not depend on the current folder."""
    return location.absolute() if isinstance(location, Path) else location


def refuse_options(locations: Iterable[object], what: str) -> None:
    """Refuse, with TypeError, options of stores that a URL and the environment cannot state.

    Args:
        locations: The locations, of which those in stores are checked.
        what: The thing that stores only URLs, for the message.
    """
    paths = [location for location in locations if isinstance(location, ObjectPath)]
    for path in {id(path.filesystem): path for path in paths}.values():
        path.refuse_options(what)


def is_sampled(location: Location) -> bool:
    """Return whether the speed of reading a sample there predicts the time for the rest: true for disks."""
    return isinstance(location, Path)


def hub_hint(path: object) -> str:
    """Return advice if a path that does not exist looks like a repository of Hugging Face; else an empty text.

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
    """Refuse, with ParseError, a path that is neither a file nor a folder."""
    if isinstance(location, Path) and not (location.is_dir() or location.is_file()):
        DataFile(location)  # Says what it is instead.


def entries_of(folder: Location) -> Iterator[tuple[str, bool]]:
    """Yield the entries of a folder: names, and whether each is a folder."""
    if isinstance(folder, ObjectPath):
        yield from folder.names()
        return
    with os.scandir(str(folder)) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir()


def names_in(folder: Location, said: Iterable[str]) -> Iterable[str]:
    """Return the names in a folder; in a store, whose listings may be out of date, those that its manifest `said`."""
    return said if isinstance(folder, ObjectPath) else (name for name, _ in entries_of(folder))


def unlisted(folder: Location, wanted: Iterable[str]) -> set[str]:
    """Return those of these names that exist in a folder of a store although its listing may not show them yet."""
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
    """Return the version (`Holder.version`) of the file or object that is at a location now.

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
    """Return the first bytes of a file or an object, up to `most`.

    Raises:
        OSError: if it cannot be opened or read.
        ParseError: if it is not a regular file.
    """
    file = open_file(location)
    try:
        return file.read(0, min(file.size, most))
    finally:
        file.close()


def read_json(location: Location) -> Any:
    """Return the contents of a JSON file or object.

    Raises:
        OSError: if it cannot be opened or read.
        ParseError: if it is not a regular file, has more than `MAX_JSON` bytes, or is not JSON.
    """
    file = open_file(location)
    try:
        return json_in(file)
    finally:
        file.close()


def json_in(file: Holder) -> Any:
    """Return the contents of an open JSON file.

    Raises:
        ParseError: if it has more than `MAX_JSON` bytes, none of which are read then, or is not JSON.
    """
    if file.size > MAX_JSON:
        raise ParseError(f"{file.path}: {file.size} bytes of JSON, over the limit of {MAX_JSON}")
    return strict_json(file.read(0, file.size), file.path)


def read_unlinked(location: Location, most: int) -> bytes | None:
    """Return a file's or an object's contents of at most `most` bytes; `None` for a link, and for anything else.

    A file with a second name, a hard link, may be one that its owner could not read, so it counts as a link. A link in
    Hugging Face's cache is followed to its file.
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
    """Return the file that a link in a snapshot of Hugging Face's cache leads to; any other path unchanged."""
    if not path.is_symlink():
        return path
    model = path.parent.resolve().parent.parent
    blob = _BLOB.fullmatch(str(path.readlink()))
    is_snapshot = path.parent.resolve().parent.name == "snapshots" and model.name.startswith("models--")
    is_own = is_snapshot and not (model / "blobs").is_symlink()
    return model / "blobs" / blob[1] if blob and is_own else path


@contextmanager
def opening(locations: Iterable[Location]) -> Iterator[tuple[Callable[[Location], Holder], list[Holder]]]:
    """Yield a function that opens one of these files, and a list of the files that it has opened.

    Objects are opened together before, and their first block is read. On an error the opened files are closed.
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
    """Return the beginning of the hidden names of temporary files and folders next to a file or folder of this name.

    File systems allow 255 bytes; if the name leaves no room for an ending, a digest replaces its end.

    >>> hidden_name("model"), len(hidden_name("m" * 255))
    ('.model', 217)
    """
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_NAME:
        return f".{name}"
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return f".{encoded[:_BEGINNING].decode(errors='ignore')}{digest}"


def workplace_of(path: Beside) -> Beside:
    """Return the path of the folder next to a checkpoint in which each of its plans has a folder."""
    return path.with_name(f"{hidden_name(path.name)}.partial")


def taken(path: object, what: str = "exists already; a checkpoint is written to a new name") -> FileExistsError:
    """Return the error for a path that exists already."""
    return FileExistsError(errno.EEXIST, what, str(path))
