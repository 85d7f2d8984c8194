"""Whole objects of a store: reading, comparing, making and removing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...._threads import Threads
from ....errors import ParseError
from ...data.location import taken
from ...data.objects import ObjectPath, ObjectStatus
from .part_sizes import WINDOW
from .uploads import put_object

__all__ = ["ask_all", "has_bytes", "has_text", "is_made", "put_same", "remove", "small_object"]

#: The most bytes that a small object of ours may have to be read.
_MOST = 2**28
#: Bytes that are read and compared at a time.
_AT_ONCE = 8 * 2**20

Returning = TypeVar("Returning")


def small_object(place: ObjectPath) -> bytes | None:
    """Return the contents of a small object of ours; `None` if it does not exist, or vanishes meanwhile."""
    try:
        status = place.status()
    except FileNotFoundError:
        return None
    if not 0 < status.size <= _MOST:
        raise ParseError(f"{place}: is damaged: it has {status.size} bytes, outside 1 to {_MOST}")
    try:
        return place.read(0, status.size, status.etag)
    except ParseError:
        if place.is_file():
            raise
        return None


def has_bytes(path: ObjectPath, status: ObjectStatus, begin: int, data: bytes | bytearray) -> bool:
    """Return whether an object has these bytes from `begin` on."""
    if begin + len(data) > status.size:
        return False
    spans = ((at, min(at + _AT_ONCE, len(data))) for at in range(0, len(data), _AT_ONCE))
    return all(path.read(begin + at, begin + to, status.etag) == data[at:to] for at, to in spans)


def remove(path: ObjectPath) -> None:
    """Remove an object; errors are ignored."""
    with suppress(OSError):  # Nobody looks for it any more.
        path.ask(lambda: path.filesystem.rm_file(path.key))


def has_text(path: ObjectPath, text: bytes) -> bool:
    """Return whether there is an object with these bytes."""
    if not path.is_file():
        return False
    status = path.status()
    return status.size == len(text) and (not text or path.read(0, status.size, status.etag) == text)


def is_made(path: ObjectPath, made: tuple[int, str] | None) -> bool:
    """Return whether the object exists with this number of bytes and this ETag."""
    try:
        return tuple(path.status()) == made
    except FileNotFoundError:
        return False


def put_same(path: ObjectPath, text: bytes) -> None:
    """Make a small object, unless it exists with the same contents, as after an interrupted commit."""
    try:
        put_object(path, text, is_new=True)
    except FileExistsError:
        if not has_text(path, text):
            raise taken(path) from None


def ask_all(ask: Callable[[Any], Returning], items: Sequence[Any]) -> Iterator[Returning]:
    """Call a function on several items at a time, in threads, and yield the answers in order."""
    with Threads(WINDOW, "shardwise-ask") as pool:
        yield from pool.map(ask, items)
