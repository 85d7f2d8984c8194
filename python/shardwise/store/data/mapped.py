"""Arrays that are views of memory-mapped files, which must stay unchanged while the arrays are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..._core import mapped_files
from ..._types import Array
from ...errors import ParseError

__all__ = ["MappedFiles"]


#: The size of a file, and the times of its last write and last change; `None` if this process may write to it.
_Status = tuple[int, tuple[int, int] | None]


class MappedFiles:
    """The files that arrays are mapped from, with the files' state when the arrays are added.

    Args:
        arrays: The arrays; `add` adds more.

    Raises:
        ParseError: if a file is shorter than an array's part of it.

    If a mapped file is cut short, elements after its new end are zeros up to the end of a page, and cannot be read from
    there on; if it is written to, an array has old and new elements meanwhile. Only Linux tells which file is mapped.
    """

    def __init__(self, arrays: Iterable[Array] = ()) -> None:
        self._added: dict[int, Array] = {}
        self._mapped: list[Array] = []
        self._found: dict[str, _Status] = {}
        self.add(arrays)

    def add(self, arrays: Iterable[Array]) -> None:
        """Add arrays; those that were added before are skipped."""
        given = {id(array): array for array in arrays}
        new = {key: array for key, array in given.items() if key not in self._added}
        self._added |= new
        for array, path, status in _look(list(new.values())):
            self._mapped.append(array)
            self._found.setdefault(path, status)

    def check(self) -> None:
        """Check that the files are unchanged.

        Raises:
            ParseError: if one was written to, or cut short. A file that was replaced by another one under its name is
                fine: the arrays still have the old one.
        """
        for _, path, now in _look(self._mapped):
            known = self._found.get(path, now)
            if now[0] != known[0]:
                raise ParseError(
                    f"{path}: had {known[0]} bytes when arrays of it began to be read, but has {now[0]} now"
                )
            if now[1] != known[1]:
                raise ParseError(f"{path}: was written to while arrays that are mapped from it were read")


def _look(arrays: list[Array]) -> Iterator[tuple[Array, str, _Status]]:
    """Yield each array that is mapped from a file, with the file."""
    for array, file in zip(arrays, mapped_files(arrays), strict=True):
        if file is None:
            continue
        path, end, size, times = file
        if size < end:
            raise ParseError(
                f"{path}: has {size} bytes; it was cut short after an array was mapped from it, up to byte {end}"
            )
        yield array, path, (size, times)
