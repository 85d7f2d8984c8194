"""The plan of a new checkpoint: what is read and written, and where; and the tasks that do it, made on demand."""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..._arguments import integer
from ..._dtypes import Dtype
from ..._fork import cached_property
from ..._text import bytes_text
from ...errors import LayoutError, SizeOverflowError
from ..files import hidden_name
from ..objects import ObjectPath
from .files import TargetFile
from .grid import FileGrid, TaskGrid
from .task import CheckpointTask, SourceFile, SourceObject, program_of

__all__ = ["PlannedTensor", "WritePlan", "split_rows", "target_rows", "uncollected", "workplace_of"]


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor to write: its dtype and shape, and rows `[holder, offset, start…, stop…, strides…]` of its pieces.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        sources: Where its elements are.
        replicas: Where they are stored again, to be compared.
        targets: Where they go.
        is_object: Whether it is not a tensor, but a value that is copied as it is.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    sources: npt.NDArray[np.int64]
    replicas: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    is_object: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.bits // 8


class _Tasks(Sequence[CheckpointTask]):
    """The tasks of a plan, each made when it is asked for."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.grid)

    @overload
    def __getitem__(self, index: int) -> CheckpointTask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CheckpointTask]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = integer("index", index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"task {number} of {len(self)}")
        return self._plan.task(number % len(self))

    def __iter__(self) -> Iterator[CheckpointTask]:
        return map(self._plan.task, range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} tasks>"


_Plan = TypeVar("_Plan", bound="WritePlan")


class WritePlan:
    """A new checkpoint as data, and as tasks that any process can do, in any order.

    Attributes:
        path: The place of the new checkpoint.
        is_folder: Whether that is a folder; else it is the only file.
        task_bytes: The most bytes of tensors that a task writes.
        tensors: What is written.
        files: The files that it is written to.
        sizes: The bytes of each of them.
        sources: The files, or the arrays, that it is read from.
        texts: Further files of the folder, by name.
        manifest: The contents of the manifest, besides digests.
    """

    path: Path
    is_folder: bool
    task_bytes: int
    tensors: Sequence[PlannedTensor]
    files: Sequence[TargetFile]
    sizes: Sequence[int]
    sources: Sequence[SourceFile | SourceObject | npt.NDArray[Any]]
    texts: dict[str, bytes]
    manifest: dict[str, Any]
    grid: TaskGrid | FileGrid
    _cut: dict[int, list[int]]

    def __init__(self) -> None:
        raise TypeError(f"a {type(self).__name__} is made by plan_checkpoint, or read from a file by its load")

    @classmethod
    def _made(
        cls: type[_Plan],
        path: Path,
        *,
        is_folder: bool,
        task_bytes: int,
        tensors: Sequence[PlannedTensor],
        files: Sequence[TargetFile],
        sizes: Sequence[int],
        sources: Sequence[SourceFile | SourceObject | npt.NDArray[Any]],
        texts: dict[str, bytes],
        manifest: dict[str, Any],
    ) -> _Plan:
        self = cls.__new__(cls)
        self.path = path
        self.is_folder = is_folder
        self.task_bytes = task_bytes
        self.tensors = tensors
        self.files = files
        self.sizes = sizes
        self.sources = sources
        self.texts = texts
        self.manifest = manifest
        if self.is_in_store:
            boxes = [[(slot.tensor, slot.box) for slot in file.slots if slot.end > slot.begin] for file in files]
            self.grid = FileGrid(boxes, [each.itemsize for each in tensors])
        else:
            shapes = [(each.shape, each.itemsize, len(each.sources) + len(each.targets)) for each in tensors]
            self.grid = TaskGrid(shapes, task_bytes)
        self._cut = {}
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    @property
    def is_in_store(self) -> bool:
        """Whether the checkpoint is to be in an object store: then each task makes an object."""
        return isinstance(self.path, ObjectPath)

    @property
    def is_of_files(self) -> bool:
        """Whether everything comes from files and objects, so that any process can do a part of it."""
        return all(isinstance(source, (SourceFile, SourceObject)) for source in self.sources)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything in the plan, in hexadecimal; for a plan of arrays in memory a random number."""
        if not self.is_of_files:
            return secrets.token_hex(32)
        return hashlib.sha256(b"".join(self.body())).hexdigest()

    @property
    def tasks(self) -> Sequence[CheckpointTask]:
        """The tasks, each made when it is asked for."""
        return _Tasks(self)

    def task(self, number: int) -> CheckpointTask:
        """Make a task."""
        made = _Making(self)
        for tensor, box in self.grid.boxes(number):
            made.add(tensor, np.array(box, np.int64).reshape(-1, 2))
        return made.task(number)

    @property
    def workplace(self) -> Path:
        """The folder beside the checkpoint that holds what is not finished."""
        return workplace_of(self.path) / self.digest[:16]

    @property
    def folder(self) -> Path:
        """The folder that holds the unfinished files."""
        return self.workplace / "data"

    def part(self, part: int, parts: int) -> range:
        """Give the numbers of the tasks of one part, counted from 1: consecutive tasks, with about the same bytes.

        Raises:
            LayoutError: if there is no such part.
        """
        if not 1 <= part <= parts:
            raise LayoutError(f"part is {part} of {parts}; parts are counted from 1")
        return range(*self._edges(parts)[part - 1 : part + 1])

    def _edges(self, parts: int) -> list[int]:
        if parts in self._cut:
            return self._cut[parts]
        sizes = self.grid.bytes
        total = int(sizes.sum())
        # A task is of the part in which its middle is, so that as many parts as tasks of like bytes have one each.
        middles = np.cumsum(sizes) - sizes + sizes // 2
        cuts = np.array([total * part // parts for part in range(parts)], np.int64)
        edges: list[int] = np.searchsorted(middles, cuts).tolist()
        # For the last number of parts that was asked for.
        self._cut = {parts: [0, *edges[1:], len(sizes)]}
        return self._cut[parts]

    def part_bytes(self, parts: int) -> npt.NDArray[np.int64]:
        """The bytes that each part reads and writes: int64 of shape (parts, 2).

        Raises:
            LayoutError: if `parts` is not positive.
        """
        if integer("parts", parts) < 1:
            raise LayoutError(f"parts is {parts}; it must be at least 1")
        written = self.grid.bytes
        read = written.copy()
        for number, tensor in enumerate(self.tensors):
            if len(tensor.replicas) and 0 not in tensor.shape:
                _, starts, stops, _ = split_rows(tensor.replicas, len(tensor.shape))
                self.grid.add_overlaps(number, np.stack([starts, stops], axis=2), read)
        edges = self._edges(parts)
        sums = [np.concatenate([[0], np.cumsum(each)])[edges] for each in (read, written)]
        return np.stack([np.diff(each) for each in sums], axis=1)

    def body(self) -> tuple[bytes, bytes]:
        """Everything in the plan, as JSON and as little-endian int64: what is saved and digested."""
        said = {
            "path": str(self.path),
            "is_folder": self.is_folder,
            "task_bytes": self.task_bytes,
            "tensors": [
                [t.name, t.dtype.name, t.shape, t.is_object, len(t.sources), len(t.replicas)] for t in self.tensors
            ],
            "files": [[file.name, file.recipe(), len(file.slots)] for file in self.files],
            "sources": self.sources,
            "texts": {name: base64.b64encode(text).decode() for name, text in self.texts.items()},
            "manifest": self.manifest,
        }
        numbers: list[npt.NDArray[np.int64]] = []
        for each in self.tensors:
            numbers += [each.sources.reshape(-1), each.replicas.reshape(-1)]
        for file in self.files:
            flat: list[int] = []
            for tensor, box, begin, end in file.slots:
                flat += (tensor, begin, end)
                for side in box:
                    flat += side
            numbers.append(np.array(flat, np.int64))
        whole = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
        # Of what is in a store, the URL.
        return json.dumps(said, separators=(",", ":"), default=str).encode(), whole.astype("<i8").tobytes()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}: {len(self.tasks)} tasks, {bytes_text(self.nbytes)}>"


def workplace_of(path: Path) -> Path:
    """The folder beside a checkpoint in which each of its plans has a folder."""
    return path.with_name(f"{hidden_name(path.name)}.partial")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the collection of cyclic garbage, which would take as long as making hundreds of thousands of slots.

    None of them is in a cycle; garbage from other threads is collected afterwards.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def split_rows(rows: npt.NDArray[np.int64], rank: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Holders and offsets, starts, stops, and strides of rows of pieces."""
    return rows[:, :2], rows[:, 2 : 2 + rank], rows[:, 2 + rank : 2 + 2 * rank], rows[:, 2 + 2 * rank :]


def _clipped(
    rows: npt.NDArray[np.int64], box: npt.NDArray[np.int64], holders: dict[int, int], base: int
) -> npt.NDArray[np.int64]:
    """The parts of pieces that are within a box, their holders counted as they come, from `base` on."""
    _, starts, stops, _ = split_rows(rows, len(box))
    starts, stops = np.maximum(starts, box[:, 0]), np.minimum(stops, box[:, 1])
    meets = np.flatnonzero((starts < stops).all(axis=1))
    found = rows[meets]
    places, old, _, strides = split_rows(found, len(box))
    found[:, 1] += ((starts[meets] - old) * strides).sum(axis=1)
    found[:, 2 : 2 + len(box)] = starts[meets]
    found[:, 2 + len(box) : 2 + 2 * len(box)] = stops[meets]
    found[:, 0] = [base + holders.setdefault(holder, len(holders)) for holder in places[:, 0].tolist()]
    return found


class _Making:
    """A task that is put together."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._sources: dict[int, int] = {}
        self._compared: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._parts: list[tuple[PlannedTensor, npt.NDArray[np.int64], npt.NDArray[np.int64], Any]] = []
        self._ranges: list[tuple[int, int, int, int]] = []

    def add(self, number: int, box: npt.NDArray[np.int64]) -> None:
        tensor = self._plan.tensors[number]
        sources = _clipped(tensor.sources, box, self._sources, 0)
        targets = _clipped(tensor.targets, box, self._files, 0)
        replicas = _clipped(tensor.replicas, box, self._compared, 0) if len(tensor.replicas) else tensor.replicas
        rank = len(box)
        sizes = (targets[:, 2 + rank : 2 + 2 * rank] - targets[:, 2 : 2 + rank]).prod(axis=1) * tensor.itemsize
        begins = zip(targets[:, 0].tolist(), targets[:, 1].tolist(), sizes.tolist(), strict=True)
        self._ranges += [(file, number, begin, begin + size) for file, begin, size in begins]
        self._parts.append((tensor, sources, targets, replicas))

    def task(self, number: int) -> CheckpointTask:
        plan = self._plan
        program: list[npt.NDArray[np.int64]] = []
        numbers: list[int] = []
        replicas: list[tuple[int, int, str, tuple[int, ...]]] = []
        at = 0
        for tensor, sources, targets, others in self._parts:
            numbers += range(at, at + len(targets))
            at += len(targets)
            crc = any(plan.files[holder].needs_crcs for holder in self._files)
            # A piece that is not one run of bytes has no CRC-32: then the replicas are compared separately.
            apart = crc and not _are_runs(others, tensor)
            if len(others):
                replicas += [
                    (holder, at + i, tensor.name, tensor.shape) for i, holder in enumerate(others[:, 0].tolist())
                ]
                at += len(others)
                others[:, 0] += len(self._files)
            groups = [[targets], [others]] if apart else [[targets, others]]
            for flags, group in zip((1 + 2 * crc, 0), groups, strict=False):
                program.append(program_of(tensor.itemsize, tensor.shape, [sources, *group], flags))
        compared = [plan.sources[holder] for holder in self._compared]
        return CheckpointTask(
            plan.digest,
            number,
            str(plan.folder),
            tuple((file, plan.files[file].name, plan.sizes[file]) for file in self._files),
            tuple(self._ranges),
            tuple(plan.sources[holder] for holder in self._sources),
            tuple(source for source in compared if isinstance(source, SourceFile)),
            tuple(replicas),
            tuple(numbers),
            np.concatenate(program).tobytes(),
        )


def _are_runs(rows: npt.NDArray[np.int64], tensor: PlannedTensor) -> bool:
    """Whether the bytes of each of these pieces follow one another, in C order."""
    _, starts, stops, strides = split_rows(rows, len(tensor.shape))
    extents = stops - starts
    dense = np.ones_like(extents) * tensor.itemsize
    for dim in reversed(range(len(tensor.shape) - 1)):
        dense[:, dim] = dense[:, dim + 1] * extents[:, dim + 1]
    return bool(((extents == 1) | (strides == dense)).all())


def target_rows(
    files: Sequence[TargetFile], shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int]
) -> list[npt.NDArray[np.int64]]:
    """For each tensor the rows of the pieces that are written, in C order.

    Raises:
        SizeOverflowError: if an offset is over 2**63 - 1.
    """
    places: list[list[tuple[int, int]]] = [[] for _ in shapes]
    boxes: list[list[Any]] = [[] for _ in shapes]
    for number, file in enumerate(files):
        start = file.start
        for tensor, box, begin, end in file.slots:
            if end > begin:
                places[tensor].append((number, start + begin))
                boxes[tensor].append(box)
    rows = []
    for place, held, shape, itemsize in zip(places, boxes, shapes, itemsizes, strict=True):
        rank = len(shape)
        made = np.empty((len(place), 2 + 3 * rank), np.int64)
        try:
            made[:, :2] = np.array(place, np.int64).reshape(len(place), 2)
            sides = np.array(held, np.int64).reshape(len(held), rank, 2)
        except OverflowError:
            raise SizeOverflowError("an offset of a file is over 2**63 - 1") from None
        made[:, 2 : 2 + rank], made[:, 2 + rank : 2 + 2 * rank] = sides[:, :, 0], sides[:, :, 1]
        strides = made[:, 2 + 2 * rank :]
        strides[:] = itemsize
        for dim in reversed(range(rank - 1)):
            strides[:, dim] = strides[:, dim + 1] * (sides[:, dim + 1, 1] - sides[:, dim + 1, 0])
        rows.append(made)
    return rows
