"""Receipts as lines of JSON with a digest of themselves; what numbers they may hold, and which are missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import ParseError
from ..engine import DIGEST_MODULUS

__all__ = ["check_numbers", "line_of", "read_line", "refuse_missing"]

_MOST_SHOWN = 5


def line_of(said: Sequence[Any]) -> bytes:
    """Write what a receipt says as a line."""
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(text), text)


@contextmanager
def read_line(line: bytes, where: object) -> Iterator[Any]:
    """Read what a line says; the body makes a receipt of it.

    Raises:
        ParseError: if the digest is wrong, or the body raises ValueError, TypeError or OverflowError.
    """
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if _digest(text) != digest:
        raise ParseError(f"{where}: a receipt is not what was written: it was edited or is damaged")
    try:
        yield json.loads(text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ParseError(f"{where}: a receipt has contents that no task writes") from None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()


def check_numbers(integers: Iterable[Any], digests: Iterable[int], crcs: Iterable[Any]) -> None:
    """Raise ValueError unless these are integers, digests of tensors, and CRC-32."""
    crcs = tuple(crcs)
    if not all(type(number) is int for number in (*integers, *crcs)):
        raise ValueError
    if not all(0 <= digest < DIGEST_MODULUS for digest in digests) or not all(0 <= crc < 2**32 for crc in crcs):
        raise ValueError


def refuse_missing(path: object, missing: Sequence[int], total: int) -> None:
    """Raise ParseError if receipts of the `total` tasks of a checkpoint are missing; names some."""
    if len(missing):
        some = ", ".join(map(str, missing[:_MOST_SHOWN]))
        more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
        raise ParseError(f"{path}: receipts of {len(missing)} of {total} tasks are missing: {some}{more}")
