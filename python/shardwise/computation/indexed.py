"""Ops that look elements up in numpy: gather, scatter, and slices whose places are operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._types import Array
from .held import REDUCTIONS, Attributes, DeviceTensors, identity

__all__ = ["dynamic_slice", "dynamic_update_slice", "looked_up", "scatter"]


def lookups(attributes: Attributes, indices: Array, slices: tuple[int, ...], rank: int) -> list[Any]:
    """Return the places, in each dim of the operand, of all elements of the slices."""
    offset, collapsed, batch = (
        attributes[name] for name in ("offset_dims", "collapsed_slice_dims", "operand_batching_dims")
    )
    vector, grid = attributes["index_vector_dim"], np.indices(slices, sparse=True)
    batches = [places for dim, places in enumerate(grid) if dim not in offset]
    found: list[Any] = [0] * rank
    for at, dim in enumerate(attributes["start_index_map"]):
        index: Any = (*batches[:vector], at, *batches[vector:])
        found[dim] = indices[index].astype(np.int64)
    numbers = [dim for dim in range(indices.ndim) if dim != vector]
    for dim, of_indices in zip(batch, attributes["start_indices_batching_dims"], strict=True):
        found[dim] = batches[numbers.index(of_indices)]
    whole = [dim for dim in range(rank) if dim not in collapsed and dim not in batch]
    for dim, of_slices in zip(whole, offset, strict=True):
        found[dim] = found[dim] + grid[of_slices]
    return [np.broadcast_to(places, slices) for places in found]


def vectors(attributes: Attributes, indices: Array) -> Array:
    """Return indices as vectors; where there is no dim of vectors they are scalars."""
    return indices[..., None] if attributes["index_vector_dim"] == indices.ndim else indices


def inside(places: Sequence[Array], array: Array) -> Array:
    """Return true for places that are within an array."""
    there = np.ones(places[0].shape if places else (), bool)
    for at, size in zip(places, array.shape, strict=True):
        there &= (at >= 0) & (at < size)
    return there


def looked_up(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return gathered slices; elements that the device does not hold are zeros."""
    operand, indices = has.arrays[0], vectors(attributes, has.arrays[1])
    result = np.zeros(has.shapes[0], operand.dtype)
    # Dims that a window has whole are cut alike on both sides, as batch dims are; others are looked up in what is held.
    looked_up = [dim for dim, size in enumerate(attributes["slice_sizes"]) if size != has.wholes[0][dim]]
    looked_up = sorted({*looked_up, *attributes["collapsed_slice_dims"]} - {*attributes["operand_batching_dims"]})
    # A slice that would not fit begins where it does.
    clamped = np.array(indices)
    for at, dim in enumerate(attributes["start_index_map"]):
        index: Any = (*(slice(None) for _ in range(attributes["index_vector_dim"])), at)
        clamped[index] = np.clip(clamped[index], 0, has.wholes[0][dim] - attributes["slice_sizes"][dim])
    found = lookups(attributes, clamped, has.shapes[0], operand.ndim)
    local = [at - has.starts[0][dim] if dim in looked_up else at for dim, at in enumerate(found)]
    there = inside(local, operand)
    result[there] = operand[tuple(at[there] for at in local)]
    return [result]


def scatter(has: DeviceTensors, attributes: Attributes) -> list[Array]:
    """Return the operand with updates put in; those of places that the device does not hold are left out."""
    operand, indices, updates = has.arrays[0], vectors(attributes, has.arrays[1]), has.arrays[2]
    body, inserted = attributes["body"], attributes["collapsed_slice_dims"]
    result = operand.copy() if has.first or body == "assign" else np.full_like(operand, identity(body, operand.dtype))
    found = lookups(attributes, indices, updates.shape, operand.ndim)
    local = [at - has.starts[0][dim] if dim in inserted else at for dim, at in enumerate(found)]
    there = inside(local, operand)
    # An update that does not fit as a whole is left out.
    whole = [dim for dim in range(operand.ndim) if dim not in (*inserted, *attributes["operand_batching_dims"])]
    for dim, of_updates in zip(whole, attributes["offset_dims"], strict=True):
        first = found[dim] - np.indices(updates.shape, sparse=True)[of_updates]
        there &= (first >= 0) & (first + has.wholes[2][of_updates] <= has.wholes[0][dim])
    places = tuple(at[there] for at in local)
    if body == "assign":
        result[places] = updates[there]
    else:
        function: Any = REDUCTIONS[body]
        function.at(result, places, updates[there])
    return [result]


def fitting(at: Array, whole: int, part: int) -> int:
    """Return the place nearest to `at` where a part of a dim fits."""
    return min(max(int(at), 0), whole - part)


def dynamic_slice(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    """Return a slice at a place that is an operand, moved to where it fits."""
    sides = zip(has.arrays[1:], has.shapes[0], has.arrays[0].shape, strict=True)
    parts = [
        slice(None) if size == whole else slice(fitting(at, whole, size), fitting(at, whole, size) + size)
        for at, size, whole in sides
    ]
    return [has.arrays[0][tuple(parts)]]


def dynamic_update_slice(has: DeviceTensors, _attributes: Attributes) -> list[Array]:
    """Return the operand with an update at a place that is another operand, moved to where it fits."""
    result, update = has.arrays[0].copy(), has.arrays[1]
    # Of a dim that is updated in part the update is whole.
    partly = [part != whole for part, whole in zip(has.wholes[1], has.wholes[0], strict=True)]
    places = [fitting(at, whole, part) for at, whole, part in zip(has.arrays[2:], *has.wholes[:2], strict=True)]
    first = [at - start if cut else 0 for at, start, cut in zip(places, has.starts[0], partly, strict=True)]
    sides = [
        (max(at, 0), max(min(at + part, size), 0))
        for at, part, size in zip(first, update.shape, result.shape, strict=True)
    ]
    to = tuple(slice(low, high) for low, high in sides)
    of = tuple(slice(low - at, max(high - at, 0)) for at, (low, high) in zip(first, sides, strict=True))
    result[to] = update[of]
    return [result]
