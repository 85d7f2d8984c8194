"""PyTorch's dialect: device meshes, placements, and what every rank holds; all but the last functions need no PyTorch.

A placement says for each *mesh dim* what it does to the tensor: `Shard(dim)`, `Replicate()` or `Partial(op)`.
Placements take effect in mesh order, so a dim that is cut by several axes is cut by the first of the mesh first.
Another order needs `_StridedShard(dim, split_factor=…)`: later axes of the mesh, which come before this one in the
order, cut the dim into `split_factor` pieces, and this axis cuts each of them.

It can also express packed dims whose parts are equal segments: the axis cuts both of a fused gate and up projection.
And if the factor ends within a later axis, one sub-axis of that axis cuts before this axis, and one after it.

Placements cannot express the order of size-1 axes within a tuple, except for the first of them. A layout cannot
express `Partial` of another operation than the sum, or a `split_factor` that is no product of later axes and sub-axes.

Dims that do not divide are cut by `torch.chunk`, once per mesh axis: the uneven rule `"chunk"`. Where strided shards
meet dims that do not divide, PyTorch assigns some ranks different elements than `"chunk"` over the axis tuple would,
and sets that are not boxes; `local_shards` gives PyTorch's shards.

The rules are those of `torch/distributed/tensor/_utils.py` and `placement_types.py`; they are the same in PyTorch
2.10, 2.13 and 2.15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .._arguments import instance, sizes_of
from .._dtypes import find_dtype
from .._text import shown
from ..array.sharded import ShardedArray
from ..deploy.manifest import Manifest, ManifestTensor
from ..deploy.record import record as record_arrays
from ..deploy.recording import Recording
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..piece import Piece
from ..tiling import Tiling
from ._axes import checked_mesh
from ._local_shards import LocalShards, local_shards, merged_ranges, pieces_along
from ._placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    from_placements,
    mesh_of_layout,
    read_placements,
    to_placements,
)
from ._tensors import array_of_tensor, tensor_of_array

if TYPE_CHECKING:
    from ..rules.rewrites import Rewrites
    from ..store import StoredCheckpoint
    from ..store.data.location import Location
    from ._torch_reader import CheckpointReader

__all__ = [
    "LocalShards",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "from_local_tensors",
    "from_placements",
    "local_shards",
    "manifest_of",
    "mesh_from_torch",
    "mesh_to_torch",
    "read_placements",
    "record",
    "storage_reader",
    "to_local_tensors",
    "to_placements",
    "to_torch_placements",
]


def mesh_from_torch(mesh: Any) -> DeviceMesh:
    """Return the mesh of a `torch.distributed.DeviceMesh`, whose devices are then labelled `"cuda:5"`: type and rank.

    Raises:
        MeshError: if the mesh's dims have no names.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"mesh must be a DeviceMesh of PyTorch, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if not names:
        raise MeshError("mesh has no mesh_dim_names; the axes of a DeviceMesh have names")
    ranks = mesh.mesh
    return DeviceMesh(
        tuple(ranks.shape), tuple(names), [f"{mesh.device_type}:{rank}" for rank in ranks.flatten().tolist()]
    )


def mesh_to_torch(mesh: DeviceMesh, **options: Any) -> Any:
    """Return the `torch.distributed.DeviceMesh` of a mesh whose devices are labelled with their type and rank.

    Args:
        mesh: the mesh; labels such as `"cuda:5"`, of one type.
        options: further keyword arguments of PyTorch's `DeviceMesh`, which needs a process group, but not with
            `_init_backend=False, _rank=0`.

    Raises:
        MeshError: if a label is not a type and a rank, or the types differ.
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    device_type, ranks = _types_and_ranks(mesh)
    return TorchMesh(device_type, ranks.tolist(), mesh_dim_names=mesh.axis_names, **options)


def _types_and_ranks(mesh: DeviceMesh) -> tuple[str, npt.NDArray[np.int64]]:
    pairs = []
    for label in checked_mesh(mesh).labels():
        kind, _, rank = label.rpartition(":") if isinstance(label, str) else ("", "", "")
        if not kind or not (rank.isascii() and rank.isdigit()) or str(int(rank)) != rank:
            raise MeshError(f"mesh has the device {shown(label)}; PyTorch knows a type and a rank, as in 'cuda:5'")
        pairs.append((kind, int(rank)))
    kinds = sorted({kind for kind, _ in pairs})
    if len(kinds) > 1:
        raise MeshError(f"mesh has devices of the types {kinds}; a PyTorch mesh has one type")
    return kinds[0], np.array([rank for _, rank in pairs], np.int64).reshape(mesh.shape)


def to_torch_placements(placements: Iterable[Placement]) -> list[Any]:
    """Convert our placements to PyTorch's own."""
    from torch.distributed import tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    def made(placement: Placement) -> Any:
        if isinstance(placement, StridedShard):
            return _StridedShard(placement.dim, split_factor=placement.split_factor)
        if isinstance(placement, Shard):
            return tensor.Shard(placement.dim)
        return tensor.Partial(placement.reduce_op) if isinstance(placement, Partial) else tensor.Replicate()

    return [made(placement) for placement in placements]


