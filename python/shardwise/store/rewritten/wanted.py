"""The tensors to be written: what each is, where its elements come from, and how it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._arguments import refuse_mask
from ..._dtypes import DTYPES, Dtype, find_dtype
from ..._text import shown
from ...array.sharded import ShardedArray
from ...conversion.assembled import Wanted
from ...errors import LayoutError
from ...layout import UnevenRule
from ...partition import Partition
from ...pieces import NO_PIECES, Bounds, Piece, Pieces
from ...placing import Layouts, partition_of, placing_of
from ...rules.left_out import named
from ...shared_tiling import SharedTiling
from ..data.boxes import contiguous_strides
from ..tensors.checkpoint import StoredObject
from ..tensors.stored import StoredTensor

__all__ = [
    "partition_for",
    "refuse_unmatched",
    "wanted_array",
    "wanted_stored",
]


def partition_for(
    name: str, shape: tuple[int, ...], layouts: Layouts | None, uneven: UnevenRule
) -> Partition | SharedTiling | None:
    """Return the partition of the tensor of this name by the layouts; `None` if none applies.

    Raises:
        LayoutError: if the layout does not fit the tensor; names it.
    """
    partition = partition_of(placing_of(layouts), name, shape, uneven)
    if isinstance(partition, Partition) and partition.layout.unreduced:
        axes = partition.layout.unreduced
        raise LayoutError(f"tensor {shown(name)}: a layout with unreduced axes {axes} cannot be written")
    return partition


def refuse_unmatched(layouts: Layouts | None, ranks: Mapping[str, int]) -> None:
    """Refuse tensors, by name and rank, for which a deployment has neither a rule nor a default: they have no place.

    Raises:
        LayoutError: if there are some; counts and names them.
    """
    placing = placing_of(layouts)
    if placing.is_whole_elsewhere:
        return
    found = [name for name, rank in ranks.items() if not placing.matching_rules(name)]
    if found:
        count = "1 tensor matches" if len(found) == 1 else f"{len(found)} tensors match"
        raise LayoutError(
            f"{count} no rule of the deployment, which has no default, so no device holds them: {named(found)}; "
            "default = 'replicated' has all devices hold them, and drop leaves them out"
        )


def wanted_stored(name: str, tensor: StoredTensor, partition: Partition | SharedTiling | None) -> Wanted:
    """A tensor of a checkpoint, whose pieces are addressable, to be written under a name.

    Of elements that are packed, several to a byte, the bytes are written; the partition is of these.
    """
    if tensor.bits % 8:
        tensor = tensor.packed_bytes()
    rank, is_filled = len(tensor.shape), tensor.size > 0
    pieces = Pieces.of((piece.extent() for piece in (tensor.pieces if is_filled else ())), rank)
    again = [piece for piece in tensor.replicas if piece.is_addressable] if is_filled else []
    replicas = Pieces.of((piece.extent() for piece in again), rank) if again else NO_PIECES
    identity = pieces.identity, tensor.dtype, tensor.shape
    return Wanted(name, tensor.known_dtype, tensor.shape, pieces, replicas, partition, identity)


def wanted_object(name: str, value: StoredObject) -> Wanted:
    """A value of a PyTorch distributed checkpoint, which has an extent, to be written as it is."""
    assert value.extent is not None
    file, start, size = value.extent
    piece = Piece(((0, size),), file, start, (1,))
    return Wanted(name, DTYPES["uint8"], (size,), Pieces.of([piece] if size else [], 1), is_object=True)


def wanted_array(name: str, value: Any, partition: Partition | SharedTiling | None) -> Wanted:
    """An array in memory, whole or sharded, with any strides, to be written under a name.

    Raises:
        TypeError: if no checkpoint can hold its dtype.
        LayoutError: if a sharded array has partial sums.
    """
    if isinstance(value, ShardedArray):
        return _wanted_sharded(name, value, partition)
    refuse_mask(f"tensor {shown(name)}", value)
    array = np.asarray(value)
    dtype = _file_dtype(name, array.dtype)
    bounds = tuple((0, size) for size in array.shape)
    array = _little_endian(array)
    piece = Piece(bounds, array, 0, array.strides)
    pieces = Pieces.of([piece] if array.size else [], array.ndim)
    pointer = array.__array_interface__["data"][0]
    identity = (pointer, array.strides, array.shape, dtype.name)
    return Wanted(name, dtype, array.shape, pieces, NO_PIECES, partition, identity)


def _wanted_sharded(name: str, value: ShardedArray, partition: Partition | SharedTiling | None) -> Wanted:
    dtype = _file_dtype(name, value.dtype)
    tiling = value.tiling
    if isinstance(tiling, Partition) and any(
        tiling.device_mesh.axis_size(axis) > 1 for axis in tiling.layout.unreduced
    ):
        raise LayoutError(f"tensor {shown(name)} holds partial sums over {tiling.layout.unreduced}; add them first")
    seen: set[Bounds] = set()
    pieces: list[Piece] = []
    replicas: list[Piece] = []
    for holder, array in zip(tiling.holders, value.shard_arrays(), strict=True):
        refuse_mask(f"tensor {shown(name)}", array)
        array = _little_endian(array)
        for piece in tiling.pieces(holder):
            box = tuple((side.start, side.stop) for side in piece.box)
            if any(start == stop for start, stop in box):
                continue
            if isinstance(piece.start, int):
                offset = piece.start * array.strides[0]
                strides = contiguous_strides([stop - start for start, stop in box], array.strides[0])
            else:
                offset = sum(at * stride for at, stride in zip(piece.start, array.strides, strict=True))
                strides = array.strides
            (replicas if box in seen else pieces).append(Piece(box, array, offset, strides))
            seen.add(box)
    if partition is None and isinstance(tiling, Partition):
        partition = tiling
    rank = len(value.shape)
    held = Pieces.of(pieces, rank), Pieces.of(replicas, rank)
    return Wanted(name, dtype, value.shape, *held, partition, id(value))


def _file_dtype(name: str, dtype: np.dtype[Any]) -> Dtype:
    found = find_dtype(dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype)
    if found is None:
        raise TypeError(f"tensor {shown(name)} is of dtype {dtype}, which no writable checkpoint format can hold")
    return found


def _little_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # The only copy of a whole array: one in the other byte order, which files do not have.
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
