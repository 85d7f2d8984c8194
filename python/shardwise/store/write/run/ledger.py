"""The ledger of a run: the tasks that are done, and what follows from all their receipts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from ...._core import joined_crc
from ...._text import counted, shown
from ....errors import ParseError
from ...data.engine import DIGEST_MODULUS
from ...formats.sharded import MANIFEST
from ..forms.files import FileDigests, WrittenFile
from ..places.place import Completion
from ..places.task import Share, Task, TaskReceipt
from ..plan.plan import CheckpointTasks

__all__ = ["Ledger", "completion_of", "usual_parts"]

#: The most tasks and the most parts that a message names.
_MOST_SHOWN, _MOST_AGAIN = 5, 20
#: A receipt that names a greater number of parts is ignored when parts are counted.
_MOST_PARTS = 2**20


class Ledger:
    """The tasks that are done, and the sums of the digests of the data that they wrote.

    Attributes:
        plan: The plan that has the tasks.
        bytes_read: Bytes that the tasks read from files and objects.
        bytes_written: Bytes that the tasks wrote.
        uploaded: The size in bytes and the ETag of the object that a task made in a store, by the task's number.
        own: Entries of `uploaded` for objects that these tasks wrote; other objects were there before.
        shares: The parts of shared objects that a task uploaded, by the task's number.
    """

    def __init__(self, plan: CheckpointTasks) -> None:
        self.plan = plan
        # For each finished task a number made from its contents, to compare with a second receipt.
        self._seen = np.zeros(len(plan.tasks), np.uint64)
        # Sums of digests, by file and tensor, and by tensor; what is asked for is modulo `DIGEST_MODULUS`.
        self._digests: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._whole = [0] * len(plan.tensors)
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self._parts: Counter[str] = Counter()
        self.uploaded: dict[int, tuple[int, str]] = {}
        self.own: dict[int, tuple[int, str]] = {}
        self.shares: dict[int, tuple[Share, ...]] = {}
        self.bytes_read = self.bytes_written = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._seen[number])

    def add(self, receipt: TaskReceipt, task: Task | None = None) -> None:
        """Check a receipt and add it, unless the task has one already.

        Args:
            receipt: A receipt of this plan, by this run or another.
            task: The task, if the caller has it; otherwise the plan is asked for its ranges.

        Raises:
            ParseError: if it is of another plan, or contradicts its task or an earlier receipt.
        """
        if receipt.plan != self.plan.digest:
            raise ParseError(f"a receipt is of another plan, {shown(receipt.plan)}, not of {self.plan.digest[:16]}")
        number = receipt.task
        if not 0 <= number < len(self._seen):
            raise ParseError(f"a receipt is of task {number}, but the plan has {counted(len(self._seen), 'task')}")
        written, again = self.plan.written_by(number) if task is None else (task.written, task.again)
        if receipt.ranges != tuple((file, begin, end) for file, _, begin, end in written):
            raise ParseError(f"the receipt of task {number} says that it wrote ranges that are not the plan's")
        if len(receipt.digests) != len(receipt.ranges):
            raise ParseError(
                f"the receipt of task {number} has {counted(len(receipt.digests), 'digest')} for "
                f"{counted(len(receipt.ranges), 'range')}"
            )
        files = self.plan.files
        has_crcs = any(files[file].needs_crcs for file, _, _ in receipt.ranges)
        expected = len(receipt.ranges) if has_crcs else 0
        if len(receipt.crcs) != expected:
            raise ParseError(f"the receipt of task {number} has {len(receipt.crcs)} CRC-32; it must have {expected}")
        if receipt.uploaded is not None:
            self.uploaded[number] = receipt.uploaded
            if receipt.bytes_written:
                self.own[number] = receipt.uploaded
        if receipt.shares:
            self.shares[number] = receipt.shares
        if number in self:
            if not self.agrees(receipt):
                raise ParseError(
                    f"two receipts of task {number} disagree: one is not of this checkpoint, or a source changed"
                )
            return
        self._seen[number] = _fingerprint(receipt)
        self._parts[receipt.part] += 1
        for at, ((file, tensor, _, _), digest) in enumerate(zip(written, receipt.digests, strict=True)):
            self._digests[file, tensor] += digest
            if at not in again:
                self._whole[tensor] += digest
        for (file, begin, end), crc in zip(receipt.ranges, receipt.crcs, strict=False):
            self._crcs.setdefault(file, []).append((begin, end, crc))
        self.bytes_read += receipt.bytes_read
        self.bytes_written += receipt.bytes_written

    def agrees(self, receipt: TaskReceipt) -> bool:
        """Return whether a receipt states the same contents as the first one of its task."""
        return int(self._seen[receipt.task]) == _fingerprint(receipt)

    @property
    def is_complete(self) -> bool:
        """True if there is a receipt of each task."""
        return bool((self._seen != 0).all())

    def check_complete(self) -> None:
        """Raise ParseError if receipts are missing; the message names some, and the parts that must be run again."""
        missing = np.flatnonzero(self._seen == 0)
        parts, hint = usual_parts(self._parts), ""
        if parts is not None and len(missing):
            ends = np.array([self.plan.part(part, parts).stop for part in range(1, parts + 1)], np.int64)
            again = (np.unique(np.searchsorted(ends, missing, side="right")) + 1).tolist()
            some = ", ".join(f"{part}/{parts}" for part in again[:_MOST_AGAIN])
            more = f" and {len(again) - _MOST_AGAIN} more" if len(again) > _MOST_AGAIN else ""
            hint = f"; run again part {some}{more}"
        elif parts is None:
            hint = "; `shardwise run` without --part, or CheckpointPlan.run(), does them"
        if len(missing):
            some = ", ".join(map(str, missing[:_MOST_SHOWN]))
            more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
            text = f"receipts of {len(missing)} of {len(self._seen)} tasks are missing: {some}{more}{hint}"
            raise ParseError(f"{self.plan.path}: {text}")

    def file_digests(self, number: int, *, has_crcs: bool = True) -> FileDigests:
        """Return the digests of a file's contents; without the CRC-32 of its slots if they are not asked for."""
        file = self.plan.files[number]
        sums = self._digests
        own = {tensor: sums.get((number, tensor), 0) % DIGEST_MODULUS for tensor in set(file.slots.tensors.tolist())}
        return FileDigests(own, self._crcs_of(number) if file.needs_crcs and has_crcs else {})

    def _crcs_of(self, number: int) -> dict[int, int]:
        """Return the CRC-32 of each slot of a file, by the slot's number."""
        file, found = self.plan.files[number], sorted(self._crcs.get(number, []))
        begins = np.array([begin for begin, _, _ in found], np.int64)
        slots, crcs = file.slots, {}
        firsts, ends = (np.searchsorted(begins, file.start + at) for at in (slots.begins, slots.begins + slots.nbytes))
        for position, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            crc = 0
            for begin, stop, more in found[first:end]:
                crc = joined_crc(crc, more, stop - begin)
            crcs[position] = crc
        return crcs

    @property
    def digests(self) -> list[int]:
        """Return the digest of each tensor; elements that are written several times count once."""
        return [total % DIGEST_MODULUS for total in self._whole]

    def digest(self, file: int, tensor: int) -> int:
        """Return the digest of the part of a tensor that is in a file."""
        return self._digests.get((file, tensor), 0) % DIGEST_MODULUS


