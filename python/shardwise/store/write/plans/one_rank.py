"""The ranks that layouts have, and what one of them holds, as tensors of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...._text import shown
from ....deploy.deployment import Deployment
from ....errors import LayoutError
from ....rules.layout_map import LayoutMap
from ...parts import PIECES, part_mark
from ...pieces import NO_PIECES, Pieces
from ..formats.files import Placed
from ..formats.rank_files import RankFile, Ranks, arrays_of, rank_slots
from ..tensors.wanted import Layouts, Wanted

__all__ = ["one_rank", "ranks_of"]


def ranks_of(layouts: Layouts | None, wanted: Sequence[Placed]) -> Ranks:
    """The devices of layouts; without any, those of the mesh by which the tensors are cut.

    Raises:
        LayoutError: if nothing says what devices there are, or several meshes do.
    """
    if isinstance(layouts, Deployment):
        return Ranks(layouts.devices, layouts.meshes or {"world": layouts.world})
    mesh = layouts.device_mesh if isinstance(layouts, LayoutMap) else None
    meshes = dict.fromkeys(each.partition.device_mesh for each in wanted if each.partition is not None)
    if mesh is None and len(meshes) == 1:
        mesh = next(iter(meshes))
    if mesh is None and meshes:
        raise LayoutError(
            f"the layouts have {len(meshes)} meshes, so nothing says which rank a device is; a Deployment does"
        )
    if mesh is None:
        raise LayoutError("files for ranks need layouts with a mesh, which says what ranks there are; none was given")
    return Ranks(mesh._all_labels(), {"mesh": mesh})


def one_rank(
    wanted: Sequence[Wanted], ranks: Ranks, metadata: Mapping[str, str], rank: int
) -> tuple[list[Wanted], dict[str, str]]:
    """What one rank holds, as tensors of its own shapes; and the texts for the header of its file.

    Raises:
        LayoutError: if there is no such rank.
    """
    if not 0 <= rank < len(ranks.labels):
        raise LayoutError(f"rank is {shown(rank)}; the layouts have the ranks 0 to {len(ranks.labels) - 1}")
    slots = rank_slots(wanted, ranks)[rank]
    file = RankFile("", slots, wanted, metadata, count=len(ranks.labels))
    found = []
    for first, stop in arrays_of(slots):
        tensor = wanted[int(slots.tensors[first])]
        places, dims = slots.places[first:stop], len(tensor.shape)
        held = slots.table.held(places, dims)
        boxes = list(zip(slots.table.sides(places, dims), held[:, 0], strict=True))
        pieces, replicas = (_moved(table, boxes) for table in (tensor.pieces, tensor.replicas))
        shape = tuple(held[0, 1].tolist())
        found.append(replace(tensor, shape=shape, pieces=pieces, replicas=replicas, partition=None, identity=None))
    return found, {**metadata, **part_mark(len(ranks.labels)), PIECES: file.pieces_text()}


def _moved(pieces: Pieces, boxes: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]) -> Pieces:
    """What pieces hold of boxes, (start, stop) and where it begins in an array, as pieces of that array."""
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
