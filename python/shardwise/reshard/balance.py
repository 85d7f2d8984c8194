"""The senders of the pieces of many tensors, with the load balanced over all of these."""

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
    """Choose who sends what of tensors in turn, so that of the replicas of a box the least busy one sends it.

    Args:
        pairs: the tilings between which tensors go, each with the name of a tensor.
        used: for each tensor the position of its pair.
        weights: for each tensor what an element counts.
        nodes: the node of each holder, by label: of replicas that are nearly as busy, the one sends whose node has sent
            least to the receiver's.

    Returns:
        The labels of all holders; what each of them sends, receives and keeps; for each tensor the senders of its
        transfers, or `None` where there are no replicas.

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
        return listed(tiling.holders if tiling.has_labels else [(name, side, label) for label in tiling.holders])

    def listed(labels: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)

    arguments = [
        (src.core, dst.core, same_holders(src, dst), ids(src, name, "src"), ids(dst, name, "dst"))
        for name, src, dst in pairs
    ]
    return tuple(numbers), arguments
