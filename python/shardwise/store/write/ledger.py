"""The receipts of a plan's tasks, checked against the plan and added up, and what follows from them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..._core import joined_crc
from ..._text import shown
from ...errors import ParseError
from ..engine import add_digests
from ..formats.forms import manifest_text
from ..sharded import MANIFEST
from .plan import FileGrid, WritePlan
from .task import TaskReceipt

__all__ = ["Ending", "Ledger", "texts_of", "written_by"]

#: The most tasks and the most parts that a message names.
_MOST_SHOWN, _MOST_AGAIN = 5, 20
#: A receipt that names more parts is not believed.
_MOST_PARTS = 2**20


class Written(NamedTuple):
    """What a task writes.

    Attributes:
        ranges: The file's number, the tensor's number, the first byte and the end of each range.
        again: The positions of those that hold what others hold.
    """

    ranges: tuple[tuple[int, int, int, int], ...]
    again: frozenset[int]


def written_by(plan: WritePlan, number: int) -> Written:
    """The part of a plan that a task writes."""
    if isinstance(plan.grid, FileGrid):  # Without a look at its sources, as making the task would take.
        file = plan.files[number]
        ranges = tuple(
            (number, slot.tensor, file.start + slot.begin, file.start + slot.end)
            for slot in file.slots
            if slot.end > slot.begin
        )
        return Written(ranges, plan.repeated_in(number))
    task = plan.task(number)
    return Written(task.written, task.again)


class Ending:
    """What follows from the receipts of all tasks: what surrounds tensors, the manifest, and the other files.

    Args:
        plan: The plan.
        ledger: The receipts.
        confirm: Compares what a task has made with its sources and its receipt.

    Attributes:
        names: The names of the further files of a folder.
        made: For tasks that made an object of a store, its bytes and its mark.
    """

    def __init__(self, plan: WritePlan, ledger: Ledger, confirm: Callable[[int], None]) -> None:
        self._plan, self._ledger, self.confirm = plan, ledger, confirm
        self._is_known = False
        self.names = [MANIFEST, *plan.texts]
        self.made = ledger.made

    def _note(self) -> None:
        """Say to each file the digests and the CRC-32 of what it holds."""
        if self._is_known:
            return
        for number, file in enumerate(self._plan.files):
            file.digests, file.crcs = {}, self._ledger.crcs(number) if file.needs_crcs else {}
            for slot in file.slots:
                if slot.tensor not in file.digests:
                    file.digests[slot.tensor] = self._ledger.digest(number, slot.tensor)
        self._is_known = True

    def frame(self, number: int) -> Iterable[tuple[int, bytes]]:
        """What surrounds the tensors of a file: stretches of bytes, each with the byte at which it begins."""
        self._note()
        return self._plan.files[number].frame()

    def texts(self) -> dict[str, bytes]:
        """The further files of a folder, with the manifest."""
        self._note()
        return texts_of(self._plan, self._ledger.digests)


def texts_of(plan: WritePlan, digests: list[int]) -> dict[str, bytes]:
    """The manifest, and the other files beside those with tensors; digests have the same length whatever they are."""
    texts = dict(plan.texts)  # An index takes a while to make.
    manifest = manifest_text(plan.manifest, list(plan.tensors), digests, plan.files, plan.sizes, texts)
    return {MANIFEST: manifest, **texts}


class Ledger:
    """The tasks that are done, and the sum of the digests of what they wrote.

    Attributes:
        bytes_read: Bytes that they read from files.
        bytes_written: Bytes that they wrote.
        made: For tasks that made an object of a store, its bytes and its mark.
        own: Those of them that put it there; the others found it, made by another run perhaps.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        # For each finished task a number made from its contents, to compare with a second receipt.
        self._seen = np.zeros(len(plan.tasks), np.uint64)
        self._digests: dict[tuple[int, int], int] = {}
        self._whole = [0] * len(plan.tensors)
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self._parts: Counter[str] = Counter()
        self.made: dict[int, tuple[int, str]] = {}
        self.own: dict[int, tuple[int, str]] = {}
        self.bytes_read = self.bytes_written = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._seen[number])

    def add(self, receipt: TaskReceipt, written: Written | None = None) -> bool:
        """Check a receipt and add it; say whether it is the first one of its task.

        Args:
            receipt: The receipt.
            written: What its task writes, if that is known.

        Raises:
            ParseError: if it is of another plan, or contradicts its task or an earlier receipt.
        """
        if receipt.plan != self._plan.digest:
            raise ParseError(f"a receipt is of another plan, {shown(receipt.plan)}, not of {self._plan.digest[:16]}")
        number = receipt.task
        if not 0 <= number < len(self._seen):
            raise ParseError(f"a receipt is of task {number}; the plan has {len(self._seen)}")
        written = written_by(self._plan, number) if written is None else written
        if receipt.ranges != tuple((file, begin, end) for file, _, begin, end in written.ranges):
            raise ParseError(f"the receipt of task {number} says that it wrote ranges that are not the plan's")
        if len(receipt.digests) != len(receipt.ranges):
            raise ParseError(f"the receipt of task {number} has {len(receipt.digests)} digests for its ranges")
        has_crcs = any(self._plan.files[file].needs_crcs for file, _, _ in receipt.ranges)
        if len(receipt.crcs) != (len(receipt.ranges) if has_crcs else 0):
            raise ParseError(f"the receipt of task {number} has {len(receipt.crcs)} CRC-32 for its ranges")
        if receipt.made is not None:
            self.made[number] = receipt.made
            if receipt.bytes_written:
                self.own[number] = receipt.made
        contents = repr((receipt.digests, receipt.crcs)).encode()
        mark = int.from_bytes(hashlib.sha256(contents).digest()[:8], "little") | 1
        if self._seen[number]:
            if int(self._seen[number]) != mark:
                raise ParseError(
                    f"two receipts of task {number} disagree: one is not of this checkpoint, or a source changed"
                )
            return False
        self._seen[number] = mark
        self._parts[receipt.part] += 1
        for at, ((file, tensor, _, _), digest) in enumerate(zip(written.ranges, receipt.digests, strict=True)):
            key = file, tensor
            self._digests[key] = add_digests([self._digests.get(key, 0), digest])
            if at not in written.again:
                self._whole[tensor] = add_digests([self._whole[tensor], digest])
        for (file, begin, end), crc in zip(receipt.ranges, receipt.crcs, strict=False):
            self._crcs.setdefault(file, []).append((begin, end, crc))
        self.bytes_read += receipt.bytes_read
        self.bytes_written += receipt.bytes_written
        return True

    @property
    def is_complete(self) -> bool:
        """Whether there is a receipt of each task."""
        return bool((self._seen != 0).all())

    def check_complete(self) -> None:
        """Raise ParseError if receipts are missing; names some, and the parts that are to be run again."""
        missing = np.flatnonzero(self._seen == 0)
        parts, hint = parts_of(self._parts), ""
        if parts is not None and len(missing):
            ends = np.array([self._plan.part(part, parts).stop for part in range(1, parts + 1)], np.int64)
            again = (np.unique(np.searchsorted(ends, missing, side="right")) + 1).tolist()
            some = ", ".join(f"{part}/{parts}" for part in again[:_MOST_AGAIN])
            more = f" and {len(again) - _MOST_AGAIN} more" if len(again) > _MOST_AGAIN else ""
            hint = f"; run again part {some}{more}"
        if len(missing):
            some = ", ".join(map(str, missing[:_MOST_SHOWN]))
            more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
            text = f"receipts of {len(missing)} of {len(self._seen)} tasks are missing: {some}{more}{hint}"
            raise ParseError(f"{self._plan.path}: {text}")

    def crcs(self, number: int) -> dict[int, int]:
        """The CRC-32 of each slot of a file, by its position."""
        file, found = self._plan.files[number], sorted(self._crcs.get(number, []))
        begins = [begin for begin, _, _ in found]
        crcs = {}
        for position, slot in enumerate(file.slots):
            crc = 0
            first, end = (bisect_left(begins, file.start + at) for at in (slot.begin, slot.end))
            for begin, stop, more in found[first:end]:
                crc = joined_crc(crc, more, stop - begin)
            crcs[position] = crc
        return crcs

    @property
    def digests(self) -> list[int]:
        """The digest of each tensor, of which every element counts once."""
        return self._whole

    def digest(self, file: int, tensor: int) -> int:
        """The digest of what a file has of a tensor."""
        return self._digests.get((file, tensor), 0)


def parts_of(receipts: Mapping[str, int]) -> int | None:
    """The number of parts in which most tasks were run; `None` if none was run in one.

    >>> parts_of({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 7, "": 40, "1/" + "9" * 5000: 20})
    16
    >>> parts_of({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 17})
    2
    """
    counts: Counter[int] = Counter()
    for part, count in receipts.items():
        parts = part.partition("/")[2]
        if parts.isdecimal() and len(parts) <= len(str(_MOST_PARTS)) and 0 < int(parts) <= _MOST_PARTS:
            counts[int(parts)] += count
    return counts.most_common(1)[0][0] if counts else None
