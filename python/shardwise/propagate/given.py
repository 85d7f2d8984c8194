"""Checks of the layouts, meshes and policies that users give, and their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from .._arguments import instance
from .._text import counted, shown
from ..errors import LayoutError, ShardwiseError
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

#: Rules for tensors whose layouts disagree: an error, the choice of Shardy's passes, the fewest bytes.
Policy = Literal["explicit", "shardy", "least"]

#: One entry a dim: an axis, several, or `None`.
GivenAxes = Sequence[str | Sequence[str] | None]


def check_policy(policy: Policy) -> None:
    """Refuse a policy of another name."""
    if not isinstance(policy, str) or policy not in get_args(Policy):
        raise LayoutError(f"policy is {shown(policy)}; it must be one of {', '.join(map(repr, get_args(Policy)))}")


def mesh_of(mesh: DeviceMesh | None, layouts: Mapping[str, Any]) -> DeviceMesh:
    """Return the one mesh of `mesh` and the layouts, which have their arguments' names."""
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
    name: str,
    given: TensorLayout | GivenAxes | None,
    mesh: DeviceMesh,
    rank: int,
    what: str = "its tensor",
    *,
    unreduced: bool = False,
) -> TensorLayout | None:
    """Return a given layout on the mesh, checked to have `rank` plain dims, and no unreduced axes unless they may be.

    Errors begin with its argument's name.
    """
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, (TensorLayout, Sequence)):
        raise TypeError(f"{name} must be a TensorLayout, a tuple of axes or None, got {shown(given)}")
    axes, added = (given.axes, given.unreduced) if isinstance(given, TensorLayout) else (given, ())
    try:
        layout = TensorLayout(axes, mesh, unreduced=added)
    except (ShardwiseError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if layout.is_packed:
        raise LayoutError(f"{name} has a packed dim; ops take plain ones")
    if len(layout.axes) != rank:
        raise LayoutError(f"{name} has {counted(len(layout.axes), 'dim')}, but {what} has {rank}")
    if added and not unreduced:
        raise LayoutError(f"{name} is unreduced over {', '.join(added)}; reduce it first")
    return layout


def specs_of(layout: TensorLayout) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dim of a layout without packed dims."""
    specs: Any = layout.axes
    return tuple(() if spec is None else (spec,) if isinstance(spec, str) else spec for spec in specs)


def mesh_text(mesh: DeviceMesh) -> str:
    """Return the axes of a mesh with their sizes.

    >>> mesh_text(DeviceMesh((2, 4), ("dp", "tp")))
    'dp=2, tp=4'
    """
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


def layout_text(layout: TensorLayout) -> str:
    """Return the axes of each dim as the command reads them, such as `"dp,-,tp+sp"`."""
    return ",".join("+".join(spec) or "-" for spec in specs_of(layout)) or "()"


def shape_text(shape: Sequence[int], scalar: str = "scalar") -> str:
    """Return a shape as text, such as `"8 x 16"`."""
    return " x ".join(map(str, shape)) or scalar
