"""Bare files of ranks: each holds one device's part of the tensors, and layouts say which part that is.

Examples are Meta's `consolidated.NN.pth`, and the files that engines save for each rank. Elements that several ranks
hold are read from the first; the others are replicas. Errors name a file that is missing, a rank's shape that the
layouts do not give, and a tensor that a rank lacks or should not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..._dtypes import DTYPES
from ..._text import counted, shown
from ...errors import LayoutError, ParseError, ShardwiseError
from ...layout import TensorLayout
from ...packed import PackedDim
from ...partition import Partition
from ...piece import Piece
from ...placing import Placing
from ..data.boxes import Located
from ..data.location import Location, entries_of
from ..data.parts import bare_ranks
from ..tensors.checkpoint import Besides, StoredCheckpoint
from ..tensors.coverage import tile
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import ListedPieces, StoredPiece
from .open import open_checkpoint

__all__ = ["open_form"]

#: The names of an engine's files, one for each rank and part, and of ours.
_ENGINE = re.compile(
    r"(?:model-(?:rank-(?P<rank>\d{1,6})|pp-(?P<pp>\d{1,6})-tp-(?P<tp>\d{1,6}))-part-\d+"
    r"|rank-(?P<own>\d{5,6})(?:-[A-Za-z0-9_.]+-\d+)*)\.safetensors"
)
#: The bytes of a tensor that are read to tell ranks apart.
_BEGINNING = 64


def open_form(path: Location, *, layouts: Placing) -> StoredCheckpoint:
    """Open a folder of bare files of ranks as one checkpoint, cut as layouts say.

    Args:
        path: The folder.
        layouts: The layouts of the tensors; rank i is device i of their mesh.

    Raises:
        LayoutError: if the layouts have no mesh, or do not fit a tensor.
        ParseError: if the files are not those of all ranks, or contradict each other; the message names the file and
            the tensor.
    """
    if layouts.world is None:
        raise LayoutError("the layouts have no mesh, so the number of ranks is not known")
    labels = layouts.world.labels()
    names = _files_of(path, len(labels))
    opened = [[open_checkpoint(path / name, part=True) for name in names[rank]] for rank in range(len(labels))]
    held: dict[str, dict[int, StoredTensor]] = {}
    unreadable: dict[str, str] = {}
    for rank, files in enumerate(opened):
        for file in files:
            unreadable |= file.unreadable
            for name, tensor in file.items():
                if rank in held.setdefault(name, {}):
                    raise ParseError(f"{path}: rank {rank} has tensor {shown(name)} in two of its files")
                held[name][rank] = tensor
    tensors = {name: _tensor(path, name, layouts, labels, ranks) for name, ranks in held.items()}
    _check_unequal(path, {name: held[name] for name, whole in tensors.items() if _is_cut(whole, held[name])})
    objects = {name: value for file in opened[0] for name, value in file.objects.items()}
    every = [file for files in opened for file in files]
    return StoredCheckpoint(path, "ranks by rules", tensors, every, Besides(objects=objects, unreadable=unreadable))


def _is_cut(whole: StoredTensor, ranks: Mapping[int, StoredTensor]) -> bool:
    """Return whether each rank has a part of a tensor that no other has."""
    return len(whole.pieces) >= len(ranks) > 1 and not whole.replicas


def _check_unequal(path: Location, cut: Mapping[str, Mapping[int, StoredTensor]]) -> None:
    """Check that no rank's parts begin like another's, in all tensors that are cut.

    A few bytes of the first tensors tell ranks apart, unless a file is a copy of another.

    Raises:
        ParseError: if a file is; the message names the ranks.
    """
    together = [[*range(max((len(ranks) for ranks in cut.values()), default=0))]]
    are_plain = True
    for ranks in cut.values():
        found: dict[tuple[int, bytes], list[int]] = {}
        for at, group in enumerate(together):
            for rank in group:
                start = _beginning(ranks[rank])
                are_plain &= len({*start}) < 2
                found.setdefault((at, start), []).append(rank)
        together = [group for group in found.values() if len(group) > 1]
        if not together:
            return
    if not are_plain:
        one, other = together[0][:2]
        raise ParseError(
            f"{path}: ranks {one} and {other} begin with the same values in all {len(cut)} tensors, but the rules "
            "give each rank a different part: one file is a copy of the other"
        )


def _beginning(tensor: StoredTensor) -> bytes:
    """Return the first bytes of a rank's tensor, none if they are not stored as they are."""
    if len(tensor.pieces) != 1 or not tensor.pieces[0].is_addressable or not tensor.ndim:
        return b""
    piece = tensor.pieces[0]
    _, holder, begin, strides = piece.extent()
    itemsize = tensor.bits // 8
    count = min(tensor.shape[-1], _BEGINNING // itemsize) if strides[-1] == itemsize else 1
    size = count * itemsize
    own = StoredPiece(((0, size),), piece.path, key=piece.key, locate=lambda: (holder, begin, (1,)))
    return StoredTensor(tensor.name, DTYPES["uint8"], (size,), [own]).read().tobytes()


def _files_of(path: Location, count: int) -> list[list[str]]:
    """Return the files of each rank.

    Raises:
        ParseError: if there are none, or not those of `count` ranks.
    """
    there = [name for name, _ in entries_of(path)]
    found: dict[int, list[str]] = {}
    staged = {name: match for name in there if (match := _ENGINE.fullmatch(name)) is not None}
    width = max((int(match["tp"]) + 1 for match in staged.values() if match["tp"] is not None), default=1)
    for name, match in staged.items():
        number = match["rank"] or match["own"]
        rank = int(number) if number is not None else int(match["pp"]) * width + int(match["tp"])
        found.setdefault(rank, []).append(name)
    if not found:
        found = {rank: [name] for rank, name in bare_ranks(there).items()}
    if not found:
        raise ParseError(
            f"{path}: has no files of ranks. Their names end with the number of a rank, as in "
            "consolidated.00.pth, model-rank-0-part-0.safetensors, tp_rank_00.pt"
        )
    if sorted(found) != list(range(count)):
        missing = [rank for rank in range(count) if rank not in found]
        more = f"; rank {missing[0]} is missing" if missing else ""
        raise ParseError(
            f"{path}: has files of {counted(len(found), 'rank')}, and the mesh has {counted(count, 'device')}{more}"
        )
    return [sorted(found[rank]) for rank in range(count)]


def _tensor(
    path: Location, name: str, layouts: Placing, labels: Sequence[Any], ranks: Mapping[int, StoredTensor]
) -> StoredTensor:
    """Return one tensor, whose pieces are the ranks' parts of it."""
    first = ranks[min(ranks)]
    for rank, tensor in ranks.items():
        if tensor.known_dtype != first.known_dtype or tensor.ndim != first.ndim:
            raise ParseError(
                f"{path}: tensor {shown(name)} is {first.dtype} of shape {first.shape} on rank {min(ranks)}, and "
                f"{tensor.dtype} of shape {tensor.shape} on rank {rank}"
            )
    if first.bits % 8:
        raise ParseError(
            f"{path}: tensor {shown(name)} is {first.dtype}, whose elements share bytes; in bare files these are "
            "not read"
        )
    partition = _partition(path, name, layouts, labels, ranks)
    pieces: list[tuple[StoredTensor, Piece]] = []
    boxes = []
    for rank, tensor in ranks.items():
        parts = [_whole(tensor)] if partition is None else partition.pieces(labels[rank])
        for part in parts:
            pieces.append((tensor, part))
            boxes.append([(side.start, side.stop) for side in part.box])
    shape = first.shape if partition is None else partition.shape
    rows = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
    kept, again = tile(name, shape, rows, lambda at: pieces[at][0].pieces[0].path.name, path)

    def listed(chosen: list[int]) -> ListedPieces:
        return ListedPieces(rows[chosen], partial(_piece, [pieces[at] for at in chosen]))

    return StoredTensor(name, first.known_dtype, shape, listed(kept), replicas=listed(again))


def _whole(tensor: StoredTensor) -> Piece:
    return Piece(tuple(slice(0, size) for size in tensor.shape), (0,) * tensor.ndim)


def _partition(
    path: Location, name: str, layouts: Placing, labels: Sequence[Any], ranks: Mapping[int, StoredTensor]
) -> Partition | None:
    """Return the partition of a tensor whose parts the ranks hold; `None` if every rank holds all of it."""
    first = ranks[min(ranks)]
    placed = layouts.placed(name, first.ndim).by_layout()
    layout = placed.layout
    if layout is None and not layouts.is_whole_elsewhere:
        raise ParseError(f"{path}: no rule is for tensor {shown(name)}, so no rank should have it")
    if layout is None:
        holders = {label: rank for rank, label in enumerate(labels)}
    elif isinstance(layout, TensorLayout):
        mesh = layout.require_mesh("files of ranks")
        numbers = {label: rank for rank, label in enumerate(labels)}
        holders = {label: numbers[label] for label in mesh.labels()}
    else:
        raise LayoutError(f"tensor {shown(name)}: the layouts of files of ranks must be rules, not tilings")
    for label, rank in holders.items():
        if rank not in ranks:
            raise ParseError(f"{path}: rank {rank} ({label}) lacks tensor {shown(name)}, which rank {min(ranks)} has")
    strangers = sorted({*ranks} - {*holders.values()})
    if strangers:
        raise ParseError(f"{path}: rank {strangers[0]} has tensor {shown(name)}, which the rules place elsewhere")
    if layout is None:
        for rank, tensor in ranks.items():
            if tensor.shape != first.shape:
                raise ParseError(
                    f"{path}: tensor {shown(name)} has no rule, so all ranks must hold it whole, but it is of shape "
                    f"{first.shape} on rank {min(ranks)} and of {tensor.shape} on rank {rank}"
                )
        return None
    shape = tuple(_size(layout, dim, holders, ranks) for dim in range(first.ndim))
    try:
        partition = layout.partition(shape, placed.uneven or "even")
    except ShardwiseError as error:
        raise ParseError(f"{path}: tensor {shown(name)}, {first.shape} on rank {min(ranks)}: {error}") from None
    for label, rank in holders.items():
        wanted = partition.holder_shape(label)
        if wanted != ranks[rank].shape:
            raise ParseError(
                f"{path}: tensor {shown(name)} is of shape {ranks[rank].shape} on rank {rank}, but the rules give it "
                f"{wanted} of the whole, {shape}"
            )
    return partition


def _size(layout: TensorLayout, dim: int, holders: Mapping[Any, int], ranks: Mapping[int, StoredTensor]) -> int:
    """Return the size of a dim of the whole tensor: the layouts' statement, or the sum over the shards."""
    spec = layout.axes[dim]
    own = ranks[min(ranks)].shape[dim]
    if spec is None:
        return own
    if isinstance(spec, PackedDim) and spec.size is not None:
        return spec.size
    mesh = layout.require_mesh("files of ranks")
    names = spec.axis_names if isinstance(spec, PackedDim) else (spec,) if isinstance(spec, str) else spec
    axes = [axis for axis in mesh.axis_names if any(axis == name.partition(":(")[0] for name in names)]
    total, seen = 0, set()
    for label, rank in holders.items():
        at = dict(zip(mesh.axis_names, mesh.coordinate(mesh.index_of_label(label)), strict=True))
        shard = tuple(at[axis] for axis in axes)
        if shard not in seen:
            seen.add(shard)
            total += ranks[rank].shape[dim]
    return total


def _piece(pieces: Sequence[tuple[StoredTensor, Piece]], position: int, box: Any) -> StoredPiece:
    tensor, part = pieces[position]
    if len(tensor.pieces) != 1 or not tensor.pieces[0].is_addressable:
        raise ParseError(f"{tensor.name}: the rank's own tensor is not one run of elements that are stored as they are")
    own = tensor.pieces[0]
    starts = part.start if isinstance(part.start, tuple) else (part.start,)
    return StoredPiece(box, own.path, key=own.key, locate=partial(_located, own, starts))


def _located(own: StoredPiece, starts: Sequence[int]) -> Located:
    _, holder, begin, strides = own.extent()
    return holder, begin + sum(at * step for at, step in zip(starts, strides, strict=True)), strides
