"""The pickled states of DTensors and ShardedTensors, which say how ranks cut a tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...._dtypes import Dtype
from ...._text import counted, shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.text import checked_shape
from .pickles import Record, dtype_of_global, state_of, torch_sizes
from .tensors import Container

__all__ = ["Sharding", "Shards", "axes_order", "shard_box", "sharded_state", "state_error", "stated_sharding"]


class Sharding(NamedTuple):
    """The place of a DTensor on its mesh, the same on all ranks.

    Attributes:
        shape: The shape of the whole tensor.
        mesh: The shape of the mesh.
        placements: Kind, dim and split factor for each mesh dim.
        order: For each dim of the tensor, the mesh dims that cut it, major first.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    mesh: tuple[int, ...]
    placements: tuple[tuple[str, int, int], ...]
    order: tuple[tuple[int, ...], ...]


class Shards(NamedTuple):
    """The shards of a ShardedTensor, the same on all ranks.

    Attributes:
        shape: The shape of the whole tensor.
        boxes: The box of each shard.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    boxes: tuple[Bounds, ...]


def state_error(container: Container, name: str, what: str) -> ParseError:
    """Return the error about the pickled state of a tensor."""
    return ParseError(f"{container.file.path}: tensor {shown(name)}: {what}")


def sharded_state(value: Any) -> tuple[str, Any]:
    """Return the class and the state of a rank's part of a tensor; no class for other values."""
    while isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter" and value.args:
        value = value.args[0]
    if not isinstance(value, Record) or value.name != "torch._tensor._rebuild_from_type_v2":
        return "", None
    if not value.args or len(value.args) != 4 or not isinstance(value.args[1], Record):
        return "", None
    kind, state = value.args[1].name.rpartition(".")[2], value.args[3]
    if kind == "ShardedTensor":
        return kind, state
    if kind != "DTensor":
        return "", None
    merged: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            merged |= part
    return kind, merged


def shard_box(value: Any, rank: int) -> Bounds | None:
    """Return the box that a ShardMetadata states."""
    state = state_of(value, "ShardMetadata") or {}
    starts, sizes = torch_sizes(state.get("shard_offsets")), torch_sizes(state.get("shard_sizes"))
    if starts is None or sizes is None or not len(starts) == len(sizes) == rank:
        return None
    if any(start + size >= 1 << 63 for start, size in zip(starts, sizes, strict=True)):
        return None
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def stated_sharding(
    state: dict[str, Any], container: Container, name: str, world: int
) -> tuple[Sharding, tuple[int, ...] | None]:
    """Return the sharding that a DTensor states, and the rank's coordinate; `None` if it is not on the mesh.

    Raises:
        ParseError: if it states none, or one that has no boxes.
    """
    spec = state_of(state.get("_spec"), "DTensorSpec")
    meta = None if spec is None else _tensor_meta(spec.get("tensor_meta"))
    mesh = None if spec is None else state_of(spec.get("mesh"), "DeviceMesh")
    if spec is None or meta is None or mesh is None:
        raise state_error(container, name, "a DTensor without the shape of the whole tensor or its mesh")
    dtype = dtype_of_global(meta[1])
    if dtype is None:
        raise state_error(container, name, "a DTensor of an unsupported dtype")
    shape = checked_shape(meta[0], dtype.bits, name, container.file.path)
    sizes = _mesh_shape(mesh, container, name)
    if sizes is None or not 0 < math.prod(sizes) <= world:
        raise state_error(
            container, name, f"a DTensor on a mesh of shape {shown(sizes)}, which must have at most {world} ranks"
        )
    placements = spec.get("placements")
    if not isinstance(placements, tuple) or len(placements) != len(sizes):
        raise state_error(
            container, name, f"a DTensor with {shown(placements)} placed on a mesh of {counted(len(sizes), 'dim')}"
        )
    read = tuple(_placement(placement, len(shape), world) for placement in placements)
    for position, placement in enumerate(read):
        if placement is None:
            given = placements[position]
            said = given.name.rpartition(".")[2] if isinstance(given, Record) else shown(given)
            raise state_error(
                container,
                name,
                f"placements[{position}] is {said}: partial sums, and placements other than Shard, _StridedShard and "
                "Replicate, have no boxes; redistribute it before it is saved",
            )
    known = tuple(placement for placement in read if placement is not None)
    order = axes_order(spec.get("shard_order"), known, len(shape))
    if order is None:
        raise state_error(container, name, "a shard_order that does not fit its placements")
    coordinate = mesh.get("_coordinate_on_dim")
    sharding = Sharding(shape, dtype, sizes, known, order)
    if coordinate is None:
        return sharding, None
    at = torch_sizes(coordinate)
    if at is None or len(at) != len(sizes) or any(index >= size for index, size in zip(at, sizes, strict=True)):
        raise state_error(container, name, f"the coordinate {shown(coordinate)} is not on the mesh {sizes}")
    return sharding, at


def _tensor_meta(value: Any) -> tuple[Any, Any] | None:
    """Return shape and dtype of a TensorMeta, a named tuple."""
    if not isinstance(value, Record) or value.name.rpartition(".")[2] != "TensorMeta" or not value.args:
        return None
    return (torch_sizes(value.args[0]), value.args[2]) if len(value.args) == 3 else None


def _mesh_shape(mesh: dict[str, Any], container: Container, name: str) -> tuple[int, ...] | None:
    """Return the shape of a mesh, which versions of PyTorch store in different ways."""
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
    """Return the number of ranks along one axis, which may itself consist of several."""
    sizes = None if layout is None else torch_sizes(_as_tuple(layout.get("shape")))
    return None if sizes is None else math.prod(sizes)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _placement(value: Any, rank: int, world: int) -> tuple[str, int, int] | None:
    """Return kind, dim and split factor of a placement; `None` for one that does not give boxes."""
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


def axes_order(
    value: Any, placements: tuple[tuple[str, int, int], ...], rank: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return, for each dim of the tensor, the mesh dims that cut it: in the mesh's order, unless another is stated."""
    order = [
        [axis for axis, (kind, dim, _) in enumerate(placements) if kind != "Replicate" and dim == at]
        for at in range(rank)
    ]
    if isinstance(value, tuple):
        for entry in value:
            said = (
                entry.args if isinstance(entry, Record) and entry.name.rpartition(".")[2] == "ShardOrderEntry" else None
            )
            axes = torch_sizes(said[1]) if said and len(said) == 2 else None
            if said is None or axes is None or type(said[0]) is not int or not 0 <= said[0] < rank:
                return None
            if sorted(axes) != order[said[0]]:
                return None
            if all(placements[axis][0] == "Shard" for axis in axes):  # A strided shard states the order itself.
                order[said[0]] = list(axes)
    return tuple(map(tuple, order))
