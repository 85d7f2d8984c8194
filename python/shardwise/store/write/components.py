"""Quantized weights that are resharded: their components are cut as the weight's rule says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._dtypes import Dtype
from ...layout import UnevenRule
from ...partition import Partition
from ...quantized.follow import followed
from ...quantized.forms import METHODS, Components, find_components, quantization_of
from ..protocol import StoredCheckpoint
from .assembled import Assembled
from .wanted import Layouts

__all__ = ["component_partitions", "quantized_tensors"]

#: Of larger tensors no values are read.
_LARGEST_INDEX = 2**24


def quantized_tensors(
    checkpoint: StoredCheckpoint, tensors: Mapping[str, Assembled], config: Mapping[str, Any]
) -> Components | None:
    """Find the quantized weights among the tensors that are written, by their new names.

    None if the configuration states no quantization, or one whose components are not known here: then its tensors are
    tensors like any others.

    Raises:
        ParseError: if a scale is missing or has another shape than its weight and the configuration make it: it was not
            fused as its weight was, or left behind.
    """
    if quantization_of(config).get("quant_method") not in METHODS:
        return None

    def read(name: str) -> bytes | None:
        stored = tensors[name].stored
        if stored is None or checkpoint[stored].nbytes > _LARGEST_INDEX:
            return None
        return checkpoint.read(stored).tobytes()

    outline = {name: (_code(made.dtype), made.shape) for name, made in tensors.items()}
    return find_components(outline, config, read)


def component_partitions(
    found: Components | None, tensors: Mapping[str, Assembled], layouts: Layouts | None, uneven: UnevenRule
) -> dict[str, Partition]:
    """Give how the components of quantized weights are cut, by name.

    Raises:
        LayoutError: if a cut falls within a block; names the weight, and what would fit.
    """
    if found is None or layouts is None:
        return {}
    answer = followed(found, layouts, uneven)
    return {name: layout.partition(tensors[name].shape) for name, layout in answer.items() if name in tensors}


def _code(dtype: Dtype) -> str:
    return dtype.code or dtype.name
