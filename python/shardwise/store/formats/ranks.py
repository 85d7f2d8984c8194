"""Folders with a file for each rank. The header of a file states which boxes of the whole tensors it holds.

Elements that several files hold are read from the first; the others are replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..._dtypes import CODES, Dtype, in_bytes
from ..._json import strict_json
from ..._text import shown
from ..._types import Numbers
from ...errors import ParseError
from ...pieces import Bounds
from ..data.boxes import Located, contiguous_strides
from ..data.files import Holder
from ..data.location import Location, opening
from ..data.parts import MARK, PIECES
from ..data.text import are_sizes, checked_shape
from ..tensors.checkpoint import Besides, StoredCheckpoint
from ..tensors.coverage import tile
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import ListedPieces, StoredPiece
from .safetensors.header import Entry, read_header

__all__ = ["open_names", "rank_pieces"]


class _RankArray(NamedTuple):
    """The part of a tensor that one file holds.

    Attributes:
        entry: The header's entry of the array.
        shape: The shape of the whole tensor.
        rows: For each box start, stop and its start in the array: int64 of shape (boxes, 3, dims).
    """

    entry: Entry
    file: Holder
    shape: tuple[int, ...]
    rows: Numbers


def open_names(path: Location, names: Iterable[str], form: str) -> StoredCheckpoint:
    """Open the files with these names, which together are a checkpoint of this form.

    Raises:
        ParseError: if a file does not state its part of the tensors, or together they do not have all elements.
    """
    held: dict[str, list[_RankArray]] = {}
    metadata: dict[str, Any] = {}
    names = sorted(names)
    with opening([path / name for name in names]) as (open_next, files):
        for name in names:
            file = open_next(path / name)
            entries, texts = read_header(file)
            parts = _said_parts(file, texts)
            metadata = {key: text for key, text in texts.items() if key not in (PIECES, MARK)} | metadata
            for tensor, entry in entries.items():
                held.setdefault(tensor, []).append(_held(file, entry, parts.get(tensor)))
        tensors = {name: _tensor(path, name, each) for name, each in held.items()}
    return StoredCheckpoint(path, form, tensors, files, Besides(metadata=metadata))


def rank_pieces(file: Holder) -> Iterator[tuple[str, StoredPiece]]:
    """Yield the boxes of tensors that one file holds, each with its tensor's name.

    Raises:
        ParseError: if the file does not state its part of the tensors.
    """
    entries, texts = read_header(file)
    parts = _said_parts(file, texts)
    for tensor, entry in entries.items():
        held = _held(file, entry, parts.get(tensor))
        for row in held.rows:
            box = tuple((start, stop) for start, stop in row[:2].T.tolist())
            yield tensor, _piece([(held, row[2])], CODES[entry.dtype], 0, box)


def _said_parts(file: Holder, texts: Mapping[str, str]) -> dict[str, Any]:
    if PIECES not in texts:
        raise ParseError(f"{file.path}: its metadata has no {PIECES}, so nothing says where its arrays belong")
    found = strict_json(texts[PIECES].encode(), f"{file.path}: {PIECES}")
    if not isinstance(found, dict):
        raise ParseError(f"{file.path}: {PIECES}: is not a JSON object")
    return found


def _held(file: Holder, entry: Entry, said: Any) -> _RankArray:
    """Return the part of a tensor that a file holds, as its header states it; without a statement, the whole tensor."""
    dtype, rank, name = CODES[entry.dtype], len(entry.shape), f"{file.path}: {PIECES}: {shown(entry.name)}"
    own = np.array(entry.shape, np.int64)
    if said is None:
        return _RankArray(entry, file, entry.shape, np.stack([np.zeros_like(own), own, np.zeros_like(own)])[None])
    shape: Any = said.get("shape") if isinstance(said, dict) else None
    listed = said.get("pieces") if isinstance(said, dict) else None
    if not are_sizes(shape) or len(shape) != rank:
        raise ParseError(f"{name}: its whole shape is {shown(shape)}; the file has {shown(entry.shape)} of it")
    if not isinstance(listed, list) or not all(are_sizes(row) and len(row) == 3 * rank for row in listed):
        raise ParseError(f"{name}: its pieces are {shown(listed)}; each must be {3 * rank} sizes")
    rows = np.array(listed, np.int64).reshape(len(listed), 3, rank)
    whole = checked_shape(shape, dtype.bits, entry.name, file.path)
    extents = rows[:, 1] - rows[:, 0]
    if (extents < 0).any() or (rows[:, 1] > np.array(whole, np.int64)).any() or (extents > own - rows[:, 2]).any():
        raise ParseError(f"{name}: a piece is not within the tensor, or not within the file's array of {entry.shape}")
    if sum(math.prod(row) for row in extents.tolist()) > math.prod(entry.shape):  # What is not in one is padding.
        raise ParseError(f"{name}: its pieces have more elements than the file's array of {shown(entry.shape)}")
    if dtype.bits % 8 and not _are_in_bytes(dtype, whole, own, rows[:, 2]):
        raise ParseError(f"{name}: a row of the file's array of {shown(entry.shape)}, or a piece, begins within a byte")
    return _RankArray(entry, file, whole, rows)


def _are_in_bytes(dtype: Dtype, whole: tuple[int, ...], own: Numbers, starts: Numbers) -> bool:
    """Return whether all rows of an array of packed elements, and these places in it, begin at whole bytes.

    Args:
        dtype: The dtype, whose elements may have fewer than eight bits.
        whole: The shape of the tensor.
        own: The shape of the array.
        starts: The places: int64 of shape (pieces, dims).
    """
    dim, row = _row_bits(dtype, whole)
    edges = np.append(starts[:, dim], own[dim]).tolist()
    return tuple(own[dim + 1 :].tolist()) == whole[dim + 1 :] and not any(edge * row % 8 for edge in edges)


def _row_bits(dtype: Dtype, whole: tuple[int, ...]) -> tuple[int, int]:
    """Return the dim of a packed tensor along which several elements share bytes, and the bits of an element of it."""
    bits, inner = in_bytes(dtype, whole)[0].packed or (8, ())
    return len(whole) - 1 - len(inner), math.prod(inner) * bits


def _tensor(path: Location, name: str, held: list[_RankArray]) -> StoredTensor:
    first = held[0]
    dtype = CODES[first.entry.dtype]
    for other in held:
        if (other.entry.dtype, other.shape) != (first.entry.dtype, first.shape):
            raise ParseError(
                f"{path}: tensor {shown(name)} is {first.entry.dtype} of shape {shown(first.shape)} in "
                f"{first.file.path.name}, but {other.entry.dtype} of shape {shown(other.shape)} in "
                f"{other.file.path.name}"
            )
    rows = np.concatenate([each.rows for each in held])
    of = np.repeat(np.arange(len(held)), [len(each.rows) for each in held])
    boxes = rows[:, :2].transpose(0, 2, 1)
    kept, again = tile(name, first.shape, boxes, lambda at: held[of[at]].file.path.name, path)

    def listed(chosen: list[int]) -> ListedPieces:
        parts = [(held[of[at]], rows[at, 2]) for at in chosen]
        return ListedPieces(boxes[chosen], partial(_piece, parts, dtype))

    return StoredTensor(name, dtype, first.shape, listed(kept), replicas=listed(again))


def _piece(parts: list[tuple[_RankArray, Numbers]], dtype: Dtype, position: int, box: Bounds) -> StoredPiece:
    held, at = parts[position]
    return StoredPiece(box, held.file.path, locate=partial(_located, held, at, dtype))


def _located(held: _RankArray, at: Numbers, dtype: Dtype) -> Located:
    start, shape, itemsize = at.tolist(), list(held.entry.shape), dtype.bits // 8
    if dtype.bits % 8:  # Packed elements have no strides in bytes: they are asked for as bytes.
        (dim, row), itemsize = _row_bits(dtype, held.shape), 1
        inner = len(shape) - 1 - dim
        shape[dim:], start[dim:] = ([size[dim] * row // 8, *[rest] * inner] for size, rest in ((shape, 1), (start, 0)))
    strides = contiguous_strides(shape, itemsize)
    return (held.file, held.entry.start + sum(i * step for i, step in zip(start, strides, strict=True)), strides)
