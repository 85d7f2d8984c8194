"""PyTorch's dialect: device meshes, placements, and what every rank holds; all but the last functions need no PyTorch.

A placement says for each *mesh dim* what it does to the tensor: `Shard(dim)`, `Replicate()` or `Partial(op)`.
Placements take effect in mesh order, so a dim that is cut by several axes is cut by the first of the mesh first.
Another order needs `_StridedShard(dim, split_factor=…)`: the axis cuts each of the `split_factor` pieces into which
later axes of the mesh, which come before it in the order, will have cut the dim.

It can also express packed dims whose parts are equal stretches: of a fused gate and up projection, the axis cuts two.
And if the factor lies within a later axis, that axis cuts with one of its sub-axes before and one after.

Placements cannot express the order of size-1 axes within a tuple, except for the first of them. A layout cannot
express `Partial` of another operation than the sum, nor a `split_factor` at which no sub-axes of later axes end.

Dims that do not divide are cut by `torch.chunk`, once per mesh axis: the uneven rule `"chunk"`. Where strided shards
meet dims that do not divide, PyTorch assigns some ranks different elements than `"chunk"` over the axis tuple
would, and sets that are not boxes; `local_shards` gives what it does.

The rules are those of `torch/distributed/tensor/_utils.py` and `placement_types.py`; they are the same in PyTorch
2.10, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import INTEGER, array_like, check_fields, instance, int64_array, refuse_mask, sizes_of
from .._dtypes import find_dtype
from .._frozen import frozen
from .._strided import Ranges, strided_pieces
from .._text import shown
from ..array.sharded import ShardedArray
from ..deploy.manifest import Manifest, ManifestTensor
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..piece import Piece
from ..sub_axis import is_sub_axis
from ..tiling import Tiling
from ._axes import checked_layout, checked_mesh, checked_rank
from ._strides import Cut, cut_of, read_factors, spec_of, split_factors
from ._tensors import array_of_tensor, tensor_of_array

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
    "to_local_tensors",
    "to_placements",
    "to_torch_placements",
]


@dataclass(frozen=True)
class Shard:
    """The mesh dim cuts the tensor dim `dim`."""

    dim: int

    def __post_init__(self) -> None:
        check_fields(self, dim=INTEGER)


@dataclass(frozen=True)
class StridedShard:
    """The mesh dim cuts each of `split_factor` pieces of the tensor dim `dim`: PyTorch's `_StridedShard`."""

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        check_fields(self, dim=INTEGER, split_factor=INTEGER)


@dataclass(frozen=True)
class Replicate:
    """The mesh dim replicates."""


