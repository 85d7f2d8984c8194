"""Places of single elements: offsets in a checkpoint's tensors, and positions in the memory of devices, both ways.

Nothing here is as large as a tensor: time and memory grow with the offsets.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._core import Held
from .._text import shown
from ..errors import LayoutError
from ..layout import UnevenRule
from ..partition import Partition
from ..piece import Piece
from ..placing import Placing, partition_of, placing_of
from ..rules.layout_rule import checked_uneven
from ..tiling import Tiling
from .parameters import LocalParameter, shapes_of
from .world import holds

__all__ = ["Changed", "Found", "FoundShards", "Positions", "Updates", "positions_of"]

_Offsets = npt.NDArray[np.int64]
#: Offsets as they are given: of 64 bits or of 32.
_GivenOffsets = npt.NDArray[np.signedinteger[Any]]
#: For each tensor the offsets of elements, and a value for each.
Changed = Mapping[str, tuple[Any, Any]]
#: For each parameter positions in it, and a value for each.
Updates = dict[str, tuple[_Offsets, Any]]


class Found(NamedTuple):
    """The elements, of some of a tensor, that a device holds in one parameter.

    Attributes:
        parameter: the name of the parameter.
        which: which of the offsets that were given these are.
        positions: where each is in the parameter: flat, in C order.
    """

    parameter: str
    which: _Offsets
    positions: _Offsets


class FoundShards(NamedTuple):
    """The shards of some elements of a tensor, and the places of each shard on all devices.

    Attributes:
        shards: the number of the shard that has each element.
        local: the offset of each in its shard: flat, in C order.
        places: for each shard its devices, each with the parameter that has it there, and the position in the parameter
            from which `local` is counted.
    """

    shards: _Offsets
    local: _Offsets
    places: tuple[tuple[tuple[Any, str, int], ...], ...]


class _Slab(NamedTuple):
    """A device's own array of a tensor, beginning at a position of one parameter."""

    parameter: str
    start: int


class _DeviceParameters(NamedTuple):
    """The parameters of a device, their sizes, the slabs of each tensor, the slabs in each parameter."""

    parameters: list[LocalParameter]
    sizes: dict[str, int]
    slabs: dict[str, list[_Slab]]
    tensors: dict[str, list[tuple[int, str]]]


