"""The other values of a training run in the files of ranks: the random states of each, and all else once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...._text import shown
from ....errors import ParseError
from ...data.location import Location
from ...tensors.checkpoint import KeyPath, StoredObject
from ...tensors.stored import StoredTensor
from .pickles import Record
from .rank_parts import Gathered
from .tensors import Container, items_within

__all__ = ["Extras", "is_same_value"]


class Extras:
    """The contents of files with other values of a run: the random states of each rank, and all else once.

    Attributes:
        objects: The values that are not tensors.
        paths: The keys that lead to each.
    """

    def __init__(self, path: Location, containers: Sequence[Container]) -> None:
        """Read the files.

        Raises:
            ParseError: if the values that all ranks have in common differ.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        self.paths: dict[str, KeyPath] = {}
        gathered: dict[str, Gathered] = {}
        said: dict[str, tuple[Any, str]] = {}
        for rank, container in enumerate(containers):
            for path_to, value in _values(container.root(), rank):
                name = ".".join(path_to)
                if len(path_to) > 1:
                    self.paths[name] = path_to
                held = Gathered(name)
                if held.add(container, value, len(containers)):
                    gathered.setdefault(name, Gathered(name)).add(container, value, len(containers))
                    continue
                first, where = said.setdefault(name, (value, container.file.path.name))
                if not is_same_value(first, value):
                    raise ParseError(
                        f"{container.file.path}: {shown(name)} is {shown(value)}, but {shown(first)} in {where}; they "
                        "are not of one run"
                    )
        self.tensors = {name: held.tensor(path) for name, held in gathered.items()}
        for name, (value, _) in said.items():
            self.objects[name] = StoredObject(name, partial(_plain_value, value))


def _values(root: Any, rank: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of a file with their keys; a list or tuple is one value, such as the state of a generator."""
    for key, value in items_within(root) or ():
        if isinstance(value, dict):
            before = (f"{key}", f"rank_{rank}") if key == "rng" else (f"{key}",)
            yield from (((*before, f"{inner}"), each) for inner, each in value.items())
        else:
            yield (f"{key}",), value


def _plain_value(value: Any) -> Any:
    """Return a value in which numpy's arrays, which are inert records in the file, are arrays."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain_value, value))
    if isinstance(value, dict):
        return {key: _plain_value(each) for key, each in value.items()}
    if isinstance(value, Record) and value.name.endswith("._reconstruct") and isinstance(value.state, tuple):
        array = _array(value.state)
        return value if array is None else array
    return value


def _array(state: tuple[Any, ...]) -> Any:
    """Return an array of numbers from its pickled state: a version, its shape, its dtype, its order, and its bytes."""
    if len(state) != 5 or not isinstance(state[2], Record) or state[2].name != "numpy.dtype" or state[3]:
        return None
    kind, order, data = (state[2].args or ("",))[0], state[2].state, state[4]
    if isinstance(data, Record) and data.name == "_codecs.encode" and data.args:
        text, coding = (*data.args, "")[:2]
        data = text.encode("latin1") if isinstance(text, str) and coding == "latin1" else None
    is_little = isinstance(order, tuple) and len(order) > 1 and order[1] in ("<", "|")
    if kind not in ("u4", "u8", "i4", "i8", "f4", "f8", "u1") or not is_little or not isinstance(data, bytes):
        return None
    dtype = np.dtype(f"<{kind}")
    shape = state[1]
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        return None
    return None if math.prod(shape) * dtype.itemsize != len(data) else np.frombuffer(data, dtype).reshape(shape)


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as they are numbers and texts."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, Record) and isinstance(other, Record):
        return one.name == other.name
    return type(one) is type(other) and bool(one == other or one != one)
