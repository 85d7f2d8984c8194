"""DeepSpeed's ZeRO: the arrays that its ranks hold and allocate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._dtypes import bytes_for
from ..errors import LayoutError
from .flat import array_share, flattened, lengths_of, padded_shares, states_of_flat, weight
from .recipe import Local, Recipe, StateShare

if TYPE_CHECKING:
    import numpy.typing as npt


__all__ = ["zero3", "zero12"]


def _grouped(recipe: Recipe, parts: Sequence[Local]) -> list[list[Local]]:
    """Return DeepSpeed's parameter groups of the trained parameters."""
    trained = [part for part in parts if part.trained]
    if recipe.groups == 1:
        return [trained] if trained else []
    both = [part for part in trained if len(part.shape) > 1], [part for part in trained if len(part.shape) < 2]
    return [group for group in both if group]


def zero12(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of ZeRO 1 and 2: each group is flat, masters and states are equal partitions of it."""
    for part in parts:
        yield weight(part)
    if recipe.optimizer is None:
        return
    for group in _grouped(recipe, parts):
        bits = group[0].bits
        if any(part.bits != bits for part in group):
            raise LayoutError(
                f"{recipe.sharding}: a parameter group has several dtypes, which DeepSpeed does not take; weights "
                "gives all of them one dtype"
            )
        if recipe.round_robin:
            group = [part for first in range(min(ways, len(group))) for part in group[first::ways]]
        sizes = [part.size for part in group]
        flat = flattened(sizes, ways, 1, 2 * ways)
        pieces = list(zip(group, flat.lengths_of_all(sizes), strict=True))
        padding = flat.size - sum(sizes)
        if padding:
            yield StateShare("weights", "padding", None, 0, bytes_for(padding, bits))
        gradients = recipe.gradients or bits
        # BF16_Optimizer, which DeepSpeed takes for bfloat16 with gradients that are summed in float32, keeps both.
        if recipe.sharding == "zero1" and gradients > bits:
            for part in group:
                yield array_share("gradients", "gradient", part, part.size, bits)
                yield array_share("gradients", "gradient summed", part, part.size, gradients)
            if padding:
                yield StateShare("gradients", "padding", None, 0, bytes_for(padding, gradients))
        else:
            yield from padded_shares("gradients", "gradient", pieces, flat.chunk, gradients)
        masters = 32 if recipe.masters is None else recipe.masters
        if masters:
            yield from padded_shares("masters", "master", pieces, flat.chunk, masters)
        yield from states_of_flat(recipe.optimizer, pieces, flat.chunk, masters or bits)


def zero3(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of ZeRO 3: each parameter is flat and cut alone; states are in sub-groups of the pieces."""
    cuts = {part.size: lengths_of(part.size, ways) for part in parts}
    for part in parts:
        lengths = cuts[part.size]
        chunk = int(lengths.max())
        yield StateShare("weights", "weight", part.tensor, bytes_for(lengths, part.bits), bytes_for(chunk, part.bits))
        if recipe.optimizer is not None and part.size <= recipe.persistent:
            whole = bytes_for(part.size, part.bits), bytes_for(chunk * ways, part.bits)
            yield StateShare("whole", "weight after a step", part.tensor, *whole)
    if recipe.optimizer is None:
        return
    masters = 32 if recipe.masters is None else recipe.masters
    for group in _grouped(recipe, parts):
        for own in _sub_groups(group, cuts, recipe.sub_group):
            pieces = [(part, cuts[part.size]) for part in own]
            chunk = sum(int(lengths.max()) for _, lengths in pieces)
            bits = own[0].bits
            yield from padded_shares("gradients", "gradient", pieces, chunk, recipe.gradients or bits)
            if masters:
                yield from padded_shares("masters", "master", pieces, chunk, masters)
            yield from states_of_flat(recipe.optimizer, pieces, chunk, masters or bits)


def _sub_groups(group: Sequence[Local], cuts: dict[int, npt.NDArray[np.int64]], most: int) -> Iterator[Sequence[Local]]:
    """Yield runs of parameters; a run ends as soon as its pieces have at least `most` elements."""
    own: list[Local] = []
    size = 0
    for part in group:
        own.append(part)
        size += int(cuts[part.size].max())
        if size >= most:
            yield own
            own, size = [], 0
    if own:
        yield own
