"""Pieces: a box of a tensor, and where it lies in its holder's array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ._text import shown

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Piece", "Slices", "check_slices", "sides_of"]

#: A box: one slice per dim, from a start to a stop.
Slices = tuple[slice, ...]


class Piece:
    """A box of a tensor, and where it is in its holder's array.

    >>> Piece((slice(0, 4), slice(2, 6)), (0, 0))
    Piece(box=(slice(0, 4, None), slice(2, 6, None)), start=(0, 0))
    """

    # Not a dataclass: importing these takes a quarter of the time of `import shardwise`.
    __slots__ = ("box", "start")
    __match_args__ = ("box", "start")

    #: The box of the tensor.
    box: Slices
    #: The place where it begins in the holder's own array: one position per dim, or, in an array of one dim in which
    #: the box lies flattened in C order, the offset of its first element.
    start: tuple[int, ...] | int

    def __init__(self, box: Slices, start: tuple[int, ...] | int) -> None:
        check_slices("box", box)
        if not isinstance(start, (tuple, int, np.integer)):
            raise TypeError(f"start must be a position for each dim, or an offset, got {shown(start)}")
        object.__setattr__(self, "box", box)
        object.__setattr__(self, "start", start)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Piece cannot be changed: {name} is read-only")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Piece cannot be changed: {name} is read-only")

    def __reduce__(self) -> tuple[type[Piece], tuple[Slices, tuple[int, ...] | int]]:
        return type(self), (self.box, self.start)

    def __repr__(self) -> str:
        return f"Piece(box={self.box!r}, start={self.start!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Piece):
            return NotImplemented
        return self.box == other.box and self.start == other.start

    def __hash__(self) -> int:
        return hash((sides_of(self.box), self.start))

    def view(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the piece as a view of its holder's own array, in the shape of the box.

        >>> import numpy as np
        >>> Piece((slice(0, 2), slice(1, 3)), 1).view(np.arange(6))
        array([[1, 2],
               [3, 4]])
        """
        extents = tuple(side.stop - side.start for side in self.box)
        if not isinstance(self.start, tuple):
            return array[self.start : self.start + math.prod(extents)].reshape(extents)
        sides = (slice(start, start + extent) for start, extent in zip(self.start, extents, strict=True))
        key: tuple[Any, ...] = (*sides, ...)
        view: npt.NDArray[Any] = array[key]
        return view


def check_slices(name: str, box: object) -> None:
    """Refuse what is not a tuple of slices, quickly.

    >>> check_slices("box", (0, 4))
    Traceback (most recent call last):
    TypeError: box must be a tuple of slices, got (0, 4)
    """
    if isinstance(box, tuple):
        for side in box:
            if side.__class__ is not slice:  # no class can be made from it
                break
        else:
            return
    raise TypeError(f"{name} must be a tuple of slices, got {shown(box)}")


def sides_of(box: Slices) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each dim, which can be hashed; slices cannot before Python 3.12.

    >>> sides_of((slice(0, 4), slice(2, 6)))
    ((0, 4), (2, 6))
    """
    return tuple((side.start, side.stop) for side in box)
