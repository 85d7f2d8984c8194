"""Views of a mesh: the same devices with other axes, or the devices along some of the axes.

A view that keeps the order of the devices shares their labels with the mesh; a view of another order lists them anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._arguments import integer
from ._text import shown
from .errors import MeshError
from .sub_axis import parse_sub_axis

if TYPE_CHECKING:
    from .mesh import DeviceMesh

__all__ = ["extremes_along", "factored", "flatten", "submesh", "transpose", "unflatten"]


def submesh(mesh: DeviceMesh, names: str | Sequence[str], through: Hashable) -> DeviceMesh:
    """See `DeviceMesh.submesh`."""
    chosen = _names("names", names)
    position = 0 if through is None else mesh.index_of_label(through)
    whole = factored(mesh, chosen)
    axes = _positions(whole, chosen)
    if whole.axis_names == chosen:
        return whole
    origin = position - sum(whole.coordinate(position)[axis] * whole.strides[axis] for axis in axes)
    sizes, strides = [whole.shape[axis] for axis in axes], [whole.strides[axis] for axis in axes]
    return type(mesh)(sizes, chosen, whole.labels_at(_positions_along(origin, sizes, strides)))


def flatten(mesh: DeviceMesh, names: Sequence[str] | None, name: str | None) -> DeviceMesh:
    """See `DeviceMesh.flatten`."""
    chosen = mesh.axis_names if names is None else _names("names", names)
    if not chosen:
        raise MeshError("names is empty; flatten makes one axis of at least one")
    axes = _positions(mesh, chosen)
    called = "_".join(chosen) if name is None else name
    if not isinstance(called, str):
        raise TypeError(f"name must be a string or None, got {type(called).__name__}")
    first = min(axes)
    before = [axis for axis in range(first) if axis not in axes]
    after = [axis for axis in range(first, mesh.ndim) if axis not in axes]
    turned = _ordered(mesh, [*before, *axes, *after])
    size = math.prod(mesh.shape[axis] for axis in axes)
    shape = [*(mesh.shape[axis] for axis in before), size, *(mesh.shape[axis] for axis in after)]
    axis_names = [*(mesh.axis_names[axis] for axis in before), called, *(mesh.axis_names[axis] for axis in after)]
    return turned.with_axes(shape, axis_names)


def unflatten(mesh: DeviceMesh, axis: str | int, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """See `DeviceMesh.unflatten`."""
    if isinstance(axis, str):
        position = _positions(mesh, (axis,))[0]
    else:
        position = integer("axis, if it is not a name,", axis)
        if not 0 <= position < mesh.ndim:
            raise MeshError(f"axis is {position}; the axes of the mesh are {mesh.axis_names}, numbered from 0")
    parts = type(mesh)(sizes, names)
    if parts.size != mesh.shape[position]:
        raise MeshError(
            f"sizes {parts.shape} multiply to {parts.size}, but axis {mesh.axis_names[position]!r} is of size "
            f"{mesh.shape[position]}"
        )
    shape = (*mesh.shape[:position], *parts.shape, *mesh.shape[position + 1 :])
    return mesh.with_axes(shape, (*mesh.axis_names[:position], *parts.axis_names, *mesh.axis_names[position + 1 :]))


def transpose(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """See `DeviceMesh.transpose`."""
    chosen = mesh.axis_names[::-1] if not names else _names("names", names)
    axes = _positions(mesh, chosen)
    if len(axes) != mesh.ndim:
        raise MeshError(f"names are {chosen}; transpose needs all axes of the mesh, {mesh.axis_names}, each once")
    return _ordered(mesh, axes)


def factored(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Split each axis that has a sub-axis among the names; the devices stay in their order.

    Raises:
        MeshError: if a sub-axis is not in the mesh, or two of them overlap.

    >>> from shardwise import DeviceMesh
    >>> factored(DeviceMesh((2, 12), ("dp", "tp")), ["tp:(2)3"])
    DeviceMesh((2, 2, 3, 2), ('dp', 'tp:(1)2', 'tp:(2)3', 'tp:(6)2'))
    """
    asked: dict[str, set[tuple[int, int]]] = {}
    for name in names:
        sub = parse_sub_axis(name, mesh.axis_names)
        if sub is not None:
            mesh.axis_size(name)  # Refuses what does not divide.
            asked.setdefault(sub.axis, set()).add((sub.before, sub.before * sub.size))
    shape: list[int] = []
    axis_names: list[str] = []
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        parts = asked.get(name, set())
        ends = sorted({1, size, *itertools.chain(*parts)})
        # A sub-axis of one coordinate begins where it ends.
        for start, stop in sorted({*itertools.pairwise(ends), *(part for part in parts if part[0] == part[1])}):
            if stop % start:
                raise MeshError(
                    f"names: sub-axes of {name!r} cannot be combined: they have boundaries at {start} and "
                    f"{stop}, and neither divides the other"
                )
            shape.append(stop // start)
            is_whole = stop // start == size and (start, stop) not in parts
            axis_names.append(name if is_whole else f"{name}:({start}){stop // start}")
        if size == 1 and not parts:
            shape.append(1)
            axis_names.append(name)
    return mesh.with_axes(shape, axis_names)


def _names(argument: str, names: Any) -> tuple[str, ...]:
    items = (names,) if isinstance(names, str) else names
    if not isinstance(items, Sequence) or not all(isinstance(name, str) for name in items):
        raise TypeError(f"{argument} must be an axis name or a sequence of them, got {shown(names)}")
    return tuple(items)


def _positions(mesh: DeviceMesh, names: Sequence[str]) -> list[int]:
    """Return the positions of the named axes in the mesh; a name that is unknown or repeated is refused."""
    place = {name: position for position, name in enumerate(mesh.axis_names)}
    for i, name in enumerate(names):
        if name not in place:
            overlapping = parse_sub_axis(name) is not None or any(f"{name}:(" in other for other in mesh.axis_names)
            why = " (two of the names overlap)" if overlapping and len(names) > 1 else ""
            raise MeshError(f"names[{i}] is {name!r}; the axes of this mesh are {mesh.axis_names}{why}")
        if name in names[:i]:
            raise MeshError(f"names[{i}] repeats the axis {name!r} of names[{names.index(name)}]")
    return [place[name] for name in names]


def _ordered(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """Return the mesh with its axes in another order."""
    shape, names = [mesh.shape[axis] for axis in axes], [mesh.axis_names[axis] for axis in axes]
    large = [axis for axis in axes if mesh.shape[axis] > 1]
    if large == sorted(large):
        return mesh.with_axes(shape, names)
    return type(mesh)(shape, names, mesh.labels_at(_positions_along(0, shape, [mesh.strides[axis] for axis in axes])))


def _positions_along(origin: int, sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Device indices in the row-major order of some axes."""
    count = math.prod(sizes)
    try:
        np.empty(count, np.int64)  # Refused at once if there is no room; step by step it would first fill memory.
    except ValueError:  # what numpy raises for a size that no address space holds
        raise MemoryError(f"no room for the labels of {count} devices") from None
    positions = np.array([origin], np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        positions = (positions[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    found: list[int] = positions.tolist()
    return found


def extremes_along(
    each: npt.NDArray[np.int64], world: DeviceMesh, meshes: Mapping[str, DeviceMesh], axis: str, mesh: str | None
) -> npt.NDArray[np.int64]:
    """Return the fewest and the most bytes of a device at each coordinate of an axis: int64 of shape (coordinates, 2).

    `each` has the bytes of each device of `world`, which is the one mesh if there are no `meshes`. Without `mesh` the
    first one that has the axis counts.

    Raises:
        MeshError: if there is no such axis or mesh.
    """
    known = meshes or {"mesh": world}
    for found in known.values() if mesh is None else [known[name] for name in known if name == mesh]:
        if axis in found.axis_names:
            break
    else:
        said = ", ".join(f"{name} {one.axis_names}" for name, one in known.items())
        raise MeshError(f"axis is {shown(axis)}, of mesh {shown(mesh)}; the meshes are {said}")
    at = np.array([world.index_of_label(label) for label in found.labels()], np.int64)
    position = found.axis_names.index(axis)
    sizes = np.moveaxis(each[at].reshape(found.shape), position, 0).reshape(found.shape[position], -1)
    return np.stack([sizes.min(1), sizes.max(1)], 1)
