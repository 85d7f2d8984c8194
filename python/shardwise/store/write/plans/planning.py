"""The plan of the tensors that are wanted: their pieces as numbers, and the files that they lie in."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...._arguments import integer
from ....errors import LayoutError, SizeOverflowError
from ...files import Holder
from ...location import Location, absolute
from ...pieces import NO_PIECES, Pieces
from ..formats.dcp import KeyPath
from ..formats.files import TargetFile
from ..places import takes_whole_files
from ..sources import source_for
from ..tensors.wanted import Wanted
from .checkpoint_plan import CheckpointPlan
from .grid import task_runs
from .plan import CUT, DTYPE, LEAST_ASKED, NAME, OBJECT, REPLICAS, SHAPE, SOURCES, TARGETS
from .sections import Held, Made, Section

__all__ = ["make_plan"]

#: The most bytes of a task and, for small checkpoints, the least.
_TASK, _LEAST_TASK = 64 * 2**20, 16 * 2**20
#: The most bytes of a task that fetches them from a store into memory.
_FETCHED_TASK = 16 * 2**20
#: A checkpoint has at least about this many tasks, unless they would be smaller than `_LEAST_TASK`.
_TASKS = 128


def make_plan(
    path: Location,
    wanted: Sequence[Wanted],
    files: Sequence[TargetFile],
    *,
    form: str,
    metadata: Mapping[str, str],
    aliases: Mapping[str, str],
    paths: Mapping[str, KeyPath],
    cuts: Sequence[dict[str, Any]],
    beside: Mapping[str, bytes],
    compare_replicas: bool,
    task_bytes: int | None,
    memory: int,
) -> CheckpointPlan:
    """Put together the plan of these tensors and files.

    Raises:
        LayoutError: if `task_bytes` is too small.
    """
    total = sum(tensor.nbytes for tensor in wanted)
    if task_bytes is not None and integer("task_bytes", task_bytes) < LEAST_ASKED:
        raise LayoutError(f"task_bytes is {task_bytes}; it must be at least {LEAST_ASKED}")
    held = _Holders()
    tensors = np.zeros((len(wanted), 8), np.int64)
    ends = {NAME: 0, SHAPE: 0, SOURCES: 0, REPLICAS: 0}
    lists: dict[int, list[Any]] = {column: [] for column in ends}
    dtypes: dict[str, int] = {}
    kinds = {id(cut): cut for cut in cuts if cut}
    at_cut = {which: number for number, which in enumerate(kinds)}
    for number, (tensor, cut) in enumerate(zip(wanted, cuts, strict=True)):
        others = tensor.replicas if compare_replicas else NO_PIECES
        if any(isinstance(holder, np.ndarray) for holder in others.holders):  # They were compared before.
            is_file = np.array([not isinstance(holder, np.ndarray) for holder in others.holders], np.bool_)
            others = others.chosen(np.flatnonzero(is_file[others.numbers]))
        added: dict[int, Any] = {
            NAME: tensor.name.encode(),
            SHAPE: tensor.shape,
            SOURCES: held.rows(tensor.pieces, tensor.itemsize),
            REPLICAS: held.rows(others, tensor.itemsize),
        }
        for column, more in added.items():
            lists[column].append(more)
            ends[column] += len(more)
            tensors[number, column] = ends[column]
        tensors[number, DTYPE] = dtypes.setdefault(tensor.dtype.name, len(dtypes))
        tensors[number, CUT] = at_cut.get(id(cut), -1)
        tensors[number, OBJECT] = tensor.is_object
    if task_bytes is None:
        task_bytes = min(max(total // _TASKS, _LEAST_TASK), _TASK)
        if any(not isinstance(holder, np.ndarray) and holder.is_fetched for holder in held.held):
            task_bytes = max(min(memory // 16 or _FETCHED_TASK, _FETCHED_TASK), LEAST_ASKED)
    targets, written = _targets(files, len(wanted))
    tensors[:, TARGETS] = np.cumsum(written)
    counts = np.diff(tensors[:, [SOURCES, REPLICAS]], axis=0, prepend=0).sum(axis=1).tolist()
    shapes = (
        (tensor.shape, tensor.itemsize, count // (2 + 3 * len(tensor.shape)) + more)
        for tensor, count, more in zip(wanted, counts, written.tolist(), strict=True)
    )
    runs = np.zeros((0, 7), np.int64) if takes_whole_files(path) else task_runs(shapes, task_bytes)
    sources = [source_for(holder, *span) for holder, span in zip(held.held, held.spans, strict=True)]
    # Of what is in a store, the URL; an array is not saved.
    said = ["null" if isinstance(each, np.ndarray) else json.dumps(each, default=str) for each in sources]
    lines = [line.encode() for line in said]
    names = [file.name.encode() for file in files]
    sections: dict[str, Section] = {
        "names": Held(b"".join(lists[NAME])),
        "shapes": Held(_flat(lists[SHAPE])),
        "tensors": Held(tensors),
        "pieces": Held(_joined(lists[SOURCES])),
        "replicas": Held(_joined(lists[REPLICAS])),
        "targets": targets,
        "boxes": Held(files[0].slots.table.pool if files else np.zeros(0, np.int64)),
        "file_names": Held(b"".join(names)),
        "files": Held(_file_rows(names, files)),
        "slots": _slots(files),
        "sources": Held(b"".join(lines)),
        "source_ends": Held(np.cumsum([len(line) for line in lines], dtype=np.int64)),
        "runs": Held(runs),
        "aliases": Held(json.dumps(aliases).encode()),
        "beside": Held(b"".join(beside.values())),
        "paths": Held(json.dumps({name: at for name, at in paths.items() if tuple(at) != (name,)}).encode()),
    }
    place = absolute(path)
    head = {
        "path": str(place),
        "form": form,
        "task_bytes": task_bytes,
        "metadata": dict(metadata),
        "dtypes": list(dtypes),
        "cuts": list(kinds.values()),
        "beside": {name: len(text) for name, text in beside.items()},
    }
    return CheckpointPlan._made(head, sections, path=place, sources=sources)


class _Holders:
    """The files and arrays that pieces lie in, numbered as they come, and from where to where each is read."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.held: list[Holder | npt.NDArray[Any]] = []
        self.spans: list[tuple[int, int]] = []

    def rows(self, pieces: Pieces, itemsize: int) -> npt.NDArray[np.int64]:
        """The rows of pieces, one after the other, with the numbers that their holders have here."""
        if not len(pieces):
            return pieces.rows.reshape(-1)
        numbers = []
        for holder in pieces.holders:
            numbers.append(self._numbers.setdefault(id(holder), len(self.held)))
            if numbers[-1] == len(self.held):
                self.held.append(holder)
                self.spans.append((2**63 - 1, 0))
        rows = pieces.rows.copy()
        rows[:, 0] = np.array(numbers, np.int64)[rows[:, 0]]
        begins, ends = pieces.spans(itemsize)
        order = rows[:, 0].tolist() if len(rows) < 9 or len(numbers) > 1 else []
        for at, begin, end in zip(order, begins.tolist(), ends.tolist(), strict=False):
            first, last = self.spans[at]
            self.spans[at] = min(first, begin), max(last, end)
        if not order:
            first, last = self.spans[numbers[0]]
            self.spans[numbers[0]] = min(first, int(begins.min())), max(last, int(ends.max()))
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


