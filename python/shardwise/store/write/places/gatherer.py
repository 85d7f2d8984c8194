"""The tensors of a task, assembled from their sources and compared with their replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress, groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...._types import Array
from ....errors import ParseError
from ....pieces import Bounds, LocatedPiece, Pieces, dense_strides
from ...data.engine import LEAST_MEMORY, CopyJob, CopyReport, JobTensor, tensors_of
from ...data.mapped import MappedFiles
from ...data.same_files import SameFiles
from ...data.sources import Source
from ..forms.forms import differing_replica
from .fetch import compare_replicas, fetch_pieces

__all__ = ["BufferBox", "GatherOutcome", "Gatherer"]

#: Bytes of the engine's buffers, besides the memory that it copies into.
_BUDGET = 4 * 2**20


class GatherOutcome(NamedTuple):
    """The outcome of a gatherer's copies for one task.

    Attributes:
        digests: The digest of each of the task's own destination pieces, in order.
        crcs: The CRC-32 of each; empty if not asked for.
        differs: Whether one of the task's own destinations, compared instead of written, has other contents.
        bytes_written: Bytes written to files.
    """

    digests: list[int]
    crcs: list[int]
    differs: bool
    bytes_written: int


class BufferBox(NamedTuple):
    """A box of a tensor, and its place in a buffer.

    Attributes:
        position: The position of the tensor among the tensors of a task.
        tensor: The number of the tensor in the plan.
        box: The box, in elements of the tensor.
        at: The byte of the buffer at which it begins.
        strides: The bytes from one element to the next in the buffer, per dim.
    """

    position: int
    tensor: int
    box: Bounds
    at: int
    strides: tuple[int, ...]


def _totals(progress: Callable[[int], object] | None) -> Callable[[int, int], object] | None:
    """Turn a function that takes the bytes added since its last call into one that takes the bytes done and in all."""
    if progress is None:
        return None
    last = 0

    def told(done: int, _: int) -> None:
        nonlocal last
        progress(done - last)
        last = done

    return told


class Gatherer:
    """Assembles the tensors of a task, and compares them with their replicas.

    Args:
        program: The tensors, as int64 numbers of a program of the engine. The first destinations are the task's own;
            the destinations after them are `compared`.
        own: The number of the task's own destinations.
        sources: Files, objects and arrays.
        compared: The files and objects that hold replicas.
        names: The names of the tensors that have replicas, by position.

    Attributes:
        bytes_read: Bytes that were read from files and objects.
        compares: Whether replicas are compared.

    Raises:
        ParseError: if a source has changed after the plan was made.
        OSError: if the state of a source cannot be read.
    """

    def __init__(
        self,
        program: bytes,
        own: int,
        sources: Sequence[Source],
        compared: Sequence[Source],
        names: Mapping[int, str],
    ) -> None:
        self._program, self._own, self._sources, self._compared, self._names = program, own, sources, compared, names
        self._held: list[tuple[JobTensor, Pieces]] = []
        self._watched: tuple[MappedFiles, SameFiles] | None = None
        self.bytes_read = 0
        self.compares = True
        for source in (*sources, *compared):
            source.check()

    def watch(self) -> None:
        """Note the state of the sources, so that `check` sees whether one is replaced or written to meanwhile."""
        files = SameFiles(each.name for each in (*self._sources, *self._compared) if each.name)
        self._watched = MappedFiles(each.array for each in self._sources if each.array is not None), files

    def check(self) -> None:
        """Refuse, with ParseError, sources that were replaced or written to after `watch`."""
        for each in self._watched or ():
            each.check()

    def into_files(
        self,
        destinations: Callable[[CopyJob], object],
        memory: int,
        threads: int | None,
        *,
        sync: bool,
        progress: Callable[[int], object] | None = None,
    ) -> GatherOutcome:
        """Write all tensors of the task into destinations.

        Args:
            destinations: A function that adds the destinations to a job of the engine.
            memory: Bytes for buffers.
            threads: The number of threads that read and copy; one per core if `None`.
            sync: Whether files are on the disk before this returns.
            progress: Called now and then with the bytes that were done since the last call.

        Raises:
            LayoutError: if the memory is too little.
            ParseError: if replicas disagree, or a source has changed.
            OSError: if a file cannot be read or written, or a store fails.
        """
        given = np.frombuffer(self._program, np.int64)
        if any(each.is_fetched for each in (*self._sources, *self._compared)):
            tensors = list(tensors_of(given.copy()))
            arrays, nbytes = self._fetched(tensors, self._names, self._own, memory)
            job = CopyJob.of_tensors(tensors)
        else:
            tensors, arrays, nbytes = [], [], 0
            job = CopyJob.of_program(self._program)
        self._add_holders(job, arrays, destinations)
        done = job.run(
            budget=max(memory - nbytes, LEAST_MEMORY), threads=threads, sync=sync, progress=_totals(progress)
        )
        if not tensors and (self._compared or done.differences):
            tensors = list(tensors_of(given))
        return self._seen(done, tensors, self._names, self._own, nbytes)

    def into_memory(
        self, buffer: npt.NDArray[np.uint8], blocks: Sequence[BufferBox], threads: int | None
    ) -> GatherOutcome:
        """Copy boxes of tensors into a buffer of bytes.

        Raises:
            ParseError, OSError: as for `into_files`.
        """
        if not self._held:
            for tensor in tensors_of(np.frombuffer(self._program, np.int64)):
                others = tensor.targets.chosen(np.flatnonzero(tensor.targets.numbers >= self._own))
                self._held.append((tensor, others.moved(others.numbers + 1 - self._own)))
        tensors: list[JobTensor] = []
        names: dict[int, str] = {}
        # The parts of one array may interleave there, as those of one tensor may.
        for _, together in groupby(blocks, lambda block: block.tensor):
            sources, own, again = [], [], []
            for block in together:
                tensor, others = self._held[block.position]
                sources.append(tensor.sources.clipped(block.box).rows)
                own.append(Pieces.by_number([LocatedPiece(block.box, 0, block.at, block.strides)], len(block.box)).rows)
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
            source.read_by(job)
        for array in arrays:
            job.read_array(array)
        destinations(job)
        for other in self._compared:
            other.compared_by(job)

    def _fetched(
        self, tensors: Sequence[JobTensor], names: Mapping[int, str], own: int, memory: int | None
    ) -> tuple[list[Array], int]:
        """Fetch the pieces that are in objects; return arrays with them, and the bytes fetched.

        The tensors' rows are changed to point to the arrays. Replicas in objects are compared here; their rows then
        have no effect on the copies.
        """
        files = [each.fetched for each in self._sources]
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
            target = Pieces.dense((0, 0), np.stack([piece.starts, piece.stops], 1), tensor.itemsize)
            job = CopyJob.of_tensors([tensor._replace(wanted=0, targets=target)])
            self._add_holders(job, arrays, lambda job, ours=ours: job.write_array(ours))  # type: ignore[misc]
            job.run(budget=_BUDGET, threads=1)
            self.bytes_read += compare_replicas(names[number], tensor.shape, replica, replica[0].box, ours)
        return arrays, nbytes

    def _seen(
        self, done: CopyReport, tensors: Sequence[JobTensor], names: Mapping[int, str], own: int, nbytes: int
    ) -> GatherOutcome:
        """Return the outcome of the copies.

        Raises:
            ParseError: if a replica differs.
        """
        self.bytes_read += done.bytes_read + nbytes
        ends = np.cumsum([len(tensor.targets) for tensor in tensors])
        for piece, element in done.differences:
            number = int(np.searchsorted(ends, piece, side="right"))
            tensor = tensors[number]
            holder = int(tensor.targets.numbers[piece - int(ends[number]) + len(tensor.targets)])
            if holder < own:
                return GatherOutcome([], [], True, 0)
            path = self._compared[holder - own].path
            raise ParseError(differing_replica(names[number], tensor.shape, path, element))
        if not self._compared:
            return GatherOutcome(done.digests, done.crcs, False, done.bytes_written)
        is_own = np.concatenate([tensor.targets.numbers < own for tensor in tensors]).tolist()
        return GatherOutcome(
            list(compress(done.digests, is_own)), list(compress(done.crcs, is_own)), False, done.bytes_written
        )
