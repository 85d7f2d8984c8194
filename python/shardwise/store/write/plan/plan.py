"""The plan of a new checkpoint, cut into tasks, each made on demand."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...._arguments import integer
from ...._text import bytes_text, counted
from ...._types import Numbers
from ....errors import LayoutError
from ....pieces import NO_PIECES, Bounds, Pieces, repeats
from ...data.block_lists import Listed
from ...data.engine import JobTensor
from ..forms.files import NO_DIGESTS, WrittenFile
from ..forms.forms import WRITTEN
from ..places import place_for
from ..places.place import FileShare, Place
from ..places.task import Task
from .data import CheckpointTables, TargetTensor, said_by
from .grids import FileGrid, SharedGrid, TaskGrid

__all__ = [
    "CheckpointTasks",
    "TargetTensor",
]

#: The number of tensors whose boxes are summed up together.
_TOGETHER = 256

_SelfTasks = TypeVar("_SelfTasks", bound="CheckpointTasks")


class CheckpointTasks(CheckpointTables):
    """A new checkpoint as data, and as tasks that any process can do, in any order.

    Attributes:
        obstacle: Why its tasks cannot be run by themselves; empty if they can.
    """

    obstacle: str = ""
    _place: Place | None = None
    _grid: TaskGrid | FileGrid | SharedGrid | None = None
    _cut: tuple[int, list[int]] | None = None
    _written_bytes: Numbers | None = None

    @property
    def place(self) -> Place:
        """The place of the checkpoint: a folder, or a store."""
        if self._place is None:
            self._place = place_for(self)
        return self._place

    def with_place(self: _SelfTasks, place: Place) -> _SelfTasks:
        """Return the same plan with another place, such as one with other limits of a store."""
        made = copy.copy(self)
        made._place, made._grid, made._cut, made._written_bytes = place, None, None, None
        return made

    def check_room(self) -> None:
        """Raise OSError if the destination's file system does not have room for it.

        Files that an interrupted run has left there count as free space; a store does not state its free space.
        """
        none = [0] * len(self.tensors)
        # As long as what will be known.
        files = (WrittenFile(file, NO_DIGESTS, hashlib.sha256().hexdigest()) for file in self.files)
        self.place.check_room(lambda: map(len, self.texts_of(none, files).values() if self.is_folder else ()))

    def check_tasks(self) -> None:
        """Refuse, with TypeError, a plan whose tasks cannot be run alone, because tensors must be converted first."""
        if self.obstacle:
            raise TypeError(self.obstacle)

    @property
    def grid(self) -> TaskGrid | FileGrid | SharedGrid:
        """The cut of the plan into tasks."""
        if self._grid is None:
            if self.place.takes_whole_files:
                self._grid = FileGrid(self.column("files", "data"), self._boxes_of_file, self._written)
            else:
                runs = self.numbers("runs", 0, self.sections["runs"].nbytes // 8)
                order = self.numbers("order", 0, self.sections["order"].nbytes // 8)

                def tensor(place: int) -> tuple[tuple[int, ...], int]:
                    found = self.tensors[int(order[place]) if self.is_shared else place]
                    return found.shape, found.itemsize

                grid = TaskGrid(runs, tensor)
                self._grid = SharedGrid(grid, order, self.task_bytes) if self.is_shared else grid
        return self._grid

    def shares(self, number: int) -> list[FileShare]:
        """Return the shares of files that a task makes."""
        with said_by(self._file):
            first, end = [0, *self.numbers("share_ends", max(number - 1, 0), number + 1).tolist()][-2:]
            found = list(map(FileShare._make, self.rows("shares", first, end).tolist()))
            for file, begin, stop, part in found:
                if not (0 <= file < len(self.files) and 0 <= begin <= part <= stop <= self.files[file].size):
                    raise ValueError("it has a share that is not in its file")
        return found

    @property
    def most_shared(self) -> int:
        """The most bytes of shared files that a task holds in memory; its remainder counts twice."""
        with said_by(self._file):
            begins, stops, parts = (self.column("shares", column) for column in ("begin", "end", "part"))
            is_in = (begins >= 0) & (begins <= parts) & (parts <= stops)
            if not is_in.all() or float(stops.sum(dtype=float)) > 2.0**61:
                raise ValueError("it has a share that is not in its file")
            nbytes = stops - begins + parts - begins
            ends = np.append(0, np.cumsum(nbytes))[self.numbers("share_ends", 0, len(self.tasks))]
            return int(np.diff(ends, prepend=0).max(initial=0))

    def known_before(self, file: int) -> bytes:
        """Return the bytes before the first tensor of a file; no bytes if they depend on the tensors' values."""
        held = self.files[file]
        return b"" if held.needs_values else held.before(0)[1]

    @property
    def written_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of tensors that each task writes; replicas in several files count several times."""
        if not self.has_arrays or self.place.takes_whole_files:
            return self.grid.bytes
        if self._written_bytes is None:
            self._written_bytes = np.zeros(len(self.grid), np.int64)
            ends = np.append(0, self.column("tensors", "targets"))
            for begin in range(0, len(self.tensors), _TOGETHER):
                own = ends[begin : begin + _TOGETHER + 1]
                numbers = np.repeat(np.arange(begin, begin + len(own) - 1), np.diff(own))
                sizes = self.slot_table.bytes(numbers, self.rows("targets", int(own[0]), int(own[-1]))["place"])
                tasks = self.grid.only_tasks(numbers)
                np.add.at(self._written_bytes, tasks[tasks >= 0], sizes[tasks >= 0])
                # By a set: np.unique imports numpy.ma, which takes as long as to make many tasks.
                for number in sorted(set(numbers[tasks < 0].tolist())):
                    self.grid.add_overlaps(number, self.tensors[number].targets, self._written_bytes)
        return self._written_bytes

    def _boxes_of_file(self, number: int) -> list[tuple[int, Bounds]]:
        return [(slot.tensor, slot.box) for slot in self.files[number].slots if slot.end > slot.begin]

    def repeated_in(self, number: int) -> frozenset[int]:
        """Return the positions, among a file's non-empty boxes, of those that repeat a box of an earlier slot."""
        if not self.has_arrays:
            return frozenset()
        before, row = self._file_rows(number)
        again = np.frombuffer(self.sections["again"].read(before.slots, row.slots), np.bool_)
        return frozenset(np.flatnonzero(again[self.files[number].slots.nbytes > 0]).tolist())

    def _written(self, number: int) -> tuple[Pieces, int]:
        tensor = self.tensors[number]
        return tensor.targets, tensor.itemsize

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks, each made when it is asked for."""
        return Listed("task", len(self.grid), lambda begin, end: map(self.task, range(begin, end)))

    def task(self, number: int) -> Task:
        """Return the task of this number."""
        self.check_tasks()
        with said_by(self._file):
            made = _Making(self)
            if self.place.takes_whole_files:
                made.open_file(number)
            for tensor, box in self.grid.boxes(number):
                made.add(tensor, box)
            return made.task(number)

    def written_by(self, number: int) -> tuple[Sequence[tuple[int, int, int, int]], frozenset[int]]:
        """Return the ranges that a task writes, and the positions of repeated ones; see `Task.written`, `Task.again`.

        If tasks make whole files, this is found without making the task, which would look at its sources.
        """
        if not self.place.takes_whole_files:
            task = self.task(number)
            return task.written, task.again
        file = self.files[number]
        kept = (slot for slot in file.slots if slot.end > slot.begin)
        ranges = [(number, slot.tensor, file.start + slot.begin, file.start + slot.end) for slot in kept]
        return ranges, self.repeated_in(number)

    def bytes_of(self, numbers: Sequence[int]) -> Numbers:
        """Return the bytes that each of these tasks writes; if tasks make whole objects, the sizes of the objects."""
        sizes = self.column("files", "size") if self.place.takes_whole_files else self.written_bytes
        found: Numbers = sizes[np.asarray(numbers, np.int64)]
        return found

    def part(self, part: int, parts: int) -> range:
        """Return the numbers of the tasks of one part, counted from 1: consecutive tasks, with about equal bytes.

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
        """Return the bytes that each part reads and writes: int64 of shape (parts, 2).

        Raises:
            LayoutError: if `parts` is not positive.
        """
        if integer("parts", parts) < 1:
            raise LayoutError(f"parts is {parts}; it must be at least 1")
        written, read = self.written_bytes, self.grid.bytes.copy()
        for number in np.flatnonzero(np.diff(self.column("tensors", "replicas"), prepend=0)).tolist():
            tensor = self.tensors[number]
            if 0 not in tensor.shape:
                self.grid.add_overlaps(number, tensor.replicas, read)
        edges = self._edges(parts)
        sums = [np.concatenate([[0], np.cumsum(each)])[edges] for each in (read, written)]
        return np.stack([np.diff(each) for each in sums], axis=1)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {str(self.path)!r}: {counted(len(self.tasks), 'task')}, {bytes_text(self.nbytes)}>"
        )


