"""Layouts by name: regular expressions that give layouts to the tensors whose paths they match."""

from __future__ import annotations

import os
import warnings
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, overload

from .._arguments import checked_axes, instance, integer, optional, sizes_of
from .._fork import ForkLock, importing
from .._text import shown
from ..errors import LayoutError, MeshError, ShardwiseWarning
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..placing import Placed
from .layout_rule import REPLICATED, LayoutRule, checked_uneven, rule_of
from .search import MATCH_MODES, Answers, MatchMode, Rule, checked_path, compiled_rule

if TYPE_CHECKING:
    from ..layout import UnevenRule
    from ..partition import Partition
    from .numbers import Config
    from .report import LayoutReport
    from .report_maker import Followers, Names

__all__ = ["LayoutMap"]

Default = TypeVar("Default")

_NO_DEFAULT: Any = object()


class LayoutMap(MutableMapping[str, TensorLayout]):
    r"""Layouts under keys that are regular expressions when a path is looked up.

    Args:
        device_mesh: the mesh for layouts that have none; a layout with its own mesh keeps it.
        mesh: the same, by its name in Keras 2 on DTensor.
        match: `"search"` finds a rule anywhere in a path, `"match"` at its beginning, `"fullmatch"` only as the whole
            path. Keras began with `"match"`, changed to `"search"`, and now has `"fullmatch"`.
        backtracking: whether to accept rules that only a backtracking search can find, in time that may be exponential
            in the length of a path.
        default: what applies to tensors of any rank that no rule matches: `"replicated"`, or a layout, its axes or a
            `LayoutRule` for their leading dims; the others are not cut. `("fsdp",)` cuts dim 0 of them all.
        replicated: names of axes along which all is meant to be held as often as there are coordinates, as along that
            of data parallelism: reports do not warn that no rule uses them.

    Raises:
        LayoutError: if `match` is not one of the three; if the default is not a layout over the mesh.

    `layout_map[path]` is the layout of the key that equals the path, or else of the rule that matches it: the key
    that `re.search` finds in the path. If none does it is `None`, as in Keras; there is no `KeyError`, and the default
    is not used, since it needs a rank: `layout_of(path, rank)` and `partition(path, shape)` use it. If several do, it
    is a `LayoutError` that lists them. As a mapping, a map has the keys that were inserted: `in`, `len`, iteration,
    `del`, `pop` and `setdefault` do not match rules.

    A rule means what it means to Python's `re`. All rules are searched for together, in time linear in the length of
    the path and at worst in the size of the rules, in which a repetition such as `{2,1000}` counts as often as it says;
    Ctrl-C ends a long search. So neither a rule nor a name from a checkpoint can make a look-up hang. Look-around,
    back-references, atomic groups, possessive repetitions, `(?i)` beside letters beyond ASCII, and rules that need
    megabytes once compiled, can only be found by a search that backtracks: such a rule is refused when it is inserted,
    unless the map has `backtracking=True`.

    Threads may share a map. It remembers the paths that it was asked for, up to 65,536 of them.

    The meaning is that of `keras.distribution.LayoutMap`, with the search semantics that its examples need.

    >>> layout_map = LayoutMap(DeviceMesh((2, 4), ("data", "model")))
    >>> layout_map["dense.*kernel"] = (None, "model")
    >>> layout_map["dense.*bias"] = ("model",)
    >>> layout_map["my_model/dense_1/kernel"].axes
    (None, 'model')
    >>> print(layout_map["conv2d_1/kernel"])
    None
    """

    #: The text with which all rules of the map's file begin; reports leave it out.
    _prefix = ""
    #: Sentences on what looks wrong about that file.
    _notes: tuple[str, ...] = ()
    #: The types of the models that it is for.
    _models: tuple[str, ...] = ()

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        *,
        mesh: DeviceMesh | None = None,
        match: MatchMode = "search",
        backtracking: bool = False,
        default: Any = None,
        replicated: Sequence[str] = (),
    ) -> None:
        if mesh is not None:
            if device_mesh is not None:
                raise TypeError("device_mesh and mesh are two names of one argument; give one of them")
            device_mesh = mesh
        optional("device_mesh", device_mesh, DeviceMesh)
        instance("match", match, str)
        if match not in MATCH_MODES:
            raise LayoutError(f"match is {shown(match)}; it must be one of {', '.join(map(repr, MATCH_MODES))}")
        self._device_mesh = device_mesh
        self._match: MatchMode = match
        instance("backtracking", backtracking, bool)
        self._backtracking = backtracking
        self._default = self._checked_default(default)
        self._replicated = checked_axes("replicated", replicated)
        #: The layouts of the default, by rank: one object for all tensors of a rank.
        self._defaults: dict[int, TensorLayout | None] = {}
        self._rules: dict[str, Rule] = {}
        # Taken by writers. Readers take no lock: writers replace `_answers` as a whole.
        self._lock = ForkLock()
        self._answers = Answers(self._rules, match, backtracking)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh for layouts that have none."""
        return self._device_mesh

    @property
    def world(self) -> DeviceMesh | None:
        """The mesh that has all devices, which is that of the map."""
        return self._device_mesh

    @property
    def meshes(self) -> dict[str, DeviceMesh]:
        """The mesh of the map by the name `"mesh"`, or none, as a deployment gives its meshes."""
        return {} if self._device_mesh is None else {"mesh": self._device_mesh}

    @property
    def match(self) -> MatchMode:
        """The place in a path where a rule has to match: `"search"`, `"match"` or `"fullmatch"`."""
        return self._match

    @property
    def backtracking(self) -> bool:
        """True if rules are accepted that only a backtracking search can find."""
        return self._backtracking

    @property
    def default(self) -> LayoutRule | None:
        """The rule for tensors that no rule matches; its layout is that of their leading dims.

        >>> LayoutMap(default="replicated").default
        LayoutRule(layout=TensorLayout(()), uneven=None)
        """
        return self._default

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes along which all is meant to be held as often as there are coordinates."""
        return self._replicated

    def _checked_default(self, default: Any) -> LayoutRule | None:
        if default is None:
            return None
        if isinstance(default, str) and default != REPLICATED:
            raise LayoutError(f"default is {shown(default)}; the only word it may be is {REPLICATED!r}")
        with _naming("default"):
            return rule_of(() if isinstance(default, str) else default).with_mesh(self._device_mesh)

    # The types of a Mapping do not allow for a look-up that finds nothing.
    def __getitem__(self, path: str) -> TensorLayout | None:  # type: ignore[override]
        """Look up the layout of a path; see the class.

        Raises:
            LayoutError: if several rules match the path; lists them.
            TypeError: if the path is not a string.
        """
        try:
            return self._answers[path]
        except TypeError:
            checked_path(path)  # Something that cannot be hashed is not a path either.
            raise

    @overload
    def get(self, path: str) -> TensorLayout | None: ...
    @overload
    def get(self, path: str, default: Default) -> TensorLayout | Default: ...
    def get(self, path: str, default: Any = None) -> Any:
        """Look up the layout of a path, or give the default if no rule matches it.

        >>> LayoutMap().get("dense/kernel", "nothing")
        'nothing'
        """
        layout = self[path]
        return default if layout is None else layout

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a path, in the order of the map; a look-up refuses more than one.

        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"], layout_map["dense"] = ("x", None), ("y", None)
        >>> layout_map.matching_rules("dense/kernel")
        ('kernel', 'dense')
        """
        return self._answers.search.matching(checked_path(path))

    def rule(self, key: str) -> LayoutRule:
        """Give what was inserted under exactly this key: its layout and its uneven rule; a `KeyError` if there is none.

        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"] = LayoutRule(("x", None), uneven="ceil")
        >>> layout_map.rule("kernel")
        LayoutRule(layout=TensorLayout(('x', None)), uneven='ceil')
        """
        return self._rules[key].value

    def rules(self) -> dict[str, LayoutRule]:
        """Give all rules by their keys, in the order of insertion."""
        return {key: rule.value for key, rule in tuple(self._rules.items())}

    def layout_of(self, path: str, rank: int) -> TensorLayout | None:
        """Look up the layout of a tensor of this rank: that of its rule, or else of the default.

        `None` if no rule matches and there is no default.

        Raises:
            LayoutError: if several rules match the path, or the layout has another rank.
            TypeError: if the rank is not an integer.

        >>> layout_map = LayoutMap(default=("fsdp",))
        >>> layout_map["kernel"] = (None, "model")
        >>> layout_map.layout_of("dense/kernel", 2).axes, layout_map.layout_of("conv/filter", 3).axes
        ((None, 'model'), ('fsdp', None, None))
        """
        layout, rank = self[path], integer("rank", rank)
        if rank < 0:
            raise LayoutError(f"rank is {shown(rank)}; it must be 0 or more")
        if layout is None:
            return self._default_of(path, rank)
        if layout.rank != rank:
            rule = ", ".join(map(shown, self.matching_rules(path)))
            raise LayoutError(
                f"the array at {shown(path)} has rank {rank}, the layout of its rule {rule} has {layout.rank}"
            )
        return layout

    def _default_of(self, path: str, rank: int) -> TensorLayout | None:
        default = self._default
        if default is None:
            return None
        if rank not in self._defaults:
            self._defaults[rank] = default.of_rank(rank)
        layout = self._defaults[rank]
        if layout is None:
            raise LayoutError(
                f"the array at {shown(path)} has rank {rank}, the default layout is for ranks from "
                f"{default.layout.rank}"
            )
        return layout

    def uneven_of(self, path: str) -> UnevenRule | None:
        """Look up the uneven rule that the rule for a path has of its own, or the default's; `None` if there is none.

        Raises:
            LayoutError: if several rules match the path.

        >>> layout_map = LayoutMap(default=LayoutRule(("fsdp",), uneven="balanced"))
        >>> layout_map["kernel"] = LayoutRule(("model", None), uneven="ceil")
        >>> layout_map.uneven_of("dense/kernel"), layout_map.uneven_of("dense/bias")
        ('ceil', 'balanced')
        """
        answers = self._answers  # All from one moment.
        if answers[checked_path(path)] is None:
            return None if self._default is None else self._default.uneven
        own = answers.search.uneven
        return own.get(answers.search.matching(path)[0]) if own else None

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this rank: layout, uneven rule, and whether blocks are shared.

        Raises:
            LayoutError: as `layout_of`.

        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"] = LayoutRule((None, "model"), uneven="ceil")
        >>> layout_map.placed("dense/kernel", 2)
        Placed(layout=TensorLayout((None, 'model')), uneven='ceil', shared=False)
        """
        return Placed(self.layout_of(path, rank), self.uneven_of(path), self.shared_of(path))

    @property
    def names(self) -> None:
        """Always `None`: a rule is for all names that it matches; a plain mapping has names of its tensors here."""

    @property
    def parameters(self) -> tuple[Any, ...]:
        """An empty tuple: only a deployment has parameters that hold several tensors."""
        return ()

    @property
    def prefix(self) -> str:
        """The text with which a rules file begins each of its rules; reports leave it out."""
        return self._prefix

    @property
    def models(self) -> tuple[str, ...]:
        """The types of the models that the rules are for, as the rules file or the preset says."""
        return self._models

    @property
    def is_whole_elsewhere(self) -> bool:
        """True: a tensor that no rule matches is whole on every device."""
        return True

    def shared_of(self, path: str) -> bool:
        """Look up whether the rule for a path, or the default, shares the blocks of a quantized weight.

        Raises:
            LayoutError: if several rules match the path.

        >>> layout_map = LayoutMap()
        >>> layout_map["down_proj"] = LayoutRule((None, "tp"), shared=True)
        >>> layout_map.shared_of("mlp.down_proj.weight"), layout_map.shared_of("norm")
        (True, False)
        """
        answers = self._answers
        if answers[checked_path(path)] is None:
            return self._default is not None and self._default.shared
        shared = answers.search.shared
        return bool(shared) and answers.search.matching(path)[0] in shared

    def partition(self, path: str, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Give the partition of a tensor under its rule or the default; without either nothing is cut.

        Args:
            path: its name.
            shape: its shape.
            uneven: how dims that do not divide are cut, unless the rule says so.

        Raises:
            LayoutError: if several rules match, or the layout does not fit the shape or has no mesh; see
                `TensorLayout.partition`.

        >>> layout_map = LayoutMap(DeviceMesh((4,), ("model",)))
        >>> layout_map["kernel"] = (None, "model")
        >>> layout_map.partition("kernel", (2, 6), "balanced").box("cpu:1")
        (slice(0, 2, None), slice(2, 4, None))
        """
        sizes = sizes_of("shape", shape)
        layout = self._layout_of_rank(path, len(sizes))
        return layout.partition(sizes, self.uneven_of(path) or checked_uneven(uneven))

    def __setitem__(
        self, key: str, layout: TensorLayout | LayoutRule | Sequence[str | Sequence[str] | PackedDim | None]
    ) -> None:
        """Insert a rule.

        Args:
            key: a regular expression that is not a key yet.
            layout: a `TensorLayout`, the tuple or list of its axes, or a `LayoutRule` if it has an uneven rule of its
                own. If it has no mesh, the map keeps a copy of it over the map's own mesh; the layout that was given
                does not change.

        Raises:
            LayoutError: if the key exists already or is not a regular expression, or if the axes are not a layout
                over the mesh. The map is then unchanged.
            TypeError: if the key is not a string or is empty, or the layout is something else.

        >>> layout = TensorLayout((None, "model"))
        >>> for size in (2, 4):
        ...     layout_map = LayoutMap(DeviceMesh((size,), ("model",)))
        ...     layout_map["kernel"] = layout
        ...     print(layout_map["kernel"].num_shards, layout.device_mesh)
        (1, 2) None
        (1, 4) None
        """
        pattern = compiled_rule(key, self._match, self._backtracking)
        with _naming(f"rule {shown(key)}"):
            rule = rule_of(layout)
        with self._lock:
            if key in self._rules:
                axes = self._rules[key].value.layout.axes
                raise LayoutError(
                    f"rule {shown(key)} is in the map already, with axes {shown(axes)}; delete it to replace it"
                )
            with _naming(f"rule {shown(key)}"):
                rule = rule.with_mesh(self._device_mesh)
            self._rules[key] = Rule(rule, pattern)
            self._answers = Answers(self._rules, self._match, self._backtracking)

    def __delitem__(self, key: str) -> None:
        """Remove the rule under exactly this key; a `KeyError` if there is none."""
        with self._lock:
            del self._rules[key]
            self._answers = Answers(self._rules, self._match, self._backtracking)

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._rules))

    def __contains__(self, key: object) -> bool:
        """Say whether this is a key; a rule that matches it is not enough."""
        return key in self._rules

    def items(self) -> ItemsView[str, TensorLayout]:
        """Give a view of the keys with their layouts, in the order of insertion."""
        return _Items(self._rules)

    @overload
    def pop(self, key: str) -> TensorLayout: ...
    @overload
    def pop(self, key: str, default: Default) -> TensorLayout | Default: ...
    def pop(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        """Remove the rule under exactly this key and give its layout, or the default; without one, a `KeyError`."""
        with self._lock:
            if key not in self._rules and default is not _NO_DEFAULT:
                return default
            layout = self._rules[key].value.layout
            del self[key]
            return layout

    def setdefault(
        self, key: str, default: TensorLayout | Sequence[str | Sequence[str] | PackedDim | None] | None = None
    ) -> TensorLayout:
        """Give the layout under exactly this key, after inserting the default if there is none."""
        with self._lock:
            if key not in self._rules:
                self[key] = default  # type: ignore[assignment]  # None is refused there, by name.
            return self._rules[key].value.layout

    def update(self, other: Any = (), /, **rules: Any) -> None:
        """Insert the rules of a mapping or of pairs; those of a layout map with their uneven rules.

        Raises:
            LayoutError: as for a single rule. The rules before it stay in the map.
            TypeError: if this is neither a mapping nor made of pairs of a key and a layout.

        >>> layout_map, other = LayoutMap(), LayoutMap()
        >>> other["kernel"] = LayoutRule(("x", None), uneven="ceil")
        >>> layout_map.update(other)
        >>> layout_map == other
        True
        """
        given: Any = other.rules() if isinstance(other, LayoutMap) else other
        if not hasattr(given, "keys"):
            given = _pairs(given)
        super().update(given, **rules)

    def __eq__(self, other: object) -> bool:
        """Return whether the rules are the same; for two layout maps, also everything else that changes an answer.

        What a map permits (`backtracking`) changes none, and is not compared.
        """
        if isinstance(other, LayoutMap):
            mine, theirs = (
                (each._device_mesh, each._match, each._default, each._replicated, each.rules())
                for each in (self, other)
            )
            return mine == theirs
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = ", ".join(f"{key!r}: {_short(rule)}" for key, rule in self.rules().items())
        default = "" if self._default is None else f", default={_short(self._default)}"
        if self._replicated:
            default += f", replicated={self._replicated!r}"
        return f"<LayoutMap {{{rules}}}, device_mesh={self._device_mesh!r}, match={self._match!r}{default}>"

    def _repr_html_(self) -> str:
        with importing:
            from .drawn import layout_map_html

        return layout_map_html(self)

    def __getstate__(self) -> tuple[Any, ...]:
        rules = tuple(self.rules().items())
        made_of = self._models, self._notes
        return self._device_mesh, self._match, self._backtracking, self._default, self._replicated, rules, made_of

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        device_mesh, match, backtracking, default, replicated, rules, made_of = state
        LayoutMap.__init__(
            self, device_mesh, match=match, backtracking=backtracking, default=default, replicated=replicated
        )
        self.update(rules)
        self._models, self._notes = made_of

    def report(self, names: Names, *, uneven: UnevenRule = "even", followers: Followers | None = None) -> LayoutReport:
        """Report what the rules do to tensors of these names: layouts, bytes per device, and all that looks wrong.

        Args:
            names: a mapping from each name to a shape, to a pair of shape and dtype, or to anything with a `.shape`
                (and a `.dtype`); or tuples of `(name, shape)`, `(name, shape, dtype)` or `(name, array)`. A dtype is
                what numpy accepts as one, or anything with an integer `.itemsize`.
            uneven: how a dim that does not divide is cut, unless its rule says so; see `TensorLayout.partition`.
            followers: by name the tensors without rules of their own, each with the name of another, and the layout;
                `shardwise.quantized.followers` gives those of quantized weights.

        Raises:
            LayoutError: if a name is repeated, a size is negative, or there is no such uneven rule.
            SizeOverflowError: if a tensor has more than 2**63 - 1 elements or bytes.
            TypeError: if a name is not a string, or a shape or dtype is invalid.

        >>> layout_map = LayoutMap(DeviceMesh((2,), ("model",)))
        >>> layout_map["kernel"] = (None, "model")
        >>> report = layout_map.report({"dense/kernel": ((4, 6), "float32"), "dense/bias": ((6,), "float32")})
        >>> [(tensor.name, tensor.rule, tensor.bytes_per_device) for tensor in report.tensors]
        [('dense/kernel', 'kernel', 48), ('dense/bias', None, 24)]
        >>> report.warnings
        ("1 name matches no rule, so every device holds it whole (24 B): 'dense/bias'",)
        """
        with importing:
            from .report_maker import make_report

        keys = {key: key.removeprefix(self._prefix) for key in self} if self._prefix else {}
        report = make_report(
            self._answers.search,
            self._device_mesh,
            self._default,
            names,
            uneven,
            keys=keys,
            followers=followers,
            replicated=self._replicated,
        )
        return replace(report, notes=self._notes) if self._notes else report

    def apply(self, tree: Any, *, separator: str = "/") -> Any:
        """Give the same nested structure as a tree of arrays, with a layout in place of each array.

        Args:
            tree: dicts, lists, tuples, named tuples and dataclasses, nested, of anything with a `.shape`; `None` stays
                `None`, and any other mapping becomes a dict.
            separator: what joins the keys, positions and fields that lead to an array into its path.

        Raises:
            LayoutError: if several rules match a path, if the ranks of an array and its layout differ, or if the tree
                contains itself or is nested too deeply.
            TypeError: if a key is neither string nor integer, or a leaf has no shape.

        An array that no rule matches gets the layout of the default, or else the layout that cuts nothing, over the
        mesh of the map if it has one.

        >>> import numpy as np
        >>> layout_map = LayoutMap()
        >>> layout_map["attn/kernel"] = (None, "model")
        >>> layout_map.apply({"h": [{"attn": {"kernel": np.ones((2, 4)), "bias": np.ones(4)}}]})
        {'h': [{'attn': {'kernel': TensorLayout((None, 'model')), 'bias': TensorLayout((None,))}}]}
        """
        with importing:
            from .._tree import map_arrays

        return map_arrays(self._layout_of_rank, tree, separator)

    @classmethod
    def from_tp_plan(cls, plan: Any, mesh: DeviceMesh, axis: str, config: Any = None) -> LayoutMap:
        """The layout map of a Hugging Face transformers tensor-parallel plan: `config.base_model_tp_plan`.

        Args:
            plan: Styles by module name, in which `*` is a layer number; the names may follow a prefix like `model.`. Or
                a model's configuration, an object that has such a plan.
            mesh: The mesh of the map.
            axis: The axis of the mesh that cuts.
            config: The model's configuration, an object or a mapping: if it says how long packed matrices are
                (`intermediate_size`, `moe_intermediate_size`), tensors of another length are refused.

        Raises:
            LayoutError: if transformers does not have a style; names it.
            MeshError: if the mesh has no such axis.

        The layouts are for parameters as PyTorch stores them: the `weight` of a linear module is (out, in), experts
        are (experts, out, in), or each a tensor of its own, as in files. In a packed style each of the two matrices is
        cut separately. Transformers cuts rows, not heads, as `torch.chunk` does, key-value heads included: the rules
        have `uneven="chunk"`.

        >>> plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
        >>> layout_map = LayoutMap.from_tp_plan(plan, DeviceMesh((4,), ["tp"]), "tp")
        >>> layout_map["model.layers.3.self_attn.q_proj.weight"].axes
        ('tp', None)
        >>> print(layout_map["model.layers.3.mlp.experts.gate_up_proj"].axes[1])
        gate:(n@tp/ceil) + up:(n@tp/ceil)
        """
        with importing:
            from .tp_plan import rules_of_plan

        if not isinstance(plan, Mapping) and isinstance(getattr(plan, "base_model_tp_plan", None), Mapping):
            plan, config = plan.base_model_tp_plan, plan if config is None else config
        instance("mesh", mesh, DeviceMesh)
        if axis not in mesh.axis_names:
            raise MeshError(f"axis is {shown(axis)}; the axes of the mesh are {shown(mesh.axis_names)}")
        layout_map = cls(mesh)
        layout_map.update(rules_of_plan(plan, axis, config))
        return layout_map

    @classmethod
    def from_toml(
        cls,
        file: str | os.PathLike[str] | TextIO,
        device_mesh: DeviceMesh | None = None,
        *,
        config: Config | None = None,
    ) -> LayoutMap:
        r"""Make the layout map that a rules file describes; the page `docs/rules-file.md` has the format.

        Args:
            file: the path of the file, the name of one of the package's (`example_rules`), or an open text file.
            device_mesh: the mesh of the map, instead of the one that the file may have.
            config: the model's configuration, for the file's `[numbers]`: the path of a `config.json`, that of a folder
                which has one, or what such a file holds.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type; if the
                configuration is not JSON.
            LayoutError: if a layout map does not accept a rule, or a number that a rule needs is missing.
            MeshError: if the mesh is invalid.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file says of which types its models are, and the configuration's is another.

        >>> import io
        >>> file = io.StringIO(r'''
        ... [rules]
        ... 'attn\.weight$' = [[], "model"]
        ... ''')
        >>> LayoutMap.from_toml(file)["h.0.attn.weight"].axes
        (None, 'model')
        """
        with importing:
            from .toml import axes_said, located, other_model, read_rules

        rules = read_rules(file, config)
        layout_map = cls(
            rules.device_mesh if device_mesh is None else device_mesh,
            match=rules.match,
            backtracking=rules.backtracking,
            replicated=rules.replicated,
        )
        with located(rules.source):
            try:
                layout_map._default = layout_map._checked_default(rules.default)
                layout_map.update(rules.layouts)
            except LayoutError as error:
                mesh = layout_map.device_mesh
                said = "" if mesh is None else axes_said(rules.layouts.values(), mesh)
                raise type(error)(f"{error}{said}") from None
        layout_map._prefix = rules.prefix
        layout_map._models = rules.models
        note = other_model(rules.models, config, rules.source)
        if note is not None:
            layout_map._notes = (note,)
            warnings.warn(note, ShardwiseWarning, stacklevel=2)
        return layout_map

    def to_toml(self, file: str | os.PathLike[str] | TextIO) -> None:
        """Write the map as a rules file, from which `from_toml` makes an equal map.

        Args:
            file: the path of the file, which is replaced as a whole or not at all, or an open text file.

        Raises:
            LayoutError: if a layout has another mesh than the map, or a device label is neither string nor integer.
            OSError: if the file cannot be written.

        >>> import sys
        >>> layout_map = LayoutMap(DeviceMesh((4,), ("model",)))
        >>> layout_map["attn/kernel$"] = (None, "model")
        >>> layout_map.to_toml(sys.stdout)
        match = "search"
        <BLANKLINE>
        [mesh]
        shape = [4]
        axis_names = ["model"]
        <BLANKLINE>
        [rules]
        'attn/kernel$' = [[], "model"]
        """
        with importing:
            from .toml import Rules, write_rules

        own = self._match, self._backtracking, self._device_mesh, self.rules(), self._default, self._replicated
        write_rules(file, Rules(*own))

    def _layout_of_rank(self, path: str, rank: int) -> TensorLayout:
        layout = self.layout_of(path, rank)
        return TensorLayout((None,) * rank, self._device_mesh) if layout is None else layout


class _Items(ItemsView[str, TensorLayout]):
    """The rules of a layout map as they are, without a matching look-up."""

    def __init__(self, rules: dict[str, Rule]) -> None:
        self._rules = rules

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[tuple[str, TensorLayout]]:
        return iter([(key, rule.value.layout) for key, rule in tuple(self._rules.items())])

    def __contains__(self, item: object) -> bool:
        return item in list(self)

    def __repr__(self) -> str:
        return f"ItemsView({list(self)!r})"


def _short(rule: LayoutRule) -> str:
    return " ".join([f"{rule.layout.axes}", *rule.words])


def _pairs(given: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs of an iterable, one by one: it may never end."""
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"update takes a mapping, or pairs of a key and a layout; got {shown(given)}")
    for position, pair in enumerate(given):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"update takes pairs of a key and a layout; entry {position} is {shown(pair)}")
        yield pair[0], pair[1]


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except (LayoutError, TypeError) as error:
        raise type(error)(f"{what}: {error}") from None
