"""A partition with packed dims as a grid of its pieces, for pictures."""

from __future__ import annotations

import itertools
from typing import Any

from ..partition import Partition

__all__ = ["Parted"]


class Parted:
    """The pieces of a packed partition at their places in the tensor, with a partition's attributes for pictures.

    Along each dim the pieces of all devices are put side by side; a "shard" is one piece, whatever holds it.

    >>> from shardwise import DeviceMesh, TensorLayout, packed
    >>> partition = TensorLayout((packed.gate_up("tp"),), DeviceMesh((2,), ("tp",))).partition((8,))
    >>> parted = Parted(partition)
    >>> parted.num_shards, parted.shard_box(2), parted.devices_holding(2)
    ((4,), (slice(4, 6, None),), ['cpu:0'])
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        begins, rows = partition.all_pieces()
        bounds = rows[:, :, :2].tolist()
        dims = range(len(partition.shape))
        self._sides = [sorted({tuple(piece[dim]) for piece in bounds}) or [(0, 0)] for dim in dims]
        self._holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for device, (begin, end) in enumerate(itertools.pairwise(begins.tolist())):
            for piece in bounds[begin:end]:
                self._holders.setdefault(tuple(map(tuple, piece)), []).append(device)

    @property
    def num_shards(self) -> tuple[int, ...]:
        """The number of pieces side by side along each dim."""
        return tuple(map(len, self._sides))

    def shard_box(self, shard_id: int) -> tuple[slice, ...]:
        """Give the slices of a piece."""
        return tuple(slice(*side) for side in self._key(shard_id))

    def devices_holding(self, shard_id: int) -> list[Any]:
        """List the devices that hold a piece."""
        return [self._partition.device_mesh.device(device) for device in self._holders.get(self._key(shard_id), [])]

    def canonical_device(self, shard_id: int) -> Any:
        """Give the first of them."""
        return next(iter(self.devices_holding(shard_id)), None)

    def _key(self, shard_id: int) -> tuple[tuple[int, int], ...]:
        key: list[tuple[int, int]] = []
        for sides in reversed(self._sides):
            shard_id, position = divmod(shard_id, len(sides))
            key.append(sides[position])
        return tuple(reversed(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._partition, name)
