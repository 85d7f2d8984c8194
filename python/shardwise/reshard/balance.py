"""The choice of senders for the pieces of many tensors, with the load balanced over all tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import balance_model
from .._text import shown
from ..errors import LayoutError
from ..partition import Partition
from ..tiling import Tiling
from .same import same_holders

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["balanced"]


def balanced(
    pairs: Sequence[tuple[str, Tiling, Tiling]],
    used: list[int],
    weights: list[int],
    nodes: Mapping[Any, Any] | None = None,
) -> Any:
    """Choose the sender of each box, tensor after tensor: of the holders of its replicas, the least busy one.

    Args:
        pairs: the tilings before and after, each pair with the name of a tensor that has it.
        used: for each tensor the position of its pair.
        weights: for each tensor the weight of an element in the load, such as its bits.
        nodes: the node of each holder, by label: of nearly equally busy holders, that one sends whose node has sent the
            least to the receiver's node.

    Returns:
        The labels of all holders; the load that each sends, receives and keeps; for each tensor the senders of its
        transfers, or `None` if it has no replicas.

    Raises:
        LayoutError: if a holder has no node.
    """
    labels, arguments = _participants(pairs)
    if nodes is None:
        return labels, *balance_model(arguments, used, weights, len(labels), None)
    if missing := [label for label in labels if label not in nodes]:
        raise LayoutError(f"nodes has no node for {shown(missing[0])}")
    numbers: dict[Any, int] = {}
    of = [numbers.setdefault(nodes[label], len(numbers)) for label in labels]
    return labels, *balance_model(arguments, used, weights, len(labels), of)


def _participants(pairs: Sequence[tuple[str, Tiling, Tiling]]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the labels of all holders, and `balance_model`'s arguments: tilings, shared holders, label numbers."""
    numbers: dict[Hashable, int] = {}
    meshes: dict[int, npt.NDArray[np.int64]] = {}

    def ids(tiling: Tiling, name: str, side: str) -> npt.NDArray[np.int64]:
        if isinstance(tiling, Partition):
            key = id(tiling.device_mesh)
            if key not in meshes:
                meshes[key] = listed(tiling.holders)
            return meshes[key]
        # Holders without labels of their own exist in one tiling only.
        return listed(tiling.holders if tiling.has_labels else [(name, side, label) for label in tiling.holders])

    def listed(labels: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)

    arguments = [
        (src.core, dst.core, same_holders(src, dst), ids(src, name, "src"), ids(dst, name, "dst"))
        for name, src, dst in pairs
    ]
    return tuple(numbers), arguments
