"""What TensorFlow's own test of the scope (tf_keras, dtensor/layout_map_test.py, ObjectPathMappingTest) asks of models.

Each case has the name of the one whose meaning it has, without `test_`; its LayoutMapTest is in
`tests/dtensor/test_layout_map.py`. A program that `test_keras.py` runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shardwise import DeviceMesh, LayoutMap, TensorLayout, dtensor, layout_map_scope

from .keras_support import case, check_shards, run, values

MESH_2X2 = DeviceMesh((2, 2), ("X", "Y"))
LAYOUTS = {
    "d1.kernel": TensorLayout(("X", None), MESH_2X2),
    "d1.bias": TensorLayout((None,), MESH_2X2),
    "d2.kernel": TensorLayout((None, None), MESH_2X2),
    "d2.bias": TensorLayout(("X",), MESH_2X2),
}


def map_of(layouts: dict[str, TensorLayout]) -> LayoutMap:
    layout_map = LayoutMap(MESH_2X2)
    layout_map.update(layouts)
    return layout_map


class SubclassModel(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="model")
        self.d1 = keras.layers.Dense(1000)
        self.d2 = keras.layers.Dense(1000)
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.d2(self.dropout(self.d1(inputs), training=training))


class OwnWeight(keras.layers.Layer):  # type: ignore[misc]
    """The variable's name is not the attribute's."""

    def build(self, input_shape: Any) -> None:
        self._weight = self.add_weight(shape=(input_shape[-1], 10), name="kernel")

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(inputs, self._weight)


def functional() -> Any:
    inputs = keras.Input((10,), batch_size=10)
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(20, name="d1")(inputs))
    return keras.Model(inputs, keras.layers.Dense(30, name="d2")(x))


def sequential(**options: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((10,)),
            keras.layers.Dense(20, name="d1", **options),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(30, name="d2", **options),
        ]
    )


def with_own_weight() -> Any:
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(20, name="d1"), OwnWeight(name="own")])


def check_layers(model: Any, d1: Any, d2: Any, layouts: dict[str, Any]) -> None:
    """The layouts, the lists in which Keras keeps the same variables, and the results for zeros, also in training."""
    for name, layer in (("d1", d1), ("d2", d2)):
        assert layer.kernel.layout == layouts[f"{name}.kernel"]
        assert layer.bias.layout == layouts[f"{name}.bias"]
        for held in (layer.trainable_variables, layer.trainable_weights, layer.weights):
            assert len(held) == 2
            assert held[0] is layer.kernel
            assert held[1] is layer.bias
        assert all(any(variable is other for other in model.trainable_variables) for variable in layer.weights)
    for training in (False, True):
        result = keras.ops.convert_to_numpy(model(np.zeros((10, 10), "float32"), training=training))
        np.testing.assert_array_equal(result, np.zeros((10, d2.units)))


@case
def init_subclass_model_variable_with_layout() -> None:
    with layout_map_scope(map_of(LAYOUTS)):
        model = SubclassModel()
    model(np.zeros((10, 10), "float32"))
    check_layers(model, model.d1, model.d2, LAYOUTS)


@case
def init_functional_model_variable_with_layout() -> None:
    with layout_map_scope(map_of(LAYOUTS)):
        model = functional()
    _, d1, _, d2 = model.layers
    check_layers(model, d1, d2, LAYOUTS)


@case
def init_sequential_model_variable_with_layout() -> None:
    with layout_map_scope(map_of(LAYOUTS)):
        model = sequential()
    d1, _, d2 = model.layers
    check_layers(model, d1, d2, LAYOUTS)


@case
def init_model_with_empty_layout_map() -> None:
    with layout_map_scope(LayoutMap(MESH_2X2)):
        model = sequential()
    d1, _, d2 = model.layers
    whole = {path: TensorLayout((None,) * layout.rank, MESH_2X2) for path, layout in LAYOUTS.items()}
    check_layers(model, d1, d2, whole)
    for variable in model.variables:
        assert [shard.replica_id for shard in variable.shards] == [0, 1, 2, 3]


@case
def weight_regularization() -> None:
    """A hundredth of the squares of 10 × 20 ones, and of 20 × 30."""
    for layouts in ({}, LAYOUTS):
        with layout_map_scope(map_of(layouts)):
            model = sequential(kernel_initializer="ones", kernel_regularizer="l2")
        assert len(model.losses) == 2
        np.testing.assert_allclose([keras.ops.convert_to_numpy(loss) for loss in model.losses], [2.0, 6.0], rtol=1e-6)


@case
def dvariable_name() -> None:
    with layout_map_scope(LayoutMap(MESH_2X2)):
        model = sequential()
    kernel, bias = model.layers[0].variables
    assert (kernel.name, bias.name) == ("kernel", "bias")
    assert kernel.path.endswith("d1/kernel")
    assert bias.path.endswith("d1/bias")
    assert (kernel.object_path, bias.object_path) == ("d1.kernel", "d1.bias")


@case
def scope_of_the_dtensor_dialect() -> None:
    """`LayoutMap(mesh=…)`, `Layout` and `layout_map.scope()`, as the original writes them."""
    mesh = dtensor.Mesh.from_string("|X=2,Y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3")
    layout_map = dtensor.LayoutMap(mesh=mesh)
    rows_2d, rows_1d = (dtensor.Layout.batch_sharded(mesh, "X", rank) for rank in (2, 1))
    whole_2d, whole_1d = (dtensor.Layout.replicated(mesh, rank) for rank in (2, 1))
    layout_map["d1.kernel"], layout_map["d1.*"], layout_map["d2.bias"] = rows_2d, whole_1d, rows_1d
    with layout_map.scope():
        model = functional()
    _, d1, _, d2 = model.layers
    found = {"d1.kernel": rows_2d, "d1.bias": whole_1d, "d2.kernel": whole_2d, "d2.bias": rows_1d}
    check_layers(model, d1, d2, found)


@case
def checkpoint() -> None:
    """Weights saved with a layout load without one, and the other way round; at their places they stay."""
    cut = {"d1.kernel": LAYOUTS["d1.kernel"], "own._weight": TensorLayout(("X", "Y"), MESH_2X2)}

    def scoped() -> Any:
        with layout_map_scope(map_of(cut)):
            return with_own_weight()

    makers: list[Callable[[], Any]] = [scoped, with_own_weight]
    for make_saved in makers:
        for make_loaded in makers:
            with tempfile.TemporaryDirectory() as folder:
                saved, loaded = make_saved(), make_loaded()
                file = str(Path(folder) / "checkpoint.weights.h5")
                saved.save_weights(file)
                loaded.load_weights(file)
                check_same(saved, loaded, cut)


@case
def checkpoint_of_tensorflow() -> None:
    """The same by `tf.train.Checkpoint`, as in the original."""
    import tensorflow as tf

    cut = {"own._weight": TensorLayout(("X", "Y"), MESH_2X2)}
    with layout_map_scope(map_of(cut)):
        model = with_own_weight()
    plain = with_own_weight()
    for saved, loaded in ((model, plain), (plain, model)):
        for variable in loaded.variables:
            variable.assign(np.zeros(variable.shape))
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(root=saved).save(str(Path(folder) / "checkpoint"))
            tf.train.Checkpoint(root=loaded).restore(path).assert_consumed()
            check_same(saved, loaded, cut)


def check_same(one: Any, other: Any, cut: dict[str, TensorLayout]) -> None:
    for value, expected in zip(values(one), values(other), strict=True):
        np.testing.assert_array_equal(value, expected)
        assert value.any() or value.ndim == 1
    for model in (one, other):
        for variable in model.variables:
            if hasattr(variable, "layout"):
                layout = cut.get(variable.object_path, TensorLayout((None,) * len(variable.shape), MESH_2X2))
                assert variable.layout == layout
                check_shards(variable)


if __name__ == "__main__":
    run()
