"""The cuts of tensors into tasks, by arithmetic, so that a million tasks take no more memory than one.

A large tensor is cut into slabs that are one run of its C order: as many rows as fit of the first dim whose rows fit in
a task, and one position at a time of the dims before it. So a task's part of any shard is one range of the shard's
file. Small tensors that follow one another share a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from ...._types import Numbers
from ....pieces import Bounds, Pieces
from .tables import RunRow, table_of

__all__ = ["FileGrid", "SharedGrid", "TaskGrid", "shared_runs", "task_runs"]

#: The most pieces of the small tensors in one task, not counting the first tensor: a pickled task must stay small.
_MOST_PIECES = 1024


def task_runs(tensors: Iterable[tuple[tuple[int, ...], int, int]], task_bytes: int) -> Numbers:
    """Return the runs of equal tasks that tensors are cut into: int64 of shape (runs, 7), the columns of `RunRow`.

    Args:
        tensors: For each tensor its shape, the bytes of an element, and the number of its pieces in all files.
        task_bytes: The most bytes of tensors that a task writes.
    """
    runs: list[RunRow] = []
    first = end = held = pieces = 0
    for number, (shape, itemsize, count) in enumerate(tensors):
        size = math.prod(shape) * itemsize
        if size == 0:
            continue
        if held and (held + size > task_bytes or pieces + count > _MOST_PIECES):
            runs.append(RunRow(first, end, 1, 0, 0, 0, held))
            held = 0
        if size > task_bytes:
            runs.append(_slabs(number, shape, itemsize, task_bytes))
            continue
        if not held:
            first, pieces = number, 0
        end, held, pieces = number + 1, held + size, pieces + count
    if held:
        runs.append(RunRow(first, end, 1, 0, 0, 0, held))
    return np.array(runs, np.int64).reshape(len(runs), len(RunRow._fields))


class TaskGrid:
    """The tasks of tensors.

    Args:
        runs: One row per run of equal tasks, as `task_runs` gives them.
        tensor: Gives the shape of a tensor, and the bytes of an element.

    >>> tensors = [((4, 6), 1), ((2, 3, 5), 2), ((3,), 1)]
    >>> grid = TaskGrid(task_runs([(*each, 1) for each in tensors], 12), tensors.__getitem__)
    >>> len(grid), grid.boxes(1), grid.boxes(2)
    (9, [(0, ((2, 4), (0, 6)))], [(1, ((0, 1), (0, 1), (0, 5)))])
    >>> grid.bytes.tolist()
    [12, 12, 10, 10, 10, 10, 10, 10, 3]
    >>> grid.only_tasks(np.array([0, 1, 2])).tolist()
    [-1, -1, 8]
    """

    def __init__(self, runs: Numbers, tensor: Callable[[int], tuple[tuple[int, ...], int]]) -> None:
        self._runs, self._tensor = table_of("runs", runs), tensor
        self._firsts = np.concatenate([[0], np.cumsum(self._runs["tasks"])])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """Return the boxes that a task writes, each after its tensor's number."""
        at = int(np.searchsorted(self._firsts, task, side="right")) - 1
        run = RunRow._make(self._runs[at].item())
        dim, rows = run.dim, run.rows
        if not rows:
            shapes = ((tensor, self._tensor(tensor)[0]) for tensor in range(run.first, run.end))
            return [(tensor, tuple((0, size) for size in shape)) for tensor, shape in shapes if 0 not in shape]
        shape, box = self._tensor(run.first)[0], []
        outer, slab = divmod(task - int(self._firsts[at]), -(-shape[dim] // rows))
        for size in reversed(shape[:dim]):
            outer, position = divmod(outer, size)
            box.append((position, position + 1))
        box.reverse()
        box.append((slab * rows, min((slab + 1) * rows, shape[dim])))
        return [(run.first, (*box, *((0, size) for size in shape[dim + 1 :])))]

    @property
    def bytes(self) -> Numbers:
        """The bytes of tensors that each task writes."""
        runs = np.repeat(np.arange(len(self._runs)), self._runs["tasks"])
        rows = self._runs["rows"][runs]
        sizes: Numbers = self._runs["nbytes"][runs]
        if rows.any():
            length = self._runs["length"][runs]
            slab = (np.arange(len(runs)) - self._firsts[runs]) % np.maximum(-(-length // np.maximum(rows, 1)), 1)
            sizes = sizes * np.where(rows > 0, np.minimum(rows, length - slab * rows), 1)
        return sizes

    def only_tasks(self, tensors: Numbers) -> Numbers:
        """Return, for each of these tensors, the task that has all of it; -1 if several tasks have parts of it."""
        at = np.searchsorted(self._runs["first"], tensors, side="right") - 1
        return np.where(self._runs["rows"][at] == 0, self._firsts[at], -1)

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to `found`, for each task, the bytes that its boxes have in common with pieces of a tensor."""
        at = int(np.searchsorted(self._runs["first"], tensor, side="right")) - 1
        run = RunRow._make(self._runs[at].item())
        begin, (shape, itemsize) = int(self._firsts[at]), self._tensor(tensor)
        if not run.rows:
            found[begin] += int(pieces.volumes.sum()) * itemsize
            return
        for box in pieces.boxes:
            shared = np.full(1, itemsize, np.int64)
            for dim, (start, stop) in enumerate(box.tolist()):
                if dim > run.dim:
                    shared = shared * (stop - start)
                    continue
                step = run.rows if dim == run.dim else 1
                edges = np.arange(0, shape[dim], step)
                lengths = np.clip(np.minimum(edges + step, stop) - np.maximum(edges, start), 0, None)
                shared = np.multiply.outer(shared, lengths).reshape(-1)
            found[begin : begin + run.tasks] += shared


class FileGrid:
    """The tasks of a plan in which each task makes one file.

    Args:
        sizes: The bytes of tensors that each task writes.
        boxes: Returns the boxes of a task, each after its tensor's number.
        written: Returns, for a tensor, the pieces that are written, whose holders are the tasks, and the bytes of an
            element.

    >>> held = Pieces.dense(([0, 1], 0), np.array([[[0, 0], [2, 6]], [[2, 0], [4, 6]]]), 1)
    >>> grid = FileGrid(np.array([12, 12]), lambda task: [(0, held[task].box)], lambda tensor: (held, 1))
    >>> len(grid)
    2
    >>> found = np.zeros(2, np.int64)
    >>> grid.add_overlaps(0, Pieces.dense((0, 0), np.array([[[1, 0], [3, 4]]]), 1), found)
    >>> found.tolist()
    [4, 4]
    """

    def __init__(
        self,
        sizes: Numbers,
        boxes: Callable[[int], list[tuple[int, Bounds]]],
        written: Callable[[int], tuple[Pieces, int]],
    ) -> None:
        self.bytes, self.boxes, self._written = sizes, boxes, written

    def __len__(self) -> int:
        return len(self.bytes)

    def only_tasks(self, tensors: Numbers) -> Numbers:
        """Return -1 for each of these tensors: any number of tasks may have parts of it."""
        return np.full(len(tensors), -1)

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to `found`, for each task, the bytes that its boxes have in common with pieces of a tensor."""
        written, itemsize = self._written(tensor)
        for task, volume in written.shared(pieces):
            np.add.at(found, task, volume * itemsize)


#: The number of slabs that make up a task of a `SharedGrid`, about.
_SLABS = 8


def shared_runs(tensors: Iterable[tuple[tuple[int, ...], int, int]], task_bytes: int) -> Numbers:
    """Return the slabs that a `SharedGrid` is made of, of tensors in the order of the files; see `task_runs`."""
    return task_runs(tensors, max(task_bytes // _SLABS, 1))


class SharedGrid:
    """The tasks of a plan that write consecutive slabs of all tensors, in the order in which the files have them.

    So what a task writes of a file is mostly one run, however small tensors are.

    Args:
        slabs: The slabs and small tensors that tasks are made of; its tensors are numbered in that order.
        order: The number in the plan of each of these.
        task_bytes: The most bytes of tensors that a task writes.

    >>> shapes = [(1, 8), (6, 8)]
    >>> runs = shared_runs([((6, 8), 1, 1), ((1, 8), 1, 1)], 64)
    >>> grid = SharedGrid(TaskGrid(runs, lambda at: (shapes[1 - at], 1)), np.array([1, 0]), 64)
    >>> [grid.boxes(task) for task in range(len(grid))], grid.bytes.tolist()
    ([[(1, ((0, 6), (0, 8))), (0, ((0, 1), (0, 8)))]], [56])
    >>> found = np.zeros(1, np.int64)
    >>> grid.add_overlaps(0, Pieces.dense((0, 0), np.array([[[0, 0], [1, 3]]]), 1), found)
    >>> found.tolist()
    [3]
    """

    def __init__(self, slabs: TaskGrid, order: Numbers, task_bytes: int) -> None:
        self._slabs, self._order = slabs, order
        self._places = np.argsort(order)
        sizes = slabs.bytes
        before, total = np.cumsum(sizes) - sizes, int(sizes.sum())
        tasks = -(-total // max(task_bytes - task_bytes // _SLABS, 1))
        numbers = before // max(-(-total // max(tasks, 1)), 1)
        self._firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        self._ends = np.append(self._firsts[1:], len(sizes))
        self.bytes = self._sums(sizes)

    def _sums(self, of_slabs: Numbers) -> Numbers:
        found: Numbers = np.add.reduceat(of_slabs, self._firsts) if len(self._firsts) else of_slabs[:0]
        return found

    def __len__(self) -> int:
        return len(self._firsts)

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """Return the boxes that a task writes, each after its tensor's number."""
        found: list[tuple[int, Bounds]] = []
        for slab in range(int(self._firsts[task]), int(self._ends[task])):
            for place, box in self._slabs.boxes(slab):
                tensor = int(self._order[place])
                joined = _joined(found[-1][1], box) if found and found[-1][0] == tensor else None
                if joined is None:
                    found.append((tensor, box))
                else:
                    found[-1] = tensor, joined
        return found

    def only_tasks(self, tensors: Numbers) -> Numbers:
        """Return, for each of these tensors, the task that has all of it; -1 if it is of several slabs."""
        slabs = self._slabs.only_tasks(self._places[tensors])
        return np.where(slabs < 0, -1, np.searchsorted(self._firsts, slabs, side="right") - 1)

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to `found`, for each task, the bytes that its boxes have in common with pieces of a tensor."""
        of_slabs = np.zeros(len(self._slabs), np.int64)
        self._slabs.add_overlaps(int(self._places[tensor]), pieces, of_slabs)
        found += self._sums(of_slabs)


def _joined(first: Bounds, second: Bounds) -> Bounds | None:
    """Return two boxes as one box, if the second continues the first along a dim; else `None`."""
    different = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(different) != 1 or first[different[0]][1] != second[different[0]][0]:
        return None
    (dim,) = different
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def _slabs(number: int, shape: tuple[int, ...], itemsize: int, task_bytes: int) -> RunRow:
    row, dim = math.prod(shape) * itemsize, -1
    while row > task_bytes and dim < len(shape) - 1:
        dim += 1
        row //= shape[dim]
    # As many slabs as needed, as equal as possible.
    slabs = -(-shape[dim] // max(task_bytes // row, 1))
    rows = -(-shape[dim] // slabs)
    tasks = math.prod(shape[:dim]) * -(-shape[dim] // rows)
    return RunRow(number, number + 1, tasks, dim, shape[dim], rows, row)
