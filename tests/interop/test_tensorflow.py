"""TensorFlow's own meshes and layouts, there and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, MeshError, TensorLayout

theirs = pytest.importorskip("tensorflow.experimental.dtensor")
convert = pytest.importorskip("shardwise.interop.tensorflow")

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(6)]
MESH = DeviceMesh((2, 3), ("x", "y"), CPUS)


def test_a_mesh_there_and_back() -> None:
    mesh = convert.to_tensorflow(MESH)
    assert isinstance(mesh, theirs.Mesh)
    assert (mesh.dim_names, mesh.dim_size("y"), mesh.size) == (["x", "y"], 3, 6)
    assert mesh.local_devices() == CPUS
    assert convert.from_tensorflow(mesh) == MESH


@pytest.mark.parametrize("axes", dict.fromkeys(itertools.permutations(["x", "y", None, None], 2)))
def test_a_layout_there_and_back(axes: tuple[str | None, ...]) -> None:
    layout = convert.to_tensorflow(TensorLayout(axes, MESH))
    assert isinstance(layout, theirs.Layout)
    assert layout == theirs.Layout([axis or "unsharded" for axis in axes], convert.to_tensorflow(MESH))
    assert convert.from_tensorflow(layout) == TensorLayout(axes, MESH)


def test_a_layout_of_theirs_cuts_as_theirs_does() -> None:
    layout = theirs.Layout(["y", "unsharded", "x"], convert.to_tensorflow(MESH))
    ours = convert.from_tensorflow(layout).partition((9, 5, 4))
    assert ours.shard_shape(CPUS[0]) == tuple(layout.local_shape_from_global_shape([9, 5, 4]))
    offsets = np.array(layout.offset_to_shard())
    for device, offset in zip(CPUS, offsets, strict=True):
        sizes = np.array(ours.shard_shape(device))
        assert [side.start for side in ours.box(device)] == (offset * sizes).tolist()


@pytest.mark.parametrize("names", [["cpu:0", "cpu:1"], ["/device:CPU:0", "/task:0/device:CPU:1"], None])
def test_short_names_are_of_this_task(names: list[str] | None) -> None:
    mesh = DeviceMesh((2,), ("x",), names)
    assert convert.from_tensorflow(convert.to_tensorflow(mesh)) == DeviceMesh((2,), ("x",), CPUS[:2])
    other = DeviceMesh((1,), ("x",), ["/job:worker/task:3/device:GPU:1"])
    assert convert.to_tensorflow(other).local_devices() == ["/job:worker/replica:0/task:3/device:GPU:1"]


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(LayoutError, match="one mesh axis at most"):
        convert.to_tensorflow(TensorLayout((("x", "y"),), MESH))
    with pytest.raises(LayoutError, match="unreduced"):
        convert.to_tensorflow(TensorLayout(("x",), MESH, unreduced=["y"]))
    with pytest.raises(LayoutError, match="device_mesh"):
        convert.to_tensorflow(TensorLayout(("x",)))
    with pytest.raises(MeshError):
        convert.to_tensorflow(DeviceMesh((2,), ("x",), ["left", "right"]))
    with pytest.raises(TypeError, match="value must be a DeviceMesh or a TensorLayout of shardwise, got str"):
        convert.to_tensorflow("x")
    with pytest.raises(TypeError, match="value must be a Mesh or a Layout of TensorFlow, got DeviceMesh"):
        convert.from_tensorflow(MESH)
    parted = theirs.Layout(["x"], convert.to_tensorflow(MESH)).to_parted()
    with pytest.raises(LayoutError, match="PARTED"):
        convert.from_tensorflow(parted)
