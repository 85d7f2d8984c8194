"""Copying a box of a tensor out of a file with reads by position, as few as pays."""

import operator
from typing import Any

import numpy as np

from .files import DataFile
from .header import Entry

__all__ = ["check_box", "check_out", "read_box"]

Bounds = tuple[tuple[int, int], ...]

# Up to here it is cheaper to read what lies between two runs of the box as well than to go to the file for each run:
# a column slice of 1/8 takes 4 times as long with 16 KiB. More gains nothing, and falls out of the processor's cache.
_SPAN = 512 * 1024


def check_box(box: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Give start and stop per dim of a box, checked against the tensor's shape.

    >>> check_box((slice(1, 3), slice(None)), (4, 5))
    ((1, 3), (0, 5))
    """
    if box is None:
        return tuple((0, size) for size in shape)
    if not isinstance(box, tuple) or not all(isinstance(part, slice) for part in box):
        raise TypeError(f"box must be a tuple of slices, got {box!r}")
    if len(box) != len(shape):
        raise IndexError(f"box {box} has {len(box)} slices; the tensor has {len(shape)} dims, shape {shape}")
    bounds = []
    for dim, (part, size) in enumerate(zip(box, shape, strict=True)):
        start = 0 if part.start is None else operator.index(part.start)
        stop = size if part.stop is None else operator.index(part.stop)
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(f"box: {part} of dim {dim} is not within 0 to {size} with step 1")
        bounds.append((start, stop))
    return tuple(bounds)


def check_out(out: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Give `out` back if a box of this shape and dtype can be read into it."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out has shape {out.shape} and dtype {out.dtype}; {shape} and {dtype} are needed")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be C-contiguous and writable")
    return out


def read_box(file: DataFile, entry: Entry, bounds: Bounds, out: np.ndarray[Any, Any]) -> None:
    """Read a box of a tensor into a C-contiguous array of its shape."""
    if out.size == 0:
        return
    strides = [out.itemsize] * len(entry.shape)
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim + 1] * entry.shape[dim + 1]
    start = entry.start + sum(begin * stride for (begin, _), stride in zip(bounds, strides, strict=True))
    _read(file, start, strides, out, np.empty(_SPAN, np.uint8))


def _read(
    file: DataFile, start: int, strides: list[int], out: np.ndarray[Any, Any], scratch: np.ndarray[Any, Any]
) -> None:
    span = out.itemsize + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    if span == out.nbytes:
        # The box is one run. Bytes, because a memoryview knows nothing of bfloat16.
        file.read_into(out.reshape(-1).view(np.uint8).data, start)
    elif span <= _SPAN:
        file.read_into(scratch[:span].data, start)
        out[...] = np.ndarray(out.shape, out.dtype, scratch.data, strides=strides)
    else:
        # Along the outermost dim there is, as many rows at a time as a span has room for. The pieces of `out` are
        # runs of its memory, since every dim before this one has size 1.
        dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
        rows = max(1, _SPAN // strides[dim])
        for row in range(0, out.shape[dim], rows):
            piece = out[(slice(None),) * dim + (slice(row, row + rows),)]
            _read(file, start + row * strides[dim], strides, piece, scratch)
