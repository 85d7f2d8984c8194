"""Keras variables that wait for their layout, and then have `.layout` and `.shards`.

All private names of Keras that shardwise uses are in this file; `PRIVATE_NAMES` lists them for a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope

from ..._text import shown
from ...array.sharded import Shard
from ...errors import LayoutError
from ...model.scope import PlacedVariable
from .._plain import plain_layout
from .placing import initial_value, local_data, sharding_of

__all__ = [
    "AFTER_BUILD",
    "AFTER_TRACKING",
    "PRIVATE_NAMES",
    "Settler",
    "adopt",
    "defer",
    "in_stateless_scope",
    "lay_out_like",
    "replicate_on_mesh_of",
    "unpacked",
    "waits_for",
]

#: The members of `keras.Variable` that shardwise needs beyond its public interface: the value, which is `None` while it
#: waits; the sharding that assignments keep to; the initializer; and the method by which Keras, back from a
#: `StatelessScope`, makes the value. Beside these it needs `in_stateless_scope`, which has no public name.
PRIVATE_NAMES = ("_value", "_dtype", "_layout", "_initializer", "_deferred_initialize")


#: The methods by which a layer gives its backend the values, once it has been built, and that of a variable added
#: later.
AFTER_BUILD, AFTER_TRACKING = "_post_build", "_post_track_variable"


class Settler(Protocol):
    """The source of the layouts of waiting variables: the `Building` of the scope that they were made in."""

    #: True if the scope has ended.
    is_closed: bool

    def settle(self) -> None:
        """Give every waiting variable its layout and its value."""


class _VariableState:
    """Notes on a Keras variable."""

    __slots__ = ("building", "initializer", "placement")

    def __init__(
        self, building: Settler | None, initializer: Any = None, placement: PlacedVariable | None = None
    ) -> None:
        #: The building that will give it a layout; `None` once it has one.
        self.building = building
        #: The function that will make its value, while it waits.
        self.initializer = initializer
        self.placement = placement


@cache
def _laid_out_class(base: Any) -> type:
    """Return the class of a backend's variables, with layouts. It adds no slots: `__class__` may be assigned."""

    class LaidOut(base):  # type: ignore[misc]
        _shardwise: _VariableState

        @property
        def layout(self) -> Any:
            """The layout that the variable's object path found; replicated if it found none.

            A `TensorLayout`, or under a scope of `shardwise.dtensor` a `Layout` of that dialect.
            """
            return _placement(self).shown_layout

        @property
        def object_path(self) -> str:
            """The path that named the variable in the layout map."""
            return _placement(self).path

        @property
        def shards(self) -> list[Shard]:
            """The arrays of the mesh's devices, in device-index order; devices of other hosts are left out."""
            return _shards(_placement(self), self.value)

        @property
        def value(self) -> Any:
            """The value, which its first use outside of a `StatelessScope` makes."""
            _settle(self)
            return super().value

        def assign(self, value: Any) -> Any:
            """Assign a value, which is placed as the layout says."""
            _settle(self)
            return super().assign(value)

        def _deferred_initialize(self) -> None:
            building = self._shardwise.building
            if building is not None and building.is_closed:
                # Keras asks for all variables that wait, also those of a model that failed before. Their
                # errors surface when their values are used, not here.
                with suppress(LayoutError):
                    building.settle()

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copies and pickles are ordinary variables, as those of copied and pickled layers are."""
            _settle(self)
            state = {name: value for name, value in vars(self).items() if name != "_shardwise"} | {"_layout": None}
            return base.__new__, (base,), state

    LaidOut.__name__, LaidOut.__qualname__, LaidOut.__module__ = base.__name__, base.__qualname__, base.__module__
    return LaidOut


def _is_laid_out(variable: Any) -> bool:
    return "_shardwise" in vars(variable)


def waits_for(variable: Any, building: Settler) -> bool:
    """Return whether the variable has no layout, and is not waiting for one that another building will give it."""
    return not _is_laid_out(variable) or variable._shardwise.building is building


def defer(variable: Any, building: Settler) -> None:
    """Let a variable without a value wait until `building` settles it."""
    variable._shardwise = _VariableState(building, variable._initializer)
    # What Keras shows as the value while it traces; only the shape and the dtype matter then.
    variable._initializer = keras.ops.zeros
    variable.__class__ = _laid_out_class(variable.__class__)


def adopt(variable: Any, placement: PlacedVariable) -> None:
    """Give a variable its layout, and make its value if it is waiting, or else place the one that it has.

    Raises:
        LayoutError: if the initializer raises or gives something of another shape or dtype; the variable keeps
            waiting. Also as `unpacked`.
    """
    placement = unpacked(placement)
    sharding = sharding_of(placement.partition)
    if not _is_laid_out(variable):
        variable.__class__ = _laid_out_class(variable.__class__)
    if sharding is not None:
        variable._layout = sharding
    if variable._value is None:
        _initialize(variable, placement.path, sharding)
        variable._shardwise = _VariableState(None, placement=placement)
    else:
        variable._shardwise = _VariableState(None, placement=placement)
        if sharding is not None:
            variable.assign(variable.value)


def lay_out_like(variable: Any, reference: Any) -> None:
    """Give an optimizer's slot the layout of the variable that it belongs to, if that has one."""
    if _is_laid_out(reference) and not _is_laid_out(variable) and variable.shape == reference.shape:
        adopt(variable, replace(_placement(reference), path=_dotted_path(variable)))


