"""Nested structures of arrays, walked with the path of each array."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ._text import shown
from .errors import LayoutError

__all__ = ["map_arrays"]


def map_arrays(function: Callable[[str, int], object], tree: Any, separator: str) -> Any:
    """Put `function(path, rank)` in the place of each array; `LayoutMap.apply` says how the tree is walked.

    >>> import numpy as np
    >>> map_arrays(lambda path, rank: f"{path} has rank {rank}", {"h": [np.ones(3), None]}, "/")
    {'h': ['h/0 has rank 1', None]}
    """
    if not isinstance(separator, str):
        raise TypeError(f"separator must be a string, got {shown(separator)}")
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
        names = getattr(node, "_fields", range(len(node)))
        children = [self.node(child, (*path, str(name))) for name, child in zip(names, node, strict=True)]
        if isinstance(node, list):
            return children
        return node._make(children) if hasattr(node, "_make") else tuple(children)

    def _dataclass(self, node: Any, path: tuple[str, ...]) -> Any:
        # A copy, since the constructor of a dataclass may insist on arrays; frozen ones have no other way either.
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
