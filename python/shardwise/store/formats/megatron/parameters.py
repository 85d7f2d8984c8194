"""The parameters of Megatron's ranks: the boxes of whole tensors that they are, and the places of their states.

A rank has a parameter as one array, made of one or several boxes of the whole tensor, one after the other: for example
a part of the gate and a part of the up projection. Optimizers keep states of the flattened array, in runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...._dtypes import DTYPES, Dtype
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.boxes import Located, contiguous_strides
from ...data.location import Location
from ...data.text import box_text
from ...tensors.coverage import tile
from ...tensors.flat import flat_boxes
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece

__all__ = [
    "FLOAT32",
    "Parameter",
    "Run",
    "check_masters",
    "differing",
    "later",
    "state_pieces",
    "tensor_of_ranks",
    "unlike",
]

#: The dtype of all states.
FLOAT32 = DTYPES["float32"]
#: The number of elements at the beginning of a parameter that are compared with its master copy.
_COMPARED = 16


class Parameter(NamedTuple):
    """A parameter as one rank has it.

    Attributes:
        name: The name of the tensor that it is a part of.
        blocks: The boxes of the tensor that make up the rank's array, in order.
        first: The place of its first block; `None` if only another rank's copy is stored.
        is_shared: Whether it is a tied embedding of which two stages have a copy.
        is_copy: Whether it is the second of these copies.
        numbered: Whether the tensor's first dim counts layers, and so is not a dim of the parameter.
    """

    name: str
    dtype: Dtype
    blocks: tuple[Bounds, ...]
    first: Callable[[], Located] | None = None
    is_shared: bool = False
    is_copy: bool = False
    numbered: bool = False

    @property
    def size(self) -> int:
        """The number of elements of the rank's array."""
        return sum(math.prod(stop - start for start, stop in block) for block in self.blocks)

    @property
    def ndim(self) -> int:
        """The number of dims of the rank's own array."""
        return len(self.blocks[0]) - self.numbered


class Run(NamedTuple):
    """Elements of a flattened parameter that are contiguous in a file.

    Attributes:
        start: The first element.
        stop: The element after the last.
        locate: Returns the place of the first element.
    """

    start: int
    stop: int
    path: Location
    locate: Callable[[], Located]


def state_pieces(blocks: Sequence[Bounds], runs: Iterable[Run], itemsize: int = 4) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor that are held by runs of a flattened parameter with these blocks."""
    for run in runs:
        at = 0
        for block in blocks:
            shape = tuple(stop - start for start, stop in block)
            size = math.prod(shape)
            low, high = max(run.start, at) - at, min(run.stop, at + size) - at
            if low < high:
                yield from _within(block, low, high, run, at + low - run.start, itemsize)
            at += size


def _within(block: Bounds, low: int, high: int, run: Run, skipped: int, itemsize: int) -> Iterator[StoredPiece]:
    """Yield the boxes that a range of a block's elements consists of; `skipped` elements of the run come before it."""
    shape = tuple(stop - start for start, stop in block)
    strides = contiguous_strides(shape, itemsize)
    found = flat_boxes(shape, [(low, high)])
    for box, begin in zip(found.boxes.tolist(), found.begins.tolist(), strict=True):
        bounds = tuple((at + start, at + stop) for (start, stop), (at, _) in zip(box, block, strict=True))
        locate = partial(_located, run.locate, (skipped + begin) * itemsize, strides)
        yield StoredPiece(bounds, run.path, locate=locate)


def _located(locate: Callable[[], Located], skipped: int, strides: tuple[int, ...]) -> Located:
    file, start, _ = locate()
    return file, start + skipped, strides


def later(stored: StoredPiece, skipped: int) -> Located:
    """Return the place of the elements of a stored piece that begin `skipped` bytes after its first."""
    _, file, start, strides = stored.extent()
    return file, start + skipped, strides


