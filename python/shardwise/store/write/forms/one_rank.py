"""The ranks of layouts; and the tensors that one rank holds, each as a whole tensor of that rank's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from ...._text import shown
from ....conversion.assembled import zero_element
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....pieces import NO_PIECES, LocatedPiece, Pieces
from ....placing import Placing
from ...data.parts import PIECES, part_mark
from .files import CutTensor
from .rank_files import FileRanks, pieces_text, rank_slots, slot_bounds

__all__ = ["file_ranks", "one_rank"]

#: A box of a tensor (start and stop), and its first position in a rank's array.
_PlacedBox = tuple[Sequence[npt.NDArray[np.int64]], npt.NDArray[np.int64]]


def file_ranks(layouts: Placing, wanted: Sequence[CutTensor]) -> FileRanks:
    """Return the devices of the layouts; without layouts, those of the mesh by which the tensors are cut.

    Raises:
        LayoutError: if neither names devices, or several meshes do.
    """
    if layouts.world is not None:
        return FileRanks(layouts.world.labels(), layouts.meshes or {"world": layouts.world})
    meshes = dict.fromkeys(each.partition.device_mesh for each in wanted if each.partition is not None)
    if not meshes:
        raise LayoutError("files for ranks need layouts with a mesh, which states the ranks; none was given")
    if len(meshes) > 1:
        raise LayoutError(
            f"the layouts have {len(meshes)} meshes, so nothing says which rank a device is; a Deployment does"
        )
    (mesh,) = meshes
    return FileRanks(mesh.labels(), {"mesh": mesh})


def one_rank(
    wanted: Sequence[Wanted], ranks: FileRanks, metadata: Mapping[str, str], rank: int
) -> tuple[list[Wanted], dict[str, str]]:
    """Return the tensors of one rank, in the shapes that it holds; and the texts for the header of its file.

    Raises:
        LayoutError: if the layouts have no rank of this number.
    """
    if not 0 <= rank < len(ranks.labels):
        raise LayoutError(f"rank is {shown(rank)}; the layouts have the ranks 0 to {len(ranks.labels) - 1}")
    slots = rank_slots(wanted, ranks)[rank]
    found = []
    for first, stop in slot_bounds(slots):
        tensor = wanted[int(slots.tensors[first])]
        places, dims = slots.places[first:stop], len(tensor.shape)
        begins, shapes = slots.table.in_arrays(places, dims)
        boxes = list(zip(zip(*slots.table.sides(places, dims), strict=True), begins, strict=True))
        pieces, replicas = (_moved(table, boxes) for table in (tensor.pieces, tensor.replicas))
        shape = tuple(shapes[0].tolist())
        pieces = Pieces.joined([pieces, _zeros(shape, boxes, tensor.itemsize)], dims)
        found.append(replace(tensor, shape=shape, pieces=pieces, replicas=replicas, partition=None, identity=None))
    return found, {**metadata, **part_mark(len(ranks.labels)), PIECES: pieces_text(slots, wanted)}


def _zeros(shape: tuple[int, ...], boxes: Sequence[_PlacedBox], itemsize: int) -> Pieces:
    """Return pieces of zeros that fill the parts of an array that none of its boxes covers."""
    rank = len(shape)
    starts = np.array([at for _, at in boxes], np.int64).reshape(len(boxes), rank)
    stops = starts + np.array([stop - start for (start, stop), _ in boxes], np.int64).reshape(len(boxes), rank)
    if 0 in shape or int((stops - starts).prod(axis=1).sum()) == math.prod(shape):
        return NO_PIECES
    edges = (sorted({0, size, *starts[:, dim].tolist(), *stops[:, dim].tolist()}) for dim, size in enumerate(shape))
    found = []
    for box in product(*map(pairwise, edges)):
        low, high = np.array(box, np.int64).reshape(rank, 2).T
        if not ((starts <= low) & (high <= stops)).all(axis=1).any():
            found.append(LocatedPiece(box, zero_element(itemsize), 0, (0,) * rank))
    return Pieces.of(found, rank)


def _moved(pieces: Pieces, boxes: Sequence[_PlacedBox]) -> Pieces:
    """Return the parts of pieces that lie within boxes, with their positions counted in a rank's array."""
    tables = []
    for (start, stop), at in boxes:
        table = pieces.clipped(tuple(zip(start.tolist(), stop.tolist(), strict=True)))
        if len(table):
            rows = table.rows.copy()
            moved = Pieces(rows, table.holders)
            moved.starts[...] += at - start
            moved.stops[...] += at - start
            tables.append(moved)
    return Pieces.joined(tables, pieces.rank) if tables else NO_PIECES
