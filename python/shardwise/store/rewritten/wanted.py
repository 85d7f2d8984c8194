"""The tensors to be written: the places of their elements, and the partitions by which they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import refuse_mask
from ..._dtypes import DTYPES, Dtype, find_dtype
from ..._text import shown
from ...array.sharded import ShardedArray, compared_shards
from ...conversion.tables import Wanted
from ...errors import LayoutError
from ...layout import TensorLayout, UnevenRule
from ...partition import Partition
from ...piece import sides_of
from ...pieces import NO_PIECES, Bounds, LocatedPiece, Pieces
from ...placing import Placing, partition_of
from ...quantized.follow import followed, with_states
from ...quantized.forms import NO_COMPONENTS, Components
from ...rules.left_out import names_text
from ...shared_tiling import SharedTiling
from ..data.boxes import contiguous_strides
from ..data.sources import KeptArray
from ..tensors.checkpoint import StoredObject
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import ListedPieces
from .names import check_name

__all__ = [
    "number_of",
    "partition_for",
    "refuse_unmatched",
    "wanted_array",
    "wanted_arrays",
    "wanted_bytes",
    "wanted_number",
    "wanted_object",
    "wanted_stored",
]

#: The most keys of nested mappings that a message joins.
_MOST_KEYS = 8


def partition_for(
    name: str, shape: tuple[int, ...], layouts: Placing, uneven: UnevenRule
) -> Partition | SharedTiling | None:
    """Return the partition of the tensor of this name by the layouts; `None` if none applies.

    Raises:
        LayoutError: if the layout does not fit the tensor; names it.
    """
    partition = partition_of(layouts, name, shape, uneven)
    if partition is not None and not isinstance(partition, (Partition, SharedTiling)):
        raise LayoutError(
            f"tensor {shown(name)}: its layout is only a list of boxes, as rules learned from recordings have, and "
            "files cannot be cut by that; plan_model moves such boxes between memories"
        )
    if isinstance(partition, Partition) and partition.layout.unreduced:
        axes = partition.layout.unreduced
        raise LayoutError(f"tensor {shown(name)}: a layout with unreduced axes {axes} cannot be written")
    return partition


def refuse_unmatched(layouts: Placing, names: Iterable[str]) -> None:
    """Refuse tensors, by name, for which a deployment has neither a rule nor a default: no device would hold them.

    Raises:
        LayoutError: if there are such tensors; the message counts and names them.
    """
    if layouts.is_whole_elsewhere:
        return
    found = [name for name in names if not layouts.matching_rules(name)]
    if found:
        count = "1 tensor matches" if len(found) == 1 else f"{len(found)} tensors match"
        raise LayoutError(
            f"{count} no rule of the deployment, which has no default, so no device holds them: {names_text(found)}; "
            "with default = 'replicated' all devices hold them, and drop leaves them out"
        )


def wanted_stored(name: str, tensor: StoredTensor, partition: Partition | SharedTiling | None) -> Wanted:
    """Return an addressable tensor of a checkpoint as one to be written under a name.

    Of packed elements, several to a byte, the bytes are written; the partition is one of bytes.
    """
    if tensor.bits % 8:
        tensor = tensor.packed_bytes()
    rank, is_filled = len(tensor.shape), tensor.size > 0
    held = tensor.pieces if is_filled else ()
    if isinstance(held, ListedPieces) and held.has_extents:
        pieces = held.extents()
    else:
        pieces = Pieces.of((piece.extent() for piece in held), rank)
    again = [piece for piece in tensor.replicas if piece.is_addressable] if is_filled else []
    replicas = Pieces.of((piece.extent() for piece in again), rank) if again else NO_PIECES
    identity = pieces.identity, tensor.dtype, tensor.shape
    return Wanted(name, tensor.known_dtype, tensor.shape, pieces, replicas, partition, identity)


def wanted_object(name: str, value: StoredObject) -> Wanted:
    """Return a value in a container of its own, of a PyTorch distributed checkpoint, as one to be copied as bytes."""
    assert value.extent is not None
    file, start, size = value.extent
    piece = LocatedPiece(((0, size),), file, start, (1,))
    return Wanted(name, DTYPES["uint8"], (size,), Pieces.of([piece] if size else [], 1), is_object=True)


def wanted_arrays(
    tensors: Mapping[str, Any], layouts: Placing, uneven: UnevenRule, *, check: bool
) -> tuple[list[Wanted], Components]:
    """Return arrays in memory as tensors to be written under their names; and the names of states among them.

    Args:
        tensors: The arrays by name, whole or sharded, with any strides.
        layouts: The layouts of the tensors.
        uneven: The rule by which a dim that does not divide is cut.
        check: Whether replicas of sharded arrays are compared.

    Raises:
        LayoutError: if a tensor cannot have a name, a layout does not fit, or replicas differ.
        TypeError: if a value is not an array, or no checkpoint can hold its dtype.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping from names to arrays, got {type(tensors).__name__}")
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            advice = (
                f"join the names of what is nested, as in {{{_joined(name, value)}: …}}" if value else "leave it out"
            )
            raise TypeError(f"tensors[{shown(name)}] is a {type(value).__name__}; it must be an array: {advice}")
    for name in tensors:
        check_name(name)
    states = with_states(NO_COMPONENTS, {name: (_shape(value), "") for name, value in tensors.items()})
    taken = states.taken
    refuse_unmatched(layouts, [*(name for name in tensors if name not in taken), *(one.name for one in states.states)])
    cuts = followed(states, layouts, uneven)
    found = []
    for name, value in tensors.items():
        cut, shape = cuts.get(name), _shape(value)
        partition = cut.partition(shape) if isinstance(cut, TensorLayout) else cut
        partition = partition_for(name, shape, layouts, uneven) if partition is None else partition
        found.append(wanted_array(name, value, partition, check=check))
    return found, states