def to_local_tensors(sharded: ShardedArray) -> list[Any]:
    """Return every rank's local tensor as a `torch.Tensor`, in device-index order.

    The tensors share the memory of the shards: nothing is copied. PyTorch has no read-only tensors: for a read-only
    shard it gives a tensor that must not be written to, and warns. With
    `to_torch_placements(to_placements(sharded.layout))` the tensors are what `DTensor.from_local` takes; give
    it the global shape and stride too, because it otherwise assumes that the tensors of all ranks are equally large.

    Raises:
        LayoutError: if PyTorch would give a rank different elements from the partition's.
        TypeError: if `sharded` is not a `ShardedArray`; if PyTorch has no such dtype, raised by PyTorch.
        ValueError: if a shard has strides that PyTorch does not have, negative ones or ones that are not a multiple of
            the item size, or has the other byte order; raised by PyTorch.
    """
    instance("sharded", sharded, ShardedArray)
    _check_torch_agrees(sharded)
    return [tensor_of_array(shard.data) for shard in sharded.shards]


def from_local_tensors(tensors: Sequence[Any], layout: TensorLayout, shape: Sequence[int]) -> ShardedArray:
    """Put every rank's local tensor, in device-index order, together as a `ShardedArray`.

    Args:
        tensors: one `torch.Tensor` per rank, in the memory of the CPU; they are shared, not copied.
        layout: the layout, over the mesh of the ranks.
        shape: the global shape.

    Raises:
        LayoutError: if the tensors do not fit the layout, or PyTorch gives a rank elements that are not a shard of it.
        ImportError: if the tensors are bfloat16 or float8, and ml_dtypes is not installed.
    """
    mesh_of_layout(layout)
    partition = layout.partition(shape, uneven="chunk")
    local = list(tensors)
    for i, tensor in enumerate(local):
        if not hasattr(tensor, "detach"):
            raise TypeError(f"tensors[{i}] must be a tensor of PyTorch, got {type(tensor).__name__}")
    sharded = ShardedArray(partition, [array_of_tensor(tensor) for tensor in local])
    _check_torch_agrees(sharded)
    return sharded


def _check_torch_agrees(sharded: ShardedArray) -> None:
    partition = sharded.partition
    placements = to_placements(sharded.layout)
    if sharded.layout.is_packed:
        _check_pieces_agree(sharded, placements)
        return
    boxes = partition.boxes()
    shards = local_shards(placements, partition.device_mesh, sharded.shape)
    same = np.all((boxes[:, :, 0] == shards.offsets) & (boxes[:, :, 1] - boxes[:, :, 0] == shards.shapes), axis=1)
    wrong = np.flatnonzero(~(same & shards.is_box))
    if len(wrong):
        i = int(wrong[0])
        device = partition.device_mesh.device(i)
        raise LayoutError(
            f"device {shown(device)} holds {partition.box(device)}, but PyTorch gives it different elements: a local "
            f"tensor of shape {tuple(shards.shapes[i].tolist())} that begins at {tuple(shards.offsets[i].tolist())}; "
            'uneven="chunk" is its rule for axes in mesh order'
        )


