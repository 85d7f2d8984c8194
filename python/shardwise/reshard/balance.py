"""Who sends what of many tensors, with the load balanced over all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import balance_model
from ..partition import Partition
from ..tiling import Tiling
from .same import same_holders

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["balanced"]


def balanced(pairs: Sequence[tuple[str, Tiling, Tiling]], used: list[int], weights: list[int]) -> Any:
    """Choose who sends what of tensors in turn, so that of the replicas of a box the least busy one sends it.

    Args:
        pairs: the tilings between which tensors go, each with the name of a tensor.
        used: for each tensor the position of its pair.
        weights: for each tensor what an element counts.

    Returns:
        The labels of all holders; what each of them sends, receives and keeps; for each tensor the senders of its
        transfers, or `None` where there are no replicas.
    """
    labels, arguments = _participants(pairs)
    return labels, *balance_model(arguments, used, weights, len(labels))


def _participants(pairs: Sequence[tuple[str, Tiling, Tiling]]) -> tuple[tuple[Any, ...], list[Any]]:
    """The labels of all holders, and what `balance_model` takes: tilings, shared holders, numbers of labels."""
    numbers: dict[Hashable, int] = {}
    meshes: dict[int, npt.NDArray[np.int64]] = {}

    def ids(tiling: Tiling, name: str, side: str) -> npt.NDArray[np.int64]:
        if isinstance(tiling, Partition):
            key = id(tiling.device_mesh)
            if key not in meshes:
                meshes[key] = listed(tiling.holders)
            return meshes[key]
        # Holders without labels of their own exist in one tiling only.
        return listed(tiling.holders if tiling._is_named else [(name, side, label) for label in tiling.holders])

    def listed(labels: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)

    arguments = [
        (src._core, dst._core, same_holders(src, dst), ids(src, name, "src"), ids(dst, name, "dst"))
        for name, src, dst in pairs
    ]
    return tuple(numbers), arguments
