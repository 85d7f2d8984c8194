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
        """Return the least bytes of a part, for an object of this size whose parts come from several workers."""
        return max(self.shared, -(-size // self.shared_parts))

    def part_number(self, size: int, begin: int) -> int:
        """Return the number of the part of such an object that begins at a byte; it does not depend on the worker."""
        return 1 + begin // self.least_shared(size)


LIMITS = Limits()


class PartSizes(NamedTuple):
    """The parts that objects are cut into.

    Attributes:
        bytes: The size of a part.
        window: The number of parts that are uploaded at a time.
        holds: Whether the memory has room for a part that is kept until later bytes are known.
    """

    bytes: int
    window: int
    holds: bool


def parts_for(files: Sequence[TargetFile], memory: int, workers: int = 1, limits: Limits = LIMITS) -> PartSizes:
    """Return the sizes of the parts of objects for a worker with so much memory.

    A worker fills one part, assembles data in a second, and uploads several others meanwhile.

    Raises:
        LayoutError: if the memory is too little; the message says how much is needed.
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
    """Return the sizes of the parts for each of several workers, which share the memory of a host."""
    return parts_for(files, workers.memory, memory // workers.memory, limits)
