"""Every public name of shardwise: functions, and the constructor, methods, properties and operators of classes."""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import shardwise.dtensor
import shardwise.interop

#: The operators that a class of shardwise may define itself.
OPERATORS = {
    "__array__", "__call__", "__contains__", "__copy__", "__delitem__", "__enter__", "__eq__", "__ge__", "__getitem__",
    "__getstate__", "__gt__", "__hash__", "__init__", "__iter__", "__le__", "__len__", "__lt__", "__ne__", "__or__",
    "__reduce__", "__repr__", "__setitem__", "__setstate__", "__str__", "__add__", "__radd__", "__sub__", "__mul__",
    "__matmul__", "__float__", "__int__", "__index__", "__bool__", "__dlpack__", "__format__", "__reversed__",
}  # fmt: skip

#: Neither is called with anything: the state is what pickling writes and nobody else makes.
LEFT_OUT = {"__setstate__"}


#: Whose constructor is for the functions that make them, as their documentation says.
MADE_ELSEWHERE = [shardwise.dtensor.DTensor, shardwise.rules.LayoutReport, shardwise.rules.TensorReport]


def is_enum(value: Any) -> bool:
    """Whether a value is an enumeration, whose constructor is the standard library's."""
    return inspect.isclass(value) and issubclass(value, enum.Enum)


@dataclass(frozen=True)
class Name:
    """A function or class of a module, or a member of a class."""

    owner: Any
    name: str

    @property
    def on_instances(self) -> bool:
        """Whether it is asked of an instance of the owner."""
        return inspect.isclass(self.owner)

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters to be filled in, those of an instance's method without itself; none if nobody knows."""
        function = getattr(self.owner, self.name)
        try:
            found = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return []
        bound = not self.on_instances or isinstance(
            inspect.getattr_static(self.owner, self.name), (classmethod, staticmethod)
        )
        return found if bound else found[1:]

    def __str__(self) -> str:
        """Where to find it."""
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}"


def modules() -> list[Any]:
    """The modules whose `__all__` is public."""
    names = ["shardwise", "shardwise.store", "shardwise.dtensor", "shardwise.interop"]
    # The functions for Keras take models and need the framework; tests/interop has them.
    names += [f"shardwise.interop.{module.name}" for module in pkgutil.iter_modules(shardwise.interop.__path__)
              if not module.name.startswith("_") and not module.ispkg]  # fmt: skip
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("shardwise"):
                raise
    return found


def public_names() -> list[Name]:
    """All of them, each object once."""
    found: dict[int, Name] = {}
    for module in modules():
        for name in module.__all__:
            value = getattr(module, name)
            if (
                callable(value)
                and typing.get_origin(value) is None
                and not is_enum(value)
                and value not in MADE_ELSEWHERE
            ):
                found.setdefault(id(value), Name(module, name))
    return list(found.values())


def public_classes() -> list[type]:
    """The classes among them."""
    values = (getattr(name.owner, name.name) for name in public_names())
    return [value for value in values if inspect.isclass(value) and not issubclass(value, BaseException)]


def members(kind: type) -> Iterator[Name]:
    """What an instance of a class may be asked: what shardwise defines, or has from the standard library's mappings."""
    for name in dir(kind):
        defined = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name == "__init__" and kind in MADE_ELSEWHERE:
            continue
        ours = defined.__module__.partition(".")[0] in ("shardwise", "collections")
        if ours and not is_enum(getattr(kind, name)) and (name in OPERATORS - LEFT_OUT or not name.startswith("_")):
            yield Name(kind, name)


def documentation(name: Name) -> list[str | None]:
    """The docstrings of a name and of what it belongs to."""
    return [name.owner.__doc__, getattr(getattr(name.owner, name.name, None), "__doc__", None)]
