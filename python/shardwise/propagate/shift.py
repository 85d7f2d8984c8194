"""RowRange that a device's part of a result reads of an operand, and how many of them its neighbours have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..computation.computation import Op
from ..computation.factor_rule import FactorRule

__all__ = ["missing_elements", "rows_read", "shifting_dims"]

RowRange = tuple[int, int]

#: Ops that compute with the whole of their last dims, of which Shardy's rules let some be cut: so many of them.
_READ_WHOLE = {"top_k": 1, "eigh": 2}


def shifting_dims(op: Op, operand: int, shape: Sequence[int]) -> list[int]:
    """Return the dims of an operand of which a device may read rows that it does not hold, though all are cut alike."""
    given = op.attributes
    if op.name == "concatenate":
        return [given["dimension"]]
    if op.name == "convolution" and operand == 1:
        return [dim for dim, name in enumerate(given["rhs_spec"]) if isinstance(name, int) and _is_read_whole(op, dim)]
    if operand:
        return []
    if op.name in _READ_WHOLE:
        dims = range(len(shape) - _READ_WHOLE[op.name], len(shape))
        return [dim for dim in dims if op.rule is not None and _passes(op.rule, dim)]
    if op.name == "reverse":
        return list(given["dimensions"])
    if op.name == "convolution":
        return [dim for dim, name in enumerate(given["lhs_spec"]) if isinstance(name, int)]
    dims, ones = range(len(shape)), [1] * len(shape)
    if op.name == "slice":
        said = zip(given["start_indices"], given["limit_indices"], given.get("strides") or ones, strict=True)
        return [dim for dim, taken in zip(dims, said, strict=True) if taken != (0, shape[dim], 1)]
    if op.name == "pad":
        names = ("edge_padding_low", "edge_padding_high", "interior_padding")
        return [dim for dim in dims if any(given[name][dim] for name in names)]
    if op.name in ("reduce_window", "select_and_scatter"):
        said = zip(given["window_dimensions"], given.get("window_strides") or ones, given["padding"], strict=True)
        return [
            dim for dim, (window, step, pads) in zip(dims, said, strict=True) if (window, step, *pads) != (1, 1, 0, 0)
        ]
    return []


def rows_read(
    op: Op, shapes: Sequence[Sequence[int]], operand: int, dim: int, boxes: Sequence[Sequence[RowRange]]
) -> RowRange:
    """Return the rows that a device reads of a dim that may shift; `boxes` are its parts of operands and result."""
    given, size = op.attributes, shapes[operand][dim]
    if op.name in _READ_WHOLE:
        return 0, size
    if op.name == "convolution":
        if operand == 1:
            return 0, size
        spec = given["lhs_spec"][dim]
        of_rhs = given["rhs_spec"].index(spec)
        windows, places = boxes[-1][given["out_spec"].index(spec)], boxes[1][of_rhs]
        if _is_read_whole(op, of_rhs):
            places = 0, shapes[1][of_rhs]
        ones = [1] * (spec + 1)
        apart, gaps = ((given.get(name) or ones)[spec] for name in ("rhs_dilation", "lhs_dilation"))
        low, step = given["padding"][spec][0], (given.get("window_strides") or ones)[spec]
        return _read(windows, size, step, places[0] * apart - low, (places[1] - 1) * apart - low, gaps)
    rows = boxes[-1][dim]
    if op.name == "slice":
        start = given["start_indices"][dim]
        step = (given.get("strides") or [1] * (dim + 1))[dim]
        return _read(rows, size, step, start, start)
    if op.name == "pad":
        low = -given["edge_padding_low"][dim]
        return _read(rows, size, 1, low, low, given["interior_padding"][dim] + 1)
    if op.name == "reverse":
        return size - rows[1], size - rows[0]
    if op.name == "concatenate":
        before = -sum(shape[dim] for shape in shapes[:operand])
        return _read(rows, size, 1, before, before)
    window, low = given["window_dimensions"][dim], given["padding"][dim][0]
    step = (given.get("window_strides") or [1] * (dim + 1))[dim]
    if op.name == "select_and_scatter":
        # All of the windows that have one of the rows.
        rows = -(-(rows[0] + low - window + 1) // step), (rows[1] - 1 + low) // step + 1
    return _read(rows, size, step, -low, window - 1 - low)


def _passes(rule: FactorRule, dim: int) -> bool:
    """Say whether a rule lets a dim of the first operand be cut."""
    return any(rule.kinds[factor] == "pass" for factor in rule.operands[0][dim])


def _is_read_whole(op: Op, dim: int) -> bool:
    """Say whether a device reads a window's dim of a kernel whole, though Shardy lets it be cut: it is not summed."""
    return op.rule is None or not any(op.rule.kinds[factor] == "sum" for factor in op.rule.operands[1][dim])


def _read(rows: RowRange, size: int, step: int, first: int, last: int, gaps: int = 1) -> RowRange:
    """Give the rows from `step * r + first` to `step * r + last` for all `r`, of those `gaps` apart that there are."""
    if rows[0] >= rows[1]:
        return (0, 0)
    low, high = -(-(step * rows[0] + first) // gaps), (step * (rows[1] - 1) + last) // gaps + 1
    low, high = max(0, low), min(size, high)
    return (low, high) if low < high else (0, 0)


def missing_elements(
    op: Op,
    shapes: Sequence[Sequence[int]],
    layouts: Sequence[Sequence[Sequence[str]]],
    sizes: Mapping[str, int],
    operand: int,
) -> int:
    """Return the most elements of an operand that a device reads and does not hold; the last layout is the result's."""
    dims = shifting_dims(op, operand, shapes[operand])
    read = [layouts[operand][dim] for dim in dims]
    if op.name == "convolution":
        read += [
            spec
            for side, name in ((1, "rhs_spec"), (-1, "out_spec"))
            for spec, at in zip(layouts[side], op.attributes[name], strict=True)
            if isinstance(at, int)
        ]
    elif dims and op.name not in _READ_WHOLE:
        read += [layouts[-1][dim] for dim in dims]
    axes = list(dict.fromkeys(axis for spec in read for axis in spec))
    most = 0
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        boxes = [
            [rows_held(size, spec, sizes, at) for size, spec in zip(shape, specs, strict=True)]
            for shape, specs in zip(shapes, layouts, strict=True)
        ]
        needed = there = 1
        for dim, held in enumerate(boxes[operand]):
            low, high = rows_read(op, shapes, operand, dim, boxes) if dim in dims else held
            needed *= high - low
            there *= max(0, min(high, held[1]) - max(low, held[0]))
        most = max(most, needed - there)
    return most


def rows_held(size: int, spec: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> RowRange:
    """Return the rows of a dim that a device has: the shard of its coordinates, 0 where none is said."""
    number = 0
    for axis in spec:
        number = number * sizes[axis] + at.get(axis, 0)
    part = -(-size // math.prod(sizes[axis] for axis in spec))
    return min(number * part, size), min((number + 1) * part, size)
