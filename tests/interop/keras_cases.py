"""What `test_keras.py` runs in a process of its own, once per backend: `python keras_cases.py CASE`.

The backend is chosen by KERAS_BACKEND; with JAX there are 8 host devices.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shardwise import DeviceMesh, LayoutError, LayoutMap, TensorLayout, layout_map_scope
from shardwise.interop.keras import from_keras, to_keras

BACKEND = keras.backend.backend()
MESH = DeviceMesh((2, 4), ("data", "model"))

layout_1 = TensorLayout((None, "model"), MESH)
layout_2 = TensorLayout(("model",), MESH)
layout_3 = TensorLayout(("data", "model"), MESH)
layout_4 = TensorLayout(("data",), MESH)

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


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
    assert [shard.device for shard in variable.shards] == [f"cpu:{i}" for i in range(8)]
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
        assert [f"{device.platform}:{device.id}" for device in sharding.mesh.devices.flat] == list(MESH.devices.flat)
    elif BACKEND == "numpy":
        assert all(np.shares_memory(shard.data, variable.value) for shard in variable.shards)


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
        output = keras.layers.Dense(32, name="d2")(x)
        model = keras.Model(inputs, output)
    check_document(model.layers[1], model.layers[2])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras 3 does not like input_shape
        with layout_map_scope(layout_map):
            model = keras.Sequential(
                [keras.layers.Dense(20, name="d1", input_shape=(10,)), keras.layers.Dense(32, name="d2")]
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


def values_of(variable: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


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


def losses(make: Callable[[], Any], width: int, scope: Any = None, optimizer: str = "adam") -> tuple[Any, list[float]]:
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(64, 10)).astype("float32"), rng.normal(size=(64, width)).astype("float32")
    with scope or nullcontext():
        model = make()
        model.compile(optimizer=optimizer, loss="mse")
        history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model, history.history["loss"]


@case
def training() -> None:
    """`fit` comes to the same losses, keeps values where they are, and gives optimizer variables layouts."""
    for make in (functional, sequential, subclassed):
        _, expected = losses(make, 40)
        with layout_map_scope(document_map()):
            model = make()
        keras.utils.set_random_seed(11)
        for variable, value in zip(model.variables, values(losses_start(make)), strict=True):
            variable.assign(value)
        _, found = losses(Return(model), 40)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for variable in model.variables:
            check_shards(variable)
        slots = [variable for variable in model.optimizer.variables if len(variable.shape)]
        assert len(slots) == 8
        assert [slot.layout for slot in slots if slot.shape[0] == 10] == [layout_1, layout_1]
        for variable in model.optimizer.variables:
            check_shards(variable)
            if not len(variable.shape):
                assert variable.layout == TensorLayout((), MESH)


@case
def optimizers() -> None:
    """Slots are laid out like their variables, all other variables of every optimizer are replicated."""
    o = keras.optimizers

    class Plain(keras.optimizers.Optimizer):  # type: ignore[misc]
        """One without slots, and without a `build` of its own."""

    # How many slots there are for each variable, by hand from what the papers keep.
    expected = [
        (o.SGD(momentum=0.9), 1),
        (o.Adam(), 2),
        (o.Adam(amsgrad=True), 3),
        (o.Adam(use_ema=True), 3),
        (o.AdamW(), 2),
        (o.Adamax(), 2),
        (o.Nadam(), 2),
        (o.RMSprop(centered=True, momentum=0.9), 3),
        (o.Adagrad(), 1),
        (o.Adadelta(), 2),
        (o.Ftrl(), 2),
        (o.Lion(), 1),
        (o.Lamb(), 2),
        (o.Adafactor(), 1),
        (o.LossScaleOptimizer(o.Adam()), 2),
        (o.SGD(gradient_accumulation_steps=2), 1),
        (Plain(0.1), 0),
    ]
    for optimizer, slots in expected:
        with layout_map_scope(layout_map_of(kernel=(None, "model"), bias=("model",))):
            # Adafactor's factors of the second kernel have the shapes of biases, and are no slots of them.
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(20), keras.layers.Dense(12)])
        optimizer.build(model.trainable_variables)
        assert all(hasattr(variable, "layout") for variable in optimizer.variables), optimizer.name
        cut = [variable for variable in optimizer.variables if not variable.layout.is_fully_replicated]
        assert len(cut) == 4 * slots, (optimizer.name, [variable.path for variable in cut])
        for variable in optimizer.variables:
            check_shards(variable)


class Return:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> Any:
        return self.model


def losses_start(make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(11)
    return make()


@case
def model_parallel() -> None:
    """Keras's own ModelParallel, made of our map, trains to the losses that there are without it."""
    _, expected = losses(functional, 40)
    layout_map = LayoutMap(MESH)
    layout_map["kernel"], layout_map["bias"] = (None, "model"), ("model",)
    distribution = keras.distribution.ModelParallel(layout_map=to_keras(layout_map), batch_dim_name="data")
    model, found = losses(functional, 40, distribution.scope())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    sharding = model.layers[1].kernel.value.sharding
    assert tuple(sharding.spec) == (None, "model")
    assert sharding.mesh.size == 8


