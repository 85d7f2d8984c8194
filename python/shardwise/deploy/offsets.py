"""Offsets and positions: as they are given, what is found there, and the boxes and parameters that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._core import Held
from .._text import shown
from ..errors import LayoutError
from ..partition import Partition
from ..piece import Piece
from ..tiling import Tiling
from .parameters import LocalParameter
from .world import holds

__all__ = [
    "DeviceParameters",
    "Found",
    "FoundShards",
    "GivenOffsets",
    "ListedBoxes",
    "Offsets",
    "ShardPlaces",
    "boxes_held",
    "check_within",
    "is_holder",
    "turned",
    "whole_numbers",
    "whole_shards",
]

Offsets = npt.NDArray[np.int64]
#: Offsets as they are given: of 64 bits or of 32.
GivenOffsets = npt.NDArray[np.signedinteger[Any]]
#: For each shard of a tensor its devices, each with a parameter that has it and its first position there.
ShardPlaces = tuple[tuple[tuple[Any, str, int], ...], ...]


class Found(NamedTuple):
    """The given elements of a tensor that a device holds in one parameter.

    Attributes:
        parameter: the name of the parameter.
        which: the positions of these elements among the offsets that were given.
        positions: where each is in the parameter: flat, in C order.
    """

    parameter: str
    which: Offsets
    positions: Offsets


class FoundShards(NamedTuple):
    """The shards of some elements of a tensor, and the places of each shard on all devices.

    Attributes:
        shards: the number of the shard that has each element.
        local: the offset of each element in its shard: flat, in C order.
        places: for each shard its devices, each with the parameter that has it there, and the position in the parameter
            from which `local` is counted.
    """

    shards: Offsets
    local: Offsets
    places: ShardPlaces


class Slab(NamedTuple):
    """A device's own array of a tensor, beginning at a position of one parameter."""

    parameter: str
    start: int


class DeviceParameters(NamedTuple):
    """The parameters of a device, their sizes, the slabs of each tensor, the slabs in each parameter."""

    parameters: list[LocalParameter]
    sizes: dict[str, int]
    slabs: dict[str, list[Slab]]
    tensors: dict[str, list[tuple[int, str]]]

    @classmethod
    def of(cls, parameters: list[LocalParameter]) -> DeviceParameters:
        """Return the parameters of a device with the place of each tensor in them."""
        sizes = {one.name: math.prod(one.shape) for one in parameters}
        slabs: dict[str, list[Slab]] = {}
        tensors: dict[str, list[tuple[int, str]]] = {name: [] for name in sizes}
        for one in parameters:
            for tensor, slot, start, _ in one.slabs:
                row = math.prod(one.shape[1 if slot is None else 2 :])
                at = start * row + (0 if slot is None else slot * math.prod(one.shape[1:]))
                slabs.setdefault(tensor, []).append(Slab(one.name, at))
                tensors[one.name].append((at, tensor))
        return cls(parameters, sizes, slabs, tensors)


def whole_numbers(argument: str, offsets: Any) -> GivenOffsets:
    """Return offsets as an array of 32 or 64 bits; their range is checked later."""
    given = np.asarray(offsets.cpu() if hasattr(offsets, "cpu") else offsets)
    if given.shape == (0,):
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise TypeError(f"{argument} must be whole numbers in one dim, got {given.dtype} of shape {given.shape}")
    if given.dtype == np.uint64 and int(given.max()) >= 2**63:
        raise IndexError(f"{argument} has {given[given.argmax()]}, which is not within a tensor")
    return np.require(given, np.int32 if given.dtype == np.int32 else np.int64, ("C", "A"))


def check_within(argument: str, given: GivenOffsets, size: int, what: str) -> None:
    """Refuse a position outside of an array of this size."""
    outside = Held((size,), (size,), (0, size, 0)).first_outside(given)
    if outside is not None:
        raise IndexError(f"{argument} has {given[outside]}, which is not within {what} of {size} elements")


