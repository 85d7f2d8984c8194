"""Transfers: one box that one holder sends to another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._arguments import INTEGER, check_fields
from .._dtypes import itemsize_of
from ..piece import Slices, check_slices, sides_of
from .run import Window, box_view

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Transfer"]

_WINDOW = (tuple, type(None))


@dataclass(frozen=True)
class Transfer:
    """One box that one holder sends to another."""

    #: The sender's label.
    src_device: Any
    #: The receiver's label.
    dst_device: Any
    #: The box in the global tensor.
    box: Slices
    #: The same box in the sender's array; if that is flat, in the part of it that `src_window` gives.
    src_box: Slices
    #: The same box in the receiver's array; if that is flat, in the part of it that `dst_window` gives.
    dst_box: Slices
    #: The number of its elements.
    size: int
    #: Offset and shape of the piece in the sender's array, if that has one dim: `src_box` lies in
    #: `array[offset : offset + prod(shape)].reshape(shape)`. `None` if the array has the tensor's rank.
    src_window: Window | None = None
    #: The same for the receiver.
    dst_window: Window | None = None

    def __post_init__(self) -> None:
        check_slices("box", self.box)
        check_slices("src_box", self.src_box)
        check_slices("dst_box", self.dst_box)
        is_right = isinstance(self.src_window, _WINDOW) and isinstance(self.dst_window, _WINDOW)
        if not (is_right and isinstance(self.size, INTEGER)):
            check_fields(self, size=INTEGER, src_window=_WINDOW, dst_window=_WINDOW)
        if type(self.src_device).__hash__ is None or type(self.dst_device).__hash__ is None:
            check_fields(self, src_device=Hashable, dst_device=Hashable)

    def nbytes(self, dtype: npt.DTypeLike) -> int:
        """Return the bytes of the box for a dtype."""
        return self.size * itemsize_of(dtype)

    def src_view(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the box as a view of the sender's array."""
        return box_view(array, self.src_window, self.src_box)

    def dst_view(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the box as a view of the receiver's array."""
        return box_view(array, self.dst_window, self.dst_box)

    def __hash__(self) -> int:
        boxes = tuple(map(sides_of, (self.box, self.src_box, self.dst_box)))
        return hash((self.src_device, self.dst_device, boxes, self.src_window, self.dst_window))