@case
def conversions() -> None:
    import doctest

    import pytest

    from shardwise.interop.keras import convert

    assert doctest.testmod(convert).failed == 0
    mesh = DeviceMesh((2, 2), ("x", "y"), ["cpu:3", "cpu:1", "cpu:0", "cpu:2"])
    value: Any
    for value in (
        MESH,
        mesh,
        TensorLayout((None, "x"), mesh),
        TensorLayout(()),
        TensorLayout(("model", None, "data")),
    ):
        assert from_keras(to_keras(value)) == value
    theirs = to_keras(mesh)
    assert isinstance(theirs, keras.distribution.DeviceMesh)
    assert theirs.devices.tolist() == [["cpu:3", "cpu:1"], ["cpu:0", "cpu:2"]]
    for match in ("search", "match", "fullmatch"):
        ours = LayoutMap(MESH, match=match)
        ours["dense.*kernel"] = (None, "model")
        ours["a|b$"] = ("model",)
        converted = to_keras(ours)
        assert from_keras(converted) == ours
        for path in ("dense_1/kernel", "my/dense/kernel", "dense/kernel/x", "a", "xa", "bx", "xb", "b"):
            found, expected = converted[path], ours[path]
            assert (None if found is None else found.axes) == (None if expected is None else expected.axes), path
    keras_map = keras.distribution.LayoutMap(to_keras(MESH))
    keras_map[".*bias"] = ("model",)
    assert from_keras(keras_map)["x/bias"] == layout_2
    assert from_keras(keras_map)["x/bias/y"] is None
    for value, message in (
        (TensorLayout((("data", "model"),), MESH), "cannot express a dim that several axes cut"),
        (TensorLayout((None,), MESH, unreduced=("data",)), "cannot express partial sums"),
        (layout_map_of(w=(("data", "model"),)), "rule 'w': axes"),
        (layout_map_of(**{"(?i)w": ("data",)}), "begins with a flag"),
    ):
        with pytest.raises(LayoutError, match=message):
            to_keras(value)
    with pytest.raises(ValueError, match="uses axis 'data'"):
        from_keras(keras.distribution.TensorLayout(("data", "data")))
    with pytest.raises(TypeError, match="got int"):
        to_keras(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got int"):
        from_keras(3)


@case
def errors() -> None:
    import pytest

    def build(layout_map: LayoutMap, **options: Any) -> Any:
        with layout_map_scope(layout_map):
            inputs = keras.Input((10,))
            return keras.Model(inputs, keras.layers.Dense(20, name="d1", **options)(inputs))

    with pytest.raises(LayoutError, match=r"'d1\.kernel' of shape \(10, 20\): rule 'kernel' .* rank 1"):
        build(layout_map_of(kernel=("model",)))
    with pytest.raises(
        LayoutError, match=r"'d1\.kernel' .* rule 'kernel' .* dim 0 has 10 elements.* 'model' of size 4"
    ):
        build(layout_map_of(kernel=("model", None)))

    def failing(shape: Any, dtype: Any = None) -> Any:
        raise RuntimeError("no")

    def misshapen(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.zeros((3,), dtype)

    def mistyped(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.zeros(shape, "int32")

    for initializer, message in (
        (failing, "'d1.kernel': its initializer raised RuntimeError: no"),
        (misshapen, r"'d1.kernel': its initializer gave shape \(3,\)"),
        (mistyped, "'d1.kernel': its initializer gave .* dtype int32; it must give .* float32"),
    ):
        with pytest.raises(LayoutError, match=message):
            build(layout_map_of(bias=("model",)), kernel_initializer=initializer)
    # The scope is left as it was found, and Keras too.
    fresh = keras.layers.Dense(3)
    fresh.build((None, 2))
    assert not hasattr(fresh.kernel, "layout")
    with pytest.warns(
        UserWarning, match=r"all 2 variables are replicated: 'd1\.kernel' \(nearest to rule 'd1/kernel'\)"
    ):
        build(layout_map_of(**{"d1/kernel": ("model",)}))


@case
def scopes() -> None:
    """Nested scopes and threads."""
    inner_map = layout_map_of(d1__kernel=("data", None))
    with layout_map_scope(document_map()):
        first = keras.layers.Dense(8, name="d1")
        with layout_map_scope(inner_map):
            second = keras.layers.Dense(8, name="d1")
        third = keras.layers.Dense(8, name="d1")
        for layer in (first, second, third):
            layer.build((None, 4))
    assert first.kernel.layout == third.kernel.layout == layout_1
    assert second.kernel.layout == TensorLayout(("data", None), MESH)

    found = {}
    barrier = threading.Barrier(2)

    def work(name: str, layout_map: LayoutMap | None) -> None:
        with nullcontext() if layout_map is None else layout_map_scope(layout_map):
            barrier.wait()
            layer = keras.layers.Dense(8, name="d1")
            layer.build((None, 4))
            barrier.wait()
        found[name] = getattr(layer.kernel, "layout", None)

    for other in (inner_map, None):
        maps = {"a": document_map(), "b": other}
        threads = [threading.Thread(target=work, args=item) for item in maps.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"a": layout_1, "b": None if other is None else TensorLayout(("data", None), MESH)}


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
def values_that_are_taken_when_a_layer_is_built() -> None:
    """PyTorch's modules do so: that must neither come before the paths are known, nor keep what was there before."""
    taken: dict[str, Any] = {}
    keras.Layer._post_build = lambda self: taken.update((v.path, (v, v.value)) for v in self.variables)
    with layout_map_scope(layout_map_of(net__a__kernel=(None, "model"))):
        inputs = keras.Input((8,))
        inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="a")], name="net")
        outer = keras.Model(inputs, inner(inputs))
        assert taken == {}
    kernel = outer.layers[1].layers[0].kernel
    assert kernel.object_path == "net.a.kernel"
    assert taken[kernel.path][0] is kernel
    assert all(value is variable.value for variable, value in taken.values())
    del outer, inner
    later = keras.layers.Dense(3, name="later")
    later.build((None, 2))
    assert later.kernel.path in taken


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


@case
def private_names() -> None:
    """What shardwise needs of Keras beyond its public interface is there, and means what it did."""
    from shardwise.interop.keras import variables

    in_stateless_scope = vars(variables)["in_stateless_scope"]
    with keras.StatelessScope(initialize_variables=False):
        assert in_stateless_scope()
        waiting = keras.Variable(keras.initializers.Ones(), shape=(2,), name="w")
    assert not in_stateless_scope()
    assert callable(getattr(keras.Layer, variables.AFTER_BUILD))
    for name in variables.PRIVATE_NAMES:
        assert hasattr(waiting, name), f"keras.Variable of Keras {keras.__version__} has no {name} any more"
    assert waiting._value is None, "a variable made in a StatelessScope has no value"
    assert isinstance(waiting._initializer, keras.initializers.Ones), "its initializer is kept"
    waiting._deferred_initialize()
    assert waiting._value is not None, "_deferred_initialize makes the value"
    np.testing.assert_array_equal(values_of(waiting), [1, 1])
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    assert "_kernel" in vars(layer), "Dense keeps its kernel behind a property"


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    CASES[sys.argv[1]]()
