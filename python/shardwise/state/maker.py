"""Tensors put with the ranks that share their state, and the arrays that each such group of ranks keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._dtypes import bytes_for
from .._text import digits_alike, shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..placing import Placing
from ..quantized import Components
from ..rules.search import REMEMBERED_PATHS
from ..shared_tiling import SharedTiling
from .asked import TrainingSetup
from .caches import Cache
from .described import ModelTensor, with_adapters
from .placed import PlacedTensors
from .recipe import KINDS, Local, StateShare, bytes_by_kind
from .result import Figures, StateRow, TrainingState
from .sharding_groups import DeviceShapes, ShardingGroups, TensorKind, merged
from .shardings import entries

__all__ = ["StateMaker"]

_NO_MESH = "its layout has no mesh; give it one, or take a layout map that has one"

#: Names of embeddings and output layers, which Muon leaves to AdamW, and which Megatron may tie between stages.
_VOCABULARY = re.compile(r"(?:^|[._])(?:embed\w*|lm_head|wte|wpe|word_embeddings|output_layer|head)(?:\.|$)")


class StateMaker:
    """Makes the state of tensors that are trained and sharded so; each goes to the groups of its devices."""

    def __init__(
        self,
        placing: Placing,
        tensors: list[ModelTensor],
        training: TrainingSetup,
        tied: Mapping[str, str],
        components: Components,
        uneven: UnevenRule,
    ) -> None:
        self._placed, self._tied = PlacedTensors(placing, components, uneven), tied
        self._placing, self._world = placing, self._placed.world
        self._recipe, self._shared, self._group_size = training.recipe, training.shared, training.group
        self._optimizer, self._frozen = training.recipe.optimizer, training.frozen
        self._units, self._lora = training.units, training.lora
        sharding = training.recipe.sharding
        self._tensors = tensors
        if training.lora is not None:
            leaders = {name: leader for name, (leader, _) in self._placed.followers.items()}
            logical = {name: tensor.shape for name, tensor in components.tensors.items()}
            self._tensors = with_adapters(tensors, training.lora, leaders, logical)
        names = {tensor.name for tensor in self._tensors} if tied else ()
        for name, main in tied.items():
            if name not in names or main not in names:
                lacking = main if name in names else name
                raise LayoutError(
                    f"tied[{shown(name)}] is {shown(main)}, and {shown(lacking)} is not among the tensors; give both, "
                    "or leave them out of tied"
                )
        self._over = self._placed.parallel_axes(sharding, training.over, self._tensors)
        if sharding not in ("none", "ddp", "megatron-ddp") and not self._over and self._world.size > 1:
            rows = ", or as over the last axis by which they cut rows" if sharding in ("fsdp2", "hsdp") else ""
            raise LayoutError(
                f"sharding is {shown(sharding)}, and the rules use every axis, so no axis is left for data "
                f"parallelism: give a mesh with one more axis, or the sharding none or ddp{rows}"
            )
        self._groups: dict[DeviceMesh, ShardingGroups] = {}
        self._cuts: dict[Any, DeviceShapes] = {}
        #: The axes by which a layout's devices hold a tensor, by the layout's axes and those of the groups.
        self._axes: dict[Any, tuple[Any, ...]] = {}
        #: The groups and kinds of tensors, by the identity of layouts; and kinds, each once.
        self._places: dict[Any, tuple[ShardingGroups, TensorKind]] = {}
        self._kinds: dict[Any, TensorKind] = {}
        self._kept: list[Any] = []
        self._is_blind = self._frozen is None and self._units is None and self._lora is None and self._shared is None
        self._is_blind = self._is_blind and not self._tied
        self._is_nameless = sharding != "megatron" and (self._optimizer is None or self._optimizer.name != "muon")
        self._index: dict[Any, int] | None = None
        self._unmatched: list[str] = []

    def state(self, caches: Iterable[Cache]) -> TrainingState:
        """Return the training state, with these caches."""
        self._place_all()
        for groups in self._groups.values():
            groups.divide(self._group_size)
            groups.sort()
        size = self._world.size
        figures = {kind: (np.zeros(size, np.int64), np.zeros(size, np.int64)) for kind in KINDS}
        rows = list(self._rows())
        for row in rows:
            for kind, held, allocated in row.sums:
                figures[kind][0][row.devices] += held
                figures[kind][1][row.devices] += allocated
        kept = [self._cache(cache) for cache in caches]
        for _, devices, held, allocated in kept:
            figures["caches"][0][devices] += held
            figures["caches"][1][devices] += allocated
        names = tuple(tensor.name for tensor in self._tensors)
        found = Figures(figures, rows, kept, names, tuple(self._unmatched))
        return TrainingState.of_figures(self._world, dict(self._placing.meshes), self._recipe, self._over, found)

    def _place_all(self) -> None:
        """Add each tensor to the sharding groups of the devices that hold it."""
        if not (self._is_blind and self._is_nameless) or self._placed.followers:
            for number, tensor in enumerate(self._tensors):
                self._place(number, tensor)
            return
        for numbers, (layout, own, _) in self._placed.alike(self._tensors):
            tensor, uneven = self._tensors[numbers[0]], own or self._placed.uneven
            if type(layout) is not TensorLayout:
                for number in numbers:
                    self._place(number, self._tensors[number])
                continue
            key = id(layout), uneven, "", tensor.look
            groups, kind = self._places.get(key) or self._placed_first(key, tensor, layout, uneven)
            groups.add(numbers, kind)

    def _place(self, number: int, tensor: ModelTensor) -> None:
        """Add a tensor to the sharding groups of the devices that hold it."""
        layout, uneven = self._placed.layout_of(tensor)
        # Names that differ in digits only look alike, unless an expression of the user's may tell them apart; and where
        # only the dtype counts, all do.
        name: str | bytes = tensor.name
        if self._is_blind:
            name = "" if self._is_nameless or ".experts." in tensor.name else digits_alike(tensor.name)
        key = id(layout), uneven, name, tensor.look
        found = self._places.get(key)
        if found is None:
            found = self._placed_first(key, tensor, layout, uneven)
        groups, kind = found
        if layout is None:
            self._unmatched.append(tensor.name)
        if self._tied and (main := self._tied.get(tensor.name)) is not None and self._is_there(main, groups):
            return
        groups.add([number], kind)

    def _placed_first(
        self, key: Any, tensor: ModelTensor, layout: TensorLayout | SharedTiling | None, uneven: UnevenRule
    ) -> tuple[ShardingGroups, TensorKind]:
        """Return what is kept for all tensors with this key, of which a tensor is the first."""
        groups, cut, looks = self._placed_anew(tensor, layout, uneven)
        kind = self._kinds.setdefault((id(cut), looks), TensorKind(cut, looks))
        if len(cut.shapes) > 1:
            groups.unlike[id(cut)] = cut
        if len(self._places) >= REMEMBERED_PATHS:
            self._places.clear()
            self._kept.clear()
        self._kept.append(layout)  # So that its number stays its own.
        self._places[key] = groups, kind
        return groups, kind

    def _placed_anew(
        self, tensor: ModelTensor, layout: TensorLayout | SharedTiling | None, uneven: UnevenRule
    ) -> tuple[ShardingGroups, DeviceShapes, tuple[Any, ...]]:
        if layout is None and not self._placing.is_whole_elsewhere:
            raise LayoutError(
                f"no rule matches the tensor {shown(tensor.name)}, and there is no default, so it is not known where "
                "it is: give it a rule, or the deployment default='replicated', so that all devices hold it"
            )
        try:
            if isinstance(layout, SharedTiling):
                groups, cut = self._of_tiling(layout)
            else:
                groups, axes = self._stripped(layout or TensorLayout((None,) * len(tensor.look.shape), self._world))
                cut = self._cut(groups.mesh, axes, tensor.look.shape, uneven)
        except ShardwiseError as error:
            raise type(error)(f"tensor {shown(tensor.name)}: {error}") from None
        unit = 0 if self._units is None else self._units(tensor.name)
        facts = self._is_trained(tensor), unit, self._is_matrix(tensor), self._is_apart(tensor, groups)
        return groups, cut, (tensor.look.bits, *facts)

    def _is_trained(self, tensor: ModelTensor) -> bool:
        if self._optimizer is None:
            return False
        if self._lora is not None:
            return tensor.follows is not None
        if self._frozen is not None and self._frozen.search(tensor.name):
            return False
        if not tensor.look.floating:
            raise LayoutError(
                f"tensor {shown(tensor.name)} is not of a dtype that is trained; freeze it with frozen, or train "
                "adapters with lora"
            )
        return True

    def _is_matrix(self, tensor: ModelTensor) -> bool:
        """Return whether Muon updates a tensor: it has two dims, and is not an embedding or output layer."""
        return len(tensor.look.shape) == 2 and _VOCABULARY.search(tensor.name) is None

    def _is_apart(self, tensor: ModelTensor, groups: ShardingGroups) -> bool:
        """Return whether Megatron has a bucket for this tensor alone: an embedding on several stages of a pipeline."""
        name = tensor.name
        if self._recipe.sharding != "megatron":
            return False
        if self._shared is not None:
            return self._shared.search(name) is not None
        if _VOCABULARY.search(name) is None:
            return False
        stages = dict(zip(groups.mesh.axis_names, groups.mesh.shape, strict=True)).get("pp", 1)
        is_tied = name in self._tied or name in self._tied.values()
        return stages > 1 or (
            is_tied and any("pp" in mesh.axis_names and mesh.axis_size("pp") > 1 for mesh in self._placed.meshes)
        )

    def _is_there(self, main: str, groups: ShardingGroups) -> bool:
        """Return whether a tensor to which another is tied is on all devices of groups; it may be on none of them."""
        tensor = next(one for one in self._tensors if one.name == main)
        layout, _ = self._placed.layout_of(tensor)
        if isinstance(layout, SharedTiling):
            layout = layout.layout
        mesh = self._world if layout is None else layout.device_mesh
        if mesh is None:
            raise LayoutError(f"tied: {shown(main)}: {_NO_MESH}")
        there, here = set(self._devices(mesh).tolist()), set(groups.rows.ravel().tolist())
        if here & there and not here <= there:
            raise LayoutError(
                f"tied: {shown(main)} is on some of the devices of the tensor that is tied to it, not on all; leave it "
                "out of tied to count both, each on its own devices"
            )
        return bool(here & there)

    def _groups_of(self, mesh: DeviceMesh) -> ShardingGroups:
        groups = self._groups.get(mesh)
        if groups is None:
            groups = self._groups[mesh] = ShardingGroups(len(self._groups), mesh, self._devices(mesh), self._over)
        return groups

    def _devices(self, mesh: DeviceMesh) -> npt.NDArray[np.int64]:
        """Return the numbers, among all devices, of a mesh's devices."""
        if mesh.has_default_devices and self._world.has_default_devices:
            return np.arange(mesh.size)
        if self._index is None:
            self._index = {label: at for at, label in enumerate(self._world.labels())}
        return np.array([self._index[label] for label in mesh.labels()], np.int64)

    def _stripped(self, layout: TensorLayout) -> tuple[ShardingGroups, tuple[Any, ...]]:
        """Return a layout's sharding groups, and its axes without those over which the state is sharded."""
        if layout.device_mesh is None:
            raise LayoutError(_NO_MESH)
        groups = self._groups_of(layout.device_mesh)
        key = layout.axes, groups.axes
        axes = self._axes.get(key)
        if axes is None:
            axes = layout.axes
            cut = {name.partition(":(")[0] for name in layout.named_axes()}
            if both := cut.intersection(groups.axes):
                axes = tuple(self._without(dim, spec, both) for dim, spec in enumerate(axes))
            self._axes[key] = axes
        return groups, axes

    def _without(self, dim: int, spec: Any, both: set[str]) -> Any:
        names = (spec,) if isinstance(spec, str) else spec or ()
        if isinstance(names, tuple):
            kept = tuple(name for name in names if name not in both)
            if len(kept) == len(names):
                return spec
            by_rows = self._recipe.sharding in ("fsdp2", "hsdp") and dim == 0 and names[: len(kept)] == kept
            if by_rows:
                return kept
        elif not any(name.partition(":(")[0] in both for name in TensorLayout((spec,)).named_axes()):
            return spec
        raise LayoutError(
            f"the rules cut dim {dim} over {', '.join(sorted(both))}, over which {self._recipe.sharding} would shard; "
            "give other axes as over, or sharding='none', with which only the rules cut"
        )

    def _cut(self, mesh: DeviceMesh, axes: tuple[Any, ...], shape: tuple[int, ...], uneven: UnevenRule) -> DeviceShapes:
        key = axes, mesh.shape, mesh.axis_names, shape, uneven
        found = self._cuts.get(key)
        if found is None:
            partition = TensorLayout(axes, mesh).partition(shape, uneven)
            shapes = tuple(partition.holder_shapes())
            if len(set(shapes)) == 1:
                shapes = shapes[:1]
            # XLA has the same room on every device.
            is_padded = self._recipe.sharding == "none" and uneven == "ceil" and len(shapes) > 1
            found = self._cuts[key] = DeviceShapes(shapes, partition.largest_shard_shape if is_padded else None)
        return found

    def _of_tiling(self, tiling: SharedTiling) -> tuple[ShardingGroups, DeviceShapes]:
        mesh = tiling.layout.device_mesh
        if mesh is None:
            raise LayoutError(_NO_MESH)
        groups = self._groups_of(mesh)
        cut = {name.partition(":(")[0] for name in tiling.layout.named_axes()}
        if cut.intersection(groups.axes):
            raise LayoutError(
                "its blocks are shared over the axes over which the state is sharded: give other axes as over, or "
                "sharding='none', with which only the rules cut"
            )
        return groups, DeviceShapes(tuple(tiling.holder_shapes()), None)

    def _rows(self) -> Iterable[StateRow]:
        """Yield the arrays of each group of ranks; equal groups are worked out once."""
        together: dict[bytes, list[tuple[ShardingGroups, int]]] = {}
        for groups in self._groups.values():
            if groups.numbers:
                for number, row in enumerate(groups.rows):
                    together.setdefault(row.tobytes(), []).append((groups, number))
        first = self._first_devices()
        orders: dict[Any, tuple[tuple[int, ...], Any]] = {}
        known: dict[Any, Any] = {}
        for same_devices in together.values():
            devices = same_devices[0][0].rows[same_devices[0][1]]
            is_first = first is None or bool(first[devices[0]])
            key = tuple((groups.number, groups.variants()[row]) for groups, row in same_devices), is_first
            if key not in orders:
                numbers, kinds, firsts = merged(same_devices)
                content = tuple(map(id, kinds)), firsts, len(devices), is_first
                if content not in known:
                    found = tuple(self._entries(self._locals(kinds, firsts), len(devices), is_first=is_first))
                    known[content] = found, bytes_by_kind(found)
                orders[key] = tuple(numbers), known[content]
            numbers, (found, sums) = orders[key]
            yield StateRow(devices, numbers, found, sums)

    def _entries(self, parts: Sequence[Local], ways: int, *, is_first: bool) -> Iterable[StateShare]:
        recipe = self._recipe
        if recipe.bucket is not None and not is_first:
            recipe = recipe._replace(bucket=None)
        return entries(recipe, parts, ways)

    def _locals(self, kinds: Sequence[TensorKind], firsts: tuple[int, ...]) -> list[Local]:
        """Return the parts in their order, each with the number of its place; Megatron's stacked experts one by one.

        Args:
            kinds: The kinds of the tensors.
            firsts: The place in the mesh of the part of each, or one for all.
        """
        is_megatron = self._recipe.sharding in ("megatron", "megatron-ddp")
        found: list[Local] = []
        for at, (kind, first) in enumerate(
            zip(kinds, firsts * len(kinds) if len(firsts) == 1 else firsts, strict=True)
        ):
            shape, count = kind.shape(first), 1
            bits, trained, unit, is_matrix, apart = kind.looks
            if is_megatron and len(shape) == 3:  # Only experts have weights of three dims there.
                count, shape = shape[0], shape[1:]
            found += [Local(at, shape, bits, trained, unit, is_matrix, apart, kind.cut.room)] * count
        return found

    def _first_devices(self) -> npt.NDArray[np.bool_] | None:
        """Return which devices are on the first stage of a pipeline; `None` without a pipeline."""
        for mesh in self._placed.meshes:
            if "pp" in mesh.axis_names:
                first = np.zeros(self._world.size, bool)
                at = mesh.coordinates()[:, mesh.axis_names.index("pp")] == 0
                first[self._devices(mesh)[at]] = True
                return first
        return None

    def _cache(self, cache: Cache) -> tuple[str, Any, Any, Any]:
        """Return the name of a cache, the devices that have it, and their bytes, held and allocated."""
        tensor = next((one for one in self._tensors if one.name == cache.follows), None)
        if tensor is None:
            raise LayoutError(
                f"the cache {shown(cache.name)} follows {shown(cache.follows)}, which is not among the tensors: give "
                "caches that follow some of these, as key_value_caches makes them"
            )
        layout, uneven = self._placed.layout_of(tensor)
        if not isinstance(layout, TensorLayout):
            layout = TensorLayout((None,) * len(tensor.look.shape), self._world)
        mesh = layout.device_mesh
        assert mesh is not None
        if cache.rows is None:
            rows: Any = np.ones(mesh.size, np.int64)
        else:
            partition = layout.partition(tensor.look.shape, uneven)
            start, stop = cache.rows
            rows = np.zeros(mesh.size, np.int64)
            for at, label in enumerate(mesh.labels()):
                for piece in partition.pieces(label):
                    box = piece.box[0]
                    rows[at] += max(min(box.stop, stop) - max(box.start, start), 0)
        devices = self._devices(mesh)
        return cache.name, devices, *(bytes_for(rows * each, cache.bits) for each in (cache.held, cache.allocated))
