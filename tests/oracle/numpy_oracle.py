"""docs/semantics.md a second time, as plainly and as slowly as it can be said, and without the package.

Nothing here computes a position: devices are listed one by one, the elements of each shard are listed, boxes are read
off the lists, and owners are found by searching them. Use it for small tensors only. Lists that are asked for again and
again are kept.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Spec = tuple[str, ...]
Coordinate = tuple[int, ...]


@lru_cache(maxsize=10_000)
def coordinates(sizes: tuple[int, ...]) -> list[Coordinate]:
    """All coordinates, in device-index order (2.1)."""
    return list(itertools.product(*(range(size) for size in sizes)))


@lru_cache(maxsize=10_000)
def numbered(sizes: tuple[int, ...]) -> dict[Coordinate, int]:
    """The place of each coordinate in that order, which for elements of a tensor is their offset."""
    return {coordinate: place for place, coordinate in enumerate(coordinates(sizes))}


@lru_cache(maxsize=10_000)
def pieces(n: int, sizes: tuple[int, ...], rule: str) -> list[list[int]]:
    """The `n` elements of one dim, cut over mesh axes of `sizes`, major first, into one list per shard (2.4)."""
    elements = list(range(n))
    if rule == "chunk":
        shards = [elements]
        for size in sizes:
            shards = [piece for shard in shards for piece in ceil_pieces(shard, size)]
        return shards
    count = len(coordinates(sizes))
    if rule == "balanced":
        return [piece.tolist() for piece in np.array_split(np.array(elements, dtype=int), count)]
    if rule == "floor":
        return [[at for at in elements if n * i // count <= at < n * (i + 1) // count] for i in range(count)]
    shards = ceil_pieces(elements, count)
    if rule == "even" and any(len(shard) != len(shards[0]) for shard in shards):
        raise ValueError(f"{len(elements)} elements do not divide into {count} shards")
    return shards


def ceil_pieces(elements: list[int], count: int) -> list[list[int]]:
    """As many elements as the largest shard needs, then again as many, until none are left."""
    step = 0
    while step * count < len(elements):
        step += 1
    return [elements[i * step : (i + 1) * step] for i in range(count)]


class Oracle:
    """Everything about the partition of a tensor of `shape`, for a mesh of named axes and one spec per dim."""

    def __init__(self, axes: dict[str, int], specs: list[Spec], shape: tuple[int, ...], rule: str) -> None:
        self.shape = shape
        self.devices = coordinates(tuple(axes.values()))
        position = {name: place for place, name in enumerate(axes)}
        cuts = [tuple(axes[name] for name in spec) for spec in specs]
        along = [pieces(n, sizes, rule) for n, sizes in zip(shape, cuts, strict=True)]
        self.num_shards = tuple(len(shards) for shards in along)

        # (2.2) Which shard along each dim: where the coordinate over the spec's axes stands in the list of all of them.
        places = [[position[name] for name in spec] for spec in specs]
        turns = [numbered(sizes) for sizes in cuts]
        self.shard_index: list[Coordinate] = [
            tuple(turn[tuple(device[place] for place in spec)] for turn, spec in zip(turns, places, strict=True))
            for device in self.devices
        ]

        # (2.3) Every device holds one shard: the elements that lie in its piece of every dim.
        self.positions = [[along[dim][i] for dim, i in enumerate(index)] for index in self.shard_index]
        shards = {index: self._elements(lists) for index, lists in zip(self.shard_index, self.positions, strict=True)}
        self.held: list[npt.NDArray[np.int64]] = [shards[index] for index in self.shard_index]

        ids = numbered(self.num_shards)
        self.shard_ids = [ids[index] for index in self.shard_index]
        self.replica_ids = [self.shard_ids[:i].count(shard) for i, shard in enumerate(self.shard_ids)]

    def _elements(self, lists: list[list[int]]) -> npt.NDArray[np.int64]:
        """The offsets of the elements whose positions are in the list of every dim."""
        offset = numbered(self.shape)
        offsets = [offset[position] for position in itertools.product(*lists)]
        return np.array(offsets, dtype=np.int64).reshape([len(entries) for entries in lists])

    def boxes(self) -> list[list[tuple[int, int]]]:
        """Start and stop per dim, for every device: read off the first and last element."""
        return [
            [
                (entries[0], entries[-1] + 1) if entries else (n, n)
                for entries, n in zip(positions, self.shape, strict=True)
            ]
            for positions in self.positions
        ]

    def devices_holding(self, shard_id: int) -> list[int]:
        return [device for device, held in enumerate(self.shard_ids) if held == shard_id]

    def owners(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For every offset, the shard that it lies in and its place there: each shard writes on what it holds."""
        size = int(np.prod(self.shape, dtype=object))
        shard_ids, local_offsets = np.full(size, -1), np.full(size, -1)
        for shard_id, held in dict(zip(self.shard_ids, self.held, strict=True)).items():
            shard_ids[held.ravel()] = shard_id
            local_offsets[held.ravel()] = np.arange(held.size)
        return shard_ids, local_offsets

    def locate(self, offset: int) -> tuple[int, int]:
        """Search every shard, in the order of their ids, for the element."""
        for shard_id in sorted(set(self.shard_ids)):
            flat = self.held[self.shard_ids.index(shard_id)].ravel().tolist()
            if offset in flat:
                return shard_id, flat.index(offset)
        raise LookupError(offset)

    def runs(self, device: int) -> list[list[int]]:
        """Walk through the device's elements in order; a gap begins a new run."""
        runs: list[list[int]] = []
        for offset in sorted(self.held[device].ravel().tolist()):
            if runs and runs[-1][0] + runs[-1][1] == offset:
                runs[-1][1] += 1
            else:
                runs.append([offset, 1])
        return runs
