"""JAX's specs and abstract meshes, which need no devices; `jax_eight_devices.py` has the rest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from shardwise import DeviceMesh, LayoutError, MeshError, TensorLayout, packed

from .layouts import layouts, mesh_of

sharding = pytest.importorskip("jax.sharding")

from shardwise.interop import jax as dialect  # noqa: E402

P = sharding.PartitionSpec
MESH = DeviceMesh((2, 4), ("x", "y"))


@given(layouts(labels=True))
def test_specs_come_back(layout: TensorLayout) -> None:
    spec = dialect.to_partition_spec(layout)
    assert len(spec) == layout.rank
    assert dialect.from_partition_spec(spec, mesh_of(layout), layout.rank) == layout


@given(layouts())
def test_named_shardings_over_abstract_meshes_come_back(layout: TensorLayout) -> None:
    named = dialect.to_named_sharding(layout, abstract=True)
    assert dialect.from_named_sharding(named, layout.rank) == layout
    shape = tuple(3 * count for count in layout.num_shards)
    assert named.shard_shape(shape) == layout.shard_shape(mesh_of(layout).device(0), shape)


def test_packed_dims_and_sub_axes_that_whole_axes_cut() -> None:
    mesh = DeviceMesh((2, 4), ("x", "y"))
    for dim, entry in (
        (packed.experts(8, "y"), "y"),
        (packed.qkv(8, 2, 4, "y", order="interleaved"), "y"),
        (("y:(1)2", "y:(2)2", "x"), ("y", "x")),
        ("y:(1)4", "y"),
    ):
        layout = TensorLayout((dim, None), mesh)
        named = dialect.to_named_sharding(layout, abstract=True)
        assert named.spec == P(entry, None)
        assert named.shard_shape((48, 3)) == layout.partition((48, 3)).shard_shape("cpu:0")
    for dim, message in ((packed.gate_up("y"), "packed dim"), ("y:(1)2", "sub-axis")):
        with pytest.raises(LayoutError, match=message):
            dialect.to_partition_spec(TensorLayout((dim,), mesh))


def test_trailing_dims_may_be_left_out() -> None:
    assert dialect.from_partition_spec(P("x"), MESH, 3).axes == ("x", None, None)
    assert dialect.from_partition_spec(P(), MESH, 0).axes == ()
    assert dialect.from_partition_spec(P(("y", "x"), ()), MESH, 2).axes == (("y", "x"), None)


@pytest.mark.parametrize(
    ("spec", "rank", "message"),
    [
        (P("x", None), 1, "2 entries, but the tensor has 1"),
        (P(None, P.UNCONSTRAINED), 2, "dim 1 UNCONSTRAINED"),
        (P("x", reduced={"y"}), 1, "reduced axes"),
        (P("z"), 1, 'axis "z"'),
        (P(unreduced={"z"}), 1, "an axis that the mesh does not have"),
        (P("x", "x"), 2, "uses axis 'x'"),
    ],
)
def test_what_no_layout_can_express(spec: object, rank: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dialect.from_partition_spec(spec, MESH, rank)


def test_meshes() -> None:
    assert dialect.from_mesh(dialect.to_abstract_mesh(MESH)) == MESH
    with pytest.raises(MeshError, match="has no devices"):
        dialect.to_abstract_mesh(DeviceMesh((2,), ("x",), devices=["cpu:1", "cpu:0"]))
    with pytest.raises(MeshError, match="named 0"):
        dialect.from_mesh(sharding.AbstractMesh((2,), (0,)))
    # JAX takes any objects for devices.
    numbers = sharding.Mesh(np.arange(4).reshape(2, 2), ("x", "y"))
    assert dialect.from_mesh(numbers) == DeviceMesh((2, 2), ("x", "y"), devices=[0, 1, 2, 3])
    for wrong in (None, MESH, "x"):
        with pytest.raises(TypeError):
            dialect.from_mesh(wrong)


def test_wrong_types() -> None:
    with pytest.raises(TypeError):
        dialect.from_partition_spec(("x",), MESH, 1)
    with pytest.raises(TypeError):
        dialect.from_named_sharding(P("x"), 1)
    with pytest.raises(TypeError):
        dialect.from_array([1])
    with pytest.raises(LayoutError, match="no device_mesh"):
        dialect.to_named_sharding(TensorLayout(("x",)))


def test_an_order_of_devices_beside_the_mesh_cannot_be_expressed() -> None:
    jax = pytest.importorskip("jax")
    mesh = sharding.Mesh(jax.devices()[:1], ("x",))
    named = sharding.NamedSharding(mesh, P("x"), _logical_device_ids=(0,))
    with pytest.raises(LayoutError, match="order of devices other than its mesh's"):
        dialect.from_named_sharding(named, 1)
    assert dialect.from_named_sharding(sharding.NamedSharding(mesh, P("x")), 1).axes == ("x",)
