"""Bytes of tensors copied between files and arrays by the compiled I/O engine: in bounded memory, by threads.

A `CopyJob` has sources, destinations, and tensors. Each tensor has boxes in sources and boxes in destinations; the
engine copies the parts that they have in common. Every byte that is needed is read once and written once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arguments import integer, path_of, refuse_mask
from ..._core import CopyJob as CoreJob
from ...errors import LayoutError, SizeOverflowError
from ...pieces import LocatedPiece, Pieces

__all__ = [
    "DIGEST_MODULUS",
    "LEAST_MEMORY",
    "CopyJob",
    "CopyReport",
    "JobTensor",
    "add_digests",
    "check_job_memory",
    "check_threads",
    "digest_array",
    "tensors_of",
]

DIGEST_MODULUS = 2**127 - 1
"""Digests of the pieces of a tensor add up to the tensor's modulo this prime."""

LEAST_MEMORY = 16 * 2**10
"""The least bytes of memory that a job takes."""

_BUDGET = 64 * 2**20

Times = tuple[int, int | None]
"""When a file was last written to, and when it was last changed in any way, in nanoseconds."""


class JobTensor(NamedTuple):
    """A tensor of a job.

    Attributes:
        wanted: 1 if each destination piece is digested, plus 2 if its CRC-32 is computed.
        sources: Boxes that do not overlap, and that cover what the destinations need; holders are numbers of sources.
        targets: Boxes to be copied; holders are numbers of destinations.
    """

    itemsize: int
    wanted: int
    shape: tuple[int, ...]
    sources: Pieces
    targets: Pieces

    def program(self) -> npt.NDArray[np.int64]:
        """Return the tensor as int64 numbers of a program of the engine."""
        counts = len(self.sources), len(self.targets)
        head = np.array([self.itemsize, self.wanted, len(self.shape), *counts, *self.shape], np.int64)
        return np.concatenate([head, self.sources.rows.reshape(-1), self.targets.rows.reshape(-1)])


def tensors_of(program: npt.NDArray[np.int64]) -> Iterator[JobTensor]:
    """Yield the tensors of a program; their rows are views of its numbers."""
    at = 0
    while at < len(program):
        itemsize, wanted, rank, held, targets = program[at : at + 5].tolist()
        width, begin = 2 + 3 * rank, at + 5 + rank
        middle = begin + held * width
        at = middle + targets * width
        shape = tuple(program[begin - rank : begin].tolist())
        rows = program[begin:middle].reshape(held, width), program[middle:at].reshape(targets, width)
        yield JobTensor(itemsize, wanted, shape, *map(Pieces, rows))


class CopyReport(NamedTuple):
    """The result of a job.

    Attributes:
        bytes_read: Bytes read from files, including those between needed ones.
        bytes_written: Bytes written to files.
        calls: The number of reads and writes.
        digests: The digest of each destination piece, in the order in which they were added; 0 if it was not asked for,
            and empty if none was asked for at all.
        crcs: The CRC-32 of each destination piece, in the same way.
        differences: For each destination piece that differs from the file it is compared with: its number, and the
            first element that differs, as an offset in the tensor.
    """

    bytes_read: int
    bytes_written: int
    calls: int
    digests: list[int]
    crcs: list[int]
    differences: list[tuple[int, int]]