def turned(piece: Piece) -> Piece:
    """Return the box of a piece in the device's own array, with its start in the tensor."""
    assert isinstance(piece.start, tuple)
    sides = zip(piece.box, piece.start, strict=True)
    box = tuple(slice(start, start + side.stop - side.start) for side, start in sides)
    return Piece(box, tuple(side.start for side in piece.box))


def boxes_held(pieces: Iterable[Piece], shape: tuple[int, ...], own: tuple[int, ...]) -> Held:
    """Return boxes of an array of a shape, and their places in another."""
    sides: list[int] = []
    for piece in pieces:
        if not shape:  # One side stands for the only element.
            sides = [0, 1, 0]
        assert isinstance(piece.start, tuple)
        for side, at in zip(piece.box, piece.start, strict=True):
            sides += side.start, side.stop, at
    return Held(shape, own, np.array(sides, np.int64))


class ListedBoxes:
    """Boxes that a device holds one after the other, each flattened, as a manifest has them."""

    def __init__(self, pieces: Iterable[Piece], whole: tuple[int, ...]) -> None:
        self._parts = []
        for piece in pieces:
            extents, zeros = tuple(side.stop - side.start for side in piece.box), (0,) * len(whole)
            inner = Piece(tuple(slice(0, size) for size in extents), tuple(side.start for side in piece.box))
            there = boxes_held([Piece(piece.box, zeros)], whole, extents)
            back = boxes_held([inner], extents, whole)
            assert not isinstance(piece.start, tuple)
            self._parts.append((int(piece.start), there, back))
        #: The elements of the device's own array, up to the last box.
        self.room = max((start + there.room for start, there, _ in self._parts), default=0)

    def locate(self, offsets: Any) -> tuple[Offsets, Offsets]:
        """Return which of the offsets are in the boxes, and where."""
        found = [(which, at + start) for start, there, _ in self._parts for which, at in (there.locate(offsets),)]
        return _in_order(found)

    def origins(self, positions: Offsets) -> tuple[Offsets, Offsets]:
        """Return which of the positions are in the boxes, and their offsets in the tensor."""
        found = []
        for start, there, back in self._parts:
            own = ((positions >= start) & (positions < start + there.room)).nonzero()[0]
            which, offsets = back.locate(positions[own] - start)
            found.append((own[which], offsets))
        return _in_order(found)

    def scatter(self, offsets: Any, values: Any, memory: Any) -> int:
        """Write the values of the offsets that are in the boxes, and return their number."""
        parts = ((there, memory[start : start + there.room]) for start, there, _ in self._parts)
        return sum(there.scatter(offsets, values, own) for there, own in parts)


def _in_order(found: list[tuple[Offsets, Offsets]]) -> tuple[Offsets, Offsets]:
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    which, at = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(which, kind="stable")
    return which[order], at[order]


def is_holder(partition: Tiling, device: Any) -> bool:
    """Return whether a device has an array of a tensor that is cut so."""
    mesh = getattr(partition, "device_mesh", None)
    return device in partition.holders if mesh is None else holds(mesh, device)


def whole_shards(tensor: str, tiling: Tiling) -> tuple[Partition, list[list[Any]]]:
    """Return the partition of a tensor each of whose elements is in one shard, and the devices of each shard.

    Raises:
        LayoutError: if it is not such a partition.
    """
    if not isinstance(tiling, Partition):
        raise LayoutError(
            f"no layout says how {shown(tensor)} is cut, so its boxes have no numbers; locate says which elements "
            "each device holds"
        )
    holders = [tiling.devices_holding(number) for number in range(tiling.total_shards)]
    boxes = [piece.box for each in holders for piece in tiling.pieces(each[0])]
    if sum(math.prod(side.stop - side.start for side in box) for box in boxes) != math.prod(tiling.shape):
        raise LayoutError(
            f"shards of {shown(tensor)} share elements, so an element may be in several shards; locate says which "
            "elements each device holds"
        )
    return tiling, holders
