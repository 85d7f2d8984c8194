"""One tensor in a report: its layout, its shards and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .._dtypes import bytes_for
from .._text import shown
from ..errors import SizeOverflowError
from ..layout import TensorLayout
from ..packed import PackedDim
from ..shared_tiling import SharedTiling

if TYPE_CHECKING:
    from ..layout import UnevenRule

__all__ = ["MAX_DEVICES", "TensorReport", "as_lists", "checked_size", "sum_known"]

#: The most devices of a mesh whose bytes are listed without being asked for.
MAX_DEVICES = 2**20


@dataclass(frozen=True)
class TensorReport:
    """One tensor under the rules of a layout map.

    It can be placed if its layout is known, has a mesh, and fits the shape under the uneven rule.

    Attributes:
        name: The path that was looked up.
        dtype: The name of its dtype, or `None` if none was given.
        bits: Bits per element, or `None`.
        rule: The key whose layout applies; `None` where no key does, or several.
        layout: The layout of the key; if no key applies, that of the default, or one that cuts nothing; `None` if
            several do.
        num_shards: Shards per dim, or `None` if it cannot be placed.
        shard_shape: The shape of the largest shard, or `None` if it cannot be placed.
        uneven: The uneven rule: the key's own, or else the report's.
        tiling: The tiling of a tensor if neighbours share its blocks, because no layout expresses that; `layout` and
            `num_shards` are then those of the quantized weight. `None` for all other tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    bits: int | None
    rule: str | None
    layout: TensorLayout | None
    num_shards: tuple[int, ...] | None
    shard_shape: tuple[int, ...] | None
    uneven: UnevenRule = "even"
    tiling: SharedTiling | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor, counted once; `None` where the dtype is not known."""
        return None if self.bits is None else bytes_for(math.prod(self.shape), self.bits)

    @property
    def bytes_per_device(self) -> int | None:
        """Bytes of the largest shard; `None` if it cannot be placed, or has no dtype."""
        if self.bits is None or self.shard_shape is None:
            return None
        return bytes_for(math.prod(self.shard_shape), self.bits)

    @property
    def bytes_total(self) -> int | None:
        """Bytes that all devices of its mesh hold, with replicas; `None` if it cannot be placed or has no dtype.

        `None` too where a dim is packed and the mesh has more than 2**20 devices.
        """
        mesh = None if self.layout is None else self.layout.device_mesh
        if self.bits is None or self.nbytes is None or self.num_shards is None or self.layout is None or mesh is None:
            return None
        if self.tiling is not None:
            elements: int = sum(self.tiling.nbytes("uint8").tolist())
            return bytes_for(elements, self.bits)
        if self.layout.is_packed:
            # Parts may be cut into different numbers of shards, and padded.
            held = _held(self.layout, self.shape, self.uneven)
            return None if held is None else bytes_for(held[1], self.bits)
        return self.nbytes * (mesh.size // math.prod(self.num_shards))

    @property
    def is_uneven(self) -> bool:
        """True if the tensor can be placed and its shards are of different sizes.

        With a packed dim on a mesh of more than 2**20 devices it is also true if they may differ.
        """
        counts = self.num_shards
        if self.tiling is not None:
            return len(set(self.tiling.nbytes("uint8").tolist())) > 1
        if counts is not None and self.layout is not None and self.layout.is_packed:
            held = _held(self.layout, self.shape, self.uneven)
            return held is None or not held[0]
        return counts is not None and any(size % count for size, count in zip(self.shape, counts, strict=True))

    @property
    def is_replicated(self) -> bool:
        """True if the tensor can be placed and every device of its mesh holds all of it."""
        is_placed = self.num_shards is not None and self.layout is not None and self.tiling is None
        return is_placed and self.layout is not None and self.layout.is_fully_replicated

    def to_dict(self) -> dict[str, Any]:
        """Return the tensor's entry, ready for JSON; the layout as its axes."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "rule": self.rule,
            "layout": None if self.layout is None else as_lists(self.layout.axes),
            "num_shards": as_lists(self.num_shards),
            "shard_shape": as_lists(self.shard_shape),
            "uneven": self.uneven,
            "nbytes": self.nbytes,
            "bytes_per_device": self.bytes_per_device,
            "bytes_total": self.bytes_total,
        }


@lru_cache(maxsize=256)  # the layers of a model have shapes in common
def _held(layout: TensorLayout, shape: tuple[int, ...], uneven: UnevenRule) -> tuple[bool, int] | None:
    """Return whether all devices hold equally many elements, and their sum; `None` for too large a mesh."""
    if layout.device_mesh is None or layout.device_mesh.size > MAX_DEVICES:
        return None
    sizes = layout.partition(shape, uneven).nbytes("uint8")
    return bool((sizes == sizes[0]).all()), sum(sizes.tolist())


def checked_size(size: int, what: str) -> int:
    """Return the given size.

    Raises:
        SizeOverflowError: if it is over 2**63 - 1; the message says what it is the size of.
    """
    if size > 2**63 - 1:
        raise SizeOverflowError(f"{what} are {shown(size)}, over the limit of {2**63 - 1}")
    return size


def sum_known(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of numbers; `None` if one is not known."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def as_lists(value: Any) -> Any:
    """Return axes and shapes as JSON has them: lists for tuples, and packed dims by their text."""
    if isinstance(value, PackedDim):
        return {"packed": str(value)}
    return [as_lists(entry) for entry in value] if isinstance(value, tuple) else value