class CopyJob:
    """A job for the I/O engine: name the holders, add the tensors, run it.

    >>> import numpy as np
    >>> table = np.arange(12, dtype=np.int32).reshape(3, 4)
    >>> job, columns = CopyJob(), np.zeros((3, 2), np.int32)
    >>> source, target = job.read_array(table), job.write_array(columns)
    >>> piece, columns_of_it = LocatedPiece(((0, 3), (0, 4)), source, 0, (16, 4)), ((0, 3), (2, 4))
    >>> job.add_tensor((3, 4), 4, [piece], [LocatedPiece.dense(columns_of_it, target, 0, 4)])
    0
    >>> job.run().bytes_read
    0
    >>> columns.tolist()
    [[2, 3], [6, 7], [10, 11]]
    """

    def __init__(self) -> None:
        self._sources: list[Any] = []
        self._destinations: list[Any] = []
        self._program = array("q")
        self._pieces = 0

    @classmethod
    def of_program(cls, program: bytes) -> CopyJob:
        """Return a job for the tensors of a program; its sources and destinations are still to be added."""
        job = cls()
        job._program.frombytes(program)
        return job

    @classmethod
    def of_tensors(cls, tensors: Iterable[JobTensor]) -> CopyJob:
        """Return a job for these tensors; its sources and destinations are still to be added."""
        return cls.of_program(b"".join(tensor.program().tobytes() for tensor in tensors))

    def read_file(
        self, path: str | os.PathLike[str], size: int, times: Times | None = None, descriptor: int | None = None
    ) -> int:
        """Add a file to read, and return its number among the sources.

        Args:
            path: The file's path.
            size: The size in bytes, which the file must still have when the job runs.
            times: The time of the last write (`st_mtime_ns`), and that of the last change of any kind (`st_ctime_ns`)
                or `None`; checked if given.
            descriptor: The file's descriptor, if it is open; `path` is then for messages only.
        """
        self._sources.append((path_of(path), size, times, descriptor))
        return len(self._sources) - 1

    def read_array(self, source: npt.NDArray[Any]) -> int:
        """Add an array to read, with any strides, and return its number among the sources."""
        self._sources.append(_array("source", source))
        return len(self._sources) - 1

    def write_file(self, path: str | os.PathLike[str], size: int, folder: int | None = None) -> int:
        """Add a file to create, of this final size, and return its number among the destinations.

        The file must not exist yet. Bytes that no piece covers are zero. With `folder`, the descriptor of the file's
        folder, the file is opened there by its name, and no other part of the path is followed.
        """
        self._destinations.append(("write", path_of(path), size, folder))
        return len(self._destinations) - 1

    def fill_file(self, path: str | os.PathLike[str], size: int, folder: int | None = None) -> int:
        """Add a file to write a part of, and return its number among the destinations; `folder` as for `write_file`.

        The file must exist in this size, as another job's `write_file` made it; bytes that no piece covers stay
        unchanged. It must not be a link, nor have a second name. Several jobs may fill different parts of it at once.
        """
        self._destinations.append(("fill", path_of(path), size, folder))
        return len(self._destinations) - 1

    def write_array(self, out: npt.NDArray[Any]) -> int:
        """Add a writable array, with any strides except 0, and return its number among the destinations."""
        self._destinations.append(_array("out", out))
        return len(self._destinations) - 1

    def compare_file(self, path: str | os.PathLike[str], size: int, times: Times | None = None) -> int:
        """Add a file to compare with the bytes for it, and return its number among the destinations."""
        self._destinations.append(("compare", path_of(path), size, times))
        return len(self._destinations) - 1

    def discard(self) -> int:
        """Add a destination that is only digested, not stored, and return its number among the destinations."""
        self._destinations.append(None)
        return len(self._destinations) - 1

    def add_tensor(
        self,
        shape: Sequence[int],
        itemsize: int,
        sources: Iterable[LocatedPiece],
        destinations: Iterable[LocatedPiece],
        *,
        digest: bool = False,
        crc: bool = False,
    ) -> int:
        """Add a tensor, and return the number of its first destination piece among those of all tensors.

        Args:
            shape: Elements per dim.
            itemsize: Bytes per element.
            sources: Boxes that do not overlap, and that cover what the destinations need; holders are numbers.
            destinations: Boxes to be copied.
            digest: Whether to digest each destination piece.
            crc: Whether to compute the CRC-32 of each destination piece, which must be one run of bytes.

        Raises:
            SizeOverflowError: if a number is not within 64 bits.
        """
        first, rank = self._pieces, len(shape)
        held, wanted = Pieces.by_number(sources, rank), Pieces.by_number(destinations, rank)
        try:
            program = JobTensor(itemsize, int(digest) + 2 * int(crc), tuple(shape), held, wanted).program()
        except OverflowError:
            raise SizeOverflowError("a size of a tensor is over 2**63 - 1") from None
        self._program.frombytes(program.tobytes())
        self._pieces += len(wanted)
        return first

    def run(
        self,
        *,
        budget: int = _BUDGET,
        threads: int | None = None,
        sync: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> CopyReport:
        """Run the job.

        Args:
            budget: Bytes of memory for the buffers of all threads; at least 16 KiB.
            threads: The number of threads; one per core if left out.
            sync: Whether the files are synced to disk before this returns.
            progress: Called now and then with the bytes done and the bytes in all.

        Raises:
            LayoutError: if pieces of a tensor reach outside of it or of their holders; source pieces overlap, or do not
                cover what is wanted; destination pieces overlap in a file; the budget is too small; there are no
                threads.
            ParseError: if a source is not a regular file, is not as described, ends too early, or changed
                meanwhile.
            OSError: if a file cannot be created, read or written, or the disk is full; the message names file and byte.
                The files that were created are removed.
        """
        check_threads(threads)
        done = self._compiled().run(budget, threads, sync, progress)
        return CopyReport(*done[0], *done[1:])

    def _compiled(self) -> CoreJob:
        return CoreJob(self._sources, self._destinations, np.frombuffer(self._program, np.int64))


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(value).__name__}")
    refuse_mask(name, value)
    return value


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that is not positive; `None` stands for one per core.

    Raises:
        LayoutError, TypeError: if it is below 1, or not an integer.
    """
    if threads is not None and integer("threads", threads) < 1:
        raise LayoutError(f"threads is {threads}; it must be at least 1")


def check_job_memory(memory: int) -> None:
    """Refuse a memory, in bytes, that is too little for a job.

    Raises:
        LayoutError, TypeError: if it is too little, or not an integer.
    """
    if integer("memory", memory) < LEAST_MEMORY:
        raise LayoutError(f"memory is {memory} byte{'s' * (memory != 1)}; at least {LEAST_MEMORY} bytes are needed")


def add_digests(digests: Iterable[int]) -> int:
    """Return the digest of the tensor that pieces with these digests tile.

    >>> add_digests([DIGEST_MODULUS - 1, 3])
    2
    """
    return sum(digests) % DIGEST_MODULUS


def digest_array(value: npt.NDArray[Any]) -> int:
    """Return the digest of a whole tensor, as a number: the sum of its pieces' digests in any checkpoint.

    The rule is in the module `digest` of the crate `shardwise-io`. Compare dtype and shape too: zeros add nothing.

    >>> import numpy as np
    >>> digest_array(np.array([[1, 0], [0, 0]], np.uint8)) == 0xE220A8397B1DCDAF >> 3  # The first key.
    True
    """
    job = CopyJob()
    box = tuple((0, size) for size in value.shape)
    whole = LocatedPiece(box, job.read_array(value), 0, value.strides)
    kept = LocatedPiece.dense(box, job.discard(), 0, value.itemsize)
    job.add_tensor(value.shape, value.itemsize, [whole], [kept], digest=True)
    return job.run().digests[0]
