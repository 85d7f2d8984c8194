"""TensorFlow's DTensor in both directions: its `Mesh` and `Layout` objects.

What its text and bytes say needs no TensorFlow: that is `shardwise.dtensor`, which these two functions go through. A
DTensor layout has one mesh axis a dim at most, and no unreduced axes. Devices keep their names; where TensorFlow's mesh
has names for none of them, or only for those of this client, they are named by their type and id.

The rules are those of TensorFlow 2.21.
"""

from __future__ import annotations

from typing import Any

from tensorflow.experimental import dtensor as theirs

from ..dtensor import Layout, Mesh
from ..layout import TensorLayout
from ..mesh import DeviceMesh

__all__ = ["from_tensorflow", "to_tensorflow"]


def to_tensorflow(value: DeviceMesh | TensorLayout | Mesh | Layout) -> Any:
    """Give the `tf.experimental.dtensor` object that says the same: a `Mesh` of a mesh, a `Layout` of a layout.

    Raises:
        LayoutError: if TensorFlow cannot express it: a dim cut by several axes, unreduced axes, or no mesh.
        MeshError: if a device label is no device name.
        TypeError: if it is neither a mesh nor a layout of shardwise.

    >>> mesh = DeviceMesh((2,), ("x",))
    >>> to_tensorflow(TensorLayout(("x", None), mesh)).sharding_specs
    ['x', 'unsharded']
    """
    if isinstance(value, DeviceMesh):
        value = Mesh.from_device_mesh(value)
    if isinstance(value, TensorLayout):
        value = Layout.from_tensor_layout(value)
    if isinstance(value, Mesh):
        return theirs.Mesh.from_string(value.to_string())
    if isinstance(value, Layout):
        return theirs.Layout.from_string(value.to_string())
    raise TypeError(f"value must be a mesh or a layout of shardwise, got {type(value).__name__}")


def from_tensorflow(value: Any) -> DeviceMesh | TensorLayout:
    """Give the mesh or the layout that says the same as a `tf.experimental.dtensor.Mesh` or `Layout`.

    Raises:
        LayoutError: if it is parted, or names no cuts: `MATCH`, or a single device's.
        MeshError: if it has no axes.
        TypeError: if it is neither of the two.

    >>> from_tensorflow(to_tensorflow(TensorLayout((None, "x"), DeviceMesh((2,), ("x",))))).axes
    (None, 'x')
    """
    if isinstance(value, theirs.Mesh):
        return Mesh.from_proto(value.as_proto()).to_device_mesh()
    if isinstance(value, theirs.Layout):
        return Layout.from_proto(value.as_proto()).to_tensor_layout()
    raise TypeError(f"value must be a Mesh or a Layout of TensorFlow, got {type(value).__name__}")
