"""Sparse values, of numpy or PyTorch, and the memory that they are written into."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from .._fork import importing
from .._text import counted, elements_text, shown
from ..errors import LayoutError
from .offsets import Offsets

__all__ = ["as_integers", "flat_memory", "joined_values", "pair_of", "picked", "raw_memory", "values_for"]


def raw_memory(array: Any) -> Any:
    """Return an array's memory in one dim, as unsigned integers of its elements' size; `None` if that fails."""
    if isinstance(array, np.ndarray):
        is_plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.itemsize in (1, 2, 4, 8)
        return array.view(f"u{array.dtype.itemsize}") if is_plain and not array.dtype.hasobject else None
    is_here = hasattr(array, "data_ptr") and getattr(getattr(array, "device", None), "type", "") == "cpu"
    if not is_here or hasattr(array, "placements") or array.is_conj() or array.is_neg() or not array.is_contiguous():
        return None
    size = array.element_size()
    if size not in (1, 2, 4, 8):
        return None
    # The tensor is kept while this is used.
    memory = (ctypes.c_uint8 * (size * len(array))).from_address(array.data_ptr()) if len(array) else b""
    return np.frombuffer(memory, f"u{size}")


def as_integers(array: Any) -> Any:
    """Return a tensor of PyTorch as integers of its elements' size, of which it can pick any; an array as it is."""
    if isinstance(array, np.ndarray) or not hasattr(array, "element_size") or array.is_conj() or array.is_neg():
        return array
    with importing:
        import torch
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = array.element_size()
    return array.view(kinds[size]) if size in kinds and array.dtype != kinds[size] else array


def picked(values: Any, which: Offsets) -> Any:
    """Return some of the values, with their dtype."""
    if hasattr(values, "resolve_conj"):
        values = values.resolve_conj().resolve_neg()
    found = as_integers(values)[which]
    return found if found.dtype == values.dtype else found.view(values.dtype)


def joined_values(name: str, parts: list[tuple[Offsets, Any]]) -> tuple[Offsets, Any]:
    """Return the changes of one parameter, from all tensors in it."""
    if len(parts) == 1:
        return parts[0]
    values = [values for _, values in parts]
    if len({str(one.dtype) for one in values}) > 1:
        raise LayoutError(
            f"the changes of {shown(name)} are of several dtypes: {shown([str(v.dtype) for v in values])}"
        )
    if all(isinstance(one, np.ndarray) for one in values):
        joined: Any = np.concatenate(values)
    else:
        # PyTorch's own, which is there if its tensors are.
        joined = values[0].new_empty(sum(map(len, values)))
        whole, at = as_integers(joined), 0
        for one in values:
            whole[at : at + len(one)] = as_integers(one) if whole is not joined else one
            at += len(one)
    return np.concatenate([at for at, _ in parts]), joined


def flat_memory(name: str, array: Any, size: int, values: Any) -> Any:
    """Return a parameter's memory as one dim, after checking that it can take these values."""
    if math.prod(array.shape) != size:
        raise LayoutError(f"memory[{shown(name)}] has shape {tuple(array.shape)}; it must have {elements_text(size)}")
    if isinstance(array, np.ndarray) is not isinstance(values, np.ndarray):
        raise LayoutError(
            f"memory[{shown(name)}] is a {type(array).__name__}, but its values are a {type(values).__name__}"
        )
    if array.dtype != values.dtype:
        raise LayoutError(f"memory[{shown(name)}] is of {array.dtype}, but its values are of {values.dtype}")
    is_plain = (
        array.flags.c_contiguous and array.flags.writeable if isinstance(array, np.ndarray) else array.is_contiguous()
    )
    if not is_plain:
        raise LayoutError(f"memory[{shown(name)}] must be contiguous and writable")
    return array.reshape(-1) if isinstance(array, np.ndarray) else array.detach().reshape(-1)


def pair_of(name: str, pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the offsets and the values of a tensor's change, as they are given."""
    try:
        offsets, values = pair
    except (TypeError, ValueError):
        raise TypeError(f"changed[{shown(name)}] must be (offsets, values), got {shown(pair)}") from None
    return offsets, values


def values_for(name: str, values: Any, count: int) -> Any:
    """Return values as an array or a tensor of PyTorch, after checking that there is one for each offset."""
    given = values if hasattr(values, "shape") else np.asarray(values)
    if tuple(given.shape) != (count,):
        raise LayoutError(
            f"changed[{shown(name)}] has {counted(count, 'offset')} and values of shape {tuple(given.shape)}; each "
            "offset has one "
            "value"
        )
    return given
