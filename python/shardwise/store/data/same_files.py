"""Detection of source files that are replaced (same name, other file) while a job reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import ParseError

__all__ = ["SameFiles"]


class SameFiles:
    """Notes which files have some names, to see at the end whether one of them was replaced meanwhile.

    A copy of another checkpoint may have the size, the time and the headers of the first.

    Args:
        paths: The names, to which `add` adds more.

    Raises:
        OSError: if there is no file of a name.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._found: dict[str, tuple[tuple[int, int], int]] = {}
        self.add(paths)

    def add(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add names; those that were added before are known."""
        for name in paths:
            path = os.fspath(name)
            if path not in self._found:
                self._found[path] = _look(path)

    def check(self) -> None:
        """Refuse the files, with ParseError, if one of them is not the same.

        Another file has another number and another time of change. A new number alone may be a network filesystem's
        way; a new time alone may be a change of the file's rights, but also one of its contents after which it got its
        old time of modification back.
        """
        for path, found in self._found.items():
            number, changed = _look(path)
            if changed != found[1]:
                how = "changed (its change time differs)" if number == found[0] else "replaced by another file"
                raise ParseError(f"{path}: was {how} while it was read")


def _look(path: str) -> tuple[tuple[int, int], int]:
    status = Path(path).stat()
    return (status.st_dev, status.st_ino), status.st_ctime_ns
