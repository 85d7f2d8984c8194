"""How tensors are cut into tasks: by arithmetic, so that a million tasks take no more memory than one.

A large tensor is cut into slabs that are one run of its C order: as many rows as fit of the first dim whose rows fit in
a task, and one position at a time of the dims before it. So a task's part of any shard is one range of the shard's
file. Small tensors that follow one another share a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...boxes import Bounds
from ...pieces import Pieces

__all__ = ["FileGrid", "TaskGrid", "task_runs"]

#: The most pieces that the small tensors of one task have, besides the first: a task must stay small too.
_MOST_PIECES = 1024


#: Of consecutive tasks, which are of one tensor, or one task of several: the first tensor and one past the last, the
#: number of tasks, the dim that is cut and its length, how many rows of it a task has (0 if it has all of its tensors),
#: and the bytes of a row, or of all tensors.
_FIRST, _END, _TASKS, _DIM, _LENGTH, _ROWS, _BYTES = range(7)

Numbers = npt.NDArray[np.int64]


def task_runs(tensors: Iterable[tuple[tuple[int, ...], int, int]], task_bytes: int) -> Numbers:
    """Cut tensors into tasks: int64 of shape (runs, 7), each run consecutive tasks.

    Args:
        tensors: For each, the shape, the bytes of an element, and the number of pieces involved.
        task_bytes: How many bytes of tensors a task writes at most.
    """
    runs: list[list[int]] = []
    held = pieces = 0
    for number, (shape, itemsize, count) in enumerate(tensors):
        size = math.prod(shape) * itemsize
        if size == 0:
            continue
        if size > task_bytes:
            runs.append(_slabs(number, shape, itemsize, task_bytes))
            held = 0
        elif held and held + size <= task_bytes and pieces + count <= _MOST_PIECES:
            held, pieces = held + size, pieces + count
            runs[-1][_END], runs[-1][_BYTES] = number + 1, held
        else:
            runs.append([number, number + 1, 1, 0, 0, 0, size])
            held, pieces = size, count
    return np.array(runs, np.int64).reshape(len(runs), 7)


class TaskGrid:
    """The tasks of tensors.

    Args:
        runs: How they are cut; see `task_runs`.
        tensor: What gives the shape of a tensor, and the bytes of an element.

    >>> tensors = [((4, 6), 1), ((2, 3, 5), 2), ((3,), 1)]
    >>> grid = TaskGrid(task_runs([(*each, 1) for each in tensors], 12), tensors.__getitem__)
    >>> len(grid), grid.boxes(1), grid.boxes(2)
    (9, [(0, ((2, 4), (0, 6)))], [(1, ((0, 1), (0, 1), (0, 5)))])
    >>> grid.bytes.tolist()
    [12, 12, 10, 10, 10, 10, 10, 10, 3]
    """

    def __init__(self, runs: Numbers, tensor: Callable[[int], tuple[tuple[int, ...], int]]) -> None:
        self._runs, self._tensor = runs, tensor
        self._firsts = np.concatenate([[0], np.cumsum(runs[:, _TASKS])])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """The boxes that a task writes, each with its tensor's number."""
        at = int(np.searchsorted(self._firsts, task, side="right")) - 1
        first, end, _, dim, _, rows, _ = self._runs[at].tolist()
        if not rows:
            shapes = ((tensor, self._tensor(tensor)[0]) for tensor in range(first, end))
            return [(tensor, tuple((0, size) for size in shape)) for tensor, shape in shapes if 0 not in shape]
        shape, box = self._tensor(first)[0], []
        outer, slab = divmod(task - int(self._firsts[at]), -(-shape[dim] // rows))
        for size in reversed(shape[:dim]):
            outer, position = divmod(outer, size)
            box.append((position, position + 1))
        box.reverse()
        box.append((slab * rows, min((slab + 1) * rows, shape[dim])))
        return [(first, (*box, *((0, size) for size in shape[dim + 1 :])))]

    @property
    def bytes(self) -> Numbers:
        """The bytes that each task writes."""
        runs = np.repeat(np.arange(len(self._runs)), self._runs[:, _TASKS])
        rows = self._runs[runs, _ROWS]
        sizes: Numbers = self._runs[runs, _BYTES]
        if rows.any():
            length = self._runs[runs, _LENGTH]
            slab = (np.arange(len(runs)) - self._firsts[runs]) % np.maximum(-(-length // np.maximum(rows, 1)), 1)
            sizes = sizes * np.where(rows > 0, np.minimum(rows, length - slab * rows), 1)
        return sizes

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to each task the bytes that it shares with pieces of a tensor."""
        at = int(np.searchsorted(self._runs[:, _FIRST], tensor, side="right")) - 1
        _, _, tasks, cut, _, rows, _ = self._runs[at].tolist()
        begin, (shape, itemsize) = int(self._firsts[at]), self._tensor(tensor)
        if not rows:
            found[begin] += int(pieces.volumes.sum()) * itemsize
            return
        for box in pieces.boxes:
            shared = np.full(1, itemsize, np.int64)
            for dim, (start, stop) in enumerate(box.tolist()):
                if dim > cut:
                    shared = shared * (stop - start)
                    continue
                step = rows if dim == cut else 1
                edges = np.arange(0, shape[dim], step)
                lengths = np.clip(np.minimum(edges + step, stop) - np.maximum(edges, start), 0, None)
                shared = np.multiply.outer(shared, lengths).reshape(-1)
            found[begin : begin + tasks] += shared


class FileGrid:
    """The tasks of a plan that make a file each.

    Args:
        sizes: The bytes of tensors that each writes.
        boxes: What gives the boxes of a task, each with its tensor's number.
        written: What gives, for a tensor, the pieces that are written, whose holders are the tasks, and the bytes of
            an element.

    >>> held = Pieces.dense(np.array([[0, 0], [1, 0]]), np.array([[[0, 0], [2, 6]], [[2, 0], [4, 6]]]), 1)
    >>> grid = FileGrid(np.array([12, 12]), lambda task: [(0, held[task].box)], lambda tensor: (held, 1))
    >>> len(grid)
    2
    >>> found = np.zeros(2, np.int64)
    >>> grid.add_overlaps(0, Pieces.dense(np.array([[0, 0]]), np.array([[[1, 0], [3, 4]]]), 1), found)
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

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to each task the bytes that it shares with pieces of a tensor."""
        written, itemsize = self._written(tensor)
        for task, volume in written.shared(pieces):
            np.add.at(found, task, volume * itemsize)


def _slabs(number: int, shape: tuple[int, ...], itemsize: int, task_bytes: int) -> list[int]:
    row, dim = math.prod(shape) * itemsize, -1
    while row > task_bytes and dim < len(shape) - 1:
        dim += 1
        row //= shape[dim]
    # As many slabs as needed, as equal as possible.
    slabs = -(-shape[dim] // max(task_bytes // row, 1))
    rows = -(-shape[dim] // slabs)
    tasks = math.prod(shape[:dim]) * -(-shape[dim] // rows)
    return [number, number + 1, tasks, dim, shape[dim], rows, row]
