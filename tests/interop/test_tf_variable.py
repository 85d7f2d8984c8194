"""Plain `tf.Variable`s under the scope, as `tf.keras.dtensor.experimental.layout_map_scope` promises them."""

from __future__ import annotations

import pytest

from shardwise import DeviceMesh, LayoutMap, TensorLayout, dtensor, initialize_variables, layout_map_scope

tf = pytest.importorskip("tensorflow")


class Dense(tf.Module):  # type: ignore[misc,name-defined]
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.zeros((rows, columns)))
        self.bias = tf.Variable(tf.zeros(columns))


class Model(tf.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.d1 = Dense(4, 8)
        self.d2 = Dense(8, 2)


def test_the_main_dialect() -> None:
    mesh = DeviceMesh((2, 2), ("x", "y"))
    layout_map = LayoutMap(mesh=mesh)
    layout_map["d1.kernel"] = layout_1 = TensorLayout((None, "y"), mesh)
    layout_map["d2.bias"] = layout_4 = TensorLayout(("x",), mesh)
    with layout_map_scope(layout_map):
        model = initialize_variables(Model())
    assert model.d1.kernel.layout == layout_1
    assert model.d2.bias.layout == layout_4
    assert model.d1.bias.layout == TensorLayout((None,), mesh)
    assert model.d2.kernel.object_path == "d2.kernel"
    # They are variables as before.
    model.d1.bias.assign_add(tf.ones(8))
    assert model.d1.bias.numpy().tolist() == [1.0] * 8


def test_the_dialect_of_dtensor() -> None:
    mesh = dtensor.Mesh.from_string("|x=2,y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3")
    layout_map = dtensor.LayoutMap(mesh=mesh)
    layout_map["d1.kernel"] = layout_1 = dtensor.Layout.inner_sharded(mesh, "y", 2)
    with dtensor.layout_map_scope(layout_map):
        model = initialize_variables(Model())
    assert model.d1.kernel.layout == layout_1
    assert model.d1.bias.layout == dtensor.Layout.replicated(mesh, 1)


def test_outside_of_the_scope_nothing_changes() -> None:
    model = initialize_variables(Model())
    assert not hasattr(model.d1.kernel, "layout")
