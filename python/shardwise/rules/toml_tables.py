"""Files of TOML read as tables, and checks of these whose errors say the place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .._atomic import read_file
from .._fork import importing
from .._text import cut, shown
from ..errors import ParseError, ShardwiseError

__all__ = ["check_file", "check_table", "checked_list", "errors_at", "nearest_key", "parse_toml", "read_text"]

#: The largest have a megabyte; to read more takes minutes.
_LARGEST_FILE = 1 << 24


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Put the place in a file before the message of an error inside, unless it is there already."""
    try:
        yield
    except (ShardwiseError, TypeError) as error:
        kind = ParseError if isinstance(error, TypeError) else type(error)
        raise kind(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


def check_file(file: object, method: str) -> None:
    """Refuse a value that is neither a path nor an open file with this method.

    Raises:
        TypeError: if it is neither.
    """
    if not isinstance(file, (str, os.PathLike)) and not hasattr(file, method):
        raise TypeError(f"file must be a path or a text file with {method}(), got {type(file).__name__}")


def read_text(file: str | os.PathLike[str] | TextIO, source: str) -> str:
    """Read a file as UTF-8; a path or an open text file."""
    check_file(file, "read")
    if not isinstance(file, (str, os.PathLike)):
        text = file.read()
        if not isinstance(text, str):
            raise TypeError(f"file must be open as text, but read() gives {type(text).__name__}")
        return text
    try:
        return read_file(file, _LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise ParseError(f"{source}: byte {error.start} is not UTF-8") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse a text of TOML.

    Args:
        text: The contents of a file.
        source: Its name in messages.

    Raises:
        ParseError: if it is not TOML.
    """
    if sys.version_info >= (3, 11):
        with importing:
            import tomllib
    else:
        with importing:
            import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(text)
        return document
    except ValueError as error:
        why = str(error)
        if "Unescaped '\\'" in why:
            why += r"; in double quotes \ begins an escape of TOML: write a regular expression in single quotes, '\d'"
        raise ParseError(f"{source} is not TOML: {cut(why, 400)}") from None
    except RecursionError:
        raise ParseError(f"{source} is nested too deeply") from None


def check_table(table: object, place: str, required: set[str] | None = None, optional: set[str] | None = None) -> None:
    """Refuse what is not a table of these keys.

    Raises:
        ParseError: if it is none, has another key, or lacks one that is required.
    """
    if not isinstance(table, dict):
        raise ParseError(f"{place} must be a table, got {shown(table)}")
    if required is None:
        return
    known = required | (optional or set())
    # A mistyped key is reported before the key that it leaves missing.
    for key in table:
        if key not in known:
            close = nearest_key(key, known)
            meant = "" if close is None else f", did you mean {close!r}?"
            raise ParseError(f"{place}: unknown key {shown(key)}, expected one of {', '.join(sorted(known))}{meant}")
    for key in sorted(required - table.keys()):
        raise ParseError(f"{place}: {shown(key)} is missing")


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the key that was meant, if one is near enough."""
    with importing:
        from difflib import get_close_matches  # Slow to import.

    found = get_close_matches(key[:_LONGEST_COMPARED].lower(), known, 1, 0.7)
    return found[0] if found else None


#: The length of keys that is compared; of longer ones only the beginning is.
_LONGEST_COMPARED = 40


def checked_list(value: object, place: str) -> list[Any]:
    """Return a value if it is a list."""
    if not isinstance(value, list):
        raise ParseError(f"{place} must be a list, got {shown(value)}")
    return value
