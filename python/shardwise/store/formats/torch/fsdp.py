"""Folders of `model_world_size_W_rank_R.pt`, one state dict per rank, as FSDP2 trainers write them.

A sharded tensor is a DTensor, whose pickle has everything needed: the shape of the whole tensor, the mesh, the
placements and the rank's own coordinate. A plain tensor is a buffer that every rank has: one copy is the tensor, the
others are its replicas.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import Dtype
from ...._strided import strided_pieces
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.location import Location, entries_of, opening
from ...data.text import checked_shape
from ...tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ...tensors.coverage import tile
from ...tensors.stored import ListedPieces, StoredPiece, StoredTensor, UnsupportedError
from .pickles import Record, dtype_of_global, sizes_of, state_of
from .tensors import SAVE_AGAIN, Container, SavedTensor, sums_of, value_object

__all__ = ["open_form"]

_NAME = re.compile(r"(.*)model_world_size_(\d+)_rank_(\d+)\.pt")
_MAX_RANKS = 1_000_000


class _Sharding(NamedTuple):
    """The place of a DTensor on its mesh, the same on all ranks.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        mesh: The shape of the mesh.
        placements: Kind, dim and split factor for each mesh dim.
        order: For each dim of the tensor, the mesh dims that cut it, in that order.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    mesh: tuple[int, ...]
    placements: tuple[tuple[str, int, int], ...]
    order: tuple[tuple[int, ...], ...]


class _Part(NamedTuple):
    """A range of one rank's tensor, and the box of the whole tensor that it covers."""

    container: Container
    tensor: SavedTensor
    local: tuple[int, ...]
    box: Bounds


class _Gathered:
    """The parts of all ranks under one name."""

    def __init__(self) -> None:
        self.sharding: _Sharding | None = None
        self.plain: SavedTensor | None = None
        self.parts: list[_Part] = []
        self.first = ""


def open_form(path: Location, *, padded: bool = False) -> StoredCheckpoint:
    """Open the folder; `padded` reads the beginnings of tensors that are as long on each rank as on the first."""
    names = _files(path)
    gathered: dict[str, _Gathered] = {}
    objects: dict[str, StoredObject] = {}
    unreadable: dict[str, str] = {}
    meshes: dict[str, int] = {}
    with opening([path / name for name in names]) as (open_next, files):
        for name in names:
            file = open_next(path / name)
            container = Container(file)
            for key, value in container.values():
                if key.rpartition(".")[2] in ("_flat_param", "flat_param"):
                    raise ParseError(
                        f"{file.path}: {shown(key)} is a flat parameter of FSDP1, which does not describe the "
                        f"tensors in it; {SAVE_AGAIN}"
                    )
                try:
                    is_tensor = _gather(
                        gathered.setdefault(key, _Gathered()), container, key, value, len(names), padded
                    )
                except UnsupportedError as error:
                    unreadable.setdefault(key, str(error))
                    continue
                if not is_tensor:
                    if gathered[key].first:
                        raise ParseError(
                            f"{file.path}: {shown(key)} is not a tensor, but is one in {gathered[key].first}"
                        )
                    del gathered[key]
                    objects.setdefault(key, value_object(key, value))
        both = next((key for key in gathered if key in objects), None)
        if both is not None:
            raise ParseError(f"{path}: {shown(both)} is a tensor in some files and not in others")
        tensors = {key: _tensor(path, key, held) for key, held in gathered.items() if key not in unreadable}
    for held in gathered.values():
        if held.sharding is not None:
            meshes[str(held.sharding.mesh)] = meshes.get(str(held.sharding.mesh), 0) + 1
    return StoredCheckpoint(
        path,
        "fsdp2",
        tensors,
        files,
        Besides(
            metadata={"world_size": len(names), "meshes": meshes},
            objects=objects,
            unreadable=unreadable,
            sums=partial(sums_of, files),
        ),
    )


def _files(path: Location) -> list[str]:
    found: dict[tuple[str, int], dict[int, str]] = {}
    for name, _ in entries_of(path):
        match = _NAME.fullmatch(name)
        if match is not None and max(len(match[2]), len(match[3])) < 10:
            found.setdefault((match[1], int(match[2])), {})[int(match[3])] = name
    if len(found) != 1:
        kinds = ", ".join(sorted(f"{prefix}model_world_size_{size}" for prefix, size in found)[:4])
        raise ParseError(f"{path}: holds checkpoints of several kinds or world sizes ({kinds}); there must be one")
    (prefix, size), ranks = found.popitem()
    if not 0 < size <= _MAX_RANKS:
        raise ParseError(f"{path}: a world of {size} ranks, over the limit of {_MAX_RANKS}")
    missing = [rank for rank in range(size) if rank not in ranks]
    if missing or len(ranks) > size:
        which = f"no file of rank {missing[0]}" if missing else f"a file of rank {max(ranks)}"
        raise ParseError(f"{path}: {prefix}model_world_size_{size}: there is {which}")
    return [ranks[rank] for rank in range(size)]