def replicate_on_mesh_of(variables: Iterable[Any], references: Iterable[Any]) -> None:
    """Replicate the variables that have no layout over the mesh of the first reference that has one."""
    laid_out = next((reference for reference in references if _is_laid_out(reference)), None)
    if laid_out is None:
        return
    mesh, dialect = _placement(laid_out).partition.device_mesh, _placement(laid_out).dialect
    for variable in variables:
        if not _is_laid_out(variable):
            path, shape = _dotted_path(variable), tuple(variable.shape)
            adopt(variable, PlacedVariable.replicated(path, shape, mesh, dialect))


def unpacked(placement: PlacedVariable) -> PlacedVariable:
    """Return the same placement with a layout of whole dims.

    Raises:
        LayoutError: if a packed dim gives a device several segments; a Keras value has one.
    """
    try:
        layout = plain_layout(placement.layout)
    except LayoutError as error:
        raise LayoutError(f"variable {shown(placement.path)}: rule {shown(placement.rule)}: {error}") from None
    if layout is placement.layout:
        return placement
    return replace(
        placement, layout=layout, partition=layout.partition(placement.partition.shape, placement.partition.uneven)
    )


def _dotted_path(variable: Any) -> str:
    path: str = variable.path
    return path.replace("/", ".")


def _initialize(variable: Any, path: str, sharding: Any) -> None:
    initializer = variable._shardwise.initializer
    if sharding is not None:
        variable._value = initial_value(initializer, path, tuple(variable.shape), variable._dtype, sharding)
        variable._initializer = None
        return
    placeholder = variable._initializer
    variable._initializer = lambda shape, dtype: initial_value(initializer, path, shape, dtype)
    try:
        super(type(variable), variable)._deferred_initialize()
    except BaseException:
        variable._initializer = placeholder
        raise


def _settle(variable: Any) -> None:
    """Let the variable's building give it its layout, unless Keras is only tracing."""
    building = variable._shardwise.building
    if building is not None and not in_stateless_scope():
        building.settle()


def _placement(variable: Any) -> PlacedVariable:
    _settle(variable)
    placement: PlacedVariable | None = variable._shardwise.placement
    if placement is None:
        raise LayoutError(f"variable {shown(variable.path)} has no layout yet: Keras is still tracing the model")
    return placement


def _shards(placement: PlacedVariable, value: Any) -> list[Shard]:
    partition = placement.partition
    indices, replicas = partition.devices_indices_map(), partition.replica_ids().tolist()
    if sharding_of(placement.partition) is not None:
        data = local_data(value)
        held = [(i, data[i]) for i in range(len(replicas)) if i in data]
    else:
        array = value if isinstance(value, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(value))
        held = list(enumerate(partition.views(array)))
    devices = list(indices)
    return [Shard(devices[i], indices[devices[i]], replicas[i], array) for i, array in held]
