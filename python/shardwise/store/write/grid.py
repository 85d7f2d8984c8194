"""How tensors are cut into tasks: by arithmetic, so that a million tasks take no more memory than one.

A large tensor is cut into slabs that are one run of its C order: as many rows as fit of the first dim whose rows fit in
a task, and one position at a time of the dims before it. So a task's part of any shard is one range of the shard's
file. Small tensors that follow one another share a task.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..boxes import Bounds

__all__ = ["FileGrid", "TaskGrid"]

#: The most pieces that the small tensors of one task have, besides the first: a task must stay small too.
_MOST_PIECES = 1024


class _Run(NamedTuple):
    """Consecutive tasks: of one tensor, or one task of several tensors."""

    first: int
    #: One past the last tensor; more than one tensor only if `tasks` is 1.
    end: int
    #: The number of tasks.
    tasks: int
    #: The dim that is cut, and how many rows of it a task has.
    dim: int
    rows: int


class TaskGrid:
    """The tasks of tensors with these shapes.

    Args:
        tensors: For each, the shape, the bytes of an element, and the number of pieces involved.
        task_bytes: How many bytes of tensors a task writes at most.

    >>> grid = TaskGrid([((4, 6), 1, 2), ((2, 3, 5), 2, 1), ((3,), 1, 1)], 12)
    >>> len(grid), grid.boxes(1), grid.boxes(2)
    (9, [(0, ((2, 4), (0, 6)))], [(1, ((0, 1), (0, 1), (0, 5)))])
    >>> grid.bytes.tolist()
    [12, 12, 10, 10, 10, 10, 10, 10, 3]
    """

    def __init__(self, tensors: Sequence[tuple[tuple[int, ...], int, int]], task_bytes: int) -> None:
        self._shapes = [shape for shape, _, _ in tensors]
        self._itemsizes = [itemsize for _, itemsize, _ in tensors]
        self._runs: list[_Run] = []
        held = pieces = 0
        for number, (shape, itemsize, count) in enumerate(tensors):
            size = math.prod(shape) * itemsize
            if size == 0:
                continue
            if size > task_bytes:
                self._runs.append(_slabs(number, shape, itemsize, task_bytes))
                held = 0
            elif held and held + size <= task_bytes and pieces + count <= _MOST_PIECES:
                self._runs[-1] = self._runs[-1]._replace(end=number + 1)
                held, pieces = held + size, pieces + count
            else:
                self._runs.append(_Run(number, number + 1, 1, 0, 0))
                held, pieces = size, count
        ends = np.cumsum([run.tasks for run in self._runs], dtype=np.int64)
        self._firsts: list[int] = [0, *ends.tolist()]

    def __len__(self) -> int:
        return self._firsts[-1]

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """The boxes that a task writes, each with its tensor's number."""
        at = bisect_right(self._firsts, task) - 1
        run = self._runs[at]
        if not run.rows:
            return [
                (tensor, tuple((0, size) for size in self._shapes[tensor]))
                for tensor in range(run.first, run.end)
                if 0 not in self._shapes[tensor]
            ]
        shape, box = self._shapes[run.first], []
        outer, slab = divmod(task - self._firsts[at], -(-shape[run.dim] // run.rows))
        for size in reversed(shape[: run.dim]):
            outer, position = divmod(outer, size)
            box.append((position, position + 1))
        box.reverse()
        box.append((slab * run.rows, min((slab + 1) * run.rows, shape[run.dim])))
        return [(run.first, (*box, *((0, size) for size in shape[run.dim + 1 :])))]

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """The bytes that each task writes."""
        found = np.empty(len(self), np.int64)
        for run, begin in zip(self._runs, self._firsts, strict=False):
            if not run.rows:
                found[begin] = sum(
                    math.prod(self._shapes[tensor]) * self._itemsizes[tensor] for tensor in range(run.first, run.end)
                )
                continue
            shape = self._shapes[run.first]
            row = math.prod(shape[run.dim + 1 :]) * self._itemsizes[run.first]
            slabs = -(-shape[run.dim] // run.rows)
            part = found[begin : begin + run.tasks].reshape(-1, slabs)
            part[:] = run.rows * row
            part[:, -1] = (shape[run.dim] - (slabs - 1) * run.rows) * row
        return found

    def add_overlaps(self, tensor: int, boxes: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> None:
        """Add to each task the bytes that it shares with boxes of a tensor, int64 of shape (boxes, dims, 2)."""
        at = bisect_right([run.first for run in self._runs], tensor) - 1
        run, begin = self._runs[at], self._firsts[at]
        itemsize = self._itemsizes[tensor]
        if not run.rows:
            found[begin] += int((boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1).sum()) * itemsize
            return
        shape = self._shapes[tensor]
        for box in boxes:
            shared = np.full(1, itemsize, np.int64)
            for dim, (start, stop) in enumerate(box.tolist()):
                if dim > run.dim:
                    shared = shared * (stop - start)
                    continue
                rows = run.rows if dim == run.dim else 1
                edges = np.arange(0, shape[dim], rows)
                lengths = np.clip(np.minimum(edges + rows, stop) - np.maximum(edges, start), 0, None)
                shared = np.multiply.outer(shared, lengths).reshape(-1)
            found[begin : begin + run.tasks] += shared


class FileGrid:
    """The same, of tasks that make a file each: of these boxes of tensors.

    >>> grid = FileGrid([[(0, ((0, 2), (0, 6)))], [(0, ((2, 4), (0, 6))), (1, ((0, 3),))]], [1, 2])
    >>> len(grid), grid.boxes(0), grid.bytes.tolist()
    (2, [(0, ((0, 2), (0, 6)))], [12, 18])
    >>> grid.first_in(0, np.array([[[1, 3], [0, 6]], [[2, 3], [5, 6]]])).tolist()
    [0, 1]
    """

    def __init__(self, files: Sequence[Sequence[tuple[int, Bounds]]], itemsizes: Sequence[int]) -> None:
        self._files = files
        self._itemsizes = itemsizes
        self._held: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """The boxes that a task writes, each with its tensor's number."""
        return list(self._files[task])

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of tensors that each task writes."""
        sizes = [
            sum(math.prod(stop - start for start, stop in box) * self._itemsizes[tensor] for tensor, box in boxes)
            for boxes in self._files
        ]
        return np.array(sizes, np.int64)

    def first_in(self, tensor: int, boxes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The task that writes the first element of each box of a tensor, int64 of shape (boxes, dims, 2)."""
        if not self._held:
            found: dict[int, list[tuple[int, Bounds]]] = {}
            for task, written in enumerate(self._files):
                for number, box in written:
                    found.setdefault(number, []).append((task, box))
            for number, pairs in found.items():
                rank = len(pairs[0][1])
                sides = np.array([box for _, box in pairs], np.int64).reshape(len(pairs), rank, 2)
                self._held[number] = np.array([task for task, _ in pairs], np.int64), sides
        tasks, sides = self._held[tensor]
        corners = boxes[:, None, :, 0]
        inside = ((sides[..., 0] <= corners) & (corners < sides[..., 1])).all(axis=2)
        first: npt.NDArray[np.int64] = tasks[inside.argmax(axis=1)]
        return first

    def add_overlaps(self, tensor: int, boxes: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> None:
        """Add the bytes of each box of a tensor to the task that has its first element."""
        sizes = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1) * self._itemsizes[tensor]
        np.add.at(found, self.first_in(tensor, boxes), sizes)


def _slabs(number: int, shape: tuple[int, ...], itemsize: int, task_bytes: int) -> _Run:
    row, dim = math.prod(shape) * itemsize, -1
    while row > task_bytes and dim < len(shape) - 1:
        dim += 1
        row //= shape[dim]
    # As many slabs as needed, as equal as possible.
    slabs = -(-shape[dim] // max(task_bytes // row, 1))
    rows = -(-shape[dim] // slabs)
    return _Run(number, number + 1, math.prod(shape[:dim]) * -(-shape[dim] // rows), dim, rows)
