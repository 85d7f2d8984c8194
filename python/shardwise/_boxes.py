"""Boxes in the forms that callers give: slices, pairs, arrays of bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arguments import int64_array
from ._text import counted, shown
from .errors import LayoutError
from .piece import Piece

if TYPE_CHECKING:
    import numpy.typing as npt

    Corners = npt.NDArray[np.int64]

__all__ = [
    "HolderBoxes",
    "chunks_key",
    "consecutive",
    "key_of",
    "method_of_key",
    "one_each",
    "parse_holder",
    "positions",
]

#: A holder's boxes as int64 (boxes, dims, 2), their number, and its array: True for the one box's own, False for a flat
#: one, or its shape and where the boxes begin in it.
HolderBoxes = tuple["Corners", int, "bool | tuple[tuple[int, ...], list[int]]"]
#: The beginning of a key that has the shape of the chunks and no boxes.
_CHUNKS = "chunks"


def one_each(shape: tuple[int, ...], boxes: Any) -> Corners:
    """Return one box for each holder, as int64 (holders, dims, 2)."""
    if isinstance(boxes, (str, bytes, range)) or not hasattr(boxes, "__len__"):
        raise TypeError(f"boxes must be a mapping, a sequence of boxes or an array, got {type(boxes).__name__}")
    if not isinstance(boxes, np.ndarray) and any(_has_slices(box) for box in boxes):
        boxes = [_pairs(box, shape, f"boxes[{i}]") for i, box in enumerate(boxes)]
    array = int64_array("boxes", boxes)
    rank = len(shape)
    if array.ndim in (1, 2) and array.size == len(array) * rank == 0:
        array = array.reshape(len(array), rank, 2)  # lists without numbers: no boxes, or those of a scalar
    if array.ndim != 3 or array.shape[1:] != (rank, 2):
        raise LayoutError(f"boxes is of shape {array.shape}; it must be (boxes, {rank}, 2)")
    return array


def parse_holder(label: Any, value: Any, shape: tuple[int, ...], own: Sequence[int] | None) -> HolderBoxes:
    """Read the entry of `from_boxes` for one label; `own` is the shape of its array, if given."""
    name = f"boxes[{shown(label)}]"
    if isinstance(value, (str, bytes, Mapping, Set)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be a box or a list of boxes, got {shown(value)}")
    rank = len(shape)
    if not isinstance(value, np.ndarray) and any(isinstance(piece, Piece) for piece in value):
        if not all(isinstance(piece, Piece) for piece in value):
            raise TypeError(f"{name} mixes Pieces and other boxes; give one or the other")
        if own is None:
            raise LayoutError(f"arrays has no shape for {shown(label)}, but boxes has Pieces for it")
        bounds = _bounds([_pairs(piece.box, shape, name) for piece in value], rank, name)
        starts = [start for piece in value for start in _starts(piece.start)]
        return bounds, len(value), (tuple(int64_array("arrays", own).tolist()), starts)
    if own is not None:
        raise LayoutError(f"arrays has a shape for {shown(label)}, but boxes has no Pieces for it")
    if isinstance(value, np.ndarray):
        if value.ndim == 2:
            return _bounds(value[np.newaxis], rank, name), 1, True
        return _bounds(value, rank, name), len(value), False
    if _is_box(value, rank):
        return _bounds([_pairs(value, shape, name)], rank, name), 1, True
    bounds = _bounds([_pairs(box, shape, f"{name}[{i}]") for i, box in enumerate(value)], rank, name)
    return bounds, len(value), False


def _is_box(value: Any, rank: int) -> bool:
    """Return whether this is one box, not a list of them."""
    if not len(value):
        return rank == 0 and isinstance(value, tuple)
    first = value[0]
    if isinstance(first, (Mapping, Set)) or not hasattr(first, "__len__"):
        return isinstance(first, slice)
    return isinstance(first, slice) or (len(first) == 2 and not hasattr(first[0], "__len__") and not _has_slices(first))


def _has_slices(box: Any) -> bool:
    # Without a length it may never end; it is refused as a box.
    return isinstance(box, Sequence) and not isinstance(box, range) and any(isinstance(side, slice) for side in box)


def _pairs(box: Any, shape: tuple[int, ...], name: str) -> list[Any]:
    """Return a box as a list of (start, stop)."""
    if isinstance(box, (str, bytes, Mapping, Set)) or not hasattr(box, "__len__"):
        raise TypeError(f"{name} must be a box: a sequence of slices or of (start, stop), got {shown(box)}")
    if len(box) != len(shape):
        raise LayoutError(f"{name} has {counted(len(box), 'dim')} but shape has {len(shape)}")
    sides = []
    for side, size in zip(box, shape, strict=True):
        if isinstance(side, slice):
            if side.step not in (None, 1):
                raise LayoutError(f"{name} has {side}; a box has no steps")
            side = (0 if side.start is None else side.start, size if side.stop is None else side.stop)
        sides.append(side)
    return sides


def _bounds(boxes: Any, rank: int, name: str) -> Corners:
    array = int64_array(name, boxes)
    if array.size == 0 and array.ndim < 3:
        array = array.reshape(len(array), rank, 2) if len(array) * rank == 0 else array
    if array.ndim != 3 or array.shape[1:] != (rank, 2):
        raise LayoutError(f"{name} is of shape {array.shape}; it must be (boxes, {rank}, 2)")
    return array


def _starts(start: Any) -> list[int]:
    numbers: list[int] = int64_array("start", start).reshape(-1).tolist()
    return numbers


def key_of(holder: HolderBoxes) -> tuple[Any, ...]:
    """Return a holder in a form that can be hashed."""
    bounds, count, array = holder
    return bounds.tobytes(), count, array if isinstance(array, bool) else (array[0], tuple(array[1]))


def chunks_key(chunks: tuple[int, ...] | None) -> tuple[Any, ...]:
    """Return all boxes in a hashable form, if they are the chunks of a grid, of which there may be millions."""
    return () if chunks is None else (_CHUNKS, chunks)


def method_of_key(key: tuple[Any, ...]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the method that a tiling's key names, and arguments that make the same tiling again."""
    name, shape, labels, content, flag = key
    keywords: dict[str, Any] = {}
    if name == "grid":
        return name, [shape, content, *([] if labels is None else [list(labels)])], {"padded": True} if flag else {}
    if flag:
        keywords["replicas"] = True
    if name == "from_flat_ranges":
        ranges = [tuple(pair) for pair in np.frombuffer(content, np.int64).reshape(-1, 2).tolist()]
        return name, [shape, ranges if labels is None else dict(zip(labels, ranges, strict=True))], keywords
    rank = len(shape)
    if content[:1] == (_CHUNKS,):
        chunked = _chunks(shape, content[1])
        if labels is None:
            return name, [shape, [list(map(list, box)) for box in chunked]], keywords
        return name, [shape, dict(zip(labels, chunked, strict=True))], keywords
    if labels is None:
        bounds, count = content
        return name, [shape, _listed(bounds, count, rank)], keywords
    boxes: dict[Any, Any] = {}
    arrays: dict[Any, tuple[int, ...]] = {}
    for label, (bounds, count, array) in zip(labels, content, strict=True):
        listed = _listed(bounds, count, rank)
        if array is True:
            boxes[label] = tuple(tuple(side) for side in listed[0])
        elif array is False:
            boxes[label] = listed
        else:
            own, starts = array
            flat = len(own) == 1 and rank != 1
            step = 1 if flat else rank
            places = [tuple(starts[i * step : (i + 1) * step]) for i in range(count)]
            boxes[label] = [
                Piece(tuple(slice(*side) for side in box), start[0] if flat else start)
                for box, start in zip(listed, places, strict=True)
            ]
            arrays[label] = own
    return name, [shape, boxes], {**keywords, **({"arrays": arrays} if arrays else {})}


