"""The tables of a plan, with named columns; and the tables that follow from its files."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._types import Numbers, Table
from ...data.block_lists import Computed, Section
from ..forms.files import TargetFile
from ..places.place import FileShare

__all__ = [
    "TABLES",
    "FileRow",
    "RunRow",
    "SlotRow",
    "TargetRow",
    "TensorRow",
    "blank",
    "file_rows",
    "repeated_slots",
    "slot_rows",
    "table_of",
    "target_rows",
]


class TensorRow(NamedTuple):
    """A tensor of a plan.

    Attributes:
        name, shape, sources, replicas, targets: The end of the tensor's entries in the section of this name.
        dtype: The number of its dtype in the plan.
        cut: The number of its cut in the plan; -1 if it is not cut.
        is_object: 1 if it is not a tensor, but a value that is copied as bytes; else 0.
    """

    name: int
    shape: int
    sources: int
    replicas: int
    targets: int
    dtype: int
    cut: int
    is_object: int


class FileRow(NamedTuple):
    """A file of a plan.

    Attributes:
        name, slots: The end of the file's entries in the section of this name.
        start: The first byte of its data.
        size: The size of the file in bytes.
        data: The bytes of tensors in it.
    """

    name: int
    slots: int
    start: int
    size: int
    data: int


class TargetRow(NamedTuple):
    """A box of a tensor in a file: the file's number, the box's first byte there, and its place among the boxes."""

    file: int
    offset: int
    place: int


class SlotRow(NamedTuple):
    """A slot of a file: its tensor's number, and the place of its box in the pool of boxes."""

    tensor: int
    place: int


class RunRow(NamedTuple):
    """Consecutive tasks of one tensor, or one task of several tensors.

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


#: The type of the rows of each section that is a table.
TABLES: dict[str, type[Any]] = {
    "tensors": TensorRow,
    "files": FileRow,
    "targets": TargetRow,
    "slots": SlotRow,
    "runs": RunRow,
    "shares": FileShare,
}
_DTYPES = {name: np.dtype([(column, np.int64) for column in row._fields]) for name, row in TABLES.items()}


def table_of(section: str, numbers: Numbers) -> Table:
    """Return the numbers of a section as a table with named columns.

    Raises:
        ValueError: if they are not whole rows.
    """
    dtype = _DTYPES[section]
    if 8 * numbers.size % dtype.itemsize:
        raise ValueError(f"its {section} are not whole rows")
    found: Table = np.ascontiguousarray(numbers, np.int64).reshape(-1).view(dtype)
    return found


def blank(section: str, count: int) -> Table:
    """Return a table of `count` rows of zeros for a section."""
    return np.zeros(count, _DTYPES[section])


def target_rows(files: Sequence[TargetFile], tensors: int) -> tuple[Section, Numbers]:
    """Return the non-empty slots as a table sorted by tensor, and the number of each tensor's slots."""
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

    def make(begin: int, end: int) -> Numbers:
        at = order[begin:end]
        rows = blank("targets", len(at))
        numbers = rows["file"] = np.searchsorted(ends, at, side="right")
        by_file = np.argsort(numbers, kind="stable")
        for here in np.split(by_file, np.flatnonzero(np.diff(numbers[by_file])) + 1) if len(at) else ():
            number = int(numbers[here[0]])
            file, chosen = files[number], chosen_of[number]
            inner = at[here] - (ends[number - 1] if number else 0)
            inner = inner if chosen is None else chosen[inner]
            rows["offset"][here] = file.start + file.slots.begins[inner]
            rows["place"][here] = file.slots.places[inner]
        return rows.view(np.int64)

    return Computed(count, len(TargetRow._fields), make), counts


def slot_rows(files: Sequence[TargetFile]) -> Section:
    """Return all slots as a table, file by file."""
    ends = np.cumsum([0, *(len(file.boxes) for file in files)]).tolist()

    def make(begin: int, end: int) -> Numbers:
        numbers = range(bisect_right(ends, begin) - 1, bisect_left(ends, end))
        spans = [slice(max(begin - ends[number], 0), end - ends[number]) for number in numbers]
        found = np.zeros((end - begin, 2), np.int64)
        if spans:
            boxes = [files[number].boxes for number in numbers]
            np.concatenate([each.tensors[span] for each, span in zip(boxes, spans, strict=True)], out=found[:, 0])
            np.concatenate([each.places[span] for each, span in zip(boxes, spans, strict=True)], out=found[:, 1])
        return found

    return Computed(ends[-1], len(SlotRow._fields), make)


def repeated_slots(files: Sequence[TargetFile]) -> bytes:
    """Return a byte per slot: 1 if an earlier slot of any file holds the same non-empty box of the same tensor, else 0.

    Files for ranks have arrays: the same box may be in two of them at two places, with another array around it.
    """
    table = files[0].slots.table
    tensors = np.concatenate([file.slots.tensors for file in files])
    places = np.concatenate([file.slots.places for file in files])
    kept = np.flatnonzero(np.concatenate([file.slots.nbytes for file in files]))
    again = np.zeros(len(tensors), np.bool_)
    for rank, chosen in table.by_rank(tensors[kept]):
        # There are fewer places than slots, and as many boxes as places or fewer.
        known, place = np.unique(places[kept[chosen]], return_inverse=True)
        sides = np.concatenate(table.sides(known, rank), axis=1)
        box = np.unique(sides, axis=0, return_inverse=True)[1].reshape(-1) if rank else np.zeros(len(known), np.int64)
        key = tensors[kept[chosen]].astype(np.int64) * len(known) + box[place.reshape(-1)]
        is_first = np.zeros(len(key), np.bool_)
        is_first[np.unique(key, return_index=True)[1]] = True
        again[kept[chosen[~is_first]]] = True
    return again.tobytes()


def file_rows(names: Sequence[bytes], files: Sequence[TargetFile]) -> Table:
    """Return a table of the files, in order."""
    found = blank("files", len(files))
    for number, (name, file) in enumerate(zip(names, files, strict=True)):
        data = int(file.slots.nbytes.sum())
        found[number] = FileRow(len(name), len(file.slots), file.start, file.size, data)
    for column in ("name", "slots"):
        found[column] = np.cumsum(found[column])
    return found
