"""Pieces of a task's sources that lie in a store: fetched into memory, from which they are copied like any other.

A task of a disk is a program for the I/O engine, which reads files and arrays. What an object has of it is read in
windows: stretches of the object with pieces that lie near each other. The program is then told to find these pieces in
the windows instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from ..._text import bytes_text
from ...errors import LayoutError
from ..boxes import Extent, contiguous_strides, read_extent
from ..engine import LEAST_MEMORY, CopyJob, HeldPiece
from ..object_files import FLIGHT, ObjectFile
from ..objects import ObjectPath, ObjectStatus

__all__ = [
    "Compared",
    "SourceObject",
    "add_sources",
    "fetch_pieces",
    "is_in_memory",
    "is_remote",
    "memory_for",
    "opened_object",
]

Numbers = npt.NDArray[np.int64]

#: A window has at most twice the bytes of its pieces, and this many more.
_SLACK = 64 * 2**10


class SourceObject(NamedTuple):
    """An object of a store to read: what it was when the plan was made, and must still be.

    Attributes:
        path: Where it is.
        size: Its bytes.
        mark: What tells it from another object of the same name.
    """

    path: ObjectPath
    size: int
    mark: str


class Compared(NamedTuple):
    """A piece that is stored again, in an object.

    Attributes:
        number: Its number among the destination pieces of the program.
        compare: Gives its first element that differs from what is written, as an offset in the tensor; or `None`.
    """

    number: int
    compare: Callable[[], int | None]


class _Tensor(NamedTuple):
    """One tensor of a program; its rows are views of the program's numbers."""

    itemsize: int
    shape: tuple[int, ...]
    sources: Numbers
    targets: Numbers


class _Piece(NamedTuple):
    row: Numbers
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.extents) * self.itemsize


def is_remote(sources: Sequence[Any]) -> bool:
    """Whether one of these sources is in a store."""
    return any(isinstance(source, SourceObject) for source in sources)


def is_in_memory(source: Any) -> TypeGuard[SourceObject]:
    """Whether a source is an object in the memory of this process."""
    return isinstance(source, SourceObject) and source.path.protocol == "memory"


def memory_for(task_bytes: int) -> int:
    """The memory with which a task of so many bytes is sure to be run: windows, or two pieces that are compared."""
    return 4 * task_bytes + 2**20


def add_sources(job: CopyJob, sources: Sequence[Any]) -> None:
    """Name the sources of a job: files and arrays; what is of an object is in arrays that follow."""
    for source in sources:
        if isinstance(source, np.ndarray):
            job.read_array(source)
        elif isinstance(source, SourceObject):
            job.read_array(np.empty(0, np.uint8))
        else:
            job.read_file(source.path, source.size, source.times)


@functools.lru_cache(maxsize=4096)
def opened_object(source: SourceObject) -> ObjectFile:
    """The same file for the same object."""
    return ObjectFile(source.path, ObjectStatus(source.size, source.mark))


def fetch_pieces(
    program: Numbers, sources: Sequence[Any], compared: Sequence[Any], files: int, memory: int
) -> tuple[list[npt.NDArray[Any]], list[Compared], int]:
    """Fetch what a program reads of objects, and change it so that it finds that in arrays.

    Args:
        program: The numbers, which are changed: its sources are followed by the arrays that are given.
        sources: Its sources.
        compared: What is compared with destination pieces; those that objects are compared with go nowhere.
        files: The number of its destinations before those that are compared.
        memory: Bytes for what is fetched.

    Returns:
        The arrays; what is to be compared when they are there; the bytes that were fetched.

    Raises:
        LayoutError: if the memory is too little.
        ParseError: if an object is not what it was.
        OSError: if the store fails.
    """
    tensors = list(_tensors(program))
    pieces: dict[int, list[_Piece]] = {}
    for tensor in tensors:
        for row in tensor.sources:
            if isinstance(sources[row[0]], SourceObject):
                pieces.setdefault(int(row[0]), []).append(_piece(tensor, row))
    again, number = [], 0
    for tensor in tensors:
        for row in tensor.targets:
            other = compared[row[0] - files] if row[0] >= files else None
            if isinstance(other, SourceObject):
                again.append((number, tensor, _piece(tensor, row), other))
                row[1] = 0
                row[2 + 2 * len(tensor.shape) :] = contiguous_strides(again[-1][2].extents, tensor.itemsize)
            number += 1
    windows = [(sources[holder], part) for holder, held in pieces.items() for part in _windows(held)]
    total = sum(_window_bytes(part) for _, part in windows)
    needed = total + 2 * max((piece.nbytes for _, _, piece, _ in again), default=0) + LEAST_MEMORY
    if needed > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)} for each worker; a task that fetches {bytes_text(total)} from a store "
            f"needs {bytes_text(needed)}: give more, or make the plan with smaller task_bytes"
        )
    with ThreadPoolExecutor(FLIGHT, thread_name_prefix="shardwise-fetch") as pool:
        arrays = list(pool.map(lambda item: _fetched(*item), windows))
    for holder in pieces:
        opened_object(sources[holder]).check()
    for at, (_, part) in enumerate(windows):
        for piece in part:
            piece.row[0] = len(sources) + at
            if len(part) == 1 and _is_sparse(piece):
                piece.row[1] = 0
                piece.row[-len(piece.extents) :] = contiguous_strides(piece.extents, piece.itemsize)
            else:
                piece.row[1] -= part[0].begin
    checks = [
        Compared(number, functools.partial(_differing, tensor, piece, other, sources, arrays))
        for number, tensor, piece, other in again
    ]
    return arrays, checks, total


