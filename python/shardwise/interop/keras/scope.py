"""The effect of `layout_map_scope` on Keras: layers made under it let their variables wait for their object path."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import keras

from ..._fork import ForkLock
from ..._tree import attributes_of, children, named_leaves
from ...model.scope import LayoutScope, PlacedVariable
from .variables import (
    AFTER_BUILD,
    AFTER_TRACKING,
    adopt,
    defer,
    in_stateless_scope,
    lay_out_like,
    replicate_on_mesh_of,
    unpacked,
    waits_for,
)

__all__ = ["Building", "building"]

_CURRENT: ContextVar[Building | None] = ContextVar("shardwise.interop.keras.building", default=None)


def _own_attributes(layer: Any) -> set[str]:
    layer.probe = keras.Layer(name="shardwise")  # TensorFlow adds attributes for the first thing that it tracks
    return {name for name, _ in attributes_of(layer)} - {"probe"}


#: The attributes that Keras itself gives to every layer and model; lists of all layers and variables are among them.
_OWN_ATTRIBUTES = frozenset().union(
    *(_own_attributes(make(name="shardwise")) for make in (keras.Layer, keras.Model, keras.Sequential))
)

#: The types that hold data.
_LEAVES = (keras.Variable, keras.random.SeedGenerator)

#: The types of attributes on the way to a variable; besides them Keras tracks only sets, which have no order.
_FOLLOWED = (keras.Layer, *_LEAVES, dict, list, tuple)


class Building:
    """The layers that were made under one scope, and their variables that wait for a layout."""

    def __init__(self, scope: LayoutScope) -> None:
        self._scope = scope
        self._layers: list[weakref.ref[Any]] = []
        #: The names of each layer's attributes, in the order in which they were first set, by the layer's identity.
        self._names: dict[int, dict[str, None]] = {}
        self._waiting: list[Any] = []
        self._after_build: list[Callable[[], None]] = []
        #: The variables that no longer wait.
        self._paths: list[str] = []
        #: The lock with which one thread makes a value while others that want it wait.
        self._lock = ForkLock()
        self._is_settling = False
        #: True if the scope has ended. A model that is built later has all its attributes.
        self.is_closed = False

    def add_layer(self, layer: Any) -> None:
        """Let the variables that the layer will make wait."""
        if _building_of(layer) is None:
            self._layers.append(weakref.ref(layer))
            self._names[id(layer)] = {}
            vars(layer)["_shardwise"] = self  # not by assignment, which Keras tracks

    def add_name(self, layer: Any, name: str) -> None:
        """Record that an attribute of a layer is set."""
        self._names.setdefault(id(layer), {}).setdefault(name)

    def add_variable(self, variable: Any) -> None:
        """Let a variable that has no value wait for its layout."""
        defer(variable, self)
        self._waiting.append(variable)

    def after_build(self, work: Callable[[], None]) -> None:
        """Do what a backend does with the values of a layer that has been built, as soon as it has values."""
        if self._waiting:
            self._after_build.append(work)
        else:
            work()

    def after_settling(self, work: Callable[[], None]) -> None:
        """Do what a backend does with the value of a variable that is about to wait, as soon as it has one."""
        self._after_build.append(work)

    def settle(self) -> None:
        """Give every variable its path and its layout, then make the values, in the order of creation.

        Raises:
            LayoutError: if a layout does not fit its variable, before any value is made; or if an initializer fails.
        """
        with self._lock:
            if self._is_settling:
                return
            self._is_settling = True
            try:
                self._settle()
            finally:
                self._is_settling = False
        if self.is_closed:
            self._scope.warn_if_nothing_matches(self._paths)

    def _settle(self) -> None:
        placed = {id(variable): (placement, variable) for placement, variable in self._placements()}
        for variable in self._waiting:
            if id(variable) not in placed:
                placement = unpacked(self._scope.place(variable.path.replace("/", "."), tuple(variable.shape)))
                placed[id(variable)] = placement, variable
        self._paths += [placed[id(variable)][0].path for variable in self._waiting]
        while self._waiting:
            adopt(self._waiting[0], placed.pop(id(self._waiting[0]))[0])
            del self._waiting[0]
        for placement, variable in placed.values():
            adopt(variable, placement)
        while self._after_build:
            self._after_build.pop(0)()

    def _placements(self) -> Iterator[tuple[PlacedVariable, Any]]:
        """Yield the variables that want a layout, each with its place by the first path that leads to it."""
        seen = set()
        for root in self._roots():
            # A layer by itself goes by its name, as it will in a functional model.
            prefix = () if isinstance(root, keras.Model) else (root.name,)
            for names, leaf in named_leaves(root, _LEAVES, self._held):
                # The state of a seed generator is replicated, whatever the rules say about the layer around it.
                is_seed = isinstance(leaf, keras.random.SeedGenerator)
                variable = leaf.state if is_seed else leaf
                if id(variable) in seen or not waits_for(variable, self):
                    continue
                seen.add(id(variable))
                path, shape = ".".join((*prefix, *names)), tuple(variable.shape)
                if is_seed:
                    yield (
                        PlacedVariable.replicated(f"{path}.state", shape, self._scope.device_mesh, self._scope.dialect),
                        variable,
                    )
                else:
                    yield unpacked(self._scope.place(path, shape)), variable

    def _roots(self) -> list[Any]:
        """Return the layers that no other layer holds, in the order of creation."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None]
        held: set[int] = set()
        for layer in layers:
            # Keras keeps a list of all the layers that a layer holds, in whatever containers.
            for _, value in attributes_of(layer):
                if isinstance(value, (list, keras.Layer)):
                    within = value if isinstance(value, list) else (value,)
                    held.update(id(child) for child in within if isinstance(child, keras.Layer) and child is not layer)
        return [layer for layer in layers if id(layer) not in held]

    def _held(self, node: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(node, keras.Layer):
            if isinstance(node, (keras.Function, keras.Sequential)):
                yield from ((layer.name, layer) for layer in node.layers)
            for name, child in attributes_of(node, self._names.get(id(node), ())):
                if name in _OWN_ATTRIBUTES or not isinstance(child, _FOLLOWED):
                    continue
                if not isinstance(child, keras.Variable) or _building_of(node) is self:
                    yield _public_name(node, name), child
        elif isinstance(node, (dict, list, tuple)):
            yield from children(node)


def _building_of(layer: Any) -> Building | None:
    building: Building | None = vars(layer).get("_shardwise")
    return building


def _public_name(node: Any, name: str) -> str:
    """`kernel` for an attribute `_kernel` that a property `kernel` shows."""
    public = name.lstrip("_")
    return public if public != name and isinstance(getattr(type(node), public, None), property) else name


@contextmanager
def building(scope: LayoutScope) -> Iterator[None]:
    """Let the Keras layers that are made in the context take their layouts from the scope."""
    _install()
    made = Building(scope)
    token = _CURRENT.set(made)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        made.is_closed = True
    made.settle()


@cache
def _install() -> None:
    """Have Keras tell us of new layers, weights and slots; without a scope, that costs a look-up each."""
    _install_on_layers(keras.Layer)
    _install_on_optimizers(keras.optimizers.Optimizer)


def _install_on_layers(layer_class: Any) -> None:
    new_layer, add_weight = layer_class.__new__, layer_class.add_weight

    @wraps(new_layer)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = new_layer(cls, *args, **kwargs)
        current = _CURRENT.get()
        if current is not None:
            current.add_layer(layer)
        return layer

    @wraps(add_weight)
    def weight_added(self: Any, *args: Any, **kwargs: Any) -> Any:
        building = _building_of(self)
        if building is None:
            return add_weight(self, *args, **kwargs)
        # In a StatelessScope Keras makes variables without values.
        with keras.StatelessScope(initialize_variables=False):
            variable = add_weight(self, *args, **kwargs)
        building.add_variable(variable)
        return variable

    # PyTorch's modules take the values of a layer when it has been built, long before its path is known.
    after_build = getattr(layer_class, AFTER_BUILD)

    @wraps(after_build)
    def weights_built(self: Any) -> None:
        building = _building_of(self)
        if building is None:
            after_build(self)
        else:
            building.after_build(lambda: after_build(self))

    # And the value of a variable that a layer gets later.
    after_tracking = getattr(layer_class, AFTER_TRACKING)

    @wraps(after_tracking)
    def variable_tracked(self: Any, variable: Any) -> None:
        building = _building_of(self)
        if building is None or not in_stateless_scope():
            after_tracking(self, variable)
        else:
            building.after_settling(lambda: after_tracking(self, variable))

    set_attribute = layer_class.__setattr__

    @wraps(set_attribute)
    def attribute_set(self: Any, name: str, value: Any) -> None:
        building = _building_of(self)
        if building is not None:
            building.add_name(self, name)
        set_attribute(self, name, value)

    layer_class.__new__, layer_class.add_weight = staticmethod(new), weight_added
    setattr(layer_class, AFTER_BUILD, weights_built)
    setattr(layer_class, AFTER_TRACKING, variable_tracked)
    if keras.backend.backend() == "torch":
        # A module keeps layers apart from its other attributes, so the order of assignment is lost.
        layer_class.__setattr__ = attribute_set


def _install_on_optimizers(optimizer_class: Any) -> None:
    add_slot, new_subclass = optimizer_class.add_variable_from_reference, optimizer_class.__init_subclass__

    @wraps(add_slot)
    def slot_added(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = add_slot(self, reference_variable, *args, **kwargs)
        lay_out_like(slot, reference_variable)
        return slot

    def subclass_made(cls: Any, /, **kwargs: Any) -> None:
        new_subclass(**kwargs)
        if "build" in vars(cls):
            cls.build = _replicating_the_rest(cls.build)

    optimizer_class.add_variable_from_reference = slot_added
    optimizer_class.__init_subclass__ = classmethod(subclass_made)
    optimizer_class.build = _replicating_the_rest(optimizer_class.build)
    subclasses = optimizer_class.__subclasses__()
    for cls in subclasses:
        if "build" in vars(cls):
            cls.build = _replicating_the_rest(cls.build)
        subclasses += cls.__subclasses__()


def _replicating_the_rest(build: Callable[..., None]) -> Callable[..., None]:
    """Return an optimizer's `build`, after which all its variables have layouts; each class makes its own in it."""

    @wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        (references,) = (*args, *kwargs.values())
        replicate_on_mesh_of(self.variables, references)

    return built
