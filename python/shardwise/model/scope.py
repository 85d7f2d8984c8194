"""`layout_map_scope`: variables made under it get no data until their path, and so their layout, is known."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .._arguments import instance
from .._text import counted, elements_text, shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..partition import Partition
from ..rules.layout_map import LayoutMap
from .hooks import entered

__all__ = ["LayoutScope", "PlacedVariable", "current_scope", "layout_map_scope"]

#: New threads start with an empty context: a scope belongs to its thread or its task.
_CURRENT: ContextVar[LayoutScope | None] = ContextVar("shardwise.layout_map_scope", default=None)

_MOST_NAMED = 5
#: The most paths, and characters of each, that rules are compared with to find the nearest; comparing is quadratic.
_MOST_COMPARED, _LONGEST_COMPARED = 200, 100

#: The packages that a warning's `stacklevel` passes over, to reach a user's line.
_INNER_MODULES = frozenset({"contextlib", "jax", "keras", "shardwise", "tensorflow", "torch"})


#: Gives a layout in the terms of another API, from the rule that a variable's path matches (`None` if none does, and
#: the variable is replicated) and the `TensorLayout`.
Dialect = Callable[[str | None, TensorLayout], Any]


def _as_it_is(rule: str | None, layout: TensorLayout) -> TensorLayout:
    return layout


@dataclass(frozen=True)
class PlacedVariable:
    """A variable and its place: the path that names it, the rule that the path matches, layout and partition."""

    #: Attribute names and indices, joined by `.`.
    path: str
    #: The key of the layout map that matched, or `None`: then the variable is replicated.
    rule: str | None
    #: The layout, over a mesh.
    layout: TensorLayout
    #: The layout applied to the variable's shape.
    partition: Partition
    #: Gives the layout in the terms of the scope's own API, from the rule and the `TensorLayout`.
    dialect: Dialect

    @classmethod
    def replicated(cls, path: str, shape: Sequence[int], mesh: DeviceMesh, dialect: Dialect) -> PlacedVariable:
        """Return the placement of a variable that nothing cuts."""
        layout = TensorLayout((None,) * len(shape), mesh)
        return cls(path, None, layout, layout.partition(shape), dialect)

    @property
    def shown_layout(self) -> Any:
        """The layout as the variable gives it."""
        return self.dialect(self.rule, self.layout)


class LayoutScope:
    """The value of `layout_map_scope`: the layout map, and whose shards are wanted.

    Args:
        layout_map: rules by object path, with a mesh.
        local_devices: the devices whose shards are made; all of the mesh's, if not given.
        dialect: what a variable gives as its layout, from the rule (`None` for a replicated variable) and the
            `TensorLayout`; by default the latter.

    Raises:
        LayoutError: if the map has no mesh.
        MeshError: if the mesh lacks a local device.
    """

    def __init__(
        self,
        layout_map: LayoutMap,
        local_devices: Iterable[Any] | None = None,
        dialect: Dialect = _as_it_is,
    ) -> None:
        instance("layout_map", layout_map, LayoutMap)
        mesh = layout_map.device_mesh
        if mesh is None:
            raise LayoutError(
                "layout_map has no device_mesh, and variables that no rule matches are replicated over it; make it "
                "as LayoutMap(device_mesh)"
            )
        self._layout_map = layout_map
        self._device_mesh = mesh
        self._local_devices = None if local_devices is None else _in_mesh_order(mesh, local_devices)
        self._dialect = dialect
        self._matched = False
        self._warned = False

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map."""
        return self._layout_map

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the layout map."""
        return self._device_mesh

    @property
    def local_devices(self) -> tuple[Any, ...] | None:
        """The devices whose shards are made, in device-index order; `None` for all."""
        return self._local_devices

    @property
    def dialect(self) -> Dialect:
        """The layout that a variable gives, from the rule and the `TensorLayout`."""
        return self._dialect

    def place(self, path: str, shape: Sequence[int]) -> PlacedVariable:
        """Look up the layout of the variable at `path`, and check that it fits.

        Raises:
            LayoutError: if the rule's layout does not have the rank of the variable, or cuts a dim that does not divide
                and has no uneven rule of its own; if several rules match.
        """
        layout, default = self._layout_map[path], self._layout_map.default
        rule, uneven, source = None, None, "the default"
        if layout is not None:
            self._matched = True
            (rule,) = self._layout_map.matching_rules(path)
            uneven, source = self._layout_map.rule(rule).uneven, f"rule {rule!r}"
        elif default is not None:
            layout, uneven = self._layout_map.layout_of(path, len(shape)), default.uneven
        if layout is None:
            return PlacedVariable.replicated(path, shape, self._device_mesh, self._dialect)
        what = f"variable {path!r} of shape {tuple(shape)}: {source} gives the layout {layout.axes}"
        if layout.unreduced:
            raise LayoutError(f"{what}, unreduced over {shown(layout.unreduced)}; a variable cannot be a partial sum")
        if layout.rank != len(shape):
            raise LayoutError(f"{what}, of rank {layout.rank}, but the variable has rank {len(shape)}")
        for dim, (size, shards, spec) in enumerate(zip(shape, layout.num_shards, layout.axes, strict=True)):
            if size % shards and uneven in (None, "even") and not isinstance(spec, PackedDim):
                axes = f"axis {spec!r} of" if isinstance(spec, str) else f"axes {spec!r} of together"
                raise LayoutError(
                    f"{what}, but dim {dim} has {elements_text(size)}, not a multiple of {axes} size {shards}"
                )
        try:
            return PlacedVariable(path, rule, layout, layout.partition(shape, uneven or "even"), self._dialect)
        except ShardwiseError as error:
            raise type(error)(f"{what}: {error}") from None

    def warn_if_nothing_matches(self, paths: Sequence[str]) -> None:
        """Warn, once in the life of the scope, if the map has rules and none has matched any variable so far."""
        if self._matched or self._warned or not self._layout_map or not paths:
            return
        if self._layout_map.default is not None:
            return  # The default applies to them.
        self._warned = True
        rules, candidates = list(self._layout_map), {path[:_LONGEST_COMPARED]: path for path in paths[:_MOST_COMPARED]}
        nearest = [
            (rule, candidates[difflib.get_close_matches(rule[:_LONGEST_COMPARED], candidates, 1, 0.0)[0]])
            for rule in rules[:_MOST_NAMED]
        ]
        listed = ", ".join(f"{shown(path)} (nearest to rule {shown(rule)})" for rule, path in nearest)
        more = f", and {counted(len(rules) - _MOST_NAMED, 'more rule')}" if len(rules) > _MOST_NAMED else ""
        warnings.warn(
            f"no rule of the layout map matches, so all {len(paths)} variables are replicated: {listed}{more}",
            stacklevel=_level_of_caller(),
        )


def current_scope() -> LayoutScope | None:
    """Return the innermost `layout_map_scope` of this thread or task, or `None`.

    >>> print(current_scope())
    None
    """
    return _CURRENT.get()


@contextmanager
def layout_map_scope(layout_map: LayoutMap, *, local_devices: Iterable[Any] | None = None) -> Iterator[LayoutScope]:
    """Give every variable made under the scope the layout that its object path finds in the layout map.

    Under the scope a `Variable` holds no data, and neither do the variables of a Keras 3 model. Once the object path is
    known, the variable takes the layout of its path and is initialised shard by shard. The path is the attribute names
    and indices that lead from the model to the variable, joined by `.`: `blocks.0.dense.kernel`. A variable that no
    rule matches is replicated.

    For plain objects, `initialize_variables(model)` says which object the paths begin at. Keras models need no such
    call (see `shardwise.interop.keras`), but `keras` has to be imported before the scope is entered.

    Args:
        layout_map: rules by object path; it must have a mesh.
        local_devices: the devices whose shards of plain variables are made; all of the mesh's, if not given.

    Raises:
        LayoutError: if the map has no mesh.
        MeshError: if the mesh lacks a local device.

    Scopes nest, and the innermost counts; each thread and each asyncio task has its own. The name and the meaning are
    those of `tf.keras.dtensor.experimental.layout_map_scope`.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, LayoutMap, Variable, initialize_variables
    >>> class Dense:
    ...     def __init__(self):
    ...         self.kernel = Variable((4, 8), "float32", np.ones)
    ...         self.bias = Variable((8,), "float32", np.zeros)
    >>> layout_map = LayoutMap(DeviceMesh((2,), ("model",)))
    >>> layout_map["kernel"] = (None, "model")
    >>> with layout_map_scope(layout_map):
    ...     dense = initialize_variables(Dense())
    >>> dense.kernel.layout.axes, dense.kernel.shards[1].data.shape
    ((None, 'model'), (4, 4))
    >>> dense.bias.layout.axes
    (None,)
    """
    with scope_entered(LayoutScope(layout_map, local_devices)) as scope:
        yield scope


@contextmanager
def scope_entered(scope: LayoutScope) -> Iterator[LayoutScope]:
    """Enter a scope that was made; see `layout_map_scope`."""
    with entered(scope):
        token = _CURRENT.set(scope)
        try:
            yield scope
        finally:
            _CURRENT.reset(token)


def _level_of_caller() -> int:
    """Return the `stacklevel` with which a warning points at the first line outside shardwise and the frameworks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER_MODULES:
        level, frame = level + 1, frame.f_back
    return level


def _in_mesh_order(mesh: DeviceMesh, devices: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(devices, str):
        raise TypeError(f"local_devices must be a sequence of device labels, got the string {shown(devices)}")
    return tuple(mesh.device(i) for i in sorted({mesh.index_of_label(device) for device in devices}))
