"""Quantized weights and states of an optimizer that are resharded: their parts are cut by the weight's rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..._dtypes import Dtype, in_bytes
from ...conversion.assembled import Assembled
from ...conversion.weights import Reader
from ...layout import UnevenRule
from ...partition import Partition
from ...placing import Placing
from ...quantized.component import Along, Component, LogicalTensor
from ...quantized.follow import followed, with_states
from ...quantized.forms import Components
from ...quantized.unstated import check_elements, check_known
from ...rules.rewrites import Rewrites
from ...shared_tiling import SharedTiling
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.quantized import Outline, components_in
from ..tensors.quantized import reader_of as stored_reader_of

__all__ = ["component_partitions", "outline_of", "quantized_tensors", "reader_by_new_name", "weights_after"]


def quantized_tensors(
    checkpoint: StoredCheckpoint, tensors: Mapping[str, Assembled], config: Mapping[str, Any]
) -> Components:
    """Find the quantized weights among the tensors that are written, by their new names.

    Raises:
        ParseError: if a scale is missing, or its shape does not follow from its weight and the configuration: it was
            not fused like its weight, or was left out.
    """
    return components_in(outline_of(tensors), config, reader_by_new_name(checkpoint, tensors))


def outline_of(tensors: Mapping[str, Assembled]) -> Outline:
    """Return the shapes and dtypes of tensors."""
    return {name: (made.shape, made.dtype) for name, made in tensors.items()}


def reader_by_new_name(checkpoint: StoredCheckpoint, tensors: Mapping[str, Assembled]) -> Reader:
    """Return a function from a new name to the bytes of a small tensor that is stored unchanged; `None` for others."""
    read = stored_reader_of(checkpoint)
    names = {name: made.stored for name, made in tensors.items()}
    return lambda name: None if (stored := names[name]) is None else read(stored)


def weights_after(
    checkpoint: StoredCheckpoint,
    tensors: Mapping[str, Assembled],
    config: Mapping[str, Any],
    carried: Mapping[str, LogicalTensor],
    rewrites: Rewrites,
) -> Components:
    """Find the quantized weights after rewrites, by their new names: those that the rewrites carried along, and others.

    Adapters are matched with weights by the names before the rewrites.

    Raises:
        ParseError: as `quantized_tensors`, for tensors that were rewritten one by one.
    """
    taken = {component.name for weight in carried.values() for component in weight.components}
    others = {name: made for name, made in tensors.items() if name not in taken}
    found = quantized_tensors(checkpoint, others, config)
    found = found._replace(tensors={**found.tensors, **carried})
    return with_states(found, {name: (made.shape, made.dtype.name) for name, made in tensors.items()}, rewrites)


def component_partitions(
    found: Components, tensors: Outline, layouts: Placing, uneven: UnevenRule
) -> dict[str, Partition | SharedTiling]:
    """Return the partitions of quantized weights' components, and of packed tensors' bytes, by name.

    Raises:
        LayoutError: if a cut falls within a block or a byte; the message names the weight, and what would fit.
    """
    check_known(found, layouts)
    check_elements(tensors, found, layouts)
    packed = {name: _bytes_of(name, *each) for name, each in tensors.items() if each[1].bits % 8 and each[0]}
    answer = followed(Components(None, {**found.tensors, **packed}, (), states=found.states), layouts, uneven)
    cut = {name: layout for name, layout in answer.items() if name in tensors}
    shapes = {name: one.components[0].shape for name, one in packed.items()}
    return {
        name: layout
        if isinstance(layout, (SharedTiling, Partition))
        else layout.partition(shapes.get(name, tensors[name][0]))
        for name, layout in cut.items()
    }


def _bytes_of(name: str, whole: tuple[int, ...], elements: Dtype) -> LogicalTensor:
    """Return the bytes of a tensor of packed elements, as its only component."""
    dtype, shape = in_bytes(elements, whole)
    bits, inner = dtype.packed or (8, ())
    at, row = len(shape) - 1 - len(inner), math.prod(inner)
    # So many elements of the dim are whole bytes.
    unit = 8 // math.gcd(8, row * bits)
    along = (*map(Along, range(at)), Along(at, unit, unit * row * bits // 8, unit), *(Along(None),) * len(inner))
    why = "its elements share bytes with those of the dim before"
    uncut = tuple((dim, why) for dim in range(at + 1, len(shape)))
    return LogicalTensor(name, whole, elements.name, (Component(name, dtype.name, shape, along),), uncut)
