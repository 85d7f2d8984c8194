"""Holders of two tilings, and devices of two meshes, matched by their labels."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SizeOverflowError
from ..partition import Partition

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..mesh import DeviceMesh
    from ..tiling import Tiling

__all__ = ["same_devices", "same_holders"]


def same_holders(src: Tiling, dst: Tiling) -> npt.NDArray[np.int64]:
    """Return for each holder of `dst` the position of its label in `src`, or -1."""
    if isinstance(src, Partition) and isinstance(dst, Partition):
        return same_devices(src.device_mesh, dst.device_mesh)
    if not (src.has_labels and dst.has_labels):
        return np.full(dst.holder_count, -1, np.int64)
    index = {label: i for i, label in enumerate(src.holders)}
    return np.array([index.get(label, -1) for label in dst.holders], np.int64)


@lru_cache(maxsize=16)  # the tensors of a checkpoint share their meshes
def same_devices(src: DeviceMesh, dst: DeviceMesh) -> npt.NDArray[np.int64]:
    """Return for each device of `dst` the device index of its label in `src`, or -1."""
    if (src.given_labels is None and dst.given_labels is None) or src.given_labels is dst.given_labels:
        try:
            same = np.arange(dst.size, dtype=np.int64)
        except ValueError:  # what numpy raises for a size that no address space holds
            raise SizeOverflowError(f"a plan for {dst.size} devices does not fit in the address space") from None
        same[src.size :] = -1
        same.flags.writeable = False
        return same
    index = {label: i for i, label in enumerate(src.labels())}
    same = np.array([index.get(label, -1) for label in dst.labels()], np.int64)
    same.flags.writeable = False
    return same
