"""Layouts for dialects that have no packed dims or no sub-axes: where whole axes make the same cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._text import shown
from ..errors import LayoutError
from ..layout import Spec, TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim, Part
from ..sub_axis import SubAxis, is_sub_axis, parse_sub_axis

__all__ = ["merged_axes", "plain_layout", "whole_axes_layout", "why_not_divided"]


def merged_axes(names: Sequence[str], mesh: DeviceMesh) -> tuple[str, ...]:
    """Put neighbouring sub-axes of one axis together, and leave out those of size 1.

    >>> merged_axes(["x:(1)2", "x:(2)4", "y"], DeviceMesh((8, 2), ("x", "y")))
    ('x', 'y')
    """
    found: list[SubAxis | str] = []
    for name in names:
        sub = parse_sub_axis(name, mesh.axis_names)
        if sub is None:
            found.append(name)
            continue
        last = found[-1] if found else None
        if isinstance(last, SubAxis) and (last.axis, last.before * last.size) == (sub.axis, sub.before):
            sub = SubAxis(sub.axis, last.before, last.size * sub.size)
            found.pop()
        if sub.size > 1:
            found.append(sub)
    return tuple(
        one.axis if isinstance(one, SubAxis) and one.size == mesh.axis_size(one.axis) else str(one) for one in found
    )


def plain_layout(layout: TensorLayout) -> TensorLayout:
    """Return the same cut without packed dims, if every device holds one segment of each, its own share.

    Raises:
        LayoutError: if a packed dim gives a device several segments, more than its share, or not provably its share.

    >>> from shardwise import packed
    >>> mesh = DeviceMesh((4,), ("ep",))
    >>> plain_layout(TensorLayout((packed.experts(8, "ep"), None), mesh)).axes
    ('ep', None)
    """
    specs: list[Spec] = []
    for dim, spec in enumerate(layout.axes):
        if isinstance(spec, PackedDim):
            why = _why_not_plain(spec, layout.device_mesh)
            if why:
                raise LayoutError(
                    f"axes[{dim}] is a packed dim, {shown(spec)}: {why}; the dialect can only cut a dim as a whole"
                )
            spec = next((one.axes for one in spec.parts if one.axes), ())
        specs.append(spec)
    return TensorLayout(specs, layout.device_mesh, unreduced=layout.unreduced) if layout.is_packed else layout


def _why_not_plain(dim: PackedDim, mesh: DeviceMesh | None) -> str:
    if any(one.pad_to is not None for one in dim.parts):
        return "it is padded"
    if all(not one.axes for one in dim.parts):
        return ""
    if mesh is None:
        return "the layout has no device_mesh, so the number of shards of its parts is not known"
    if len({one.axes for one in dim.parts}) == 1 and math.prod(map(mesh.axis_size, dim.parts[0].axes)) == 1:
        return ""
    if len(dim.parts) > 1:
        return "its parts are cut separately"
    return _why_not_one(dim.parts[0], math.prod(map(mesh.axis_size, dim.parts[0].axes)))


def _why_not_one(one: Part, shards: int) -> str:
    """Return the reason why the only part of a dim is not cut like a plain dim; empty if it is."""
    if any(size != 1 for size in one.factors[: one.cut or 0]):
        return "each device holds several segments of it"
    why = why_not_divided(one, shards)
    if why is None:
        return "" if one.uneven in (None, "even") else f"it has an uneven rule of its own, {one.uneven!r}"
    return why


def why_not_divided(one: Part, shards: int) -> str | None:
    """Return the reason why a part's elements are not known to divide into shards; empty if they divide.

    `None` if the uneven rule decides: single elements are cut, and their number is not known to divide.
    """
    cut = one.cut or 0
    units, inner = one.factors[cut], one.factors[cut + 1 :]
    if one.at_most is not None and one.at_most < shards:
        return f"it is cut into at most {one.at_most} shards, although its axes have {shards} devices"
    # A factor that does not divide is cut between units; a plain dim is cut anywhere.
    if units is not None and units % (shards * (one.unit or 1)) == 0:
        return ""
    if one.split and units and shards % units == 0 and None not in inner:
        rows = units * math.prod(size for size in inner if size is not None)
        return "" if rows % shards == 0 else f"its {rows} elements are not divisible by {shards}"
    if one.unit not in (None, 1):
        known = f"whose number is not known to be divisible by {shards}"
        return f"its elements stay together in units of {one.unit}, {known}"
    if any(size != 1 for size in inner):
        return f"its units stay whole, and their number is not known to be divisible by {shards}"
    return None


def whole_axes_layout(layout: TensorLayout, who: str) -> TensorLayout:
    """Return the same cut by whole axes, for a dialect that has no others.

    Raises:
        LayoutError: if a packed dim or a sub-axis makes a cut that whole axes cannot make.
    """
    plain = plain_layout(layout)
    mesh = plain.device_mesh
    specs = [plain_names(spec) for spec in plain.axes]
    unreduced: Sequence[str] = plain.unreduced
    if mesh is not None and any(is_sub_axis(name, mesh.axis_names) for names in [*specs, unreduced] for name in names):
        specs = [merged_axes(names, mesh) for names in specs]
        unreduced = merged_axes(sorted(unreduced, key=lambda name: parse_sub_axis(name) or (name, 0, 0)), mesh)
        plain = TensorLayout(specs, mesh, unreduced=unreduced)
    places = [(f"axes[{dim}]", name) for dim, names in enumerate(specs) for name in names]
    for place, name in [*places, *(("unreduced", name) for name in plain.unreduced)]:
        if is_sub_axis(name, () if mesh is None else mesh.axis_names):
            raise LayoutError(
                f"{place} names the sub-axis {name!r}; {who} has whole axes only. layout.refined() is the same layout "
                "over a mesh in which it is a whole axis; mesh.unflatten gives such axes names of your own"
            )
    return plain


def plain_names(spec: Spec) -> tuple[str, ...]:
    """Return the axes of a spec that is not packed, major first."""
    assert not isinstance(spec, PackedDim)
    return () if spec is None else (spec,) if isinstance(spec, str) else spec
