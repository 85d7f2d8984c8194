"""Optimizers: which arrays each of them keeps for a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._dtypes import bits_of
from .._text import shown
from ..errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    Count = int | npt.NDArray[np.int64]

__all__ = ["OPTIMIZERS", "Optimizer", "StateArray", "optimizer_of"]

#: The known optimizers, with the arrays that they keep.
OPTIMIZERS = {
    "adamw": "Adam and AdamW of PyTorch: two moments, and a float32 number of the step for each parameter",
    "adam8bit": "Adam8bit and AdamW8bit of bitsandbytes 0.50: moments in 8 bits, with a scale for each 256 of them",
    "sgd": "SGD of PyTorch without momentum: nothing",
    "sgd-momentum": "SGD of PyTorch with momentum: one moment",
    "lion": "Lion: one moment",
    "muon": "Muon of PyTorch: one moment of each matrix in a layer; AdamW for all else, embeddings and heads included",
    "adafactor": "Adafactor of PyTorch: rows and columns of the second moment, whole for a vector; the step",
}

#: The least elements of a tensor whose moments have 8 bits in bitsandbytes, and the elements that share a scale.
_LEAST_8BIT, _BLOCK = 4096, 256
#: The bytes of bitsandbytes' two tables of 256 float32 numbers, which all parameters of a process have in common.
_TABLES = 2 * 256 * 4


class StateArray(NamedTuple):
    """One array that an optimizer keeps for a parameter.

    Attributes:
        name: The key that PyTorch, bitsandbytes or another optimizer has it under, such as `exp_avg`.
        elements: The number of its elements; for several ranks an array.
        bits: The bits of an element.
    """

    name: str
    elements: Count
    bits: int


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, described by the arrays that it keeps.

    Attributes:
        name: The name by which `training_state` takes it, such as `adamw`.
        moments: The arrays of the parameter's shape, each with the bits of an element; `None` for the parameter's
            dtype.
        steps: Whether each parameter has a float32 number for its own step.
    """

    name: str
    moments: tuple[tuple[str, int | None], ...] = ()
    steps: bool = False

    def kept(self, sizes: tuple[Count, ...], bits: int, *, is_matrix: bool = False) -> list[StateArray]:
        """List the arrays for a parameter.

        Args:
            sizes: The sizes of the parameter's dims as the optimizer sees them; arrays for several ranks.
            bits: The bits of the parameter's elements.
            is_matrix: Whether the parameter is a matrix within a layer, as Muon takes them.

        >>> optimizer_of("adamw").kept((4, 3), 32)
        [StateArray(name='exp_avg', elements=12, bits=32), StateArray(name='exp_avg_sq', elements=12, bits=32), \
StateArray(name='step', elements=1, bits=32)]
        """
        elements = math.prod(sizes)
        if self.name == "muon":
            if is_matrix:
                return [StateArray("momentum_buffer", elements, bits)]
            return optimizer_of("adamw").kept(sizes, bits)
        if self.name == "adam8bit":
            return _eight_bits(elements)
        if self.name == "adafactor":
            second = [StateArray("variance", elements, bits)]
            if len(sizes) > 1:
                rows, columns = math.prod(sizes[:-1]), math.prod(sizes[:-2]) * sizes[-1]
                second = [StateArray("row_var", rows, bits), StateArray("col_var", columns, bits)]
            return [*second, StateArray("step", 1, 32)]
        moments = [StateArray(name, elements, own or bits) for name, own in self.moments]
        return [*moments, StateArray("step", 1, 32)] if self.steps else moments

    @property
    def tables(self) -> int:
        """Return the bytes that all parameters of a rank share."""
        return _TABLES if self.name == "adam8bit" else 0


def _eight_bits(elements: Count) -> list[StateArray]:
    """Return the arrays of bitsandbytes: float32 for small tensors, else 8 bits with a scale for each block."""
    is_small = np.asarray(elements) < _LEAST_8BIT
    states: Any = np.where(is_small, 4, 1) * elements
    scales: Any = np.where(is_small, 0, -(-np.asarray(elements) // _BLOCK))
    if isinstance(elements, int):
        states, scales = int(states), int(scales)
    kept = [StateArray(f"state{number}", states, 8) for number in (1, 2)]
    return kept + [StateArray(f"absmax{number}", scales, 32) for number in (1, 2)]


_SIMPLE = {
    "adamw": Optimizer("adamw", (("exp_avg", None), ("exp_avg_sq", None)), steps=True),
    "sgd": Optimizer("sgd"),
    "sgd-momentum": Optimizer("sgd-momentum", (("momentum_buffer", None),)),
    "lion": Optimizer("lion", (("exp_avg", None),)),
}


def optimizer_of(given: Any, argument: str = "optimizer") -> Optimizer:
    """Return the optimizer that has this name, or that keeps arrays of these dtypes.

    Args:
        given: One of `OPTIMIZERS`, or a mapping from names of arrays of the parameter's shape to their dtypes.
        argument: The name of the argument, for errors.

    Raises:
        LayoutError: if there is no such optimizer.
        TypeError: if `given` is neither a name nor dtypes, or a dtype is not known.

    >>> optimizer_of({"exp_avg": "float32", "exp_avg_sq": "bfloat16"}).moments
    (('exp_avg', 32), ('exp_avg_sq', 16))
    >>> optimizer_of("shampoo")
    Traceback (most recent call last):
    shardwise.errors.LayoutError: optimizer is 'shampoo', which is not known; known are adamw, adam8bit, sgd, \
sgd-momentum, lion, muon, adafactor, and dtypes by hand, as in {'exp_avg': 'float32'}
    """
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, Mapping):
        moments = []
        for name, dtype in given.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"{argument}: {shown(name)} must be the name of an array")
            moments.append((name, bits_of(dtype, f"{argument}[{shown(name)}]")))
        return Optimizer("by hand", tuple(moments))
    if not isinstance(given, str):
        raise TypeError(f"{argument} must be a name, or dtypes by the names of arrays, got {shown(given)}")
    if given not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise LayoutError(
            f"{argument} is {shown(given)}, which is not known; known are {known}, and dtypes by hand, as in "
            "{'exp_avg': 'float32'}"
        )
    return _SIMPLE.get(given) or Optimizer(given)
