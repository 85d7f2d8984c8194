"""A zoo of layers and models, each with the scope and without, from one seed; a program that `test_keras.py` runs."""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shardwise import LayoutMap, TensorLayout, layout_map_scope
from shardwise.layout import Axes

from .keras_support import BACKEND, MESH, case, check_shards, run, values, values_of

L = keras.layers


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 16, shape)


def model_of(shape: tuple[int, ...], *layers: Any) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


def exact_map(cut: Mapping[str, Axes]) -> LayoutMap:
    layout_map = LayoutMap(MESH, match="fullmatch")
    layout_map.update(cut)
    return layout_map


def check_layouts(model: Any, cut: Mapping[str, Axes], whole: tuple[str, ...] = ()) -> None:
    """The variables are those that `cut` and `whole` name; the former are cut so, the latter replicated."""
    paths = sorted(variable.object_path for variable in model.variables)
    assert paths == sorted((*cut, *whole)), paths
    for variable in model.variables:
        axes = cut.get(variable.object_path, (None,) * len(variable.shape))
        assert variable.layout == TensorLayout(axes, MESH), variable.object_path
        check_shards(variable)


def check_equal(model: Any, plain: Any, rtol: float = 0) -> None:
    for variable, ours, expected in zip(model.variables, values(model), values(plain), strict=True):
        np.testing.assert_allclose(
            ours.astype("float32"), expected.astype("float32"), rtol=rtol, atol=rtol, err_msg=variable.path
        )


def check_predictions(model: Any, plain: Any, inputs: Any, rtol: float) -> Any:
    expected = plain.predict(inputs, verbose=0)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, rtol=rtol, atol=rtol)
    return expected


def made(make: Callable[[], Any], inputs: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = make()
    if not model.built:
        model(inputs)
    return model


def compare(
    make: Callable[[], Any],
    inputs: Any,
    cut: Mapping[str, Axes],
    whole: tuple[str, ...] = (),
    *,
    rtol: float = 1e-4,
    trains: bool = True,
) -> None:
    """The model is what it is without the scope: values, predictions, losses, metrics, weights saved and loaded."""
    plain = made(make, inputs)
    with layout_map_scope(exact_map(cut)):
        model = made(make, inputs)
    check_layouts(model, cut, whole)
    check_equal(model, plain)
    for ours, expected in zip(model.variables, plain.variables, strict=True):
        assert (ours.name, ours.dtype, ours.trainable) == (expected.name, expected.dtype, expected.trainable)
    targets = np.zeros_like(check_predictions(model, plain, inputs, rtol), "float32")
    if trains and BACKEND != "numpy":
        histories = [trained(each, inputs, targets) for each in (model, plain)]
        assert histories[0].keys() == histories[1].keys() == {"loss", "mae"}
        for name, losses in histories[0].items():
            np.testing.assert_allclose(losses, histories[1][name], rtol=rtol, err_msg=name)
        check_layouts(model, cut, whole)
        for variable in model.optimizer.variables:
            check_shards(variable)
    check_predictions(model, plain, inputs, rtol)
    saved_and_loaded(model, plain)
    check_equal(model, plain)
    check_layouts(model, cut, whole)
    check_predictions(model, plain, inputs, rtol)
    model.set_weights([weight + 1 for weight in plain.get_weights()])
    for ours, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, expected + 1)
    check_layouts(model, cut, whole)


