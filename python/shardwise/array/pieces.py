"""Arrays of devices that hold several pieces, because a dim is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import refuse_mask

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..partition import Partition
    from ..piece import Piece

__all__ = ["assembled", "place_of", "put_together"]


def assembled(partition: Partition, array: npt.NDArray[Any], position: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a copy of the part of an array on the device at `position`: read-only, zeros where it is padded."""
    refuse_mask("the array, whose shards are copies because a dim is packed,", array)
    shard: npt.NDArray[Any] = np.zeros(shape, array.dtype)
    for piece in partition.pieces(partition.device_mesh.device(position)):
        shard[place_of(piece)] = array[piece.box]
    shard.flags.writeable = False
    return shard


def put_together(partition: Partition, shards: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Put an array together from the shards of a packed partition."""
    labels = partition.holders
    array: npt.NDArray[Any] = np.empty(partition.shape, shards[0].dtype)
    # From the last to the first, so that the values of the first device that has them win.
    for position in range(len(shards) - 1, -1, -1):
        for piece in partition.pieces(labels[position]):
            array[piece.box] = shards[position][place_of(piece)]
    return array


def place_of(piece: Piece) -> tuple[slice, ...]:
    """Return the piece in its device's own array."""
    assert isinstance(piece.start, tuple)
    return tuple(
        slice(start, start + side.stop - side.start) for start, side in zip(piece.start, piece.box, strict=True)
    )
