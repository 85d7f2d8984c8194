"""Safetensors files and folders as stored tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from ...._dtypes import CODES
from ...._fork import importing
from ...data.boxes import Located, contiguous_strides
from ...data.files import Holder
from ...data.location import Location
from ...tensors.checkpoint import Besides, StoredCheckpoint
from ...tensors.lazy import LazyTensors
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import StoredPiece, whole_box
from ..known import no_optimizer
from .folder import locate_checkpoint, open_entries
from .header import Entry

__all__ = ["open_form", "stored_piece"]


def open_form(path: Location, *, part: bool = False, parameter_names: Sequence[str] | None = None) -> StoredCheckpoint:
    """Open a safetensors file, a folder in Hugging Face's format, or its index; `part` allows a part of one.

    Files of a training run in a folder are read as well; `parameter_names` are for their optimizer.
    """
    if path.is_dir():
        with importing:
            from ..torch.training import with_training_files
        return with_training_files(_opened(path, part), path, parameter_names)
    if parameter_names is not None:
        raise no_optimizer(path)
    return _opened(path, part)


def _opened(path: Location, part: bool) -> StoredCheckpoint:
    located = locate_checkpoint(path)
    entries, metadata, files = open_entries(located, part=part)
    by_path = {file.path: file for file in files}
    tied = {alias: name for alias, name in _aliases(metadata).items() if name in entries and alias not in entries}

    def make(name: str, entry: Entry) -> StoredTensor:
        piece = stored_piece(entry, by_path[entry.file], whole_box(entry.shape))
        return StoredTensor(name, CODES[entry.dtype], entry.shape, (piece,), alias_of=tied.get(name))

    rows = entries | {alias: entries[name] for alias, name in tied.items()}
    tensors = LazyTensors(rows, lambda entry: (CODES[entry.dtype], entry.shape), make)
    return StoredCheckpoint(located, "safetensors", tensors, files, Besides(metadata=metadata))


def _aliases(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the names of tied tensors, which the format cannot express, as `save_checkpoint` records them."""
    try:
        said = json.loads(metadata.get("shardwise.aliases", "{}"))
    except (ValueError, RecursionError):
        return {}
    pairs = said.items() if isinstance(said, dict) else ()
    return {alias: name for alias, name in pairs if isinstance(name, str)}


def stored_piece(entry: Entry, file: Holder, box: tuple[tuple[int, int], ...]) -> StoredPiece:
    """Return a file's tensor as a piece of a whole tensor: the elements of this box."""
    return StoredPiece(box, file.path, locate=partial(_locate, entry, file))


def _locate(entry: Entry, file: Holder) -> Located:
    # Packed elements have no strides in bytes; numpy has no array of them, so this is never reached.
    return (file, entry.start, contiguous_strides(entry.shape, entry.bits // 8))
