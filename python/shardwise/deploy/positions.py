"""Places of single elements: offsets in a checkpoint's tensors, and positions in the memory of devices, both ways.

Nothing here is as large as a tensor: time and memory grow with the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._text import shown
from ..errors import LayoutError
from ..layout import UnevenRule
from ..partition import Partition
from ..piece import Piece
from ..placing import Placing, partition_of, placing_of
from ..rules.layout_rule import checked_uneven
from .parameters import LocalParameter, shapes_of
from .world import holds

__all__ = ["Changed", "Found", "Positions", "Updates", "positions_of"]

_Offsets = npt.NDArray[np.int64]
#: For each tensor the offsets of elements, and a value for each.
Changed = Mapping[str, tuple[Any, Any]]
#: For each parameter positions in it, and a value for each.
Updates = dict[str, tuple[_Offsets, Any]]

#: So many offsets at a time are compared with the pieces of a device.
_BLOCK = 1 << 16


class Found(NamedTuple):
    """Those of some elements of a tensor that a device holds in one parameter.

    Attributes:
        parameter: the name of the parameter.
        which: which of the offsets that were given these are.
        positions: where each is in the parameter: flat, in C order.
    """

    parameter: str
    which: _Offsets
    positions: _Offsets


class _Slab(NamedTuple):
    """A device's own array of a tensor, in one parameter from one position on."""

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
        self._partitions: dict[str, Partition | None] = {}
        self._devices: dict[Any, _DeviceParameters] = {}

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
        """Give the elements of each parameter of a device, by name.

        Raises:
            MeshError: if there is no such device.
        """
        return dict(self._held(device).sizes)

    def local_parameters(self, device: Any) -> list[LocalParameter]:
        """Give the parameters of a device; those of a `Deployment` are what its `parameters_of` gives.

        Raises:
            MeshError: if there is no such device.
        """
        return self._held(device).parameters

    def locate(self, device: Any, tensor: str, offsets: Any) -> list[Found]:
        """Say which of some elements of a tensor a device holds, and where.

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
        which, local = self._within(device, tensor, given, None) if slabs else (given[:0], given[:0])
        return [Found(slab.parameter, which, local + slab.start) for slab in slabs if len(which)]

    def updates(self, device: Any, changed: Changed) -> Updates:
        """Give what of a sparse change belongs to one device: for each parameter positions and values.

        Args:
            device: its label.
            changed: for each tensor the offsets of the elements that change, and their new values: arrays of numpy, or
                values that are a tensor of PyTorch.

        Raises:
            LayoutError: if there is no such tensor, or not as many values as offsets.
            IndexError: if an offset is not within its tensor.
        """
        return self._updates(device, {name: (*self._pair(name, pair), None) for name, pair in changed.items()})

    def route(self, changed: Changed) -> dict[Any, Updates]:
        """Send a sparse change to all devices: for each what `updates` gives, those without any left out.

        Every element arrives at each place that holds it: replicas and repeats too.

        Raises:
            LayoutError: as `updates`; if there is no layout for a tensor.
            IndexError: as `updates`.
        """
        ready: dict[str, Any] = {}
        for name, pair in changed.items():
            offsets, values = self._pair(name, pair)
            partition = self.partition(name)
            is_cut = partition is not None and not partition.is_packed
            ready[name] = offsets, values, partition.locate(offsets) if partition is not None and is_cut else None
        return {device: updates for device in self.devices if (updates := self._updates(device, ready))}

    def apply(self, device: Any, memory: Mapping[str, Any], changed: Changed) -> int:
        """Write what of a sparse change belongs to a device into its parameters, and return how many elements.

        Nothing is written unless everything fits. Of offsets that are given twice the last value stays in numpy's
        memory; PyTorch does not say which.

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
        sizes = self._held(device).sizes
        ready = []
        for name, (at, values) in self.updates(device, changed).items():
            if name not in memory:
                raise LayoutError(f"memory lacks the parameter {shown(name)} of {shown(device)}")
            ready.append((_flat(name, memory[name], sizes[name], values), at, values))
        for flat, at, values in ready:
            flat[at] = values
        return sum(len(at) for _, at, _ in ready)

    def origins(self, device: Any, parameter: str, at: Any) -> list[tuple[str, _Offsets, _Offsets]]:
        """Say which elements of which tensors lie at positions of a parameter: the inverse of `locate`.

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
        given = _whole_numbers("at", at)
        _check_within("at", given, held.sizes[parameter], f"the parameter {shown(parameter)}")
        found = []
        for start, tensor in held.tensors[parameter]:
            partition, whole = self.partition(tensor), self._shapes[tensor]
            own = whole if partition is None else partition.holder_shape(device)
            which = ((given >= start) & (given < start + math.prod(own))).nonzero()[0]
            local = given[which] - start
            if partition is not None:
                # Where the pieces are in the device's array, each with where it begins in the tensor.
                pieces = [_turned(piece) for piece in partition.pieces(device)]
                inside, local = _in_pieces(pieces, own, whole, local)
                which = which[inside]
            if len(which):
                found.append((tensor, which, local))
        return found

    def _pair(self, name: str, pair: tuple[Any, Any]) -> tuple[_Offsets, Any]:
        """The offsets of a change, and its values."""
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

    def _offsets(self, name: str, offsets: Any) -> _Offsets:
        if name not in self._shapes:
            raise LayoutError(f"there is no tensor {shown(name)} among those whose positions are known")
        return _whole_numbers("offsets", offsets)

    def _updates(self, device: Any, ready: Mapping[str, tuple[_Offsets, Any, Any]]) -> Updates:
        slabs = self._held(device).slabs
        parts: dict[str, list[tuple[_Offsets, Any]]] = {}
        for name, (offsets, values, located) in ready.items():
            if name in slabs:
                which, local = self._within(device, name, offsets, located)
                if len(which):
                    own = values[which]
                    for slab in slabs[name]:
                        parts.setdefault(slab.parameter, []).append((local + slab.start, own))
        return {name: _joined(name, found) for name, found in parts.items()}

    def _within(self, device: Any, name: str, offsets: _Offsets, located: Any) -> tuple[_Offsets, _Offsets]:
        """Select the elements of a tensor that a device holds, with where each is in its own array of the tensor."""
        partition = self.partition(name)
        if partition is None or partition.is_packed:
            _check_within("offsets", offsets, math.prod(self._shapes[name]), f"the tensor {shown(name)}")
        if partition is None:
            return np.arange(len(offsets)), offsets
        if partition.is_packed:  # Shards may share elements, of which `locate` gives the first only.
            return _in_pieces(partition.pieces(device), partition.shape, partition.holder_shape(device), offsets)
        shards, local = partition.locate(offsets) if located is None else located
        which = (shards == partition.shard_id(device)).nonzero()[0]
        return which, local[which]

    def partition(self, name: str) -> Partition | None:
        """Give the partition of a tensor; `None` if it is whole on every device.

        Raises:
            LayoutError: if it has no layout, or one of blocks that devices share.
        """
        if name not in self._partitions:
            found = partition_of(self._placing, name, self._shapes[name], self._uneven)
            if found is None and (self._placing.names is not None or not self._placing.is_whole_elsewhere):
                raise LayoutError(f"there is no layout for {shown(name)}")
            if not isinstance(found, Partition | None):
                raise LayoutError(f"{shown(name)} is cut through blocks that devices share, which have no positions")
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
        """Each tensor that a device holds as a parameter of its own."""
        if self._placing.world is not None:
            self._placing.world.index_of_label(device)
        elif device not in self.devices:
            raise LayoutError(f"no tensor is on {shown(device)}; the devices are {shown(list(self.devices))}")
        for name, whole in self._shapes.items():
            partition = self.partition(name)
            if partition is None or holds(partition.device_mesh, device):
                shape = whole if partition is None else partition.holder_shape(device)
                yield LocalParameter(name, shape, (), ((name, None, 0, shape[0] if shape else 0),))


def positions_of(layouts: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even") -> Positions:
    """Say where single elements of a model's tensors are in the memory of devices.

    Args:
        layouts: who holds what: a `Deployment`, with the parameters that its engine fuses and stacks; a `LayoutMap`, or
            a mapping from names to layouts, whose tensors are parameters of their own.
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


