"""What the dialects share: layouts taken apart by mesh axis, and mesh axes found again from shard indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._arguments import instance, integer
from .._text import shown
from ..errors import LayoutError, SizeOverflowError
from ..layout import Axes, TensorLayout
from ..mesh import DeviceMesh

__all__ = ["axes_along", "checked_layout", "checked_mesh", "checked_rank", "layout_of_indices", "spec_names"]


def spec_names(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Give the axes of one dim's spec, major first.

    >>> spec_names(None), spec_names("x"), spec_names(("x", "y"))
    ((), ('x',), ('x', 'y'))
    """
    if spec is None:
        return ()
    return (spec,) if isinstance(spec, str) else spec


def checked_layout(layout: object) -> tuple[TensorLayout, DeviceMesh]:
    """Give the layout and its mesh; an error if it is no layout, or has no mesh."""
    given = instance("layout", layout, TensorLayout)
    if given.device_mesh is None:
        raise LayoutError(f"layout {shown(layout)} has no device_mesh yet; a dialect needs the sizes of its axes")
    return given, given.device_mesh


def checked_mesh(mesh: object) -> DeviceMesh:
    """Give the mesh; an error if it is none."""
    return instance("mesh", mesh, DeviceMesh)


def checked_rank(rank: object) -> int:
    """Give the number of dims as an int; an error if it is no integer, or negative."""
    number = integer("rank", rank)
    if number < 0:
        raise LayoutError(f"rank is {shown(number)}; a tensor has at least 0 dims")
    if number > 2**63 - 1:
        raise SizeOverflowError(f"rank is {shown(number)}, over the limit of {2**63 - 1}")
    return number


def axes_along(mesh: DeviceMesh, indices: npt.NDArray[np.int64], count: int) -> tuple[str, ...] | None:
    """Find the axes that give every device its index along one dim, major first.

    Args:
        mesh: the mesh.
        indices: for every device, in device-index order, an index from 0 to `count - 1`.
        count: the number of different indices.

    Returns:
        The axes whose coordinates spell the indices in mixed radix, or `None` if there are none. An axis of size 1
        leaves no trace in the indices and is never among them.

    >>> axes_along(DeviceMesh((2, 3), ("x", "y")), np.array([0, 2, 4, 1, 3, 5]), 6)
    ('y', 'x')
    """
    # If the indices are spelled by coordinates, the weight of an axis is the index one step along it.
    steps = [
        (int(indices[stride] - indices[0]), axis) for axis, stride in enumerate(mesh.strides) if stride < mesh.size
    ]
    chosen = sorted((step for step in steps if step[0] and mesh.shape[step[1]] > 1), reverse=True)
    expected = 1
    for weight, axis in reversed(chosen):
        if weight != expected:
            return None
        expected *= mesh.shape[axis]
    if expected != count:
        return None
    coordinates = mesh.coordinates()
    spelled = sum((coordinates[:, axis] * weight for weight, axis in chosen), np.zeros(mesh.size, np.int64))
    return tuple(mesh.axis_names[axis] for _, axis in chosen) if np.array_equal(spelled, indices) else None


def layout_of_indices(
    what: str, mesh: DeviceMesh, indices: npt.NDArray[np.int64], counts: Sequence[int], unreduced: Sequence[str] = ()
) -> TensorLayout:
    """Find the layout over `mesh` that gives every device these shard indices, int64 (devices, dims).

    Raises:
        LayoutError: if there is none; says for which dim of `what`.
    """
    axes: list[tuple[str, ...]] = []
    for dim, count in enumerate(counts):
        names = axes_along(mesh, indices[:, dim], count)
        if names is None:
            raise LayoutError(
                f"{what}: no axes of {shown(mesh)}, in any order, cut dim {dim} into {count} so that every device "
                "gets the "
                "shard it is given here"
            )
        axes.append(names)
    specs: Axes = tuple(axes)
    return TensorLayout(specs, mesh, unreduced=unreduced)