def _shape(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, ShardedArray) else tuple(np.shape(value))


def _joined(name: str, value: Mapping[Any, Any]) -> str:
    """Return the name of the first array within nested mappings, made of the keys that lead to it."""
    keys = [name]
    inner: Any = value
    while isinstance(inner, Mapping) and inner and len(keys) < _MOST_KEYS:
        key, inner = next(iter(inner.items()))
        keys.append(str(key))
    return shown(".".join(keys))


def wanted_bytes(name: str, data: bytes) -> Wanted:
    """Return a value whose bytes are in the plan, as one to be written."""
    piece = LocatedPiece(((0, len(data)),), KeptArray.of(data), 0, (1,))
    return Wanted(name, DTYPES["uint8"], (len(data),), Pieces.of([piece] if data else [], 1), is_object=True)


def wanted_number(name: str, number: npt.NDArray[Any], dtype: Dtype) -> Wanted:
    """Return a tensor without dims, whose value is in the plan, as one to be written."""
    piece = LocatedPiece((), KeptArray.of(number.astype(dtype.numpy()).tobytes()), 0, ())
    return Wanted(name, dtype, (), Pieces.of([piece], 0))


def number_of(tensor: Wanted) -> float:
    """Return the only element of a tensor.

    Raises:
        LayoutError: if it has more.
        ParseError, OSError: if it cannot be read.
    """
    if len(tensor.pieces) != 1 or math.prod(tensor.shape) != 1:
        raise LayoutError(f"{shown(tensor.name)} of shape {tensor.shape} is not one number")
    (holder,), begin = tensor.pieces.holders, int(tensor.pieces.offsets[0])
    if isinstance(holder, np.ndarray):
        data = np.ascontiguousarray(holder).reshape(-1).view(np.uint8)[begin : begin + tensor.itemsize].tobytes()
    else:
        data = holder.read(begin, tensor.itemsize)
    return float(np.frombuffer(data, tensor.dtype.numpy())[0])


def wanted_array(name: str, value: Any, partition: Partition | SharedTiling | None, *, check: bool = False) -> Wanted:
    """Return an array in memory, whole or sharded, with any strides, as a tensor to be written under a name.

    Raises:
        TypeError: if no checkpoint can hold its dtype.
        LayoutError: if a sharded array has partial sums; with `check`, if its replicas differ.
    """
    if isinstance(value, ShardedArray):
        return _wanted_sharded(name, value, partition, compared_shards(value, check))
    refuse_mask(f"tensor {shown(name)}", value)
    array = np.asarray(value)
    dtype = _file_dtype(name, array.dtype)
    bounds = tuple((0, size) for size in array.shape)
    array = _little_endian(array)
    piece = LocatedPiece(bounds, array, 0, array.strides)
    pieces = Pieces.of([piece] if array.size else [], array.ndim)
    pointer = array.__array_interface__["data"][0]
    identity = (pointer, array.strides, array.shape, dtype.name)
    return Wanted(name, dtype, array.shape, pieces, NO_PIECES, partition, identity)


def _wanted_sharded(
    name: str, value: ShardedArray, partition: Partition | SharedTiling | None, shards: Iterable[np.ndarray[Any, Any]]
) -> Wanted:
    dtype = _file_dtype(name, value.dtype)
    tiling = value.tiling
    if isinstance(tiling, Partition) and any(
        tiling.device_mesh.axis_size(axis) > 1 for axis in tiling.layout.unreduced
    ):
        raise LayoutError(f"tensor {shown(name)} holds partial sums over {tiling.layout.unreduced}; add them first")
    seen: set[Bounds] = set()
    pieces: list[LocatedPiece] = []
    replicas: list[LocatedPiece] = []
    for holder, array in zip(tiling.holders, shards, strict=True):
        refuse_mask(f"tensor {shown(name)}", array)
        array = _little_endian(array)
        for piece in tiling.pieces(holder):
            box = sides_of(piece.box)
            if any(start == stop for start, stop in box):
                continue
            if isinstance(piece.start, int):
                offset = piece.start * array.strides[0]
                strides = contiguous_strides([stop - start for start, stop in box], array.strides[0])
            else:
                offset = sum(at * stride for at, stride in zip(piece.start, array.strides, strict=True))
                strides = array.strides
            (replicas if box in seen else pieces).append(LocatedPiece(box, array, offset, strides))
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