def trained(model: Any, inputs: Any, targets: Any) -> Any:
    keras.utils.set_random_seed(5)
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model.fit(inputs, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history


def saved_and_loaded(model: Any, plain: Any) -> None:
    """The weights of the one go to the other, which forgot its own; and back."""
    with tempfile.TemporaryDirectory() as folder:
        for saved, loaded in ((model, plain), (plain, model)):
            saved.save_weights(Path(folder) / "model.weights.h5")
            loaded.set_weights([np.zeros_like(weight) for weight in loaded.get_weights()])
            loaded.load_weights(Path(folder) / "model.weights.h5")


@case
def layer_shared_in_a_functional_model() -> None:
    def make() -> Any:
        inputs, dense = keras.Input((8,)), L.Dense(8, name="twice")
        return keras.Model(inputs, dense(dense(inputs)))

    compare(make, normal(16, 8), {"twice.kernel": ("data", "model"), "twice.bias": ("model",)})


@case
def layer_that_two_attributes_hold() -> None:
    """The first one names its variables."""

    class Twice(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = L.Dense(8)
            self.again = self.first

        def call(self, inputs: Any) -> Any:
            return self.again(self.first(inputs))

    compare(Twice, normal(16, 8), {"first.kernel": (("data", "model"), None)}, ("first.bias",))


@case
def layer_in_two_models() -> None:
    """The model that was made first names its variables."""
    inputs = normal(16, 8)

    def make() -> tuple[Any, Any]:
        shared = L.Dense(8, name="shared")
        first = keras.Sequential([keras.Input((8,)), shared], name="first")
        second = keras.Sequential([keras.Input((8,)), keras.Sequential([shared], name="inner")], name="second")
        return first, second

    keras.utils.set_random_seed(3)
    plain = make()
    keras.utils.set_random_seed(3)
    with layout_map_scope(exact_map({"shared.kernel": (None, "model")})):
        models = make()
    assert models[0].variables[0] is models[1].variables[0]
    for model, other in zip(models, plain, strict=True):
        check_layouts(model, {"shared.kernel": (None, "model")}, ("shared.bias",))
        check_equal(model, other)
        check_predictions(model, other, inputs, 1e-5)


@case
def models_in_models() -> None:
    class Outer(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            inputs = keras.Input((8,))
            inner = model_of((8,), L.Dense(8, name="a"))
            inner.name = "net"
            self.functional = keras.Model(inputs, L.Dense(8, name="b")(inner(inputs)))
            self.blocks = [keras.Sequential([L.Dense(8, name="w"), L.LayerNormalization(name="n")]) for _ in range(2)]
            self.head = L.Dense(4)

        def call(self, inputs: Any) -> Any:
            x = self.functional(inputs)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    cut = {
        "functional.net.a.kernel": ("data", "model"),
        "functional.b.bias": ("model",),
        "blocks.0.w.kernel": (None, "model"),
        "blocks.1.n.gamma": ("data",),
        "head.kernel": ("model", None),
    }
    whole = ("functional.net.a.bias", "functional.b.kernel", "blocks.0.w.bias", "blocks.0.n.gamma", "blocks.0.n.beta")
    compare(Outer, normal(16, 8), cut, (*whole, "blocks.1.w.kernel", "blocks.1.w.bias", "blocks.1.n.beta", "head.bias"))


@case
def lstm() -> None:
    cut = {
        "l.cell.kernel": (None, "model"),
        "l.cell.recurrent_kernel": ("data", "model"),
        "l.cell.bias": ("model",),
        "o.kernel": ("model", "data"),
    }
    compare(
        lambda: model_of((6, 4), L.LSTM(8, name="l"), L.Dense(4, name="o")),
        normal(16, 6, 4),
        cut,
        ("l.cell.seed_generator.state", "o.bias"),
    )


@case
def stacked_cells() -> None:
    def make() -> Any:
        return model_of((6, 4), L.RNN([L.LSTMCell(8), L.GRUCell(8)], name="rnn"))

    cut: dict[str, Axes] = {
        "rnn.cell.cells.0.recurrent_kernel": (None, ("data", "model")),
        "rnn.cell.cells.1.bias": (None, "model"),
    }
    rest = ("cells.0.kernel", "cells.0.bias", "cells.1.kernel", "cells.1.recurrent_kernel")
    states = ("cells.0.seed_generator.state", "cells.1.seed_generator.state")
    compare(make, normal(16, 6, 4), cut, tuple(f"rnn.cell.{path}" for path in (*rest, *states)))


@case
def bidirectional() -> None:
    cut = {"bi.forward_layer.cell.kernel": (None, "model"), "bi.backward_layer.cell.recurrent_kernel": ("data", None)}
    rest = ("forward_layer.cell.recurrent_kernel", "forward_layer.cell.bias", "backward_layer.cell.kernel")
    states = ("backward_layer.cell.bias", "forward_layer.cell.seed_generator.state")
    compare(
        lambda: model_of((6, 4), L.Bidirectional(L.LSTM(8), name="bi")),
        normal(16, 6, 4),
        cut,
        tuple(f"bi.{path}" for path in (*rest, *states, "backward_layer.cell.seed_generator.state")),
    )


@case
def embedding() -> None:
    compare(
        lambda: model_of((4,), L.Embedding(16, 8, name="e"), L.Flatten(), L.Dense(8, name="d")),
        numbers(16, 4),
        {"e.embeddings": ("model", "data"), "d.kernel": ("model", None)},
        ("d.bias",),
    )


@case
def convolution_and_batch_normalization() -> None:
    """Training moves the means, which are assigned, not trained."""
    cut = {"c.kernel": (None, None, "data", "model"), "bn.gamma": ("model",), "bn.moving_mean": ("data",)}
    compare(
        lambda: model_of((6, 6, 4), L.Conv2D(8, 3, name="c"), L.BatchNormalization(name="bn")),
        normal(16, 6, 6, 4),
        cut,
        ("c.bias", "bn.beta", "bn.moving_variance"),
    )


@case
def einsum_dense() -> None:
    compare(
        lambda: model_of((6, 8), L.EinsumDense("abc,cd->abd", output_shape=(None, 8), bias_axes="d", name="e")),
        normal(16, 6, 8),
        {"e.kernel": ("data", "model"), "e.bias": ("model",)},
    )


@case
def multi_head_attention() -> None:
    def make() -> Any:
        inputs = keras.Input((6, 8))
        return keras.Model(inputs, L.MultiHeadAttention(4, 2, dropout=0.1, seed=1, name="att")(inputs, inputs))

    cut = {
        **{f"att.{name}_dense.kernel": (None, "model", None) for name in ("query", "key", "value")},
        "att.query_dense.bias": ("model", None),
        "att.output_dense.kernel": ("model", None, None),
    }
    whole = ("att.key_dense.bias", "att.value_dense.bias", "att.output_dense.bias")
    compare(make, normal(16, 6, 8), cut, (*whole, "att._dropout_layer.seed_generator.state"))


@case
def seed_generators() -> None:
    """Dropout draws the same numbers; a state is replicated even if a rule matches its path."""
    compare(
        lambda: model_of(
            (8,), L.Dropout(0.5, seed=1, name="a"), L.GaussianNoise(0.1, seed=2, name="b"), L.Dense(8, name="d")
        ),
        normal(16, 8),
        {},
        ("a.seed_generator.state", "b.seed_generator.state", "d.kernel", "d.bias"),
    )
    layout_map = LayoutMap(MESH)
    layout_map["a"] = ("data",)
    with layout_map_scope(layout_map):
        model = model_of((8,), L.Dropout(0.5, seed=1, name="a"))
    assert [variable.layout for variable in model.variables] == [TensorLayout((None,), MESH)]


@case
def mixed_precision() -> None:
    def make() -> Any:
        return model_of(
            (8,),
            L.Dense(8, name="a", dtype="mixed_float16"),
            L.BatchNormalization(name="bn", dtype="mixed_bfloat16"),
            L.Dense(8, name="b", dtype="bfloat16"),
        )

    cut = {"a.kernel": ("data", "model"), "b.kernel": ("model", "data"), "b.bias": ("model",)}
    whole = ("a.bias", "bn.gamma", "bn.beta", "bn.moving_mean", "bn.moving_variance")
    compare(make, normal(16, 8), cut, whole, rtol=2e-2)


@case
def clone_model() -> None:
    """A clone made in the scope has layouts, one made outside has none."""
    cut = {"d.kernel": (None, "model")}
    plain = made(lambda: model_of((8,), L.Dense(8, name="d")), normal(16, 8))
    with layout_map_scope(exact_map(cut)):
        model = keras.models.clone_model(plain)
    check_layouts(model, cut, ("d.bias",))
    again = keras.models.clone_model(model)
    assert not any(hasattr(variable, "layout") for variable in again.variables)
    for clone in (model, again):
        clone.set_weights(plain.get_weights())
        check_predictions(clone, plain, normal(16, 8), 1e-5)
    compare(lambda: keras.models.clone_model(model_of((8,), L.Dense(8, name="d"))), normal(16, 8), cut, ("d.bias",))


def quantized() -> Any:
    model = model_of((8,), L.Dense(8, name="d"), L.EinsumDense("ab,bc->ac", output_shape=8, bias_axes="c", name="e"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the input is not quantised, and numpy has no gradients
        model.quantize("int8")
        model(normal(16, 8))
    return model


DUPLICATES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


@case
def copies_and_pickles() -> None:
    """They are what they are without the scope: ordinary variables, layers and models, of equal values."""
    with layout_map_scope(exact_map({"d.kernel": (None, "model")})):
        model = model_of((8,), L.Dense(8, name="d"))
    for duplicate in DUPLICATES:
        variable = duplicate(model.layers[0].kernel)
        assert type(variable) is keras.Variable
        np.testing.assert_array_equal(values_of(variable), values_of(model.layers[0].kernel))
        variable.assign(np.ones((8, 8)))
        assert values_of(model.layers[0].kernel)[0, 0] != 1
    for again in (duplicate(model) for duplicate in DUPLICATES):
        check_equal(again, model)
        assert not any(hasattr(variable, "layout") for variable in again.variables)


@case
def quantize() -> None:
    cut = {"d.kernel": (None, "model"), "d.kernel_scale": ("model",), "e.kernel": ("data", None)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(quantized, normal(16, 8), cut, ("d.bias", "e.kernel_scale", "e.bias"), trains=False)


@case
def quantize_after_the_scope() -> None:
    """What a layer of the scope makes later is laid out as well."""
    cut = {"d.kernel": (None, "model"), "d.kernel_scale": ("model",)}
    inputs = normal(16, 8)
    plain = made(lambda: model_of((8,), L.Dense(8, name="d")), inputs)
    with layout_map_scope(exact_map(cut)):
        model = made(lambda: model_of((8,), L.Dense(8, name="d")), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (plain, model):
            each.quantize("int8")
        check_predictions(model, plain, inputs, 1e-5)
    check_layouts(model, cut, ("d.bias",))
    assert model.layers[0].kernel.dtype == "int8"
    check_equal(model, plain)


@case
def lora_after_the_scope() -> None:
    cut = {"d.kernel": (None, "model"), "d.lora_kernel_a": ("model", None)}
    with layout_map_scope(exact_map(cut)):
        model = made(lambda: model_of((8,), L.Dense(8, name="d")), normal(16, 8))
    model.layers[0].enable_lora(4)
    check_layouts(model, cut, ("d.bias", "d.lora_kernel_b"))


@case
def wrapped_and_normalizing_layers() -> None:
    cut = {
        "sn.layer.kernel": ("data", "model"),
        "td.layer.kernel": (None, "model"),
        "p.alpha": (None, "model"),
        "ln.gamma": ("model",),
        "gn.beta": ("data",),
    }
    rest = ("sn.layer.bias", "sn.vector_u", "td.layer.bias", "ln.beta", "gn.gamma")
    compare(
        lambda: model_of(
            (6, 8),
            L.SpectralNormalization(L.Dense(8), name="sn"),
            L.TimeDistributed(L.Dense(8), name="td"),
            L.PReLU(name="p"),
            L.LayerNormalization(name="ln"),
            L.GroupNormalization(4, name="gn"),
        ),
        normal(16, 6, 8),
        cut,
        rest,
    )


@case
def variables_that_a_layer_makes_by_itself() -> None:
    """Keras makes their values at once; they are placed when their path is known."""

    class Own(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="own")
            self.table = keras.Variable(np.eye(8), name="any")
            self.rest = [keras.Variable(np.ones(8), name="x"), {"b": keras.Variable(np.zeros(8), name="y")}]

        def call(self, inputs: Any) -> Any:
            return keras.ops.matmul(inputs, self.table) * self.rest[0] + self.rest[1]["b"]

    cut = {"own.table": ("data", "model"), "own.rest.1.b": ("model",)}
    compare(lambda: model_of((8,), Own()), normal(16, 8), cut, ("own.rest.0",))


@case
def metrics_of_a_model() -> None:
    """They are not variables of the model, and stay as Keras makes them."""

    class Measured(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.d1 = L.Dense(8)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, inputs: Any) -> Any:
            self.seen.update_state(keras.ops.mean(inputs))
            return self.d1(inputs)

    with layout_map_scope(exact_map({"d1.kernel": (None, "model")})):
        model = made(Measured, normal(16, 8))
    check_layouts(model, {"d1.kernel": (None, "model")}, ("d1.bias",))
    np.testing.assert_allclose(float(model.seen.result()), normal(16, 8).mean(), rtol=1e-5)
    assert not any(hasattr(variable, "layout") for variable in model.metrics_variables)


class Plain(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.d1 = L.Dense(8)

    def call(self, inputs: Any) -> Any:
        return self.d1(inputs)


@case
def a_model_that_predict_builds() -> None:
    cut = {"d1.kernel": (None, "model")}
    plain = made(Plain, normal(16, 8))
    keras.utils.set_random_seed(3)
    with layout_map_scope(exact_map(cut)):
        model = Plain()
    check_predictions(model, plain, normal(16, 8), 1e-5)
    check_layouts(model, cut, ("d1.bias",))


@case
def a_model_that_fit_builds() -> None:
    cut = {"d1.kernel": (None, "model")}
    keras.utils.set_random_seed(3)
    with layout_map_scope(exact_map(cut)):
        model = Plain()
    model.compile(optimizer="adam", loss="mse")
    model.fit(normal(16, 8), normal(16, 8), verbose=0)
    check_layouts(model, cut, ("d1.bias",))
    assert [slot.layout.axes for slot in model.optimizer.variables if slot.shape == (8, 8)] == [(None, "model")] * 2


if __name__ == "__main__":
    run()
