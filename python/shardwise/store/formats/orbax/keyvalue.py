"""Key-value stores of zarr arrays: the values are files of a folder, or entries of a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ...._fork import ForkLock
from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location, entries_of, open_file

__all__ = ["FolderStore", "KeyValueStore", "OpenFiles", "Value"]

_MAX_KEYS = 20_000_000


class Value(NamedTuple):
    """A value: a range of a file, or bytes that the database holds itself.

    Attributes:
        offset: The byte of the file at which the value begins.
        length: The size in bytes; `None` for the whole file.
        inline: The bytes, if the database holds them.
    """

    path: Location
    offset: int
    length: int | None
    inline: bytes | None = None


class OpenFiles:
    """Files by path, opened when they are first needed, and closed together."""

    def __init__(self) -> None:
        self._files: dict[Location, Holder] = {}
        self._closed = False
        self._lock = ForkLock()

    def check_open(self, path: Location) -> None:
        """Raise ValueError if the files were closed."""
        if self._closed:
            raise ValueError(f"{path}: this checkpoint is closed")

    def __getitem__(self, path: Location) -> Holder:
        with self._lock:
            self.check_open(path)
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = open_file(path)
            return file

    def close(self) -> None:
        """Close all files; no further one can be opened."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()

    def range_of(self, value: Value) -> tuple[Holder, int, int]:
        """Return the file, the first byte and the size of a value that is in a file."""
        file = self[value.path]
        length = file.size - value.offset if value.length is None else value.length
        if value.offset + length > file.size:
            raise ParseError(
                f"{value.path}: has {file.size} bytes; bytes {value.offset} to {value.offset + length} were needed"
            )
        return file, value.offset, length

    def read(self, value: Value, most: int) -> bytes:
        """Read a value of at most `most` bytes."""
        if value.inline is not None:
            return value.inline
        file, offset, length = self.range_of(value)
        if length > most:
            raise ParseError(f"{value.path}: a value of {length} bytes, over the limit of {most} here")
        data = file.read(offset, length)
        file.check()
        return data


class KeyValueStore(Protocol):
    """A key-value store that holds zarr arrays."""

    folder: Location
    files: OpenFiles

    def get(self, key: str) -> Value | None:
        """Return the value of a key; `None` if there is none."""

    def listing(self) -> Iterator[str]:
        """Return all keys."""


class FolderStore:
    """The files below a folder; their relative paths are the keys."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.files = OpenFiles()
        self._values: dict[str, Location] = {}
        open_folders = [("", folder)]
        while open_folders:
            prefix, current = open_folders.pop()
            for name, is_folder in entries_of(current):
                key = f"{prefix}{name}"
                if is_folder:
                    if key.count("/") > 128:
                        raise ParseError(f"{folder}: folders are nested more than 128 deep at {shown(key)}")
                    open_folders.append((f"{key}/", current / name))
                else:
                    self._values[key] = current / name
                    if len(self._values) > _MAX_KEYS:
                        raise ParseError(f"{folder}: more than {_MAX_KEYS} files, the limit")

    def get(self, key: str) -> Value | None:
        """Return the file of this relative path; None if there is none."""
        path = self._values.get(key)
        return None if path is None else Value(path, 0, None)

    def listing(self) -> Iterator[str]:
        """Return the relative paths of all files."""
        return iter(self._values)
