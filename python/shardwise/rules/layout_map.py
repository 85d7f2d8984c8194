"""Layouts by name: regular expressions that give layouts to the tensors whose paths they match."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from .._arguments import checked_axes, instance, integer, sizes_of
from .._drawn import Worded
from .._fork import importing
from .._text import shown
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from .book import RuleBook, note_origin, warned_of_models
from .keyed import KeyedRules, naming_subject
from .layout_rule import LayoutRule, checked_uneven, is_replicated, of_leading_dims, rule_of, sizes_said
from .search import MatchMode, checked_path

if TYPE_CHECKING:
    from ..layout import UnevenRule
    from ..partition import Partition
    from .numbers import Config
    from .report_maker import ReportedRules

__all__ = ["LayoutMap"]


class LayoutMap(RuleBook, KeyedRules, Worded):
    r"""Layouts under keys that are regular expressions when a path is looked up.

    Args:
        device_mesh: the mesh for layouts that have none; a layout with its own mesh keeps it.
        mesh: another name for `device_mesh`, from Keras 2 on DTensor.
        match: `"search"` finds a rule anywhere in a path, `"match"` at its beginning, `"fullmatch"` only as the whole
            path. Keras began with `"match"`, changed to `"search"`, and now has `"fullmatch"`.
        backtracking: whether to accept rules that only a backtracking search can find, in time that may be exponential
            in the length of a path.
        default: what applies to tensors of any rank that no rule matches: `"replicated"`, or a layout, its axes or a
            `LayoutRule` for the tensors' leading dims; their other dims are not cut. `("fsdp",)` cuts dim 0 of each.
        replicated: names of axes along which everything is replicated on purpose, such as data parallelism: reports do
            not warn that no rule uses them.
        ordered: whether the first rule that matches a path applies, whatever others match, as in rule lists of projects
            on JAX. The rule's layout is then for the leading dims; further dims are not cut, and tensors without dims
            are whole. See `from_partition_rules`.

    Raises:
        LayoutError: if `match` is not one of the three; if the default is not a layout over the mesh.

    `layout_map[path]` is the layout of the key that equals the path, or else of the rule that matches it: the key that
    `re.search` finds in the path. If none does, the result is `None`, as in Keras; there is no `KeyError`, and the
    default is not used, because it needs a rank: `layout_of(path, rank)` and `partition(path, shape)` use it. If
    several match, a `LayoutError` lists them. As a mapping, a map has the keys that were inserted: `in`, `len`,
    iteration, `del`, `pop` and `setdefault` do not match rules.

    A rule has the meaning that Python's `re` gives it. All rules are searched for together. The time is linear in the
    length of the path, and at worst also in the size of the rules, in which the repetition `{2,1000}` counts a thousand
    times; Ctrl-C ends a long search. So neither a rule nor a name from a checkpoint can make a look-up hang.
    Look-around, back-references, atomic groups, possessive repetitions, `(?i)` with letters beyond ASCII, and rules
    that need megabytes once compiled, can only be found by a search that backtracks: such a rule is refused when it is
    inserted, unless the map has `backtracking=True`.

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

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        *,
        mesh: DeviceMesh | None = None,
        match: MatchMode = "search",
        backtracking: bool = False,
        default: Any = None,
        replicated: Sequence[str] = (),
        ordered: bool = False,
    ) -> None:
        if mesh is not None:
            if device_mesh is not None:
                raise TypeError("device_mesh and mesh are two names of one argument; give one of them")
            device_mesh = mesh
        super().__init__(device_mesh, match, backtracking, ordered)
        self._default = self._checked_default(default)
        self._replicated = checked_axes("replicated", replicated)
        #: The layouts of the default, by rank: one object for all tensors of a rank.
        self._defaults: dict[int, TensorLayout | None] = {}

    @property
    def world(self) -> DeviceMesh | None:
        """The mesh that has all devices, which is that of the map."""
        return self._device_mesh

    @property
    def meshes(self) -> dict[str, DeviceMesh]:
        """The mesh of the map under the name `"mesh"`, like the meshes of a deployment; empty without a mesh."""
        return {} if self._device_mesh is None else {"mesh": self._device_mesh}

    @property
    def default(self) -> LayoutRule | None:
        """The default: the rule for tensors that no other rule matches; its layout is that of their leading dims.

        >>> LayoutMap(default="replicated").default
        LayoutRule(layout=TensorLayout(()), uneven=None)
        """
        default: LayoutRule | None = self._default
        return default

    def _checked_default(self, default: Any) -> LayoutRule | None:
        if default is None:
            return None
        axes = () if is_replicated(default) else default
        with naming_subject("default"):
            return rule_of(axes).with_mesh(self._device_mesh)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """An empty tuple: only a deployment has parameters that hold several tensors."""
        return ()

    @property
    def is_whole_elsewhere(self) -> bool:
        """True: a tensor that no rule matches is whole on every device."""
        return True

    def _applied(self, path: str) -> LayoutRule | None:
        return self._answers[checked_path(path)] or self._default

    def _reported(self) -> ReportedRules:
        with importing:
            from .report_maker import ReportedRules

        keys = {key: key.removeprefix(self._prefix) for key in self} if self._prefix else {}
        rules = self._answers.search, self._device_mesh, self._default, self._replicated, self._notes
        return ReportedRules(*rules, keys)

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
        if self._ordered and (rank == 0 or layout.rank < rank):
            return of_leading_dims(layout, rank)
        if layout.rank != rank:
            rule = ", ".join(map(shown, self.matching_rules(path)))
            raise LayoutError(
                f"the array at {shown(path)} has rank {rank}, but the layout of its rule {rule} has {layout.rank}"
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
                f"the array at {shown(path)} has rank {rank}, but the default layout needs rank "
                f"{default.layout.rank} or more"
            )
        return layout

    def partition(self, path: str, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Return the partition of a tensor under its rule or the default; without either nothing is cut.

        Args:
            path: its name.
            shape: the tensor's elements along each dim.
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

    def __eq__(self, other: object) -> bool:
        """Return whether the rules are the same; for two layout maps, also everything else that changes an answer.

        What a map permits (`backtracking`) changes none, and is not compared.
        """
        if isinstance(other, LayoutMap):
            mine, theirs = (
                (each._device_mesh, each._match, each._default, each._replicated, each._ordered, each.rules())
                for each in (self, other)
            )
            if self._ordered and tuple(self) != tuple(other):
                return False
            return mine == theirs
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = ", ".join(f"{key!r}: {_short(rule)}" for key, rule in self.rules().items())
        default = "" if self._default is None else f", default={_short(self._default)}"
        if self._replicated:
            default += f", replicated={self._replicated!r}"
        default += ", ordered=True" * self._ordered
        return f"<LayoutMap {{{rules}}}, device_mesh={self._device_mesh!r}, match={self._match!r}{default}>"

    def _repr_html_(self) -> str:
        with importing:
            from ..show.html import table_html
            from .drawn import layout_map_table

        return table_html(*layout_map_table(self))

    def _words(self) -> str:
        with importing:
            from ..show.table import table_text
            from .drawn import layout_map_table

        return table_text(*layout_map_table(self))

    def __getstate__(self) -> tuple[Any, ...]:
        rules = tuple(self.rules().items())
        made_of = self._models, self._notes, self._ordered
        return self._device_mesh, self._match, self._backtracking, self._default, self._replicated, rules, made_of

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        device_mesh, match, backtracking, default, replicated, rules, (models, notes, ordered) = state
        kept = {"default": default, "replicated": replicated, "ordered": ordered}
        LayoutMap.__init__(self, device_mesh, match=match, backtracking=backtracking, **kept)
        self.update(rules)
        self._models, self._notes = models, notes

    def apply(self, tree: Any, *, separator: str = "/") -> Any:
        """Return the same nested structure as a tree of arrays, with a layout in place of each array.

        Args:
            tree: dicts, lists, tuples, named tuples and dataclasses, nested, of anything with a `.shape`; `None` stays
                `None`, and any other mapping becomes a dict.
            separator: the text between the keys, positions and fields in the path of an array.

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
        """Return the layout map of a Hugging Face transformers tensor-parallel plan: `config.base_model_tp_plan`.

        Args:
            plan: Styles by module name, in which `*` is a layer number; the names may follow a prefix like `model.`. Or
                a model's configuration, an object that has such a plan.
            mesh: The mesh of the map.
            axis: The axis of the mesh that cuts.
            config: The model's configuration, an object or a mapping: if it says how long packed matrices are
                (`intermediate_size`, `moe_intermediate_size`), tensors of another length are refused.

        Raises:
            LayoutError: if transformers does not have a style; the message names it.
            MeshError: if the mesh has no such axis.

        The layouts are for parameters as PyTorch stores them: the `weight` of a linear module is (out, in), experts are
        (experts, out, in), or each a tensor of its own, as in files. In a packed style each of the two matrices is cut
        separately. Transformers cuts rows as `torch.chunk` does, and not heads, not even key-value heads: the rules
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
    def from_partition_rules(
        cls, rules: Any, mesh: DeviceMesh | None = None, *, backtracking: bool = False
    ) -> LayoutMap:
        """Return the layout map of an ordered list of rules, as EasyLM, EasyDeL and other projects on JAX have one.

        Args:
            rules: Pairs of a regular expression and a `PartitionSpec` or the axes of each dim; or the text of such a
                list in Python, which is not run.
            mesh: The mesh of the map.
            backtracking: Whether to accept expressions that only a backtracking search can find, such as look-around.

        The first expression that is found in a path counts. The spec of that expression is for the leading dims;
        further dims are not cut, and tensors without dims are whole. A report names rules that never win.

        Raises:
            LayoutError: if an expression is there twice, or a spec is not a layout.
            ParseError: if `rules` is a text, but not of such a list.
            TypeError: if `rules` is not made of pairs.

        >>> text = "(('attention/(wq|wk|wv)/kernel', PS('fsdp', 'tp')), ('kernel', PS('tp')), ('.*', PS()))"
        >>> layout_map = LayoutMap.from_partition_rules(text)
        >>> layout_map.layout_of("h/0/attention/wq/kernel", 2).axes, layout_map.layout_of("h/0/mlp/kernel", 2).axes
        (('fsdp', 'tp'), ('tp', None))
        """
        with importing:
            from .ordered import pairs_of

        layout_map = cls(mesh, backtracking=backtracking, ordered=True)
        layout_map.update(pairs_of(rules))
        return layout_map

    def partition_rules(self) -> list[tuple[str, tuple[Any, ...]]]:
        r"""Return the rules as an ordered list: pairs of a regular expression and the axes of each dim.

        `PartitionSpec(*axes)` is the spec of each, unless it has packed dims or sub-axes, which JAX does not have;
        `shardwise.interop.jax.to_partition_rules` makes the specs.

        Raises:
            LayoutError: if a layout has unreduced axes, or a rule an uneven rule of its own.

        >>> layout_map = LayoutMap(default="replicated", match="fullmatch")
        >>> layout_map["wte"] = ("model", None)
        >>> layout_map.partition_rules()
        [('^(?:wte)\\Z', ('model', None)), ('.*', ())]
        """
        with importing:
            from .ordered import partition_rules_of

        return partition_rules_of(self._answers.search, self._match, self._default)

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
            config: the model's configuration, for the file's `[numbers]`: the path of a `config.json` or of its folder,
                or its contents.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type; if the
                configuration is not JSON.
            LayoutError: if a layout map does not accept a rule, or a number that a rule needs is missing.
            MeshError: if the mesh is invalid.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file states the types of its models, and the configuration has another type.

        >>> import io
        >>> file = io.StringIO(r'''
        ... [rules]
        ... 'attn\.weight$' = [[], "model"]
        ... ''')
        >>> LayoutMap.from_toml(file)["h.0.attn.weight"].axes
        (None, 'model')
        """
        with importing:
            from .toml import axes_said, read_map_rules
            from .toml_tables import errors_at

        rules = read_map_rules(file, config)
        layout_map = cls(
            rules.device_mesh if device_mesh is None else device_mesh,
            match=rules.match,
            backtracking=rules.backtracking,
            replicated=rules.replicated,
            ordered=rules.ordered,
        )
        with errors_at(rules.source):
            try:
                layout_map._default = layout_map._checked_default(rules.default)
                layout_map.update(rules.layouts)
            except LayoutError as error:
                mesh = layout_map.device_mesh
                said = "" if device_mesh is None else axes_said(rules.layouts.values(), mesh)
                if mesh is not None:
                    said = said or sizes_said(rules.layouts.values(), mesh)
                raise type(error)(f"{error}{said}") from None
        notes = warned_of_models(rules.models, config, rules.source)
        note_origin(layout_map, rules.models, rules.prefix, notes)
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
            from .toml import Rules
            from .toml_text import write_rules

        own = self._match, self._backtracking, self._device_mesh, self.rules(), self._default, self._replicated
        write_rules(file, Rules(*own, ordered=self._ordered))

    def _layout_of_rank(self, path: str, rank: int) -> TensorLayout:
        layout = self.layout_of(path, rank)
        return TensorLayout((None,) * rank, self._device_mesh) if layout is None else layout


def _short(rule: LayoutRule) -> str:
    return " ".join([f"{rule.layout.axes}", *rule.words])