class _Making:
    """A task while boxes are added to it."""

    def __init__(self, plan: CheckpointTasks) -> None:
        self._plan = plan
        self._sources: dict[int, int] = {}
        self._compared: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._parts: list[tuple[TargetTensor, Pieces, Pieces, Pieces]] = []
        self._ranges: list[tuple[int, int, int, int]] = []
        self._again: list[int] = []
        #: The number of the only file that the task makes; `None` if it writes parts of files.
        self._only: int | None = None

    def open_file(self, number: int) -> None:
        """Make this file the only one that the task writes, even if it has no bytes of tensors."""
        self._files[number], self._only = 0, number
        self._again += sorted(self._plan.repeated_in(number))

    def add(self, number: int, box: Bounds) -> None:
        tensor = self._plan.tensors[number]
        is_whole = box == tuple((0, size) for size in tensor.shape)
        sources, targets = (each.filled if is_whole else each.clipped(box) for each in (tensor.sources, tensor.targets))
        sources = sources.numbered(self._sources)
        if self._only is not None:
            targets = targets.chosen(np.flatnonzero(targets.numbers == self._only))
        targets = targets.numbered(self._files)
        replicas = tensor.replicas.clipped(box).numbered(self._compared) if tensor.has_replicas else NO_PIECES
        begins, ends = targets.offsets, targets.offsets + targets.volumes * tensor.itemsize
        ranges = zip(targets.numbers.tolist(), begins.tolist(), ends.tolist(), strict=True)
        if self._plan.has_arrays and self._only is None:
            self._again += (np.flatnonzero(repeats(targets)) + len(self._ranges)).tolist()
        self._ranges += [(file, number, begin, end) for file, begin, end in ranges]
        self._parts.append((tensor, sources, targets, replicas))

    def _in_shares(self, targets: Pieces, shares: Sequence[FileShare]) -> Pieces:
        """Return the targets with the number of the task's share as their holder, in place of the file's number."""
        share_files, begins, ends, _ = np.array(shares, np.int64).reshape(-1, 4).T
        files = np.array(list(self._files), np.int64)[targets.numbers][:, None]
        at = targets.offsets[:, None]
        is_in = (share_files == files) & (begins <= at) & (at < ends)
        if not (is_in.sum(axis=1) == 1).all():
            raise ValueError("one of its tasks writes outside its shares")
        share = is_in.argmax(axis=1)
        return targets.moved(share, -begins[share])

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
                own = len(self._files) if shares is None else len(shares)
                targets = Pieces(np.concatenate([targets.rows, others.moved(others.numbers + own).rows]))
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
