"""Grids of flattened parts, as Megatron-Core stored the states of optimizers up to 0.14.

A tensor that is cut into f_0 x ... x f_n equal parts is stored with the shape (f_0, ..., f_n, elements of one part).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from ...._text import shown
from ...data.text import checked_shape
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece
from ..torch.dcp import Contents, Index, Row
from ..torch.pickles import torch_sizes
from .parameters import Run, later, state_pieces
from .said import as_dict

__all__ = ["with_grids"]

#: The attribute of the index that states the shapes of these tensors, and the key of a shape in it.
_ATTRIBUTE, _SHAPE = "mcore_data", "nd_reformulated_orig_global_shape"


def with_grids(found: Contents, index: Index) -> Contents:
    """Return the contents with grids of flattened parts replaced by tensors of the shapes in the index."""
    said = as_dict(index.rest.get(_ATTRIBUTE))
    rows = {row.name: row for row in index.tensors}
    tensors = dict(found.tensors)
    for name, entry in said.items():
        row, shape = rows.get(name), as_dict(entry).get(_SHAPE)
        if row is not None and shape is not None:
            shape = checked_shape(torch_sizes(shape), 8, name, index.path)
            tensors[name] = _from_grid(index, row, shape, tensors[name])
    return found._replace(tensors=tensors)


def _from_grid(index: Index, row: Row, shape: tuple[int, ...], grid: StoredTensor) -> StoredTensor:
    """Return a tensor of this shape that is stored as a grid of equal parts, each of them flattened."""
    *cells, length = row.shape or (0,)
    parts = [size // cell if cell and size % cell == 0 else -1 for size, cell in zip(shape, cells, strict=False)]
    if len(cells) != len(shape) or -1 in parts or math.prod(parts) != length:
        raise index.error(
            f"tensor {shown(row.name)} is stored as a grid of shape {row.shape}, but the metadata says shape {shape}, "
            f"which is not made of such equal parts"
        )
    itemsize = grid.bits // 8
    pieces = [piece for stored in grid.pieces for piece in _in_cells(stored, parts, itemsize)]
    boxes = np.array([piece.bounds for piece in pieces], np.int64).reshape(len(pieces), len(shape), 2)
    return StoredTensor(row.name, grid.known_dtype, shape, ListedPieces(boxes, lambda position, _: pieces[position]))


def _in_cells(stored: StoredPiece, parts: Sequence[int], itemsize: int) -> Iterator[StoredPiece]:
    """Yield the boxes of the tensor that a piece of the grid holds; one chunk may have several cells."""
    *sides, (low, high) = stored.bounds
    for number, cell in enumerate(product(*(range(start, stop) for start, stop in sides))):
        block = tuple((at * part, (at + 1) * part) for at, part in zip(cell, parts, strict=True))
        locate = partial(later, stored, number * (high - low) * itemsize)
        yield from state_pieces([block], [Run(low, high, stored.path, locate)], itemsize)
