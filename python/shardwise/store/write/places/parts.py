"""The parts that objects of a store are uploaded in, within the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...._arguments import integer
from ...._text import bytes_text
from ....errors import LayoutError
from ..crew import Crew
from ..formats.files import TargetFile

__all__ = ["FLIGHT", "LIMITS", "Limits", "Parts", "parts_for", "parts_of_crew"]

FLIGHT = 8


class Limits(NamedTuple):
    """What a store takes: the least and the most bytes of a part, and the most parts.

    S3 takes at least 5 MiB for each part but the last, and at most 10,000 parts. Parts are filled to at least three
    quarters, with blocks of at most a quarter.
    """

    least: int = 8 * 2**20
    most: int = 64 * 2**20
    parts: int = 7_000


LIMITS = Limits()


class Parts(NamedTuple):
    """How objects are cut into parts.

    Attributes:
        bytes: Of a part.
        flight: How many are under way at a time.
        holds: Whether there is room for a part that is held back.
    """

    bytes: int
    flight: int
    holds: bool


def parts_for(files: Sequence[TargetFile], memory: int, workers: int = 1, limits: Limits = LIMITS) -> Parts:
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
    holds = any(file.has_digests or file.needs_crcs for file in files) and memory >= 5 * part
    return Parts(part, max(1, min(memory // part - 3 - holds, FLIGHT)), holds)


def parts_of_crew(files: Sequence[TargetFile], memory: int, crew: Crew, limits: Limits = LIMITS) -> Parts:
    """Say what parts each worker of a crew makes objects of; the workers of a host share its memory."""
    return parts_for(files, crew.memory, memory // crew.memory, limits)
