"""Long lists of numbers and bytes: in memory, or in a file as compressed blocks, each with its own digest.

A read touches only the blocks that contain the bytes asked for. Each block is inflated up to its expected length, at
most `BLOCK`, and is used only if its digest is right. So neither a damaged nor a forged file makes a reader take more
memory than a few blocks and the bytes asked for.
"""

from __future__ import annotations

import hashlib
import operator
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..._types import Numbers
from ...errors import ParseError
from .files import Holder

__all__ = [
    "BLOCK",
    "Computed",
    "InFile",
    "InMemory",
    "Listed",
    "Section",
    "block_digests",
    "blocks_of",
    "compress_block",
    "numbers",
]

#: The bytes of a block, before it is compressed.
BLOCK = 2**18
#: The most bytes of a block per byte of its compressed form, and so the most that a file can inflate to per byte.
_RATIO = 64
#: The number of decompressed blocks of a file that are cached.
_KEPT = 64

#: The number of elements of a `Listed` that are made at a time.
_TOGETHER = 1024

Element = TypeVar("Element")


class Section(Protocol):
    """A list of bytes, or of little-endian int64 numbers, that can be read in parts."""

    @property
    def nbytes(self) -> int:
        """The size of the section in bytes."""

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`."""


class InMemory:
    """A section in memory."""

    def __init__(self, data: bytes | npt.NDArray[Any]) -> None:
        numbers = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data, "<i8")
        self._data = numbers.reshape(-1).view(np.uint8)
        self.nbytes = self._data.nbytes

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`."""
        return self._data[begin:end].tobytes()


class Computed:
    """Rows of numbers that are computed when they are read.

    Args:
        count: The number of rows.
        width: The numbers in a row.
        make: Returns the rows from one to another.
    """

    def __init__(self, count: int, width: int, make: Callable[[int, int], Numbers]) -> None:
        self._row, self._make = 8 * width, make
        self.nbytes = count * self._row
        self._kept = 0, b""

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`. For short reads, further rows are computed for the next read."""
        start, rows = self._kept
        if not start <= begin <= end <= start + len(rows):
            first, last = begin // self._row, -(-end // self._row)
            start, last = first * self._row, max(last, min(first + _TOGETHER, self.nbytes // self._row))
            rows = self._make(first, last).astype("<i8", copy=False).tobytes()
            if last - first <= _TOGETHER:
                self._kept = start, rows
        return rows[begin - start : end - start]


class InFile:
    """A section of a file.

    Args:
        nbytes: The size of the section in bytes, decompressed.
        begins: The byte of the file at which each of its blocks begins, and the byte after the last block.
        digests: The SHA-256 of each block before compression, in hexadecimal.

    Raises:
        ParseError: if the number of blocks does not fit the size, or a block is too short for its contents.
    """

    def __init__(self, file: Holder, nbytes: int, begins: list[int], digests: list[str]) -> None:
        self.nbytes = nbytes
        self._file, self._begins, self._digests = file, begins, digests
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        if not len(digests) == len(begins) - 1 == -(-nbytes // BLOCK):
            raise ParseError(f"{file.path}: the plan lacks blocks that it lists")
        for block in range(len(digests)):
            if self._length(block) > _RATIO * (begins[block + 1] - begins[block]):
                raise ParseError(f"{file.path}: the plan has a block that would be longer than its bytes allow")

    def _length(self, block: int) -> int:
        return min(BLOCK, self.nbytes - block * BLOCK)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`.

        Raises:
            ParseError: if a block is damaged.
            ValueError: if the section has fewer bytes.
        """
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(f"it names the bytes {begin} to {end} of {self.nbytes}")
        blocks = range(begin // BLOCK, -(-end // BLOCK))
        if len(blocks) == 1:
            at = blocks[0] * BLOCK
            return self._block(blocks[0])[begin - at : end - at]
        parts = [self._block(block)[max(begin - block * BLOCK, 0) : end - block * BLOCK] for block in blocks]
        return b"".join(parts)

    def _block(self, block: int) -> bytes:
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        begin, length = self._begins[block], self._length(block)
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(self._file.read(begin, self._begins[block + 1] - begin), length + 1)
        except zlib.error:
            data = b""
        if len(data) != length or hashlib.sha256(data).hexdigest() != self._digests[block]:
            raise ParseError(f"{self._file.path}: the plan was edited or is damaged: its digest differs")
        self._kept[block] = data
        while len(self._kept) > _KEPT:
            try:
                self._kept.popitem(last=False)
            except KeyError:  # Another thread did.
                break
        return data


def numbers(section: Section, begin: int, end: int) -> Numbers:
    """Return the int64 numbers of a section from position `begin` to `end`."""
    return np.frombuffer(section.read(8 * begin, 8 * end), "<i8").astype(np.int64, copy=False)


def blocks_of(section: Section) -> Iterator[bytes]:
    """Yield the contents of a section block by block."""
    for begin in range(0, section.nbytes, BLOCK):
        yield section.read(begin, min(begin + BLOCK, section.nbytes))


def block_digests(section: Section) -> list[str]:
    """Return the SHA-256 of each block of a section, in hexadecimal."""
    return [hashlib.sha256(block).hexdigest() for block in blocks_of(section)]


def compress_block(block: bytes) -> bytes:
    """Compress a block to no less than a `_RATIO`th of its size, which is what readers accept."""
    short = zlib.compress(block, 1)
    if len(block) <= _RATIO * len(short):
        return short
    deflater = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return deflater.compress(block) + deflater.flush()


class Listed(Sequence[Element], Generic[Element]):
    """A list whose elements are made when they are asked for.

    Args:
        what: The word for an element, in messages.
        count: The number of elements.
        make: Returns the elements from one to another.
        near: The number of neighbours that are made with an element that is asked for, and kept for a while: the last
            `_TOGETHER` or so that were made.

    >>> Listed("square", 10**12, lambda begin, end: (n * n for n in range(begin, end)))[-1]
    999999999998000000000001
    """

    def __init__(self, what: str, count: int, make: Callable[[int, int], Iterable[Element]], *, near: int = 1) -> None:
        self._what, self._count, self._make, self._near = what, count, make, near
        self._kept: dict[int, Sequence[Element]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = operator.index(index)
        if not -self._count <= number < self._count:
            raise IndexError(f"{self._what} {number} of {self._count}")
        number %= self._count
        at = number % self._near
        begin = number - at
        made = self._kept.get(begin)
        if made is None:
            made = list(self._make(begin, min(begin + self._near, self._count)))
            if self._near > 1:
                if len(self._kept) * self._near >= _TOGETHER:
                    self._kept.clear()
                self._kept[begin] = made
        return made[at]

    def __iter__(self) -> Iterator[Element]:
        for begin in range(0, self._count, _TOGETHER):
            yield from self._make(begin, min(begin + _TOGETHER, self._count))

    def __repr__(self) -> str:
        return f"<{self._count} {self._what}s>"
