"""Arrays in memory that are those of memory-mapped files: the files must stay as they are while the arrays are read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .. import _core
from ..errors import ParseError

__all__ = ["MappedFiles"]


class MappedFiles:
    """The files that arrays are mapped from, as they are now.

    Args:
        holders: The arrays; what is not an array is left out.

    Raises:
        ParseError: if a file is shorter than what an array has of it.

    Elements behind the new end of a file that is cut short are zeros up to the end of a page, and cannot be read from
    there on; one that is written anew has old ones and new ones meanwhile. Only Linux says where memory is mapped from.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        self._arrays = [holder for holder in holders if isinstance(holder, np.ndarray)]
        self._found = self._look()

    def _look(self) -> dict[str, tuple[int, int | None]]:
        found: dict[str, tuple[int, int | None]] = {}
        for file in _core.mapped_files(self._arrays):
            if file is None:
                continue
            path, end, size, modified = file
            if size < end:
                raise ParseError(f"{path}: has {size} bytes; it was cut short after an array of its {end} was mapped")
            found[path] = size, modified
        return found

    def check(self) -> None:
        """Look at the files again.

        Raises:
            ParseError: if one was written to, or cut short. One that another file has replaced under its name is not:
                the arrays still have the old one.
        """
        for path, now in self._look().items():
            known = self._found.get(path, now)
            if now[0] != known[0]:
                raise ParseError(
                    f"{path}: had {known[0]} bytes when arrays of it began to be read, but has {now[0]} now"
                )
            if now[1] != known[1]:
                raise ParseError(f"{path}: was written to while arrays that are mapped from it were read")
