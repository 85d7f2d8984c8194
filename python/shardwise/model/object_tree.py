"""Object trees walked with the path that leads to each object: attribute names and indices, joined by `.`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

__all__ = ["children", "named_leaves"]

Leaf = TypeVar("Leaf")

#: The path of what holds an object, and its name there.
_Chain = tuple["_Chain | None", str]

_ATOMS = (
    *(type(None), str, bytes, bytearray, bool, int, float, complex, np.ndarray, np.generic, np.dtype),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
)


def named_leaves(
    root: Any,
    leaf: type[Leaf] | tuple[type[Leaf], ...],
    children_of: Callable[[Any], Iterable[tuple[str, Any]]] | None = None,
) -> Iterator[tuple[tuple[str, ...], Leaf]]:
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
    # A path is a chain of names up to the root, spelt out for leaves only: of all objects of a deep tree, the paths
    # would take memory in the square of its depth.
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
    """What an object holds, with names: items by key or index, fields of named tuples, slots, attributes.

    >>> list(children({"a": 1, 2: "b"}))
    [('a', 1), ('2', 'b')]
    """
    if isinstance(node, Mapping):
        for key, child in tuple(node.items()):
            yield str(key), child
    elif isinstance(node, (list, tuple, deque)):
        names = getattr(node, "_fields", range(len(node)))
        for name, child in zip(names, tuple(node), strict=True):
            yield str(name), child
    elif not isinstance(node, _ATOMS):
        yield from _slots(node)
        yield from tuple(getattr(node, "__dict__", {}).items())


def _slots(node: Any) -> Iterator[tuple[str, Any]]:
    for owner in reversed(type(node).__mro__):
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = name.startswith("__") and not name.endswith("__")
            try:
                yield name, getattr(node, f"_{owner.__name__.lstrip('_')}{name}" if mangled else name)
            except AttributeError:
                continue  # a slot that nothing was assigned to
