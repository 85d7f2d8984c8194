"""Computations in plain numpy, and one op of them on whole arrays or on what a device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._dtypes import find_dtype
from .._text import shown
from .._types import Array
from ..errors import LayoutError
from .computation import Computation, Op
from .evaluate import OPS, DeviceTensors

__all__ = ["branch_of", "compute", "compute_local", "run", "taken", "value_dtype"]


def run(computation: Computation, arrays: Sequence[Any]) -> list[Array]:
    """Return the results of a computation of arrays for its inputs; see `Computation.run`."""
    values = dict(enumerate(taken(computation, arrays)))
    for op in computation.ops:
        made: Any = [values[operand] for operand in op.operands]
        if not op.bodies:
            made = compute(op, made, [computation.shapes[result] for result in op.results])
        elif op.name == "case":
            made = run(op.bodies[branch_of(made[0], len(op.bodies))], made[1:])
        elif op.name == "while":
            while run(op.bodies[0], made)[0]:
                made = run(op.bodies[1], made)
        else:
            for _ in range(op.trips):
                made = run(op.bodies[0], made)
        for result, array in zip(op.results, made, strict=True):
            values[result] = array.astype(value_dtype(result, computation.dtypes[result]), copy=False)
    return [values[output] for output in computation.outputs]


def taken(computation: Computation, arrays: Sequence[Any]) -> list[Array]:
    """Return arrays for the inputs in their dtypes, checked."""
    if len(arrays) != computation.inputs:
        raise LayoutError(f"arrays has {len(arrays)} entries for {computation.inputs} inputs")
    pairs = enumerate(zip(arrays, computation.dtypes, strict=False))
    found = [np.asarray(array, value_dtype(number, dtype)) for number, (array, dtype) in pairs]
    for number, (array, shape) in enumerate(zip(found, computation.shapes, strict=False)):
        if array.shape != shape:
            raise LayoutError(f"arrays[{number}] has the shape {array.shape}, the input {shape}")
    return found


def branch_of(index: Any, count: int) -> int:
    """Return which of so many branches an index is, the last for one that is none, as StableHLO has it."""
    return int(index) if 0 <= index < count else count - 1


def value_dtype(number: int, name: str) -> np.dtype[Any]:
    """Return the dtype of a value as numpy has it."""
    dtype = find_dtype(name)
    if dtype is None:
        raise LayoutError(f"value {number} is of dtype {shown(name)}, which numpy does not have")
    return dtype.numpy()


def compute(op: Op, arrays: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Compute an op without a body on whole arrays, for results of these shapes.

    Raises:
        LayoutError: if it is none that numpy has here, or a constant whose value is not known.
    """
    starts = [(0,) * array.ndim for array in arrays]
    return compute_local(op, DeviceTensors(arrays, starts, [array.shape for array in arrays], shapes))


def compute_local(op: Op, has: DeviceTensors) -> list[Array]:
    """Compute an op on what a device has."""
    name, given = op.name, op.attributes
    if name in ("barrier", "constraint"):
        return list(has.arrays)
    if name == "iota" and "dimension" in given:
        (shape,), dim = has.shapes, given["dimension"]
        along = [-1 if at == dim else 1 for at in range(len(shape))]
        return [np.broadcast_to(np.arange(shape[dim]).reshape(along), shape)]
    if name == "constant" and given.get("value") is not None:
        # JSON has no infinities.
        value = float(given["value"]) if isinstance(given["value"], str) else given["value"]
        return [np.broadcast_to(np.asarray(value), has.shapes[0])]
    if name not in OPS or (name == "reduce" and len(has.shapes) > 1):
        why = "its value is not known" if name in ("constant", "iota") else "numpy has no such op here"
        raise LayoutError(f"{name}{f' ({op.source})' if op.source else ''}: {why}, so it cannot be run")
    with np.errstate(all="ignore"):
        return OPS[name](has, given)
