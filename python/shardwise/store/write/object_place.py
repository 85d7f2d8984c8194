"""Receipts of a plan whose checkpoint goes to an object store: an object for each, beside the checkpoint.

They have names of their own, so that no listing is asked for them, and are made on condition that there is none: a task
that is run twice must have made the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

from ...errors import ParseError
from ..objects import ObjectPath, ObjectStatus
from .object_task import ObjectReceipt
from .plan import WritePlan
from .planned_object import PlannedReceipt
from .receipts import check_numbers, line_of, read_line
from .uploads import put_object

__all__ = ["ObjectPlace"]

#: Requests under way at a time.
_FLIGHT = 8
#: The longest receipt that is read.
_MOST = 2**28


class ObjectPlace:
    """Where a plan's checkpoint is to be, and its receipts."""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.path = cast(ObjectPath, plan.path)
        self._root = cast(ObjectPath, plan.workplace)

    def add(self, receipt: PlannedReceipt) -> None:
        """Keep a receipt.

        Raises:
            ParseError: if there is one for the same task that says otherwise.
        """
        number = receipt.made.number
        place = self._place(number)
        try:
            put_object(place, _line(receipt), is_new=True)
        except FileExistsError:
            other = self._read(number)
            if other is None or not _agree(receipt.made, other):
                raise ParseError(
                    f"{place}: two receipts of task {number} disagree: one is not of this checkpoint, or a source "
                    "changed"
                ) from None

    def receipts(self, numbers: Iterable[int]) -> dict[int, ObjectReceipt]:
        """Read the receipts of these tasks, as many as there are.

        Raises:
            ParseError: if one is not what was written, or not of this plan.
        """
        with ThreadPoolExecutor(_FLIGHT, thread_name_prefix="shardwise-receipts") as pool:
            found = list(pool.map(self._read, numbers))
        return {receipt.number: receipt for receipt in found if receipt is not None}

    def discard(self) -> None:
        """Remove the receipts."""

        def remove(number: int) -> None:
            place = self._place(number)
            with suppress(OSError):  # Nobody looks for them any more.
                place.ask(lambda: place.filesystem.rm_file(place.key))

        with ThreadPoolExecutor(_FLIGHT, thread_name_prefix="shardwise-receipts") as pool:
            list(pool.map(remove, range(len(self.plan.files))))

    def _place(self, number: int) -> ObjectPath:
        return self._root / f"{number}.receipt"

    def _read(self, number: int) -> ObjectReceipt | None:
        place = self._place(number)
        try:
            status = place.status()
        except FileNotFoundError:
            return None
        if not 0 < status.size <= _MOST:
            raise ParseError(f"{place}: a receipt is damaged: it has {status.size} bytes")
        return self._checked(number, place.read(0, status.size, status.mark), place)

    def _checked(self, number: int, line: bytes, place: ObjectPath) -> ObjectReceipt:
        with read_line(line, place) as said:
            plan, task, size, mark, digests, crcs, read, written, _, _ = said
            receipt = ObjectReceipt(
                task,
                ObjectStatus(size, str(mark)),
                {tensor: int(value, 16) for tensor, value in digests},
                dict(crcs),
                read,
                written,
            )
            numbers = [task, size, read, written, *receipt.digests, *receipt.crcs]
            check_numbers(numbers, receipt.digests.values(), receipt.crcs.values())
        if plan != self.plan.digest:
            raise ParseError(f"{place}: a receipt is of another plan than {self.plan.digest[:16]}")
        file = self.plan.files[number]
        filled = {position: slot.tensor for position, slot in enumerate(file.slots) if slot.end > slot.begin}
        wanted = set(filled.values()), set(filled) if file.needs_crcs else set()
        if (task, size) != (number, file.size) or (set(receipt.digests), set(receipt.crcs)) != wanted:
            raise ParseError(
                f"{place}: the receipt of task {number} says that it made something else than the plan says"
            )
        return receipt


def _agree(one: ObjectReceipt, other: ObjectReceipt) -> bool:
    return (one.status, one.digests, one.crcs) == (other.status, other.digests, other.crcs)


def _line(receipt: PlannedReceipt) -> bytes:
    made = receipt.made
    digests = [[tensor, f"{digest:x}"] for tensor, digest in made.digests.items()]
    return line_of(
        [
            receipt.plan,
            made.number,
            *made.status,
            digests,
            list(made.crcs.items()),
            made.bytes_read,
            made.bytes_written,
            receipt.seconds,
            receipt.worker,
        ]
    )
