"""Megatron's rank offsets, with which `ShardedTensor.from_rank_offsets` says what a rank holds; needs no Megatron.

`record_ranks` needs Megatron: it loads element numbers by Megatron-Bridge, to find what the model of each rank holds.

For each dim that is cut, a rank gives `(axis, rank offset, fragmentation)`: which dim, which shard of it, and into how
many it is cut; and a replica id. Every rank knows only its own offsets. There are no mesh axes, so reading offsets
needs a mesh, and finds the axes that give every device its shard.

Offsets cannot express partial sums, uneven cuts (shard i of n elements cut k ways begins at i·n/k), axis names, or
whether an axis of size 1 cuts a dim. The form is that of `megatron/core/dist_checkpointing/mapping.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._lazy import lazy
from .._text import counted, shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ._axes import checked_layout, checked_mesh, checked_rank, layout_of_indices

if TYPE_CHECKING:
    from ._megatron_ranks import record_models, record_ranks

__all__ = ["RankOffsets", "from_rank_offsets", "record_models", "record_ranks", "to_rank_offsets"]

#: The functions that record need Megatron-Bridge, and are imported when they are first asked for.
__getattr__, __dir__ = lazy(globals(), {"._megatron_ranks": ("record_models", "record_ranks")})


class RankOffsets(NamedTuple):
    """One device's arguments of `ShardedTensor.from_rank_offsets(key, data, *rank_offsets, replica_id=replica_id)`."""

    #: `(dim, shard index along it, number of shards along it)` for each dim that is cut.
    rank_offsets: tuple[tuple[int, int, int], ...]
    #: The number of the device among those with the same shard; 0 writes it.
    replica_id: int


def to_rank_offsets(layout: TensorLayout) -> list[RankOffsets]:
    """Return the rank offsets of every device, in device-index order.

    Raises:
        LayoutError: if the layout has no mesh, or has unreduced axes, which Megatron cannot express.

    >>> layout = TensorLayout((None, "tp"), DeviceMesh((2, 2), ("dp", "tp")))
    >>> for device in to_rank_offsets(layout):
    ...     print(device.rank_offsets, device.replica_id)
    ((1, 0, 2),) 0
    ((1, 1, 2),) 0
    ((1, 0, 2),) 1
    ((1, 1, 2),) 1
    """
    layout, _ = checked_layout(layout)
    if layout.unreduced:
        raise LayoutError(
            f"Megatron's rank offsets cannot express partial sums, and {shown(layout.unreduced)} are unreduced"
        )
    counts = layout.num_shards
    # Of a tensor with one element per shard, the box of a device begins at its shard index.
    partition = layout.partition(counts)
    rows = partition.boxes()[:, :, 0].tolist()
    cut = [(dim, count) for dim, count in enumerate(counts) if count > 1]
    return [
        RankOffsets(tuple((dim, row[dim], count) for dim, count in cut), replica)
        for row, replica in zip(rows, partition.replica_ids().tolist(), strict=True)
    ]


def from_rank_offsets(
    rank_offsets: Sequence[RankOffsets | Sequence[tuple[int, int, int]]], mesh: DeviceMesh, rank: int
) -> TensorLayout:
    """Read the rank offsets of all devices as a layout over `mesh`.

    Args:
        rank_offsets: for each device, in device-index order, its `(axis, rank offset, fragmentation)` tuples; or
            its `RankOffsets`, whose replica ids do not matter.
        mesh: the mesh whose axes are to give each device its shard.
        rank: the number of dims.

    Raises:
        LayoutError: if the devices do not agree on how a dim is cut, or no layout over the mesh gives them these
            shards.

    >>> mesh = DeviceMesh((2, 2), ("dp", "tp"))
    >>> from_rank_offsets([[(1, 0, 2)], [(1, 1, 2)], [(1, 0, 2)], [(1, 1, 2)]], mesh, rank=2).axes
    (None, 'tp')
    """
    checked_mesh(mesh)
    dims = checked_rank(rank)
    given = [item.rank_offsets if isinstance(item, RankOffsets) else item for item in rank_offsets]
    if len(given) != mesh.size:
        raise LayoutError(
            f"rank_offsets has {counted(len(given), 'entry', 'entries')}, but the mesh has "
            f"{counted(mesh.size, 'device')}"
        )
    indices = np.zeros((mesh.size, dims), np.int64)
    counts = [dict.fromkeys(range(dims), 1) for _ in given]
    for device, offsets in enumerate(given):
        seen = set()
        for dim, index, count in offsets:
            place = f"rank_offsets[{device}]: ({dim}, {index}, {count})"
            if not 0 <= dim < dims or dim in seen:
                raise LayoutError(f"{place} is for a dim that does not exist, or repeats one; rank is {dims}")
            if not 0 <= index < count:
                raise LayoutError(f"{place} is for shard {index} of {count}; it must be from 0 to {count - 1}")
            seen.add(dim)
            indices[device, dim] = index
            counts[device][dim] = count
        if counts[device] != counts[0]:
            raise LayoutError(
                f"rank_offsets[{device}] cuts the dims into {tuple(counts[device].values())}, but rank_offsets[0] "
                f"into {tuple(counts[0].values())}; a layout cuts them alike for all devices"
            )
    return layout_of_indices("rank_offsets", mesh, indices, tuple(counts[0].values()))
