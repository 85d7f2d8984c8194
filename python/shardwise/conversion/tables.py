"""The places of a tensor's elements, and the tensors that are to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._dtypes import Dtype
from ..partition import Partition
from ..pieces import NO_PIECES, Bounds, Pieces
from ..shared_tiling import SharedTiling

__all__ = ["Tables", "Wanted"]


@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor to write.

    Attributes:
        name: Its name in the new checkpoint.
        pieces: The sources of its elements: boxes that tile it.
        replicas: Further boxes, which should equal parts of `pieces`.
        partition: Its cut; `None` if it is written whole.
        identity: Equal for two tensors that share their elements; `None` if unknown.
        is_object: Whether it is not a tensor, but a value with these bytes.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    pieces: Pieces
    replicas: Pieces = NO_PIECES
    partition: Partition | SharedTiling | None = None
    identity: Any = None
    is_object: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        size = self.itemsize
        for extent in self.shape:
            size *= extent
        return size


class Tables(NamedTuple):
    """The places of a tensor's elements.

    Attributes:
        pieces: Boxes that tile it, or a box of it.
        replicas: Further boxes, which store some of the elements again.
    """

    pieces: Pieces
    replicas: Pieces = NO_PIECES

    def clipped(self, box: Bounds) -> Tables:
        """Return the parts within a box."""
        return Tables(self.pieces.clipped(box), self.replicas.clipped(box))

    def changed(self, change: Callable[[Pieces], Pieces]) -> Tables:
        """Return both tables, changed by a function; an empty table stays as it is."""
        return Tables(*(change(table) if len(table) else table for table in self))

    @staticmethod
    def joined(tables: Sequence[Tables], rank: int) -> Tables:
        """Return the pieces of several tables, joined, and the replicas."""
        return Tables(
            Pieces.joined([each.pieces for each in tables], rank),
            Pieces.joined([each.replicas for each in tables], rank),
        )
