"""All dialects side by side."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise import DeviceMesh, LayoutError, TensorLayout, packed
from shardwise.dtensor import Layout
from shardwise.interop import DIALECTS, translate
from shardwise.interop.megatron import to_rank_offsets

from .layouts import layouts

MESH = DeviceMesh((2, 4), ("data", "model"))
SUB_SPECS = ["x:(1)2", "x:(2)2", "x:(4)3", "x:(2)3", ("x:(3)2", "y"), ("y", "x:(1)3", "x:(6)2"), ("x:(6)2", "x:(1)3")]


def test_one_layout_in_all_dialects() -> None:
    assert translate(TensorLayout(("data", "model"), MESH), ["jax", "torch", "keras", "hlo", "shardy", "megatron"]) == {
        "jax": "PartitionSpec('data', 'model')",
        "torch": "[Shard(0), Shard(1)]",
        "keras": "TensorLayout(('data', 'model'), DeviceMesh((2, 4), ('data', 'model')))",
        "hlo": "{devices=[2,4]<=[8]}",
        "shardy": '#sdy.sharding<@mesh, [{"data"}, {"model"}]>',
        "megatron": "rank_offsets=[(0, data, 2), (1, model, 4)], replica_id=0",
    }


def test_tensorflow() -> None:
    text = translate(TensorLayout(("data", None), MESH), "tf")["tf"]
    assert text == Layout.from_tensor_layout(TensorLayout(("data", None), MESH)).to_string()
    assert text.startswith("sharding_specs:data,unsharded, mesh:|data=2,model=4|0,1,2,3,4,5,6,7|")


def test_partial_sums() -> None:
    texts = translate(TensorLayout(("data",), MESH, unreduced=["model"]))
    assert texts["jax"] == "PartitionSpec('data', unreduced={'model'})"
    assert texts["torch"] == "[Shard(0), Partial()]"
    assert texts["hlo"] == "{devices=[2,4]<=[8] last_tile_dims={unreduced}}"
    for dialect in ("tf", "keras", "megatron"):
        assert texts[dialect].startswith("cannot express: ('model',) are unreduced")


def test_replicas_of_megatron() -> None:
    mesh = DeviceMesh((2, 1, 3, 4), ("pod", "one", "data", "model"))
    text = translate(TensorLayout((None, "model"), mesh), "megatron")["megatron"]
    assert text == "rank_offsets=[(1, model, 4)], replica_id=pod*3 + data"


SUB_AXES = DeviceMesh((12, 2), ("x", "y"))


@given(layouts() | st.sampled_from([TensorLayout((spec, None), SUB_AXES) for spec in SUB_SPECS]))
@example(TensorLayout((packed.experts(8, "model"), None), MESH))
def test_the_text_for_megatron_is_the_code(layout: TensorLayout) -> None:
    """Computed from the coordinates of a device, it is what `to_rank_offsets` gives for that device."""
    text = translate(layout, "megatron")["megatron"]
    if layout.unreduced:
        assert text.startswith("cannot express")
        return
    mesh = layout.device_mesh
    assert mesh is not None
    for coordinate, expected in zip(mesh.coordinates().tolist(), to_rank_offsets(layout), strict=True):
        known = dict(zip(mesh.axis_names, coordinate, strict=True))
        found = eval(f"dict({text})", known)
        assert tuple(found["rank_offsets"]) == expected.rank_offsets
        assert found["replica_id"] == expected.replica_id


@given(layouts(labels=True))
def test_every_layout_has_a_text_or_a_reason_in_every_dialect(layout: TensorLayout) -> None:
    texts = translate(layout)
    assert tuple(texts) == DIALECTS
    assert all(text and "\n" not in text for text in texts.values())


@given(layouts())
def test_the_text_for_jax_is_the_code(layout: TensorLayout) -> None:
    sharding = pytest.importorskip("jax.sharding")
    from shardwise.interop.jax import to_partition_spec

    code = translate(layout, "jax")["jax"]
    assert eval(code, {"PartitionSpec": sharding.PartitionSpec}) == to_partition_spec(layout)


def test_meshes_that_tensorflow_cannot_list() -> None:
    labels = translate(TensorLayout((), DeviceMesh((2,), ("x",), [("a", 1), 3])))
    assert labels["tf"] == "cannot express: TensorFlow's devices have names, and ('a', 1) is not such a name"
    many = translate(TensorLayout(("x",), DeviceMesh((2**40,), ("x",))))
    assert many["tf"].startswith("cannot express: TensorFlow lists all devices; 1099511627776 are over the limit")
    assert many["hlo"] == "{devices=[1099511627776]<=[1099511627776]}"


def test_a_layout_without_a_mesh_has_no_texts() -> None:
    with pytest.raises(LayoutError, match="has no device_mesh yet"):
        translate(TensorLayout(("data", None)))


def test_unknown_dialects() -> None:
    with pytest.raises(LayoutError, match="to holds 'mlx'; the dialects are jax, torch"):
        translate(TensorLayout((), MESH), "mlx")
