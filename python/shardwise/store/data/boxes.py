"""Boxes of elements read from files with reads at given positions, as few as worthwhile."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arguments import instance
from ..._text import counted, shown
from ...errors import SizeOverflowError
from ...pieces import Bounds, LocatedPiece
from .engine import CopyJob
from .files import SPAN, Holder

__all__ = [
    "Located",
    "Reads",
    "check_box",
    "check_out",
    "contiguous_strides",
    "expressible",
    "read_piece",
]


class Reads(NamedTuple):
    """Thresholds, in bytes, that decide how a box is read: by the I/O engine, run by run, or as one span.

    Attributes:
        engine_from: From this size on, boxes are read by the engine, which reads each run to its place; this takes half
            the time of reading everything between the runs too.
        run_from: Runs of at least this size are read one by one; for shorter ones the calls cost more than they save. A
            single run is always read by one call.
        gap_from: Runs of any size that begin at least this far apart are read one by one: reading what is between them
            would take 1.3 to 15 times as long.
        span: The most bytes that are read at once including those between runs.
    """

    engine_from: int = 512 * 1024
    run_from: int = 2 * 1024
    gap_from: int = 8 * 1024
    span: int = SPAN


_READS = Reads()
_BUDGET = 8 * 2**20


#: The place of a box whose elements are stored as plain bytes: the file, the byte of the first element, and the bytes
#: from one element to the next, per dim. Strides are never negative; 0 means that one element stands for all.
Located = tuple[Holder, int, tuple[int, ...]]


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array in C order.

    >>> contiguous_strides((2, 3, 4), 2)
    (24, 8, 2)
    """
    strides = [itemsize] * len(shape)
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def check_box(box: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Return start and stop per dim of a box given as slices, checked against the tensor's shape.

    >>> check_box((slice(1, 3), slice(None)), (4, 5))
    ((1, 3), (0, 5))
    """
    if box is None:
        return tuple((0, size) for size in shape)
    if not isinstance(box, tuple) or not all(isinstance(part, slice) for part in box):
        raise TypeError(f"box must be a tuple of slices, got {shown(box)}")
    if len(box) != len(shape):
        raise IndexError(
            f"box has {counted(len(box), 'slice')}; the tensor has {counted(len(shape), 'dim')}, shape {shape}"
        )
    bounds = []
    for dim, (part, size) in enumerate(zip(box, shape, strict=True)):
        start = 0 if part.start is None else operator.index(part.start)
        stop = size if part.stop is None else operator.index(part.stop)
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(f"box: {part} of dim {dim} is not within 0 to {size} with step 1")
        bounds.append((start, stop))
    return tuple(bounds)


@contextmanager
def expressible(tensor: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[None]:
    """Turn numpy's refusal of an array into an error that names the tensor.

    Raises:
        SizeOverflowError: if the sizes are too large for an array, which may happen even if one size is 0.
        TypeError: if it has more dims than an array may have.
    """
    try:
        yield
    except ValueError as error:
        sizes = f"{shape}" if len(shape) <= 8 else f"{len(shape)} dims"
        message = f"tensor {tensor} of {sizes}: numpy has no such array: {error}"
        is_large = math.prod(size for size in shape if size) * dtype.itemsize > 2**63 - 1
        raise (SizeOverflowError if is_large else TypeError)(message) from None


def check_out(out: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `out`; refuse an array of another shape or dtype than the box, or one that cannot be written."""
    instance("out", out, np.ndarray)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out has shape {out.shape} and dtype {out.dtype}; {shape} and {dtype} are needed")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be C-contiguous and writable")
    return out


def read_piece(piece: LocatedPiece, starts: Sequence[int], out: npt.NDArray[Any], reads: Reads = _READS) -> None:
    """Read a box of a piece into a writable array of the box's shape.

    The box begins at `starts`, counted from the start of the piece. All bytes of pieces are read by this function.

    Raises:
        ParseError: if the file ends too early; `out` may be partly written.
        OSError: if the file cannot be read.
    """
    if out.size == 0:
        return
    if not piece.holder.is_fetched and _is_for_the_engine(piece, out, reads):
        _read_by_engine(piece.holder, piece, starts, out)
        return
    start = piece.offset + sum(map(operator.mul, starts, piece.strides))
    # The dim whose elements are farthest apart first, as the reads below expect; equal ones keep their order.
    order = sorted(range(out.ndim), key=lambda dim: -piece.strides[dim])
    piece.holder.read_box(start, [piece.strides[dim] for dim in order], out.transpose(order), reads.span)


def _is_for_the_engine(piece: LocatedPiece, out: npt.NDArray[Any], reads: Reads) -> bool:
    """Return whether the I/O engine, which reads each run of a box separately, is faster for this box."""
    steps = [(size, step) for size, step in zip(out.shape, piece.strides, strict=True) if size > 1]
    span = out.itemsize + sum((size - 1) * step for size, step in steps)
    if max(out.nbytes, span // 16) < reads.engine_from:
        return False
    run = _run_of(piece, out)
    if not 0 < run < out.nbytes:
        return False
    between = min((step for _, step in steps if step > run), default=0)
    return between >= reads.gap_from or (out.nbytes >= reads.engine_from and run >= reads.run_from)


def _run_of(piece: LocatedPiece, out: npt.NDArray[Any]) -> int:
    """Return the bytes of the longest runs of a box that are contiguous both in the file and in `out`."""
    run = out.itemsize
    for size, have, want in sorted(zip(out.shape, piece.strides, out.strides, strict=True), key=lambda dim: dim[1]):
        if size > 1:
            if not have == want == run:
                return run if have > run else 0  # Elements that share their bytes are for the reads below.
            run *= size
    return run


def _read_by_engine(file: Any, piece: LocatedPiece, starts: Sequence[int], out: npt.NDArray[Any]) -> None:
    """Read a box by the compiled I/O engine, on all cores."""
    job = CopyJob()
    start = piece.offset + sum(map(operator.mul, starts, piece.strides))
    # A dim of one element needs no stride, and any may be given.
    strides = [out.itemsize if size == 1 else step for size, step in zip(out.shape, piece.strides, strict=True)]
    with file.descriptor() as number:
        source = job.read_file(file.path, file.size, None, number)
        box = tuple((0, size) for size in out.shape)
        held = LocatedPiece(box, source, start, tuple(strides))
        wanted = LocatedPiece(box, job.write_array(out), 0, out.strides)
        job.add_tensor(out.shape, out.itemsize, [held], [wanted])
        job.run(budget=_BUDGET)
