"""The plan of a new checkpoint, cut into tasks, each made on demand.

Tensors are cut by arithmetic, so that a million tasks take no more memory than one. A large tensor is cut into slabs
that are one run of its C order: as many rows as fit of the first dim whose rows fit in a task, and one position at a
time of the dims before it. So a task's part of any shard is one range of the shard's file. Small tensors that follow
one another share a task.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ...._arguments import integer
from ...._text import bytes_text
from ....errors import LayoutError
from ....pieces import NO_PIECES, Bounds, Pieces, repeated
from ...data.block_lists import Listed
from ...data.engine import JobTensor
from ..forms.files import NO_DIGESTS, WrittenFile
from ..forms.forms import WRITTEN
from ..places import place_for
from ..places.place import Place
from ..places.task import Task
from .data import DATA, REPLICAS, SIZE, SLOTS, PlanData, PlannedTensor, said_by

__all__ = [
    "FileGrid",
    "PlannedTensor",
    "StretchGrid",
    "TaskGrid",
    "WritePlan",
    "share_ends",
    "shares_of",
    "stretch_runs",
    "task_runs",
]

#: The most pieces that the small tensors of one task have, besides the first: a task must stay small too.
_MOST_PIECES = 1024

Numbers = npt.NDArray[np.int64]


class TaskRun(NamedTuple):
    """Consecutive tasks of one tensor, or one task of several tensors: the columns of what `task_runs` gives.

    Attributes:
        first: The number of the first tensor.
        end: One past the number of the last tensor.
        tasks: The number of tasks.
        dim: The dim that is cut into slabs; tasks have one position of each dim before it.
        length: The size of that dim.
        rows: Positions along that dim that a task has; 0 if it has all of its tensors.
        nbytes: The bytes of one such position, or of all tensors.
    """

    first: int
    end: int
    tasks: int
    dim: int
    length: int
    rows: int
    nbytes: int


#: A row of the table, by the names of its columns.
_ROW = np.dtype([(name, np.int64) for name in TaskRun._fields])


def task_runs(tensors: Iterable[tuple[tuple[int, ...], int, int]], task_bytes: int) -> Numbers:
    """Cut tensors into tasks: int64 of shape (runs, 7), with the columns of `TaskRun`.

    Args:
        tensors: For each, the shape, the bytes of an element, and the number of pieces involved.
        task_bytes: The most bytes of tensors that a task writes.
    """
    runs: list[TaskRun] = []
    first = end = held = pieces = 0
    for number, (shape, itemsize, count) in enumerate(tensors):
        size = math.prod(shape) * itemsize
        if size == 0:
            continue
        if held and (held + size > task_bytes or pieces + count > _MOST_PIECES):
            runs.append(TaskRun(first, end, 1, 0, 0, 0, held))
            held = 0
        if size > task_bytes:
            runs.append(_slabs(number, shape, itemsize, task_bytes))
            continue
        if not held:
            first, pieces = number, 0
        end, held, pieces = number + 1, held + size, pieces + count
    if held:
        runs.append(TaskRun(first, end, 1, 0, 0, 0, held))
    return np.array(runs, np.int64).reshape(len(runs), len(TaskRun._fields))


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
    """

    def __init__(self, runs: Numbers, tensor: Callable[[int], tuple[tuple[int, ...], int]]) -> None:
        self._runs, self._tensor = np.ascontiguousarray(runs, np.int64).view(_ROW).reshape(-1), tensor
        self._firsts = np.concatenate([[0], np.cumsum(self._runs["tasks"])])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def boxes(self, task: int) -> list[tuple[int, Bounds]]:
        """The boxes that a task writes, each with its tensor's number."""
        at = int(np.searchsorted(self._firsts, task, side="right")) - 1
        run = TaskRun._make(self._runs[at].item())
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
        """The bytes that each task writes."""
        runs = np.repeat(np.arange(len(self._runs)), self._runs["tasks"])
        rows = self._runs["rows"][runs]
        sizes: Numbers = self._runs["nbytes"][runs]
        if rows.any():
            length = self._runs["length"][runs]
            slab = (np.arange(len(runs)) - self._firsts[runs]) % np.maximum(-(-length // np.maximum(rows, 1)), 1)
            sizes = sizes * np.where(rows > 0, np.minimum(rows, length - slab * rows), 1)
        return sizes

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to each task the bytes that it shares with pieces of a tensor."""
        at = int(np.searchsorted(self._runs["first"], tensor, side="right")) - 1
        run = TaskRun._make(self._runs[at].item())
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
    """The tasks of a plan that make a file each.

    Args:
        sizes: The bytes of tensors that each writes.
        boxes: Gives the boxes of a task, each with its tensor's number.
        written: Gives, for a tensor, the pieces that are written, whose holders are the tasks, and the bytes of
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


#: The bytes of the slabs of which stretches are made, as a part of those of a task.
_SLABS = 8


def stretch_runs(tensors: Iterable[tuple[tuple[int, ...], int, int]], task_bytes: int) -> Numbers:
    """Cut tensors, in the order in which files have them, into the slabs of a `StretchGrid`; see `task_runs`."""
    return task_runs(tensors, max(task_bytes // _SLABS, 1))


class StretchGrid:
    """The tasks of a plan that write a stretch of all tensors each, in the order in which the files have them.

    So what a task writes of a file is mostly one run, however small tensors are.

    Args:
        slabs: The slabs and small tensors that stretches are made of; its tensors are numbered in that order.
        order: The number in the plan of each of these.
        task_bytes: The most bytes of tensors that a task writes.

    >>> shapes = [(1, 8), (6, 8)]
    >>> runs = stretch_runs([((6, 8), 1, 1), ((1, 8), 1, 1)], 64)
    >>> grid = StretchGrid(TaskGrid(runs, lambda at: (shapes[1 - at], 1)), np.array([1, 0]), 64)
    >>> [grid.boxes(task) for task in range(len(grid))], grid.bytes.tolist()
    ([[(1, ((0, 6), (0, 8))), (0, ((0, 1), (0, 8)))]], [56])
    >>> found = np.zeros(1, np.int64)
    >>> grid.add_overlaps(0, Pieces.dense(np.array([[0, 0]]), np.array([[[0, 0], [1, 3]]]), 1), found)
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
        """The boxes that a task writes, each with its tensor's number."""
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

    def add_overlaps(self, tensor: int, pieces: Pieces, found: Numbers) -> None:
        """Add to each task the bytes that it shares with pieces of a tensor."""
        of_slabs = np.zeros(len(self._slabs), np.int64)
        self._slabs.add_overlaps(int(self._places[tensor]), pieces, of_slabs)
        found += self._sums(of_slabs)


def _joined(first: Bounds, second: Bounds) -> Bounds | None:
    """Two boxes as one, if the second follows the first along a dim."""
    different = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(different) != 1 or first[different[0]][1] != second[different[0]][0]:
        return None
    (dim,) = different
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def shares_of(plan: WritePlan, least: Callable[[int], int]) -> Numbers | None:
    """Say what tasks make of files: int64 of shape (shares, 5), the task's number and what `WritePlan.shares` gives.

    What a task writes of a file is one run of bytes, or a few. A run is a part of the object, if it has the least bytes
    of a part. What is too short for that is put aside, with as much of the run after it as makes a part of both; so is
    the beginning of a run after bytes that are known only at the end.

    Args:
        plan: The plan whose tasks make parts of objects.
        least: Gives the least bytes of a part of a file of so many bytes.

    Returns:
        The shares by task, file and place; `None` if a task writes bytes of a file that are no runs, or no task writes
        some of its arrays, which are zeros.
    """
    if plan.has_arrays:
        _, _, starts, sizes, data = (plan.column("files", 5, column) for column in range(5))
        if (sizes - starts != data).any():
            return None
    found = [np.zeros((0, 4), np.int64)]
    for task in range(len(plan.grid)):
        rows = _file_runs(plan, task)
        if rows is None:
            return None
        found.append(rows)
    shares = np.concatenate(found)
    task, file, begin, end = shares.T
    order = np.lexsort((begin, file))
    sizes = np.array(plan.sizes, np.int64)
    leasts = np.array([least(size) for size in sizes.tolist()], np.int64)[file]
    length, is_last = end - begin, end == sizes[file]
    is_short = length < leasts
    # What is before each run: the end of another, which may be too short; nothing; or what no task writes.
    before = np.full(len(shares), -1)
    follows = (file[order][1:] == file[order][:-1]) & (begin[order][1:] == end[order][:-1])
    before[order[1:][follows]] = order[:-1][follows]
    after_short = np.where(before >= 0, is_short[before], begin > 0)
    taken = np.where((length >= 2 * leasts) | (is_last & (length > leasts)), leasts, length)
    taken = np.where(is_short & ~(is_last & ~after_short), length, np.where(after_short, taken, 0))
    return np.column_stack([shares, begin + taken])


def share_ends(shares: Numbers, tasks: int) -> Numbers:
    """Return the end of each task's shares, among those of all."""
    return np.searchsorted(shares[:, 0], np.arange(tasks), side="right").astype(np.int64)


def _file_runs(plan: WritePlan, task: int) -> Numbers | None:
    """The runs of files that a task writes: int64 of shape (runs, 4), its number, the file, first byte and end."""
    runs: list[list[int]] = []
    spans = []
    for number, box in plan.grid.boxes(task):
        tensor = plan.tensors[number]
        targets = tensor.targets.clipped(box)
        begins, ends = targets.spans(tensor.itemsize)
        spans += np.column_stack([targets.numbers, begins, ends, targets.volumes * tensor.itemsize]).tolist()
    held = 0
    for file, begin, end, nbytes in sorted(spans):
        if runs and runs[-1][1] == file and begin <= runs[-1][3]:
            runs[-1][3], held = max(runs[-1][3], end), held + nbytes
        else:
            if runs and held != runs[-1][3] - runs[-1][2]:
                return None
            runs.append([task, file, begin, end])
            held = nbytes
    if runs and held != runs[-1][3] - runs[-1][2]:
        return None
    for run in runs:
        # What is before the first tensor goes along, if it is known.
        run[2] = 0 if run[2] == plan.files[run[1]].start and plan.known_before(run[1]) else run[2]
    return np.array(runs, np.int64).reshape(-1, 4)


def _slabs(number: int, shape: tuple[int, ...], itemsize: int, task_bytes: int) -> TaskRun:
    row, dim = math.prod(shape) * itemsize, -1
    while row > task_bytes and dim < len(shape) - 1:
        dim += 1
        row //= shape[dim]
    # As many slabs as needed, as equal as possible.
    slabs = -(-shape[dim] // max(task_bytes // row, 1))
    rows = -(-shape[dim] // slabs)
    tasks = math.prod(shape[:dim]) * -(-shape[dim] // rows)
    return TaskRun(number, number + 1, tasks, dim, shape[dim], rows, row)


_Plan = TypeVar("_Plan", bound="WritePlan")


class WritePlan(PlanData):
    """A new checkpoint as data, and as tasks that any process can do, in any order.

    Attributes:
        obstacle: Why its tasks cannot be run by themselves; empty if they can.
    """

    obstacle: str = ""
    _place: Place | None = None
    _grid: TaskGrid | FileGrid | StretchGrid | None = None
    _cut: tuple[int, list[int]] | None = None
    _written_bytes: Numbers | None = None

    @property
    def place(self) -> Place:
        """The place of the checkpoint."""
        if self._place is None:
            self._place = place_for(self)
        return self._place

    def with_place(self: _Plan, place: Place) -> _Plan:
        """Give the same plan for a place that is made for it otherwise, as with other limits of a store."""
        made = copy.copy(self)
        made._place, made._grid, made._written_bytes = place, None, None
        return made

    def check_room(self) -> None:
        """Raise OSError if the destination's file system does not have room for it.

        Files that an interrupted run has left there make room; a store does not say how much it has.
        """
        none = [0] * len(self.tensors)
        # As long as what will be known.
        files = (WrittenFile(file, NO_DIGESTS, hashlib.sha256().hexdigest()) for file in self.files)
        self.place.check_room(lambda: map(len, self.texts_of(none, files).values() if self.is_folder else ()))

    def check_tasks(self) -> None:
        """Raise TypeError if tasks cannot be run by themselves, because something must be put together first."""
        if self.obstacle:
            raise TypeError(self.obstacle)

    @property
    def grid(self) -> TaskGrid | FileGrid | StretchGrid:
        """The cut of the plan into tasks."""
        if self._grid is None:
            if self.place.takes_whole_files:
                data = self.column("files", 5, DATA)
                self._grid = FileGrid(data, self._boxes_of_file, self._written)
            else:
                runs = self.numbers("runs", 0, self.sections["runs"].nbytes // 8).reshape(-1, 7)
                order = self.numbers("order", 0, self.sections["order"].nbytes // 8)

                def tensor(place: int) -> tuple[tuple[int, ...], int]:
                    found = self.tensors[int(order[place]) if self.is_shared else place]
                    return found.shape, found.itemsize

                grid = TaskGrid(runs, tensor)
                self._grid = StretchGrid(grid, order, self.task_bytes) if self.is_shared else grid
        return self._grid

    def shares(self, number: int) -> Numbers:
        """Return a task's shares of files, int64 of shape (shares, 4): the file, the first byte, one past the last.

        The fourth is the first byte that is in a part of its own; what is before it is put aside.
        """
        with said_by(self._file):
            first, end = [0, *self.numbers("share_ends", max(number - 1, 0), number + 1).tolist()][-2:]
            rows = self.numbers("shares", 4 * first, 4 * end).reshape(-1, 4)
            for file, begin, stop, part in rows.tolist():
                if not (0 <= file < len(self.files) and 0 <= begin <= part <= stop <= self.files[file].size):
                    raise ValueError("it has a share that is not in its file")
        return rows

    @property
    def most_shared(self) -> int:
        """The most bytes that a task holds of files that tasks share; what is put aside it has twice."""
        with said_by(self._file):
            begins, stops, parts = (self.column("shares", 4, column) for column in (1, 2, 3))
            is_in = (begins >= 0) & (begins <= parts) & (parts <= stops)
            if not is_in.all() or float(stops.sum(dtype=float)) > 2.0**61:
                raise ValueError("it has a share that is not in its file")
            nbytes = stops - begins + parts - begins
            ends = np.append(0, np.cumsum(nbytes))[self.numbers("share_ends", 0, len(self.tasks))]
            return int(np.diff(ends, prepend=0).max(initial=0))

    def known_before(self, file: int) -> bytes:
        """Return the bytes before the first tensor of a file, if they do not depend on the tasks; else no bytes."""
        held = self.files[file]
        return b"" if held.needs_values else held.before(0)[1]

    @property
    def written_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of tensors that each task writes, as often as files hold them."""
        if not self.has_arrays or self.place.takes_whole_files:
            return self.grid.bytes
        if self._written_bytes is None:
            self._written_bytes = np.zeros(len(self.grid), np.int64)
            for number, tensor in enumerate(self.tensors):
                if 0 not in tensor.shape:
                    self.grid.add_overlaps(number, tensor.targets, self._written_bytes)
        return self._written_bytes

    def _boxes_of_file(self, number: int) -> list[tuple[int, Bounds]]:
        return [(slot.tensor, slot.box) for slot in self.files[number].slots if slot.end > slot.begin]

    def repeated_in(self, number: int) -> frozenset[int]:
        """Return positions among a file's non-empty boxes: of those that this file or an earlier one already has."""
        if not self.has_arrays:
            return frozenset()
        before, row = self._file_rows(number)
        again = np.frombuffer(self.sections["again"].read(before[SLOTS], row[SLOTS]), np.bool_)
        return frozenset(np.flatnonzero(again[self.files[number].slots.nbytes > 0]).tolist())

    def _written(self, number: int) -> tuple[Pieces, int]:
        tensor = self.tensors[number]
        return tensor.targets, tensor.itemsize

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks, each made when it is asked for."""
        return Listed("task", len(self.grid), lambda begin, end: map(self.task, range(begin, end)))

    def task(self, number: int) -> Task:
        """Make a task."""
        self.check_tasks()
        with said_by(self._file):
            made = _Making(self)
            if self.place.takes_whole_files:
                made.open_file(number)
            for tensor, box in self.grid.boxes(number):
                made.add(tensor, box)
            return made.task(number)

    def written_by(self, number: int) -> tuple[Sequence[tuple[int, int, int, int]], frozenset[int]]:
        """The ranges that a task writes, and which of them hold what others hold; see `Task.written` and `Task.again`.

        A task that makes a whole file is not made for that, as its sources would be looked at.
        """
        if not self.place.takes_whole_files:
            task = self.task(number)
            return task.written, task.again
        file = self.files[number]
        kept = (slot for slot in file.slots if slot.end > slot.begin)
        ranges = [(number, slot.tensor, file.start + slot.begin, file.start + slot.end) for slot in kept]
        return ranges, self.repeated_in(number)

    def bytes_of(self, numbers: Sequence[int]) -> Numbers:
        """The bytes that each of these tasks writes: of an object, all."""
        sizes = self.column("files", 5, SIZE) if self.place.takes_whole_files else self.written_bytes
        found: Numbers = sizes[np.asarray(numbers, np.int64)]
        return found

    def part(self, part: int, parts: int) -> range:
        """Give the numbers of the tasks of one part, counted from 1: consecutive tasks, with about the same bytes.

        Raises:
            LayoutError: if there is no such part.
        """
        if not 1 <= part <= parts:
            raise LayoutError(f"part is {part} of {parts}; parts are counted from 1")
        return range(*self._edges(parts)[part - 1 : part + 1])

    def _edges(self, parts: int) -> list[int]:
        if self._cut is not None and self._cut[0] == parts:
            return self._cut[1]
        sizes = self.grid.bytes
        total = int(sizes.sum())
        # A task is of the part in which its middle is, so that as many parts as tasks of like bytes have one each.
        middles = np.cumsum(sizes) - sizes + sizes // 2
        cuts = np.array([total * part // parts for part in range(parts)], np.int64)
        edges: list[int] = np.searchsorted(middles, cuts).tolist()
        # For the last number of parts that was asked for.
        self._cut = parts, [0, *edges[1:], len(sizes)]
        return self._cut[1]

    def part_bytes(self, parts: int) -> npt.NDArray[np.int64]:
        """The bytes that each part reads and writes: int64 of shape (parts, 2).

        Raises:
            LayoutError: if `parts` is not positive.
        """
        if integer("parts", parts) < 1:
            raise LayoutError(f"parts is {parts}; it must be at least 1")
        written, read = self.written_bytes, self.grid.bytes.copy()
        for number in np.flatnonzero(np.diff(self.column("tensors", 8, REPLICAS), prepend=0)).tolist():
            tensor = self.tensors[number]
            if 0 not in tensor.shape:
                self.grid.add_overlaps(number, tensor.replicas, read)
        edges = self._edges(parts)
        sums = [np.concatenate([[0], np.cumsum(each)])[edges] for each in (read, written)]
        return np.stack([np.diff(each) for each in sums], axis=1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}: {len(self.tasks)} tasks, {bytes_text(self.nbytes)}>"


class _Making:
    """A task that is put together."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._sources: dict[int, int] = {}
        self._compared: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._parts: list[tuple[PlannedTensor, Pieces, Pieces, Pieces]] = []
        self._ranges: list[tuple[int, int, int, int]] = []
        self._again: list[int] = []
        #: The number of the file that it makes as a whole, if it does.
        self._only: int | None = None

    def open_file(self, number: int) -> None:
        """Say that it writes one file, whether that has bytes of tensors or not."""
        self._files[number], self._only = 0, number
        self._again += sorted(self._plan.repeated_in(number))

    def add(self, number: int, box: Bounds) -> None:
        tensor = self._plan.tensors[number]
        sources = tensor.sources.clipped(box).numbered(self._sources)
        targets = tensor.targets.clipped(box)
        if self._only is not None:
            targets = targets.chosen(np.flatnonzero(targets.numbers == self._only))
        targets = targets.numbered(self._files)
        replicas = tensor.replicas.clipped(box).numbered(self._compared) if tensor.has_replicas else NO_PIECES
        begins, ends = targets.offsets, targets.offsets + targets.volumes * tensor.itemsize
        ranges = zip(targets.numbers.tolist(), begins.tolist(), ends.tolist(), strict=True)
        if self._plan.has_arrays and self._only is None:
            self._again += (np.flatnonzero(repeated(targets)) + len(self._ranges)).tolist()
        self._ranges += [(file, number, begin, end) for file, begin, end in ranges]
        self._parts.append((tensor, sources, targets, replicas))

    def _in_shares(self, targets: Pieces, shares: Numbers) -> Pieces:
        """Targets whose holders are a task's shares of files, and not the files."""
        files = np.array(list(self._files), np.int64)[targets.numbers][:, None]
        at = targets.offsets[:, None]
        is_in = (shares[:, 0] == files) & (shares[:, 1] <= at) & (at < shares[:, 2])
        if not (is_in.sum(axis=1) == 1).all():
            raise ValueError("it has a task that writes what is in none of its shares")
        rows = targets.rows.copy()
        rows[:, 0] = is_in.argmax(axis=1)
        rows[:, 1] -= shares[rows[:, 0], 1]
        return Pieces(rows)

    def task(self, number: int) -> Task:
        plan = self._plan
        program: list[npt.NDArray[np.int64]] = []
        names: list[tuple[int, str]] = []
        shares = plan.shares(number) if plan.is_shared else None
        for position, (tensor, sources, targets, others) in enumerate(self._parts):
            if shares is not None:
                targets = self._in_shares(targets, shares)
            if len(others):
                names.append((position, tensor.name))
                others.rows[:, 0] += len(self._files) if shares is None else len(shares)
                targets = Pieces(np.concatenate([targets.rows, others.rows]))
            wanted = 1 + 2 * WRITTEN[plan.form].has_crcs
            program.append(JobTensor(tensor.itemsize, wanted, tensor.shape, sources, targets).program())
        return Task(
            plan.digest,
            number,
            plan.place.sink(number),
            tuple((file, plan.files[file].name, plan.files[file].size) for file in self._files),
            tuple(self._ranges),
            tuple(plan.sources[holder] for holder in self._sources),
            tuple(plan.sources[holder] for holder in self._compared),
            tuple(names),
            b"".join(each.tobytes() for each in program),
            tuple(self._again),
        )
