"""Plain `tf.Variable`s under the scope, as `tf.keras.dtensor.experimental.layout_map_scope` promises them."""

from __future__ import annotations

import asyncio

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


def test_scopes_of_tasks_take_turns() -> None:
    """TensorFlow's own scopes must be left in the reverse order; those of tasks are left as the tasks end."""
    mesh = DeviceMesh((2,), ("x",))

    async def work(rows: int, turns: int) -> object:
        layout_map = LayoutMap(mesh)
        layout_map["kernel"] = TensorLayout(("x", None) if rows == 2 else (None, "x"), mesh)
        with layout_map_scope(layout_map):
            for _ in range(turns):
                await asyncio.sleep(0)
            dense = initialize_variables(Dense(rows, 4))
            await asyncio.sleep(0)
        return dense.kernel.layout.axes

    async def all_of_them() -> list[object]:
        return list(await asyncio.gather(work(2, 1), work(3, 3), work(2, 2)))

    assert asyncio.run(all_of_them()) == [("x", None), (None, "x"), ("x", None)]
    # Nothing of TensorFlow's is left entered.
    assert not hasattr(tf.Variable(1.0), "layout")
    with (
        tf.Graph().as_default(),
        layout_map_scope(LayoutMap(mesh)),
        tf.variable_creator_scope(lambda make, **k: make(**k)),
    ):
        assert asyncio.run(all_of_them()) == [("x", None), (None, "x"), ("x", None)]
