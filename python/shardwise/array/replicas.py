"""Whether the devices that hold the same shard hold the same values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError
from ..partition import Partition

__all__ = ["check_replicas"]

Array = npt.NDArray[Any]
Slices = tuple[slice, ...]

#: How many bytes are compared at a time: few enough to stay in the cache.
_PIECE = 1 << 18


def check_replicas(partition: Partition, shards: Sequence[Array]) -> None:
    """Compare every replica with the first of its shard, byte for byte: -0.0 is not 0.0, and the bits of a NaN count.

    Args:
        partition: who holds what. Partial sums of one shard are different values, not replicas of one another.
        shards: one array per device, in device-index order, of the partition's shapes and of one dtype.

    Raises:
        LayoutError: if two replicas differ; names the shard, the first such element, the devices and the values.

    The cost is one pass over the memory of the shards that have replicas; arrays that share their memory cost nothing.
    Objects are compared by `==`, and of structured dtypes the fields are, not the padding.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> whole = TensorLayout((None,), DeviceMesh((2,), ("x",))).partition((3,))
    >>> check_replicas(whole, [np.array([1, 2, 3]), np.array([1, 2, 4])])
    Traceback (most recent call last):
    shardwise.errors.LayoutError: the replicas of shard 0 differ: element (2,) is 3 on device 'cpu:0' and 4 on 'cpu:1'
    """
    mesh = partition.device_mesh
    values = _values(partition)
    if values == mesh.size:
        return
    first_of: dict[int, int] = {}
    for device, value in enumerate(_value_ids(partition).tolist()):
        first = first_of.setdefault(value, device)
        if first == device or (found := _first_difference(shards[first], shards[device])) is None:
            continue
        box = partition.box(mesh.device(device))
        element = tuple(part.start + i for part, i in zip(box, found, strict=True))
        texts = _texts(shards[first][found], shards[device][found])
        raise LayoutError(
            f"the replicas of shard {partition.shard_id(mesh.device(device))} differ: element {element} is {texts[0]} "
            f"on device {mesh.device(first)!r} and {texts[1]} on {mesh.device(device)!r}"
        )


def _values(partition: Partition) -> int:
    """How many different values there are: shards, times the addends of each."""
    mesh = partition.device_mesh
    return partition.total_shards * math.prod(map(mesh.axis_size, partition.layout.unreduced))


def _value_ids(partition: Partition) -> npt.NDArray[np.int64]:
    """For each device the number of its value, which is that of its replicas too."""
    mesh, ids = partition.device_mesh, partition.shard_ids()
    coordinates = mesh.coordinates() if partition.layout.unreduced else ids
    for name in partition.layout.unreduced:
        ids = ids * mesh.axis_size(name) + coordinates[:, mesh.axis_names.index(name)]
    return ids


def _first_difference(one: Array, other: Array) -> tuple[int, ...] | None:
    """The index of the first element, in C order, whose bytes differ."""
    if one.__array_interface__["data"] == other.__array_interface__["data"] and one.strides == other.strides:
        return None
    if one.dtype.names is not None:
        fields = (_first_difference(one[name], other[name]) for name in one.dtype.names)
        # A field may have dims of its own.
        return min((found[: one.ndim] for found in fields if found is not None), default=None)
    for piece in _pieces(one.shape, one.dtype.itemsize):
        a, b = one[(*piece, ...)], other[(*piece, ...)]
        if one.dtype.hasobject:
            pairs = zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
            unequal = np.array([x is not y and not bool(x == y) for x, y in pairs], bool)
        else:
            # Copies, of any strides; comparing them is comparing memory, which no comparison of numbers is.
            data, others = a.tobytes(), b.tobytes()
            if data == others:
                continue
            unequal = np.frombuffer(data, np.uint8) != np.frombuffer(others, np.uint8)
            unequal = unequal.reshape(-1, one.dtype.itemsize).any(axis=1)
        if unequal.any():
            within = np.unravel_index(int(unequal.argmax()), a.shape)
            starts = [part.start for part in piece] + [0] * (one.ndim - len(piece))
            return tuple(start + int(i) for start, i in zip(starts, within, strict=True))
    return None


def _pieces(shape: tuple[int, ...], itemsize: int, outer: Slices = ()) -> Iterator[Slices]:
    """Slices of the leading dims that cut an array, in C order, into pieces of up to `_PIECE` bytes."""
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return
    if nbytes <= _PIECE or not shape:
        yield outer
        return
    rows = _PIECE // (nbytes // shape[0])
    if rows:
        for i in range(0, shape[0], rows):
            yield (*outer, slice(i, min(i + rows, shape[0])))
    else:
        for i in range(shape[0]):
            yield from _pieces(shape[1:], itemsize, (*outer, slice(i, i + 1)))


def _texts(one: Any, other: Any) -> tuple[str, str]:
    texts = _short(one), _short(other)
    if texts[0] != texts[1]:
        return texts
    # Numbers that are written alike, as NaNs are: their bytes, the most significant first.
    bits = [np.array(value).astype(np.dtype(value.dtype).newbyteorder(">")).tobytes().hex() for value in (one, other)]
    return f"{texts[0]} (0x{bits[0]})", f"{texts[1]} (0x{bits[1]})"


def _short(value: Any) -> str:
    text = str(value.item() if isinstance(value, np.generic) and value.dtype.kind in "biufc" else value)
    return text if len(text) <= 40 else f"{text[:39]}…"