def _tensors(program: Numbers) -> Iterator[_Tensor]:
    at = 0
    while at < len(program):
        itemsize, _, rank, held, wanted = program[at : at + 5].tolist()
        width, begin = 2 + 3 * rank, at + 5 + rank
        middle = begin + held * width
        at = middle + wanted * width
        shape = tuple(program[begin - rank : begin].tolist())
        yield _Tensor(
            itemsize, shape, program[begin:middle].reshape(held, width), program[middle:at].reshape(wanted, width)
        )


def _piece(tensor: _Tensor, row: Numbers) -> _Piece:
    rank = len(tensor.shape)
    numbers = row.tolist()
    extents = tuple(b - a for a, b in zip(numbers[2 : 2 + rank], numbers[2 + rank : 2 + 2 * rank], strict=True))
    strides = tuple(numbers[2 + 2 * rank :])
    reach = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    return _Piece(row, extents, strides, tensor.itemsize, numbers[1], numbers[1] + reach + tensor.itemsize)


def _is_sparse(piece: _Piece) -> bool:
    """Whether most of what lies between its first byte and its last is not of it."""
    return piece.end - piece.begin > 2 * piece.nbytes + _SLACK


def _windows(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one object that are fetched together; one that is sparse is alone."""
    window: list[_Piece] = []
    end = nbytes = 0
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        if _is_sparse(piece):
            yield [piece]
            continue
        reach = max(end, piece.end)
        if window and reach - window[0].begin > 2 * (nbytes + piece.nbytes) + _SLACK:
            yield window
            window, nbytes, reach = [], 0, piece.end
        window.append(piece)
        end, nbytes = reach, nbytes + piece.nbytes
    if window:
        yield window


def _window_bytes(window: list[_Piece]) -> int:
    if len(window) == 1 and _is_sparse(window[0]):
        return window[0].nbytes
    return max(piece.end for piece in window) - window[0].begin


def _fetched(source: SourceObject, window: list[_Piece]) -> npt.NDArray[Any]:
    """The bytes of a window; of a sparse piece its elements, in C order."""
    file = opened_object(source)
    if len(window) == 1 and _is_sparse(window[0]):
        return _values(file, window[0])
    data = np.empty(_window_bytes(window), np.uint8)
    file.read_into(memoryview(data), window[0].begin)  # type: ignore[arg-type]
    return data


def _values(file: ObjectFile, piece: _Piece) -> npt.NDArray[Any]:
    values = np.empty(piece.extents, f"V{piece.itemsize}")
    read_extent(Extent(file, piece.begin, piece.strides), [0] * len(piece.extents), values)
    return values


def _differing(
    tensor: _Tensor, piece: _Piece, other: SourceObject, sources: Sequence[Any], arrays: list[npt.NDArray[Any]]
) -> int | None:
    theirs = _values(opened_object(other), piece)
    opened_object(other).check()
    ours = np.empty(piece.extents, f"V{piece.itemsize}")
    rank = len(piece.extents)
    job = CopyJob()
    add_sources(job, [*sources, *arrays])
    corners = piece.row[2 : 2 + rank].tolist(), piece.row[2 + rank : 2 + 2 * rank].tolist()
    held = [
        HeldPiece(row[0], row[1], row[2 : 2 + rank], row[2 + rank : 2 + 2 * rank], row[2 + 2 * rank :])
        for row in tensor.sources.tolist()
    ]
    job.add_tensor(tensor.shape, tensor.itemsize, held, [HeldPiece(job.write_array(ours), 0, *corners)])
    job.run(threads=1)
    differs = np.flatnonzero(ours.reshape(-1).view(np.uint8) != theirs.reshape(-1).view(np.uint8))
    if not len(differs):
        return None
    index = np.unravel_index(int(differs[0]) // piece.itemsize, piece.extents) if rank else ()
    at = [int(start) + int(place) for start, place in zip(piece.row[2 : 2 + rank], index, strict=True)]
    return int(np.ravel_multi_index(at, tensor.shape)) if rank else 0
