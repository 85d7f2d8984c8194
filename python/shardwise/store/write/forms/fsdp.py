"""FSDP2's folders of ranks, as verl writes them: for each rank a file of the model, of the optimizer, and of the rest.

Cut tensors are DTensors on a mesh of all ranks, so `torch.load` needs a process group of that many processes. Other
tensors, such as the steps of an optimizer, are plain tensors in the files of all ranks. The optimizer's parameters have
numbers in the order of its groups, as `load_state_dict` takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...._text import shown
from ....errors import LayoutError
from ....layout import Spec
from ....mesh import DeviceMesh
from ....packed import PackedDim, part
from ....partition import Partition
from .dcp import rebuilt
from .files import CutTensor, slots_by_file
from .nested import Nested, tree_names
from .pickles import Again, Call, Global, New, Once, Persistent, Varying, VaryingPickle
from .plain_values import Reference
from .rank_files import FileRanks
from .slots import BoxPool, OwnedBoxes, SlotTable
from .torch_file import RANK_LIST, TorchPart

__all__ = ["CONFIG", "DEVICES", "FsdpFiles", "fsdp_files"]

#: The file that says how many ranks there are.
CONFIG = "fsdp_config.json"
#: The device types that a DTensor's mesh may have in a file.
DEVICES = ("cpu", "cuda")
#: The beginnings of the names of files, by the number of a file's kind: model, optimizer, the rest.
_KINDS = ("model", "optim", "extra_state")

_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT = Global("torch.distributed._mesh_layout", "_MeshLayout")
_AXIS = Global("torch.distributed._mesh_layout", "_FlatLayout")
_SHARD = Global("torch.distributed.tensor.placement_types", "Shard")
_REPLICATE = Global("torch.distributed.tensor.placement_types", "Replicate")
_SPEC = "torch.distributed.tensor._dtensor_spec"
_DTENSOR = Global("torch.distributed.tensor", "DTensor")


class FsdpFiles(NamedTuple):
    """The files of a folder.

    Attributes:
        files: The files of the ranks.
        values: The pickles, and the lists of ranks, that are stored as values after the tensors.
        beside: Further files, by name.
    """

    files: list[TorchPart]
    values: list[Any]
    beside: dict[str, bytes]


class _FileTree(NamedTuple):
    """The nested dict of the files of one kind, and the positions of the tensors in it."""

    kind: int
    tree: Any
    tensors: list[int]


def fsdp_files(
    nested: Nested,
    wanted: Sequence[CutTensor],
    aliases: Mapping[str, str],
    ranks: FileRanks,
    value: Callable[[str, bytes], Any],
    device: str,
) -> FsdpFiles:
    """Return the files of all ranks.

    Args:
        nested: The nested dict of the tensors.
        wanted: The tensors.
        aliases: Further names of tensors.
        ranks: The ranks of the mesh, in its order.
        value: Makes a value of a name and its bytes, to be written after the tensors.
        device: The kind of the mesh's devices.

    Raises:
        LayoutError: if a tensor is cut in a way that DTensors of FSDP2 are not, or there are several optimizers.
    """
    world = len(ranks.labels)
    numbers = {tensor.name: number for number, tensor in enumerate(wanted)}
    numbers |= {alias: numbers[name] for alias, name in aliases.items()}
    trees = [
        _FileTree(kind, tree, sorted({numbers[name] for name in tree_names(tree)})) for kind, tree in _trees(nested)
    ]
    placed = {number: _placements(wanted[number]) for tree in trees for number in tree.tensors}
    pool = BoxPool()
    known_cuts: dict[Any, OwnedBoxes] = {}  # Many tensors are cut alike.
    cuts: list[OwnedBoxes] = []
    order: list[int] = []
    for tree in trees:
        for number in tree.tensors:
            partition, shape = wanted[number].partition, wanted[number].shape
            mesh = None if partition is None else partition.device_mesh
            key = tree.kind, partition if placed[number] else (shape, mesh)
            if key not in known_cuts:
                held = pool.arrays(partition if placed[number] else None, shape, ranks.numbers(mesh))
                if len(held.devices) != world:
                    raise LayoutError(f"tensor {shown(wanted[number].name)} is cut into several boxes on a rank")
                known_cuts[key] = held._replace(ordinals=np.full_like(held.ordinals, tree.kind))
            cuts.append(known_cuts[key])
            order.append(number)
    values: list[Any] = []
    listed = np.arange(world, dtype="<i4").tobytes()
    shapes = {
        number: np.array(wanted[number].partition.holder_shapes(), np.int64)  # type: ignore[union-attr]
        for number, placements in placed.items()
        if placements
    }
    # Ranks with parts of the same sizes have pickles that differ in a few numbers.
    known: dict[tuple[int, bytes], tuple[_RankPickle, VaryingPickle]] = {}
    sizes = {tree.kind: _sizes_by_rank(wanted, tree.tensors, shapes, ranks) for tree in trees}
    for rank in range(world):
        for tree in trees:
            alike = tree.kind, sizes[tree.kind][rank].tobytes()
            if alike not in known:
                maker = _RankPickle(wanted, numbers, placed, shapes, rank, device, ranks)
                known[alike] = maker, VaryingPickle(maker.with_tensors(tree.tree))
            maker, template = known[alike]
            text = template.pickled(maker.varying(rank, f"{len(wanted) + len(values)}"))
            for name, data in ((RANK_LIST, listed), ("pickle", text)):
                if name == RANK_LIST and not maker.has_mesh(tree.tensors):
                    continue
                made = value(f"{_KINDS[tree.kind]}.{rank}.{name}", data)
                held = pool.arrays(None, made.shape, np.array([rank], np.int64))
                cuts.append(held._replace(ordinals=np.full_like(held.ordinals, tree.kind)))
                order.append(len(wanted) + len(values))
                values.append(made)
    keys = [(rank, tree.kind) for rank in range(world) for tree in trees]
    everything = [*wanted, *values]
    table = SlotTable.of(pool.coordinates, everything, has_arrays=True)
    files = [
        TorchPart(f"{_KINDS[kind]}_world_size_{world}_rank_{rank}.pt", slots, everything)
        for (rank, kind), slots in slots_by_file(keys, cuts, order, table).items()
    ]
    config = json.dumps({"FSDP_version": 2, "world_size": world}, indent=4).encode()
    return FsdpFiles(files, values, {CONFIG: config})


def _trees(nested: Nested) -> Iterator[tuple[int, Any]]:
    """Yield the number of each kind of file, and the nested dict that its files hold."""
    tree = nested.tree
    optimizer = tree.get("optimizer")
    if not nested.has_optimizer:
        yield 0, tree
        return
    if isinstance(optimizer, list):
        raise LayoutError(
            f"there are {len(optimizer)} optimizers, and a folder of ranks has one; drop leaves out the others, or dcp "
            "holds all"
        )
    rest = {key: value for key, value in tree.items() if key not in ("model", "optimizer")}
    yield 0, tree["model"]
    yield 1, optimizer
    yield 2, {"lr_scheduler": None, **rest}  # verl asks for it, and takes nothing for no schedule.


def _placements(tensor: CutTensor) -> tuple[int | None, ...]:
    """Return, for each axis of the mesh, the dim that it cuts; an empty tuple if the tensor is not cut.

    Raises:
        LayoutError: if FSDP2's DTensors cannot be cut in this way.
    """
    partition = tensor.partition
    if partition is None or partition.total_shards == 1:
        return ()
    axes = partition.device_mesh.axis_names
    found: list[int | None] = [None] * len(axes)
    specs = partition.layout.axes if isinstance(partition, Partition) else None
    for dim, spec in enumerate(specs or ()):
        names, uneven = _axes_of(spec, tensor.shape[dim])
        is_ceil = (uneven or partition.uneven) == "ceil"  # type: ignore[union-attr]
        places = [axes.index(name) if name in axes else -1 for name in names]
        even = tensor.shape[dim] % math.prod(partition.device_mesh.shape[at] for at in places) == 0
        if -1 in places or places != sorted(places) or not (even or (len(places) == 1 and is_ceil)):
            specs = None
            break
        for at in places:
            found[at] = dim
    if specs is None:
        raise LayoutError(
            f"tensor {shown(tensor.name)} is cut in a way that a DTensor cannot be: each axis of the mesh must cut one "
            'dim, into even parts or with uneven = "ceil"; default = { axes = ["fsdp"], uneven = "ceil" } is FSDP2\'s'
        )
    return tuple(found)


def _axes_of(spec: Spec, size: int) -> tuple[tuple[str, ...], str | None]:
    """Return the axes that cut a dim of this size, and the dim's own uneven rule.

    A dim of several parts gets the axis `""`, which no mesh has, so that it is refused.
    """
    if not isinstance(spec, PackedDim):
        return (spec if isinstance(spec, tuple) else () if spec is None else (spec,)), None
    # States that are averages over a dim have the rule of the others in it.
    first = spec.parts[0]
    is_whole = spec.parts == (part(size, axes=first.axes, uneven=first.uneven),)
    return (first.axes if is_whole else ("",)), first.uneven


def _sizes_by_rank(
    wanted: Sequence[CutTensor], tensors: Sequence[int], shapes: Mapping[int, Any], ranks: FileRanks
) -> npt.NDArray[np.int64]:
    """Return the shapes of each rank's parts of the cut tensors, flattened: a row for each rank."""
    orders: dict[DeviceMesh, npt.NDArray[np.int64]] = {}
    found = [np.zeros((len(ranks.labels), 0), np.int64)]
    for number in tensors:
        if number in shapes:
            mesh = wanted[number].partition.device_mesh  # type: ignore[union-attr]
            if mesh not in orders:
                orders[mesh] = np.argsort(ranks.numbers(mesh))
            found.append(shapes[number][orders[mesh]])
    return np.concatenate(found, axis=1)


