"""The shares of files that tasks make, for objects that are joined from the parts of several tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...._types import Numbers
from .plan import CheckpointTasks
from .tables import blank

__all__ = ["Shares", "file_shares"]


class Shares(NamedTuple):
    """The shares of all tasks, as a table of `FileShare`, and for each task the row after its last."""

    rows: npt.NDArray[np.void]
    ends: Numbers


class _FileRun(NamedTuple):
    """Consecutive bytes of a file."""

    file: int
    begin: int
    end: int


def file_shares(plan: CheckpointTasks, least: Callable[[int], int]) -> Shares | None:
    """Return the shares of files that the tasks of a plan make; `None` if tasks cannot share its files.

    A task writes one run of bytes of a file, or a few. A run of at least the least bytes of a part is uploaded as a
    part. Shorter runs go to the task's remainder; the run after a short one gives up its first bytes, as many as a part
    needs, to the remainder too. So does a run after bytes that are known only at the end.

    Args:
        plan: The plan whose tasks make parts of objects.
        least: Returns the least bytes of a part, for a file of this size.

    Returns:
        The shares by task, file and position; `None` if a task writes bytes of a file that are not runs, or no task
        writes some bytes of its arrays, which are zeros.
    """
    if plan.has_arrays:
        starts, sizes, data = (plan.column("files", column) for column in ("start", "size", "data"))
        if (sizes - starts != data).any():
            return None
    found: list[Numbers] = [np.zeros((0, 3), np.int64)]
    counts = []
    for task in range(len(plan.grid)):
        rows = _file_runs(plan, task)
        if rows is None:
            return None
        found.append(rows)
        counts.append(len(rows))
    file, begin, end = np.concatenate(found).T
    order = np.lexsort((begin, file))
    sizes = np.array(plan.sizes, np.int64)
    leasts = np.array([least(size) for size in sizes.tolist()], np.int64)[file]
    length, is_last = end - begin, end == sizes[file]
    is_short = length < leasts
    # What is before each run: the end of another, which may be too short; nothing; or what no task writes.
    before = np.full(len(file), -1)
    follows = (file[order][1:] == file[order][:-1]) & (begin[order][1:] == end[order][:-1])
    before[order[1:][follows]] = order[:-1][follows]
    after_short = np.where(before >= 0, is_short[before], begin > 0)
    taken = np.where((length >= 2 * leasts) | (is_last & (length > leasts)), leasts, length)
    taken = np.where(is_short & ~(is_last & ~after_short), length, np.where(after_short, taken, 0))
    table = blank("shares", len(file))
    table["file"], table["begin"], table["end"], table["part"] = file, begin, end, begin + taken
    return Shares(table, np.cumsum(counts, dtype=np.int64))


def _file_runs(plan: CheckpointTasks, task: int) -> Numbers | None:
    """Return the runs that a task writes: int64 of shape (runs, 3) with file, first byte, byte after the last."""
    runs: list[_FileRun] = []
    spans: list[list[int]] = []
    for number, box in plan.grid.boxes(task):
        tensor = plan.tensors[number]
        targets = tensor.targets.clipped(box)
        begins, ends = targets.spans(tensor.itemsize)
        spans += np.column_stack([targets.numbers, begins, ends, targets.volumes * tensor.itemsize]).tolist()
    held = 0
    for file, begin, end, nbytes in sorted(spans):
        if runs and runs[-1].file == file and begin <= runs[-1].end:
            runs[-1], held = runs[-1]._replace(end=max(runs[-1].end, end)), held + nbytes
        else:
            if runs and held != runs[-1].end - runs[-1].begin:
                return None
            runs.append(_FileRun(file, begin, end))
            held = nbytes
    if runs and held != runs[-1].end - runs[-1].begin:
        return None
    # What is before the first tensor goes along, if it is known.
    is_first = (run.begin == plan.files[run.file].start and plan.known_before(run.file) for run in runs)
    runs = [run._replace(begin=0) if is_it else run for run, is_it in zip(runs, is_first, strict=True)]
    return np.array(runs, np.int64).reshape(-1, 3)
