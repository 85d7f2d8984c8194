"""Receipts as lines of JSON, each with a digest of itself (rule 2.12 d)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....errors import ParseError
from ...data.engine import DIGEST_MODULUS
from .task import TaskReceipt

__all__ = ["receipt_from_line", "receipt_line", "sealed_line", "unsealed"]


def receipt_line(receipt: TaskReceipt) -> bytes:
    """Return a receipt as a line of JSON with a digest."""
    said = [*receipt[:3], [f"{digest:x}" for digest in receipt.digests], *receipt[4:]]
    return sealed_line(said)


def sealed_line(said: Any) -> bytes:
    """Return a value as a line of JSON with a digest of the JSON."""
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(text), text)


def receipt_from_line(line: bytes, where: object) -> TaskReceipt:
    """Return the receipt that a line holds.

    Raises:
        ParseError: if the line is not one of `receipt_line`.
    """
    with unsealed(line, where, "a receipt") as said:
        plan, task, ranges, digests, crcs, read, written, seconds, worker, part, shares, made = said
        receipt = TaskReceipt(
            str(plan),
            task,
            tuple((file, begin, end) for file, begin, end in ranges),
            tuple(int(digest, 16) for digest in digests),
            tuple(crcs),
            read,
            written,
            float(seconds),
            str(worker),
            str(part),
            tuple((file, begin, end, str(etag)) for file, begin, end, etag in shares),
            None if made is None else size_and_tag(*made),
        )
        numbers = [number for row in receipt.ranges for number in row]
        numbers += [number for row in receipt.shares for number in row[:3]]
        sizes = [] if receipt.uploaded is None else [receipt.uploaded[0]]
        if not all(type(number) is int for number in (task, read, written, *numbers, *sizes, *receipt.crcs)):
            raise ValueError
        if not all(0 <= digest < DIGEST_MODULUS for digest in receipt.digests):
            raise ValueError
        if not all(0 <= crc < 2**32 for crc in receipt.crcs):
            raise ValueError
    return receipt


def size_and_tag(size: int, etag: str) -> tuple[int, str]:
    return size, str(etag)


@contextmanager
def unsealed(line: bytes, where: object, what: str) -> Iterator[Any]:
    """Yield the value in a line of `sealed_line`.

    Raises:
        ParseError: if the line is damaged, or the value, as read by the `with` block, is not of the expected form.
    """
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if _digest(text) != digest:
        raise ParseError(f"{where}: {what} is not what was written: it was edited or is damaged")
    try:
        yield json.loads(text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ParseError(f"{where}: {what} has contents that no task writes") from None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()
