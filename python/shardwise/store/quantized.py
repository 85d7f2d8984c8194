"""The quantized weights of a checkpoint, stored or described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._dtypes import Dtype
from ..quantized.forms import METHODS, Components, find_components, quantization_of
from .checkpoint import StoredCheckpoint

__all__ = ["Outline", "components_in", "reader_of"]

#: Names, with shapes and dtypes.
Outline = Mapping[str, tuple[tuple[int, ...], Dtype]]

#: Of larger tensors no values are read.
_LARGEST_INDEX = 2**24


def components_in(
    tensors: Outline, config: Mapping[str, Any], read: Callable[[str], bytes | None] | None = None
) -> Components:
    """Find the quantized weights among tensors of these shapes and dtypes, as a configuration states them.

    Without a `quantization_config`, or with one of a method that is not known here, all tensors are plain.

    Raises:
        ParseError: as `find_components`.
    """
    method = quantization_of(config).get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        return Components(None, {}, tuple(tensors))
    outline = {name: (dtype.code or dtype.name, shape) for name, (shape, dtype) in tensors.items()}
    return find_components(outline, config, read)


def reader_of(checkpoint: StoredCheckpoint) -> Callable[[str], bytes | None]:
    """Give what reads small tensors: shapes, `quant_state` and orders; `None` for large ones."""

    def read(name: str) -> bytes | None:
        return None if checkpoint[name].nbytes > _LARGEST_INDEX else checkpoint.read(name).tobytes()

    return read
