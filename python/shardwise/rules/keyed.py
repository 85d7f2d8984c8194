"""Layouts under keys that are regular expressions, as a mutable mapping: what a layout map is besides its answers."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from .._arguments import instance, optional
from .._fork import ForkLock
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from .layout_rule import LayoutRule, rule_of
from .search import Answers, MatchMode, Rule, checked_match, checked_path, compiled_rule

__all__ = ["KeyedRules", "naming_subject"]

Default = TypeVar("Default")

_NO_DEFAULT: Any = object()


class KeyedRules(MutableMapping[str, TensorLayout]):
    """Layouts under keys, and the search for the key that matches a path; `LayoutMap` says what they mean."""

    def __init__(
        self, device_mesh: DeviceMesh | None, match: MatchMode, backtracking: bool, ordered: bool = False
    ) -> None:
        self._device_mesh = optional("device_mesh", device_mesh, DeviceMesh)
        self._match: MatchMode = checked_match(match)
        self._backtracking = instance("backtracking", backtracking, bool)
        self._ordered = instance("ordered", ordered, bool)
        self._rules: dict[str, Rule] = {}
        # Taken by writers. Readers take no lock: writers replace `_answers` as a whole.
        self._lock = ForkLock()
        self._answers = Answers(self._rules, match, backtracking, ordered)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of rules whose layouts have no mesh of their own."""
        return self._device_mesh

    @property
    def ordered(self) -> bool:
        """True if the first rule that matches a path applies, with a layout for its leading dims."""
        return self._ordered

    @property
    def backtracking(self) -> bool:
        """True if rules are accepted that only a backtracking search can find."""
        return self._backtracking

    # The types of a Mapping do not allow for a look-up that finds nothing.
    def __getitem__(self, path: str) -> TensorLayout | None:  # type: ignore[override]
        """Look up the layout of a path; see the class.

        Raises:
            LayoutError: if several rules match the path; lists them.
            TypeError: if the path is not a string.
        """
        try:
            rule = self._answers[path]
        except TypeError:
            checked_path(path)  # Something that cannot be hashed is not a path either.
            raise
        return None if rule is None else rule.layout

    @overload
    def get(self, path: str) -> TensorLayout | None: ...
    @overload
    def get(self, path: str, default: Default) -> TensorLayout | Default: ...
    def get(self, path: str, default: Any = None) -> Any:
        """Look up the layout of a path, or give the default if no rule matches it.

        >>> from shardwise import LayoutMap
        >>> LayoutMap().get("dense/kernel", "nothing")
        'nothing'
        """
        layout = self[path]
        return default if layout is None else layout

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a path, in the order of the map; a look-up refuses more than one.

        >>> from shardwise import LayoutMap
        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"], layout_map["dense"] = ("x", None), ("y", None)
        >>> layout_map.matching_rules("dense/kernel")
        ('kernel', 'dense')
        """
        return self._answers.search.matching(checked_path(path))

    def rule(self, key: str) -> LayoutRule:
        """Give what was inserted under exactly this key: its layout and its uneven rule; a `KeyError` if there is none.

        >>> from shardwise import LayoutMap
        >>> layout_map = LayoutMap()
        >>> layout_map["kernel"] = LayoutRule(("x", None), uneven="ceil")
        >>> layout_map.rule("kernel")
        LayoutRule(layout=TensorLayout(('x', None)), uneven='ceil')
        """
        return self._rules[key].value

    def rules(self) -> dict[str, LayoutRule]:
        """Return all rules by their keys, in the order of insertion."""
        return {key: rule.value for key, rule in tuple(self._rules.items())}

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

        >>> from shardwise import LayoutMap
        >>> layout = TensorLayout((None, "model"))
        >>> for size in (2, 4):
        ...     layout_map = LayoutMap(DeviceMesh((size,), ("model",)))
        ...     layout_map["kernel"] = layout
        ...     print(layout_map["kernel"].num_shards, layout.device_mesh)
        (1, 2) None
        (1, 4) None
        """
        pattern = compiled_rule(key, self._match, self._backtracking)
        with naming_subject(f"rule {shown(key)}"):
            rule = rule_of(layout)
        with self._lock:
            if key in self._rules:
                axes = self._rules[key].value.layout.axes
                raise LayoutError(
                    f"rule {shown(key)} is in the map already, with axes {shown(axes)}; delete it to replace it"
                )
            with naming_subject(f"rule {shown(key)}"):
                rule = rule.with_mesh(self._device_mesh)
            self._rules[key] = Rule(rule, pattern)
            self._answers = Answers(self._rules, self._match, self._backtracking, self._ordered)

    def __delitem__(self, key: str) -> None:
        """Remove the rule under exactly this key; a `KeyError` if there is none."""
        with self._lock:
            del self._rules[key]
            self._answers = Answers(self._rules, self._match, self._backtracking, self._ordered)

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._rules))

    def __contains__(self, key: object) -> bool:
        """Say whether this is a key; a rule that matches it is not enough."""
        return key in self._rules

    def items(self) -> ItemsView[str, TensorLayout]:
        """Return a view of the keys with their layouts, in the order of insertion."""
        return _RuleItems(self._rules)

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
        """Return the layout under exactly this key, after inserting the default if there is none."""
        with self._lock:
            if key not in self._rules:
                self[key] = default  # type: ignore[assignment]  # None is refused there, by name.
            return self._rules[key].value.layout

    def update(self, other: Any = (), /, **rules: Any) -> None:
        """Insert the rules of a mapping or of pairs; those of a layout map with their uneven rules.

        Raises:
            LayoutError: as for a single rule. The rules before the refused one stay in the map.
            TypeError: if this is neither a mapping nor made of pairs of a key and a layout.

        >>> from shardwise import LayoutMap
        >>> layout_map, other = LayoutMap(), LayoutMap()
        >>> other["kernel"] = LayoutRule(("x", None), uneven="ceil")
        >>> layout_map.update(other)
        >>> layout_map == other
        True
        """
        given: Any = other.rules() if isinstance(other, KeyedRules) else other
        if not hasattr(given, "keys"):
            given = _pairs(given)
        super().update(given, **rules)


class _RuleItems(ItemsView[str, TensorLayout]):
    """The rules of a layout map by their keys; a key is looked up literally, not as a pattern."""

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


def _pairs(given: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of an iterable, one by one: it may never end."""
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"update takes a mapping, or pairs of a key and a layout; got {shown(given)}")
    for position, pair in enumerate(given):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"update takes pairs of a key and a layout; entry {position} is {shown(pair)}")
        yield pair[0], pair[1]


@contextmanager
def naming_subject(what: str) -> Iterator[None]:
    """Put the subject of an error that is raised inside before its message."""
    try:
        yield
    except (LayoutError, TypeError) as error:
        raise type(error)(f"{what}: {error}") from None
