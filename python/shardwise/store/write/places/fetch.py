"""Reads that the I/O engine does not do: pieces of objects in stores, and replicas compared in memory.

Pieces that are near each other in an object are fetched as one range of bytes; the engine then finds the pieces in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from ...._text import bytes_text
from ...._threads import Threads
from ...._types import Array
from ....errors import LayoutError, ParseError
from ....pieces import Bounds, LocatedPiece, Pieces, within
from ...data.boxes import read_piece
from ...data.engine import CopyJob, JobTensor
from ...data.object_files import WINDOW, ObjectFile
from ..forms.forms import differing_replica

__all__ = ["compare_replicas", "fetch_pieces", "fetched_box", "memory_for"]

#: A range that is fetched may exceed the bytes of its pieces by a quarter and this many bytes.
_SLACK = 64 * 2**10


#: Bytes for the buffers of a job of the engine that assembles one box.
_BUDGET = 8 * 2**20
_NOTHING: Array = np.empty(0, np.uint8)


def memory_for(task_bytes: int) -> int:
    """Return the memory that suffices to run a task of so many bytes, for fetched ranges or two compared pieces."""
    return 4 * task_bytes + 2**20


class _PieceRange(NamedTuple):
    """A piece of an object: its tensor, its row there, its size, its first byte and the byte after its last."""

    tensor: JobTensor
    row: int
    nbytes: int
    begin: int
    end: int

    @property
    def is_sparse(self) -> bool:
        """True if a large part of the bytes between its first and last does not belong to the piece."""
        return self.end - self.begin > self.nbytes + self.nbytes // 4 + _SLACK


def fetch_pieces(
    tensors: Sequence[JobTensor], files: Sequence[ObjectFile | None], memory: int | None, besides: int
) -> tuple[list[Array], int]:
    """Fetch the pieces of tensors that are in objects into arrays, and change the tensors' rows to point to the arrays.

    Args:
        tensors: The tensors, changed in place; the new arrays get the numbers after those of all sources.
        files: The sources; `None` for a source that the engine reads.
        memory: Bytes for the arrays and `besides` together; `None` if the caller has bounded both.
        besides: Bytes that are needed for something else.

    Returns:
        The arrays, and the bytes that were fetched.

    Raises:
        LayoutError: if the memory is too little.
        ParseError: if an object is not what it was.
        OSError: if the store fails.
    """
    held: dict[int, list[_PieceRange]] = {}
    for tensor in tensors:
        begins, ends = tensor.sources.spans(tensor.itemsize)
        sizes = tensor.sources.volumes * tensor.itemsize
        columns = tensor.sources.numbers.tolist(), sizes.tolist(), begins.tolist(), ends.tolist()
        for row, (holder, nbytes, begin, end) in enumerate(zip(*columns, strict=True)):
            if files[holder] is not None:
                held.setdefault(holder, []).append(_PieceRange(tensor, row, nbytes, begin, end))
    objects = {holder: file for holder, file in enumerate(files) if file is not None}
    ranges = [(objects[holder], together) for holder, spans in held.items() for together in _ranges(spans)]
    total = sum(_range_bytes(together) for _, together in ranges)
    if memory is not None and total + besides > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)} for each worker; a task that fetches {bytes_text(total)} from a store "
            f"needs {bytes_text(total + besides)}: give more, or make the plan with smaller task_bytes"
        )
    if len(ranges) > 1:
        with Threads(WINDOW, "shardwise-fetch") as pool:
            arrays = list(pool.map(lambda item: _fetched(*item), ranges))
    else:
        arrays = [_fetched(*item) for item in ranges]
    for holder in held:
        objects[holder].check()
    for at, (_, together) in enumerate(ranges):
        for tensor, row, _, begin, _ in together:
            numbers = tensor.sources.rows[row]
            if len(together) == 1 and together[0].is_sparse:
                numbers[2 + 2 * tensor.sources.rank :] = arrays[at].strides
            numbers[0], numbers[1] = len(files) + at, begin - together[0].begin
    return arrays, total


def _ranges(spans: list[_PieceRange]) -> Iterator[list[_PieceRange]]:
    """Yield the pieces of one object in groups that are fetched as one range; a sparse piece is a group by itself."""
    together: list[_PieceRange] = []
    end = nbytes = 0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.is_sparse:
            yield [span]
            continue
        reach = max(end, span.end)
        total = nbytes + span.nbytes
        if together and reach - together[0].begin > total + total // 4 + _SLACK:
            yield together
            together, nbytes, reach = [], 0, span.end
        together.append(span)
        end, nbytes = reach, nbytes + span.nbytes
    if together:
        yield together


def _range_bytes(together: list[_PieceRange]) -> int:
    if len(together) == 1 and together[0].is_sparse:
        return together[0].nbytes
    return max(span.end for span in together) - together[0].begin


def _fetched(file: ObjectFile, together: list[_PieceRange]) -> Array:
    """Return the bytes of a range; of a sparse piece only its elements, in C order."""
    tensor, row, _, begin, _ = together[0]
    if len(together) == 1 and together[0].is_sparse:
        piece = tensor.sources.chosen(np.array([row]))
        values: Array = np.empty((piece.stops - piece.starts)[0], f"V{tensor.itemsize}")
        read_piece(piece.of_holders(lambda _: file)[0], (0,) * values.ndim, values)
        return values
    data = np.empty(_range_bytes(together), np.uint8)
    file.read_into(memoryview(data), begin)  # type: ignore[arg-type]
    return data


def fetched_box(pieces: Pieces, box: Bounds, itemsize: int) -> Array:
    """Return a box of a tensor, as raw elements of `itemsize` bytes, from pieces of files, objects and arrays.

    Raises:
        ParseError: if a file ends too early, or an object has changed.
        OSError: if a file or an object cannot be read.
    """
    shape = tuple(stop for _, stop in box)
    out: Array = np.empty([stop - start for start, stop in box], f"V{itemsize}")
    files = [None if isinstance(each, np.ndarray) or not each.is_fetched else each for each in pieces.holders]
    target = Pieces.by_number([LocatedPiece.dense(box, 0, 0, itemsize)], len(box))
    tensor = JobTensor(itemsize, 0, shape, Pieces(pieces.rows.copy()), target)
    arrays, _ = fetch_pieces([tensor], files, None, 0)
    job = CopyJob.of_tensors([tensor])
    with ExitStack() as opened:
        for holder in pieces.holders:
            if isinstance(holder, np.ndarray):
                job.read_array(holder)
            elif holder.is_fetched:
                job.read_array(_NOTHING)  # The numbers of those that follow stay the same.
            else:
                job.read_file(holder.path, holder.size, None, opened.enter_context(holder.descriptor()))
        for array in arrays:
            job.read_array(array)
        job.write_array(out)
        job.run(budget=_BUDGET)
    for holder in pieces.holders:
        if not isinstance(holder, np.ndarray):
            holder.check()
    return out


def compare_replicas(name: str, shape: tuple[int, ...], replicas: Pieces, box: Bounds, values: Array) -> int:
    """Compare a box with the replicas of its elements, and return the bytes of the replicas that were read.

    Args:
        name: The tensor's name, for messages.
        shape: The shape of the whole tensor.
        replicas: The pieces of files and objects that store elements again.
        box: The box that was read, in elements of the tensor.
        values: The elements of the box.

    Raises:
        ParseError: if elements differ; the message names the tensor, and the first element of a replica that differs.
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
