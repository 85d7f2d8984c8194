"""What a plan would read and copy, and about how long that would take."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from .... import _core
from ....errors import ParseError
from ...files import opened_again
from .plan import WritePlan

__all__ = ["bytes_to_read", "estimated_seconds", "runs_to_copy"]

#: The bytes of a sample, and of each of its reads.
_SAMPLE, _BLOCK = 16 * 2**20, 2**20


def bytes_to_read(plan: WritePlan) -> int:
    """Bytes of the tensors in the sources, and of the replicas that are compared with them."""
    return sum(
        sum(pieces.volumes.tolist()) * tensor.itemsize
        for tensor in plan.tensors
        for pieces in (tensor.sources, tensor.replicas)
    )


def runs_to_copy(plan: WritePlan) -> int:
    """The number of copies, each of bytes that are contiguous in a source and in a file."""
    return sum(tensor.sources.runs_into(tensor.targets, tensor.itemsize) for tensor in plan.tensors)


def estimated_seconds(plan: WritePlan, folder: Path, to_read: int, *, sync: bool) -> float | None:
    """About how long it takes to carry out a plan of files: as a sample of it, copied to a file that has no name.

    What is not copied as it is goes through a file first. `None` if nothing can be written in the place, or read.
    """
    spooled = sum(source.nbytes for source in plan.sources if isinstance(source, np.ndarray))
    written, room = plan.nbytes, _core.free_space(folder) // 4
    most = min(_SAMPLE, room, max(written, 1))
    if most < 1:
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as sample:
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
    noted: Iterator[Any] = (source for source in plan.sources if not isinstance(source, np.ndarray))
    files = [source for source in noted if source.end > source.begin]
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