def _whole_numbers(argument: str, offsets: Any) -> _Offsets:
    """Offsets as an array; whether they are within something is seen by what uses them."""
    given = np.asarray(offsets.cpu() if hasattr(offsets, "cpu") else offsets)
    if given.shape == (0,):
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise TypeError(f"{argument} must be whole numbers in one dim, got {given.dtype} of shape {given.shape}")
    if given.dtype == np.uint64:
        _check_within(argument, given, 2**63 - 1, "a tensor")
    return given.astype(np.int64, copy=False)


def _check_within(argument: str, given: npt.NDArray[Any], size: int, what: str) -> None:
    """Refuse a position that is not in something of this size."""
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < size:
        outside = ((given < 0) | (given >= size)).argmax()
        raise IndexError(f"{argument} has {given[outside]}, which is not within {what} of {size} elements")


def _turned(piece: Piece) -> Piece:
    """The box of a piece in the device's own array, with where it begins in the tensor."""
    assert isinstance(piece.start, tuple)
    sides = zip(piece.box, piece.start, strict=True)
    box = tuple(slice(start, start + side.stop - side.start) for side, start in sides)
    return Piece(box, tuple(side.start for side in piece.box))


def _in_pieces(
    pieces: list[Piece], shape: tuple[int, ...], other: tuple[int, ...], offsets: _Offsets
) -> tuple[_Offsets, _Offsets]:
    """Select the offsets of an array that lie in these pieces, each with its offset in the other array.

    Offsets are taken a block at a time, so that the memory for intermediate results stays small.
    """
    # Along each dim for each piece start, stop, and the start in the other array.
    sides = np.array([[(s.start, s.stop, at) for s, at in zip(one.box, one.start, strict=True)] for one in pieces])  # type: ignore[arg-type]
    sides = sides.reshape(len(pieces), len(shape), 3).astype(np.int64)
    while len(shape) > 1 and shape[-1] == other[-1] and (sides[:, -1] == (0, shape[-1], 0)).all():
        # All of the last dim: the two last are one.
        sides = sides[:, :-1].copy()
        sides[:, -1] *= shape[-1]
        shape, other = (*shape[:-2], shape[-2] * shape[-1]), (*other[:-2], other[-2] * other[-1])
    strides = [math.prod(other[dim + 1 :]) for dim in range(len(other))]
    which, places = [offsets[:0]], [offsets[:0]]
    for first in range(0, len(offsets), _BLOCK):
        block = offsets[first : first + _BLOCK]
        index = np.unravel_index(block, shape) if len(shape) > 1 else (block,) * len(shape)
        for piece in sides.tolist():
            is_in = np.ones(len(block), bool)
            for (start, stop, _), numbers in zip(piece, index, strict=True):
                is_in &= (numbers >= start) & (numbers < stop)
            found = is_in.nonzero()[0]
            place = np.zeros(len(found), np.int64)
            for (start, _, at), stride, numbers in zip(piece, strides, index, strict=True):
                place += (numbers[found] + (at - start)) * stride
            which.append(found + first)
            places.append(place)
    return np.concatenate(which), np.concatenate(places)


def _joined(name: str, parts: list[tuple[_Offsets, Any]]) -> tuple[_Offsets, Any]:
    """The changes of one parameter, from all tensors in it."""
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
    """A parameter's memory as one dim, if it takes these values."""
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
    return array.reshape(-1)
