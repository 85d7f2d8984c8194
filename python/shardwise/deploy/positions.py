"""Places of single elements: offsets in a checkpoint's tensors, and positions in the memory of devices, both ways.

Nothing here is as large as a tensor: time and memory grow with the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._arguments import instance
from .._core import Held
from .._text import shown
from ..errors import LayoutError
from ..layout import UnevenRule
from ..piece import Piece
from ..placing import Placing, partition_of, placing_of
from ..rules.layout_rule import checked_uneven
from ..tiling import Tiling
from .offsets import (
    DeviceParameters,
    Found,
    FoundShards,
    GivenOffsets,
    ListedBoxes,
    Offsets,
    ShardPlaces,
    boxes_held,
    check_within,
    is_holder,
    turned,
    whole_numbers,
    whole_shards,
)
from .parameters import LocalParameter, shapes_of
from .sparse_values import as_integers, flat_memory, joined_values, pair_of, picked, raw_memory, values_for

__all__ = ["Changed", "Positions", "Updates", "positions_of"]

#: For each tensor the offsets of elements, and a value for each.
Changed = Mapping[str, tuple[Any, Any]]
#: For each parameter positions in it, and a value for each.
Updates = dict[str, tuple[Offsets, Any]]


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
        self._devices: dict[Any, DeviceParameters] = {}
        self._boxes: dict[tuple[Any, str], Held | ListedBoxes] = {}

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
            device: the device's label.
            tensor: the name of the tensor.
            offsets: flat positions in the whole tensor, in any order.

        Returns:
            A `Found` for each place of the tensor on the device: none if the device holds none of these elements,
            several if the tensor is repeated there.

        Raises:
            LayoutError: if there is no such tensor.
            IndexError: if an offset is not within the tensor; the message names it.
            MeshError: if there is no such device.
        """
        slabs = self._held(device).slabs.get(tensor, [])
        given = self._offsets(tensor, offsets)
        if not slabs:
            return []
        self._check(tensor, given)
        which, local = self._boxes_of(device, tensor).locate(given)
        return [Found(slab.parameter, which, local + slab.start) for slab in slabs if len(which)]

    def shards(self, offsets: Mapping[str, Any]) -> dict[str, FoundShards]:
        """Return the positions of elements on all devices, in one pass over the offsets.

        Args:
            offsets: for each tensor flat positions in the whole tensor, in any order.

        Raises:
            LayoutError: if there is no such tensor or no layout for it; if shards have elements in common, as in a
                fused tensor if several devices hold the same key heads.
            IndexError: if an offset is not within the tensor; the message names it.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> places = positions_of({"w": TensorLayout(("x",), DeviceMesh((2,), ("x",)))}, {"w": (6,)})
        >>> found = places.shards({"w": [5, 1]})["w"]
        >>> found.shards.tolist(), found.local.tolist(), found.places
        ([1, 0], [2, 1], ((('cpu:0', 'w', 0),), (('cpu:1', 'w', 0),)))
        """
        ready = {name: self._offsets(name, given) for name, given in _by_name("offsets", offsets).items()}
        # Of all tensors at once: memory of many small arrays takes longer to come by than it takes to fill.
        shards, local = np.empty((2, sum(map(len, ready.values()))), np.int64)
        found, at = {}, 0
        for name, given in ready.items():
            part = slice(at, at + len(given))
            found[name] = FoundShards(
                shards[part], local[part], self._shards_into(name, given, shards[part], local[part])
            )
            at = part.stop
        return found

    def _shards_into(self, tensor: str, given: GivenOffsets, shards: Offsets, local: Offsets) -> ShardPlaces:
        """Write the shard of each offset and the offset in it, and return the places of each shard."""
        partition = self.partition(tensor)
        if partition is None:
            self._check(tensor, given)
            holders = [list(self.devices)]
            shards[:], local[:] = 0, given
        else:
            partition, holders = whole_shards(tensor, partition)
            try:
                if len(given):  # Two arrays of no elements may have the same memory.
                    partition.core.locate_into(given, shards, local)
            except IndexError:
                self._check(tensor, given)  # It names the tensor.
                raise
        return tuple(
            tuple((device, *slab) for device in each for slab in self._held(device).slabs.get(tensor, ()))
            for each in holders
        )

    def updates(self, device: Any, changed: Changed) -> Updates:
        """Return the part of a sparse change for one device: for each parameter positions and values.

        Args:
            device: its label.
            changed: for each tensor the offsets of the elements that change, and their new values: arrays of numpy, or
                values that are a tensor of PyTorch.

        Raises:
            LayoutError: if there is no such tensor, or the numbers of values and offsets differ.
            IndexError: if an offset is not within its tensor.
        """
        ready = {name: self._pair(name, pair) for name, pair in _by_name("changed", changed).items()}
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
        ready = {name: self._pair(name, pair) for name, pair in _by_name("changed", changed).items()}
        for name, (offsets, _) in ready.items():
            self.partition(name)
            self._check(name, offsets)
        return {device: updates for device in self.devices if (updates := self._updates(device, ready))}

    def apply(self, device: Any, memory: Mapping[str, Any], changed: Changed) -> int:
        """Write a device's part of a sparse change into its parameters; return the number of elements written.

        Nothing is written unless everything fits. On a CPU it is one pass over the offsets, without further memory, and
        if an offset is given twice, its last value stays; on other devices PyTorch does not say which value stays.

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
        held, memory = self._held(device), _by_name("memory", memory)
        ready = []
        for name, pair in _by_name("changed", changed).items():
            offsets, values = self._pair(name, pair)
            if name not in held.slabs:
                continue
            self._check(name, offsets)
            boxes = self._boxes_of(device, name)
            raw = raw_memory(values)
            for slab in held.slabs[name]:
                try:
                    if slab.parameter not in memory:
                        raise LayoutError(f"memory lacks the parameter {shown(slab.parameter)} of {shown(device)}")
                    array = memory[slab.parameter]
                    flat = flat_memory(slab.parameter, array, held.sizes[slab.parameter], values)
                except LayoutError:
                    if not len(boxes.locate(offsets)[0]):  # It needs no memory.
                        continue
                    raise
                ready.append((boxes, slab.start, offsets, values, raw, flat, raw_memory(flat)))
        count = 0
        for boxes, start, offsets, values, raw, flat, memory_raw in ready:
            if raw is not None and memory_raw is not None:
                count += boxes.scatter(offsets, raw, memory_raw[start : start + boxes.room])
            else:
                which, at = boxes.locate(offsets)
                whole, some = as_integers(flat), picked(values, which)
                whole[at + start] = some if whole is flat else as_integers(some)
                count += len(which)
        return count

    def origins(self, device: Any, parameter: str, at: Any) -> list[tuple[str, Offsets, Offsets]]:
        """Return the tensors and elements at these positions of a parameter: the inverse of `locate`.

        Args:
            device: the device's label.
            parameter: the name of the parameter.
            at: flat positions in the parameter, in any order.

        Returns:
            For each tensor in the parameter that has some of them: its name, the indices in `at` of the positions that
            it has, and their offsets in the whole tensor. A position in no tensor is padding.

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
        given = whole_numbers("at", at).astype(np.int64, copy=False)
        check_within("at", given, held.sizes[parameter], f"the parameter {shown(parameter)}")
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
                    inside, local = ListedBoxes(pieces, whole).origins(local)
                else:
                    inside, local = boxes_held(map(turned, pieces), own, whole).locate(local)
                which = which[inside]
            if len(which):
                found.append((tensor, which, local))
        return found

    def _pair(self, name: str, pair: tuple[Any, Any]) -> tuple[GivenOffsets, Any]:
        """Return the offsets and the values of a change."""
        offsets, values = pair_of(name, pair)
        checked = self._offsets(name, offsets)
        return checked, values_for(name, values, len(checked))

    def _offsets(self, name: str, offsets: Any) -> GivenOffsets:
        if name not in self._shapes:
            raise LayoutError(f"there is no tensor {shown(name)} among those whose positions are known")
        return whole_numbers("offsets", offsets)

    def _check(self, name: str, offsets: GivenOffsets) -> None:
        """Refuse an offset that is not in the tensor."""
        check_within("offsets", offsets, math.prod(self._shapes[name]), f"the tensor {shown(name)}")

    def _updates(self, device: Any, ready: Mapping[str, tuple[GivenOffsets, Any]]) -> Updates:
        slabs = self._held(device).slabs
        parts: dict[str, list[tuple[Offsets, Any]]] = {}
        for name, (offsets, values) in ready.items():
            if name in slabs:
                which, local = self._boxes_of(device, name).locate(offsets)
                if len(which):
                    own = picked(values, which)
                    for slab in slabs[name]:
                        parts.setdefault(slab.parameter, []).append((local + slab.start, own))
        return {name: joined_values(name, found) for name, found in parts.items()}

    def _boxes_of(self, device: Any, name: str) -> Held | ListedBoxes:
        """Return the boxes of a tensor that a device holds, and their places in its own array of the tensor."""
        found = self._boxes.get((device, name))
        if found is None:
            partition, whole = self.partition(name), self._shapes[name]
            if partition is not None and any(not isinstance(one.start, tuple) for one in partition.pieces(device)):
                found = ListedBoxes(partition.pieces(device), whole)
            elif partition is None:
                everything = Piece(tuple(slice(0, size) for size in whole), (0,) * len(whole))
                found = boxes_held([everything], whole, whole)
            else:
                found = boxes_held(partition.pieces(device), whole, partition.holder_shape(device))
            self._boxes[device, name] = found
        return found

    def partition(self, name: str) -> Tiling | None:
        """Return the partition of a tensor, or the tiling that it has instead; `None` if each device has all of it.

        Raises:
            LayoutError: if the tensor has no layout.
        """
        if name not in self._partitions:
            found = partition_of(self._placing, name, self._shapes[name], self._uneven)
            if found is None and (self._placing.names is not None or not self._placing.is_whole_elsewhere):
                raise LayoutError(f"there is no layout for {shown(name)}")
            self._partitions[name] = found
        return self._partitions[name]

    def _held(self, device: Any) -> DeviceParameters:
        if device not in self._devices:
            made: Any = getattr(self._placing, "parameters_of", None)
            parameters = [*self._alone(device)] if made is None else made(device, self._shapes, self._uneven)
            self._devices[device] = DeviceParameters.of(parameters)
        return self._devices[device]

    def _alone(self, device: Any) -> Iterator[LocalParameter]:
        """Yield each tensor of a device as a parameter of its own."""
        if self._placing.world is not None:
            self._placing.world.index_of_label(device)
        elif device not in self.devices:
            raise LayoutError(f"no tensor is on {shown(device)}; the devices are {shown(list(self.devices))}")
        for name, whole in self._shapes.items():
            partition = self.partition(name)
            if partition is None or is_holder(partition, device):
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

    Errors of layouts are raised when a tensor or a device is asked for.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> rules = LayoutMap(DeviceMesh((4,), ("tp",)))
    >>> rules["kernel"] = (None, "tp")
    >>> places = positions_of(rules, {"kernel": (3, 8)})
    >>> places.locate("cpu:2", "kernel", [0, 12, 21])
    [Found(parameter='kernel', which=array([1, 2]), positions=array([2, 5]))]
    """
    return Positions(placing_of(layouts), shapes_of(tensors), checked_uneven(uneven))


def _by_name(argument: str, value: Any) -> Mapping[str, Any]:
    """Return an argument that has something for each name; TypeError if it is no mapping."""
    return instance(argument, value, Mapping)  # type: ignore[type-abstract]