class _RankPickle:
    """The values in the pickle of one rank's file."""

    def __init__(
        self,
        wanted: Sequence[CutTensor],
        numbers: Mapping[str, int],
        placed: Mapping[int, tuple[int | None, ...]],
        shapes: Mapping[int, Any],
        rank: int,
        device: str,
        ranks: FileRanks,
    ) -> None:
        self._wanted, self._numbers, self._placed, self._shapes = wanted, numbers, placed, shapes
        self._rank, self._device, self._ranks = rank, device, ranks
        self._meshes: dict[DeviceMesh, Once] = {}
        self._places: dict[DeviceMesh, int] = {}
        self._specs: dict[Any, tuple[Again, Again]] = {}

    def varying(self, rank: int, ranks_key: str) -> dict[str, int | str]:
        """Return the values in the pickle that differ between ranks whose parts have the same shapes."""
        found: dict[str, int | str] = {"rank": rank, "ranks": ranks_key}
        for number, mesh in enumerate(self._meshes):
            at = int(np.flatnonzero(self._ranks.numbers(mesh) == rank)[0])
            found |= {f"{number}.{axis}": value for axis, value in enumerate(mesh.coordinate(at))}
        return found

    def _place(self, mesh: DeviceMesh) -> int:
        """Return the position of this rank's device in a mesh."""
        if mesh not in self._places:
            self._places[mesh] = int(np.flatnonzero(self._ranks.numbers(mesh) == self._rank)[0])
        return self._places[mesh]

    def has_mesh(self, tensors: Sequence[int]) -> bool:
        """Return whether one of these tensors is cut."""
        return any(self._placed[number] for number in tensors)

    def with_tensors(self, tree: Any) -> Any:
        """Return a tree with the tensors as the pickle has them in place of the references."""
        if isinstance(tree, Reference):
            number = self._numbers[tree.name]
            tensor = self._wanted[number]
            if not self._placed[number]:
                return rebuilt(tensor.dtype, tuple(tensor.shape), f"{number}")
            return self._dtensor(number, tensor)
        if isinstance(tree, (Call, Global)):
            return tree
        if isinstance(tree, dict):
            return {key: self.with_tensors(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self.with_tensors, tree))
        return tree

    def _dtensor(self, number: int, tensor: CutTensor) -> Call:
        partition, placements = tensor.partition, self._placed[number]
        assert partition is not None
        mesh = partition.device_mesh
        at = self._place(mesh)
        local = rebuilt(tensor.dtype, tuple(self._shapes[number][at].tolist()), f"{number}")
        # Most tensors have the dtype and shape of others, and are cut as they are.
        key = mesh, placements, tensor.dtype.name, tuple(tensor.shape)
        if key not in self._specs:
            self._specs[key] = self._spec(*key, at)
        args, spec = self._specs[key]
        state = {"_local_tensor": local, "_spec": spec}
        wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
        return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (wrapper, _DTENSOR, args, (None, state)))

    def _spec(
        self, mesh: DeviceMesh, placements: tuple[int | None, ...], of: str, size: tuple[int, ...], at: int
    ) -> tuple[Again, Again]:
        """Return the arguments by which a DTensor of a dtype and a shape is made, and its spec."""
        dtype, strides = Global("torch", of), _strides(size)
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        device = Call(Global("torch", "device"), (self._device,))
        meta = Call(Global(_SPEC, "TensorMeta"), (Call(Global("torch", "Size"), (size,)), strides, dtype))
        cutting: dict[int, list[int]] = {}
        for axis, dim in enumerate(placements):
            if dim is not None:
                cutting.setdefault(dim, []).append(axis)
        spec = {
            "mesh": self._mesh_once(mesh, at),
            "placements": tuple(
                New(_REPLICATE, {}) if dim is None else New(_SHARD, {"dim": dim}) for dim in placements
            ),
            "tensor_meta": meta,
            "shard_order": tuple(
                Call(Global(_SPEC, "ShardOrderEntry"), (dim, tuple(axes))) for dim, axes in sorted(cutting.items())
            ),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        args = (_DTENSOR, dtype, size, strides, 0, layout, device, False)
        return Again(args), Again(New(Global(_SPEC, "DTensorSpec"), spec))

    def _mesh_once(self, mesh: DeviceMesh, at: int) -> Once:
        """Return the mesh as a value that is pickled once: all tensors of a file share it."""
        if mesh not in self._meshes:
            self._meshes[mesh] = Once(self._mesh(mesh, at))
        return self._meshes[mesh]

    def _mesh(self, mesh: DeviceMesh, at: int) -> New:
        steps = _strides(mesh.shape)
        axes = tuple(
            New(_AXIS, {"shape": (size,), "stride": (step,)}) for size, step in zip(mesh.shape, steps, strict=True)
        )
        world = len(self._ranks.labels)
        storage = Persistent(("storage", Global("torch", "IntStorage"), Varying("ranks", ""), "cpu", world))
        hooks = Call(Global("collections", "OrderedDict"), ())
        listed = Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, (world,), (1,), False, hooks))
        state: dict[str, Any] = {
            "_device_type": self._device,
            "_layout": New(_LAYOUT, {"axes": axes}),
            "_rank_map": listed,
            "_mesh_dim_names": tuple(mesh.axis_names),
            "_root_mesh": None,
            "_preserve_rank_order": False,
            "_flatten_rank_map": tuple(range(world)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_rank": Varying("rank", self._rank),
            "_coordinate_on_dim": tuple(
                Varying(f"{len(self._meshes)}.{axis}", value) for axis, value in enumerate(mesh.coordinate(at))
            ),
            "_hash": None,
        }
        if len(mesh.shape) == 1:  # The group of all processes; those of several axes have numbers as they were made.
            state["_dim_group_names"] = ["0"]
        return New(_MESH, state)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