def _fingerprint(receipt: TaskReceipt) -> int:
    """Return a number, never 0, that is equal for receipts with the same digests."""
    return hash((receipt.digests, receipt.crcs)) & (2**64 - 1) | 1


def usual_parts(receipts: Mapping[str, int]) -> int | None:
    """Return the number of parts that most receipts name; `None` if no task was run by parts.

    >>> usual_parts({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 7, "": 40, "1/" + "9" * 5000: 20})
    16
    >>> usual_parts({"1/16": 1, "2/16": 5, "7/16": 3, "1/2": 17})
    2
    """
    counts: Counter[int] = Counter()
    for part, count in receipts.items():
        parts = part.partition("/")[2]
        if parts.isdecimal() and len(parts) <= len(str(_MOST_PARTS)) and 0 < int(parts) <= _MOST_PARTS:
            counts[int(parts)] += count
    return counts.most_common(1)[0][0] if counts else None


def completion_of(
    plan: CheckpointTasks, ledger: Ledger, memory: int | None = None, *, is_checked: bool = False
) -> Completion:
    """Return the bytes of a checkpoint that follow from the receipts of all tasks: headers, manifest, other files.

    Args:
        plan: The plan that has the tasks.
        ledger: The receipts.
        memory: Bytes for `confirm`, which then compares with all threads; if `None`, with one thread.
        is_checked: Whether all objects of a store are compared with the sources.
    """
    return _LedgerCompletion(plan, ledger, memory, is_checked)


class _LedgerCompletion:
    """A `Completion` from the receipts of all tasks."""

    def __init__(self, plan: CheckpointTasks, ledger: Ledger, memory: int | None, is_checked: bool) -> None:
        self._plan, self._ledger, self._memory, self.is_checked = plan, ledger, memory, is_checked
        self._headers: dict[int, str] = {}
        self.names = [MANIFEST, *plan.texts]
        self.uploaded, self.shares = ledger.uploaded, ledger.shares

    def headers(self, number: int) -> Iterator[tuple[int, bytes]]:
        # Their digest is kept for the manifest: they are not made once more for it.
        self._headers[number] = yield from self._plan.files[number].headers(self._ledger.file_digests(number))

    def texts(self) -> dict[str, bytes]:
        return self._plan.texts_of(self._ledger.digests, map(self._written, range(len(self._plan.files))))

    def _written(self, number: int) -> WrittenFile:
        file, headers = self._plan.files[number], self._headers.get(number)
        digests = self._ledger.file_digests(number, has_crcs=headers is None)  # The headers alone need them.
        return WrittenFile(file, digests, file.headers_digest(digests) if headers is None else headers)

    def confirm(self, number: int) -> None:
        task = self._plan.task(number)
        receipt = task.check() if self._memory is None else task.check(memory=self._memory, threads=None)
        if not self._ledger.agrees(receipt):
            name = self._plan.path / task.files[0][1] if self._plan.is_folder else self._plan.path
            raise ParseError(f"{name}: is not what its receipt says")
