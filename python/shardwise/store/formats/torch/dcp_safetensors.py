"""PyTorch's distributed checkpoints as safetensors files, one or more for each rank.

The metadata of a file states the offsets of its tensors in the whole ones, but not the whole shapes: a shape extends as
far as any file does. A missing file leaves a gap, unless it is the last of a tensor; so the names, which have the
numbers of the ranks and of each rank's files, must be complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import CODES
from ...._json import strict_json
from ...._text import counted, shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.files import Holder
from ...data.location import Location, entries_of, open_file, opening
from ...data.parts import MANIFEST, MARK, SHARDING_INFO, said_files
from ...data.text import are_sizes, checked_shape
from ...tensors.checkpoint import Besides, StoredCheckpoint
from ...tensors.coverage import tile
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece
from ..safetensors.form import stored_piece
from ..safetensors.header import Entry, read_header

__all__ = ["open_form", "open_names", "shard_pieces"]

_NAME = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


class _FilePart(NamedTuple):
    """The part of a tensor in one file."""

    entry: Entry
    file: Holder
    offsets: tuple[int, ...]


def open_form(path: Location) -> StoredCheckpoint:
    """Open the folder of a checkpoint that PyTorch wrote; one of ours without its manifest is refused."""
    return open_names(path, (name for name, _ in entries_of(path)), is_ours=False)


def open_names(path: Location, listed: Iterable[str], *, is_ours: bool = True) -> StoredCheckpoint:
    """Open the shards with these names in the folder.

    Args:
        path: The folder.
        listed: The names.
        is_ours: Whether there is a manifest, which lists the files.
    """
    names = sorted(name for name in listed if _NAME.fullmatch(name))
    if not is_ours:
        _refuse_ours(path, names)
    ranks = _check_names(path, names)
    parts: dict[str, list[_FilePart]] = {}
    metadata: dict[str, Any] = {}
    with opening([path / name for name in names]) as (open_next, files):
        for name in names:
            file = open_next(path / name)
            entries, texts = read_header(file)
            offsets = _sharding(file, texts)
            metadata = {key: text for key, text in texts.items() if key not in (SHARDING_INFO, MARK)} | metadata
            for tensor, entry in entries.items():
                if tensor not in offsets:
                    raise ParseError(f"{file.path}: {SHARDING_INFO} does not list the tensor {shown(tensor)}")
                parts.setdefault(tensor, []).append(_FilePart(entry, file, offsets[tensor]))
        tensors = {name: _tensor(path, name, held) for name, held in parts.items()}
    return StoredCheckpoint(path, "dcp-safetensors", tensors, files, Besides(metadata={**metadata, "ranks": ranks}))


def shard_pieces(file: Holder) -> Iterator[tuple[str, StoredPiece]]:
    """Yield the boxes of tensors that one file holds, each with its tensor's name; without offsets, whole tensors."""
    entries, texts = read_header(file)
    offsets = _sharding(file, texts) if SHARDING_INFO in texts else {}
    for tensor, entry in entries.items():
        starts = offsets.get(tensor, (0,) * len(entry.shape))
        if len(starts) == len(entry.shape):
            box = tuple((at, at + size) for at, size in zip(starts, entry.shape, strict=True))
            yield tensor, stored_piece(entry, file, box)


def _refuse_ours(path: Location, names: list[str]) -> None:
    """Refuse files of ours without their manifest, which is written last."""
    for name in names[:1]:
        file = open_file(path / name)
        try:
            count = said_files(read_header(file)[1])
        finally:
            file.close()
        if count is None:
            return
        missing = f"; {count - len(names)} of its {count} files are missing too" if count > len(names) else ""
        raise ParseError(
            f"{path}: has no {MANIFEST}, which is written last{missing}: the run or the copy was interrupted, and the "
            "checkpoint is not complete"
        )


def _check_names(path: Location, names: list[str]) -> int:
    """Check that the numbers in the names are complete; return the number of ranks."""
    numbers: dict[int, dict[int, int]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or any(len(text) > 18 for text in match.groups()):
            raise ParseError(f"{path}: {shown(name)} is not the name of a shard")
        rank, part, count = map(int, match.groups())
        if part in numbers.setdefault(rank, {}):
            raise ParseError(f"{path}: two files are part {part} of shard {rank}")
        numbers[rank][part] = count
    for expected, rank in enumerate(sorted(numbers), 1):
        if rank != expected:
            raise ParseError(f"{path}: has {shown(names[-1])}, but no file of shard {expected}")
        counts = set(numbers[rank].values())
        last = max(counts)
        if len(counts) > 1 or len(numbers[rank]) != last or not 1 <= min(numbers[rank]) <= max(numbers[rank]) <= last:
            raise ParseError(f"{path}: shard {rank} should have {counted(last, 'file')}, but has {len(numbers[rank])}")
    return len(numbers)


def _sharding(file: Holder, texts: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the offsets, in the whole tensors, of the tensors of a file."""
    if SHARDING_INFO not in texts:
        raise ParseError(f"{file.path}: its metadata has no {SHARDING_INFO}, which gives its place")
    where = f"{file.path}: {SHARDING_INFO}"
    info = strict_json(texts[SHARDING_INFO].encode(), where)
    if not isinstance(info, dict):
        raise ParseError(f"{where}: is not a JSON object")
    offsets = {}
    for name, said in info.items():
        start: Any = said.get("saved_offsets") if isinstance(said, dict) else None
        if not are_sizes(start):
            raise ParseError(
                f"{where}: the offsets of {shown(name)} are {shown(start)}; they must be integers of 0 or more"
            )
        offsets[name] = tuple(start)
    return offsets


def _tensor(path: Location, name: str, parts: list[_FilePart]) -> StoredTensor:
    first = parts[0]
    dtype, rank = CODES[first.entry.dtype], len(first.entry.shape)
    for part in parts:
        if part.entry.dtype != first.entry.dtype or len(part.entry.shape) != rank or len(part.offsets) != rank:
            raise ParseError(
                f"{path}: tensor {shown(name)} is {_said(first)} in {first.file.path.name} but {_said(part)} in "
                f"{part.file.path.name}"
            )
    stops = [[at + size for at, size in zip(part.offsets, part.entry.shape, strict=True)] for part in parts]
    shape = checked_shape([max(sizes) for sizes in zip(*stops, strict=True)], dtype.bits, name, path)
    boxes = np.array(
        [list(zip(part.offsets, stop, strict=True)) for part, stop in zip(parts, stops, strict=True)], np.int64
    )
    boxes = boxes.reshape(len(parts), rank, 2)
    kept, again = tile(name, shape, boxes, lambda at: parts[at].file.path.name, path)
    pieces = ListedPieces(boxes[kept], partial(_piece, [parts[at] for at in kept]))
    replicas = ListedPieces(boxes[again], partial(_piece, [parts[at] for at in again]))
    return StoredTensor(name, dtype, shape, pieces, replicas=replicas)


def _said(part: _FilePart) -> str:
    return f"{part.entry.dtype} of shape {shown(part.entry.shape)} at {shown(part.offsets)}"


def _piece(parts: list[_FilePart], position: int, box: Bounds) -> StoredPiece:
    return stored_piece(parts[position].entry, parts[position].file, box)
