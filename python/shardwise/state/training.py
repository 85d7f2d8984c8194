"""The training state of a model on the devices of a mesh or a deployment: what each device holds and allocates."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import integer, optional
from .._dtypes import bytes_for
from .._garbage import uncollected
from .._text import digits_alike, shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..placing import Layouts, Placing, placing_of
from ..quantized import Components
from ..quantized.forms import NO_COMPONENTS
from ..rules.layout_rule import checked_uneven
from ..rules.search import REMEMBERED_PATHS
from ..shared_tiling import SharedTiling
from .adapters import Lora
from .asked import TrainingSetup, pattern_of, recipe_of, units_of
from .caches import Cache
from .described import ModelTensor, described, with_adapters
from .homes import Home, HomeCut, TensorKind
from .optimizers import Optimizer, optimizer_of
from .placed import PlacedTensors
from .recipe import KINDS, Local, StateShare
from .result import Figures, StateRow, TrainingState
from .shardings import entries

__all__ = ["training_state"]

_NO_MESH = "its layout has no mesh; give it one, or take a layout map that has one"

#: Names of embeddings and output layers, which Muon leaves to AdamW, and which Megatron may tie between stages.
_VOCABULARY = re.compile(r"(?:^|[._])(?:embed\w*|lm_head|wte|wpe|word_embeddings|output_layer|head)(?:\.|$)")


def training_state(
    tensors: Mapping[str, Any],
    layouts: Layouts,
    optimizer: str | Mapping[str, Any] | Optimizer | None = None,
    sharding: str = "none",
    *,
    over: Sequence[str] | None = None,
    group: int | None = None,
    weights: Any = None,
    gradients: Any = None,
    masters: Any = None,
    frozen: str | None = None,
    lora: Lora | None = None,
    tied: Mapping[str, str] | None = None,
    units: str | Callable[[str], Hashable] | None = None,
    settings: Mapping[str, Any] | None = None,
    caches: Iterable[Cache] = (),
    quantized: Components | None = None,
    uneven: UnevenRule = "even",
) -> TrainingState:
    """Work out what each device holds and allocates of weights, gradients, masters, states of the optimizer and caches.

    Args:
        tensors: the shape and dtype of each tensor, by name, in the order of the model.
        layouts: a layout map with a mesh, a deployment, or layouts by name.
        optimizer: one of `OPTIMIZERS`, or dtypes by hand: `{"exp_avg": "float32"}`; without one nothing is trained.
        sharding: one of `SHARDINGS`.
        over: the axes of data parallelism, over which it shards. If not given: the axes by which a deployment's default
            cuts everything, else those that it says to be replicated; of a layout map those that no rule uses.
        group: the ranks that share a state, if these are not all along `over`: those of a group of HSDP or FSDP's
            `HYBRID_SHARD`, of an instance of Megatron's distributed optimizer.
        weights: the dtype of floating-point weights, instead of their own.
        gradients: the dtype of gradients; that of the weights if not given.
        masters: the dtype of master copies, or `"none"`; if not given what the framework does.
        frozen: a regular expression that is found in the names of what is not trained.
        lora: adapters to be trained; all else is then frozen.
        tied: names of tensors that are another tensor, by its name, wherever that is.
        units: what is flattened together, as a regular expression for the part of a name that they have in common, or a
            function of names: for FSDP1 the wrapped modules, by default up to the first number; for Megatron the chunks
            of a stage.
        settings: settings of the framework by its own names: `use_orig_params`, `round_robin_gradients`, `bucket_size`.
        caches: caches of keys and values; see `shardwise.state.key_value_caches`.
        quantized: the quantized weights among the tensors, as `shardwise.quantized.find_components` finds them: their
            components are cut as the rules say of the weights.
        uneven: how dims that do not divide are cut, unless the rules say so.

    Raises:
        LayoutError: if a name, a setting or a way to shard is not known; if a tensor has no place or does not fit; if a
            framework cannot do it.
        TypeError: if an argument is of the wrong type.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> rules = LayoutMap(DeviceMesh((4, 2), ("data", "model")))
    >>> rules["up"] = ("model", None)
    >>> found = training_state({"up": ((6, 3), "float32"), "norm": ((3,), "float32")}, rules, "adamw", "fsdp2")
    >>> found.allocated["weights"].tolist(), found.held["weights"].tolist()
    ([16, 16, 16, 16, 16, 16, 16, 16], [16, 16, 16, 16, 16, 16, 0, 0])
    >>> found.fullest
    ('cpu:0', 72)
    """
    with uncollected():
        known = None if optimizer is None else optimizer_of(optimizer)
        training = TrainingSetup(
            *recipe_of(sharding, known, gradients, masters, settings or {}),
            pattern_of("frozen", frozen), units_of(sharding, units), lora,
            None if group is None else integer("group", group), over,
        )  # fmt: skip
        components = optional("quantized", quantized, Components) or NO_COMPONENTS
        listed = described(tensors, weights)
        maker = _StateMaker(placing_of(layouts), listed, training, dict(tied or {}), components, checked_uneven(uneven))
        return maker.state(caches)


class _StateMaker:
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
        self._recipe, self._shared, self._group = training.recipe, training.shared, training.group
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
        self._homes: dict[DeviceMesh, Home] = {}
        self._cuts: dict[Any, HomeCut] = {}
        #: The axes by which a layout's devices hold a tensor, by the layout's axes and the home's.
        self._axes: dict[Any, tuple[Any, ...]] = {}
        #: The homes and kinds of tensors, by the identity of layouts; and kinds, each once.
        self._places: dict[Any, tuple[Home, TensorKind]] = {}
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
        for home in self._homes.values():
            home.grouped(self._group)
            home.sort()
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
        """Add each tensor to the home of the devices that hold it."""
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
            home, kind = self._places.get(key) or self._placed_first(key, tensor, layout, uneven)
            home.add(numbers, kind)

    def _place(self, number: int, tensor: ModelTensor) -> None:
        """Add a tensor to the home of the devices that hold it."""
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
        home, kind = found
        if layout is None:
            self._unmatched.append(tensor.name)
        if self._tied and (main := self._tied.get(tensor.name)) is not None and self._is_there(main, home):
            return
        home.add([number], kind)

    def _placed_first(
        self, key: Any, tensor: ModelTensor, layout: TensorLayout | SharedTiling | None, uneven: UnevenRule
    ) -> tuple[Home, TensorKind]:
        """Return what is kept for all tensors with this key, of which a tensor is the first."""
        home, cut, looks = self._placed_anew(tensor, layout, uneven)
        kind = self._kinds.setdefault((id(cut), looks), TensorKind(cut, looks))
        if len(cut.shapes) > 1:
            home.unlike[id(cut)] = cut
        if len(self._places) >= REMEMBERED_PATHS:
            self._places.clear()
            self._kept.clear()
        self._kept.append(layout)  # So that its number stays its own.
        self._places[key] = home, kind
        return home, kind

    def _placed_anew(
        self, tensor: ModelTensor, layout: TensorLayout | SharedTiling | None, uneven: UnevenRule
    ) -> tuple[Home, HomeCut, tuple[Any, ...]]:
        if layout is None and not self._placing.is_whole_elsewhere:
            raise LayoutError(
                f"no rule matches the tensor {shown(tensor.name)}, and there is no default, so it is not known where "
                "it is: give it a rule, or the deployment default='replicated', so that all devices hold it"
            )
        try:
            if isinstance(layout, SharedTiling):
                home, cut = self._of_tiling(layout)
            else:
                home, axes = self._stripped(layout or TensorLayout((None,) * len(tensor.look.shape), self._world))
                cut = self._cut(home.mesh, axes, tensor.look.shape, uneven)
        except ShardwiseError as error:
            raise type(error)(f"tensor {shown(tensor.name)}: {error}") from None
        unit = 0 if self._units is None else self._units(tensor.name)
        looks = tensor.look.bits, self._is_trained(tensor), unit, self._is_matrix(tensor), self._is_apart(tensor, home)
        return home, cut, looks

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

    def _is_apart(self, tensor: ModelTensor, home: Home) -> bool:
        """Return whether Megatron has a bucket for this tensor alone: an embedding on several stages of a pipeline."""
        name = tensor.name
        if self._recipe.sharding != "megatron":
            return False
        if self._shared is not None:
            return self._shared.search(name) is not None
        if _VOCABULARY.search(name) is None:
            return False
        stages = dict(zip(home.mesh.axis_names, home.mesh.shape, strict=True)).get("pp", 1)
        is_tied = name in self._tied or name in self._tied.values()
        return stages > 1 or (
            is_tied and any("pp" in mesh.axis_names and mesh.axis_size("pp") > 1 for mesh in self._placed.meshes)
        )

    def _is_there(self, main: str, home: Home) -> bool:
        """Return whether a tensor to which another is tied is on all devices of a home; it may be on none of them."""
        tensor = next(one for one in self._tensors if one.name == main)
        layout, _ = self._placed.layout_of(tensor)
        if isinstance(layout, SharedTiling):
            layout = layout.layout
        mesh = self._world if layout is None else layout.device_mesh
        if mesh is None:
            raise LayoutError(f"tied: {shown(main)}: {_NO_MESH}")
        there, here = set(self._devices(mesh).tolist()), set(home.rows.ravel().tolist())
        if here & there and not here <= there:
            raise LayoutError(
                f"tied: {shown(main)} is on some of the devices of the tensor that is tied to it, not on all; without "
                "tied both are counted wherever they are"
            )
        return bool(here & there)

    def _home(self, mesh: DeviceMesh) -> Home:
        home = self._homes.get(mesh)
        if home is None:
            home = self._homes[mesh] = Home(len(self._homes), mesh, self._devices(mesh), self._over)
        return home

    def _devices(self, mesh: DeviceMesh) -> npt.NDArray[np.int64]:
        """Return the numbers, among all devices, of a mesh's devices."""
        if mesh.has_default_devices and self._world.has_default_devices:
            return np.arange(mesh.size)
        if self._index is None:
            self._index = {label: at for at, label in enumerate(self._world.labels())}
        return np.array([self._index[label] for label in mesh.labels()], np.int64)

    def _stripped(self, layout: TensorLayout) -> tuple[Home, tuple[Any, ...]]:
        """Return the home of a layout, and the layout's axes without those over which the state is sharded."""
        if layout.device_mesh is None:
            raise LayoutError(_NO_MESH)
        home = self._home(layout.device_mesh)
        key = layout.axes, home.axes
        axes = self._axes.get(key)
        if axes is None:
            axes = layout.axes
            cut = {name.partition(":(")[0] for name in layout.named_axes()}
            if both := cut.intersection(home.axes):
                axes = tuple(self._without(dim, spec, both) for dim, spec in enumerate(axes))
            self._axes[key] = axes
        return home, axes

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

    def _cut(self, mesh: DeviceMesh, axes: tuple[Any, ...], shape: tuple[int, ...], uneven: UnevenRule) -> HomeCut:
        key = axes, mesh.shape, mesh.axis_names, shape, uneven
        found = self._cuts.get(key)
        if found is None:
            partition = TensorLayout(axes, mesh).partition(shape, uneven)
            shapes = tuple(partition.holder_shapes())
            if len(set(shapes)) == 1:
                shapes = shapes[:1]
            # XLA has the same room on every device.
            is_padded = self._recipe.sharding == "none" and uneven == "ceil" and len(shapes) > 1
            found = self._cuts[key] = HomeCut(shapes, partition.largest_shard_shape if is_padded else None)
        return found

    def _of_tiling(self, tiling: SharedTiling) -> tuple[Home, HomeCut]:
        mesh = tiling.layout.device_mesh
        if mesh is None:
            raise LayoutError(_NO_MESH)
        home = self._home(mesh)
        cut = {name.partition(":(")[0] for name in tiling.layout.named_axes()}
        if cut.intersection(home.axes):
            raise LayoutError(
                "its blocks are shared over the axes over which the state is sharded: give other axes as over, or "
                "sharding='none', with which only the rules cut"
            )
        return home, HomeCut(tuple(tiling.holder_shapes()), None)

    def _rows(self) -> Iterable[StateRow]:
        """Yield the arrays of each group of ranks; equal groups are worked out once."""
        together: dict[bytes, list[tuple[Home, int]]] = {}
        for home in self._homes.values():
            if home.numbers:
                for number, row in enumerate(home.rows):
                    together.setdefault(row.tobytes(), []).append((home, number))
        first = self._first_devices()
        orders: dict[Any, tuple[tuple[int, ...], Any]] = {}
        known: dict[Any, Any] = {}
        for homes in together.values():
            devices = homes[0][0].rows[homes[0][1]]
            is_first = first is None or bool(first[devices[0]])
            key = tuple((home.number, home.variants()[row]) for home, row in homes), is_first
            if key not in orders:
                numbers, kinds, firsts = _merged(homes)
                content = tuple(map(id, kinds)), firsts, len(devices), is_first
                if content not in known:
                    found = tuple(self._entries(self._locals(kinds, firsts), len(devices), is_first=is_first))
                    known[content] = found, _sums(found)
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


def _merged(homes: Sequence[tuple[Home, int]]) -> tuple[Sequence[int], Sequence[TensorKind], tuple[int, ...]]:
    """Return the numbers of the tensors of homes in order, their kinds, and the places as `_locals` takes them."""
    if len(homes) == 1:
        home, row = homes[0]
        return home.numbers, home.kinds, (home.first(row),)
    every = [(zip(home.numbers, home.kinds, strict=True), home.first(row)) for home, row in homes]
    merged = sorted(((number, kind, at) for pairs, at in every for number, kind in pairs), key=itemgetter(0))
    numbers, kinds, firsts = zip(*merged, strict=True)
    return numbers, kinds, firsts


def _sums(found: Iterable[StateShare]) -> tuple[Any, ...]:
    """Return the bytes of each kind."""
    sums: dict[str, list[Any]] = {}
    for entry in found:
        own = sums.setdefault(entry.kind, [0, 0])
        own[0] = own[0] + entry.held
        own[1] = own[1] + entry.allocated
    return tuple((kind, held, allocated) for kind, (held, allocated) in sums.items())