def _gather(held: _Gathered, container: Container, name: str, value: Any, world: int, padded: bool) -> bool:
    """Add what a rank has under a name; False if it is not a tensor."""
    where = container.file.path
    sharded = _sharded(value)
    plain = container.tensor(value, name) if sharded is None else None
    if sharded is None and plain is None:
        return False
    if sharded is None and plain is not None:
        if held.sharding is not None or (
            held.plain is not None and (held.plain.shape, held.plain.dtype) != (plain.shape, plain.dtype)
        ):
            raise ParseError(
                f"{where}: tensor {shown(name)} is plain, {plain.dtype.name} of shape {plain.shape}, "
                f"unlike in {held.first}"
            )
        held.plain = plain
        held.parts.append(_Part(container, plain, (0,) * len(plain.shape), tuple((0, size) for size in plain.shape)))
    elif sharded is not None:
        sharding, coordinate, local = _read_dtensor(sharded, container, name, world)
        if held.plain is not None or (held.sharding is not None and held.sharding != sharding):
            raise ParseError(f"{where}: tensor {shown(name)} is not sharded as in {held.first}")
        held.sharding = sharding
        if coordinate is not None and local is not None:
            held.parts.extend(_parts(sharding, coordinate, container, local, name, padded))
    held.first = held.first or where.name
    return True


def _sharded(value: Any) -> dict[str, Any] | None:
    """The attributes of a DTensor; None for anything else."""
    while isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter" and value.args:
        value = value.args[0]
    if not isinstance(value, Record) or value.name != "torch._tensor._rebuild_from_type_v2":
        return None
    if not value.args or len(value.args) != 4 or not isinstance(value.args[1], Record):
        return None
    if value.args[1].name.rpartition(".")[2] != "DTensor":
        return None
    state = value.args[3]
    merged: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            merged |= part
    return merged


def _read_dtensor(
    state: dict[str, Any], container: Container, name: str, world: int
) -> tuple[_Sharding, tuple[int, ...] | None, SavedTensor | None]:
    where = container.file.path

    def wrong(what: str) -> ParseError:
        return ParseError(f"{where}: tensor {shown(name)}: {what}")

    spec = state_of(state.get("_spec"), "DTensorSpec")
    meta = None if spec is None else _tensor_meta(spec.get("tensor_meta"))
    mesh = None if spec is None else state_of(spec.get("mesh"), "DeviceMesh")
    if spec is None or meta is None or mesh is None:
        raise wrong("a DTensor without the shape of the whole tensor or its mesh")
    dtype = dtype_of_global(meta[1])
    if dtype is None:
        raise wrong("a DTensor of an unsupported dtype")
    shape = checked_shape(meta[0], dtype.bits, name, where)
    sizes = _mesh_shape(mesh, container, name)
    if sizes is None or not 0 < math.prod(sizes) <= world:
        raise wrong(f"a DTensor on a mesh of shape {shown(sizes)}, which must have at most {world} ranks")
    placements = spec.get("placements")
    if not isinstance(placements, tuple) or len(placements) != len(sizes):
        raise wrong(f"a DTensor with {shown(placements)} placed on a mesh of {len(sizes)} dims")
    read = tuple(_placement(placement, len(shape), world) for placement in placements)
    for position, placement in enumerate(read):
        if placement is None:
            given = placements[position]
            said = given.name.rpartition(".")[2] if isinstance(given, Record) else shown(given)
            raise wrong(
                f"placements[{position}] is {said}: partial sums, and placements other than Shard, _StridedShard and "
                "Replicate, have no boxes; redistribute it before it is saved"
            )
    known = tuple(placement for placement in read if placement is not None)
    order = _order(spec.get("shard_order"), known, len(shape))
    if order is None:
        raise wrong("a shard_order that does not fit its placements")
    coordinate = mesh.get("_coordinate_on_dim")
    sharding = _Sharding(shape, dtype, sizes, known, order)
    if coordinate is None:
        return sharding, None, None
    at = sizes_of(coordinate)
    if at is None or len(at) != len(sizes) or any(index >= size for index, size in zip(at, sizes, strict=True)):
        raise wrong(f"the coordinate {shown(coordinate)} is not on the mesh {sizes}")
    local = container.tensor(state.get("_local_tensor"), name)
    if local is None:
        raise wrong("a DTensor without its local tensor")
    if local.dtype != dtype:
        raise wrong(f"a DTensor of {dtype.name} with a local tensor of {local.dtype.name}")
    return sharding, at, local


def _tensor_meta(value: Any) -> tuple[Any, Any] | None:
    """Shape and dtype in a TensorMeta, a named tuple."""
    if not isinstance(value, Record) or value.name.rpartition(".")[2] != "TensorMeta" or not value.args:
        return None
    return (sizes_of(value.args[0]), value.args[2]) if len(value.args) == 3 else None


def _mesh_shape(mesh: dict[str, Any], container: Container, name: str) -> tuple[int, ...] | None:
    """The shape of a mesh; versions of PyTorch store it in different ways."""
    layout = state_of(mesh.get("_layout"), "_MeshLayout")
    if layout is not None:
        axes = layout.get("axes")
        if isinstance(axes, tuple):
            sizes = [_size(state_of(axis, "_FlatLayout")) for axis in axes]
        else:
            sizes = [_size({"shape": size}) for size in _as_tuple(layout.get("shape"))]
        return None if None in sizes else tuple(size for size in sizes if size is not None)
    tensor = container.tensor(mesh.get("mesh"), name)
    return None if tensor is None else tensor.shape


