"""What a plan would read and copy, and about how long that would take."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import numpy.typing as npt

from ... import _core
from ...errors import ParseError
from ..files import opened_again
from .plan import PlannedTensor, WritePlan, split_rows
from .task import SourceFile

__all__ = ["bytes_to_read", "estimated_seconds", "runs_to_copy"]

#: Pairs of pieces that are looked at at a time, and so few that none of them is left out.
_PAIRS, _FEW = 1 << 18, 16
#: The bytes of a sample, and of each of its reads.
_SAMPLE, _BLOCK = 16 * 2**20, 2**20

Rows = npt.NDArray[np.int64]


def bytes_to_read(plan: WritePlan) -> int:
    """Bytes of the tensors in the sources, and of the replicas that are compared with them."""
    total = 0
    for tensor in plan.tensors:
        for rows in (tensor.sources, tensor.replicas):
            _, starts, stops, _ = split_rows(rows, len(tensor.shape))
            total += sum((stops - starts).prod(axis=1).tolist()) * tensor.itemsize
    return total


def runs_to_copy(plan: WritePlan) -> int:
    """The number of copies, each of bytes that are contiguous in a source and in a file."""
    return sum(
        _runs(tensor, tensor.sources[sources], tensor.targets[targets])
        for tensor in plan.tensors
        for sources, targets in _pairs(tensor)
    )


def _pairs(tensor: PlannedTensor) -> Iterator[tuple[Rows, Rows]]:
    """Numbers of the sources and targets that may have elements in common, by their extents along one dim."""
    rank, count = len(tensor.shape), len(tensor.sources) * len(tensor.targets)
    if count <= _FEW:
        yield np.divmod(np.arange(count), len(tensor.targets))
        return
    _, starts, stops, _ = split_rows(tensor.sources, rank)
    dim = int(np.argmax([len(np.unique(starts[:, dim])) for dim in range(rank)]))
    order = np.argsort(starts[:, dim], kind="stable")
    begins, longest = starts[order, dim], int((stops - starts)[:, dim].max())
    _, wanted, ends, _ = split_rows(tensor.targets, rank)
    first = np.searchsorted(begins, wanted[:, dim] - longest, side="right")
    counts = np.maximum(np.searchsorted(begins, ends[:, dim], side="left") - first, 0)
    befores = np.cumsum(counts) - counts
    at = 0
    while at < len(counts):
        end = max(int(np.searchsorted(befores, befores[at] + _PAIRS, side="right")) - 1, at + 1)
        end = len(counts) if befores[-1] + counts[-1] - befores[at] <= _PAIRS else end
        targets = np.repeat(np.arange(at, end), counts[at:end])
        yield order[np.arange(len(targets)) + befores[at] - befores[targets] + first[targets]], targets
        at = end


def _runs(tensor: PlannedTensor, sources: Rows, targets: Rows) -> int:
    rank = len(tensor.shape)
    _, starts, stops, strides = split_rows(sources, rank)
    _, wanted, ends, dense = split_rows(targets, rank)
    extents = np.minimum(stops, ends) - np.maximum(starts, wanted)
    meet = (extents > 0).all(axis=1)
    extents, strides, dense = extents[meet], strides[meet], dense[meet]
    length = np.full(len(extents), tensor.itemsize, np.int64)
    runs, joined = np.ones_like(length), np.ones(len(extents), bool)
    for dim in reversed(range(rank)):
        is_cut = extents[:, dim] > 1
        joined &= ~is_cut | ((strides[:, dim] == length) & (dense[:, dim] == length))
        length = np.where(joined, length * extents[:, dim], length)
        runs = np.where(joined, runs, runs * extents[:, dim])
    return sum(runs.tolist())


def estimated_seconds(plan: WritePlan, to_read: int, *, sync: bool) -> float | None:
    """About how long it takes to carry out a plan of files: as a sample of it, copied to a file that has no name.

    What is not copied as it is goes through a file first. `None` if nothing can be written in the place, or read.
    """
    spooled = sum(source.nbytes for source in plan.sources if isinstance(source, np.ndarray))
    written, room = plan.nbytes, _core.free_space(plan.path.parent) // 4
    most = min(_SAMPLE, room, max(written, 1))
    if most < 1:
        return None
    try:
        with tempfile.TemporaryFile(dir=plan.path.parent) as sample:
            began = time.perf_counter()
            blocks = list(_sample(plan, most))
            read_in = time.perf_counter() - began
            is_read = bool(blocks)
            blocks = blocks or [os.urandom(min(_BLOCK, most))] * max(1, most // _BLOCK)
            began = time.perf_counter()
            for block in blocks:
                sample.write(block)
            sample.flush()
            if sync:
                os.fsync(sample.fileno())
            written_in = time.perf_counter() - began
    except (OSError, ParseError):
        return None
    size = sum(map(len, blocks))
    if not is_read:
        read_in = written_in
    return ((to_read + spooled) * read_in + (written + spooled) * written_in) / size


def _sample(plan: WritePlan, most: int) -> Iterator[bytes]:
    """Blocks of the sources' tensors, as far apart as can be."""
    files = [source for source in plan.sources if isinstance(source, SourceFile) and source.end > source.begin]
    total = sum(file.end - file.begin for file in files)
    most = min(most, total)
    count = -(-most // _BLOCK)
    ends = np.cumsum([file.end - file.begin for file in files])
    for number in range(count):
        at = (total - min(_BLOCK, most)) * number // max(count - 1, 1)
        place, left = int(np.searchsorted(ends, at, side="right")), min(_BLOCK, most)
        begin = files[place].end - (int(ends[place]) - at)
        while left and place < len(files):
            file = files[place]
            begin = max(begin, file.begin)
            with closing(opened_again(file.path, file.size, file.times)) as source:
                data = source.read(begin, min(left, file.end - begin))
            yield data
            left, place, begin = left - len(data), place + 1, 0
