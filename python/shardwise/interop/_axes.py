"""The common parts of the dialects: layouts taken apart by mesh axis, and mesh axes found again from shard indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import instance, integer
from .._text import shown
from ..errors import LayoutError, SizeOverflowError
from ..layout import Axes, Spec, TensorLayout
from ..mesh import DeviceMesh
from ..mesh_views import factored
from ..packed import PackedDim
from ..sub_axis import SubAxis
from ._plain import plain_layout

__all__ = [
    "axes_along",
    "checked_layout",
    "checked_mesh",
    "checked_rank",
    "layout_of_indices",
    "spec_names",
]


def spec_names(spec: Spec) -> tuple[str, ...]:
    """Return the axes of one dim's spec, major first.

    >>> spec_names(None), spec_names("x"), spec_names(("x", "y"))
    ((), ('x',), ('x', 'y'))
    """
    if spec is None:
        return ()
    if isinstance(spec, PackedDim):
        return spec.axis_names
    return (spec,) if isinstance(spec, str) else spec


def checked_layout(layout: object) -> tuple[TensorLayout, DeviceMesh]:
    """Return the layout, without packed dims, and its mesh.

    Raises:
        LayoutError: if it has no mesh, or a packed dim that is not cut as a plain one.
        TypeError: if it is not a layout.
    """
    given = instance("layout", layout, TensorLayout)
    if given.device_mesh is None:
        raise LayoutError(f"layout {shown(layout)} has no device_mesh yet; a dialect needs the sizes of its axes")
    return plain_layout(given), given.device_mesh


def checked_mesh(mesh: object) -> DeviceMesh:
    """Return the mesh; an error if it is not one."""
    return instance("mesh", mesh, DeviceMesh)


def checked_rank(rank: object) -> int:
    """Return the number of dims as an int; an error if it is not an integer, or negative."""
    number = integer("rank", rank)
    if number < 0:
        raise LayoutError(f"rank is {shown(number)}; a tensor has at least 0 dims")
    if number > 2**63 - 1:
        raise SizeOverflowError(f"rank is {shown(number)}, over the limit of {2**63 - 1}")
    return number


def axes_along(mesh: DeviceMesh, indices: npt.NDArray[np.int64], count: int) -> tuple[str, ...] | None:
    """Find the axes that give every device its index along one dim, major first.

    Args:
        mesh: the mesh whose axes are tried.
        indices: for every device, in device-index order, an index from 0 to `count - 1`.
        count: the number of different indices.

    Returns:
        The axes and sub-axes whose coordinates spell the indices in mixed radix, or `None` if there are none. An axis
        of size 1 leaves no trace in the indices and is never among them.

    >>> axes_along(DeviceMesh((2, 3), ("x", "y")), np.array([0, 2, 4, 1, 3, 5]), 6)
    ('y', 'x')
    >>> axes_along(DeviceMesh((8,), ("x",)), np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
    ('x:(1)4',)
    """
    # If the indices are spelled by coordinates, the weight of an axis is the index one step along it.
    chosen = [
        step
        for name, size, stride in zip(mesh.axis_names, mesh.shape, mesh.strides, strict=True)
        if size > 1
        for step in _steps(name, indices[: size * stride : stride] - indices[0])
    ]
    chosen.sort(key=lambda step: step.weight, reverse=True)
    expected = 1
    for step in reversed(chosen):
        if step.weight != expected:
            return None
        expected *= step.size
    if expected != count:
        return None
    whole = factored(mesh, [step.name for step in chosen])
    coordinates = whole.coordinates()
    spelled = np.zeros(mesh.size, np.int64)
    for step in chosen:
        spelled += coordinates[:, whole.axis_names.index(step.name)] * step.weight
    return tuple(step.name for step in chosen) if np.array_equal(spelled, indices) else None


class _Growth(NamedTuple):
    """The growth of an index with each step along an axis or a sub-axis."""

    name: str
    size: int
    weight: int


def _steps(name: str, along: npt.NDArray[np.int64]) -> list[_Growth]:
    """Cut an axis where its steps change, given the index at each of its coordinates; those without a step left out."""
    whole, done = len(along), 1
    found: list[_Growth] = []
    while done < whole:
        part = along[::done]
        weight = int(part[1])
        bent = np.flatnonzero(part != np.arange(len(part)) * weight)
        size = int(bent[0]) if len(bent) else len(part)
        if len(part) % size:
            return []  # These are not the coordinates of sub-axes: then nothing spells the indices.
        if weight:
            found.append(_Growth(name if size == whole else str(SubAxis(name, len(part) // size, size)), size, weight))
        done *= size
    return found


def layout_of_indices(
    what: str, mesh: DeviceMesh, indices: npt.NDArray[np.int64], counts: Sequence[int], unreduced: Sequence[str] = ()
) -> TensorLayout:
    """Find the layout over `mesh` that gives every device these shard indices, int64 (devices, dims).

    Raises:
        LayoutError: if there is none; the message says for which dim of `what`.
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
