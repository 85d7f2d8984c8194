"""The leaves of trees of tensors: stored tensors, and values in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from .._dtypes import Dtype
from .._fork import cached_property
from .._text import shown
from .._types import Array
from ..pieces import Bounds, LocatedPiece, Pieces
from .assembled import Leaf
from .tables import Tables, Wanted

__all__ = ["Stored", "Values"]


@dataclass(frozen=True, eq=False)
class Stored(Leaf):
    """A stored tensor: a leaf.

    Attributes:
        make: Returns its pieces; called once, if they are needed.
    """

    make: Callable[[], Wanted] = field(kw_only=True, repr=False)

    @property
    def what(self) -> Hashable:
        """The name of the tensor."""
        return self.origin

    @property
    def source(self) -> str | None:
        """The name of the tensor."""
        return self.origin

    @property
    def stored(self) -> str | None:
        """The name of the tensor; `None` if it is written separately."""
        return None if self.is_apart else self.origin

    @property
    def has_replicas(self) -> bool:
        """True if elements are stored twice."""
        return len(self._whole.replicas) > 0

    @property
    def expected(self) -> int:
        """The number of its pieces."""
        return len(self._whole.pieces)

    @property
    def place(self) -> Hashable:
        """A value that is equal for two tensors with the same stored elements."""
        return self._whole.pieces.identity

    @cached_property
    def _whole(self) -> Tables:
        if self.dtype.bits % 8:
            raise TypeError(
                f"tensor {shown(self.origin)} is {self.dtype.name}, {self.dtype.bits} bits an element; packed elements "
                "cannot be rewritten"
            )
        wanted = self.make()
        return Tables(wanted.pieces, wanted.replicas)

    def _tables(self, box: Bounds | None) -> Tables:
        return self._whole if box is None else self._whole.clipped(box)


@dataclass(frozen=True, eq=False)
class Values(Leaf):
    """A few values in memory: a leaf.

    Attributes:
        values: The bytes of the values, as an array.
    """

    values: Array = field(kw_only=True)

    @classmethod
    def of(cls, origin: str, values: Array, dtype: Dtype) -> Values:
        """Return these values as a leaf of this dtype."""
        return cls(origin, values.shape, dtype, values=np.ascontiguousarray(values).view(f"V{dtype.bits // 8}"))

    @property
    def what(self) -> Hashable:
        """The values."""
        return "values", self.values.tobytes(), self.shape, self.dtype.name

    @property
    def place(self) -> Hashable:
        """A value equal only to itself: two tensors of equal values are not tied."""
        return id(self.values)

    @property
    def expected(self) -> int:
        """One: the array."""
        return 1

    def _tables(self, box: Bounds | None) -> Tables:
        whole = tuple((0, size) for size in self.shape)
        tables = Tables(Pieces.of([LocatedPiece(whole, self.values, 0, self.values.strides)], len(whole)))
        return tables if box is None else tables.clipped(box)
