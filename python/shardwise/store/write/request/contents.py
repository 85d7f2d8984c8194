"""The plan of a checkpoint: its tensors and files turned into tables of numbers, and cut into tasks."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....conversion.tables import Wanted
from ....errors import SizeOverflowError
from ....pieces import NO_PIECES, Pieces
from ...data.block_lists import InMemory, Section
from ...data.files import Holder
from ...data.location import absolute
from ...data.sources import Source, source_for
from ...tensors.checkpoint import KeyPath
from ..forms.files import TargetFile
from ..forms.forms import WRITTEN
from ..places import part_limits, takes_whole_files
from ..places.fetch import memory_for
from ..places.part_sizes import Limits
from ..places.place import FileShare
from ..plan.data import LEAST_ASKED
from ..plan.grids import shared_runs, task_runs
from ..plan.shares import file_shares
from ..plan.tables import TensorRow, blank, file_rows, repeated_slots, slot_rows, target_rows
from ..run.checkpoint_plan import CheckpointPlan
from .request import Request

__all__ = ["CheckpointContents", "make_plan", "with_shares"]

#: The most bytes of a task; and for small checkpoints the least.
_TASK, _LEAST_TASK = 64 * 2**20, 32 * 2**20
#: The most bytes of a task whose sources are fetched from a store into memory.
_FETCHED_TASK = 16 * 2**20
#: A table without rows.
_NO_ROWS = np.zeros(0, np.int64)
#: The most bytes of a task that makes parts of objects.
_MOST_SHARED_TASK = 256 * 2**20
#: Tasks share objects only if at most one byte in this many is in pieces too short for a part.
_MOST_REMAINDER = 4
#: The most slots with which tasks share objects; with more, each task makes a whole object.
_MOST_SLOTS = 2**17
#: A checkpoint has at least about this many tasks, unless they would be smaller than `_LEAST_TASK`.
_TASKS = 128


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a new checkpoint.

    Attributes:
        wanted: its tensors, each once.
        files: its files, with their slots.
        form: its format, or `"rank"` for the file of one rank.
        metadata: texts for the headers.
        aliases: further names of tensors, each with the name under which the elements are written.
        paths: for `"dcp"`, the path of each tensor in a nested state dict.
        cuts: how each tensor is cut, as the manifest states it.
        beside: further files of a folder, by name.
    """

    wanted: Sequence[Wanted]
    files: Sequence[TargetFile]
    form: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    cuts: Sequence[dict[str, Any]] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)


