"""The cut of a dim as digits of its positions, written as strided shards and read back.

A dim is `[outer] axis axis … rest`, the major digit first: a position in it is a number with these digits. Cutting over
a mesh axis fixes the digits of that axis, which are then one after the other. The split factor of the axis's strided
shard is the product of the digits before them that are not fixed yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .._text import shown
from ..errors import LayoutError
from ..layout import Spec
from ..mesh import DeviceMesh
from ..packed import PackedDim, Part, concat, part
from ..sub_axis import SubAxis, parse_sub_axis
from ._plain import merged_axes, plain_names, why_not_divided

__all__ = ["StridedCut", "cut_of", "read_factors", "spec_of", "split_factors"]


_LARGEST = 2**63 - 1


class StridedCut(NamedTuple):
    """The cut of a dim: each of `outer` equal segments of it, one after the other, by `axes`, major first."""

    outer: int
    axes: tuple[str, ...]


class _Digit(NamedTuple):
    size: int
    #: The mesh axis, and the product of its factors before this one; `None` if the digit belongs to no axis.
    axis: str | None = None
    before: int = 1


def cut_of(dim: int, spec: Spec, mesh: DeviceMesh) -> StridedCut:
    """Return the cut of a dim's spec.

    Raises:
        LayoutError: if it is a packed dim whose parts are not equal segments, or may be cut within a unit.

    >>> from shardwise import packed
    >>> cut_of(0, packed.parse("(3 12@tp 64)"), DeviceMesh((4,), ("tp",)))
    StridedCut(outer=3, axes=('tp',))
    """
    if not isinstance(spec, PackedDim):
        return StridedCut(1, merged_axes(plain_names(spec), mesh))
    if all(not one.axes and one.pad_to is None for one in spec.parts):
        return StridedCut(1, ())
    axes = spec.parts[0].axes

    def refused(why: str) -> LayoutError:
        return LayoutError(
            f"axes[{dim}] is a packed dim, {shown(spec)}: {why}; PyTorch's _StridedShard cuts equal segments alike"
        )

    if any(one.axes != axes for one in spec.parts):
        raise refused("its parts are not all cut by the same axes")
    shards = math.prod(map(mesh.axis_size, axes))
    shapes = set()
    outer = 0
    for one in spec.parts:
        why = _why_not_segments(one, shards, len(merged_axes(axes, mesh)))
        if why:
            raise refused(why)
        cut = one.cut or 0
        count = math.prod(size or 0 for size in one.factors[:cut])
        rest = one.factors[cut:]
        known = math.prod(size for size in rest if size is not None)
        # The size of a segment: a number, or a multiple of what the shape leaves.
        shapes.add((known, 0) if None not in rest else (0, known * one.ratio))
        outer += count
    if len(shapes) > 1:
        raise refused("its parts are segments of several sizes")
    if not 1 <= outer * shards <= _LARGEST:
        raise refused(f"it has {shown(outer)} segments; there must be 1 to {_LARGEST // shards}")
    return StridedCut(outer, merged_axes(axes, mesh))


def _why_not_segments(one: Part, shards: int, axes: int) -> str:
    """Return the reason why a part is not equal segments, each cut alike; empty if it is."""
    if one.pad_to is not None:
        return "it is padded"
    if None in one.factors[: one.cut or 0]:
        return "the number of its segments depends on the shape"
    why = why_not_divided(one, shards)
    if why is not None:
        return why
    if one.uneven in (None, "even", "chunk") or (one.uneven == "ceil" and axes < 2):
        return ""
    return f"its uneven rule is {one.uneven!r}"


def spec_of(cut: StridedCut) -> Spec:
    """Return the spec of a cut: a packed dim if there are several segments.

    >>> spec_of(StridedCut(2, ("tp",)))
    packed.parse('(2 n@tp)')
    """
    if cut.outer == 1:
        return cut.axes
    return concat(part((cut.outer, None), cut=1, axes=cut.axes))


def split_factors(dim: int, cut: StridedCut, mesh: DeviceMesh) -> dict[str, int | None]:
    """Return for each mesh axis that cuts a dim its split factor; `None` where nothing comes before it, a plain shard.

    Raises:
        LayoutError: if an axis is cut into sub-axes and not all of them are here, or not one after the other when
            the axes of the mesh are taken in order.

    >>> split_factors(0, StridedCut(3, ("y", "x")), DeviceMesh((2, 4), ("x", "y")))
    {'x': 12, 'y': 3}
    """
    left = [_Digit(cut.outer)] if cut.outer != 1 else []
    left += [_digit(name, mesh) for name in cut.axes]
    factors: dict[str, int | None] = {}
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        own = [i for i, digit in enumerate(left) if digit.axis == axis]
        if not own:
            continue
        digits = [left[i] for i in own]
        befores = [1, *(digit.before * digit.size for digit in digits)]
        if own != list(range(own[0], own[-1] + 1)) or befores != [*(digit.before for digit in digits), size]:
            raise LayoutError(
                f"axes[{dim}] is cut by {shown(cut.axes)}, in which axis {shown(axis)} of size {size} is not whole, or "
                "not in one place when the axes of the mesh are taken in order; PyTorch has whole axes only. "
                "layout.refined() is the same layout over a mesh in which its sub-axes are axes"
            )
        factors[axis] = math.prod(digit.size for digit in left[: own[0]]) if own[0] else None
        del left[own[0] : own[-1] + 1]
    return factors


def read_factors(cuts: Sequence[tuple[str, int | None]], mesh: DeviceMesh) -> StridedCut | None:
    """Read the answer of `split_factors`, for the axes of one dim in mesh order; `None` if it is not one cut of a dim.

    >>> read_factors([("x", 12), ("y", 3)], DeviceMesh((2, 4), ("x", "y")))
    StridedCut(outer=3, axes=('y', 'x'))
    >>> read_factors([("x", 2), ("y", None)], DeviceMesh((2, 4), ("x", "y")))
    StridedCut(outer=1, axes=('y:(1)2', 'x', 'y:(2)2'))
    """
    digits: list[_Digit] = []
    # From the last axis of the mesh to the first: the axes before a strided shard are then in place.
    for axis, factor in reversed(cuts):
        place = 0 if factor is None else _place(digits, factor)
        if place is None:
            return None
        digits.insert(place, _Digit(mesh.axis_size(axis), axis))
    free = [i for i, digit in enumerate(digits) if digit.axis is None]
    if free != list(range(len(free))):
        return None
    outer = math.prod(digits[i].size for i in free)
    names = [
        digit.axis if digit.size == mesh.axis_size(digit.axis) else str(SubAxis(digit.axis, digit.before, digit.size))
        for digit in digits
        if digit.axis is not None
    ]
    return StridedCut(outer, tuple(names))


def _place(digits: list[_Digit], factor: int) -> int | None:
    """Return the place after digits whose product is `factor`, one of them cut in two if need be; else `None`."""
    product = 1
    for i, digit in enumerate(digits):
        if factor % product:
            return None
        wanted = factor // product
        if digit.size == wanted:
            return i + 1
        if digit.size > wanted:
            if wanted == 1:
                return i
            if digit.size % wanted:
                return None
            minor = digit.before * wanted
            digits[i : i + 1] = [digit._replace(size=wanted), _Digit(digit.size // wanted, digit.axis, minor)]
            return i + 1
        product *= digit.size
    if factor % product:
        return None
    # Of what is left of the dim, whose size is not known here.
    if factor > product:
        digits.append(_Digit(factor // product))
    return len(digits)


def _digit(name: str, mesh: DeviceMesh) -> _Digit:
    sub = parse_sub_axis(name, mesh.axis_names)
    return _Digit(mesh.axis_size(name), name) if sub is None else _Digit(sub.size, sub.axis, sub.before)
