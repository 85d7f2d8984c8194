"""Layouts and meshes as users give them to ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh

__all__ = [
    "GivenAxes",
    "Policy",
    "check_policy",
    "layout_of",
    "layout_text",
    "mesh_of",
    "mesh_text",
    "shape_text",
    "specs_of",
]

#: The ways to decide a disagreement between layouts: not at all, as Shardy's passes do, by the fewest bytes.
Policy = Literal["explicit", "shardy", "least"]

#: For each dim an axis, several, or none.
GivenAxes = Sequence[str | Sequence[str] | None]


def check_policy(policy: Policy) -> None:
    """Check that it is one."""
    if not isinstance(policy, str) or policy not in get_args(Policy):
        raise LayoutError(f"policy is {shown(policy)}; it is one of {', '.join(map(repr, get_args(Policy)))}")


def mesh_of(mesh: DeviceMesh | None, layouts: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh that is given, or that the layouts have, which must be one."""
    found = None if mesh is None else instance("mesh", mesh, DeviceMesh)
    for name, layout in layouts.items():
        own = layout.device_mesh if isinstance(layout, TensorLayout) else None
        if own is not None and found is not None and own != found:
            raise LayoutError(f"{name} is on the mesh {mesh_text(own)}, others are on {mesh_text(found)}")
        found = found or own
    if found is None:
        raise LayoutError("mesh is missing, and no layout has one; give mesh=DeviceMesh(...)")
    return found


def layout_of(
    name: str, given: TensorLayout | GivenAxes | None, mesh: DeviceMesh, rank: int, what: str = "its tensor"
) -> TensorLayout | None:
    """Return the layout on the mesh, of as many dims as its tensor has."""
    if given is None:
        return None
    if isinstance(given, str):
        raise TypeError(f"{name} must be a TensorLayout, a tuple of axes or None, got {shown(given)}")
    layout = given if isinstance(given, TensorLayout) else TensorLayout(given, mesh)
    layout = layout if layout.device_mesh is not None else TensorLayout(layout.axes, mesh, unreduced=layout.unreduced)
    if layout.is_packed:
        raise LayoutError(f"{name} has a packed dim; ops take plain ones")
    if len(layout.axes) != rank:
        raise LayoutError(f"{name} has {len(layout.axes)} dims, but {what} has {rank}")
    return layout


def specs_of(layout: TensorLayout) -> tuple[tuple[str, ...], ...]:
    """Return for each dim the tuple of its axes."""
    specs: Any = layout.axes  # None of them is packed.
    return tuple(() if spec is None else (spec,) if isinstance(spec, str) else spec for spec in specs)


def mesh_text(mesh: DeviceMesh) -> str:
    """Write the axes of a mesh.

    >>> mesh_text(DeviceMesh((2, 4), ("dp", "tp")))
    'dp=2, tp=4'
    """
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


def layout_text(layout: TensorLayout) -> str:
    """Write the axes of each dim: `"dp,-,tp+sp"`."""
    return ",".join("+".join(spec) or "-" for spec in specs_of(layout)) or "()"


def shape_text(shape: Sequence[int], scalar: str = "scalar") -> str:
    """Write a shape: `"8 x 16"`."""
    return " x ".join(map(str, shape)) or scalar
