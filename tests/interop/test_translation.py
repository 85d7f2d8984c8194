"""All dialects side by side."""

from __future__ import annotations

import pytest
from hypothesis import given

from shardwise import DeviceMesh, LayoutError, TensorLayout
from shardwise.dtensor import Layout
from shardwise.interop import DIALECTS, translate

from .layouts import layouts

MESH = DeviceMesh((2, 4), ("data", "model"))


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
    assert labels["tf"] == "cannot express: TensorFlow's devices have names, and ('a', 1) is not one"
    many = translate(TensorLayout(("x",), DeviceMesh((2**40,), ("x",))))
    assert many["tf"].startswith("cannot express: TensorFlow lists all devices; 1099511627776 are over the limit")
    assert many["hlo"] == "{devices=[1099511627776]<=[1099511627776]}"


def test_unknown_dialects() -> None:
    with pytest.raises(LayoutError, match="to holds 'mlx'; the dialects are jax, torch"):
        translate(TensorLayout((), MESH), "mlx")