def tensor_of_ranks(
    name: str,
    dtype: Dtype,
    shape: tuple[int, ...],
    own: Sequence[StoredPiece],
    copies: Sequence[StoredPiece],
    where: object,
) -> StoredTensor:
    """Return a tensor from the pieces that several ranks hold, which may be copies of each other.

    Raises:
        ParseError: if the pieces do not tile the tensor.
    """
    boxes = np.array([piece.bounds for piece in own], np.int64).reshape(len(own), len(shape), 2)
    kept, again = tile(name, shape, boxes, lambda at: own[at].path.name, where)
    others = [own[at] for at in again] + list(copies)
    held = np.array([piece.bounds for piece in others], np.int64).reshape(len(others), len(shape), 2)
    pieces = ListedPieces(boxes[kept], lambda position, _: own[kept[position]])
    replicas = ListedPieces(held, lambda position, _: others[position])
    return StoredTensor(name, dtype, shape, pieces, replicas=replicas)


def differing(parameter: Parameter, runs: Iterable[Run]) -> str:
    """Return how the first elements of a parameter differ from its master copy, as a text; empty if they do not.

    A weight of fewer bits is its master copy, rounded; so if they differ, the positions are wrong.
    """
    run = next((run for run in runs if run.start == 0), None)
    if parameter.first is None or run is None:
        return ""
    block = parameter.blocks[0]
    count = min(_COMPARED, run.stop, block[-1][1] - block[-1][0] if block else 1)
    file, start, strides = parameter.first()
    if strides and strides[-1] != parameter.dtype.bits // 8 and count > 1:
        return ""
    held = file.read(start, count * parameter.dtype.bits // 8)
    other, at, _ = run.locate()
    masters = np.frombuffer(other.read(at, count * 4), "<f4")
    return _unlike(held, parameter.dtype, masters, f"the master copy of {shown(parameter.name)} at {box_text(block)}")


def unlike(weight: StoredTensor, master: StoredTensor) -> str:
    """Return how the beginning of a piece of a weight differs from its master copy, as a text; empty if it does not."""
    size = weight.bits // 8
    for piece in weight.pieces if weight.ndim and weight.shape == master.shape else ():
        count = min(_COMPARED, piece.bounds[-1][1] - piece.bounds[-1][0])
        _, file, start, strides = piece.extent()
        if strides[-1] != size and count > 1:
            continue
        box = (
            *(slice(at, at + 1) for at, _ in piece.bounds[:-1]),
            slice(piece.bounds[-1][0], piece.bounds[-1][0] + count),
        )
        masters = master.read(box).reshape(-1)
        wrong = _unlike(
            file.read(start, count * size),
            weight.known_dtype,
            masters,
            f"{shown(master.name)} at {box_text(piece.bounds)}",
        )
        if wrong:
            return wrong
    return ""


def _unlike(held: bytes, dtype: Dtype, masters: npt.NDArray[np.float32], what: str) -> str:
    """Return which stored elements of a weight differ from the rounded master copy, as a text; empty if none do."""
    weights = _widened(held, dtype, masters)
    if weights is None:
        return ""
    found, wanted = weights
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    if same.all():
        return ""
    place = int(np.flatnonzero(~same)[0])
    one, other = float(wanted[place]), float(found[place])
    return f"{what} begins with {one!r} at element {place} of a run, and the weight has {other!r} there"


def _widened(
    held: bytes, dtype: Dtype, masters: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
    """Return weights and master copies as numbers, masters rounded to the weights' dtype; `None` for other dtypes."""
    if dtype.name == "float32":
        return np.frombuffer(held, "<f4"), masters
    if dtype.name == "float16":
        with np.errstate(over="ignore"):
            return np.frombuffer(held, "<f2").astype(np.float32), masters.astype("<f2").astype(np.float32)
    if dtype.name != "bfloat16":
        return None
    bits = masters.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint32)
    rounded = np.where(np.isnan(masters), np.uint32(0x7FC0), rounded)
    weights = np.frombuffer(held, "<u2").astype(np.uint32) << np.uint32(16)
    return weights.view(np.float32), (rounded << np.uint32(16)).astype(np.uint32).view(np.float32)


def check_masters(parameters: Iterable[tuple[Parameter, Sequence[Run]]], where: object) -> None:
    """Compare the beginning of each parameter with the beginning of its master copy.

    Raises:
        ParseError: if a parameter is not the rounded master copy.
    """
    for parameter, runs in parameters:
        wrong = differing(parameter, runs)
        if wrong:
            raise ParseError(f"{where}: {wrong}")