class Positions:
    """The places of all elements of a model's tensors in the memory of devices; `positions_of` makes it.

    It sends sparse changes, `(offsets, values)` by tensor, to where they belong: through cuts, fused and packed orders,
    stacked experts, replicas, repeats and padding. An offset is a flat position in a whole tensor, in C order, as
    `np.ravel_multi_index` gives it; a position is the same in a device's own parameter.

    >>> from shardwise import DeviceMesh
    >>> from shardwise.deploy import Deployment, FusedParameter
    >>> mesh = DeviceMesh((2,), ("tp",))
    >>> engine = Deployment(2, mesh, {"q|k": ("tp", None)}, parameters=[FusedParameter("qk", ("q", "k"))])
    >>> places = positions_of(engine, {"q": (4, 2), "k": (2, 2)})
    >>> changed = {"q": ([1, 6], np.array([10.0, 20.0])), "k": ([2], np.array([30.0]))}
    >>> for device, updates in places.route(changed).items():
    ...     print(device, {name: (at.tolist(), values.tolist()) for name, (at, values) in updates.items()})
    cpu:0 {'qk': ([1], [10.0])}
    cpu:1 {'qk': ([2, 4], [20.0, 30.0])}
    """

    def __init__(self, placing: Placing, shapes: dict[str, tuple[int, ...]], uneven: UnevenRule) -> None:
        self._placing, self._shapes, self._uneven = placing, shapes, uneven
        self._partitions: dict[str, Tiling | None] = {}
        self._devices: dict[Any, _DeviceParameters] = {}
        self._boxes: dict[tuple[Any, str], Held | _ListedBoxes] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return self._shapes

    @property
    def devices(self) -> tuple[Any, ...]:
        """The labels of all devices, in order."""
        world = self._placing.world
        if world is not None:
            return tuple(world.labels())
        parts = (self.partition(name) for name in self._shapes)
        return tuple(dict.fromkeys(label for part in parts if part is not None for label in part.holders))

    def parameters(self, device: Any) -> dict[str, int]:
        """Return the elements of each parameter of a device, by name.

        Raises:
            MeshError: if there is no such device.
        """
        return dict(self._held(device).sizes)

    def local_parameters(self, device: Any) -> list[LocalParameter]:
        """Return the parameters of a device; those of a `Deployment` are what its `parameters_of` gives.

        Raises:
            MeshError: if there is no such device.
        """
        return self._held(device).parameters

    def locate(self, device: Any, tensor: str, offsets: Any) -> list[Found]:
        """Return which of these elements of a tensor a device holds, and their positions.

        Args:
            device: its label.
            tensor: the name of the tensor.
            offsets: flat positions in the whole tensor, in any order.

        Returns:
            One answer for each place of the tensor: none if the device holds none of these, several if it is repeated.

        Raises:
            LayoutError: if there is no such tensor.
            IndexError: if an offset is not within the tensor; names it.
            MeshError: if there is no such device.
        """
        slabs = self._held(device).slabs.get(tensor, [])
        given = self._offsets(tensor, offsets)
        if not slabs:
            return []
        self._check(tensor, given)
        which, local = self._boxes_of(device, tensor).locate(given)
        return [Found(slab.parameter, which, local + slab.start) for slab in slabs if len(which)]

    def shards(self, tensor: str, offsets: Any) -> FoundShards:
        """Return the positions of these elements of a tensor on all devices, in one pass over the offsets.

        Args:
            tensor: the name of the tensor.
            offsets: flat positions in the whole tensor, in any order.

        Raises:
            LayoutError: if there is no such tensor or no layout for it; if shards have elements in common, as those of
                a fused tensor have whose key heads several devices hold.
            IndexError: if an offset is not within the tensor; names it.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
        >>> found = places.shards("w", [5, 1])
        >>> found.shards.tolist(), found.local.tolist(), found.places
        ([1, 0], [2, 1], ((('cpu:0', 'w', 0),), (('cpu:1', 'w', 0),)))
        """
        given, partition = self._offsets(tensor, offsets), self.partition(tensor)
        if partition is None:
            self._check(tensor, given)
            holders: list[list[Any]] = [list(self.devices)]
            shards, local = np.zeros(len(given), np.int64), given.astype(np.int64)
        else:
            if not isinstance(partition, Partition):
                raise LayoutError(
                    f"no layout says how {shown(tensor)} is cut, so its boxes have no numbers; locate says device by "
                    "device which elements it holds"
                )
            holders = [partition.devices_holding(number) for number in range(partition.total_shards)]
            boxes = [piece.box for each in holders for piece in partition.pieces(each[0])]
            own = sum(math.prod(side.stop - side.start for side in box) for box in boxes)
            if own != math.prod(partition.shape):
                raise LayoutError(
                    f"shards of {shown(tensor)} have elements in common, so none is the shard of an element; locate "
                    "says device by device which of them it holds"
                )
            try:
                shards, local = partition.locate(given)
            except IndexError:
                self._check(tensor, given)  # It names the tensor.
                raise
        places = tuple(
            tuple((device, *slab) for device in each for slab in self._held(device).slabs.get(tensor, ()))
            for each in holders
        )
        return FoundShards(shards, local, places)

    def updates(self, device: Any, changed: Changed) -> Updates:
        """Return the part of a sparse change for one device: for each parameter positions and values.

        Args:
            device: its label.
            changed: for each tensor the offsets of the elements that change, and their new values: arrays of numpy, or
                values that are a tensor of PyTorch.

        Raises:
            LayoutError: if there is no such tensor, or not as many values as offsets.
            IndexError: if an offset is not within its tensor.
        """
        ready = {name: self._pair(name, pair) for name, pair in changed.items()}
        slabs = self._held(device).slabs
        for name, (offsets, _) in ready.items():
            if name in slabs:
                self._check(name, offsets)
        return self._updates(device, ready)

    def route(self, changed: Changed) -> dict[Any, Updates]:
        """Return the part of a sparse change for each device, as `updates` does; devices without changes are left out.

        Every element arrives at each place that holds it: replicas and repeats too.

        Raises:
            LayoutError: as `updates`; if there is no layout for a tensor.
            IndexError: as `updates`.
        """
        ready = {name: self._pair(name, pair) for name, pair in changed.items()}
        for name, (offsets, _) in ready.items():
            self.partition(name)
            self._check(name, offsets)
        return {device: updates for device in self.devices if (updates := self._updates(device, ready))}

    def apply(self, device: Any, memory: Mapping[str, Any], changed: Changed) -> int:
        """Write a device's part of a sparse change into its parameters; return the number of elements written.

        Nothing is written unless everything fits. On a CPU it is one pass over the offsets, without further memory, and
        the last value stays of offsets that are given twice; on other devices PyTorch does not say which.

        Args:
            device: its label.
            memory: the device's parameters by name: arrays of numpy or tensors of PyTorch, contiguous, on any device.
            changed: as `updates` takes it. Values have the dtype of the memory.

        Raises:
            LayoutError: if a parameter is missing, has another size or dtype, or is not contiguous.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
        >>> memory = {"w": np.zeros(3, np.int32)}
        >>> places.apply("cpu:1", memory, {"w": ([0, 5], np.array([7, 8], np.int32))}), memory["w"].tolist()
        (1, [0, 0, 8])
        """
        held = self._held(device)
        ready = []
        for name, pair in changed.items():
            offsets, values = self._pair(name, pair)
            if name not in held.slabs:
                continue
            self._check(name, offsets)
            boxes = self._boxes_of(device, name)
            raw = _raw(values)
            for slab in held.slabs[name]:
                try:
                    if slab.parameter not in memory:
                        raise LayoutError(f"memory lacks the parameter {shown(slab.parameter)} of {shown(device)}")
                    array = memory[slab.parameter]
                    flat = _flat(slab.parameter, array, held.sizes[slab.parameter], values)
                except LayoutError:
                    if not len(boxes.locate(offsets)[0]):  # It needs no memory.
                        continue
                    raise
                ready.append((boxes, slab.start, offsets, values, raw, flat, _raw(flat)))
        count = 0
        for boxes, start, offsets, values, raw, flat, memory_raw in ready:
            if raw is not None and memory_raw is not None:
                count += boxes.scatter(offsets, raw, memory_raw[start : start + boxes.room])
            else:
                which, at = boxes.locate(offsets)
                flat[at + start] = values[which]
                count += len(which)
        return count

    def origins(self, device: Any, parameter: str, at: Any) -> list[tuple[str, _Offsets, _Offsets]]:
        """Return which elements of which tensors are at these positions of a parameter: the inverse of `locate`.

        Args:
            device: the device's label.
            parameter: the name of its parameter.
            at: flat positions in it, in any order.

        Returns:
            For each tensor in the parameter that has some of them: its name, which of the positions, and the offset of
            each in the whole tensor. A position in none is padding.

        Raises:
            LayoutError: if the device has no such parameter.
            IndexError: if a position is not within it.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
        >>> [(name, which.tolist(), offsets.tolist()) for name, which, offsets in places.origins("cpu:1", "w", [2, 0])]
        [('w', [0, 1], [5, 3])]
        """
        held = self._held(device)
        if parameter not in held.sizes:
            raise LayoutError(f"{shown(device)} has no parameter {shown(parameter)}")
        given = _whole_numbers("at", at).astype(np.int64, copy=False)
        _check_within("at", given, held.sizes[parameter], f"the parameter {shown(parameter)}")
        found = []
        for start, tensor in held.tensors[parameter]:
            partition, whole = self.partition(tensor), self._shapes[tensor]
            own = whole if partition is None else partition.holder_shape(device)
            which = ((given >= start) & (given < start + math.prod(own))).nonzero()[0]
            local = given[which] - start
            if partition is not None:
                # Where the pieces are in the device's array, each with where it begins in the tensor.
                pieces = partition.pieces(device)
                if any(not isinstance(one.start, tuple) for one in pieces):
                    inside, local = _ListedBoxes(pieces, whole).origins(local)
                else:
                    inside, local = _boxes(map(_turned, pieces), own, whole).locate(local)
                which = which[inside]
            if len(which):
                found.append((tensor, which, local))
        return found

    def _pair(self, name: str, pair: tuple[Any, Any]) -> tuple[_GivenOffsets, Any]:
        """Return the offsets and the values of a change."""
        try:
            offsets, values = pair
        except (TypeError, ValueError):
            raise TypeError(f"changed[{shown(name)}] must be (offsets, values), got {shown(pair)}") from None
        checked = self._offsets(name, offsets)
        given = values if hasattr(values, "shape") else np.asarray(values)
        if tuple(given.shape) != (len(checked),):
            raise LayoutError(
                f"changed[{shown(name)}] has {len(checked)} offsets and values of shape {tuple(given.shape)}; each "
                "offset has one value"
            )
        return checked, given

    def _offsets(self, name: str, offsets: Any) -> _GivenOffsets:
        if name not in self._shapes:
            raise LayoutError(f"there is no tensor {shown(name)} among those whose positions are known")
        return _whole_numbers("offsets", offsets)

    def _check(self, name: str, offsets: _GivenOffsets) -> None:
        """Refuse an offset that is not in the tensor."""
        _check_within("offsets", offsets, math.prod(self._shapes[name]), f"the tensor {shown(name)}")

    def _updates(self, device: Any, ready: Mapping[str, tuple[_GivenOffsets, Any]]) -> Updates:
        slabs = self._held(device).slabs
        parts: dict[str, list[tuple[_Offsets, Any]]] = {}
        for name, (offsets, values) in ready.items():
            if name in slabs:
                which, local = self._boxes_of(device, name).locate(offsets)
                if len(which):
                    own = values[which]
                    for slab in slabs[name]:
                        parts.setdefault(slab.parameter, []).append((local + slab.start, own))
        return {name: _joined(name, found) for name, found in parts.items()}

    def _boxes_of(self, device: Any, name: str) -> Held | _ListedBoxes:
        """Return the boxes of a tensor that a device holds, and their places in its own array of the tensor."""
        found = self._boxes.get((device, name))
        if found is None:
            partition, whole = self.partition(name), self._shapes[name]
            if partition is not None and any(not isinstance(one.start, tuple) for one in partition.pieces(device)):
                found = _ListedBoxes(partition.pieces(device), whole)
            elif partition is None:
                everything = Piece(tuple(slice(0, size) for size in whole), (0,) * len(whole))
                found = _boxes([everything], whole, whole)
            else:
                found = _boxes(partition.pieces(device), whole, partition.holder_shape(device))
            self._boxes[device, name] = found
        return found

    def partition(self, name: str) -> Tiling | None:
        """Return the partition of a tensor, or the tiling that it has instead; `None` if each device has all.

        Raises:
            LayoutError: if it has no layout.
        """
        if name not in self._partitions:
            found = partition_of(self._placing, name, self._shapes[name], self._uneven)
            if found is None and (self._placing.names is not None or not self._placing.is_whole_elsewhere):
                raise LayoutError(f"there is no layout for {shown(name)}")
            self._partitions[name] = found
        return self._partitions[name]

    def _held(self, device: Any) -> _DeviceParameters:
        if device not in self._devices:
            made: Any = getattr(self._placing, "parameters_of", None)
            parameters = [*self._alone(device)] if made is None else made(device, self._shapes, self._uneven)
            sizes = {one.name: math.prod(one.shape) for one in parameters}
            slabs: dict[str, list[_Slab]] = {}
            tensors: dict[str, list[tuple[int, str]]] = {name: [] for name in sizes}
            for one in parameters:
                for tensor, slot, start, _ in one.slabs:
                    row = math.prod(one.shape[1 if slot is None else 2 :])
                    at = start * row + (0 if slot is None else slot * math.prod(one.shape[1:]))
                    slabs.setdefault(tensor, []).append(_Slab(one.name, at))
                    tensors[one.name].append((at, tensor))
            self._devices[device] = _DeviceParameters(parameters, sizes, slabs, tensors)
        return self._devices[device]

    def _alone(self, device: Any) -> Iterator[LocalParameter]:
        """Yield each tensor of a device as a parameter of its own."""
        if self._placing.world is not None:
            self._placing.world.index_of_label(device)
        elif device not in self.devices:
            raise LayoutError(f"no tensor is on {shown(device)}; the devices are {shown(list(self.devices))}")
        for name, whole in self._shapes.items():
            partition = self.partition(name)
            if partition is None or _is_holder(partition, device):
                shape = whole if partition is None else partition.holder_shape(device)
                yield LocalParameter(name, shape, (), ((name, None, 0, shape[0] if shape else 0),))


