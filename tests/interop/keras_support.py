"""What the Keras programs that `test_keras.py` runs share: cases, models, and what holds for every variable.

Each program is run as `python -m tests.interop.keras_… CASE…`, once per backend, which KERAS_BACKEND chooses; with JAX
there are 8 host devices. It prints a line for each case: what went wrong, if anything did.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from shardwise import DeviceMesh, LayoutMap, TensorLayout

BACKEND = keras.backend.backend()
MESH = DeviceMesh((2, 4), ("data", "model"))

layout_1 = TensorLayout((None, "model"), MESH)
layout_2 = TensorLayout(("model",), MESH)
layout_3 = TensorLayout(("model", "data"), MESH)
layout_4 = TensorLayout(("data",), MESH)

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run() -> None:
    """Run the cases that the command line names."""
    warnings.simplefilter("error", UserWarning)
    for name in sys.argv[1:]:
        keras.backend.clear_session()
        wrong = ""
        try:
            CASES[name]()
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps([name, wrong]), flush=True)


def layout_map_of(**rules: Any) -> LayoutMap:
    layout_map = LayoutMap(MESH)
    for rule, layout in rules.items():
        layout_map[rule.replace("__", ".")] = layout
    return layout_map


def document_map() -> LayoutMap:
    return layout_map_of(d1__kernel=layout_1, d1__bias=layout_2, d2__kernel=layout_3, d2__bias=layout_4)


def check_document(d1: Any, d2: Any) -> None:
    assert d1.kernel.layout == layout_1
    assert d1.bias.layout == layout_2
    assert d2.kernel.layout == layout_3
    assert d2.bias.layout == layout_4


class SubclassModel(keras.Model):  # type: ignore[misc]
    def __init__(self, units: int = 1000, name: str | None = None) -> None:
        super().__init__(name=name)
        self.d1 = keras.layers.Dense(units)
        self.d2 = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        x = self.d1(inputs)
        return self.d2(x)


class Block(keras.layers.Layer):  # type: ignore[misc]
    """Layers in lists and dicts, a private attribute, a weight of its own, a seed generator."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = [keras.layers.Dense(8), {"norm": keras.layers.LayerNormalization()}]
        self._hidden = keras.layers.Dropout(0.5, seed=3)
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(8,), initializer="ones", name="something_else")
        self.offset = self.add_weight(shape=(8,), initializer="zeros", trainable=False)
        self.offset.assign(np.full(8, 0.25))

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.rest[1]["norm"](self.rest[0](inputs)) * self.scale + self.offset
        return self._hidden(self.attention(x, x), training=training)


class Nested(keras.Model):  # type: ignore[misc]
    """A functional and a sequential model, and a layer of layers, in a subclassed model."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((8,))
        self.functional = keras.Model(inputs, keras.layers.Dense(8, name="inner")(inputs))
        self.sequential = keras.Sequential([keras.layers.Dense(8, name="first"), keras.layers.Dense(8, name="second")])
        self.block = Block()

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.sequential(self.functional(inputs))
        return self.block(x[:, None, :], training=training)[:, 0, :]


def functional() -> Any:
    inputs = keras.Input((10,), batch_size=10)
    x = keras.layers.Dense(20, name="d1")(inputs)
    output = keras.layers.Dense(40, name="d2")(x)
    return keras.Model(inputs, output)


def sequential() -> Any:
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(20, name="d1"), keras.layers.Dense(40, name="d2")])


def subclassed() -> Any:
    model = SubclassModel(40)
    model(np.zeros((10, 10), "float32"))
    return model


def nested() -> Any:
    model = Nested()
    model(np.zeros((10, 8), "float32"))
    return model


def values(model: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in model.variables]


def check_shards(variable: Any) -> None:
    """The shards are the partition of the value, and JAX has them where the layout says."""
    whole = np.asarray(keras.ops.convert_to_numpy(variable.value))
    partition = variable.layout.partition(tuple(variable.shape))
    devices = list(variable.layout.device_mesh.devices.flat)
    assert [shard.device for shard in variable.shards] == devices
    for shard in variable.shards:
        assert shard.index == partition.box(shard.device)
        assert shard.replica_id == partition.replica_id(shard.device)
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    if BACKEND == "jax":
        import jax

        sharding = variable.value.sharding
        assert isinstance(sharding, jax.sharding.NamedSharding), sharding
        spec = jax.sharding.PartitionSpec(*variable.layout.axes)
        expected = jax.sharding.NamedSharding(sharding.mesh, spec)
        assert sharding.is_equivalent_to(expected, len(variable.shape)), (variable.path, sharding)
        assert [f"{device.platform}:{device.id}" for device in sharding.mesh.devices.flat] == devices
    elif BACKEND == "numpy":
        assert all(np.shares_memory(shard.data, variable.value) for shard in variable.shards)


def values_of(variable: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))