def _joined(rows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *rows])


def _targets(files: Sequence[TargetFile], tensors: int) -> tuple[Section, npt.NDArray[np.int64]]:
    """The slots that have bytes, by tensor, as file, offset and box; and how many each tensor has."""
    kept = [np.flatnonzero(file.slots.nbytes) for file in files]
    ends = np.cumsum([len(chosen) for chosen in kept], dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    held = np.zeros(count, np.int32)
    for file, chosen, end in zip(files, kept, ends.tolist(), strict=True):
        held[end - len(chosen) : end] = file.slots.tensors[chosen]
    whole = [len(chosen) == len(file.slots) for file, chosen in zip(files, kept, strict=True)]
    chosen_of = [None if is_whole else chosen for chosen, is_whole in zip(kept, whole, strict=True)]
    kept.clear()
    counts = np.bincount(held, minlength=tensors)
    order = np.argsort(held, kind="stable").astype(np.int32 if count < 1 << 31 else np.int64)

    def make(begin: int, end: int) -> npt.NDArray[np.int64]:
        at = order[begin:end]
        rows = np.empty((len(at), 3), np.int64)
        rows[:, 0] = np.searchsorted(ends, at, side="right")
        by_file = np.argsort(rows[:, 0], kind="stable")
        for here in np.split(by_file, np.flatnonzero(np.diff(rows[by_file, 0])) + 1) if len(at) else ():
            number = int(rows[here[0], 0])
            file, chosen = files[number], chosen_of[number]
            inner = at[here] - (ends[number - 1] if number else 0)
            inner = inner if chosen is None else chosen[inner]
            rows[here, 1] = file.start + file.slots.begins[inner]
            rows[here, 2] = file.slots.places[inner]
        return rows

    return Made(count, 3, make), counts


def _slots(files: Sequence[TargetFile]) -> Section:
    """All slots, those of each file in their order, as tensor and box."""
    ends = np.cumsum([0, *(len(file.slots) for file in files)]).tolist()

    def make(begin: int, end: int) -> npt.NDArray[np.int64]:
        parts = [np.zeros((0, 2), np.int64)]
        for number in range(bisect_right(ends, begin) - 1, bisect_left(ends, end)):
            slots, first = files[number].slots, ends[number]
            span = slice(max(begin - first, 0), end - first)
            parts.append(np.column_stack([slots.tensors[span], slots.places[span]]))
        return np.concatenate(parts)

    return Made(ends[-1], 2, make)


def _file_rows(names: Sequence[bytes], files: Sequence[TargetFile]) -> npt.NDArray[np.int64]:
    rows = [
        [len(name), len(f.slots), f.start, f.size, int(f.slots.nbytes.sum())]
        for name, f in zip(names, files, strict=True)
    ]
    found = np.array(rows, np.int64).reshape(-1, 5)
    found[:, :2] = np.cumsum(found[:, :2], axis=0)
    return found