def _chunks(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Return the chunks of a grid in C order; those at the far ends may be smaller."""
    sides = zip(shape, chunks, strict=True)
    return product(*([(start, min(start + n, size)) for start in range(0, size, n)] for size, n in sides))


def _listed(content: bytes, count: int, rank: int) -> list[Any]:
    boxes = np.frombuffer(content, np.int64).reshape(count, rank, 2)
    listed: list[Any] = []
    for start in range(0, count, 1 << 16):  # numpy lists what it has in one go, deaf to Ctrl-C.
        listed += boxes[start : start + (1 << 16)].tolist()
    return listed


def positions(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the positions in a shape in C order, one at a time: `np.ndindex` lists the positions of each dim first.

    >>> list(positions((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if not shape:
        yield ()
        return
    for at in range(shape[0]):
        for rest in positions(shape[1:]):
            yield (at, *rest)


def consecutive(shape: tuple[int, ...], most: int) -> Iterator[tuple[Any, ...]]:
    """Cut a box into parts of at most `most` elements, which follow one another in C order.

    >>> [tuple((side.start, side.stop) for side in part) for part in consecutive((2, 3), 2)]
    [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    dim, inner = len(shape), 1
    while dim and inner * shape[dim - 1] <= most:
        dim -= 1
        inner *= shape[dim]
    rest = tuple(slice(0, size) for size in shape[dim:])
    if dim == 0:
        yield rest
        return
    rows = max(1, most // inner)
    for outer in positions(shape[: dim - 1]):
        for start in range(0, shape[dim - 1], rows):
            stop = min(start + rows, shape[dim - 1])
            yield (*(slice(at, at + 1) for at in outer), slice(start, stop), *rest)
