"""The tensors to be written: the places of their elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import refuse_mask
from ..._dtypes import DTYPES, Dtype, find_dtype
from ..._text import shown
from ...array.sharded import ShardedArray, compared_shards
from ...conversion.tables import Wanted
from ...errors import LayoutError
from ...partition import Partition
from ...piece import sides_of
from ...pieces import NO_PIECES, Bounds, LocatedPiece, Pieces
from ...shared_tiling import SharedTiling
from ..data.sources import KeptArray
from ..tensors.checkpoint import StoredObject
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import ListedPieces
from .names import check_name

__all__ = [
    "number_of",
    "wanted_array",
    "wanted_arrays",
    "wanted_bytes",
    "wanted_number",
    "wanted_object",
    "wanted_stored",
]

#: The most keys of nested mappings that a message joins.
_MOST_KEYS = 8


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


def wanted_arrays(tensors: Mapping[str, Any], *, check: bool) -> list[Wanted]:
    """Return arrays in memory as tensors to be written under their names; a sharded one is cut as it is.

    Args:
        tensors: The arrays by name, whole or sharded, with any strides.
        check: Whether replicas of sharded arrays are compared.

    Raises:
        LayoutError: if a tensor cannot have a name, or replicas differ.
        TypeError: if a value is not an array, or no checkpoint can hold its dtype.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping from names to arrays, got {type(tensors).__name__}")
    for name, value in tensors.items():
        check_name(name)
        if isinstance(value, Mapping):
            advice = (
                f"join the names of what is nested, as in {{{_joined(name, value)}: …}}" if value else "leave it out"
            )
            raise TypeError(f"tensors[{shown(name)}] is a {type(value).__name__}; it must be an array: {advice}")
    return [wanted_array(name, value, check=check) for name, value in tensors.items()]


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
        ParseError, OSError: if the file cannot be read.
    """
    if len(tensor.pieces) != 1 or math.prod(tensor.shape) != 1:
        raise LayoutError(f"{shown(tensor.name)} of shape {tensor.shape} is not one number")
    (holder,), begin = tensor.pieces.holders, int(tensor.pieces.offsets[0])
    if isinstance(holder, np.ndarray):
        data = np.ascontiguousarray(holder).reshape(-1).view(np.uint8)[begin : begin + tensor.itemsize].tobytes()
    else:
        data = holder.read(begin, tensor.itemsize)
    return float(np.frombuffer(data, tensor.dtype.numpy())[0])


def wanted_array(name: str, value: Any, *, check: bool = False) -> Wanted:
    """Return an array in memory, whole or sharded, with any strides, as a tensor to be written under a name.

    Raises:
        TypeError: if no checkpoint can hold its dtype.
        LayoutError: if a sharded array has partial sums; with `check`, if its replicas differ.
    """
    if isinstance(value, ShardedArray):
        return _wanted_sharded(name, value, check=check)
    array = _file_array(name, value)
    dtype = _file_dtype(name, array.dtype)
    piece = LocatedPiece(tuple((0, size) for size in array.shape), array, 0, array.strides)
    pieces = Pieces.of([piece] if array.size else [], array.ndim)
    pointer = array.__array_interface__["data"][0]
    identity = (pointer, array.strides, array.shape, dtype.name)
    return Wanted(name, dtype, array.shape, pieces, identity=identity)


def _wanted_sharded(name: str, value: ShardedArray, *, check: bool) -> Wanted:
    tiling = value.tiling
    if isinstance(tiling, Partition) and any(
        tiling.device_mesh.axis_size(axis) > 1 for axis in tiling.layout.unreduced
    ):
        raise LayoutError(f"tensor {shown(name)} holds partial sums over {tiling.layout.unreduced}; add them first")
    partition = tiling if isinstance(tiling, Partition) else None
    if value.whole is not None:
        return replace(wanted_array(name, value.whole), partition=partition, identity=id(value))
    dtype = _file_dtype(name, value.dtype)
    seen: set[Bounds] = set()
    pieces: list[LocatedPiece] = []
    replicas: list[LocatedPiece] = []
    for holder, shard in zip(tiling.holders, compared_shards(value, check), strict=True):
        array = _file_array(name, shard)
        for piece in tiling.pieces(holder):
            box, view = sides_of(piece.box), piece.view(array)
            if view.size:
                (replicas if box in seen else pieces).append(LocatedPiece(box, view, 0, view.strides))
                seen.add(box)
    rank = len(value.shape)
    held = Pieces.of(pieces, rank), Pieces.of(replicas, rank)
    return Wanted(name, dtype, value.shape, *held, partition, id(value))


def _file_dtype(name: str, dtype: np.dtype[Any]) -> Dtype:
    found = find_dtype(dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype)
    if found is None:
        raise TypeError(f"tensor {shown(name)} is of dtype {dtype}, which no writable checkpoint format can hold")
    return found


def _file_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return an array as files have it: no mask, and little-endian."""
    refuse_mask(f"tensor {shown(name)}", value)
    array = np.asarray(value)
    # The only copy of a whole array: one in the other byte order, which files do not have.
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
