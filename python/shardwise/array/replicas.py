"""The replicas of shards compared: devices that hold the same shard are to hold the same values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._text import cut, shown
from .._types import Array
from ..errors import LayoutError
from ..partition import Partition
from ..piece import sides_of
from ..reshard.run import addends_of
from ..tiling import Tiling

__all__ = ["check_replicas", "first_difference", "texts_of"]


#: The number of words of 8 bytes that are compared at a time, few enough to stay in the cache; and the most bytes for
#: which a copy costs less than the calls that would avoid it.
_WORDS, _SMALL = 1 << 14, 1 << 15


def check_replicas(tiling: Tiling, shards: Sequence[Array]) -> None:
    """Compare every replica with the first of its shard, byte for byte: -0.0 is not 0.0, and the bits of a NaN count.

    Args:
        tiling: who holds what. Partial sums of one shard are different values, not replicas of one another.
        shards: one array per holder, in their order, of the tiling's shapes and of one dtype.

    Raises:
        LayoutError: if two replicas differ; the message names the shard, the first such element, the devices and the
            values.

    The cost is one pass over the memory of the shards that have replicas; arrays that share their memory cost nothing.
    Objects are compared with `==`; structured dtypes by their fields, not their padding.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> whole = TensorLayout((None,), DeviceMesh((2,), ("x",))).partition((3,))
    >>> check_replicas(whole, [np.array([1, 2, 3]), np.array([1, 2, 4])])
    Traceback (most recent call last):
    shardwise.errors.LayoutError: the replicas of shard 0 differ: element (2,) is 3 on device 'cpu:0' and 4 on 'cpu:1'
    """
    if not isinstance(tiling, Partition):
        if tiling.has_replicas:
            _check_pieces(tiling, shards, [0] * len(shards))
        return
    partition = tiling
    mesh = partition.device_mesh
    if partition.is_packed:
        # Two shards may have some of their parts in common, and what pads them is not a value.
        _check_pieces(partition, shards, addends_of(partition).tolist())
        return
    addends = math.prod(map(mesh.axis_size, partition.layout.unreduced))
    if partition.total_shards * addends == mesh.size:
        return
    # One number for each value; replicas have the same.
    values = partition.shard_ids() * addends + addends_of(partition)
    groups: dict[int, list[int]] = {}
    for device, value in enumerate(values.tolist()):
        groups.setdefault(value, []).append(device)
    for first, *others in groups.values():
        found = first_difference(shards[first], [shards[device] for device in others])
        if found is None:
            continue
        index, device = found[0], others[found[1]]
        label, other = mesh.device(first), mesh.device(device)
        element = tuple(part.start + i for part, i in zip(partition.box(label), index, strict=True))
        value, drifted = texts_of(shards[first][index], shards[device][index])
        raise LayoutError(
            f"the replicas of shard {partition.shard_id(label)} differ: element {element} is {value} on device "
            f"{shown(label)} and {drifted} on {shown(other)}"
        )


def _check_pieces(tiling: Tiling, shards: Sequence[Array], addends: Sequence[int]) -> None:
    """Refuse replicas of boxes that differ: pieces of one box, and of one addend if there are several."""
    groups: dict[tuple[tuple[tuple[int, int], ...], int], list[tuple[Any, Array]]] = {}
    for holder, shard, addend in zip(tiling.holders, shards, addends, strict=True):
        for piece in tiling.pieces(holder):
            groups.setdefault((sides_of(piece.box), addend), []).append((holder, piece.view(shard)))
    for (sides, _), ((first, one), *others) in groups.items():
        found = first_difference(one, [other for _, other in others]) if others else None
        if found is None:
            continue
        index, (holder, other) = found[0], others[found[1]]
        element = tuple(start + i for (start, _), i in zip(sides, index, strict=True))
        value, drifted = texts_of(one[index], other[index])
        raise LayoutError(
            f"the replicas of a box differ: element {element} is {value} in {shown(first)} "
            f"and {drifted} in {shown(holder)}"
        )


def first_difference(
    one: Array, others: Sequence[Array], words: int = _WORDS, small: int = _SMALL
) -> tuple[tuple[int, ...], int] | None:
    """Return the index of the first element, in C order, whose bytes differ, and which of the others differs.

    So many words of 8 bytes are compared at a time; of arrays of at most `small` bytes all.
    """
    if one.dtype.names is not None:
        fields = [
            first_difference(one[name], [other[name] for other in others], words, small) for name in one.dtype.names
        ]
        # A field may have dims of its own.
        return min(((found[0][: one.ndim], found[1]) for found in fields if found is not None), default=None)
    own = [i for i, other in enumerate(others) if not _same_memory(one, other)]
    if not own:
        return None
    found = _first_position(one, [others[i] for i in own], words, small)
    if found is None:
        return None
    return tuple(int(i) for i in np.unravel_index(found[0], one.shape)), own[found[1]]


def _first_position(one: Array, others: Sequence[Array], count: int, small: int) -> tuple[int, int] | None:
    if one.dtype.hasobject:
        values = one.ravel().tolist()
        rows = enumerate(zip(*(other.ravel().tolist() for other in others), strict=True))
        differ = (
            (i, j) for i, row in rows for j, x in enumerate(row) if x is not values[i] and not bool(x == values[i])
        )
        return next(differ, None)
    if one.nbytes <= small:
        memory = one.tobytes()
        if all(other.tobytes() == memory for other in others):
            return None
    data = _bytes(one)
    rest = [_bytes(other) for other in others]
    # Compared in words of 8 bytes, and so bit for bit, which a comparison of numbers is not.
    end = len(data) // 8 * 8
    words, rest_words = data[:end].view(np.uint64), [other[:end].view(np.uint64) for other in rest]
    for start in range(0, len(words), count):
        block = slice(start, start + count)
        if any((words[block] != other[block]).any() for other in rest_words):
            return _first_of(data, rest, slice(8 * start, 8 * (start + count)), one.dtype.itemsize)
    return _first_of(data, rest, slice(end, None), one.dtype.itemsize)


def _first_of(data: Array, rest: Sequence[Array], part: slice, itemsize: int) -> tuple[int, int] | None:
    differ = ((data[part] != other[part], j) for j, other in enumerate(rest))
    return min((((part.start + int(at.argmax())) // itemsize, j) for at, j in differ if at.any()), default=None)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same_memory(one: Array, other: Array) -> bool:
    return one.__array_interface__["data"] == other.__array_interface__["data"] and one.strides == other.strides


def texts_of(one: Any, other: Any) -> tuple[str, str]:
    """Return two values that differ as texts, which differ too, unless the values are objects that print alike."""
    texts = _short(one), _short(other)
    if texts[0] != texts[1] or not (isinstance(one, np.generic) and isinstance(other, np.generic)):
        return texts
    # Numbers that print alike, such as NaNs: their bytes, the most significant first.
    bits = [np.array(value).astype(np.dtype(value.dtype).newbyteorder(">")).tobytes().hex() for value in (one, other)]
    return f"{texts[0]} (0x{bits[0]})", f"{texts[1]} (0x{bits[1]})"


def _short(value: Any) -> str:
    if not isinstance(value, np.generic):
        return shown(value)  # An object of any class, whose own text may be of any length, or raise.
    return cut(value, 40)
