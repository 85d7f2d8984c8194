"""The order in which several tensors are packed in one dim, and whether two partitions agree about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .._core import Partition as CorePartition
from .._text import shown
from ..errors import LayoutError
from ..packed import PackedDim
from ..packed.parts import segments_of
from ..partition import Partition
from ..tiling import Tiling

__all__ = ["check_packed", "named_dims"]


def named_dims(partition: Partition) -> Iterator[tuple[int, PackedDim]]:
    """Yield the packed dims whose parts name tensors."""
    for dim, spec in enumerate(partition.layout.axes):
        if isinstance(spec, PackedDim) and spec.names:
            yield dim, spec


def check_packed(src: Tiling, dst: Tiling) -> None:
    """Refuse a plan between partitions that pack a dim in different orders, or with partial sums of packed dims.

    The shapes of different orders are the same, so nothing else would detect it.
    """
    if type(src.core) is CorePartition and type(dst.core) is CorePartition:
        return  # Known sooner than what follows: most plans are of plain partitions, and take some microseconds.
    packed_src = src if isinstance(src, Partition) and src.is_packed else None
    packed_dst = dst if isinstance(dst, Partition) and dst.is_packed else None
    if packed_src is not None:
        mesh = packed_src.device_mesh
        if any(mesh.axis_size(name) > 1 for name in packed_src.layout.unreduced):
            raise LayoutError(
                f"src has packed dims and is unreduced over {shown(packed_src.layout.unreduced)}; partial sums are "
                "added only where no dim is packed"
            )
    if packed_dst is not None and packed_dst.layout.unreduced:
        raise LayoutError(
            f"dst is unreduced over {shown(packed_dst.layout.unreduced)}; a value cannot be cut into partial sums"
        )
    if packed_src is None or packed_dst is None:
        return
    after = dict(named_dims(packed_dst))
    for dim, before in named_dims(packed_src):
        other = after.get(dim)
        if other is None or src.shape != dst.shape:
            continue
        one, two = segments_of(before, src.shape[dim]), segments_of(other, dst.shape[dim])
        if one.keys() != two.keys() or any(not np.array_equal(one[name], two[name]) for name in one):
            raise LayoutError(
                f"src packs dim {dim} as {shown(str(before))}, but dst packs it as {shown(str(other))}: the "
                "shape is the same, but not the tensors and their order; plan_refit goes from one order to another"
            )
