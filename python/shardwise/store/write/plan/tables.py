"""The tables of a plan, whose columns have names, and those that follow from its files."""

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
        name, shape, sources, replicas, targets: Where these of its end, each in its section.
        dtype: Its dtype among those of the plan.
        cut: Its cut among those of the plan; -1 if there is none.
        is_object: Whether it is not a tensor, but a value that is copied as it is.
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
        name, slots: Where these of it end, each in its section.
        start: The first byte of its data.
        size: Its bytes.
        data: The bytes of tensors in it.
    """

    name: int
    slots: int
    start: int
    size: int
    data: int


class TargetRow(NamedTuple):
    """A box of a tensor in a file: the file, the byte at which it begins there, and its place among the boxes."""

    file: int
    offset: int
    place: int


class SlotRow(NamedTuple):
    """A slot of a file: its tensor, and the place of its box among the boxes."""

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


#: The row of each section that is a table.
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
    """Return the numbers of a section, in C order, as a table.

    Raises:
        ValueError: if they are not whole rows.
    """
    dtype = _DTYPES[section]
    if 8 * numbers.size % dtype.itemsize:
        raise ValueError(f"its {section} are not whole rows")
    found: Table = np.ascontiguousarray(numbers, np.int64).reshape(-1).view(dtype)
    return found


def blank(section: str, count: int) -> Table:
    """Return a table of so many rows of zeros."""
    return np.zeros(count, _DTYPES[section])


def target_rows(files: Sequence[TargetFile], tensors: int) -> tuple[Section, Numbers]:
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
    """All slots, those of each file in their order, as tensor and box."""
    ends = np.cumsum([0, *(len(file.slots) for file in files)]).tolist()

    def make(begin: int, end: int) -> Numbers:
        parts = [np.zeros((0, 2), np.int64)]
        for number in range(bisect_right(ends, begin) - 1, bisect_left(ends, end)):
            slots, first = files[number].slots, ends[number]
            span = slice(max(begin - first, 0), end - first)
            parts.append(np.column_stack([slots.tensors[span], slots.places[span]]))
        return np.concatenate(parts)

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
    """The files, those with these names."""
    found = blank("files", len(files))
    for number, (name, file) in enumerate(zip(names, files, strict=True)):
        data = int(file.slots.nbytes.sum())
        found[number] = FileRow(len(name), len(file.slots), file.start, file.size, data)
    for column in ("name", "slots"):
        found[column] = np.cumsum(found[column])
    return found
