"""The quantized weights among tensors of which the names, shapes and dtypes are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._dtypes import Dtype
from ..errors import ParseError
from .follow import with_states
from .forms import Components, stated_components
from .method import quantization_of, stated_method
from .parts import StatedError

__all__ = ["Outline", "components_in"]

#: Names, with shapes and dtypes.
Outline = Mapping[str, tuple[tuple[int, ...], Dtype]]


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
