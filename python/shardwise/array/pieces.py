"""Arrays of devices that hold several pieces, because a dim is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import refuse_mask

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..partition import Partition

__all__ = ["assembled", "put_together"]


def assembled(partition: Partition, array: npt.NDArray[Any], position: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a copy of the part of an array on the device at `position`: read-only, zeros where it is padded."""
    refuse_mask("the array, whose shards are copies because a dim is packed,", array)
    shard: npt.NDArray[Any] = np.zeros(shape, array.dtype)
    for piece in partition.pieces(partition.device_mesh.device(position)):
        piece.view(shard)[...] = array[piece.box]
    shard.flags.writeable = False
    return shard


def put_together(partition: Partition, shards: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Put an array together from the shards of a packed partition."""
    labels = partition.holders
    array: npt.NDArray[Any] = np.empty(partition.shape, shards[0].dtype)
    # From the last to the first, so that the values of the first device that has them win.
    for position in range(len(shards) - 1, -1, -1):
        for piece in partition.pieces(labels[position]):
            array[piece.box] = piece.view(shards[position])
    return array
