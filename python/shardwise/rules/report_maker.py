"""The maker of reports on layout maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .._arguments import instance, sizes_of
from .._dtypes import dtype_of, find_dtype
from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..partition import Partition
from ..shared_tiling import SharedTiling
from .adapters import are_adapters
from .layout_rule import LayoutRule, checked_uneven, of_leading_dims
from .problems import NO_RULE, Clash, IndivisibleDim, Misfit, RankMismatch
from .report import LayoutReport
from .search import RuleSearch
from .tensor_report import TensorReport, checked_size

__all__ = ["Followers", "ReportNames", "ReportedRules", "Used", "make_report"]

Followers = Mapping[str, tuple[str, "TensorLayout | Partition | SharedTiling | str"]]
"""By name the tensors that are cut as others are, as the scales of a quantized weight and the states of an optimizer:
the name of the other, and the layout, or why there is none."""
ReportNames = Mapping[str, Any] | Iterable[tuple[Any, ...]]
"""Shapes, pairs of shape and dtype, or arrays, by name; or tuples of a name and its shape and dtype."""
Used = tuple[str, frozenset[str]]
"""The name of the mesh of a rule, of a map an empty one; and those of its axes that it uses."""


#: The layout of a tensor by its name and rank; `None` if no rule matches.
LookUp = Callable[[str, int], "TensorLayout | None"]


class ReportedRules(NamedTuple):
    """Rules as a report needs them.

    Attributes:
        search: The rules.
        mesh: The mesh of a map; of a deployment all devices.
        default: The rule for names that no key matches.
        replicated: The axes that no rule has to use.
        notes: What looks wrong about the rules.
        keys: The texts by which the report calls rules.
        meshes: The meshes of a deployment.
        look_up: The layout of a tensor of a deployment, by name and rank, in which the rule alone does not say it.
        used: The mesh and the axes of each rule of a deployment.
    """

    search: RuleSearch
    mesh: DeviceMesh | None
    default: LayoutRule | None
    replicated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keys: Mapping[str, str] = MappingProxyType({})
    meshes: Mapping[str, DeviceMesh] = MappingProxyType({})
    look_up: LookUp | None = None
    used: Mapping[str | None, Used] | None = None


def make_report(
    rules: ReportedRules, names: ReportNames, uneven: UnevenRule, followers: Followers | None = None
) -> LayoutReport:
    """Make the report on tensors of these names; see `LayoutMap.report`.

    Args:
        rules: those of a map or a deployment, ready for look-ups.
        names: the tensors.
        uneven: how dims are cut that do not divide.
        followers: the tensors that have no rules of their own.
    """
    return _ReportMaker(rules, checked_uneven(uneven), {} if followers is None else followers).report(_tensors(names))


class _ReportEntry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str | None
    bits: int | None


class _ReportMaker:
    def __init__(self, rules: ReportedRules, uneven: UnevenRule, followers: Followers) -> None:
        for name, entry in instance("followers", followers, Mapping).items():  # type: ignore[type-abstract]
            kinds = TensorLayout, Partition, SharedTiling, str
            if type(entry) is not tuple or len(entry) != 2 or not isinstance(entry[1], kinds):
                raise TypeError(
                    f"followers[{shown(name)}] must be the name of a tensor and a layout, got {shown(entry)}"
                )
        self._followers = followers
        self._said = rules
        self._rules = rules.search.rules
        self._keys = rules.keys
        self._look_up = rules.look_up
        self._default = rules.default
        layouts = [rule.layout for rule in (*self._rules.values(), rules.default) if rule is not None]
        self._mesh = _shared_mesh(layouts) if rules.mesh is None else rules.mesh
        self._uneven = uneven
        self._largest_shards: dict[tuple[TensorLayout, tuple[int, ...], UnevenRule], tuple[int, ...]] = {}
        self._clashes: list[Clash] = []
        self._rank_mismatches: list[RankMismatch] = []
        self._indivisible: list[IndivisibleDim] = []
        self._misfits: list[Misfit] = []

    def report(self, tensors: Iterator[_ReportEntry]) -> LayoutReport:
        unused = dict.fromkeys(key for key, rule in self._rules.items() if not rule.optional)
        reports: dict[str, TensorReport] = {}
        applied: dict[str | None, None] = {}
        for tensor in tensors:
            if tensor.name in reports:
                raise LayoutError(f"names holds {shown(tensor.name)} twice")
            leader, layout = self._followers.get(tensor.name, (tensor.name, None))
            rules = self._said.search.matching(leader)
            for rule in rules:
                unused.pop(rule, None)
            applied.update(dict.fromkeys(rules or (None,)))
            if layout is None:
                reports[tensor.name] = self._tensor(tensor, rules)
            else:
                reports[tensor.name] = self._follower(tensor, rules[0] if rules else None, layout)
        if are_adapters(reports):  # They are of some of the weights that there are rules for.
            unused.clear()
        losing = self._said.search.losing_rules(reports) if self._said.search.is_ordered else {}
        for rule in losing:
            unused.pop(rule, None)
        return LayoutReport(
            tensors=tuple(reports.values()),
            uneven=self._uneven,
            default=self._default,
            device_mesh=self._mesh,
            unused_rules=tuple(self._keys.get(rule, rule) for rule in unused),
            clashes=tuple(self._clashes),
            rank_mismatches=tuple(self._rank_mismatches),
            indivisible=tuple(self._indivisible),
            misfits=tuple(self._misfits),
            meshes=tuple(self._said.meshes.items()),
            notes=(*self._said.notes, *(self._never_wins(rule, by) for rule, by in losing.items())),
            unused_axes=tuple(self._unused_axes(applied)),
        )

    def _never_wins(self, rule: str, by: Mapping[str, int]) -> str:
        names = [shown(self._keys.get(one, one)) for one in by]
        count, first = sum(by.values()), f"rule {names[0]}" if len(names) == 1 else f"rules {', '.join(names[:3])}"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        taken = "the name" if count == 1 else f"all {count} names"
        return (
            f"rule {shown(self._keys.get(rule, rule))} never wins: {first}{more} before it "
            f"take{'s' * (len(names) == 1)} {taken} that it matches"
        )

    def _unused_axes(self, applied: Iterable[str | None]) -> Iterator[tuple[str, str, int]]:
        """Yield the axes of size over 1 that no rule which applies to a tensor uses; `None` is the default.

        Of a mesh by which no rule places anything none are given.
        """
        meshes = {"": self._mesh} if self._said.used is None else self._said.meshes
        axes: dict[str, set[str]] = {}
        for rule in applied:
            found = self._used_by(rule)
            if found is not None:
                axes.setdefault(found[0], set()).update(found[1])
        for name, used in axes.items():
            mesh = meshes.get(name)
            for axis, size in () if mesh is None else zip(mesh.axis_names, mesh.shape, strict=True):
                if size > 1 and axis not in used and axis not in self._said.replicated:
                    yield name, axis, size

    def _used_by(self, rule: str | None) -> Used | None:
        if self._said.used is not None:
            return self._said.used.get(rule)
        if rule is None:
            return None if self._default is None else ("", _axes_of(self._default.layout))
        return "", _axes_of(self._rules[rule].layout)

    def _tensor(self, tensor: _ReportEntry, rules: tuple[str, ...]) -> TensorReport:
        name, shape, dtype, bits = tensor
        rule = layout = num_shards = shard_shape = None
        uneven: UnevenRule | None = None
        if len(rules) > 1:
            self._clashes.append(Clash(name, tuple(self._keys.get(rule, rule) for rule in rules)))
        elif rules:
            rule = self._keys.get(rules[0], rules[0])
            layout, uneven = self._rules[rules[0]].layout, self._rules[rules[0]].uneven
            if self._said.search.is_ordered and (not shape or layout.rank < len(shape)):
                layout = of_leading_dims(layout, len(shape))
            if self._look_up is not None and layout.rank == len(shape):
                layout = self._placed(name, rule, len(shape))
        elif self._look_up is not None:
            uneven = None if self._default is None else self._default.uneven
            layout = self._placed(name, None, len(shape))
        elif self._default is not None:
            uneven = self._default.uneven
            # If the rank is too small, the default's own, which does not fit.
            layout = self._default.of_rank(len(shape)) or self._default.layout
        else:
            layout = TensorLayout((None,) * len(shape), self._mesh)
        uneven = uneven or self._uneven
        if layout is not None and self._fits(name, shape, rule, layout, uneven) and layout.device_mesh is not None:
            num_shards = layout.num_shards
            shard_shape = self._largest_shard(layout, shape, uneven)
        return TensorReport(name, shape, dtype, bits, rule, layout, num_shards, shard_shape, uneven)

    def _follower(
        self, tensor: _ReportEntry, rule: str | None, layout: TensorLayout | Partition | SharedTiling | str
    ) -> TensorReport:
        """Return the report on a tensor that is cut like another."""
        name, shape, dtype, bits = tensor
        said = None if rule is None else self._keys.get(rule, rule)
        why = layout if isinstance(layout, str) else ""
        uneven = self._uneven
        if isinstance(layout, Partition):
            uneven, layout = layout.uneven, layout.layout
        if isinstance(layout, SharedTiling):
            most, counts = layout.largest_shard_shape, layout.layout.num_shards
            return TensorReport(
                name, shape, dtype, bits, said, layout.layout, counts, most, self._uneven, layout
            )  # fmt: skip
        if not isinstance(layout, str):
            try:
                shard_shape = self._largest_shard(layout, shape, uneven)
                return TensorReport(
                    name, shape, dtype, bits, said, layout, layout.num_shards, shard_shape, uneven
                )  # fmt: skip
            except LayoutError as error:
                why = str(error)
        if isinstance(layout, str) or self._fits(name, shape, said, layout, uneven):
            self._misfits.append(Misfit(name, said, why))
        own = None if rule is None else self._rules[rule].layout
        return TensorReport(name, shape, dtype, bits, said, own, None, None, self._uneven)

    def _placed(self, name: str, rule: str | None, rank: int) -> TensorLayout | None:
        """Return the layout of a tensor of a deployment; if it has none, the reason is recorded."""
        assert self._look_up is not None
        try:
            layout = self._look_up(name, rank)
        except ShardwiseError as error:
            self._misfits.append(Misfit(name, rule, str(error)))
            return None
        if layout is None:
            self._misfits.append(Misfit(name, None, NO_RULE))
        return layout

    def _fits(
        self, name: str, shape: tuple[int, ...], rule: str | None, layout: TensorLayout, uneven: UnevenRule
    ) -> bool:
        """Return whether the layout can cut the shape; if not, the reason is recorded."""
        if layout.rank != len(shape):
            self._rank_mismatches.append(RankMismatch(name, rule, len(shape), layout.rank))
            return False
        if layout.device_mesh is None:
            return False
        counts = layout.num_shards
        for dim, spec in enumerate(layout.axes):
            if isinstance(spec, PackedDim):
                counts = (*counts[:dim], 1, *counts[dim + 1 :])  # Its parts are cut, each separately.
        dims = enumerate(zip(shape, counts, strict=True))
        indivisible = [IndivisibleDim(name, rule, dim, size, shards) for dim, (size, shards) in dims if size % shards]
        if layout.is_packed and not (indivisible and uneven == "even"):
            try:
                layout.partition(shape, uneven)
            except LayoutError as error:
                self._misfits.append(Misfit(name, rule, str(error)))
                return False
        self._indivisible += indivisible
        return not indivisible or uneven != "even"

    def _largest_shard(self, layout: TensorLayout, shape: tuple[int, ...], uneven: UnevenRule) -> tuple[int, ...]:
        found = self._largest_shards.get((layout, shape, uneven))
        if found is None:
            found = layout.partition(shape, uneven).largest_shard_shape
            self._largest_shards[layout, shape, uneven] = found
        return found


def _axes_of(layout: TensorLayout) -> frozenset[str]:
    """Return the axes that cut a tensor in a layout, including axes of which only a sub-axis does."""
    return frozenset(name.partition(":(")[0] for name in layout.named_axes())


def _shared_mesh(layouts: Iterable[TensorLayout]) -> DeviceMesh | None:
    meshes = {layout.device_mesh for layout in layouts} - {None}
    return meshes.pop() if len(meshes) == 1 else None


def _tensors(names: ReportNames) -> Iterator[_ReportEntry]:
    expected = "names must be a mapping, or tuples of (name, shape) or (name, shape, dtype)"
    if not isinstance(names, Iterable):
        raise TypeError(f"{expected}, got {shown(names)}")
    for item in names.items() if isinstance(names, Mapping) else names:
        if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 3:
            raise TypeError(f"{expected}, got {shown(item)}")
        if not isinstance(item[0], str):
            raise TypeError(f"names: a name must be a string, got {shown(item[0])}")
        name, *described = item
        shape, dtype = described if len(described) == 2 else _shape_and_dtype(described[0])
        shape, (dtype, bits) = _checked_shape(name, shape), _named_dtype(name, dtype)
        checked_size(-(-math.prod(shape) * (bits or 0) // 8), f"the bytes of {shown(name)}")
        yield _ReportEntry(name, shape, dtype, bits)


def _shape_and_dtype(described: Any) -> tuple[Any, Any]:
    if hasattr(described, "shape"):
        return described.shape, getattr(described, "dtype", None)
    if isinstance(described, (tuple, list)) and len(described) == 2 and isinstance(described[0], Iterable):
        return described[0], described[1]
    return described, None


def _checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    said = shown(name)
    sizes = sizes_of(f"the shape of {said}", shape)
    for dim, size in enumerate(sizes):
        checked_size(size, f"dim {dim} of {said}")
    checked_size(math.prod(sizes), f"the elements of {said}")
    return sizes


def _named_dtype(name: str, dtype: Any) -> tuple[str | None, int | None]:
    if dtype is None:
        return None, None
    found = find_dtype(dtype)
    if found is not None:
        return found.name, found.bits
    # Frameworks' own dtypes know their size too; numpy's scalar types only seem to.
    itemsize = getattr(dtype, "itemsize", None)
    if not isinstance(itemsize, int):
        try:
            dtype = dtype_of(dtype)
        except TypeError:
            raise TypeError(f"the dtype of {shown(name)} must be a dtype, got {shown(dtype)}") from None
        itemsize = dtype.itemsize
    return str(dtype), 8 * itemsize
