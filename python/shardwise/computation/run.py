"""Single ops in plain numpy, on whole arrays or on a device's parts, and the inputs of computations as arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._dtypes import find_dtype
from .._text import counted, shown
from .._types import Array
from ..errors import LayoutError, ShardwiseError
from .evaluate import OPS
from .held import IDENTITY, Attributes, DeviceTensors

__all__ = ["branch_of", "checked_inputs", "compute", "compute_local", "in_dtype", "value_dtype"]


def checked_inputs(arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[Array]:
    """Return arrays for the inputs of a computation in their dtypes, checked."""
    if isinstance(arrays, str) or not hasattr(arrays, "__len__"):
        raise TypeError(f"arrays must be a sequence of arrays, got {shown(arrays)}")
    if len(arrays) != len(shapes):
        raise LayoutError(f"arrays has {counted(len(arrays), 'entry', 'entries')} for {counted(len(shapes), 'input')}")
    found = []
    for number, (array, shape, name) in enumerate(zip(arrays, shapes, dtypes, strict=True)):
        dtype = value_dtype(number, name)
        try:
            found.append(np.asarray(array, dtype))
        except (TypeError, ValueError) as error:
            raise LayoutError(f"arrays[{number}] cannot be of dtype {name}: {error}") from None
        if found[-1].shape != shape:
            raise LayoutError(f"arrays[{number}] has the shape {found[-1].shape}, but the input has {shape}")
    return found


def branch_of(index: Any, count: int) -> int:
    """Return the number of the branch of an index, the last for one out of range, as in StableHLO."""
    return int(index) if 0 <= index < count else count - 1


def value_dtype(number: int, name: str) -> np.dtype[Any]:
    """Return numpy's dtype of a value."""
    dtype = find_dtype(name)
    if dtype is None:
        raise LayoutError(f"value {number} is of dtype {shown(name)}, which numpy does not have")
    return dtype.numpy()


def in_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in a dtype; of whole numbers the nearest that it has, and 0 for NaN, as in XLA."""
    if array.dtype.kind == "c" and dtype.kind != "c":
        array = array.real
    if array.dtype.kind not in "fV" or dtype.kind not in "iu":
        return array.astype(dtype, copy=False)
    least, most, wide = np.iinfo(dtype).min, np.iinfo(dtype).max, array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = wide.astype(dtype)
    found[wide >= most], found[wide <= least], found[np.isnan(wide)] = most, least, 0
    return found


def compute(
    name: str, given: Attributes, arrays: Sequence[Array], shapes: Sequence[tuple[int, ...]], source: str = ""
) -> list[Array]:
    """Return the results of an op without bodies, of these shapes, for whole operands.

    Raises:
        LayoutError: if the op is not one of `OPS`, is a constant of unknown value, or numpy refuses it.
    """
    starts = [(0,) * array.ndim for array in arrays]
    has = DeviceTensors(arrays, starts, [array.shape for array in arrays], shapes)
    return compute_local(name, given, has, source)


def compute_local(name: str, given: Attributes, has: DeviceTensors, source: str = "") -> list[Array]:
    """Return a device's parts of the results of an op without bodies; errors are those of `compute`."""
    place = f"{name}{f' ({source})' if source else ''}"
    try:
        return _computed(place, name, given, has)
    except ShardwiseError:
        raise
    except (LookupError, TypeError, ValueError, np.linalg.LinAlgError) as error:
        raise LayoutError(f"{place}: numpy cannot compute it: {type(error).__name__}: {error}") from error


def _computed(place: str, name: str, given: Attributes, has: DeviceTensors) -> list[Array]:
    """Return the same of an op at a place; attributes that do not fit it give errors of numpy."""
    if name in ("barrier", "constraint"):
        return list(has.arrays)
    if name == "iota" and "dimension" in given:
        (shape,), dim = has.shapes, given["dimension"]
        along = [-1 if at == dim else 1 for at in range(len(shape))]
        return [np.broadcast_to(np.arange(shape[dim]).reshape(along), shape)]
    if name == "constant" and given.get("value") is not None:
        value = np.asarray(given["value"])
        if value.dtype.kind == "U":
            # JSON has no infinities, NaN and complex numbers.
            value = value.astype(complex)
        return [np.broadcast_to(value, has.shapes[0])]
    if name not in OPS or given.get("body", "add") not in (*IDENTITY, "assign"):
        kept = "random numbers and constants of many elements are not kept; pass them as arguments"
        why = (
            f"its value is not known ({kept})"
            if name in ("constant", "iota")
            else "this op has no implementation in numpy"
        )
        raise LayoutError(f"{place}: {why}, so it cannot be run")
    # numpy has few operations of dtypes that are not its own, such as bfloat16.
    wide = [array.astype(np.float32) if array.dtype.kind == "V" else array for array in has.arrays]
    with np.errstate(all="ignore"):
        # Lists that are left out are empty, and what is not said is false.
        return OPS[name](replace(has, arrays=wide), defaultdict(tuple, given))
