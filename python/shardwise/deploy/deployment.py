"""Deployments: one world of devices, meshes that are views of it, and rules that give each tensor its place."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from .._arguments import check_items, checked_axes, instance, integer, optional, sizes_of
from .._drawn import Drawn
from .._dtypes import find_dtype
from .._fork import importing
from .._text import shown
from ..errors import LayoutError, MeshError, ShardwiseError, ShardwiseWarning
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..placing import NOT_PLACED, Placed
from ..rules.layout_rule import REPLICATED, LayoutRule, checked_uneven
from ..rules.pattern import FieldSearch
from ..rules.search import MATCH_MODES, REMEMBERED_PATHS, MatchMode, Rule, RuleSearch, checked_path, compiled_rule
from .manifest import Manifest, ManifestTensor
from .numbers import Number, checked_numbers
from .parameters import FusedParameter, Held, LocalParameter, local_parameters
from .rule import Coordinates, DeploymentRule, tells_digits_apart, with_fields
from .world import WORLD, named_meshes, view_of, world_of

if TYPE_CHECKING:
    import os
    import re

    from ..layout import UnevenRule
    from ..partition import Partition
    from ..rules.numbers import Config
    from ..rules.report import LayoutReport
    from ..rules.report_maker import Followers, Names, Used
    from ..show.picture import Picture
    from ..state.result import TrainingState

__all__ = ["Deployment", "shapes_of"]

#: Every digit as the same one.
_DIGITS = str.maketrans("123456789", "0" * 9)


class _Known(NamedTuple):
    """A rule, ready to be applied."""

    rule: DeploymentRule
    mesh: DeviceMesh
    #: For each entry of `at`: the position of its axis, its coordinates, and those names in it that are fields.
    at: tuple[tuple[int, Coordinates, tuple[str, ...]], ...]
    pattern: re.Pattern[str] | None
    #: The other names that are used: sizes of axes, and the deployment's numbers.
    numbers: dict[str, Number]
    #: The search for the fields in a name, if some are used.
    fields: FieldSearch | None


class _Found:
    """The place of tensors: their rule, and the coordinates of each entry of its `at`.

    One object for all tensors there, so that those of one rank have one layout, and are planned once.
    """

    __slots__ = ("at", "known", "layouts")

    def __init__(self, known: _Known, at: tuple[tuple[int, ...], ...]) -> None:
        self.known = known
        self.at = at
        #: By rank; `None` if the rule is for another.
        self.layouts: dict[int, TensorLayout | None] = {}


class _Kind(NamedTuple):
    """The findings about names that differ in digits only.

    Attributes:
        known: Their rule.
        spans: The slices of the fields that `at` uses, in these names.
        counts: The number of them that each entry of `at` uses.
        places: The places that were found, by the texts of the fields.
    """

    known: _Known
    spans: tuple[slice, ...]
    counts: tuple[int, ...]
    places: dict[tuple[str, ...], _Found]


class Deployment(Drawn):
    r"""A model on the devices of a trainer or of an engine: which part of each tensor is where.

    Args:
        world: all devices: their number, their labels, or a mesh of them.
        meshes: meshes of these devices by name, or one mesh. A mesh without labels of its own has those of the world,
            in their order. The mesh `"world"` is always there: all devices along one axis of this name.
        rules: `DeploymentRule`s, or the axes of layouts, under regular expressions that are searched for in the names
            of tensors, as in a `LayoutMap`. `{i}` in a key is a field: a whole number, the same as `(?P<i>[0-9]+)`.
        numbers: whole numbers, lists of them, and lists of lists, which rules name in `at`.
        default: what applies to tensors of any rank that no rule matches: `"replicated"`, on every device of the world;
            or a rule for their leading dims.
        parameters: those parameters of an engine that hold several tensors; see `parameters_of`.
        match: where in a name a rule has to match; see `LayoutMap`.
        replicated: names of axes along which all is meant to be held as often as there are coordinates, as along that
            of data parallelism: reports do not warn that no rule uses them.

    Raises:
        MeshError: if a mesh has a device that the world has not.
        LayoutError: if a rule names a mesh, an axis or a number that is not there.
        TypeError: if an argument is of the wrong type.

    A tensor is held by those devices of its rule's mesh whose coordinates are as `at` says; the others hold nothing of
    it. Over the devices that are left it has an ordinary layout, whose mesh has the same axes, shortened to these
    coordinates. So a deployment goes wherever a `LayoutMap` is only asked: to `plan_model`, for instance.

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
        "__weakref__", "_default", "_found_at", "_held", "_is_blind", "_key", "_kinds", "_known", "_match", "_meshes",
        "_models", "_notes", "_numbers", "_parameters", "_replicated", "_rules", "_search", "_world",
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
    ) -> None:
        self._world = world_of(world)
        self._meshes = {name: view_of(self._world, name, mesh) for name, mesh in named_meshes(meshes).items()}
        self._numbers = checked_numbers(numbers)
        if instance("match", match, str) not in MATCH_MODES:
            raise LayoutError(f"match is {shown(match)}; it must be one of {', '.join(map(repr, MATCH_MODES))}")
        self._match: MatchMode = match
        if not isinstance(rules, Mapping):
            raise TypeError(f"rules must be a mapping from regular expressions to rules, got {shown(rules)}")
        self._rules = {key: _rule_of(f"rule {shown(key)}", value) for key, value in rules.items()}
        self._default = self._checked_default(default)
        if isinstance(parameters, (str, bytes)) or not isinstance(parameters, Sequence):
            raise TypeError(f"parameters must be a sequence of FusedParameters, got {shown(parameters)}")
        self._parameters = tuple(parameters)
        check_items("parameters", self._parameters, FusedParameter)
        self._replicated = checked_axes("replicated", replicated)
        #: The types of the models that the rules are for.
        self._models: tuple[str, ...] = ()
        #: Notes on the file that it was made from: what looks wrong.
        self._notes: tuple[str, ...] = ()
        self._known: dict[str, _Known] = {}
        searched = {}
        for key, rule in self._rules.items():
            pattern = compiled_rule(with_fields(key), match, False)
            searched[pattern.pattern] = Rule(rule.placed, pattern)
            self._known[pattern.pattern] = self._prepared(f"rule {shown(key)}", rule, pattern)
        self._search = RuleSearch(searched, match, False)
        self._key = (
            self._world,
            tuple(self._meshes.items()),
            tuple(self._rules.items()),
            frozenset(self._numbers.items()),
            self._default,
            self._parameters,
            match,
            self._replicated,
        )
        self._is_blind = not any(map(tells_digits_apart, searched))
        self._kinds: dict[str, _Kind | None] = {}
        #: Meshes by mesh and coordinates, and places by rule and coordinates.
        self._held: dict[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], DeviceMesh] = {}
        self._found_at: dict[tuple[int, tuple[tuple[int, ...], ...]], _Found] = {}

    def _checked_default(self, default: Any) -> DeploymentRule | None:
        if default is None:
            return None
        if isinstance(default, str):
            if default != REPLICATED:
                raise LayoutError(f"default is {shown(default)}; the only word it may be is {REPLICATED!r}")
            return DeploymentRule((), WORLD)
        return _rule_of("default", default)

    def _prepared(self, what: str, rule: DeploymentRule, pattern: re.Pattern[str] | None) -> _Known:
        """A rule with its mesh, its names looked up."""
        name = rule.mesh
        if name is None:
            if len(self._meshes) != 1:
                raise LayoutError(f"{what} names no mesh; the deployment has {', '.join(self._meshes) or 'none'}")
            name = next(iter(self._meshes))
        if name not in self._all_meshes():
            known = ", ".join(map(repr, self._all_meshes()))
            raise LayoutError(f"{what} names the mesh {shown(name)}; the deployment has {known}")
        mesh = self._all_meshes()[name]
        try:
            rule.layout.with_mesh(mesh)
            at: list[tuple[int, Coordinates, tuple[str, ...]]] = []
            numbers: dict[str, Number] = {}
            fields = set() if pattern is None else set(pattern.groupindex)
            sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
            for axis, where in rule.at:
                if axis not in sizes:
                    raise LayoutError(f"at names the axis {shown(axis)}; the mesh {name!r} has {mesh.axis_names}")
                if any(used.partition(":(")[0] == axis for used in rule.layout._named_axes()):
                    raise LayoutError(f"axis {shown(axis)} is in at, so its sub-axes cannot be in the layout")
                coordinates = Coordinates(axis, where, sizes[axis])
                own = tuple(used for used in coordinates.names if used in fields)
                numbers |= {
                    used: self._number(axis, used, fields, sizes) for used in coordinates.names if used not in own
                }
                at.append((mesh.axis_names.index(axis), coordinates, own))
                if not own:
                    coordinates.of((), (), numbers)  # Refused now rather than when a name is looked up.
            uses_fields = pattern is not None and any(own for _, _, own in at)
            searched = FieldSearch(pattern, self._match) if pattern is not None and uses_fields else None
            return _Known(rule, mesh, tuple(at), pattern, numbers, searched)
        except ShardwiseError as error:
            raise type(error)(f"{what}: {error}") from None

    def _number(self, axis: str, name: str, fields: set[str], sizes: Mapping[str, int]) -> Number:
        if name in self._numbers and name in sizes and self._numbers[name] != sizes[name]:
            raise LayoutError(
                f"at[{shown(axis)}]: {name} is a number, {shown(self._numbers[name])}, and an axis of another size"
            )
        if name in self._numbers:
            return self._numbers[name]
        if name in sizes:
            return sizes[name]
        known = ", ".join([*sorted(fields), *self._numbers, *sizes])
        raise LayoutError(f"at[{shown(axis)}] names {shown(name)}; known are {known}")

    @property
    def world(self) -> DeviceMesh:
        """All devices, along one axis."""
        return self._world

    @property
    def devices(self) -> tuple[Any, ...]:
        """The labels of all devices."""
        return self._world._all_labels()

    @property
    def meshes(self) -> dict[str, DeviceMesh]:
        """The meshes by name, without the one of all devices."""
        return dict(self._meshes)

    def rules(self) -> dict[str, DeploymentRule]:
        """Give all rules by their keys."""
        return dict(self._rules)

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers and lists by name."""
        return dict(self._numbers)

    @property
    def default(self) -> DeploymentRule | None:
        """The rule for tensors that no rule matches."""
        return self._default

    @property
    def parameters(self) -> tuple[FusedParameter, ...]:
        """The parameters that hold several tensors."""
        return self._parameters

    @property
    def match(self) -> MatchMode:
        """The place in a name where a rule has to match: `"search"`, `"match"` or `"fullmatch"`."""
        return self._match

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes along which all is meant to be held as often as there are coordinates."""
        return self._replicated

    def _all_meshes(self) -> dict[str, DeviceMesh]:
        return {WORLD: self._world, **self._meshes}

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a name; a look-up refuses more than one."""
        found = set(self._search.matching(checked_path(path)))
        return tuple(key for key in self._rules if with_fields(key) in found)

    def at(self, path: str) -> dict[str, tuple[int, ...]]:
        """Give the coordinates of a tensor along the axes for which its rule gives some.

        Raises:
            LayoutError: if several rules match, or a coordinate cannot be worked out; names the tensor.

        >>> from shardwise import DeviceMesh
        >>> mesh = DeviceMesh((2, 2), ("pp", "tp"))
        >>> Deployment(4, mesh, {"h.{i}": DeploymentRule(("tp",), at={"pp": "i // 3"})}).at("h.4.bias")
        {'pp': (1,)}
        """
        found = self._found(path)
        return {} if found is None else {axis: at for (axis, _), at in zip(found.known.rule.at, found.at, strict=True)}

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
        found, rank = self._found(path), integer("rank", rank)
        return None if found is None else self._layout(found, path, rank)

    def _layout(self, found: _Found, path: str, rank: int) -> TensorLayout:
        try:
            layout = found.layouts[rank]
        except KeyError:
            layout = found.layouts[rank] = self._made(found, rank)
        if layout is None:
            own = found.known.rule.layout.rank
            if found.known.pattern is None:
                raise LayoutError(f"tensor {shown(path)} has rank {rank}, the default layout is for ranks from {own}")
            rule = ", ".join(map(shown, self.matching_rules(path)))
            raise LayoutError(f"tensor {shown(path)} has rank {rank}, the layout of its rule {rule} has {own}")
        return layout

    def _made(self, found: _Found, rank: int) -> TensorLayout | None:
        known = found.known
        layout: TensorLayout | None = known.rule.layout
        if known.pattern is None:
            layout = LayoutRule(known.rule.layout).of_rank(rank)
        if layout is None or layout.rank != rank:
            return None
        return layout.with_mesh(self._devices_at(known, found.at))

    def _devices_at(self, known: _Known, at: tuple[tuple[int, ...], ...]) -> DeviceMesh:
        """The part of a mesh at some coordinates, with all of its axes."""
        mesh = known.mesh
        key = id(mesh), tuple((axis, places) for (axis, _, _), places in zip(known.at, at, strict=True))
        if key not in self._held:
            chosen = [np.arange(size) for size in mesh.shape]
            for axis, places in key[1]:
                chosen[axis] = np.array(places)
            shape = tuple(map(len, chosen))
            if shape == mesh.shape:
                self._held[key] = mesh
            else:
                positions = np.arange(mesh.size).reshape(mesh.shape)[np.ix_(*chosen)].ravel().tolist()
                self._held[key] = DeviceMesh(shape, mesh.axis_names, mesh._labels_at(positions))
        return self._held[key]

    def _found(self, path: str) -> _Found | None:
        # Names that differ in digits only match alike, if no rule tells digits apart: they are searched for once.
        try:
            key = path.translate(_DIGITS) if self._is_blind else path
            kind = self._kinds[key]
        except (AttributeError, KeyError, TypeError):
            key = checked_path(path).translate(_DIGITS) if self._is_blind else path
            kind = self._kind_of(path, key)
        if kind is None:
            return None
        texts = tuple([path[span] for span in kind.spans]) if kind.spans else ()
        found = kind.places.get(texts)
        return self._place(kind, path, texts) if found is None else found

    def _place(self, kind: _Kind, path: str, texts: tuple[str, ...]) -> _Found:
        """The place of a name, by the texts of its fields."""
        at, used = [], 0
        try:
            for (_, coordinates, own), count in zip(kind.known.at, kind.counts, strict=True):
                at.append(coordinates.of(texts[used : used + count], own, kind.known.numbers))
                used += count
        except ShardwiseError as error:
            raise type(error)(f"tensor {shown(path)}: {error}") from None
        key = id(kind.known), tuple(at)
        found = self._found_at.get(key)
        if found is None:
            found = self._found_at[key] = _Found(kind.known, tuple(at))
        if len(kind.places) >= REMEMBERED_PATHS:
            kind.places.clear()
        kind.places[texts] = found
        return found

    def _kind_of(self, path: str, key: str) -> _Kind | None:
        """The rule of a name and of those like it, and where its fields are in them."""
        keys = self._search.matching(path)
        if len(keys) > 1:
            self._search.layout(path)  # Raises, and lists them.
        kind = None
        if keys or self._default is not None:
            known = self._known[keys[0]] if keys else self._default_known()
            names = [name for _, _, own in known.at for name in own]
            spans = {} if known.fields is None else known.fields.spans(path)
            found = [spans[name] for name in names]
            kind = _Kind(known, tuple(found), tuple(len(own) for _, _, own in known.at), {})
        if len(self._kinds) >= REMEMBERED_PATHS:
            self._kinds.clear()
        self._kinds[key] = kind
        return kind

    def _default_known(self) -> _Known:
        assert self._default is not None
        return self._known.get("") or self._known.setdefault("", self._prepared("default", self._default, None))

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this rank: layout, uneven rule, and whether blocks are shared.

        Raises:
            LayoutError: as `layout_of`.

        >>> from shardwise import DeviceMesh
        >>> engine = Deployment(2, DeviceMesh((2,), ("tp",)), {"w": DeploymentRule(("tp",), uneven="ceil")})
        >>> engine.placed("w", 1).uneven, engine.placed("v", 1)
        ('ceil', Placed(layout=None, uneven=None, shared=False))
        """
        found = self._found(path)
        if found is None:
            return NOT_PLACED
        rule = found.known.rule
        return Placed(self._layout(found, path, rank), rule.uneven, rule.shared)

    @property
    def names(self) -> None:
        """Always `None`: a rule is for all names that it matches; a plain mapping has names of its tensors here."""

    @property
    def prefix(self) -> str:
        """Empty: reports show keys as they are."""
        return ""

    @property
    def models(self) -> tuple[str, ...]:
        """The types of the models that the rules are for, as the rules file or the preset says."""
        return self._models

    @property
    def is_whole_elsewhere(self) -> bool:
        """True if there is a default; without it no device holds a tensor that no rule matches."""
        return self._default is not None

    def uneven_of(self, path: str) -> UnevenRule | None:
        """Look up the uneven rule of the rule for a name, or of the default; `None` if it has none."""
        found = self._found(path)
        return None if found is None else found.known.rule.uneven

    def shared_of(self, path: str) -> bool:
        """Look up whether the rule for a name, or the default, shares the blocks of a quantized weight."""
        found = self._found(path)
        return found is not None and found.known.rule.shared

    def partition(self, path: str, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Give the partition of a tensor over the devices that hold it.

        Args:
            path: its name.
            shape: its shape.
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

    def report(self, names: Names, *, uneven: UnevenRule = "even", followers: Followers | None = None) -> LayoutReport:
        """Report where tensors of these names are: layouts, bytes of each device and stage, and all that looks wrong.

        Args:
            names: the tensors, as `LayoutMap.report` takes them.
            uneven: how a dim that does not divide is cut, unless its rule says so.
            followers: the tensors without rules of their own, as `LayoutMap.report` takes them.

        Raises:
            LayoutError: if a name is repeated, a size is negative, or there is no such uneven rule.
            TypeError: if a name is not a string, or a shape or dtype is invalid.

        >>> from shardwise import DeviceMesh
        >>> stages = Deployment(2, DeviceMesh((2,), ("pp",)), {"h.{i}": DeploymentRule((None,), at={"pp": "i // 2"})})
        >>> report = stages.report({f"h.{i}": ((4,), "float32") for i in range(3)})
        >>> report.device_bytes.tolist(), report.fullest
        ([32, 16], ('cpu:0', 32))
        """
        with importing:
            from ..rules.report_maker import make_report

        default = None if self._default is None else LayoutRule(self._default.layout, self._default.uneven)
        keys = {with_fields(key): key for key in self._rules}
        used: dict[str | None, Used] = {with_fields(key): self._used(rule) for key, rule in self._rules.items()}
        if self._default is not None:
            used[None] = self._used(self._default)
        report = make_report(
            self._search,
            self._world,
            default,
            names,
            uneven,
            look_up=self.layout_of,
            keys=keys,
            meshes=self._meshes,
            followers=followers,
            used=used,
            replicated=self._replicated,
        )
        return replace(report, notes=self._notes) if self._notes else report

    def _used(self, rule: DeploymentRule) -> Used:
        """The name of a rule's mesh, and those of its axes that the rule uses."""
        cut = {name.partition(":(")[0] for name in rule.layout._named_axes()}
        return rule.mesh or next(iter(self._meshes), WORLD), frozenset({*cut, *(axis for axis, _ in rule.at)})

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
            config: the model's configuration, for the file's `[numbers]`: the path of a `config.json`, that of a folder
                which has one, or what such a file holds.
            world: labels of the devices, instead of those that the file gives.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type.
            LayoutError: if a rule names what is not there, or a number is missing.
            MeshError: if a mesh does not fit the world.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file says of which types its models are, and the configuration's is another.

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
            from ..rules.toml import located, other_model, read_document, read_models
            from .toml import read_deployment

        document: Any = read_document(file)
        arguments, keywords = read_deployment(document, config, world)
        with located(document.source):
            made = cls(*arguments, **keywords)
        made._models = read_models(document)
        note = other_model(made._models, config, document.source)
        if note is not None:
            made._notes = (note,)
            warnings.warn(note, ShardwiseWarning, stacklevel=2)
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
        """Give the partitions of those tensors of which a device holds a part.

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
        self._world.index_of_label(device)
        found = {}
        for name, shape in shapes_of(tensors).items():
            partition = self.partition(name, shape, uneven)
            if _holds(partition.device_mesh, device):
                found[name] = partition
        return found

    def parameters_of(
        self, device: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even"
    ) -> list[LocalParameter]:
        """Give the parameters that a device holds: what their shapes are, and which box of which tensor lies where.

        Args:
            device: its label.
            tensors: the shape of each tensor, or its shape and dtype, or anything that has these.
            uneven: how dims that do not divide are cut, unless the rule says so.

        Raises:
            MeshError: if the world has no such device.
            LayoutError: as `partition`; if tensors of one parameter do not fit together, or some of them are missing.

        A tensor that is in none of `parameters` is a parameter of its own.

        >>> from shardwise import DeviceMesh
        >>> fused = FusedParameter("qkv", ("q", "k", "v"))
        >>> engine = Deployment(2, DeviceMesh((2,), ("tp",)), {"q|k|v": ("tp", None)}, parameters=[fused])
        >>> (qkv,) = engine.parameters_of("cpu:1", {"q": (4, 2), "k": (2, 2), "v": (2, 2)})
        >>> qkv.shape
        (4, 2)
        >>> qkv.pieces[1]
        ParameterPiece(tensor='k', box=(slice(1, 2, None), slice(0, 2, None)), start=(2, 0))
        """
        self._world.index_of_label(device)
        held = {}
        for name, shape in shapes_of(tensors).items():
            partition, found = self.partition(name, shape, uneven), self._found(name)
            assert found is not None
            entries = zip(found.known.rule.at, found.at, found.known.at, strict=True)
            at = {axis: (places, fields) for (axis, _), places, (_, _, fields) in entries}
            held[name] = Held(partition, found.known.mesh, at, _holds(partition.device_mesh, device))
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
            optimizer: its name, or dtypes by hand; without one nothing is trained.
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
        """Give where each of these tensors is, as data that can be written as JSON.

        Args:
            tensors: the shape and the dtype of each tensor, as `plan_model` takes them.
            uneven: how dims that do not divide are cut, unless the rule says so.
            digests: a digest of each tensor that has one, such as the numbers of `shardwise.store.tensor_digests` as
                text.

        Raises:
            LayoutError: as `partition`, for any of the tensors; if a dtype is not known.
        """
        optional("digests", digests, Mapping)  # type: ignore[type-abstract]
        found = {}
        for name, shape in shapes_of(tensors).items():
            partition = self.partition(name, shape, uneven)
            given = tensors[name]
            dtype = given.dtype if hasattr(given, "dtype") else given[1] if len(given) == 2 else None
            known = None if dtype is None else find_dtype(dtype)
            if known is None:
                raise LayoutError(f"tensor {shown(name)} has no known dtype, got {shown(dtype)}")
            layout = self.layout_of(name, len(shape))
            assert layout is not None
            digest = None if digests is None else digests.get(name)
            rule = self.uneven_of(name) or uneven
            found[name] = ManifestTensor(partition.shape, known.name, layout, rule, optional("digest", digest, str))
        return Manifest(found)

    def _picture(self) -> Picture:
        with importing:
            from .drawn import deployment_picture

        return deployment_picture(self)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Deployment) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        world = self._world.size if self._world.has_default_devices else list(self._world._all_labels())
        given: dict[str, Any] = {"numbers": self._numbers, "default": self._default}
        given |= {"parameters": list(self._parameters), "replicated": self._replicated}
        more = [f"{name}={value!r}" for name, value in given.items() if value]
        if self._match != "search":
            more.append(f"match={self._match!r}")
        return f"Deployment({', '.join([repr(world), repr(self._meshes), repr(self._rules), *more])})"

    def __reduce__(self) -> tuple[Any, ...]:
        given: dict[str, Any] = {
            "numbers": self._numbers, "default": self._default, "parameters": self._parameters
        }  # fmt: skip
        given |= {"match": self._match, "replicated": self._replicated}
        return _restored, (self._world, self._meshes, self._rules, given, self._models, self._notes)


def _restored(
    world: Any, meshes: Any, rules: Any, given: dict[str, Any], models: tuple[str, ...], notes: tuple[str, ...]
) -> Deployment:
    made = Deployment(world, meshes, rules, **given)
    made._models, made._notes = models, notes
    return made


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the shapes of tensors: shapes, pairs of shape and dtype, or what has a shape, by name."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to shapes, got {type(tensors).__name__}")
    found = {}
    for name, given in tensors.items():
        shape = getattr(given, "shape", given)
        if isinstance(shape, (tuple, list)) and len(shape) == 2 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        found[name] = sizes_of(f"the shape of {shown(name)}", shape)
    return found


def _holds(mesh: DeviceMesh | None, device: Any) -> bool:
    """Return whether a mesh has a device of this label."""
    assert mesh is not None
    try:
        at = mesh.index_of_label(device)
    except (MeshError, TypeError):
        return False
    return bool(mesh.device(at) == device)


def _rule_of(what: str, value: Any) -> DeploymentRule:
    if isinstance(value, DeploymentRule):
        return value
    if not isinstance(value, (TensorLayout, tuple, list)):
        raise TypeError(f"{what} must be a DeploymentRule or a tuple or list of axes, got {shown(value)}")
    try:
        return DeploymentRule(value)
    except ShardwiseError as error:
        raise type(error)(f"{what}: {error}") from None
