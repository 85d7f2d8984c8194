"""`keras.distribution` in both directions: meshes, layouts and layout maps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ..._text import shown
from ...errors import LayoutError, MeshError
from ...layout import TensorLayout
from ...mesh import DeviceMesh
from ...rules.layout_map import LayoutMap
from .._plain import whole_axes_layout

__all__ = ["from_keras", "to_keras"]

#: Keras matches whole paths; what a rule that may match anywhere, or at the beginning, needs around it.
_AFFIXES = {"search": (r"(?s:.*)(?:", r")(?s:.*)"), "match": (r"(?:", r")(?s:.*)"), "fullmatch": ("", "")}


def to_keras(value: DeviceMesh | TensorLayout | LayoutMap) -> Any:
    """Return the `keras.distribution` object that says the same: a DeviceMesh, a TensorLayout or a LayoutMap.

    Raises:
        LayoutError: if Keras cannot express it: a dim cut by several axes, unreduced axes, or a rule with a flag like
            `(?i)` at its beginning in a map that does not match whole paths.
        MeshError: if a device label is neither a string nor an int.
        TypeError: if the value is of another type.

    Keras matches whole paths, so rules of a map that searches get `.*` around them; their keys are then
    regular expressions, and no longer match exactly first. With Keras's own paths, names are joined by `/`, not by
    dots.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> to_keras(TensorLayout((None, "model"), DeviceMesh((2,), ("model",)))).axes
    (None, 'model')
    """
    if isinstance(value, DeviceMesh):
        return _mesh_to_keras(value)
    if isinstance(value, TensorLayout):
        mesh = None if value.device_mesh is None else _mesh_to_keras(value.device_mesh)
        return _layout_to_keras(value, mesh)
    if isinstance(value, LayoutMap):
        return _map_to_keras(value)
    raise TypeError(f"value must be a DeviceMesh, TensorLayout or LayoutMap of shardwise, got {type(value).__name__}")


def from_keras(value: Any) -> Any:
    """Return the shardwise object that says the same as a `keras.distribution` DeviceMesh, TensorLayout or LayoutMap.

    Raises:
        LayoutError, MeshError: if it is invalid in shardwise: Keras accepts repeated axes and devices.
        TypeError: if the value is of another type.

    `from_keras(to_keras(value)) == value`.

    >>> from shardwise import DeviceMesh
    >>> from_keras(to_keras(DeviceMesh((2, 1), ("x", "y"))))
    DeviceMesh((2, 1), ('x', 'y'))
    """
    if isinstance(value, keras.distribution.DeviceMesh):
        return DeviceMesh(tuple(value.shape), tuple(value.axis_names), value.devices.ravel().tolist())
    if isinstance(value, keras.distribution.TensorLayout):
        mesh = value.device_mesh
        return TensorLayout(tuple(value.axes), None if mesh is None else from_keras(mesh))
    if isinstance(value, keras.distribution.LayoutMap):
        return _map_from_keras(value)
    raise TypeError(f"value must be a DeviceMesh, TensorLayout or LayoutMap of Keras, got {type(value).__name__}")


def _mesh_to_keras(mesh: DeviceMesh) -> Any:
    for label in mesh.labels():
        if not isinstance(label, (str, int)):
            raise MeshError(f"device {shown(label)}: Keras takes device labels that are strings or ints")
    return keras.distribution.DeviceMesh(mesh.shape, list(mesh.axis_names), np.array(mesh.devices.tolist()))


def _layout_to_keras(layout: TensorLayout, mesh: Any) -> Any:
    layout = whole_axes_layout(layout, "Keras")
    for dim, spec in enumerate(layout.axes):
        if isinstance(spec, tuple):
            raise LayoutError(f"axes[{dim}] is {shown(spec)}; Keras cannot express a dim that several axes cut")
    if layout.unreduced:
        raise LayoutError(f"the layout is unreduced over {shown(layout.unreduced)}; Keras cannot express partial sums")
    return keras.distribution.TensorLayout(layout.axes, mesh)


def _map_to_keras(layout_map: LayoutMap) -> Any:
    if layout_map.default is not None:
        raise LayoutError("the map has a default; Keras cannot express one")
    for key, rule in layout_map.rules().items():
        if rule.uneven is not None:
            raise LayoutError(f"rule {shown(key)} has the uneven rule {rule.uneven!r}; Keras cannot express one")
    meshes: dict[DeviceMesh | None, Any] = {None: None}
    prefix, suffix = _AFFIXES[layout_map.match]

    def mesh_of(mesh: DeviceMesh | None) -> Any:
        if mesh not in meshes:
            meshes[mesh] = None if mesh is None else _mesh_to_keras(mesh)
        return meshes[mesh]

    result = keras.distribution.LayoutMap(mesh_of(layout_map.device_mesh))
    for key, layout in layout_map.items():
        if prefix and key.startswith("(?") and key[2:3] in "aiLmsux":
            raise LayoutError(
                f"rule {shown(key)} begins with a flag; Keras, which matches whole paths, cannot express it"
            )
        try:
            result[f"{prefix}{key}{suffix}"] = _layout_to_keras(layout, mesh_of(layout.device_mesh))
        except LayoutError as error:
            raise LayoutError(f"rule {shown(key)}: {error}") from None
    return result


def _map_from_keras(layout_map: Any) -> LayoutMap:
    mesh = None if layout_map.device_mesh is None else from_keras(layout_map.device_mesh)
    keys = list(layout_map)
    for match, (prefix, suffix) in _AFFIXES.items():
        if match == "fullmatch" or (keys and all(k.startswith(prefix) and k.endswith(suffix) for k in keys)):
            result = LayoutMap(mesh, match=match, backtracking=True)  # type: ignore[arg-type]
            for key in keys:
                result[key[len(prefix) : len(key) - len(suffix)]] = from_keras(layout_map[key])
            return result
    raise AssertionError("unreachable: every key has the affixes of a full match")
