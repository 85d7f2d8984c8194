"""The boxes that files hold, as columns: a few numbers per box, so that millions of boxes take little memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from ...._types import Numbers
from ....errors import SizeOverflowError
from ....partition import Partition
from ....pieces import Bounds, dense_strides
from ....shared_tiling import SharedTiling

__all__ = ["BoxPool", "OwnedBoxes", "Slot", "SlotTable", "Slots", "digits_of", "joined_slots"]


#: The number of slots that are made at a time in an iteration over a file's slots.
_CHUNK = 4096
#: The most slots whose sizes are worked out in a loop, which is faster than with arrays.
_FEW = 8
_LARGEST = 2**63 - 1


class Slot(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        tensor: The tensor's position among those that are written.
        box: The box, in elements of the tensor.
        begin: Its first byte, counted from the file's data.
        end: The byte after its last.
    """

    tensor: int
    box: Bounds
    begin: int
    end: int


class Shaped(Protocol):
    """The facts about a tensor that its boxes need."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, in elements."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


class OwnedBoxes(NamedTuple):
    """The boxes of a tensor that are written.

    Attributes:
        devices: The device that owns each box.
        ordinals: The number of each box among the boxes of its device, from 0.
        places: The place of each box in the pool.
    """

    devices: Numbers
    ordinals: Numbers
    places: Numbers


class BoxPool:
    """Boxes, those of equal cuts kept once: each is `start…, stop…` in one list of numbers, and has its place there.

    >>> pool = BoxPool()
    >>> pool.whole((2, 3)).places.tolist(), pool.whole((4,)).places.tolist(), pool.whole((2, 3)).places.tolist()
    ([0], [4], [0])
    >>> pool.coordinates.tolist()
    [0, 0, 2, 3, 0, 4]
    """

    def __init__(self) -> None:
        self._parts: list[Numbers] = []
        self._length = 0
        self._wholes: dict[tuple[int, ...], OwnedBoxes] = {}
        self._cuts: dict[Partition | SharedTiling, OwnedBoxes] = {}

    @property
    def coordinates(self) -> Numbers:
        """The starts and stops of all boxes, in one array."""
        if len(self._parts) != 1:
            self._parts = [np.concatenate([np.zeros(0, np.int64), *self._parts])]
        return self._parts[0]

    def whole(self, shape: tuple[int, ...]) -> OwnedBoxes:
        """Add the box that is a whole tensor, owned by device 0."""
        found = self._wholes.get(shape)
        if found is None:
            try:
                sides = np.array([[0] * len(shape), shape], np.int64).reshape(1, 2, len(shape))
            except OverflowError:
                raise SizeOverflowError("an offset of a file is over 2**63 - 1") from None
            zero = np.zeros(1, np.int64)
            found = self._wholes[shape] = OwnedBoxes(zero, zero, self._add(sides))
        return found

    def owned(self, partition: Partition | SharedTiling) -> OwnedBoxes:
        """Add the boxes of a partition. The owner of a box is the first device that holds it."""
        found = self._cuts.get(partition)
        if found is None:
            found = self._cuts[partition] = self._owned(partition)
        return found

    def arrays(
        self,
        partition: Partition | SharedTiling | None,
        shape: tuple[int, ...],
        devices: Numbers,
        zeros: Numbers | None = None,
    ) -> OwnedBoxes:
        """Add the boxes of all devices, each as `start…, stop…`, its start in the device's array, the array's shape.

        Args:
            partition: The cut of the tensor; `None` if each device has all of it.
            shape: The tensor's shape.
            devices: The number of each device of the partition, or of all devices if there is none.
            zeros: Without a partition, the devices whose arrays are zeros instead of the tensor.
        """
        rank = len(shape)
        if partition is None:
            own, boxes = devices, np.zeros((2, 4, rank), np.int64)
            boxes[0, 1] = boxes[:, 3] = shape
            whole, none = self._add(boxes)
            places = np.full(len(own), whole) if zeros is None else np.where(np.isin(own, zeros), none, whole)
            return OwnedBoxes(own, np.zeros_like(own), places)
        begins, rows = partition.all_pieces()
        arrays = np.array(partition.holder_shapes(), np.int64).reshape(len(begins) - 1, rank)
        filled = (rows[:, :, 0] < rows[:, :, 1]).all(axis=1)
        of = np.repeat(np.arange(len(arrays)), np.diff(begins))[filled]
        boxes = np.concatenate([rows[filled].transpose(0, 2, 1), arrays[of][:, None]], axis=1)
        # A device without elements has an array nevertheless.
        none = np.flatnonzero(np.bincount(of, minlength=len(arrays)) == 0)
        empty = np.zeros((len(none), 4, rank), np.int64)
        empty[:, 3] = arrays[none]
        of, boxes = np.concatenate([of, none]), np.concatenate([boxes, empty])
        order = np.argsort(of, kind="stable")
        return OwnedBoxes(devices[of[order]], np.zeros(len(of), np.int64), self._add(boxes[order]))

    def _owned(self, partition: Partition | SharedTiling) -> OwnedBoxes:
        if 0 in partition.shape:
            return self.whole(partition.shape)  # Without elements; it belongs to the first device.
        begins, rows = partition.all_pieces()
        sides = rows[:, :, :2].transpose(0, 2, 1)
        counts = np.diff(begins)
        devices = np.repeat(np.arange(len(counts)), counts)
        kept = np.flatnonzero((sides[:, 0] < sides[:, 1]).all(axis=1))
        flat = np.ascontiguousarray(sides[kept]).reshape(len(kept), 2 * sides.shape[2])
        firsts = np.sort(np.unique(flat, axis=0, return_index=True)[1]) if flat.shape[1] else np.arange(len(kept))[:1]
        devices = devices[kept][firsts]
        numbers = np.arange(len(firsts)) - np.searchsorted(devices, devices)
        return OwnedBoxes(devices, numbers, self._add(sides[kept][firsts]))

    def _add(self, sides: Numbers) -> Numbers:
        """Add boxes, int64 of shape (boxes, 2, dims), or (boxes, 4, dims) with their arrays; return their places."""
        count, width, rank = sides.shape
        first, self._length = self._length, self._length + width * rank * count
        self._parts.append(np.ascontiguousarray(sides).reshape(-1))
        return np.arange(first, self._length, width * rank) if rank else np.full(count, first)


class SlotTable:
    """The table that the slots of all files share: the numbers of boxes, and each tensor's dims and bytes per element.

    Args:
        pool: For each box `start…, stop…`; with arrays, then its start in its array, and the array's shape.
        ranks: The number of dims of each tensor.
        itemsizes: The bytes of an element of each tensor.
        has_arrays: Whether boxes are parts of arrays; otherwise each box is stored densely by itself.
    """

    def __init__(self, pool: Numbers, ranks: Numbers, itemsizes: Numbers, has_arrays: bool = False) -> None:
        self.pool, self.ranks, self.itemsizes, self.has_arrays = pool, ranks, itemsizes, has_arrays

    @classmethod
    def of(cls, pool: Numbers, tensors: Iterable[Shaped], has_arrays: bool = False) -> SlotTable:
        """Make the table of these tensors."""
        facts = np.array([(len(each.shape), each.itemsize) for each in tensors], np.int64).reshape(-1, 2)
        return cls(pool, facts[:, 0], facts[:, 1], has_arrays)

    @property
    def width(self) -> int:
        """The numbers that a box has in the pool for each dim."""
        return 4 if self.has_arrays else 2

    def sides(self, places: npt.NDArray[Any], rank: int) -> tuple[Numbers, Numbers]:
        """Return the starts and the stops of the boxes of this rank at these places: int64 of shape (boxes, dims)."""
        at = places.astype(np.int64)[:, None] + np.arange(2 * rank)
        found: Numbers = self.pool[at]
        return found[:, :rank], found[:, rank:]

    def in_arrays(self, places: npt.NDArray[Any], rank: int) -> tuple[Numbers, Numbers]:
        """Return the starts of boxes in their arrays, and the arrays' shapes: both int64 of shape (boxes, dims)."""
        if self.has_arrays:
            return self.sides(places.astype(np.int64) + 2 * rank, rank)
        starts, stops = self.sides(places, rank)
        return np.zeros_like(starts), stops - starts

    def strides(self, tensors: npt.NDArray[Any], places: npt.NDArray[Any], rank: int) -> Numbers:
        """Return the bytes from one element of a box to the next, per dim: int64 of shape (boxes, dims)."""
        _, shapes = self.in_arrays(places, rank)
        found = dense_strides(shapes, 1)
        found *= self.itemsizes[tensors][:, None]
        return found

    def array_offsets(self, tensors: npt.NDArray[Any], places: npt.NDArray[Any]) -> Numbers:
        """Return, for each box, the byte of its array at which it begins."""
        found = np.zeros(len(tensors), np.int64)
        for rank, chosen in self.by_rank(tensors):
            begins, _ = self.in_arrays(places[chosen], rank)
            found[chosen] = (begins * self.strides(tensors[chosen], places[chosen], rank)).sum(axis=1)
        return found

    def array_bytes(self, tensors: npt.NDArray[Any], places: npt.NDArray[Any]) -> Numbers:
        """Return the bytes of the array of each box.

        Raises:
            SizeOverflowError: if an array has over 2**63 - 1.
        """
        found = np.zeros(len(tensors), np.int64)
        for rank, chosen in self.by_rank(tensors):
            _, shapes = self.in_arrays(places[chosen], rank)
            sizes = self.itemsizes[tensors[chosen]]
            if (shapes.astype(float).prod(axis=1) * sizes > 2.0**62).any():
                raise SizeOverflowError("an offset of a file is over 2**63 - 1")
            found[chosen] = shapes.prod(axis=1) * sizes
        return found

    def by_rank(self, tensors: npt.NDArray[Any]) -> Iterator[tuple[int, Numbers]]:
        """Yield each number of dims, with the positions of the tensors that have it."""
        ranks = rest = self.ranks[tensors]
        while len(rest):
            rank = int(rest.min())
            yield rank, np.flatnonzero(ranks == rank)
            rest = rest[rest > rank]

    def bytes(self, tensors: npt.NDArray[Any], places: npt.NDArray[Any]) -> Numbers:
        """Return the bytes of each box, given its tensor and its place in the pool.

        Raises:
            SizeOverflowError: if a box has over 2**63 - 1.
        """
        if len(tensors) <= _FEW:
            found = [slot.end for slot in Slots(self, tensors, places, np.zeros(len(tensors), np.int64))]
            if max(found, default=0) > _LARGEST:
                raise SizeOverflowError("an offset of a file is over 2**63 - 1")
            return np.array(found, np.int64)
        sizes = self.itemsizes[tensors]
        for rank, chosen in self.by_rank(tensors):
            held, inner = np.unique(places[chosen], return_inverse=True)  # Many tensors have the same boxes.
            starts, stops = self.sides(held, rank)
            extents = stops - starts
            most = int(sizes[chosen].max())
            if (np.prod(extents.astype(float), axis=1) * most > 2.0**62).any():
                volumes = np.array([math.prod(row) for row in extents.tolist()], object)
                if (volumes[inner] * sizes[chosen].astype(object) > _LARGEST).any():
                    raise SizeOverflowError("an offset of a file is over 2**63 - 1")
            sizes[chosen] *= extents.prod(axis=1)[inner.reshape(-1)]
        whole: Numbers = sizes
        return whole


