"""Tensors whose elements are numbered, as a loader gets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._dtypes import find_dtype
from .._text import shown
from .._types import Numbers
from ..errors import LayoutError
from ..reshard.model.sides import shape_and_dtype

__all__ = ["NumberedTensors", "base_of", "with_first_elements"]

#: Whole numbers from 0 that a dtype holds, by its kind: all below these; each is even. Others hold those of their bits.
_DIGITS = {
    "bool": 2,
    "float64": 2**52,
    "complex128": 2**52,
    "float32": 2**24,
    "complex64": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
    "float8_e3m4": 2**4,
    "float8_e4m3": 2**4,
    "float8_e4m3fn": 2**4,
    "float8_e4m3fnuz": 2**4,
    "float8_e4m3b11fnuz": 2**4,
    "float8_e5m2": 2**3,
    "float8_e5m2fnuz": 2**3,
    "float4_e2m1fn": 2**2,
    "float6_e2m3fn": 2**3,
    "float6_e3m2fn": 2**3,
}


class NumberedTensors(Mapping[str, Any]):
    """The tensors that a loader gets: each is made when it is taken, and the requests are noted."""

    def __init__(self, tensors: Mapping[str, NumberedTensor], made: Callable[[NumberedTensor], Any]) -> None:
        self._tensors, self._made = tensors, made
        self.taken: set[str] = set()
        self.missing: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        self.taken.add(name)
        return self._made(self._tensors[name])

    def __contains__(self, name: object) -> bool:
        if name in self._tensors:
            return True
        if isinstance(name, str):
            self.missing[name] = None
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class NumberedTensor(NamedTuple):
    """A tensor that is given to a loader; its elements are numbered from `first` on."""

    shape: tuple[int, ...]
    dtype: str
    first: int


def with_first_elements(tensors: Mapping[str, Any]) -> dict[str, NumberedTensor]:
    """Return each tensor with the number of its first element."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to (shape, dtype), got {type(tensors).__name__}")
    found, first = {}, 0
    for name, tensor in tensors.items():
        shape, dtype = shape_and_dtype(name, tensor)
        known = find_dtype(dtype)
        if known is None:
            raise LayoutError(f"tensor {shown(name)} has no known dtype, got {shown(dtype)}")
        found[name] = NumberedTensor(shape, known.name, first)
        first += math.prod(shape)
    return found


def base_of(dtype: str, name: str | None) -> int:
    """Return the number of whole numbers, from 0, that a dtype holds exactly."""
    if dtype in _DIGITS:
        return _DIGITS[dtype]
    if dtype.startswith(("int", "uint")) and dtype.lstrip("uint").isdecimal():
        return 1 << min(int(dtype.lstrip("uint")) - (not dtype.startswith("u")), 52)
    if name is None:
        return 1 << 52  # It holds what the loader says; nothing is refused for it.
    raise TypeError(f"tensor {shown(name)} is {dtype}, which does not hold whole numbers; record it as uint8")


def element_total(given: Mapping[str, NumberedTensor]) -> int:
    return sum(math.prod(one.shape) for one in given.values())


def hashed_digits(numbers: Numbers, base: int) -> Numbers:
    """Return a digit that depends on all digits of a number."""
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    found: Numbers = ((mixed >> np.uint64(11)) % np.uint64(base)).astype(np.int64)
    return found
