"""What a task reads, from files, objects and arrays, put where it belongs: into files, or into memory.

The I/O engine reads files and arrays. What an object has is fetched before, in windows: stretches of the object with
pieces that lie near each other, in which the engine then finds these pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._text import bytes_text
from ...errors import LayoutError, ParseError
from ..boxes import Bounds, read_piece
from ..engine import LEAST_MEMORY, CopyJob, CopyReport, JobTensor, tensors_of
from ..formats.forms import differing_replica
from ..mapped import MappedFiles
from ..object_files import FLIGHT, ObjectFile
from ..pieces import Piece, Pieces, dense_strides, within
from ..same_files import SameFiles
from ..sources import Source

__all__ = ["Block", "Gathered", "Gatherer", "compare_replicas", "fetch_pieces", "memory_for"]

#: A window has at most a quarter more bytes than its pieces, and this many.
_SLACK = 64 * 2**10
#: Bytes of the engine's own buffers, besides the memory that it fills.
_BUDGET = 4 * 2**20

Array = npt.NDArray[Any]


def memory_for(task_bytes: int) -> int:
    """The memory with which a task of so many bytes is sure to be run: windows, or two pieces that are compared."""
    return 4 * task_bytes + 2**20


class Gathered(NamedTuple):
    """What was put together.

    Attributes:
        digests: The digest of each of the task's own destination pieces, in order.
        crcs: The CRC-32 of each; none if not asked for.
        differs: Whether one of its own destinations, which was compared with what would be written, is not that.
        bytes_written: Bytes written to files.
    """

    digests: list[int]
    crcs: list[int]
    differs: bool
    bytes_written: int


class Block(NamedTuple):
    """A box of a tensor, and where it goes in a buffer.

    Attributes:
        position: The position of what has the box among the tensors of a task.
        tensor: The tensor of the plan that it is of.
        box: The box.
        at: The byte at which it begins.
        strides: The bytes from one element to the next, per dim.
    """

    position: int
    tensor: int
    box: Bounds
    at: int
    strides: tuple[int, ...]


class Gatherer:
    """Puts together the tensors of a task, and compares them with what is stored again of them.

    Args:
        program: The tensors, as int64 numbers of a program of the engine. Of their destinations the first are the
            task's own; those that follow are `compared`.
        own: The number of its own destinations.
        sources: Files, objects and arrays.
        compared: The files and objects that hold some of it again.
        names: The names of the tensors of which they do, by the tensors' positions.

    Attributes:
        bytes_read: Bytes that were read from files and objects.
        compares: Whether replicas are compared.

    Raises:
        ParseError: if a source is not what it was when the plan was made.
        OSError: if it cannot be looked at.
    """

    def __init__(
        self,
        program: bytes,
        own: int,
        sources: Sequence[Source | Array],
        compared: Sequence[Source],
        names: Mapping[int, str],
    ) -> None:
        self._program, self._own, self._sources, self._compared, self._names = program, own, sources, compared, names
        self._held: list[tuple[JobTensor, Pieces]] = []
        self._watched: tuple[MappedFiles, SameFiles] | None = None
        self.bytes_read = 0
        self.compares = True
        for source in self._noted():
            source.check()

    def _noted(self) -> Iterator[Source]:
        return (each for each in (*self._sources, *self._compared) if not isinstance(each, np.ndarray))

    def watch(self) -> None:
        """Note what is read, so that `check` sees whether it is replaced or written to meanwhile."""
        files = SameFiles(each.name for each in self._noted() if each.name)
        self._watched = MappedFiles(self._sources), files

    def check(self) -> None:
        """Refuse, with ParseError, what was read if it was replaced or written to since it is watched."""
        for each in self._watched or ():
            each.check()

    def into_files(
        self,
        destinations: Callable[[CopyJob], object],
        memory: int,
        threads: int | None,
        *,
        sync: bool,
        progress: Callable[[int, int], object] | None = None,
    ) -> Gathered:
        """Put all of the tensors into the destinations that the function adds to a job.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if replicas disagree, or a source is not what it was.
            OSError: if a file cannot be read or written, or a store fails.
        """
        given = np.frombuffer(self._program, np.int64)
        if any(each.fetched for each in self._noted()):
            tensors = list(tensors_of(given.copy()))
            arrays, nbytes = self._fetched(tensors, self._names, self._own, memory)
            job = CopyJob.of_tensors(tensors)
        else:
            tensors, arrays, nbytes = [], [], 0
            job = CopyJob.of_program(self._program)
        self._add_holders(job, arrays, destinations)
        done = job.run(budget=max(memory - nbytes, LEAST_MEMORY), threads=threads, sync=sync, progress=progress)
        if not tensors and (self._compared or done.differences):
            tensors = list(tensors_of(given))
        return self._seen(done, tensors, self._names, self._own, nbytes)

    def into_memory(self, buffer: npt.NDArray[np.uint8], blocks: Sequence[Block], threads: int | None) -> Gathered:
        """Put boxes into a buffer of bytes.

        Raises:
            ParseError, OSError: as for `into_files`.
        """
        if not self._held:
            for tensor in tensors_of(np.frombuffer(self._program, np.int64)):
                others = tensor.targets.chosen(np.flatnonzero(tensor.targets.numbers >= self._own))
                others.rows[:, 0] += 1 - self._own
                self._held.append((tensor, others))
        tensors: list[JobTensor] = []
        names: dict[int, str] = {}
        # The parts of one array may interleave there, as those of one tensor may.
        for _, together in groupby(blocks, lambda block: block.tensor):
            sources, own, again = [], [], []
            for block in together:
                tensor, others = self._held[block.position]
                sources.append(tensor.sources.clipped(block.box).rows)
                own.append(Pieces.by_number([Piece(block.box, 0, block.at, block.strides)], len(block.box)).rows)
                if self.compares and len(others):
                    again.append(others.clipped(block.box).rows)
                    names[len(tensors)] = self._names[block.position]
            targets = Pieces(np.concatenate([*own, *again]))
            tensors.append(tensor._replace(sources=Pieces(np.concatenate(sources)), targets=targets))
        arrays, nbytes = self._fetched(tensors, names, 1, None)
        job = CopyJob.of_tensors(tensors)
        self._add_holders(job, arrays, lambda job: job.write_array(buffer))
        return self._seen(job.run(budget=_BUDGET, threads=threads), tensors, names, 1, nbytes)

    def _add_holders(self, job: CopyJob, arrays: Sequence[Array], destinations: Callable[[CopyJob], object]) -> None:
        for source in self._sources:
            if isinstance(source, np.ndarray):
                job.read_array(source)
            else:
                source.read_by(job)
        for array in arrays:
            job.read_array(array)
        destinations(job)
        for other in self._compared:
            other.compared_by(job)

    def _fetched(
        self, tensors: Sequence[JobTensor], names: Mapping[int, str], own: int, memory: int | None
    ) -> tuple[list[Array], int]:
        """Fetch what is in objects, and change the rows of tensors so that they find it in the arrays that are given.

        Pieces of objects that are compared are, and go nowhere after that. Also gives the bytes that were fetched.
        """
        files = [None if isinstance(each, np.ndarray) else each.fetched for each in self._sources]
        others = [each.fetched for each in self._compared]
        again = [
            (number, tensor.targets.chosen(np.array([row])), tensor.targets.rows[row])
            for number, tensor in enumerate(tensors)
            for row, holder in enumerate(tensor.targets.numbers.tolist())
            if holder >= own and others[holder - own] is not None
        ]
        largest = max((int(piece.volumes[0]) * tensors[number].itemsize for number, piece, _ in again), default=0)
        arrays, nbytes = fetch_pieces(tensors, files, memory, 2 * largest + LEAST_MEMORY)
        for number, piece, row in again:
            tensor = tensors[number]
            row[1], row[2 + 2 * piece.rank :] = 0, dense_strides(piece.stops - piece.starts, tensor.itemsize)[0]
            replica = piece.of_holders(lambda holder: others[holder - own])
            ours = np.empty((piece.stops - piece.starts)[0], f"V{tensor.itemsize}")
            target = Pieces.dense(np.zeros((1, 2), np.int64), np.stack([piece.starts, piece.stops], 1), tensor.itemsize)
            job = CopyJob.of_tensors([tensor._replace(wanted=0, targets=target)])
            self._add_holders(job, arrays, lambda job, ours=ours: job.write_array(ours))  # type: ignore[misc]
            job.run(budget=_BUDGET, threads=1)
            self.bytes_read += compare_replicas(names[number], tensor.shape, replica, replica[0].box, ours)
        return arrays, nbytes

    def _seen(
        self, done: CopyReport, tensors: Sequence[JobTensor], names: Mapping[int, str], own: int, nbytes: int
    ) -> Gathered:
        """What was done, once it is seen that replicas agree."""
        self.bytes_read += done.bytes_read + nbytes
        ends = np.cumsum([len(tensor.targets) for tensor in tensors])
        for piece, element in done.differences:
            number = int(np.searchsorted(ends, piece, side="right"))
            tensor = tensors[number]
            holder = int(tensor.targets.numbers[piece - int(ends[number]) + len(tensor.targets)])
            if holder < own:
                return Gathered([], [], True, 0)
            path = self._compared[holder - own].path
            raise ParseError(differing_replica(names[number], tensor.shape, path, element))
        if not self._compared:
            return Gathered(done.digests, done.crcs, False, done.bytes_written)
        is_own = np.concatenate([tensor.targets.numbers < own for tensor in tensors]).tolist()
        return Gathered(
            list(compress(done.digests, is_own)), list(compress(done.crcs, is_own)), False, done.bytes_written
        )


class _Span(NamedTuple):
    """A piece of an object: its tensor, its row there, its bytes, and the first and one past the last in the object."""

    tensor: JobTensor
    row: int
    nbytes: int
    begin: int
    end: int

    @property
    def is_sparse(self) -> bool:
        """Whether much of what lies between its first byte and its last is not of it."""
        return self.end - self.begin > self.nbytes + self.nbytes // 4 + _SLACK


def fetch_pieces(
    tensors: Sequence[JobTensor], files: Sequence[ObjectFile | None], memory: int | None, besides: int
) -> tuple[list[Array], int]:
    """Fetch what tensors have in objects, and change their rows so that they find it in arrays instead.

    Args:
        tensors: The tensors. Of their sources those that are objects are followed by the arrays that are given.
        files: The sources; `None` for those that the engine reads.
        memory: Bytes for what is fetched, and `besides`; `None` if that is bounded already.
        besides: Bytes that are needed for something else.

    Returns:
        The arrays, and the bytes that were fetched.

    Raises:
        LayoutError: if the memory is too little.
        ParseError: if an object is not what it was.
        OSError: if the store fails.
    """
    held: dict[int, list[_Span]] = {}
    for tensor in tensors:
        begins, ends = tensor.sources.spans(tensor.itemsize)
        sizes = tensor.sources.volumes * tensor.itemsize
        columns = tensor.sources.numbers.tolist(), sizes.tolist(), begins.tolist(), ends.tolist()
        for row, (holder, nbytes, begin, end) in enumerate(zip(*columns, strict=True)):
            if files[holder] is not None:
                held.setdefault(holder, []).append(_Span(tensor, row, nbytes, begin, end))
    objects = {holder: file for holder, file in enumerate(files) if file is not None}
    windows = [(objects[holder], window) for holder, spans in held.items() for window in _windows(spans)]
    total = sum(_window_bytes(window) for _, window in windows)
    if memory is not None and total + besides > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)} for each worker; a task that fetches {bytes_text(total)} from a store "
            f"needs {bytes_text(total + besides)}: give more, or make the plan with smaller task_bytes"
        )
    if len(windows) > 1:
        with ThreadPoolExecutor(FLIGHT, thread_name_prefix="shardwise-fetch") as pool:
            arrays = list(pool.map(lambda item: _fetched(*item), windows))
    else:
        arrays = [_fetched(*item) for item in windows]
    for holder in held:
        objects[holder].check()
    for at, (_, window) in enumerate(windows):
        for tensor, row, _, begin, _ in window:
            numbers = tensor.sources.rows[row]
            if len(window) == 1 and window[0].is_sparse:
                numbers[2 + 2 * tensor.sources.rank :] = arrays[at].strides
            numbers[0], numbers[1] = len(files) + at, begin - window[0].begin
    return arrays, total


def _windows(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Pieces of one object that are fetched together; one that is sparse is alone."""
    window: list[_Span] = []
    end = nbytes = 0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.is_sparse:
            yield [span]
            continue
        reach = max(end, span.end)
        total = nbytes + span.nbytes
        if window and reach - window[0].begin > total + total // 4 + _SLACK:
            yield window
            window, nbytes, reach = [], 0, span.end
        window.append(span)
        end, nbytes = reach, nbytes + span.nbytes
    if window:
        yield window


