"""Ways to shard a training state: the arrays that each rank of a data-parallel group holds and allocates.

The input is a rank's parameters, as tensor, pipeline and expert parallelism leave them; the output is sizes for each
rank of its data-parallel group. The rules are those of PyTorch 2.15, DeepSpeed 0.19 and Megatron-Core 0.16; the tests
compare with their own allocations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from .._dtypes import bytes_for
from .._text import shown
from ..errors import LayoutError
from .deepspeed import zero3, zero12
from .flat import array_share, flattened, lengths_of, master_and_states, padded_shares, states_of_flat, weight
from .megatron import megatron, megatron_whole
from .recipe import Local, Recipe, StateShare

__all__ = ["entries"]


def entries(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays that the ranks of a data-parallel group keep, with sizes for each rank.

    Args:
        recipe: The arrays that are kept, and how they are sharded.
        parts: The parameters, in the order of the model; all ranks of the group have the same ones.
        ways: The ranks of the group over which the state is sharded.

    Raises:
        LayoutError: if the framework cannot do it.

    >>> from shardwise.state.optimizers import optimizer_of
    >>> recipe = Recipe("fsdp2", optimizer_of("lion"))
    >>> for entry in entries(recipe, [Local(0, (5, 2), 32)], 4):
    ...     print(entry.kind, entry.name, entry.held.tolist(), entry.allocated)
    weights weight [16, 16, 8, 0] 16
    gradients gradient [16, 16, 8, 0] 16
    optimizer exp_avg [16, 16, 8, 0] [16 16  8  0]
    """
    yield from _WAYS[recipe.sharding](recipe, parts, ways)
    optimizer = recipe.optimizer
    if optimizer is not None and optimizer.tables and any(part.trained for part in parts):
        yield StateShare("optimizer", "tables", None, optimizer.tables, optimizer.tables)


def _whole(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of a state that is not cut: every rank has all of it."""
    for part in parts:
        if part.room is None:
            yield from _alone(recipe, part)
            continue
        padded = _alone(recipe, part._replace(shape=part.room, room=None))
        for own, room in zip(_alone(recipe, part), padded, strict=True):
            yield own._replace(allocated=room.allocated)


def _alone(recipe: Recipe, part: Local) -> Iterator[StateShare]:
    yield weight(part)
    if part.trained and recipe.optimizer is not None:
        yield array_share("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
        yield from master_and_states(recipe, part, part.shape)


def _by_rows(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of FSDP2: rows, of which every rank has room for the same number."""
    for part in parts:
        if not part.shape:
            raise LayoutError(
                "fsdp2: a parameter without dims cannot be cut in rows, and fully_shard refuses it: give it as one dim "
                "of one element"
            )
        rows = lengths_of(part.shape[0], ways)
        row, most = math.prod(part.shape[1:]), int(rows.max())
        trained = part.trained and recipe.optimizer is not None
        for kind, name, bits in (
            ("weights", "weight", part.bits),
            *([("gradients", "gradient", recipe.gradient_bits(part))] if trained else []),
        ):
            yield StateShare(kind, name, part.tensor, bytes_for(rows * row, bits), bytes_for(most * row, bits))
        if trained:
            yield from master_and_states(recipe, part, (rows, *part.shape[1:]))


def _by_parameter(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of ZeroRedundancyOptimizer: each parameter's state is on one rank, the least loaded."""
    sizes = np.zeros(ways, np.int64)
    owners = {}
    for at in sorted((at for at, part in enumerate(parts) if part.trained), key=lambda at: -parts[at].size):
        owners[at] = int(sizes.argmin())
        sizes[owners[at]] += parts[at].size
    for at, part in enumerate(parts):
        yield weight(part)
        if at in owners and recipe.optimizer is not None:
            yield array_share("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
            here = (np.arange(ways) == owners[at]).astype(np.int64)
            for entry in master_and_states(recipe, part, part.shape):
                yield entry._replace(held=here * entry.held, allocated=here * entry.allocated)


def _by_units(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[StateShare]:
    """Yield the arrays of FSDP1: the parameters of a wrapped module in one flat parameter."""
    units: dict[Hashable, list[Local]] = {}
    for part in parts:
        units.setdefault(part.unit, []).append(part)
    for unit, own in units.items():
        bits = own[0].bits
        if any(part.bits != bits for part in own):
            raise LayoutError(
                f"fsdp1: the unit {shown(unit)} has parameters of several dtypes, which FSDP1 does not flatten "
                "together: give as units a regular expression that separates them"
            )
        trained = [part for part in own if part.trained and recipe.optimizer is not None]
        if trained and not recipe.aligned and len(trained) < len(own):
            raise LayoutError(
                f"fsdp1: the unit {shown(unit)} has trained and frozen parameters, which FSDP1 flattens together only "
                "with use_orig_params: set it to true in settings"
            )
        sizes = [part.size for part in own]
        align = max(128 // (recipe.compute or bits), 1) if recipe.aligned else 1
        flat = flattened(sizes, ways, align, ways if recipe.aligned else 1)
        pieces = [(part, flat.lengths(at, part.size)) for part, at in zip(own, flat.starts, strict=True)]
        yield from padded_shares("weights", "weight", pieces, flat.chunk, bits)
        if not trained:
            continue
        assert recipe.optimizer is not None
        yield from padded_shares("gradients", "gradient", pieces, flat.chunk, recipe.gradients or bits)
        if recipe.aligned:
            for part, lengths in pieces:
                if part.trained:
                    sizes_here = part.shape if ways == 1 else (lengths,)
                    for entry in master_and_states(recipe, part, sizes_here):
                        is_there = (lengths > 0).astype(np.int64)
                        yield entry._replace(held=entry.held * is_there, allocated=entry.allocated * is_there)
            continue
        if recipe.masters:
            yield from padded_shares("masters", "master", pieces, flat.chunk, recipe.masters)
        yield from states_of_flat(recipe.optimizer, pieces, flat.chunk, recipe.masters or bits)


_WAYS: dict[str, Callable[[Recipe, Sequence[Local], int], Iterator[StateShare]]] = {
    "none": _whole,
    "ddp": _whole,
    "zero-redundancy": _by_parameter,
    "zero1": zero12,
    "zero2": zero12,
    "zero3": zero3,
    "fsdp1": _by_units,
    "fsdp2": _by_rows,
    "hsdp": _by_rows,
    "megatron": megatron,
    "megatron-ddp": megatron_whole,
}