class Slots(Sequence[Slot]):
    """The slots of a file, each made when it is asked for.

    Attributes:
        table: The table that files share.
        tensors: The tensor of each slot.
        places: The place of each slot's box in the table's pool.
        begins: The first byte of each slot, counted from the file's data.
    """

    _nbytes: Numbers | None = None

    def __init__(
        self,
        table: SlotTable,
        tensors: npt.NDArray[Any],
        places: npt.NDArray[Any],
        begins: Numbers,
        nbytes: Numbers | None = None,
    ) -> None:
        self.table, self.tensors, self.places, self.begins, self._nbytes = table, tensors, places, begins, nbytes

    @property
    def nbytes(self) -> Numbers:
        """The bytes of each slot."""
        if self._nbytes is None:
            self._nbytes = self.table.bytes(self.tensors, self.places)
        return self._nbytes

    def strides(self, index: int) -> tuple[int, ...]:
        """Return the bytes from one element of a slot to the next, per dim."""
        tensors, places = self.tensors[index : index + 1], self.places[index : index + 1]
        found = self.table.strides(tensors, places, int(self.table.ranks[tensors[0]]))
        return tuple(found[0].tolist())

    def at(self, begins: Numbers) -> Slots:
        """Return the same boxes, beginning at these bytes."""
        return Slots(self.table, self.tensors, self.places, begins, self._nbytes)

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slot]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._made(self.tensors[index], self.places[index], self.begins[index]))
        if not -len(self) <= index < len(self):
            raise IndexError(f"slot {index} of {len(self)}")
        return self._one(index % len(self))

    def _one(self, index: int) -> Slot:
        tensor, at, begin = int(self.tensors[index]), int(self.places[index]), int(self.begins[index])
        rank, size = int(self.table.ranks[tensor]), int(self.table.itemsizes[tensor])
        sides: list[int] = self.table.pool[at : at + 2 * rank].tolist()
        box = tuple(zip(sides[:rank], sides[rank:], strict=True))
        return Slot(tensor, box, begin, begin + size * math.prod(stop - start for start, stop in box))

    def __iter__(self) -> Iterator[Slot]:
        if len(self) <= _FEW:
            yield from map(self._one, range(len(self)))
            return
        for at in range(0, len(self), _CHUNK):
            yield from self[at : at + _CHUNK]

    def _made(self, tensors: npt.NDArray[Any], places: npt.NDArray[Any], begins: Numbers) -> Iterator[Slot]:
        ends = begins + self.table.bytes(tensors, places)
        boxes: list[Bounds] = [()] * len(tensors)
        for rank, chosen in self.table.by_rank(tensors):
            sides = np.stack(self.table.sides(places[chosen], rank), axis=2)
            for position, box in zip(chosen.tolist(), sides.tolist(), strict=True):
                boxes[position] = tuple(map(tuple, box))
        return map(Slot, tensors.tolist(), boxes, begins.tolist(), ends.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        # With the boxes of its own only: a task that has them is sent to a worker.
        tensors, inner = np.unique(self.tensors, return_inverse=True)
        places, pool, end = np.zeros(len(self), np.int64), [np.zeros(0, np.int64)], 0
        for rank, chosen in self.table.by_rank(self.tensors):
            held, width = self.places[chosen].astype(np.int64), self.table.width * rank
            pool.append(self.table.pool[held[:, None] + np.arange(width)].reshape(-1))
            places[chosen] = end + width * np.arange(len(chosen))
            end += width * len(chosen)
        ranks, itemsizes = self.table.ranks[tensors], self.table.itemsizes[tensors]
        own = _TableRows(np.concatenate(pool), tensors, ranks, itemsizes, self.table.has_arrays)
        return _unpickled, (own, inner.reshape(-1), places, self.begins)


class _TableRows(NamedTuple):
    """The rows of a `SlotTable` for some tensors: the pool, the tensors' numbers, and their columns of the table."""

    pool: Numbers
    tensors: Numbers
    ranks: Numbers
    itemsizes: Numbers
    has_arrays: bool


def _unpickled(own: _TableRows, inner: Numbers, places: Numbers, begins: Numbers) -> Slots:
    count = int(own.tensors.max(initial=-1)) + 1
    table = SlotTable(own.pool, np.zeros(count, np.int64), np.zeros(count, np.int64), own.has_arrays)
    table.ranks[own.tensors], table.itemsizes[own.tensors] = own.ranks, own.itemsizes
    return Slots(table, own.tensors[inner], places, begins)


def digits_of(numbers: Numbers) -> Numbers:
    """Return the number of decimal digits of numbers that are not negative.

    >>> digits_of(np.array([0, 9, 10, 2**63 - 1])).tolist()
    [1, 1, 2, 19]
    """
    powers = np.array([10**power for power in range(1, 19)], np.int64)
    digits: Numbers = np.searchsorted(powers, numbers, side="right") + 1
    return digits


def joined_slots(parts: Sequence[Slots]) -> Slots:
    """Return the slots of several files of one table, joined. Their first bytes still have to be worked out."""
    columns = ([getattr(part, name) for part in parts] for name in ("tensors", "places", "begins"))
    return Slots(parts[0].table, *(np.concatenate(each) for each in columns))
