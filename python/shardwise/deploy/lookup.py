"""The look-up of a tensor's place in a deployment: its rule, its coordinates, and its layout over the devices there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._arguments import integer
from .._fork import importing
from .._text import digits_alike, shown
from .._types import Numbers
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..placing import NOT_PLACED, Placed
from ..rules.layout_rule import LayoutRule
from ..rules.pattern import FieldSearch
from ..rules.search import REMEMBERED_PATHS, MatchMode, Rule, RuleSearch, checked_path, compiled_rule
from .numbers import Number
from .ready_rule import ReadyRule, TensorPlace
from .rule import At, Coordinates, DeploymentRule, tells_digits_apart, with_fields
from .world import WORLD

if TYPE_CHECKING:
    import re

    from ..rules.report_maker import ReportedRules, Used

__all__ = ["RuleLookup"]


class _AlikeNames(NamedTuple):
    """The rule and the fields of names that differ in digits only.

    Attributes:
        ready: Their rule.
        fields: For each entry of `at` the slices of the fields that it uses, in these names.
        entries: For each of them the slice that has all of these fields, and the coordinates that were found, by it.
        places: The places that were found for names of the rule, by the coordinates.
    """

    ready: ReadyRule
    fields: tuple[tuple[slice, ...], ...]
    entries: tuple[tuple[slice, dict[str, tuple[int, ...]]], ...]
    places: dict[tuple[tuple[int, ...], ...], TensorPlace]


class RuleLookup:
    """The rules of a deployment, prepared for look-ups, with caches of layouts, places and devices.

    Args:
        rules: the rules by their keys.
        default: the rule for names that no rule matches, if any.
        meshes: all meshes by name, with that of the world.
        numbers: the numbers and lists that rules name.
        match: where in a name a rule has to match.
        at: the coordinates of names by their keys, along axes for which their rules give none.

    Raises:
        LayoutError: if a key is not a regular expression, or a rule names a mesh, an axis or a number which is unknown.
    """

    __slots__ = (
        "_alike", "_at", "_at_search", "_coordinates", "_default", "_devices", "_grids", "_is_blind", "_joined",
        "_kinds", "_match", "_meshes", "_numbers", "_ready", "keys", "search",
    )  # fmt: skip

    def __init__(
        self,
        rules: Mapping[str, DeploymentRule],
        default: DeploymentRule | None,
        meshes: Mapping[str, DeviceMesh],
        numbers: Mapping[str, Number],
        match: MatchMode,
        at: Mapping[str, Mapping[str, At]],
    ) -> None:
        self._default, self._meshes, self._numbers, self._match = default, meshes, numbers, match
        #: The keys by what is searched for, in which the fields are written out.
        self.keys: dict[str, str] = {}
        self._ready: dict[str, ReadyRule] = {}
        self._coordinates: dict[Any, Coordinates] = {}
        searched = {}
        for key, rule in rules.items():
            pattern = compiled_rule(with_fields(key), match, False)
            self.keys[pattern.pattern] = key
            searched[pattern.pattern] = Rule(rule.placed, pattern)
            self._ready[pattern.pattern] = self._prepared(f"rule {shown(key)}", rule, pattern)
        #: The search for the rules of a name.
        self.search = RuleSearch(searched, match, False)
        #: The coordinates and their expression, by what is searched for.
        self._at: dict[str, tuple[Mapping[str, At], re.Pattern[str]]] = {}
        for key, places in at.items():
            pattern = compiled_rule(with_fields(key), match, False)
            self._at[pattern.pattern] = places, pattern
        found = {key: Rule(LayoutRule(()), pattern) for key, (_, pattern) in self._at.items()}
        self._at_search = RuleSearch(found, match, False) if found else None
        self._joined: dict[tuple[str, str], ReadyRule] = {}
        self._is_blind = not any(map(tells_digits_apart, [*searched, *self._at]))
        for key, place in self._at.items():
            self._check_at(key, place[0])
        self._kinds: dict[bytes | str, _AlikeNames | None] = {}
        #: The same by the names' texts without digits and the rule, which some names match and others do not.
        self._alike: dict[tuple[bytes, int], _AlikeNames] = {}
        #: The numbers of a mesh's devices along its axes, by mesh; and its parts, by mesh and coordinates.
        self._grids: dict[int, Numbers] = {}
        self._devices: dict[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], DeviceMesh] = {}

    def _check_at(self, key: str, places: Mapping[str, At]) -> None:
        """Refuse coordinates along axes that no mesh has."""
        known = dict.fromkeys(axis for name, mesh in self._meshes.items() if name != WORLD for axis in mesh.axis_names)
        for axis in places:
            if axis not in known:
                raise LayoutError(f"at[{shown(key)}] names the axis {shown(axis)}; the meshes have {', '.join(known)}")

    def _prepared(
        self,
        what: str,
        rule: DeploymentRule,
        pattern: re.Pattern[str] | None,
        elsewhere: Mapping[str, re.Pattern[str]] | None = None,
    ) -> ReadyRule:
        """Return a rule with its mesh and names looked up; fields in `elsewhere` are those of other coordinates."""
        name = rule.mesh
        if name is None:
            named = [each for each in self._meshes if each != WORLD]
            if len(named) != 1:
                raise LayoutError(f"{what} names no mesh; the deployment has {', '.join(named) or 'none'}")
            (name,) = named
        if name not in self._meshes:
            known = ", ".join(map(repr, self._meshes))
            raise LayoutError(f"{what} names the mesh {shown(name)}; the deployment has {known}")
        mesh = self._meshes[name]
        try:
            rule.layout.with_mesh(mesh)
            at: list[tuple[int, Coordinates, tuple[str, ...]]] = []
            searched: list[FieldSearch | None] = []
            is_blind = True
            numbers: dict[str, Number] = {}
            sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
            for axis, where in rule.at:
                if axis not in sizes:
                    raise LayoutError(f"at names the axis {shown(axis)}; the mesh {name!r} has {mesh.axis_names}")
                if any(used.partition(":(")[0] == axis for used in rule.layout.named_axes()):
                    raise LayoutError(f"axis {shown(axis)} is in at, so its sub-axes cannot be in the layout")
                said = (elsewhere or {}).get(axis, pattern)
                fields = set() if said is None else set(said.groupindex)
                coordinates = Coordinates(axis, where, sizes[axis])
                own = tuple(used for used in coordinates.names if used in fields)
                numbers |= {
                    used: self._number(axis, used, fields, sizes) for used in coordinates.names if used not in own
                }
                # Rules with equal entries share what was found for a text.
                coordinates = self._coordinates.setdefault((name, axis, where, own), coordinates)
                at.append((mesh.axis_names.index(axis), coordinates, own))
                is_blind = is_blind and not (said is not None and own and tells_digits_apart(said.pattern))
                searched.append(FieldSearch(said, self._match) if said is not None and own else None)
                if not own:
                    coordinates.of((), (), numbers)  # Refused now rather than when a name is looked up.
            return ReadyRule(rule, rule.placed, mesh, tuple(at), pattern, numbers, tuple(searched), is_blind, {})
        except ShardwiseError as error:
            raise type(error)(f"{what}: {error}") from None

    def _number(self, axis: str, name: str, fields: set[str], sizes: Mapping[str, int]) -> Number:
        number = self._numbers.get(name, sizes.get(name))
        if number is None:
            known = ", ".join([*sorted(fields), *self._numbers, *sizes])
            raise LayoutError(f"at[{shown(axis)}] names {shown(name)}; known are {known}")
        if number != sizes.get(name, number):
            raise LayoutError(
                f"at[{shown(axis)}]: {name} is a number, {shown(number)}, and also an axis of another size"
            )
        return number

    def ready(self) -> Iterator[ReadyRule]:
        """Yield the prepared rules, with the coordinates that `at` gives to names along axes of the rules' meshes."""
        yield from self._ready.values()
        for places, pattern in self._at.values():
            for name, mesh in self._meshes.items():
                own = {axis: where for axis, where in places.items() if axis in mesh.axis_names}
                if name != WORLD and own:
                    yield self._prepared("at", DeploymentRule((), name, own), pattern)

    def matching(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a name, in the order of the rules."""
        found = set(self.search.matching(checked_path(path)))
        return tuple(key for pattern, key in self.keys.items() if pattern in found)

    def layout_of(self, path: str, rank: int) -> TensorLayout | None:
        """Look up the layout of a tensor; `None` if no rule matches and there is no default."""
        found = self.place(path)
        return None if found is None else self.layout(found, path, rank)

    def layout(self, found: TensorPlace, path: str, rank: int) -> TensorLayout:
        """Return the layout of a tensor of this name and rank at a place.

        Raises:
            LayoutError: if the rule is for another rank.
        """
        if rank not in found.layouts:
            found.layouts[rank] = self._made(found, rank)
        layout = found.layouts[rank]
        if layout is None:
            own = found.ready.rule.layout.rank
            if found.ready.pattern is None:
                raise LayoutError(
                    f"tensor {shown(path)} has rank {rank}, but the default layout needs rank {own} or more"
                )
            rule = ", ".join(map(shown, self.matching(path)))
            raise LayoutError(f"tensor {shown(path)} has rank {rank}, but the layout of its rule {rule} has {own}")
        return layout

    def _made(self, found: TensorPlace, rank: int) -> TensorLayout | None:
        ready, own = found.ready, found.ready.rule.layout
        layout = LayoutRule(own).of_rank(rank) if ready.pattern is None else own
        return None if layout is None or layout.rank != rank else layout.with_mesh(self._devices_at(ready, found.at))

    def _devices_at(self, ready: ReadyRule, at: tuple[tuple[int, ...], ...]) -> DeviceMesh:
        """Return the part of a mesh at some coordinates, with all its axes."""
        mesh = ready.mesh
        key = id(mesh), tuple((axis, places) for (axis, _, _), places in zip(ready.at, at, strict=True))
        if key not in self._devices:
            chosen = self._grids.get(id(mesh))
            if chosen is None:
                chosen = self._grids[id(mesh)] = np.arange(mesh.size).reshape(mesh.shape)
            for axis, places in key[1]:
                chosen = chosen.take(places, axis)
            if chosen.shape == mesh.shape:
                self._devices[key] = mesh
            else:
                positions = chosen.ravel().tolist()
                self._devices[key] = DeviceMesh(chosen.shape, mesh.axis_names, mesh.labels_at(positions))
        return self._devices[key]

    def place(self, path: str) -> TensorPlace | None:
        """Look up the place of a tensor; `None` if no rule matches and there is no default.

        Raises:
            LayoutError: if several rules match the name, or a coordinate cannot be worked out.
        """
        # Names that differ in digits only match alike, if no rule tells digits apart: they are searched for once.
        try:
            key = digits_alike(path) if self._is_blind else path
            kind = self._kinds[key]
        except (AttributeError, KeyError, TypeError):
            key = digits_alike(checked_path(path)) if self._is_blind else path
            kind = self._kind_of(path, key)
        if kind is None:
            return None
        try:
            return kind.places[tuple([known[path[span]] for span, known in kind.entries])]
        except KeyError:
            return self._place_of(kind, path)

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this rank; `NOT_PLACED` if no rule matches and there is no default.

        Raises:
            LayoutError: as `place` and `layout` do.
        """
        found = self.place(path)
        if found is None:
            return NOT_PLACED
        placed = found.placed.get(rank) if type(rank) is int else None
        if placed is None:
            rank, rule = integer("rank", rank), found.ready.rule
            placed = found.placed[rank] = Placed(self.layout(found, path, rank), rule.uneven, rule.shared)
        return placed

    def placed_alike(self, paths: Sequence[str], rank: int) -> Iterator[tuple[Placed, Sequence[int]]]:
        """Yield what `placed` gives for names that differ in digits only, each with the positions of its names."""
        kind = None
        if self._is_blind and len(paths) > 1 and self.place(paths[0]) is not None:
            kind = self._kinds[digits_alike(paths[0])]
        if kind is None or not "".join(paths).isascii():
            each: dict[int, tuple[Placed, list[int]]] = {}
            for at, path in enumerate(paths):
                placed = self.placed(path, rank)
                each.setdefault(id(placed), (placed, []))[1].append(at)
            yield from each.values()
            return
        letters = np.frombuffer("".join(paths).encode(), np.uint8).reshape(len(paths), -1)
        codes = np.zeros(len(paths), np.int64)
        for number, (span, _) in enumerate(kind.entries):
            if span.start == span.stop:
                continue
            texts = np.ascontiguousarray(letters[:, span]).view(f"S{span.stop - span.start}").ravel()
            _, firsts, which = np.unique(texts, return_index=True, return_inverse=True)
            known: dict[tuple[int, ...], int] = {}
            found = [self._at_of(kind, number, paths[first]) for first in firsts.tolist()]
            own = np.array([known.setdefault(at, len(known)) for at in found])
            # Numbered anew after each entry, so that no product of many entries' numbers is beyond 64 bits.
            codes = np.unique(codes * len(known) + own[which.ravel()], return_inverse=True)[1].ravel()
        order = np.argsort(codes, kind="stable")
        for positions in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            yield self.placed(paths[positions[0]], rank), positions.tolist()

    def _place_of(self, kind: _AlikeNames, path: str) -> TensorPlace:
        """Return the place of a name, given the values of its fields."""
        key = tuple([self._at_of(kind, number, path) for number in range(len(kind.entries))])
        return kind.places.get(key) or kind.places.setdefault(key, TensorPlace(kind.ready, key))

    def _at_of(self, kind: _AlikeNames, number: int, path: str) -> tuple[int, ...]:
        """Return the coordinates that one entry of `at` gives to a name."""
        ready, (span, known) = kind.ready, kind.entries[number]
        _, coordinates, own = ready.at[number]
        try:
            found = coordinates.of(tuple([path[field] for field in kind.fields[number]]), own, ready.numbers)
        except ShardwiseError as error:
            raise type(error)(f"tensor {shown(path)}: {error}") from None
        if len(known) >= REMEMBERED_PATHS:
            known.clear()
        known[path[span]] = found
        return found

    def _kind_of(self, path: str, key: bytes | str) -> _AlikeNames | None:
        """Return the rule of names that differ in digits only, and the positions of its fields in them."""
        keys = self.search.matching(path)
        if len(keys) > 1:
            self.search.rule(path)  # Raises, and lists them.
        kind = None
        if keys or self._default is not None:
            ready = self._with_at(path, keys[0] if keys else "")
            alike = (digits_alike(path), id(ready)) if ready.is_blind else None
            kind = None if alike is None else self._alike.get(alike)
            if kind is None:
                found, entries = [], []
                for (_, coordinates, own), fields in zip(ready.at, ready.fields, strict=True):
                    spans = {} if fields is None else fields.spans(path)
                    found.append(tuple(spans[name] for name in own))
                    # By the text of a single field, wherever it is in a name.
                    known = coordinates.by_text if len(own) == 1 else dict[str, tuple[int, ...]]()
                    entries.append((_around(found[-1]), known))
                kind = _AlikeNames(ready, tuple(found), tuple(entries), ready.places)
                if alike is not None:
                    self._alike[alike] = kind
        if len(self._kinds) >= REMEMBERED_PATHS:
            self._kinds.clear()
            self._alike.clear()
        self._kinds[key] = kind
        return kind

    def _with_at(self, path: str, key: str) -> ReadyRule:
        """Return the rule under a key, or the default, with the coordinates that `at` gives to the name."""
        ready = self._ready[key] if key else self._ready_default()
        keys = () if self._at_search is None else self._at_search.matching(path)
        if len(keys) > 1:
            raise LayoutError(
                f"the name {shown(path)} matches {len(keys)} keys of at, but only one may match: "
                f"{', '.join(map(shown, keys))}"
            )
        if not keys:
            return ready
        if (key, keys[0]) not in self._joined:
            (places, pattern), rule = self._at[keys[0]], ready.rule
            own = {axis for axis, _ in rule.at}
            more = {axis: at for axis, at in places.items() if axis not in own and axis in ready.mesh.axis_names}
            whole = DeploymentRule(
                rule.layout, rule.mesh, {**more, **dict(rule.at)}, rule.uneven, rule.shared, rule.optional
            )
            what = f"rule {shown(self.keys[key])}" if key else "default"
            elsewhere = dict.fromkeys(more, pattern)
            self._joined[key, keys[0]] = self._prepared(f"{what} at {shown(keys[0])}", whole, ready.pattern, elsewhere)
        return self._joined[key, keys[0]]

    def _ready_default(self) -> ReadyRule:
        assert self._default is not None
        return self._ready.get("") or self._ready.setdefault("", self._prepared("default", self._default, None))

    def reported(self, replicated: tuple[str, ...], notes: tuple[str, ...], prefix: str) -> ReportedRules:
        """Return the rules as a report needs them, with the axes that no rule has to use, and notes on the rules."""
        with importing:
            from ..rules.report_maker import ReportedRules

        meshes = {name: mesh for name, mesh in self._meshes.items() if name != WORLD}
        rules = {pattern: self._ready[pattern].rule for pattern in self.keys}
        places = {axis for places, _ in self._at.values() for axis in places}
        used: dict[str | None, Used] = {pattern: _used(rule, meshes, places) for pattern, rule in rules.items()}
        default = None
        if self._default is not None:
            used[None] = _used(self._default, meshes, places)
            default = LayoutRule(self._default.layout, self._default.uneven)
        named = replicated, notes, {pattern: key.removeprefix(prefix) for pattern, key in self.keys.items()}, meshes
        return ReportedRules(self.search, self._meshes[WORLD], default, *named, self.layout_of, used)


def _around(spans: tuple[slice, ...]) -> slice:
    """Return the slice from the first to the last of some spans; empty if there are none."""
    return slice(min((span.start for span in spans), default=0), max((span.stop for span in spans), default=0))


def _used(rule: DeploymentRule, meshes: Mapping[str, DeviceMesh], places: set[str]) -> Used:
    """Return the name of a rule's mesh, and its axes that the rule uses, or along which names have coordinates."""
    cut = {name.partition(":(")[0] for name in rule.layout.named_axes()}
    return rule.mesh or next(iter(meshes), WORLD), frozenset({*cut, *places, *(axis for axis, _ in rule.at)})
