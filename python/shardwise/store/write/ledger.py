"""The receipts of a plan's tasks, checked against the plan and added up."""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left

import numpy as np

from ..._text import shown
from ...errors import ParseError
from ..engine import add_digests
from .plan import WritePlan
from .receipts import refuse_missing
from .task import CheckpointTask, TaskReceipt

__all__ = ["Ledger", "joined_crc"]


class Ledger:
    """Which tasks are done, and what the digests of what they wrote add up to.

    Attributes:
        bytes_read: Bytes that they read from files.
        bytes_written: Bytes that they wrote.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        # For each finished task a number made from its digests, to compare with a second receipt.
        self._seen = np.zeros(len(plan.tasks), np.uint64)
        self._digests: dict[tuple[int, int], int] = {}
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self.bytes_read = self.bytes_written = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._seen[number])

    def add(self, receipt: TaskReceipt, task: CheckpointTask | None = None) -> bool:
        """Check a receipt and add it; say whether it is the first one of its task.

        Raises:
            ParseError: if it is of another plan, or contradicts its task or an earlier receipt.
        """
        if receipt.plan != self._plan.digest:
            raise ParseError(f"a receipt is of the plan {shown(receipt.plan)}, not of {self._plan.digest[:16]}")
        number = receipt.task
        if not 0 <= number < len(self._seen):
            raise ParseError(f"a receipt is of task {number}; the plan has {len(self._seen)}")
        task = self._plan.task(number) if task is None else task
        if receipt.ranges != tuple((task.files[file][0], begin, end) for file, _, begin, end in task.ranges):
            raise ParseError(f"the receipt of task {number} says that it wrote ranges that are not the plan's")
        if len(receipt.digests) != len(receipt.ranges):
            raise ParseError(f"the receipt of task {number} has {len(receipt.digests)} digests for its ranges")
        has_crcs = any(self._plan.files[file].needs_crcs for file, _, _ in receipt.ranges)
        if len(receipt.crcs) != (len(receipt.ranges) if has_crcs else 0):
            raise ParseError(f"the receipt of task {number} has {len(receipt.crcs)} CRC-32 for its ranges")
        mark = int.from_bytes(hashlib.sha256(repr((receipt.digests, receipt.crcs)).encode()).digest()[:8], "little") | 1
        if self._seen[number]:
            if int(self._seen[number]) != mark:
                raise ParseError(
                    f"two receipts of task {number} disagree: one is not of this checkpoint, or a source changed"
                )
            return False
        self._seen[number] = mark
        for (file, _, _), (_, tensor, _, _), digest in zip(receipt.ranges, task.ranges, receipt.digests, strict=True):
            key = file, tensor
            self._digests[key] = add_digests([self._digests.get(key, 0), digest])
        for (file, begin, end), crc in zip(receipt.ranges, receipt.crcs, strict=False):
            self._crcs.setdefault(file, []).append((begin, end, crc))
        self.bytes_read += receipt.bytes_read
        self.bytes_written += receipt.bytes_written
        return True

    def check_complete(self) -> None:
        """Raise ParseError if receipts are missing; names some."""
        refuse_missing(self._plan.path, np.flatnonzero(self._seen == 0).tolist(), len(self._seen))

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

    def digest(self, file: int, tensor: int) -> int:
        """The digest of what a file has of a tensor."""
        return self._digests.get((file, tensor), 0)


#: The polynomial of CRC-32, the lowest power in the highest bit.
_POLYNOMIAL = 0xEDB88320


def joined_crc(first: int, second: int, length: int) -> int:
    """The CRC-32 of two joined stretches, from those of each and the length of the second in bytes.

    A CRC is a remainder of polynomials over two elements: the first is multiplied by x to the bits of the second.

    >>> import zlib
    >>> joined_crc(zlib.crc32(b"shard"), zlib.crc32(b"wise"), 4) == zlib.crc32(b"shardwise")
    True
    """
    # Every multiple of 0, the CRC-32 before the first stretch, is 0.
    return _product(first, _power(length)) ^ second if first else second


@functools.lru_cache(maxsize=1024)
def _power(length: int) -> int:
    """The remainder of x to the number of bits in `length` bytes."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the 8th.
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
