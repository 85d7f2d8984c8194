"""The parts that objects are cut into, within the limits of a store and the memory of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...._arguments import integer
from ...._text import bytes_text
from ....errors import LayoutError
from ..forms.files import TargetFile
from .work import Workers

__all__ = ["LIMITS", "WINDOW", "Limits", "PartSizes", "parts_for", "parts_of_workers"]

#: The most parts under way at a time.
WINDOW = 8


class Limits(NamedTuple):
    """Limits of a store: the least and the most bytes of a part, and the most parts.

    S3 takes at least 5 MiB for each part but the last, and at most 10,000 parts. Where one worker makes an object,
    parts are filled to at least three quarters, with blocks of at most a quarter. Where several do, a part is what one
    of them has of it, at least `shared` bytes.
    """

    least: int = 8 * 2**20
    most: int = 64 * 2**20
    parts: int = 7_000
    shared: int = 5 * 2**20
    shared_parts: int = 10_000

    def least_shared(self, size: int) -> int:
        """The least bytes of a part of an object of this size whose parts several workers put."""
        return max(self.shared, -(-size // self.shared_parts))

    def part_number(self, size: int, begin: int) -> int:
        """The number of the part of such an object that begins at a byte: the same whoever puts it."""
        return 1 + begin // self.least_shared(size)


LIMITS = Limits()


class PartSizes(NamedTuple):
    """The way in which objects are cut into parts.

    Attributes:
        bytes: The bytes of a part.
        window: The number of parts that are under way at a time.
        holds: Whether there is room for a part that is held back.
    """

    bytes: int
    window: int
    holds: bool


def parts_for(files: Sequence[TargetFile], memory: int, workers: int = 1, limits: Limits = LIMITS) -> PartSizes:
    """Say what parts objects are made of by a worker with so much memory.

    One part is filled, from another, while some are under way.

    Raises:
        LayoutError: if the memory is too little; says what would be needed.
    """
    integer("memory", memory)
    largest = max((file.size for file in files), default=1)
    least = max(limits.least, -(-largest // limits.parts))
    part = min(max(least, min(memory // 6, limits.most)), max(largest, 1))
    if memory < 4 * part:
        each = f" for each of {workers} workers" if workers > 1 else ""
        raise LayoutError(
            f"memory is {bytes_text(memory)}{each}; at least {bytes_text(4 * part)} are needed for objects that "
            f"are uploaded in parts of {bytes_text(part)}"
        )
    holds = any(file.needs_values for file in files) and memory >= 5 * part
    return PartSizes(part, max(1, min(memory // part - 3 - holds, WINDOW)), holds)


def parts_of_workers(files: Sequence[TargetFile], memory: int, workers: Workers, limits: Limits = LIMITS) -> PartSizes:
    """Say what parts each of several workers makes objects of; the workers of a host share its memory."""
    return parts_for(files, workers.memory, memory // workers.memory, limits)