def make_plan(request: Request, contents: CheckpointContents) -> CheckpointPlan:
    """Return the plan of a checkpoint with these contents."""
    wanted, files, beside = contents.wanted, contents.files, contents.beside
    tables = _tensor_tables(contents, compares=request.compares)
    tensors, lists, held = tables.tensors, tables.lists, tables.held
    sources = [source_for(holder, *span) for holder, span in zip(held.holders, held.spans, strict=True)]
    task_bytes = _task_bytes(request, sum(tensor.nbytes for tensor in wanted), sources)
    targets, written = target_rows(files, len(wanted))
    tensors["targets"] = np.cumsum(written)
    counts = (np.diff(tensors["sources"], prepend=0) + np.diff(tensors["replicas"], prepend=0)).tolist()
    shapes = (
        (tensor.shape, tensor.itemsize, count // (2 + 3 * len(tensor.shape)) + more)
        for tensor, count, more in zip(wanted, counts, written.tolist(), strict=True)
    )
    runs = np.zeros((0, 7), np.int64) if takes_whole_files(request.target) else task_runs(shapes, task_bytes)
    lines = [source.stated().encode() for source in sources]
    names = [file.name.encode() for file in files]
    sections: dict[str, Section] = {
        "names": InMemory(b"".join(lists["name"])),
        "shapes": InMemory(_flat(lists["shape"])),
        "tensors": InMemory(tensors.view(np.int64)),
        "pieces": InMemory(np.concatenate([_NO_ROWS, *lists["sources"]])),
        "replicas": InMemory(np.concatenate([_NO_ROWS, *lists["replicas"]])),
        "targets": targets,
        "boxes": InMemory(files[0].slots.table.pool if files else np.zeros(0, np.int64)),
        "file_names": InMemory(b"".join(names)),
        "files": InMemory(file_rows(names, files).view(np.int64)),
        "slots": slot_rows(files),
        "sources": InMemory(b"".join(lines)),
        "source_ends": InMemory(np.cumsum([len(line) for line in lines], dtype=np.int64)),
        "runs": InMemory(runs),
        "again": InMemory(repeated_slots(files) if WRITTEN[contents.form].has_arrays else b""),
        **{name: InMemory(b"") for name in ("order", "shares", "share_ends")},
        "aliases": InMemory(json.dumps(dict(contents.aliases)).encode()),
        "beside": InMemory(b"".join(beside.values())),
        "paths": InMemory(
            json.dumps({name: at for name, at in contents.paths.items() if tuple(at) != (name,)}).encode()
        ),
    }
    place = absolute(request.target)
    head = {
        "path": str(place),
        "form": contents.form,
        "task_bytes": task_bytes,
        "metadata": dict(contents.metadata),
        "dtypes": tables.dtypes,
        "cuts": tables.cuts,
        "beside": {name: len(text) for name, text in beside.items()},
    }
    plan = CheckpointPlan.of_sections(head, sections, path=place, sources=sources, files=list(files))
    return _shared(plan, request)


class _TensorTables(NamedTuple):
    """The tensors of a plan.

    Attributes:
        tensors: A row for each, without its targets.
        lists: The names, shapes, rows of sources and rows of replicas of all tensors, by column.
        dtypes: The names of the dtypes that rows have the numbers of.
        cuts: The cuts that rows have the numbers of.
        held: The files and arrays that sources and replicas are in.
    """

    tensors: npt.NDArray[Any]
    lists: dict[str, list[Any]]
    dtypes: list[str]
    cuts: list[dict[str, Any]]
    held: _Holders


def _tensor_tables(contents: CheckpointContents, *, compares: bool) -> _TensorTables:
    wanted, cuts = contents.wanted, contents.cuts or [{}] * len(contents.wanted)
    held = _Holders()
    tensors = blank("tensors", len(wanted))
    ends = dict.fromkeys(("name", "shape", "sources", "replicas"), 0)
    lists: dict[str, list[Any]] = {column: [] for column in ends}
    dtypes: dict[str, int] = {}
    kinds = {id(cut): cut for cut in cuts if cut}
    at_cut = {which: number for number, which in enumerate(kinds)}
    for number, (tensor, cut) in enumerate(zip(wanted, cuts, strict=True)):
        others = tensor.replicas if compares else NO_PIECES
        if any(isinstance(holder, np.ndarray) for holder in others.holders):  # They were compared before.
            is_file = np.array([not isinstance(holder, np.ndarray) for holder in others.holders], np.bool_)
            others = others.chosen(np.flatnonzero(is_file[others.numbers]))
        added: dict[str, Any] = {
            "name": tensor.name.encode(),
            "shape": tensor.shape,
            "sources": held.rows(tensor.pieces, tensor.itemsize),
            "replicas": held.rows(others, tensor.itemsize),
        }
        for column, more in added.items():
            lists[column].append(more)
            ends[column] += len(more)
        dtype = dtypes.setdefault(tensor.dtype.name, len(dtypes))
        tensors[number] = TensorRow(
            **ends, targets=0, dtype=dtype, cut=at_cut.get(id(cut), -1), is_object=tensor.is_object
        )
    return _TensorTables(tensors, lists, list(dtypes), list(kinds.values()), held)


def _task_bytes(request: Request, total: int, sources: Iterable[Source]) -> int:
    """Return the most bytes that a task writes, of a checkpoint of `total` bytes."""
    if request.task_bytes is not None:
        return request.task_bytes
    if any(source.is_fetched for source in sources):
        return max(min(request.memory // 16 or _FETCHED_TASK, _FETCHED_TASK), LEAST_ASKED)
    return min(max(total // _TASKS, _LEAST_TASK), _TASK)


def _shared(plan: CheckpointPlan, request: Request) -> CheckpointPlan:
    """Return a plan with tasks that share objects, if its files are so large, and its place takes parts of objects."""
    limits = part_limits(plan.path)
    if limits is None or not plan.is_kept or max(plan.sizes, default=0) < limits.shared:
        return plan
    each = request.memory // request.workers
    # What a task writes and, at most four times, what it fetches is to be in the memory.
    sizes = {min(each * 2 // 11, most) for most in (_FETCHED_TASK, _MOST_SHARED_TASK)}
    if request.task_bytes is not None:
        sizes = {request.task_bytes}
    tried = (with_shares(plan, limits, size, each) for size in sorted(sizes) if size >= LEAST_ASKED)
    return next((shared for shared in tried if shared is not None), plan)


def with_shares(plan: CheckpointPlan, limits: Limits, task_bytes: int, memory: int) -> CheckpointPlan | None:
    """Return the plan with tasks that write consecutive slabs of all tensors, and so parts of shared objects.

    Return `None` if each task would make one whole file, if too many bytes would be too short for a part, or if the
    data of a task does not fit in the memory.
    """
    if plan.count("slots") > _MOST_SLOTS:
        return None
    tensors = np.concatenate([file.slots.tensors for file in plan.files])
    found, first = np.unique(tensors, return_index=True)
    order = found[np.argsort(first)].astype(np.int64)
    shapes = []
    for number in order.tolist():
        tensor = plan.tensors[number]
        count = sum(map(len, (tensor.sources, tensor.replicas, tensor.targets)))
        shapes.append((tensor.shape, tensor.itemsize, count))
    sections = {**plan.sections, "order": InMemory(order), "runs": InMemory(shared_runs(shapes, task_bytes))}
    head = {**plan.head, "task_bytes": task_bytes}
    files = list(plan.files)
    made = CheckpointPlan.of_sections(head, sections, path=plan.path, sources=plan.sources, files=files)
    shares = file_shares(made, limits.least_shared)
    if shares is None or not len(shares.rows):
        return None
    of_files, begins, ends, parts = (shares.rows[column] for column in FileShare._fields)
    counts = np.diff(shares.ends, prepend=0)
    is_one_each = len(of_files) == np.count_nonzero(counts) == len(np.unique(of_files))
    remainder, total = int((parts - begins).sum()), int((ends - begins).sum())
    most = int(np.bincount(np.repeat(np.arange(len(counts)), counts), weights=ends - begins).max())
    if is_one_each or remainder > total // _MOST_REMAINDER or most + memory_for(int(made.grid.bytes.max())) > memory:
        return None
    sections |= {"shares": InMemory(shares.rows.view(np.int64)), "share_ends": InMemory(shares.ends)}
    return CheckpointPlan.of_sections(head, sections, path=plan.path, sources=plan.sources, files=files)


class _Holders:
    """The files and arrays that hold pieces, numbered as they occur, with the range of bytes that is read from each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.holders: list[Holder | npt.NDArray[Any]] = []
        self.spans: list[tuple[int, int]] = []

    def rows(self, pieces: Pieces, itemsize: int) -> npt.NDArray[np.int64]:
        """Return the rows of pieces, flattened, with the holders' numbers of this table."""
        if not len(pieces):
            return pieces.rows.reshape(-1)
        numbers = []
        for holder in pieces.holders:
            numbers.append(self._numbers.setdefault(id(holder), len(self.holders)))
            if numbers[-1] == len(self.holders):
                self.holders.append(holder)
                self.spans.append((2**63 - 1, 0))
        rows = pieces.rows.copy()
        rows[:, 0] = np.array(numbers, np.int64)[rows[:, 0]]
        begins, ends = pieces.spans(itemsize)
        spans: Iterable[tuple[int, int, int]] = [(numbers[0], min(begins.tolist()), max(ends.tolist()))]
        if len(numbers) > 1:
            spans = zip(rows[:, 0].tolist(), begins.tolist(), ends.tolist(), strict=True)
        for at, begin, end in spans:
            first, last = self.spans[at]
            self.spans[at] = min(first, begin), max(last, end)
        flat: npt.NDArray[np.int64] = rows.reshape(-1)
        return flat


def _flat(lists: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    found = array("q")
    try:
        for each in lists:
            found.extend(each)
    except OverflowError:
        raise SizeOverflowError("a size, an offset or a stride of a piece is over 2**63 - 1") from None
    return np.frombuffer(found, np.int64) if found else np.zeros(0, np.int64)
