"""The tensors of a model: shapes, dtypes, and adapters next to weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._arguments import sizes_of
from .._dtypes import bits_of, find_dtype
from .._text import shown
from ..errors import LayoutError
from .adapters import Lora, adapted

__all__ = ["ModelTensor", "TensorLook", "described", "with_adapters"]

#: The dtypes of weights that can be trained and converted.
_FLOATS = frozenset(["float64", "float32", "float16", "bfloat16"])


class TensorLook(NamedTuple):
    """The shape of a tensor, the bits of an element, and whether its dtype can be trained."""

    shape: tuple[int, ...]
    bits: int
    floating: bool


class ModelTensor(NamedTuple):
    """One tensor of the model.

    Attributes:
        name: The name in the model, or in the mapping that was given.
        look: Its shape and dtype; most tensors share that of others, as one object.
        follows: For a tensor cut by another's rule: the other's name, and for each own dim the other's dim, or `None`
            for a dim that is not cut.
    """

    name: str
    look: TensorLook
    follows: tuple[str, tuple[int | None, ...]] | None = None


def described(tensors: Mapping[str, Any], weights: Any) -> list[ModelTensor]:
    """Return the tensors of a mapping by name, floating-point ones in the dtype `weights`, if it is given.

    Raises:
        TypeError: if a tensor has no shape or no dtype.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to shapes and dtypes, got {type(tensors).__name__}")
    bits = None if weights is None else bits_of(weights, "weights")
    found, known = list[TensorLook](), dict[Any, tuple[int, bool]]()
    shapes: dict[Any, tuple[int, ...]] = {}
    #: The looks by shape and dtype, which most tensors share with others.
    looks: dict[Any, TensorLook] = {}
    for name, given in tensors.items():
        try:
            found.append(looks[given])
            continue
        except (KeyError, TypeError):
            pass
        shape = dtype = None
        if type(given) is not tuple:
            shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
        if shape is None:
            if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], (tuple, list)):
                if weights is None or not isinstance(given, (tuple, list)):
                    raise TypeError(
                        f"tensors[{shown(name)}] must be a shape and a dtype, got {shown(given)}; if weights is "
                        "given, a shape is enough"
                    )
                given = given, weights
            shape, dtype = given
        try:
            of = known[dtype]
        except (KeyError, TypeError):
            stated = dtype if isinstance(dtype, str) else find_dtype(dtype)
            of = bits_of(dtype if stated is None else getattr(stated, "name", stated)), _is_float(dtype)
            if isinstance(dtype, str):
                known[dtype] = of
        try:
            sizes = shapes[shape]
        except (KeyError, TypeError):
            sizes = sizes_of(f"the shape of {shown(name)}", shape)
            if type(shape) is tuple and all(type(size) is int for size in shape):
                shapes[shape] = sizes
        look = TensorLook(sizes, bits if bits and of[1] else of[0], of[1])
        if isinstance(given, tuple) and type(dtype) is str and shape in shapes:
            looks[given] = look
        found.append(look)
    return list(map(ModelTensor, tensors, found))


def _is_float(dtype: Any) -> bool:
    found = find_dtype(dtype)
    return found is not None and found.name in _FLOATS


def with_adapters(
    tensors: list[ModelTensor],
    lora: Lora,
    leaders: Mapping[str, str],
    logical: Mapping[str, tuple[int, ...]],
) -> list[ModelTensor]:
    """Return the tensors, with the adapters of each weight inserted after the weight.

    Args:
        tensors: all of the model, quantized components included.
        lora: the rank and the targets of the adapters.
        leaders: the quantized weight of each component.
        logical: the shape of each quantized weight.

    Raises:
        LayoutError: if there are none.
    """
    made: list[ModelTensor] = []
    done: set[str] = set()
    for tensor in tensors:
        made.append(tensor)
        weight = leaders.get(tensor.name, tensor.name)
        if weight in done:
            continue
        done.add(weight)
        for name, shape, dims in adapted(lora, weight, logical.get(weight, tensor.look.shape)):
            made.append(ModelTensor(name, TensorLook(shape, lora.bits, True), (weight, dims)))
    if len(made) == len(tensors):
        raise LayoutError(f"lora: {shown(lora.targets)} matches the name of no matrix")
    return made
