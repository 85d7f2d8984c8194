"""Manifests of several processes, joined; the manifest of one, from the elements that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._arguments import instance
from .._text import shown
from .._types import Numbers
from ..errors import LayoutError
from ..tiling import Tiling
from .element_rows import boxes_of
from .manifest import Manifest, ManifestTensor

__all__ = ["join_manifests", "manifest_of_held"]


def join_manifests(manifests: Iterable[Mapping[str, Tiling]]) -> Manifest:
    """Join the manifests of several processes: each tensor with the boxes of all its holders.

    Args:
        manifests: those of recordings, each of its own holder.

    Raises:
        LayoutError: if two have the same holder, or a tensor is of several shapes or dtypes; the message names it.

    >>> import numpy as np
    >>> import shardwise as sw
    >>> def rank(number):
    ...     return sw.record({"w": ((4, 2), "float32")}, lambda given: {"w": np.split(given["w"], 2)[number]}, number)
    >>> joined = join_manifests(rank(number).manifest for number in range(2))
    >>> joined["w"].holders, joined["w"].pieces(1)[0].box
    ((0, 1), (slice(2, 4, None), slice(0, 2, None)))
    """
    tensors: dict[str, list[Manifest]] = {}
    for one in manifests:
        checked = instance("manifests", one, Manifest)
        for name in checked:
            tensors.setdefault(name, []).append(checked)
    made: dict[Any, Tiling] = {}
    found = {}
    for name, those in tensors.items():
        first = those[0].tensors[name]
        held: dict[Any, Any] = {}
        for one in those:
            other, tiling = one.tensors[name], one[name]
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise LayoutError(
                    f"tensor {shown(name)} is {first.dtype} of shape {first.shape} in one manifest, and {other.dtype} "
                    f"of shape {other.shape} in another"
                )
            for holder in tiling.holders:
                if holder in held:
                    raise LayoutError(f"two manifests have the holder {shown(holder)}; record each with its own label")
                boxes = [[(side.start, side.stop) for side in piece.box] for piece in tiling.pieces(holder)]
                held[holder] = tuple(boxes[0]) if len(boxes) == 1 else boxes
        key = first.shape, repr(held)
        if key not in made:
            made[key] = Tiling.from_boxes(first.shape, held, replicas=True)
        found[name] = ManifestTensor(first.shape, first.dtype, made[key])
    return Manifest(found)


def manifest_of_held(
    holder: Any, tensors: Mapping[str, tuple[tuple[int, ...], str]], held: Mapping[str, Numbers]
) -> Manifest:
    """Make the manifest of one process from the flat positions, ascending, of the elements that it has of tensors."""
    found = {}
    for name, offsets in held.items():
        shape, dtype = tensors[name]
        boxes = [tuple(map(tuple, box)) for box in boxes_of(offsets, shape).tolist()]
        given = {holder: boxes[0] if len(boxes) == 1 else [list(box) for box in boxes]}
        found[name] = ManifestTensor(shape, dtype, Tiling.from_boxes(shape, given, replicas=True))
    return Manifest(found)
