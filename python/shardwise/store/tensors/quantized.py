"""The quantized weights of a checkpoint, stored or described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..._dtypes import Dtype
from ...errors import ParseError
from ...quantized.follow import with_states
from ...quantized.forms import Components, stated_components
from ...quantized.method import quantization_of, stated_method
from ...quantized.parts import StatedError

if TYPE_CHECKING:  # The tensors of a configuration need no files.
    from .checkpoint import StoredCheckpoint

__all__ = ["Outline", "components_in", "reader_of"]

#: Names, with shapes and dtypes.
Outline = Mapping[str, tuple[tuple[int, ...], Dtype]]

#: The most bytes of a tensor whose values are read to find quantized weights.
_LARGEST_INDEX = 2**24


def components_in(
    tensors: Outline, config: Mapping[str, Any], read: Callable[[str], bytes | None] | None = None
) -> Components:
    """Find the quantized weights among tensors, as a configuration states them, and the states of an optimizer.

    Without a `quantization_config` all tensors are plain. With one of a method or a version that is not known, or that
    lacks what its method needs, they are copied as they are, and refused where a rule is to cut them.

    Raises:
        ParseError: as `find_components` where the tensors contradict each other or the configuration.
    """
    found = _quantized(tensors, config, read)._replace(config=config)
    return with_states(found, {n: (shape, d.name) for n, (shape, d) in tensors.items()})


def _quantized(tensors: Outline, config: Mapping[str, Any], read: Callable[[str], bytes | None] | None) -> Components:
    given = quantization_of(config)
    if not given:
        return Components(None, {}, tuple(tensors))
    try:
        method = stated_method(given)
    except ParseError as error:
        return Components(str(given["quant_method"]), {}, tuple(tensors), str(error))
    outline = {name: (dtype.code or dtype.name, shape) for name, (shape, dtype) in tensors.items()}
    try:
        return stated_components(outline, config, read)
    except StatedError as error:
        return Components(method, {}, tuple(tensors), str(error))


def reader_of(checkpoint: StoredCheckpoint) -> Callable[[str], bytes | None]:
    """Return what reads small tensors: shapes, `quant_state` and orders; `None` for large ones."""

    def read(name: str) -> bytes | None:
        return None if checkpoint[name].nbytes > _LARGEST_INDEX else checkpoint.read(name).tobytes()

    return read
