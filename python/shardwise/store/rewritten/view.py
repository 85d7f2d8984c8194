"""A checkpoint as rewrites name and store it: nothing is written, every element stays where it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...conversion.apply import kept_objects
from ...conversion.assembled import Assembled
from ...conversion.tables import Wanted
from ...partition import Partition
from ...pieces import LocatedPiece
from ...shared_tiling import SharedTiling
from ..data.location import Location
from ..tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ..tensors.model_config import config_of
from ..tensors.stored import StoredTensor, UnsupportedError
from ..tensors.stored_pieces import StoredPiece
from .groups import grouped_values
from .names import Naming, kept_values, renamed_tensors
from .wanted import wanted_stored

__all__ = ["rewritten_view"]


def rewritten_view(
    checkpoint: StoredCheckpoint,
    naming: Naming,
    dropped: dict[str, Assembled] | None = None,
    *,
    with_values: bool = False,
) -> StoredCheckpoint:
    """Return a view of an open checkpoint under new names and after rewrites, to be closed before the source.

    Args:
        checkpoint: The source.
        naming: The new names and rewrites. Tensors that cannot be read keep their names, unless `rename` changes them.
        dropped: Gets the names that the rewrites drop.
        with_values: Whether the view has values that are not tensors. Values of groups are read if their names contain
            parameters.

    Raises:
        LayoutError: if a rewrite does not apply to the tensors; if two tensors or values get one name.
        UnsupportedError: if a rewrite applies to a compressed tensor.
    """

    def stored(old: str, new: str, partition: Partition | SharedTiling | None) -> Wanted:
        tensor = checkpoint[old]
        if not tensor.is_addressable:
            raise UnsupportedError(f"tensor {old!r} is compressed, so it cannot be rewritten where it is; reshard it")
        return wanted_stored(new, tensor, partition)

    made, _, lost = renamed_tensors(checkpoint, naming, None, stored, config_of(checkpoint.given))
    if dropped is not None:
        dropped.update(lost)
    tensors = {name: _tensor(checkpoint, name, one) for name, one in made.items()}
    unreadable = {naming.renamed(name): why for name, why in checkpoint.unreadable.items()}
    if naming.rewrites is not None:
        unreadable = {name: unreadable[name] for name in kept_objects(unreadable, naming.rewrites)}
    objects = _values(checkpoint, naming, made) if with_values else {}
    besides = Besides(objects=objects, unreadable=unreadable)
    return checkpoint.with_tensors(tensors, besides)


def _values(checkpoint: StoredCheckpoint, naming: Naming, made: dict[str, Assembled]) -> dict[str, StoredObject]:
    """Return the values that are not tensors by their new names; those of groups name the renamed parameters."""
    kept, _ = kept_values(checkpoint, naming, made)
    grouped = grouped_values(checkpoint, kept, made)
    found = {
        new: StoredObject(new, checkpoint.objects[old].value, checkpoint.objects[old].extent)
        for new, old in grouped.copied.items()
    }
    return found | {new: StoredObject(new, partial(list, value)) for new, (_, value) in grouped.changed.items()}


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