def positions_of(layouts: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even") -> Positions:
    """Return the positions of single elements of a model's tensors in the memory of devices.

    Args:
        layouts: who holds what: a `Deployment`, with the parameters that its engine fuses and stacks; a `LayoutMap`, a
            `Manifest`, or a mapping from names to layouts, whose tensors are parameters of their own. Where a manifest
            has boxes, they are one after the other.
        tensors: the shape of each tensor, or its shape and dtype, or anything that has these, as a checkpoint has.
        uneven: how dims that do not divide are cut, unless the layouts say so.

    Raises:
        TypeError: if an argument is of the wrong type.

    Errors of layouts come when a tensor or a device is asked for.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> rules = LayoutMap(DeviceMesh((4,), ("tp",)))
    >>> rules["kernel"] = (None, "tp")
    >>> places = positions_of(rules, {"kernel": (3, 8)})
    >>> places.locate("cpu:2", "kernel", [0, 12, 21])
    [Found(parameter='kernel', which=array([1, 2]), positions=array([2, 5]))]
    """
    return Positions(placing_of(layouts), shapes_of(tensors), checked_uneven(uneven))


class _ListedBoxes:
    """Boxes that a device holds one after the other, each flattened, as a manifest has them."""

    def __init__(self, pieces: Iterable[Piece], whole: tuple[int, ...]) -> None:
        self._parts = []
        for piece in pieces:
            extents, zeros = tuple(side.stop - side.start for side in piece.box), (0,) * len(whole)
            inner = Piece(tuple(slice(0, size) for size in extents), tuple(side.start for side in piece.box))
            there = _boxes([Piece(piece.box, zeros)], whole, extents)
            back = _boxes([inner], extents, whole)
            assert not isinstance(piece.start, tuple)
            self._parts.append((int(piece.start), there, back))
        #: The elements of the device's own array, up to the last box.
        self.room = max((start + there.room for start, there, _ in self._parts), default=0)

    def locate(self, offsets: Any) -> tuple[_Offsets, _Offsets]:
        """Return which of the offsets are in the boxes, and where."""
        found = [(which, at + start) for start, there, _ in self._parts for which, at in (there.locate(offsets),)]
        return _in_order(found)

    def origins(self, positions: _Offsets) -> tuple[_Offsets, _Offsets]:
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


def _in_order(found: list[tuple[_Offsets, _Offsets]]) -> tuple[_Offsets, _Offsets]:
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    which, at = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(which, kind="stable")
    return which[order], at[order]


def _is_holder(partition: Tiling, device: Any) -> bool:
    mesh = getattr(partition, "device_mesh", None)
    return device in partition.holders if mesh is None else holds(mesh, device)


def _whole_numbers(argument: str, offsets: Any) -> _GivenOffsets:
    """Return offsets as an array of 32 or 64 bits; their range is checked later."""
    given = np.asarray(offsets.cpu() if hasattr(offsets, "cpu") else offsets)
    if given.shape == (0,):
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise TypeError(f"{argument} must be whole numbers in one dim, got {given.dtype} of shape {given.shape}")
    if given.dtype == np.uint64 and int(given.max()) >= 2**63:
        raise IndexError(f"{argument} has {given[given.argmax()]}, which is not within a tensor")
    return np.require(given, np.int32 if given.dtype == np.int32 else np.int64, ("C", "A"))


def _check_within(argument: str, given: _GivenOffsets, size: int, what: str) -> None:
    """Refuse a position outside of an array of this size."""
    outside = Held((size,), (size,), (0, size, 0)).first_outside(given)
    if outside is not None:
        raise IndexError(f"{argument} has {given[outside]}, which is not within {what} of {size} elements")


def _turned(piece: Piece) -> Piece:
    """Return the box of a piece in the device's own array, with its start in the tensor."""
    assert isinstance(piece.start, tuple)
    sides = zip(piece.box, piece.start, strict=True)
    box = tuple(slice(start, start + side.stop - side.start) for side, start in sides)
    return Piece(box, tuple(side.start for side in piece.box))


def _boxes(pieces: Iterable[Piece], shape: tuple[int, ...], own: tuple[int, ...]) -> Held:
    """Return boxes of an array of a shape, and their places in another."""
    sides: list[int] = []
    for piece in pieces:
        if not shape:  # One side stands for the only element.
            sides = [0, 1, 0]
        assert isinstance(piece.start, tuple)
        for side, at in zip(piece.box, piece.start, strict=True):
            sides += side.start, side.stop, at
    return Held(shape, own, np.array(sides, np.int64))


def _raw(array: Any) -> Any:
    """Return an array's memory in one dim, as unsigned integers of its elements' size; `None` if that fails."""
    if isinstance(array, np.ndarray):
        is_plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.itemsize in (1, 2, 4, 8)
        return array.view(f"u{array.dtype.itemsize}") if is_plain and not array.dtype.hasobject else None
    is_here = hasattr(array, "data_ptr") and getattr(getattr(array, "device", None), "type", "") == "cpu"
    if not is_here or hasattr(array, "placements") or array.is_conj() or array.is_neg() or not array.is_contiguous():
        return None
    size = array.element_size()
    if size not in (1, 2, 4, 8):
        return None
    # The tensor is kept while this is used.
    memory = (ctypes.c_uint8 * (size * len(array))).from_address(array.data_ptr()) if len(array) else b""
    return np.frombuffer(memory, f"u{size}")


def _joined(name: str, parts: list[tuple[_Offsets, Any]]) -> tuple[_Offsets, Any]:
    """Return the changes of one parameter, from all tensors in it."""
    if len(parts) == 1:
        return parts[0]
    values = [values for _, values in parts]
    if len({str(one.dtype) for one in values}) > 1:
        raise LayoutError(
            f"the changes of {shown(name)} are of several dtypes: {shown([str(v.dtype) for v in values])}"
        )
    if all(isinstance(one, np.ndarray) for one in values):
        joined: Any = np.concatenate(values)
    else:
        # PyTorch's own, which is there if its tensors are.
        joined = values[0].new_empty(sum(map(len, values)))
        at = 0
        for one in values:
            joined[at : at + len(one)] = one
            at += len(one)
    return np.concatenate([at for at, _ in parts]), joined


def _flat(name: str, array: Any, size: int, values: Any) -> Any:
    """Return a parameter's memory as one dim, after checking that it can take these values."""
    if math.prod(array.shape) != size:
        raise LayoutError(f"memory[{shown(name)}] has shape {tuple(array.shape)}; it must have {size} elements")
    if isinstance(array, np.ndarray) is not isinstance(values, np.ndarray):
        raise LayoutError(
            f"memory[{shown(name)}] is of {type(array).__name__}, and its values of {type(values).__name__}"
        )
    if array.dtype != values.dtype:
        raise LayoutError(f"memory[{shown(name)}] is of {array.dtype}, and its values of {values.dtype}")
    is_plain = (
        array.flags.c_contiguous and array.flags.writeable if isinstance(array, np.ndarray) else array.is_contiguous()
    )
    if not is_plain:
        raise LayoutError(f"memory[{shown(name)}] must be contiguous and writable")
    return array.reshape(-1) if isinstance(array, np.ndarray) else array.detach().reshape(-1)
