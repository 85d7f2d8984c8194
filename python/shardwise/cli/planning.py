"""What each device would hold of a checkpoint: the report of a layout map, with the bytes of every dtype.

The report counts bytes in numpy's dtypes. A checkpoint has more of them, some smaller than a byte, so they are counted
here, in the bits that the header gives.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._dtypes import bytes_for
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..rules.report import LayoutReport, TensorReport
from ..store import Entry

__all__ = ["Plan", "PlannedTensor"]

# Beyond these the bytes of each device are not told apart.
_MAX_DEVICES = 2**20


class PlannedTensor(NamedTuple):
    """A tensor of the checkpoint with what the rules make of it.

    Attributes:
        entry: What the checkpoint says.
        report: What the report says; its dtype and bytes are left empty.
        bytes_per_device: Bytes of the largest shard; None if the tensor has no place on the mesh.
    """

    entry: Entry
    report: TensorReport
    bytes_per_device: int | None

    @property
    def is_uneven(self) -> bool:
        """Whether its shards are of different sizes."""
        counts = self.report.num_shards or ()
        return any(size % count for size, count in zip(self.entry.shape, counts, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """Give the tensor as JSON has it."""
        report = self.report.to_dict()
        del report["bytes_total"]
        sizes = {"nbytes": self.entry.nbytes, "bytes_per_device": self.bytes_per_device}
        return report | {"dtype": self.entry.dtype} | sizes


@dataclass(frozen=True)
class Plan:
    """A checkpoint under the rules of a layout map, on a mesh."""

    entries: Mapping[str, Entry]
    mesh: DeviceMesh
    report: LayoutReport

    @cached_property
    def tensors(self) -> list[PlannedTensor]:
        """The tensors, in the checkpoint's order."""
        return [_planned(self.entries[tensor.name], tensor) for tensor in self.report.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def displaced(self) -> int:
        """How many tensors have no place: several rules match, or the layout does not fit the shape."""
        return sum(tensor.bytes_per_device is None for tensor in self.tensors)

    @property
    def replicated_share(self) -> float:
        """The share of the bytes that have a place which every device holds."""
        placed = sum(tensor.entry.nbytes for tensor in self.tensors if tensor.bytes_per_device is not None)
        replicated = sum(tensor.entry.nbytes for tensor in self.tensors if tensor.report.is_replicated)
        return replicated / max(placed, 1)

    @cached_property
    def device_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes on each device, in device-index order; None on a mesh of so many that nobody wants to know."""
        if self.mesh.size > _MAX_DEVICES:
            return None
        alike = 0
        different: Counter[tuple[TensorLayout, tuple[int, ...], int]] = Counter()
        for tensor in self.tensors:
            if tensor.is_uneven and tensor.report.layout is not None:
                different[tensor.report.layout, tensor.entry.shape, tensor.entry.bits] += 1
            else:
                alike += tensor.bytes_per_device or 0
        total = np.full(self.mesh.size, alike, np.int64)
        for (layout, shape, bits), count in different.items():
            boxes = layout.partition(shape, self.report.uneven).boxes()
            total += count * bytes_for(np.prod(boxes[..., 1] - boxes[..., 0], axis=1), bits)
        return total


def _planned(entry: Entry, report: TensorReport) -> PlannedTensor:
    shard = report.shard_shape
    return PlannedTensor(entry, report, None if shard is None else bytes_for(math.prod(shard), entry.bits))
