"""Deployments: one world of devices, meshes that are views of it, and rules that give each tensor its place."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from .._arguments import check_items, checked_axes, integer, sizes_of
from .._drawn import Drawn
from .._fork import importing
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..placing import Placed
from ..rules.book import RuleBook, note_origin, warned_of_models
from ..rules.layout_rule import LayoutRule, checked_uneven
from ..rules.search import MatchMode, checked_match
from .lookup import RuleLookup
from .numbers import Number, checked_numbers
from .rule import At, DeploymentRule, checked_at, default_rule, deployment_rule
from .world import WORLD, holds, mesh_in_world, named_meshes, world_of

if TYPE_CHECKING:
    import os

    from ..layout import UnevenRule
    from ..partition import Partition
    from ..rules.numbers import Config
    from ..rules.report_maker import ReportedRules
    from ..show.picture import Picture
    from ..state.result import TrainingState
    from .manifest import Manifest
    from .parameters import FusedParameter, LocalParameter

__all__ = ["Deployment"]


class Deployment(RuleBook, Drawn):
    r"""A model on the devices of a trainer or of an engine: which part of each tensor is where.

    Args:
        world: all devices: their number, their labels, or a mesh of them.
        meshes: meshes of these devices by name, or one mesh. A mesh without labels of its own has those of the world,
            in their order. The mesh `"world"` is always there: all devices along one axis of this name.
        rules: `DeploymentRule`s, or the axes of layouts, under regular expressions that are searched for in the names
            of tensors, as in a `LayoutMap`. `{i}` in a key is a field: a whole number, the same as `(?P<i>[0-9]+)`.
        numbers: whole numbers, lists of them, and lists of lists, which rules name in `at`.
        default: what applies to tensors of any rank that no rule matches: `"replicated"`, on every device of the world;
            or a rule for the tensors' leading dims.
        parameters: those parameters of an engine that hold several tensors; see `parameters_of`.
        match: where in a name a rule has to match; see `LayoutMap`.
        replicated: names of axes along which everything is replicated on purpose, such as data parallelism: reports do
            not warn that no rule uses them.
        at: further coordinates, such as the stage of a layer, by regular expressions searched for in names, for
            axes along which the rule of a name gives none. At most one expression may match a name.

    Raises:
        MeshError: if a mesh has a device that is not in the world.
        LayoutError: if a rule names a mesh, an axis or a number that does not exist.
        TypeError: if an argument is of the wrong type.

    A tensor is held by those devices of its rule's mesh whose coordinates are as `at` says; the others hold nothing of
    it. Over its holders the tensor has an ordinary layout; its mesh is the rule's mesh at these coordinates only,
    with the same axes. So functions that only read a `LayoutMap`, such as `plan_model`, take a deployment too.

    Deployments are immutable, hashable, picklable and comparable.

    >>> from shardwise import DeviceMesh
    >>> trainer = Deployment(
    ...     8,
    ...     {"dense": DeviceMesh((2, 2, 2), ("pp", "dp", "tp")), "expert": DeviceMesh((2, 4), ("pp", "ep"))},
    ...     {
    ...         r"layers\.{i}\.attention": DeploymentRule(("tp", None), "dense", {"pp": "stage[i]"}),
    ...         r"layers\.{i}\.experts\.{e}\.": DeploymentRule(
    ...             (None, None), "expert", {"pp": "stage[i]", "ep": "e // 2"}
    ...         ),
    ...         "embedding": DeploymentRule(("tp", None), "dense", {"pp": [0, 1]}),
    ...     },
    ...     numbers={"stage": [0, 0, 1]},
    ... )
    >>> trainer.partition("layers.2.attention", (8, 4)).holders
    ('cpu:4', 'cpu:5', 'cpu:6', 'cpu:7')
    >>> trainer.partition("layers.0.experts.5.up", (8, 4)).holders
    ('cpu:2',)
    """

    __slots__ = (
        "__weakref__", "_at", "_default", "_key", "_lookup", "_match", "_meshes", "_models", "_notes", "_numbers",
        "_parameters", "_prefix", "_replicated", "_rules", "_world",
    )  # fmt: skip

    def __init__(
        self,
        world: int | Sequence[Hashable] | DeviceMesh,
        meshes: Mapping[str, DeviceMesh] | DeviceMesh,
        rules: Mapping[str, DeploymentRule | Sequence[Any]],
        *,
        numbers: Mapping[str, Number | Sequence[Any]] | None = None,
        default: DeploymentRule | Sequence[Any] | str | None = None,
        parameters: Sequence[FusedParameter] = (),
        match: MatchMode = "search",
        replicated: Sequence[str] = (),
        at: Mapping[str, Mapping[str, At]] | None = None,
    ) -> None:
        self._world = world_of(world)
        self._meshes = {name: mesh_in_world(self._world, name, mesh) for name, mesh in named_meshes(meshes).items()}
        self._numbers = checked_numbers(numbers)
        self._match: MatchMode = checked_match(match)
        if not isinstance(rules, Mapping):
            raise TypeError(f"rules must be a mapping from regular expressions to rules, got {shown(rules)}")
        self._rules = {key: deployment_rule(f"rule {shown(key)}", value) for key, value in rules.items()}
        self._default = None if default is None else default_rule(default)
        if isinstance(parameters, (str, bytes)) or not isinstance(parameters, Sequence):
            raise TypeError(f"parameters must be a sequence of FusedParameters, got {shown(parameters)}")
        self._parameters = tuple(parameters)
        if self._parameters:
            with importing:
                from .parameters import FusedParameter

            check_items("parameters", self._parameters, FusedParameter)
        self._replicated = checked_axes("replicated", replicated)
        self._at = checked_at(at)
        self._models: tuple[str, ...] = ()
        self._prefix = ""
        #: Warnings about the file that the deployment was read from.
        self._notes: tuple[str, ...] = ()
        self._lookup = RuleLookup(
            self._rules, self._default, {WORLD: self._world, **self._meshes}, self._numbers, match, self._at
        )
        given = tuple(self._meshes.items()), tuple(self._rules.items()), frozenset(self._numbers.items())
        places = tuple((key, tuple(where.items())) for key, where in self._at.items())
        self._key = self._world, *given, self._default, self._parameters, match, self._replicated, places

    @property
    def world(self) -> DeviceMesh:
        """All devices, along one axis."""
        return self._world

    @property
    def devices(self) -> tuple[Any, ...]:
        """The labels of all devices."""
        return self._world.labels()

    @property
    def meshes(self) -> dict[str, DeviceMesh]:
        """The meshes by name; `world` is not among them."""
        return dict(self._meshes)

    def rules(self) -> dict[str, DeploymentRule]:
        """Return all rules by their keys."""
        return dict(self._rules)

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers and lists by name."""
        return dict(self._numbers)

    @property
    def default(self) -> DeploymentRule | None:
        """The default: the rule for tensors that no other rule matches."""
        default: DeploymentRule | None = self._default
        return default

    @property
    def parameters(self) -> tuple[FusedParameter, ...]:
        """The parameters that hold several tensors."""
        return self._parameters

    @property
    def places(self) -> dict[str, dict[str, At]]:
        """The coordinates that the deployment gives by patterns of names, besides its rules."""
        return {key: dict(where) for key, where in self._at.items()}

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a name; a look-up refuses more than one."""
        return self._lookup.matching(path)

    def at(self, path: str) -> dict[str, tuple[int, ...]]:
        """Return the coordinates of a tensor along the axes for which its rule gives some.

        Raises:
            LayoutError: if several rules match, or a coordinate cannot be worked out; the message names the tensor.

        >>> from shardwise import DeviceMesh
        >>> mesh = DeviceMesh((2, 2), ("pp", "tp"))
        >>> Deployment(4, mesh, {"h.{i}": DeploymentRule(("tp",), at={"pp": "i // 3"})}).at("h.4.bias")
        {'pp': (1,)}
        """
        found = self._lookup.place(path)
        return {} if found is None else {axis: at for (axis, _), at in zip(found.ready.rule.at, found.at, strict=True)}

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this rank: layout, uneven rule, and whether blocks are shared.

        Raises:
            LayoutError: as `layout_of`.

        >>> from shardwise import DeviceMesh
        >>> engine = Deployment(2, DeviceMesh((2,), ("tp",)), {"w": DeploymentRule(("tp",), uneven="ceil")})
        >>> engine.placed("w", 1).uneven, engine.placed("v", 1)
        ('ceil', Placed(layout=None, uneven=None, shared=False))
        """
        return self._lookup.placed(path, rank)

    def placed_alike(self, paths: Sequence[str], rank: int) -> Iterator[tuple[Placed, Sequence[int]]]:
        """Yield the places of names that differ in digits only, each with the positions of its names."""
        return self._lookup.placed_alike(paths, rank)

    def layout_of(self, path: str, rank: int) -> TensorLayout | None:
        """Look up the layout of a tensor of this rank, over the devices that hold it.

        `None` if no rule matches and there is no default.

        Raises:
            LayoutError: if several rules match the name, or the layout has another rank; if a coordinate cannot be
                worked out.

        >>> from shardwise import DeviceMesh
        >>> mesh = DeviceMesh((2, 2), ("pp", "tp"))
        >>> Deployment(4, mesh, {"head": DeploymentRule(("tp", None), at={"pp": 1})}).layout_of("head.weight", 2)
        TensorLayout(('tp', None), DeviceMesh((1, 2), ('pp', 'tp'), devices=['cpu:2', 'cpu:3']))
        """
        return self._lookup.layout_of(path, integer("rank", rank))

    @property
    def is_whole_elsewhere(self) -> bool:
        """True if there is a default; without one, a tensor that no rule matches is on no device."""
        return self._default is not None

    def partition(self, path: str, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Return the partition of a tensor over the devices that hold it.

        Args:
            path: its name.
            shape: the tensor's elements along each dim.
            uneven: how dims that do not divide are cut, unless the rule says so.

        Raises:
            LayoutError: if no rule matches and there is no default; if several match; if the layout does not fit.
        """
        sizes = sizes_of("shape", shape)
        layout = self.layout_of(path, len(sizes))
        if layout is None:
            raise LayoutError(f"no rule matches the tensor {shown(path)}, and there is no default")
        try:
            return layout.partition(sizes, self.uneven_of(path) or checked_uneven(uneven))
        except LayoutError as error:
            raise LayoutError(f"tensor {shown(path)}: {error}") from None

    def _applied(self, path: str) -> LayoutRule | None:
        found = self._lookup.place(path)
        return None if found is None else found.ready.placed

    def _reported(self) -> ReportedRules:
        return self._lookup.reported(self._replicated, self._notes, self._prefix)

    @classmethod
    def from_toml(
        cls,
        file: str | os.PathLike[str] | TextIO,
        *,
        config: Config | None = None,
        world: Sequence[Hashable] | DeviceMesh | None = None,
    ) -> Deployment:
        r"""Make the deployment that a rules file describes; the page `docs/deployments.md` has the format.

        Args:
            file: the path of the file, the name of one of the package's (`example_rules`), or an open text file.
            config: the model's configuration, for the file's `[numbers]`: the path of a `config.json` or of its folder,
                or its contents.
            world: labels of the devices, instead of those that the file gives.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type.
            LayoutError: if a rule names what does not exist, or a number is missing.
            MeshError: if a mesh does not fit the world.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file states the types of its models, and the configuration has another type.

        >>> import io
        >>> stages = Deployment.from_toml(io.StringIO(r'''
        ... [lists]
        ... stage = { stages = [1, 2] }
        ... [meshes]
        ... dense = { shape = [2, 4], axis_names = ["pp", "tp"] }
        ... [rules]
        ... 'h\.{i}\.' = { axes = ["tp", []], at = { pp = "stage[i]" } }
        ... '''))
        >>> stages.partition("h.2.w", (8, 4)).holders
        ('cpu:4', 'cpu:5', 'cpu:6', 'cpu:7')
        """
        with importing:
            from ..rules.toml import read_document, read_models
            from ..rules.toml_tables import errors_at
            from .toml import read_deployment

        document: Any = read_document(file)
        arguments, keywords = read_deployment(document, config, world)
        with errors_at(document.source):
            made = cls(*arguments, **keywords)
        models = read_models(document)
        note_origin(made, models, notes=warned_of_models(models, config, document.source))
        return made

    def to_toml(self, file: str | os.PathLike[str] | TextIO) -> None:
        r"""Write the deployment as a rules file, from which `from_toml` makes an equal one.

        Args:
            file: the path of the file, which is replaced as a whole or not at all, or an open text file.

        Raises:
            LayoutError: if a label is neither string nor 64-bit integer, a number has more than 64 bits, or there are
                more than 2**20 devices.
            OSError: if the file cannot be written.

        Numbers, lists and coordinates are written as they are, not as the presets made them. A number that neither a
        rule nor a parameter names is left out; lists never are.

        >>> import sys
        >>> from shardwise import DeviceMesh
        >>> mesh = DeviceMesh((2, 2), ("pp", "tp"))
        >>> stages = {r"h\.{i}\.": DeploymentRule(("tp", None), at={"pp": "stage[i]"})}
        >>> Deployment([f"gpu:{i}" for i in range(4)], mesh, stages, numbers={"stage": [0, 1, 1]}).to_toml(sys.stdout)
        match = "search"
        <BLANKLINE>
        [lists]
        stage = [0, 1, 1]
        <BLANKLINE>
        [world]
        size = 4
        label = "gpu:{}"
        <BLANKLINE>
        [meshes]
        mesh = { shape = [2, 2], axis_names = ["pp", "tp"] }
        <BLANKLINE>
        [rules]
        'h\.{i}\.' = { axes = ["tp", []], at = { pp = "stage[i]" } }
        """
        with importing:
            from .toml import write_deployment

        write_deployment(file, self)

    def held_by(self, device: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even") -> dict[str, Partition]:
        """Return the partitions of those tensors of which a device holds a part.

        Args:
            device: its label.
            tensors: the shape of each tensor, or its shape and dtype, or anything that has these.
            uneven: how dims that do not divide are cut, unless the rule says so.

        Raises:
            MeshError: if the world has no such device.
            LayoutError: as `partition`, for any of the tensors.

        >>> from shardwise import DeviceMesh
        >>> stages = Deployment(2, DeviceMesh((2,), ("pp",)), {"h.{i}": DeploymentRule((None,), at={"pp": "i"})})
        >>> stages.held_by("cpu:1", {"h.0": (4,), "h.1": (4,)})["h.1"].holder_shape("cpu:1")
        (4,)
        """
        with importing:
            from .parameters import shapes_of

        self._world.index_of_label(device)
        found = {}
        for name, shape in shapes_of(tensors).items():
            partition = self.partition(name, shape, uneven)
            if holds(partition.device_mesh, device):
                found[name] = partition
        return found

    def parameters_of(
        self, device: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even"
    ) -> list[LocalParameter]:
        """Return the parameters that a device holds: their shapes, and the boxes of tensors in each.

        Args:
            device: its label.
            tensors: the shape of each tensor, or its shape and dtype, or anything that has these.
            uneven: how dims that do not divide are cut, unless the rule says so.

        Raises:
            MeshError: if the world has no such device.
            LayoutError: as `partition`; if tensors of one parameter do not fit together, or some of them are missing.

        A tensor that is in none of `parameters` is a parameter of its own.

        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy.parameters import FusedParameter
        >>> fused = FusedParameter("qkv", ("q", "k", "v"))
        >>> engine = Deployment(2, DeviceMesh((2,), ("tp",)), {"q|k|v": ("tp", None)}, parameters=[fused])
        >>> (qkv,) = engine.parameters_of("cpu:1", {"q": (4, 2), "k": (2, 2), "v": (2, 2)})
        >>> qkv.shape
        (4, 2)
        >>> qkv.pieces[1]
        ParameterPiece(tensor='k', box=(slice(1, 2, None), slice(0, 2, None)), start=(2, 0))
        """
        with importing:
            from .parameters import HeldPart, local_parameters, shapes_of

        self._world.index_of_label(device)
        held = {}
        for name, shape in shapes_of(tensors).items():
            partition, found = self.partition(name, shape, uneven), self._lookup.place(name)
            assert found is not None
            entries = zip(found.ready.rule.at, found.at, found.ready.at, strict=True)
            at = {axis: (places, fields) for (axis, _), places, (_, _, fields) in entries}
            held[name] = HeldPart(partition, found.ready.mesh, at, holds(partition.device_mesh, device))
        return local_parameters(self._parameters, device, held, self._numbers)

    def state(
        self,
        tensors: Mapping[str, Any],
        optimizer: str | Mapping[str, Any] | None = None,
        sharding: str = "none",
        **given: Any,
    ) -> TrainingState:
        """Work out what each device holds and allocates of a training state: weights, gradients, masters, moments.

        Args:
            tensors: the shape and dtype of each tensor, in the order of the model.
            optimizer: the optimizer's name, or the dtypes of its arrays by name; `None` if nothing is trained.
            sharding: the way in which data-parallel ranks share the state.
            given: the further arguments of `shardwise.state.training_state`.

        Raises:
            LayoutError: as `training_state`.

        >>> from shardwise import DeviceMesh
        >>> mesh = DeviceMesh((2, 2), ("dp", "tp"))
        >>> trainer = Deployment(4, mesh, {"up": ("tp", None)}, replicated=["dp"])
        >>> state = trainer.state({"up": ((6, 4), "bfloat16")}, "adamw", "zero1")
        >>> {kind: sizes.tolist() for kind, sizes in state.allocated.items()}
        {'weights': [24, 24, 24, 24], 'gradients': [12, 12, 12, 12], 'masters': [24, 24, 24, 24], \
'optimizer': [52, 52, 52, 52]}
        """
        with importing:
            from ..state.training import training_state

        return training_state(tensors, self, optimizer, sharding, **given)

    def manifest(
        self, tensors: Mapping[str, Any], uneven: UnevenRule = "even", digests: Mapping[str, str] | None = None
    ) -> Manifest:
        """Return where each of these tensors is, as data that can be written as JSON.

        Args:
            tensors: the shape and the dtype of each tensor, as `plan_model` takes them.
            uneven: how dims that do not divide are cut, unless the rule says so.
            digests: a digest of each tensor that has one, such as the numbers of `shardwise.store.tensor_digests` as
                text.

        Raises:
            LayoutError: as `partition`, for any of the tensors; if a dtype is not known.
        """
        with importing:
            from .manifest import manifest_of

        return manifest_of(self, tensors, uneven, digests)

    def _picture(self) -> Picture:
        with importing:
            from .drawn import deployment_picture

        return deployment_picture(self, self._lookup.ready())

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Deployment) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        world = self._world.size if self._world.has_default_devices else list(self._world.labels())
        given: dict[str, Any] = {"numbers": self._numbers, "default": self._default}
        given |= {"parameters": list(self._parameters), "replicated": self._replicated}
        given["at"] = self._at
        more = [f"{name}={value!r}" for name, value in given.items() if value]
        if self._match != "search":
            more.append(f"match={self._match!r}")
        return f"Deployment({', '.join([repr(world), repr(self._meshes), repr(self._rules), *more])})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"numbers": self._numbers, "default": self._default, "parameters": self._parameters}
        options |= {"match": self._match, "replicated": self._replicated, "at": self._at}
        made = partial(Deployment, **options), (self._world, self._meshes, self._rules)
        return *made, (None, {"_models": self._models, "_notes": self._notes, "_prefix": self._prefix})