def _check_pieces_agree(sharded: ShardedArray, placements: list[Placement]) -> None:
    """Check that every rank of a packed partition holds along each dim what PyTorch gives it, in the same order."""
    partition, mesh = sharded.partition, sharded.partition.device_mesh
    along = [pieces_along(dim, size, placements, mesh) for dim, size in enumerate(sharded.shape)]
    for i, device in enumerate(partition.holders):
        theirs = [pieces[ids[i]] for ids, pieces in along]
        boxes = [piece.box for piece in partition.pieces(device)]
        ours = [merged_ranges(sorted({(box[dim].start, box[dim].stop) for box in boxes})) for dim in range(len(along))]
        is_empty = any(own == [] for own in theirs)
        if any(sum(stop - start for start, stop in own) == 0 for own in ours) != is_empty or (
            not is_empty and ours != theirs
        ):
            raise LayoutError(
                f"device {shown(device)} holds {shown(ours)} along the dims, but PyTorch gives it {shown(theirs)}; "
                'uneven="chunk" is its rule for axes in mesh order'
            )


def manifest_of(tensors: Mapping[str, Any], world: DeviceMesh | None = None) -> Manifest:
    """Say where the tensors of a running model are, as a manifest that other programs can read and plan with.

    Args:
        tensors: `DTensor`s and other tensors by name: `model.state_dict()`.
        world: the devices, each of which holds all tensors that are not `DTensor`s; by default all devices of the
            meshes of the `DTensor`s.

    Raises:
        LayoutError: if no tensor is a `DTensor` and `world` is not given; if a dtype is not known; if there are partial
            sums of another operation than the sum.
        MeshError: if a mesh has no `mesh_dim_names`.

    Any rank can make the manifest: it needs placements, shapes and dtypes, and no values.

    >>> manifest_of(model.state_dict()).save("trainer.json")  # doctest: +SKIP
    """
    instance("tensors", tensors, Mapping)  # type: ignore[type-abstract]
    meshes: dict[int, tuple[Any, DeviceMesh]] = {}
    kinds: dict[Any, TensorLayout | Tiling] = {}
    for tensor in tensors.values():
        if hasattr(tensor, "placements") and id(tensor.device_mesh) not in meshes:
            meshes[id(tensor.device_mesh)] = tensor.device_mesh, mesh_from_torch(tensor.device_mesh)
    if world is None and meshes:
        labels = dict.fromkeys(label for _, mesh in meshes.values() for label in mesh.labels())
        world = DeviceMesh((len(labels),), ("world",), list(labels))
    found = {}
    for name, tensor in tensors.items():
        shape, dtype = sizes_of(f"the shape of {shown(name)}", tuple(tensor.shape)), find_dtype(tensor.dtype)
        if dtype is None:
            raise LayoutError(f"tensor {shown(name)} has the dtype {shown(tensor.dtype)}, which is not known")
        if hasattr(tensor, "placements"):
            mesh = meshes[id(tensor.device_mesh)][1]
            key: Any = id(mesh), tuple(tensor.placements), shape
        else:
            if world is None:
                raise LayoutError(f"tensor {shown(name)} is not a DTensor, so it needs world, the devices that hold it")
            mesh, key = world, len(shape)
        if key not in kinds:
            placements = getattr(tensor, "placements", None)
            try:
                kinds[key] = (
                    TensorLayout([None] * len(shape), mesh) if placements is None else _held(placements, mesh, shape)
                )
            except LayoutError as error:
                raise LayoutError(f"tensor {shown(name)}: {error}") from None
        found[name] = ManifestTensor(shape, dtype.name, kinds[key], "chunk")
    return Manifest(found)


def record(
    tensors: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], Any],
    holder: Any = 0,
    *,
    computed: Literal["refuse", "leave"] = "refuse",
) -> Recording:
    """Find the layout of a process's parameters by its own loader, as `shardwise.record`, with tensors of PyTorch.

    Args:
        tensors: shape and dtype of each tensor by name, or tensors, also on the device `"meta"`.
        load: gets a mapping of names to tensors on the CPU, and gives back the process's parameters; an engine's
            `load_weights` takes its `items()`.
        holder: the label of the process in the manifest.
        computed: what to do with parameters whose values are computed from elements, as for `shardwise.record`.

    Raises:
        LayoutError, TypeError: as `shardwise.record`.

    >>> def load(tensors):
    ...     model.load_weights(tensors.items())
    ...     return model.named_parameters()
    >>> record(shapes, load, "rank 0")  # doctest: +SKIP
    """
    return record_arrays(tensors, load, holder, computed=computed, make=_numbered)


