"""Rows of an operand that a device's part of the result reads, and the number of them that its neighbours have.

The arithmetic is that of StableHLO's slices, pads, reversals, windows and convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..computation.computation import Op

__all__ = ["Parts", "RowRange", "RowsRead", "missing_elements", "rows_read", "spatial_dims"]

RowRange = tuple[int, int]
#: The rows of each dim of each operand and result that a device has.
Parts = Sequence[Sequence[RowRange]]
#: The rows that a device reads, as a function of its parts, by the dims of an operand whose rows it may not hold.
RowsRead = dict[int, Callable[[Parts], RowRange]]

#: The number of last dims that these ops read whole, though Shardy's rules let some be cut.
_READ_WHOLE = {"top_k": 1, "eigh": 2}


def rows_read(op: Op, shapes: Sequence[Sequence[int]], operand: int) -> RowsRead:
    """Return the rows of an operand that devices read; empty if each reads what it holds."""
    given, shape, rule = op.attributes, shapes[operand], op.rule
    dims = range(len(shape))

    def each(name: str, default: int = 1) -> Sequence[int]:
        return given.get(name) or [default] * len(shape)

    def rows(dim: int, step: int, first: int, last: int, gaps: int = 1) -> Callable[[Parts], RowRange]:
        return lambda parts: _read(parts[-1][dim], shape[dim], step, first, last, gaps)

    if op.name == "concatenate":
        along = given["dimension"]
        before = -sum(other[along] for other in shapes[:operand])
        return {along: rows(along, 1, before, before)}
    if op.name == "convolution":
        return _convolved(op, shapes, operand)
    if operand:
        return {}
    if op.name in _READ_WHOLE and rule is not None:
        passes = [any(rule.kinds[factor] == "pass" for factor in rule.operands[0][dim]) for dim in dims]
        return {dim: _whole(shape[dim]) for dim in dims[-_READ_WHOLE[op.name] :] if passes[dim]}
    if op.name == "reverse":
        return {dim: rows(dim, -1, shape[dim] - 1, shape[dim] - 1) for dim in given.get("dimensions", ())}
    if op.name == "slice":
        sides = zip(dims, given["start_indices"], given["limit_indices"], each("strides"), strict=True)
        return {dim: rows(dim, by, at, at) for dim, at, stop, by in sides if (at, stop, by) != (0, shape[dim], 1)}
    if op.name == "pad":
        edges = zip(dims, given["edge_padding_low"], given["edge_padding_high"], given["interior_padding"], strict=True)
        return {dim: rows(dim, 1, -low, -low, gaps + 1) for dim, low, high, gaps in edges if low or high or gaps}
    if op.name in ("reduce_window", "select_and_scatter"):
        said = zip(dims, given["window_dimensions"], each("window_strides"), given["padding"], strict=True)
        moved = [(dim, size, by, pads[0]) for dim, size, by, pads in said if (size, by, *pads) != (1, 1, 0, 0)]
        if op.name == "reduce_window":
            return {dim: rows(dim, by, -low, size - 1 - low) for dim, size, by, low in moved}

        def selected(dim: int, size: int, by: int, low: int) -> Callable[[Parts], RowRange]:
            def read(parts: Parts) -> RowRange:
                first, last = parts[-1][dim]
                # All of the windows that have one of the rows.
                windows = -(-(first + low - size + 1) // by), (last - 1 + low) // by + 1
                return _read(windows, shape[dim], by, -low, size - 1 - low)

            return read

        return {dim: selected(dim, size, by, low) for dim, size, by, low in moved}
    return {}


def _convolved(op: Op, shapes: Sequence[Sequence[int]], operand: int) -> RowsRead:
    """Return the rows of a convolution's image under the windows, or of its kernel.

    A spatial dim of the kernel is read whole unless it is summed, though Shardy's rules let it be cut.
    """
    assert op.rule is not None
    given, kinds = op.attributes, op.rule.kinds
    lhs, rhs, out = (given[name] for name in ("lhs_spec", "rhs_spec", "out_spec"))
    summed = [any(kinds[factor] == "sum" for factor in dim) for dim in op.rule.operands[1]]
    if operand == 1:
        return {dim: _whole(shapes[1][dim]) for dim in spatial_dims(rhs) if not summed[dim]}

    def read(name: int, of_rhs: int) -> Callable[[Parts], RowRange]:
        size, low = shapes[0][lhs.index(name)], given["padding"][name][0]
        step, apart, gaps = (
            (given.get(key) or [1] * (name + 1))[name] for key in ("window_strides", "rhs_dilation", "lhs_dilation")
        )

        def of(parts: Parts) -> RowRange:
            first, last = parts[1][of_rhs] if summed[of_rhs] else (0, shapes[1][of_rhs])
            return _read(parts[-1][out.index(name)], size, step, first * apart - low, (last - 1) * apart - low, gaps)

        return of

    return {lhs.index(name): read(name, dim) for dim, name in enumerate(rhs) if isinstance(name, int)}


def _whole(size: int) -> Callable[[Parts], RowRange]:
    return lambda _: (0, size)


def spatial_dims(spec: Sequence[Any]) -> list[int]:
    """Return the dims of a convolution's tensor that are neither batch nor features."""
    return [dim for dim, name in enumerate(spec) if isinstance(name, int)]


def _read(rows: RowRange, size: int, step: int, first: int, last: int, gaps: int = 1) -> RowRange:
    """Return the span of `step * r + first` to `step * r + last` over rows `r`, in rows that are `gaps` apart."""
    if rows[0] >= rows[1]:
        return (0, 0)
    ends = [step * rows[0], step * (rows[1] - 1)]
    low, high = max(0, -(-(min(ends) + first) // gaps)), min(size, (max(ends) + last) // gaps + 1)
    return (low, high) if low < high else (0, 0)


def missing_elements(
    op: Op,
    shapes: Sequence[Sequence[int]],
    layouts: Sequence[Sequence[Sequence[str]]],
    sizes: Mapping[str, int],
    operand: int,
) -> tuple[int, tuple[str, ...]]:
    """Return the most elements of an operand that a device reads and does not hold, and the axes that cut them."""
    reads = rows_read(op, shapes, operand)
    cut = tuple(dict.fromkeys(axis for dim in reads for axis in layouts[operand][dim]))
    if not cut:
        return 0, ()
    others: list[Sequence[str]] = []
    if op.name == "convolution":
        for side, name in ((1, "rhs_spec"), (-1, "out_spec")):
            others += [layouts[side][dim] for dim in spatial_dims(op.attributes[name])]
    elif op.name not in _READ_WHOLE:
        others = [layouts[-1][dim] for dim in reads]
    axes = dict.fromkeys([*cut, *itertools.chain(*others)])
    most = 0
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        parts = [
            [_rows_held(size, spec, sizes, at) for size, spec in zip(shape, specs, strict=True)]
            for shape, specs in zip(shapes, layouts, strict=True)
        ]
        needed = there = 1
        for dim, held in enumerate(parts[operand]):
            low, high = reads[dim](parts) if dim in reads else held
            needed *= high - low
            there *= max(0, min(high, held[1]) - max(low, held[0]))
        most = max(most, needed - there)
    return most, cut


def _rows_held(size: int, spec: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]) -> RowRange:
    """Return the rows of a dim that the device at some coordinates holds, cut by the rule `"ceil"`."""
    number = 0
    for axis in spec:
        number = number * sizes[axis] + at.get(axis, 0)
    part = -(-size // math.prod(sizes[axis] for axis in spec))
    return min(number * part, size), min((number + 1) * part, size)
