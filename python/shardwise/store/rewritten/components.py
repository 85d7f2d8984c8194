"""Quantized weights of a checkpoint: what reads their small tensors; the weights after renames and rewrites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...conversion.assembled import Assembled
from ...conversion.weights import Reader
from ...quantized.component import LogicalTensor
from ...quantized.follow import with_states
from ...quantized.forms import Components
from ...quantized.outline import Outline, components_in
from ...rules.rewrites import Rewrites
from ..tensors.checkpoint import StoredCheckpoint

__all__ = ["outline_of", "quantized_tensors", "reader_by_new_name", "reader_of", "weights_after"]

#: The most bytes of a tensor whose values are read to find quantized weights.
_LARGEST_INDEX = 2**24


def reader_of(checkpoint: StoredCheckpoint) -> Reader:
    """Return what reads small tensors: shapes, `quant_state` and orders; `None` for large ones."""

    def read(name: str) -> bytes | None:
        return None if checkpoint[name].nbytes > _LARGEST_INDEX else checkpoint.read(name).tobytes()

    return read


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
    read = reader_of(checkpoint)
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
