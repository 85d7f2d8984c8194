"""TensorFlow's DTensor in both directions: its `Mesh` and `Layout` objects.

The text and the bytes of DTensor need no TensorFlow: `shardwise.dtensor` has them, and these two functions go through
it. A DTensor layout has at most one mesh axis per dim, and no unreduced axes. TensorFlow wants full device names: what
a label leaves out is filled in from this process, so `"cpu:0"` comes back as
`"/job:localhost/replica:0/task:0/device:CPU:0"`.

The rules are those of TensorFlow 2.21.
"""

from __future__ import annotations

from typing import Any

from tensorflow.experimental import dtensor as theirs

from ..dtensor import DeviceSpec, Layout, Mesh
from ..layout import TensorLayout
from ..mesh import DeviceMesh

__all__ = ["from_tensorflow", "to_tensorflow"]


#: The default meaning of a device name.
_THIS_TASK = DeviceSpec(job="localhost", replica=0, task=0)


def to_tensorflow(value: DeviceMesh | TensorLayout) -> Any:
    """Return the `tf.experimental.dtensor` object that says the same: a `Mesh` of a mesh, a `Layout` of a layout.

    Raises:
        LayoutError: if TensorFlow cannot express it: a dim cut by several axes, unreduced axes, or no mesh.
        MeshError: if a device label is not a device name.
        TypeError: if the value is neither a mesh nor a layout.

    >>> mesh = DeviceMesh((2,), ("x",))
    >>> to_tensorflow(TensorLayout(("x", None), mesh)).sharding_specs
    ['x', 'unsharded']
    """
    if isinstance(value, DeviceMesh):
        return theirs.Mesh.from_string(_mesh(value).to_string())
    if isinstance(value, TensorLayout):
        mesh = None if value.device_mesh is None else _mesh(value.device_mesh)
        return theirs.Layout.from_string(Layout.from_tensor_layout(value, mesh).to_string())
    raise TypeError(f"value must be a DeviceMesh or a TensorLayout of shardwise, got {type(value).__name__}")


def _mesh(mesh: DeviceMesh) -> Mesh:
    """Return the mesh in TensorFlow's dialect, its devices with their full names."""
    short = Mesh.from_device_mesh(mesh).local_devices()
    whole = [_THIS_TASK.make_merged_spec(DeviceSpec.from_string(name)).to_string() for name in short]
    return Mesh.from_device_mesh(DeviceMesh(mesh.shape, mesh.axis_names, whole))


def from_tensorflow(value: Any) -> DeviceMesh | TensorLayout:
    """Return the mesh or the layout that says the same as a `tf.experimental.dtensor.Mesh` or `Layout`.

    Raises:
        LayoutError: if the layout is a parted layout of TensorFlow, or states no cuts: `MATCH`, or a single device.
        MeshError: if the mesh has no axes.
        TypeError: if the value is neither a mesh nor a layout.

    >>> from_tensorflow(to_tensorflow(TensorLayout((None, "x"), DeviceMesh((2,), ("x",))))).axes
    (None, 'x')
    """
    if isinstance(value, theirs.Mesh):
        return Mesh.from_proto(value.as_proto()).to_device_mesh()
    if isinstance(value, theirs.Layout):
        return Layout.from_proto(value.as_proto()).to_tensor_layout()
    raise TypeError(f"value must be a Mesh or a Layout of TensorFlow, got {type(value).__name__}")
