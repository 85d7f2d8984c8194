"""Trees of objects walked with the path that leads to each: keys, indices and the names of fields and attributes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

from ._arguments import instance
from ._text import shown
from .errors import LayoutError

__all__ = ["attributes_of", "children", "map_arrays", "named_leaves"]

TreeLeaf = TypeVar("TreeLeaf")

#: The path of an object's parent, and its name in the parent.
_Chain = tuple["_Chain | None", str]

_ATOMS = (
    *(type(None), str, bytes, bytearray, bool, int, float, complex, np.ndarray, np.generic, np.dtype),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
)


def named_leaves(
    root: Any,
    leaf: type[TreeLeaf] | tuple[type[TreeLeaf], ...],
    children_of: Callable[[Any], Iterable[tuple[str, Any]]] | None = None,
) -> Iterator[tuple[tuple[str, ...], TreeLeaf]]:
    """Each `leaf` in the tree once, with the first path that reaches it: depth first, in the order of definition.

    Args:
        root: any object; trees as deep as memory allows, with cycles or without.
        leaf: the type, or types, of the objects that are looked for; nothing below them is visited.
        children_of: what an object holds, with names; `children` if it is not given.

    >>> class Block:
    ...     def __init__(self):
    ...         self.first = 1.5
    ...         self.rest = [{"a": 2.5}, (3.5, self.first)]
    >>> [(".".join(path), value) for path, value in named_leaves(Block(), float)]
    [('first', 1.5), ('rest.0.a', 2.5), ('rest.1.0', 3.5)]
    """
    # Kept by reference: the id of a temporary object would be given out again.
    seen: dict[int, Any] = {}
    # A path is a chain of names up to the root, spelt out for leaves only: the paths of all objects
    # would take memory quadratic in the depth of the tree.
    stack: list[tuple[_Chain | None, Any]] = [(None, root)]
    while stack:
        path, node = stack.pop()
        if id(node) in seen:
            continue
        if isinstance(node, leaf):
            seen[id(node)] = node
            yield _names(path), node
        elif not isinstance(node, _ATOMS):
            seen[id(node)] = node
            held = (children if children_of is None else children_of)(node)
            stack.extend([((path, name), child) for name, child in held][::-1])


def _names(path: _Chain | None) -> tuple[str, ...]:
    names = []
    while path is not None:
        path, name = path
        names.append(name)
    return tuple(names[::-1])


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of an object, with names: items by key or index, fields of named tuples, slots, attributes.

    >>> list(children({"a": 1, 2: "b"}))
    [('a', 1), ('2', 'b')]
    """
    if isinstance(node, Mapping):
        for key, child in tuple(node.items()):
            yield str(key), child
    elif isinstance(node, (list, tuple, deque)):
        yield from _items(node)
    elif not isinstance(node, _ATOMS):
        yield from _slots(node)
        yield from tuple(getattr(node, "__dict__", {}).items())


def _items(node: list[Any] | tuple[Any, ...] | deque[Any]) -> list[tuple[str, Any]]:
    """Return the entries of a sequence, by the names of its fields or by index."""
    names = getattr(node, "_fields", range(len(node)))
    return [(str(name), child) for name, child in zip(names, tuple(node), strict=True)]


def _slots(node: Any) -> Iterator[tuple[str, Any]]:
    for owner in reversed(type(node).__mro__):
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = name.startswith("__") and not name.endswith("__")
            try:
                yield name, getattr(node, f"_{owner.__name__.lstrip('_')}{name}" if mangled else name)
            except AttributeError:
                continue  # a slot that nothing was assigned to


def map_arrays(function: Callable[[str, int], object], tree: Any, separator: str) -> Any:
    """Replace each array with `function(path, rank)`; `LayoutMap.apply` says how the tree is walked.

    >>> import numpy as np
    >>> map_arrays(lambda path, rank: f"{path} has rank {rank}", {"h": [np.ones(3), None]}, "/")
    {'h': ['h/0 has rank 1', None]}
    """
    instance("separator", separator, str)
    try:
        return _Walk(function, separator).node(tree, ())
    except RecursionError:
        raise LayoutError("tree is nested too deeply to be walked") from None


class _Walk:
    def __init__(self, function: Callable[[str, int], object], separator: str) -> None:
        self._function = function
        self._separator = separator
        self._open: set[int] = set()

    def node(self, node: Any, path: tuple[str, ...]) -> Any:
        if node is None:
            return None
        if isinstance(node, Mapping):
            with self._inside(node, path):
                return {key: self.node(child, (*path, self._key(key, path))) for key, child in node.items()}
        # A named tuple with a shape is the description of an array, as the entries of a checkpoint are.
        if isinstance(node, (list, tuple)) and not _is_described(node):
            with self._inside(node, path):
                return self._sequence(node, path)
        if hasattr(node, "shape"):
            return self._function(self._separator.join(path), self._rank(node, path))
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            with self._inside(node, path):
                return self._dataclass(node, path)
        raise TypeError(f"{self._name(path)} must be an array or a structure of arrays, got {type(node).__name__}")

    def _sequence(self, node: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> Any:
        made = [self.node(child, (*path, name)) for name, child in _items(node)]
        if isinstance(node, list):
            return made
        return node._make(made) if hasattr(node, "_make") else tuple(made)

    def _dataclass(self, node: Any, path: tuple[str, ...]) -> Any:
        # A copy, since the constructor of a dataclass may insist on arrays, and frozen ones allow no other way.
        result = copy.copy(node)
        for field in dataclasses.fields(node):
            object.__setattr__(result, field.name, self.node(getattr(node, field.name), (*path, field.name)))
        return result

    @contextmanager
    def _inside(self, node: object, path: tuple[str, ...]) -> Iterator[None]:
        if id(node) in self._open:
            raise LayoutError(f"{self._name(path)} contains itself")
        self._open.add(id(node))
        yield
        self._open.remove(id(node))

    def _key(self, key: object, path: tuple[str, ...]) -> str:
        if isinstance(key, str):
            return key
        try:
            if isinstance(key, bool):
                raise TypeError
            return str(operator.index(key))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"a key of {self._name(path)} must be a string or an integer, got {shown(key)}") from None

    def _rank(self, node: Any, path: tuple[str, ...]) -> int:
        try:
            return len(node.shape)
        except (TypeError, ValueError):
            raise TypeError(f"{self._name(path)} must have a shape of known rank, got {shown(node.shape)}") from None

    def _name(self, path: tuple[str, ...]) -> str:
        return f"tree at {self._separator.join(path)!r}" if path else "tree"


def _is_described(node: Any) -> bool:
    shape = getattr(node, "shape", None)
    return isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) and hasattr(node, "dtype")


def attributes_of(node: Any, order: Iterable[str] = ()) -> list[tuple[str, Any]]:
    """Return the attributes of an object by name, wherever they are kept: those in `order` first, in that order.

    A `torch.nn.Module` keeps its submodules separately, in a dict `_modules`.

    >>> class Module: ...
    >>> module = Module()
    >>> module.scale, module._modules = 2, {"layer": "a module"}
    >>> [name for name, _ in attributes_of(module, ["layer", "gone"])]
    ['layer', 'scale', '_modules']
    """
    kept = dict(vars(node))
    modules = kept.get("_modules")
    if isinstance(modules, dict):
        kept |= {name: module for name, module in modules.items() if isinstance(name, str) and name not in kept}
    first = [name for name in order if name in kept]
    return [(name, kept[name]) for name in dict.fromkeys([*first, *kept])]
