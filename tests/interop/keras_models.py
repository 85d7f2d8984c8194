"""Models of every kind under the scope: paths, layouts, values; a program that `test_keras.py` runs."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shardwise import DeviceMesh, LayoutMap, TensorLayout, layout_map_scope

from .keras_support import (
    MESH,
    SubclassModel,
    case,
    check_document,
    check_shards,
    document_map,
    functional,
    layout_map_of,
    nested,
    run,
    sequential,
    subclassed,
    values,
    values_of,
)


@case
def document() -> None:
    """The three examples of the TensorFlow page as they stand, with the imports of Keras 3."""
    layout_map = document_map()

    for inside in (True, False):
        with layout_map_scope(layout_map):
            model = SubclassModel()
            inputs = keras.ops.zeros((10, 10))
            if inside:
                model(inputs)
        if not inside:
            model(inputs)
        check_document(model.d1, model.d2)

    with layout_map_scope(layout_map):
        inputs = keras.Input((10,), batch_size=10)
        x = keras.layers.Dense(20, name="d1")(inputs)
        output = keras.layers.Dense(30, name="d2")(x)
        model = keras.Model(inputs, output)
    check_document(model.layers[1], model.layers[2])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras 3 does not like input_shape
        with layout_map_scope(layout_map):
            model = keras.Sequential(
                [keras.layers.Dense(20, name="d1", input_shape=(10,)), keras.layers.Dense(30, name="d2")]
            )
    check_document(model.layers[0], model.layers[1])


@case
def same_as_without() -> None:
    """Layouts, values, predictions of the models with the scope and without, from the same seed."""
    layout_map = LayoutMap(MESH)
    layout_map[r"(d1|inner)\.kernel$"] = (None, "model")
    layout_map["block.attention.query_dense.kernel"] = ("model", None, None)
    layout_map[r"(d\d|inner|first|rest\.0)\.bias$"] = ("model",)
    for make in (subclassed, functional, sequential, nested):
        keras.utils.set_random_seed(7)
        plain = make()
        keras.utils.set_random_seed(7)
        with layout_map_scope(layout_map):
            model = make()
        assert len(model.variables) == len(plain.variables) > 0
        for variable, value, expected in zip(model.variables, values(model), values(plain), strict=True):
            np.testing.assert_array_equal(value, expected, err_msg=variable.path)
            check_shards(variable)
            found = layout_map[variable.object_path]
            assert variable.layout == (found or TensorLayout((None,) * len(variable.shape), MESH))
        assert any(variable.layout.num_shards != (1,) * len(variable.shape) for variable in model.variables)
        inputs = np.random.default_rng(0).normal(size=(10, 8 if make is nested else 10)).astype("float32")
        expected = plain.predict(inputs, verbose=0, batch_size=10)
        np.testing.assert_allclose(model.predict(inputs, verbose=0, batch_size=10), expected, rtol=1e-5, atol=1e-6)


@case
def nested_paths() -> None:
    with layout_map_scope(LayoutMap(MESH)):
        model = nested()
    paths = {variable.object_path for variable in model.variables}
    assert {
        "functional.inner.kernel",
        "functional.inner.bias",
        "sequential.first.kernel",
        "sequential.second.bias",
        "block.rest.0.kernel",
        "block.rest.1.norm.gamma",
        "block.scale",
        "block.offset",
        "block._hidden.seed_generator.state",
        "block.attention.query_dense.kernel",
        "block.attention.output_dense.bias",
    } <= paths, sorted(paths)
    with layout_map_scope(LayoutMap(MESH)):
        inputs = keras.Input((8,))
        inner = keras.Sequential([keras.layers.Dense(8, name="a")], name="net")
        outer = keras.Model(inputs, keras.layers.Dense(8, name="b")(inner(inputs)))
    assert [variable.object_path for variable in outer.variables] == [
        "net.a.kernel",
        "net.a.bias",
        "b.kernel",
        "b.bias",
    ]


@case
def lazy() -> None:
    """Until the path is stable no initializer runs, not even when Keras traces; then each runs once."""
    calls = []

    class Counted(keras.initializers.Initializer):  # type: ignore[misc]
        def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
            calls.append(tuple(shape))
            return keras.ops.ones(shape, dtype)

    layout_map = layout_map_of(d1__kernel=(None, "model"))
    with layout_map_scope(layout_map):
        inputs = keras.Input((10,))
        d1 = keras.layers.Dense(8, name="d1", kernel_initializer=Counted())
        keras.Model(inputs, d1(inputs))
        assert calls == []
    assert calls == [(10, 8)]
    check_shards(d1.kernel)


@case
def save_and_load() -> None:
    with layout_map_scope(document_map()):
        model = functional()
    before = values(model)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "w.weights.h5")
        model.save_weights(file)
        for variable in model.variables:
            variable.assign(np.zeros(variable.shape))
            assert not values_of(variable).any()
            check_shards(variable)
        model.load_weights(file)
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(values_of(variable), value)
            check_shards(variable)
        whole = str(Path(folder) / "m.keras")
        model.save(whole)
        for value, expected in zip(values(keras.models.load_model(whole)), before, strict=True):
            np.testing.assert_array_equal(value, expected)
        with layout_map_scope(document_map()):
            again = keras.models.load_model(whole)
        check_document(again.layers[1], again.layers[2])
        for value, expected in zip(values(again), before, strict=True):
            np.testing.assert_array_equal(value, expected)


@case
def large_values_start_sharded() -> None:
    """On JAX no device ever holds a whole large variable: its initializer is only traced."""
    import jax

    traced = []

    class Spy(keras.initializers.GlorotUniform):  # type: ignore[misc]
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            value = super().__call__(shape, dtype)
            traced.append(isinstance(value, jax.core.Tracer))
            return value

    initializer = Spy(seed=1)
    with layout_map_scope(layout_map_of(kernel=(None, ("data", "model")))):
        layer = keras.layers.Dense(2048, kernel_initializer=initializer)
        layer.build((None, 1024))
    assert traced == [True]
    assert {shard.data.shape for shard in layer.kernel.value.addressable_shards} == {(1024, 256)}
    whole = keras.initializers.GlorotUniform(seed=1)((1024, 2048), "float32")
    np.testing.assert_allclose(values_of(layer.kernel), np.asarray(whole), rtol=1e-6)

    generator = keras.random.SeedGenerator(3)
    with layout_map_scope(layout_map_of(kernel=(None, "model"))):
        for _ in range(2):
            layer = keras.layers.Dense(2048, kernel_initializer=keras.initializers.GlorotUniform(seed=generator))
            layer.build((None, 1024))
    assert np.asarray(generator.state.value).tolist() == [3, 2]


@case
def missing_devices() -> None:
    """A mesh of devices that do not exist: layouts and shards, and values like without the scope."""
    mesh = DeviceMesh((64,), ("x",))
    layout_map = LayoutMap(mesh)
    layout_map["kernel"] = ("x", None)
    with layout_map_scope(layout_map):
        layer = keras.layers.Dense(3, name="d")
        layer.build((None, 128))
    assert len(layer.kernel.shards) == 64
    np.testing.assert_array_equal(layer.kernel.shards[63].data, values_of(layer.kernel)[126:])


if __name__ == "__main__":
    run()
