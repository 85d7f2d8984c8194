"""Arrays in memory that are those of memory-mapped files: the files must stay as they are while the arrays are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..._core import mapped_files
from ..._types import Array
from ...errors import ParseError

__all__ = ["MappedFiles"]


#: The bytes of a file, and when it was last written to and last changed, if that is not for this process to do.
_Status = tuple[int, tuple[int, int] | None]


class MappedFiles:
    """The files that arrays are mapped from, as they are when the arrays are added.

    Args:
        arrays: The arrays, to which `add` adds more.

    Raises:
        ParseError: if a file is shorter than what an array has of it.

    Elements behind the new end of a file that is cut short are zeros up to the end of a page, and cannot be read from
    there on; one that is written anew has old ones and new ones meanwhile. Only Linux says where memory is mapped from.
    """

    def __init__(self, arrays: Iterable[Array] = ()) -> None:
        self._added: dict[int, Array] = {}
        self._mapped: list[Array] = []
        self._found: dict[str, _Status] = {}
        self.add(arrays)

    def add(self, arrays: Iterable[Array]) -> None:
        """Add arrays; those that were added before are known, and take no time."""
        given = {id(array): array for array in arrays}
        new = {key: array for key, array in given.items() if key not in self._added}
        self._added |= new
        for array, path, status in _look(list(new.values())):
            self._mapped.append(array)
            self._found.setdefault(path, status)

    def check(self) -> None:
        """Look at the files again.

        Raises:
            ParseError: if one was written to, or cut short. One that another file has replaced under its name is not:
                the arrays still have the old one.
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
    """Those of the arrays that are mapped, and for each its file."""
    for array, file in zip(arrays, mapped_files(arrays), strict=True):
        if file is None:
            continue
        path, end, size, times = file
        if size < end:
            raise ParseError(
                f"{path}: has {size} bytes; it was cut short after an array was mapped from it, up to byte {end}"
            )
        yield array, path, (size, times)
