"""The devices of a deployment, and meshes that are views of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._arguments import instance, integer
from .._text import counted, shown
from ..errors import LayoutError, MeshError
from ..mesh import DeviceMesh

__all__ = ["WORLD", "coordinates_of", "holds", "mesh_in_world", "named_meshes", "world_of"]

#: The name of the mesh that every deployment has: all devices along one axis of this name.
WORLD = "world"


def world_of(world: Any) -> DeviceMesh:
    """Return all devices along one axis: from their number, their labels, or a mesh of them."""
    if isinstance(world, DeviceMesh):
        return world.with_axes((world.size,), (WORLD,))
    if isinstance(world, (str, bytes)) or not (hasattr(world, "__index__") or hasattr(world, "__iter__")):
        raise TypeError(f"world must be a number of devices, their labels or a mesh, got {shown(world)}")
    if hasattr(world, "__index__") and not hasattr(world, "__iter__"):
        return DeviceMesh((integer("world", world),), (WORLD,))
    labels = list(world)
    return DeviceMesh((len(labels),), (WORLD,), labels)


def named_meshes(meshes: Any) -> dict[str, DeviceMesh]:
    """Return meshes by name; one without a name is called `"mesh"`."""
    if isinstance(meshes, DeviceMesh):
        return {"mesh": meshes}
    if not isinstance(meshes, Mapping):
        raise TypeError(f"meshes must be a mesh, or a mapping from names to meshes, got {shown(meshes)}")
    for name, mesh in meshes.items():
        if not isinstance(name, str) or not name or name == WORLD:
            raise LayoutError(
                f"meshes: {shown(name)} cannot be the name of a mesh; {WORLD!r} is the mesh of all devices"
            )
        instance(f"meshes[{shown(name)}]", mesh, DeviceMesh)
    return dict(meshes)


def coordinates_of(mesh: DeviceMesh, device: Any) -> dict[str, int]:
    """Return the coordinate of a device along each axis of a mesh, by the axis's name.

    Raises:
        MeshError: if the mesh does not have the device.
    """
    return dict(zip(mesh.axis_names, mesh.coordinate(mesh.index_of_label(device)), strict=True))


def mesh_in_world(world: DeviceMesh, name: str, mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with labels of the world.

    Raises:
        MeshError: if it has a device that the world has not.
    """
    if mesh.has_default_devices:
        if mesh.size == world.size:
            return mesh if world.has_default_devices else DeviceMesh(mesh.shape, mesh.axis_names, world.labels())
        if world.has_default_devices and mesh.size < world.size:
            return mesh
        raise MeshError(f"meshes[{shown(name)}] has {counted(mesh.size, 'device')}, but the world has {world.size}")
    for label in mesh.labels():
        try:
            at = world.index_of_label(label)
        except (MeshError, TypeError):
            at = -1
        if at < 0 or world.device(at) != label:
            raise MeshError(f"meshes[{shown(name)}] has the device {shown(label)}, which the world does not have")
    return mesh


def holds(mesh: DeviceMesh | None, device: Any) -> bool:
    """Return whether a mesh has a device of this label."""
    assert mesh is not None
    try:
        at = mesh.index_of_label(device)
    except (MeshError, TypeError):
        return False
    return bool(mesh.device(at) == device)
