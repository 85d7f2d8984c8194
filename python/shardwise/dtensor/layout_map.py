"""Layouts by name, after `LayoutMap` of Keras 2 on DTensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from .._arguments import optional
from .._core import RuleSet
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..model.scope import LayoutScope, scope_entered
from ..rules.layout_map import LayoutMap as TensorLayoutMap
from ..rules.search import checked_path, compiled_rule
from .layout import Layout
from .mesh import Mesh

__all__ = ["LayoutMap", "layout_map_scope"]


class LayoutMap(MutableMapping[str, "Layout | None"]):
    """A dict of layouts whose keys are regular expressions when a name is looked up.

    A name that is a key gives that key's layout. Otherwise the first key, in the order of insertion, that matches from
    the name's beginning, as `re.match` does, gives its layout; if none matches, the layout is `None`.

    Args:
        mesh: A mesh for the layouts of variables that no key matches.
        backtracking: Whether to accept keys that only a backtracking search can match; see `shardwise.LayoutMap`.

    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> layout_map = LayoutMap(mesh=mesh)
    >>> layout_map["dense.*kernel"] = Layout.inner_sharded(mesh, "x", 2)
    >>> layout_map[".*bias"] = Layout.replicated(mesh, 1)
    >>> layout_map["dense_1.kernel"].sharding_specs
    ['unsharded', 'x']
    >>> layout_map["model/dense_1.kernel"] is None
    True
    """

    def __init__(self, mesh: Mesh | None = None, *, backtracking: bool = False) -> None:
        optional("mesh", mesh, Mesh)
        self._mesh = mesh
        self._backtracking = backtracking
        self._rules: dict[str, tuple[re.Pattern[str], Layout]] = {}
        self._compiled: _Compiled | None = None

    def __getitem__(self, key: str) -> Layout | None:
        exact = self._rules.get(checked_path(key))
        if exact is not None:
            return exact[1]
        if self._compiled is None:
            self._compiled = _Compiled(self._rules)
        return self._compiled.first_match(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the layout of a name, or `default` when no key matches it.

        >>> LayoutMap().get("dense.kernel", "nothing")
        'nothing'
        """
        layout = self[key]
        return default if layout is None else layout

    def __setitem__(self, key: str, layout: Layout | None) -> None:
        pattern = compiled_rule(key, "match", self._backtracking)
        if not isinstance(layout, Layout):
            raise TypeError(f"the layout of {shown(key)} must be a Layout, got {type(layout).__name__}")
        if key in self._rules:
            raise LayoutError(f"{shown(key)} is in the LayoutMap already, with {shown(self._rules[key][1])}")
        self._rules[key] = (pattern, layout)
        self._compiled = None

    def __delitem__(self, key: str) -> None:
        del self._rules[key]
        self._compiled = None

    def __contains__(self, key: object) -> bool:
        return key in self._rules

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def get_default_mesh(self) -> Mesh | None:
        """Return the mesh that the map was made with.

        >>> LayoutMap().get_default_mesh() is None
        True
        """
        return self._mesh

    def scope(self) -> AbstractContextManager[LayoutScope]:
        """Return a scope in which each new variable gets the layout of its object path; see `layout_map_scope`.

        >>> import numpy as np
        >>> from shardwise import Variable, initialize_variables
        >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> layout_map = LayoutMap(mesh=mesh)
        >>> layout_map["kernel"] = Layout.inner_sharded(mesh, "x", 2)
        >>> with layout_map.scope():
        ...     model = initialize_variables({"kernel": Variable((4, 8), "float32", np.zeros)})
        >>> model["kernel"].layout == layout_map["kernel"], model["kernel"].shards[1].data.shape
        (True, (4, 4))
        """
        return layout_map_scope(self)


def layout_map_scope(layout_map: LayoutMap) -> AbstractContextManager[LayoutScope]:
    """Give every variable made in the scope the layout of its object path: `shardwise.layout_map_scope` for these maps.

    The variables' `layout` is the rule's `Layout`, or a replicated one. Where several rules match, the first counts.

    Args:
        layout_map: Rules by object path; it must have a mesh, over which variables that no rule matches are replicated.

    Raises:
        LayoutError: if the map has no mesh, or a layout that a `TensorLayout` cannot express.

    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> with layout_map_scope(LayoutMap(mesh=mesh)) as scope:
    ...     scope.device_mesh.shape
    (2,)
    """
    if not isinstance(layout_map, LayoutMap):
        raise TypeError(f"layout_map must be a LayoutMap of shardwise.dtensor, got {type(layout_map).__name__}")
    mesh = layout_map.get_default_mesh()
    if mesh is None:
        raise LayoutError("layout_map has no mesh; make it as LayoutMap(mesh=…)")
    rules = _FirstCounts(mesh.to_device_mesh(), match="match", backtracking=layout_map._backtracking)
    given = {key: layout for key, (_, layout) in layout_map._rules.items()}
    for key, layout in given.items():
        rules[key] = layout.to_tensor_layout()

    def as_given(rule: str | None, layout: TensorLayout) -> Layout:
        return Layout.replicated(mesh, layout.rank) if rule is None else given[rule]

    return scope_entered(LayoutScope(rules, dialect=as_given))


class _FirstCounts(TensorLayoutMap):
    """A map of the main dialect in which the first of several matching rules counts."""

    def __getitem__(self, path: str) -> Any:
        return next((super(_FirstCounts, self).__getitem__(rule) for rule in self.matching_rules(path)), None)

    def matching_rules(self, path: str) -> tuple[str, ...]:
        return super().matching_rules(path)[:1]


class _Compiled:
    """The rules of a map at one moment, searched for together; a few are left to Python's own engine."""

    def __init__(self, rules: dict[str, tuple[re.Pattern[str], Layout]]) -> None:
        self._rules = tuple(rules.values())
        self._find = RuleSet(tuple(rules), "match").find

    def first_match(self, name: str) -> Layout | None:
        found, untried = self._find(name)
        first = found[0] if found else len(self._rules)
        earlier = (position for position in untried if position < first and self._rules[position][0].match(name))
        first = next(earlier, first)
        return self._rules[first][1] if first < len(self._rules) else None
