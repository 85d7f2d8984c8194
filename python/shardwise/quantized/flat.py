"""Values of the flattened weight: bitsandbytes."""

from __future__ import annotations

import json
import math

from .._text import counted, shown
from ..errors import ParseError
from .component import Along, LogicalTensor
from .parts import WHOLE, WeightGroup

__all__ = ["bitsandbytes"]

_STATE = "quant_state"


def bitsandbytes(group: WeightGroup) -> LogicalTensor | None:
    """Return a weight of bitsandbytes: 4-bit values of the flattened weight in blocks, or 8-bit rows."""
    if "SCB" in group.members:
        shape = group.matrix("weight")
        along = {"weight": (*map(Along, range(len(shape))),), "SCB": group.scale("SCB", shape, (1, 0))}
        if "weight_format" in group.members:
            along["weight_format"] = (WHOLE,) * len(group.shape("weight_format"))
        return group.tensor("INT8 per row", shape, along)
    if _STATE not in group.members:
        if "absmax" in group.members:
            raise ParseError(f"{shown(group.name)}: its {_STATE} is missing; it has {', '.join(group.members)}")
        return None
    stored = group.shape("weight")
    said = group.read(_STATE)
    shape, block, nested = (2 * math.prod(stored), 1), 64, 256
    if said is not None:
        shape, block, nested = _state(group, said)
    if -(-math.prod(shape) // 2) != math.prod(stored):
        raise ParseError(
            f"{shown(group.name)} has the shape {stored}; for a weight of {shape} it must hold half as many elements"
        )
    count = -(-math.prod(shape) // block)
    if group.shape("absmax") != (count,):
        raise ParseError(
            f"{shown(group.name)}: its absmax has the shape {group.shape('absmax')}; for a weight of {shape} in blocks "
            f"of {block} it must be {(count,)}"
        )
    along = {
        "weight": (Along(-1, 2, packing=2), *(WHOLE,) * (len(stored) - 1)),
        "absmax": (Along(-1, block),),
        _STATE: (WHOLE,),
    }
    if "quant_map" in group.members:
        along["quant_map"] = (WHOLE,)
    if "nested_absmax" in group.members:
        expected = (-(-count // nested),)
        if group.shape("nested_absmax") != expected:
            own = group.shape("nested_absmax")
            raise ParseError(f"{shown(group.name)}: its nested_absmax has the shape {own}; it must be {expected}")
        along["nested_absmax"] = (Along(-1, block * nested),)
        along["nested_quant_map"] = (WHOLE,)
    reason = "it is stored flat, so it can only be cut along dim 0, in whole rows"
    uncut = tuple((dim, reason) for dim in range(1, len(shape)))
    if said is None:
        uncut = tuple(
            (dim, f"it is stored flat, and its {_STATE}, which says the shape, was not read") for dim in (0, 1)
        )
    return group.tensor("4 bits, flat", shape, along, uncut, {_STATE: "the shape of the whole weight"})


def _state(group: WeightGroup, said: bytes) -> tuple[tuple[int, ...], int, int]:
    """Return the weight's shape, the number of values of a scale, and the number of scales of a scale of scales."""
    try:
        state = json.loads(said)
        shape = tuple(state["shape"])
        numbers = [state["blocksize"], state.get("nested_blocksize", 256), *shape]
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        raise ParseError(f"{shown(group.name)}: its {_STATE} is not an object with shape and blocksize") from None
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**40 for size in numbers):
        raise ParseError(f"{shown(group.name)}: its {_STATE} has invalid sizes: {shown(numbers)}")
    if len(shape) < 1 or len(shape) > 64:
        raise ParseError(f"{shown(group.name)}: its {_STATE} has a shape of {counted(len(shape), 'dim')}")
    return shape, numbers[0], numbers[1]
