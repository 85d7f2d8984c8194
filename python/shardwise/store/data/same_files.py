"""Detection of source files that are replaced (same name, other file) while a job reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import ParseError

__all__ = ["SameFiles"]


class SameFiles:
    """The identities of files, noted to see later whether a name now belongs to another file.

    A copy of another checkpoint may have the same size, time and headers as the first.

    Args:
        paths: The names; `add` adds more.

    Raises:
        OSError: if there is no file of a name.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._found: dict[str, tuple[tuple[int, int], int]] = {}
        self.add(paths)

    def add(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add names; those that were added before are skipped."""
        for name in paths:
            path = os.fspath(name)
            if path not in self._found:
                self._found[path] = _look(path)

    def check(self) -> None:
        """Refuse the files, with ParseError, if one of them was replaced.

        A replaced file has another inode number and another change time. Another number alone is usual on some network
        file systems; another time alone may be a change of the file's mode, or a change of its contents whose time of
        modification was set back.
        """
        for path, found in self._found.items():
            number, changed = _look(path)
            if changed != found[1]:
                how = "changed (its change time differs)" if number == found[0] else "replaced by another file"
                raise ParseError(f"{path}: was {how} while it was read")


def _look(path: str) -> tuple[tuple[int, int], int]:
    status = Path(path).stat()
    return (status.st_dev, status.st_ino), status.st_ctime_ns