def _size(layout: dict[str, Any] | None) -> int | None:
    """The number of ranks along one axis, which may itself be of several."""
    sizes = None if layout is None else sizes_of(_as_tuple(layout.get("shape")))
    return None if sizes is None else math.prod(sizes)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _placement(value: Any, rank: int, world: int) -> tuple[str, int, int] | None:
    """Kind, dim and split factor; None for a placement that has no boxes."""
    state = state_of(value, "Shard", "_StridedShard", "Replicate")
    if state is None:
        return None
    kind = value.name.rpartition(".")[2]
    if kind == "Replicate":
        return kind, 0, 1
    dim, factor = state.get("dim"), state.get("split_factor", 1)
    if type(dim) is not int or not -rank <= dim < rank or type(factor) is not int or not 1 <= factor <= world:
        return None
    return kind, dim % rank, factor if kind == "_StridedShard" else 1


def _order(value: Any, placements: tuple[tuple[str, int, int], ...], rank: int) -> tuple[tuple[int, ...], ...] | None:
    """For each dim of the tensor the mesh dims that cut it, in order: that of the mesh, unless it states another."""
    order = [
        [axis for axis, (kind, dim, _) in enumerate(placements) if kind != "Replicate" and dim == at]
        for at in range(rank)
    ]
    if isinstance(value, tuple):
        for entry in value:
            said = (
                entry.args if isinstance(entry, Record) and entry.name.rpartition(".")[2] == "ShardOrderEntry" else None
            )
            axes = sizes_of(said[1]) if said and len(said) == 2 else None
            if said is None or axes is None or type(said[0]) is not int or not 0 <= said[0] < rank:
                return None
            if sorted(axes) != order[said[0]]:
                return None
            if all(placements[axis][0] == "Shard" for axis in axes):  # A strided shard states the order itself.
                order[said[0]] = list(axes)
    return tuple(map(tuple, order))


def _length(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


@lru_cache(4096)
def _cuts(size: int, cuts: tuple[tuple[int, int], ...]) -> list[list[tuple[int, int]]]:
    return strided_pieces(size, cuts)


def _parts(
    sharding: _Sharding, coordinate: tuple[int, ...], container: Container, local: SavedTensor, name: str, padded: bool
) -> list[_Part]:
    """The boxes that make up a rank's tensor, each with the place where it begins there."""
    ranges, longest = [], []
    for dim, size in enumerate(sharding.shape):
        index, cuts = 0, []
        for axis in sharding.order[dim]:
            cuts.append((sharding.mesh[axis], sharding.placements[axis][2]))
            index = index * sharding.mesh[axis] + coordinate[axis]
        pieces = _cuts(size, tuple(cuts)) if cuts else [[(0, size)]]
        ranges.append(pieces[index])
        longest.append(max(map(_length, pieces)))
    expected = tuple(map(_length, ranges))
    # Of several ranges in one dim, nothing says whether each is padded.
    is_padded = local.shape == tuple(longest) and all(len(held) <= 1 for held in ranges)
    if local.shape != expected and not (padded and is_padded):
        way = (
            "; it is as long as the longest of a rank: if what is beyond is padding, open_checkpoint(..., padded=True) "
            "and reshard_checkpoint(..., padded=True) read the beginning"
        )
        raise ParseError(
            f"{container.file.path}: tensor {shown(name)}: its placements give this rank {expected} "
            f"of {sharding.shape}, but its local tensor is {local.shape}{way if is_padded else ''}"
        )
    sides = []
    for held in ranges:
        at, side = 0, []
        for start, stop in held:
            side.append((at, (start, stop)))
            at += stop - start
        sides.append(side)
    return [
        _Part(container, local, tuple(at for at, _ in cell), tuple(bounds for _, bounds in cell))
        for cell in product(*sides)
    ]


def _tensor(path: Location, name: str, held: _Gathered) -> StoredTensor:
    if held.sharding is not None:
        shape, dtype = held.sharding.shape, held.sharding.dtype
    else:
        shape, dtype = held.parts[0].tensor.shape, held.parts[0].tensor.dtype
    boxes = np.array([part.box for part in held.parts], np.int64).reshape(len(held.parts), len(shape), 2)
    kept, again = tile(name, shape, boxes, lambda at: held.parts[at].container.file.path.name, path)
    pieces = ListedPieces(boxes[kept], partial(_piece, name, [held.parts[at] for at in kept]))
    replicas = ListedPieces(boxes[again], partial(_piece, name, [held.parts[at] for at in again]))
    return StoredTensor(name, dtype, shape, pieces, replicas=replicas)


def _piece(name: str, parts: list[_Part], position: int, box: Bounds) -> StoredPiece:
    part = parts[position]
    return part.container.piece(part.tensor, name, box, part.local)