def _numbered(numbers: npt.NDArray[np.int64], dtype: str) -> Any:
    import torch

    return torch.from_numpy(numbers).to(getattr(torch, dtype))


def storage_reader(
    checkpoint: str | os.PathLike[str] | Location | StoredCheckpoint,
    *,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    cast: bool = False,
) -> CheckpointReader:
    """Return a reader with which `torch.distributed.checkpoint.load` reads a checkpoint of any format.

    Args:
        checkpoint: the path of a checkpoint, as `open_checkpoint` takes it, which every rank opens when it loads; or an
            open checkpoint, which stays open.
        rename: regular expressions and what replaces their matches in names, as `reshard_checkpoint` takes them.
        rewrites: tensors that are named, packed, stacked or transposed differently, after `rename`.
        model: the prefix of parameters' names in the state dict, `"model."` for `{"model": …}`; if given, it replaces
            the prefix of weights' names in the checkpoint.
        optimizer: the prefix of the names of the optimizer's states, `"optim."` for `{"optim": …}`. If given, the
            states are called as in the state dict of `torch.distributed.checkpoint.state_dict`, whatever the checkpoint
            calls
            them: `optim.state.NAME.exp_avg`, and the values of groups `optim.param_groups.0.lr` and
            `optim.param_groups.NAME.lr`.
        cast: whether to round tensors to the dtypes of the state dict; otherwise another dtype is an error.

    Raises:
        LayoutError: if `rename` has something other than regular expressions and replacements.
        TypeError: if an argument is of the wrong type.

    Each rank reads the boxes that it holds, and no other bytes, into the memory of its tensors. `DTensor`s may have any
    placements except partial sums, which PyTorch refuses. Strided shards that are not boxes get the right elements;
    PyTorch's own readers fill them with others. Values that are not tensors are numbers, texts, lists and dicts:
    nothing in a file is run. The errors of `load` name the tensor. If the checkpoint lacks a field of a group, that is
    an error, unless the planner is `DefaultLoadPlanner(allow_partial_load=True)`.

    >>> state = {"model": model.state_dict()}  # doctest: +SKIP
    >>> reader = storage_reader("model.safetensors", model="model.")  # doctest: +SKIP
    >>> torch.distributed.checkpoint.load(state, storage_reader=reader)  # doctest: +SKIP
    """
    from torch.distributed.checkpoint import StorageReader

    from ._torch_reader import CheckpointReader

    StorageReader.register(CheckpointReader)
    return CheckpointReader(checkpoint, rename=rename, rewrites=rewrites, model=model, optimizer=optimizer, cast=cast)


def _held(placements: Iterable[Any], mesh: DeviceMesh, shape: tuple[int, ...]) -> TensorLayout | Tiling:
    """Return PyTorch's shards: as a layout with the uneven rule `"chunk"`, or as boxes where no layout gives them."""
    read = read_placements(placements, mesh, len(shape))
    if not any(isinstance(one, StridedShard) for one in read):
        return from_placements(read, mesh, len(shape))
    if any(isinstance(one, Partial) for one in read):
        raise LayoutError(f"placements {shown(read)} have partial sums and strided shards, which no layout expresses")
    shards = local_shards(read, mesh, shape)
    try:
        layout = from_placements(read, mesh, len(shape))
        partition = layout.partition(shape, "chunk")
    except LayoutError:
        pass
    else:
        stops = shards.offsets + shards.shapes
        boxes = partition.boxes() if not partition.is_packed else None
        if boxes is not None and shards.is_box.all() and np.array_equal(boxes, np.stack([shards.offsets, stops], 2)):
            return layout
    along = [pieces_along(dim, size, read, mesh) for dim, size in enumerate(shape)]
    held, arrays = {}, {}
    for rank, label in enumerate(mesh.labels()):
        ranges = [pieces[ids[rank]] for ids, pieces in along]
        starts = [np.cumsum([0, *(stop - start for start, stop in own)]).tolist() for own in ranges]
        arrays[label] = tuple(begins[-1] for begins in starts)
        held[label] = [
            Piece(tuple(slice(*ranges[dim][at]) for dim, at in enumerate(index)),
                  tuple(starts[dim][at] for dim, at in enumerate(index)))
            for index in np.ndindex(*map(len, ranges))
        ]  # fmt: skip
    return Tiling.from_boxes(shape, held, replicas=True, arrays=arrays)