def _window_bytes(window: list[_Span]) -> int:
    if len(window) == 1 and window[0].is_sparse:
        return window[0].nbytes
    return max(span.end for span in window) - window[0].begin


def _fetched(file: ObjectFile, window: list[_Span]) -> Array:
    """The bytes of a window; of a sparse piece its elements, in C order."""
    tensor, row, _, begin, _ = window[0]
    if len(window) == 1 and window[0].is_sparse:
        piece = tensor.sources.chosen(np.array([row]))
        values: Array = np.empty((piece.stops - piece.starts)[0], f"V{tensor.itemsize}")
        read_piece(piece.of_holders(lambda _: file)[0], (0,) * values.ndim, values)
        return values
    data = np.empty(_window_bytes(window), np.uint8)
    file.read_into(memoryview(data), begin)  # type: ignore[arg-type]
    return data


def compare_replicas(name: str, shape: tuple[int, ...], replicas: Pieces, box: Bounds, values: Array) -> int:
    """Compare what was read of a box with the further pieces that hold some of it, and give the bytes that these took.

    Args:
        name: The tensor.
        shape: Its shape.
        replicas: The further pieces, of files and objects.
        box: The box.
        values: Its elements.

    Raises:
        ParseError: if they disagree; names the tensor, and the first element of a replica that differs.
        OSError: if a replica cannot be read.
    """
    read, itemsize = 0, values.dtype.itemsize
    for replica in replicas.clipped(box):
        # A scalar stays one, which numpy's ascontiguousarray makes an array of one element.
        ours = np.array(values[within(replica.box, box)], order="C")
        theirs = np.empty(ours.shape, f"V{itemsize}")
        read_piece(replica, (0,) * ours.ndim, theirs)
        replica.holder.check()
        read += theirs.nbytes
        differs = np.flatnonzero(ours.reshape(-1).view(np.uint8) != theirs.reshape(-1).view(np.uint8))
        if len(differs):
            index = np.unravel_index(int(differs[0]) // itemsize, ours.shape) if ours.ndim else ()
            at = map(operator.add, map(int, index), (start for start, _ in replica.box))
            element = int(np.ravel_multi_index(tuple(at), shape)) if ours.ndim else 0
            raise ParseError(differing_replica(name, shape, replica.holder.path, element))
    return read