@dataclass(frozen=True)
class Partial:
    """The mesh dim holds values still to be reduced by `reduce_op`."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        check_fields(self, reduce_op=Hashable)


Placement: TypeAlias = Shard | StridedShard | Replicate | Partial


def to_placements(layout: TensorLayout) -> list[Placement]:
    """Give one placement per mesh dim.

    Raises:
        LayoutError: if the layout has no mesh, names sub-axes that do not make up whole axes, has a packed dim that is
            not of equal stretches cut alike, or cuts a dim by several axes of size 1 in an order that is not the
            mesh's.

    A packed dim of equal stretches is a `_StridedShard` whose split factor is their number; placements do not keep
    the names and sizes of its parts.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> to_placements(TensorLayout(("dp", None), mesh))
    [Shard(dim=0), Replicate()]
    >>> to_placements(TensorLayout((("tp", "dp"), None), mesh))
    [StridedShard(dim=0, split_factor=2), Shard(dim=0)]
    >>> from shardwise import packed
    >>> to_placements(TensorLayout((packed.gate_up("tp"), "dp"), mesh))
    [Shard(dim=1), StridedShard(dim=0, split_factor=2)]
    """
    mesh = _mesh_of(layout)
    for name in layout.unreduced:
        if is_sub_axis(name, mesh.axis_names):
            raise LayoutError(f"unreduced names the sub-axis {name!r}; PyTorch has whole axes only")
    placements: dict[str, Placement] = {name: Partial() for name in layout.unreduced}
    cuts = [cut_of(dim, spec, mesh) for dim, spec in enumerate(layout.axes)]
    for dim, cut in enumerate(cuts):
        for name, factor in split_factors(dim, cut, mesh).items():
            placements[name] = Shard(dim) if factor is None else StridedShard(dim, factor)
    result = [placements.get(name, Replicate()) for name in mesh.axis_names]
    back = _cuts_of(result, mesh, layout.rank)
    if back != cuts:
        raise LayoutError(
            f"placements cannot say in which order axes of size 1 cut a dim: {shown(layout.axes)} would become "
            f"{shown(from_placements(result, mesh, layout.rank).axes)}"
        )
    return result


def _mesh_of(layout: TensorLayout) -> DeviceMesh:
    mesh = instance("layout", layout, TensorLayout).device_mesh
    # Without one, the check raises.
    return checked_layout(layout)[1] if mesh is None else mesh


def from_placements(placements: Iterable[Any], mesh: DeviceMesh, rank: int) -> TensorLayout:
    """Read placements, ours or PyTorch's, as a layout over `mesh`.

    Args:
        placements: one per axis of the mesh.
        mesh: the mesh; see `mesh_from_torch`.
        rank: the number of dims.

    Raises:
        LayoutError: if a placement is one that a layout cannot express, or for a dim that does not exist.
        TypeError: if an entry is not a placement.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> from_placements([StridedShard(0, split_factor=2), Shard(0)], mesh, rank=2).axes
    (('tp', 'dp'), None)
    >>> from_placements([Replicate(), StridedShard(0, split_factor=3)], mesh, rank=2).axes
    (packed.parse('(3 n@tp)'), None)
    >>> from_placements([Replicate(), Partial("max")], mesh, rank=2)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: placements[1] is Partial(reduce_op='max'); unreduced axes of a layout are sums
    """
    checked_mesh(mesh)
    read = read_placements(placements, mesh, rank)
    unreduced = []
    for i, (name, placement) in enumerate(zip(mesh.axis_names, read, strict=True)):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise LayoutError(f"placements[{i}] is {placement}; unreduced axes of a layout are sums")
            unreduced.append(name)
    specs = []
    for dim, cut in enumerate(_cuts_of(read, mesh, rank)):
        if cut is None:
            own = [one for one in read if isinstance(one, (Shard, StridedShard)) and one.dim == dim]
            raise LayoutError(
                f"placements {shown(own)} cut dim {dim} over {shown(mesh)}: a split_factor is not a product of axes "
                "and sub-axes that cut it, with equal stretches around all of them, so no layout expresses it"
            )
        specs.append(spec_of(cut))
    return TensorLayout(specs, mesh, unreduced=unreduced)


def _cuts_of(placements: list[Placement], mesh: DeviceMesh, rank: int) -> list[Cut | None]:
    """The axes that cut each dim; `None` where no layout can express it."""
    cuts: list[list[tuple[str, int | None]]] = [[] for _ in range(rank)]
    for name, placement in zip(mesh.axis_names, placements, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            factor = placement.split_factor if isinstance(placement, StridedShard) else None
            cuts[placement.dim].append((name, factor))
    return [read_factors(own, mesh) for own in cuts]


def read_placements(placements: Iterable[Any], mesh: DeviceMesh, rank: int) -> list[Placement]:
    """Read placements, ours or PyTorch's, as ours, with dims from 0 to `rank - 1`.

    Raises:
        LayoutError: if there is not one per axis of the mesh, or one is for a dim that does not exist, or of a
            kind that is not supported here.
        TypeError: if an entry is not a placement.

    >>> read_placements([Shard(-1)], DeviceMesh((4,), ("x",)), rank=2)
    [Shard(dim=1)]
    """
    dims = checked_rank(rank)
    read = [_read(i, placement, dims) for i, placement in enumerate(placements)]
    if len(read) != checked_mesh(mesh).ndim:
        raise LayoutError(
            f"placements has {len(read)} entries, but the mesh has the {mesh.ndim} axes {shown(mesh.axis_names)}"
        )
    return read


def _read(i: int, placement: Any, rank: int) -> Placement:
    # By name: PyTorch's classes without importing PyTorch; its subclasses of Partial are other operations.
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(placement.reduce_op)
    if kind not in ("Shard", "StridedShard", "_StridedShard"):
        message = f"placements[{i}] must be a Shard, a Replicate, a Partial or a _StridedShard, got {shown(placement)}"
        # PyTorch has further kinds, such as MaskPartial, all of one base.
        known = any(base.__name__ == "Placement" for base in type(placement).__mro__)
        raise LayoutError(message) if known else TypeError(message)
    dim = _integer(i, placement, "dim")
    if not -rank <= dim < rank:
        raise LayoutError(f"placements[{i}] is {shown(placement)}, but the tensor has {rank} dims")
    dim += rank * (dim < 0)
    if kind == "Shard":
        return Shard(dim)
    split_factor = _integer(i, placement, "split_factor")
    if split_factor < 1:
        raise LayoutError(f"placements[{i}] is {shown(placement)}; a split_factor is at least 1")
    return StridedShard(dim, split_factor)


def _integer(i: int, placement: Any, name: str) -> int:
    # Other classes are called Shard too, such as that of a sharded array.
    value = getattr(placement, name, None)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"placements[{i}] must have an integer {name}, got {shown(placement)}")
    return int(value)


class _Columns(NamedTuple):
    shapes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    is_box: npt.NDArray[np.bool_]


class LocalShards(_Columns):
    """The shards of every rank, in device-index order: read-only arrays, by name or as a tuple of three.

    Attributes:
        shapes: The shape of each rank's local tensor: int64 (ranks, dims).
        offsets: Where it begins in the global tensor; for an empty shard, along the dim that empties it, the dim's
            size: int64 (ranks, dims).
        is_box: Whether it is a box of the global tensor: bool (ranks,). Strided shards may not be; one without
            elements is.
    """

    __slots__ = ()

    def __new__(cls, shapes: Any, offsets: Any, is_box: Any) -> LocalShards:
        """Copy what is given."""
        refuse_mask("is_box", is_box)
        boxes = np.asarray(array_like("is_box", is_box))
        if boxes.dtype != np.bool_ and boxes.size:
            raise TypeError(f"is_box must be an array of flags, got dtype {boxes.dtype}")
        columns = (int64_array("shapes", shapes), int64_array("offsets", offsets), boxes.astype(np.bool_))
        return super().__new__(cls, *map(frozen, columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LocalShards):
            return NotImplemented
        return all(map(np.array_equal, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple((column.shape, column.tobytes()) for column in self))

    def __repr__(self) -> str:
        columns = (f"{name}={column.tolist()}" for name, column in zip(self._fields, self, strict=True))
        return f"LocalShards({', '.join(columns)})"


def local_shards(placements: Iterable[Any], mesh: DeviceMesh, shape: Sequence[int]) -> LocalShards:
    """Say what every rank holds of a tensor of `shape`, without a process group.

    Args:
        placements: one per axis of the mesh, ours or PyTorch's.
        mesh: the mesh.
        shape: the global shape; dims that do not divide are cut as `torch.chunk` does.

    Returns:
        What `compute_local_shape_and_global_offset` gives on each rank. The cost does not grow with the elements.

    Raises:
        LayoutError: if placements, mesh and shape do not fit together.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> shards = local_shards([StridedShard(0, split_factor=2), Shard(0)], mesh, (15, 5))
    >>> shards.shapes[:, 0].tolist()
    [2, 2, 2, 2, 2, 2, 2, 1]
    >>> shards.offsets[:, 0].tolist()
    [0, 8, 2, 10, 4, 12, 6, 14]
    """
    checked_mesh(mesh)
    sizes = tuple(shape)
    read = read_placements(placements, mesh, len(sizes))
    strided = {placement.dim for placement in read if isinstance(placement, StridedShard)}
    plain: list[list[str]] = [[] for _ in sizes]
    for name, placement in zip(mesh.axis_names, read, strict=True):
        if isinstance(placement, Shard) and placement.dim not in strided:
            plain[placement.dim].append(name)
    boxes = TensorLayout(plain, mesh).partition(sizes, uneven="chunk").boxes()
    shards = _Columns(boxes[:, :, 1] - boxes[:, :, 0], boxes[:, :, 0], np.ones(mesh.size, np.bool_))
    for dim in strided:
        _cut_strided(dim, int(sizes[dim]), read, mesh, shards)
    if strided:
        # Dim by dim: numpy is slow at `any` along short rows.
        for column in shards.shapes.T:
            shards.is_box[:] |= column == 0
    return LocalShards(*shards)


def _cut_strided(dim: int, size: int, placements: list[Placement], mesh: DeviceMesh, shards: _Columns) -> None:
    """Write into `shards` what every rank holds along a dim that strided shards cut."""
    ids, pieces = _pieces_along(dim, size, placements, mesh)
    shards.shapes[:, dim] = np.array([sum(stop - start for start, stop in piece) for piece in pieces])[ids]
    shards.offsets[:, dim] = np.array([piece[0][0] if piece else size for piece in pieces])[ids]
    shards.is_box[:] &= np.array([len(piece) <= 1 for piece in pieces])[ids]


def _pieces_along(
    dim: int, size: int, placements: list[Placement], mesh: DeviceMesh
) -> tuple[npt.NDArray[np.int64], list[Ranges]]:
    """The chunks into which PyTorch cuts a dim, and which of these every rank holds."""
    coordinates = mesh.coordinates()
    ids = np.zeros(mesh.size, np.int64)
    cuts: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim:
            ids = ids * mesh.shape[axis] + coordinates[:, axis]
            cuts.append((mesh.shape[axis], placement.split_factor if isinstance(placement, StridedShard) else 1))
    return ids, strided_pieces(size, cuts)


def mesh_from_torch(mesh: Any) -> DeviceMesh:
    """Give the mesh of a `torch.distributed.DeviceMesh`, whose devices are then labelled `"cuda:5"`: type and rank.

    Raises:
        MeshError: if its dims have no names.
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
    """Give the `torch.distributed.DeviceMesh` of a mesh whose devices are labelled with their type and rank.

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
    """Make PyTorch's own placements of ours."""
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
    """Give every rank's local tensor as a `torch.Tensor`, in device-index order.

    The tensors share the memory of the shards: nothing is copied. PyTorch has no read-only tensors: for a read-only
    shard it gives a tensor that must not be written to, and warns. With
    `to_torch_placements(to_placements(sharded.layout))` the tensors are what `DTensor.from_local` takes; it assumes
    that every rank's tensor is as large as its own unless it is given the global shape and stride.

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
    _mesh_of(layout)
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
            f"device {shown(device)} holds {partition.box(device)}, where PyTorch gives it different elements: a local "
            f"tensor of shape {tuple(shards.shapes[i].tolist())} that begins at {tuple(shards.offsets[i].tolist())}; "
            'uneven="chunk" is its rule for axes in mesh order'
        )


def _check_pieces_agree(sharded: ShardedArray, placements: list[Placement]) -> None:
    """Check that every rank of a packed partition holds along each dim what PyTorch gives it, in the same order."""
    partition, mesh = sharded.partition, sharded.partition.device_mesh
    along = [_pieces_along(dim, size, placements, mesh) for dim, size in enumerate(sharded.shape)]
    for i, device in enumerate(partition.holders):
        theirs = [pieces[ids[i]] for ids, pieces in along]
        boxes = [piece.box for piece in partition.pieces(device)]
        ours = [_joined(sorted({(box[dim].start, box[dim].stop) for box in boxes})) for dim in range(len(along))]
        is_empty = any(own == [] for own in theirs)
        if any(sum(stop - start for start, stop in own) == 0 for own in ours) != is_empty or (
            not is_empty and ours != theirs
        ):
            raise LayoutError(
                f"device {shown(device)} holds {shown(ours)} along the dims, where PyTorch gives it {shown(theirs)}; "
                'uneven="chunk" is its rule for axes in mesh order'
            )


def _joined(ranges: Ranges) -> Ranges:
    """Ascending ranges, with those that touch as one."""
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def manifest_of(tensors: Mapping[str, Any], world: DeviceMesh | None = None) -> Manifest:
    """Say where the tensors of a running model are, as a manifest that other programs can read and plan with.

    Args:
        tensors: `DTensor`s and other tensors by name: `model.state_dict()`.
        world: the devices that hold tensors that are no `DTensor`s, each all of them; by default all devices of the
            others' meshes.

    Raises:
        LayoutError: if no tensor is a `DTensor`, and `world` is not given; if a dtype is not known; if there are
            partial sums of another operation than the sum.
        MeshError: if a mesh has no `mesh_dim_names`.

    Any rank can make it: it asks for placements, shapes and dtypes, and for no values.

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
                raise LayoutError(f"tensor {shown(name)} is no DTensor, and world is not given, which would hold it")
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
    along = [_pieces_along(dim, size, read, mesh) for dim, size in enumerate(shape)]
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
