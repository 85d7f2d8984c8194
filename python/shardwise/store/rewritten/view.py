"""A checkpoint as rewrites name and store it: nothing is written, every element stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...conversion.apply import kept_objects
from ...conversion.assembled import Assembled, Wanted
from ...partition import Partition
from ...pieces import LocatedPiece
from ...rules.rewrites import Rewrites
from ...shared_tiling import SharedTiling
from ..data.location import Location
from ..tensors.checkpoint import Besides, StoredCheckpoint
from ..tensors.model_config import config_of
from ..tensors.stored import StoredPiece, StoredTensor, UnsupportedError
from .names import Naming, renamed_tensors
from .wanted import wanted_stored

__all__ = ["rewritten_view"]


def rewritten_view(
    checkpoint: StoredCheckpoint,
    rewrites: Rewrites,
    dropped: dict[str, Assembled] | None = None,
) -> StoredCheckpoint:
    """Give an open checkpoint as rewrites make it; it is to be closed after this. What cannot be read keeps its name.

    What the rewrites drop is put into `dropped`.

    Raises:
        LayoutError: if a rewrite does not apply to the tensors.
        UnsupportedError: if one is for a tensor that is compressed.
    """

    def stored(old: str, new: str, partition: Partition | SharedTiling | None) -> Wanted:
        tensor = checkpoint[old]
        if not tensor.is_addressable:
            raise UnsupportedError(f"tensor {old!r} is compressed, so it cannot be rewritten where it is; reshard it")
        return wanted_stored(new, tensor, partition)

    made, _, lost = renamed_tensors(checkpoint, Naming(rewrites=rewrites), None, stored, config_of(checkpoint.path))
    if dropped is not None:
        dropped.update(lost)
    tensors = {name: _tensor(checkpoint, name, one) for name, one in made.items()}
    unreadable = {name: checkpoint.unreadable[name] for name in kept_objects(checkpoint.unreadable, rewrites)}
    return StoredCheckpoint(checkpoint.path, checkpoint.format, tensors, [], Besides(unreadable=unreadable))


def _tensor(checkpoint: StoredCheckpoint, name: str, made: Assembled) -> StoredTensor:
    if made.stored is not None:
        known = checkpoint[made.stored]
        return StoredTensor(name, known.known_dtype, known.shape, known.pieces, chunk=known.chunk)
    pieces = [_piece(checkpoint.path, made, piece) for piece in made.wanted(name, None).pieces]
    if not pieces:
        box = tuple((0, size) for size in made.shape)
        pieces = [StoredPiece(box, checkpoint.path, fill=np.zeros((), made.dtype.numpy()))]
    return StoredTensor(name, made.dtype, made.shape, pieces)


def _piece(path: Location, made: Assembled, piece: LocatedPiece) -> StoredPiece:
    if not isinstance(piece.holder, np.ndarray):
        return StoredPiece(piece.box, piece.holder.path, locate=lambda: (piece.holder, piece.offset, piece.strides))
    # What is in memory is padding: one element of zero bytes that stands for all.
    fill: Any = np.zeros((), made.dtype.numpy())
    return StoredPiece(piece.box, path, fill=fill)
