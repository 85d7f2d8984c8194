"""What goes wrong under the scope, and scopes in scopes and threads; a program that `test_keras.py` runs."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import keras
import numpy as np
import pytest

from shardwise import LayoutError, LayoutMap, TensorLayout, layout_map_scope, packed

from .keras_support import MESH, case, document_map, layout_1, layout_map_of, run, values_of


class Counted(keras.initializers.Initializer):  # type: ignore[misc]
    """Ones; and how often they were asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        self.calls += 1
        return keras.ops.ones(shape, dtype)


def build(layout_map: LayoutMap, **options: Any) -> Any:
    with layout_map_scope(layout_map):
        inputs = keras.Input((10,))
        return keras.Model(inputs, keras.layers.Dense(20, name="d1", **options)(inputs))


class TwoLayers(keras.Model):  # type: ignore[misc]
    def __init__(self, d1: Any, d2: Any) -> None:
        super().__init__()
        self.d1, self.d2 = d1, d2

    def call(self, inputs: Any) -> Any:
        return self.d2(self.d1(inputs))


def two_layers(kind: str, initializer: Any) -> None:
    options = {"kernel_initializer": initializer, "bias_initializer": initializer}
    d1, d2 = keras.layers.Dense(20, name="d1", **options), keras.layers.Dense(10, name="d2", **options)
    if kind == "subclassed":
        TwoLayers(d1, d2)(np.zeros((10, 10), "float32"))
    elif kind == "functional":
        inputs = keras.Input((10,))
        keras.Model(inputs, d2(d1(inputs)))
    else:
        keras.Sequential([keras.Input((10,)), d1, d2])


@case
def packed_dims_of_one_segment_are_plain_and_others_are_refused() -> None:
    """Before any data is made: a value of Keras is one array on each device."""
    kernel = build(layout_map_of(d1__kernel=(None, packed.experts(4, "model")))).layers[-1].kernel
    assert kernel.layout.axes == (None, "model")
    assert [shard.data.shape for shard in kernel.shards] == [(10, 5)] * 8
    counted = Counted()
    refused = layout_map_of(d2__kernel=(packed.gate_up("data"), None))
    message = r"variable 'd2\.kernel': rule 'd2.kernel': axes\[0\] is a packed dim"
    with pytest.raises(LayoutError, match=message), layout_map_scope(refused):
        two_layers("functional", counted)
    assert counted.calls == 0


@case
def a_layout_that_does_not_fit_is_found_before_any_data_is_made() -> None:
    """The message has path, rule, shape, dim and axis size."""
    kernel = r"variable 'd2\.kernel' of shape \(20, 10\): rule 'd2\.kernel' gives the layout "
    misfits: list[tuple[Any, str]] = [
        (("model",), r"\('model',\), of rank 1, but the variable has rank 2"),
        ((None, "model"), r"\(None, 'model'\), but dim 1 has 10 elements, not a multiple of axis 'model' of size 4"),
        (
            (("data", "model"), None),
            r".*, but dim 0 has 20 elements, not a multiple of axes \('data', 'model'\) of together size 8",
        ),
        (TensorLayout((None, None), MESH, unreduced=("data",)), r".* a variable cannot be a partial sum"),
        ((packed.padded_vocab(21, "model", 8), None), r".*: dim 0 has 20 elements, but its parts add up to 21"),
    ]
    for axes, message in misfits:
        for kind in ("subclassed", "functional", "sequential"):
            counted = Counted()
            with pytest.raises(LayoutError, match=kernel + message), layout_map_scope(layout_map_of(d2__kernel=axes)):
                two_layers(kind, counted)
            assert counted.calls == 0


@case
def two_rules_for_one_variable_are_both_named() -> None:
    with pytest.raises(LayoutError, match=r"path 'd1\.kernel' matches 2 rules, but only one may match: 'kernel', 'd1'"):
        build(layout_map_of(kernel=(None, "model"), d1=("model", None)))


@case
def a_rule_that_finds_more_than_was_meant_is_named() -> None:
    """Quantised layers keep a `kernel_scale` beside the `kernel`; the rule wants a `$`."""
    message = r"'d1\.kernel_scale' of shape \(20,\): rule 'd1\.kernel' .* of rank 2, but the variable has rank 1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule, fits in (("d1.kernel", False), (r"d1\.kernel$", True)):
            model = build(layout_map_of(**{rule: (None, "model")}))
            with nullcontext() if fits else pytest.raises(LayoutError, match=message):
                model.quantize("int8")
                model.predict(np.zeros((8, 10), "float32"), verbose=0)


def failing(shape: Any, dtype: Any = None) -> Any:
    raise RuntimeError("no")


def misshapen(shape: Any, dtype: Any = None) -> Any:
    return keras.ops.zeros((3,), dtype)


def mistyped(shape: Any, dtype: Any = None) -> Any:
    return keras.ops.zeros(shape, "int32")


@case
def an_initializer_that_fails_is_reported_with_the_path() -> None:
    for initializer, message in (
        (failing, r"variable 'd1\.kernel': its initializer raised RuntimeError: no"),
        (misshapen, r"'d1\.kernel': its initializer gave shape \(3,\) .* must give shape \(10, 20\)"),
        (mistyped, r"'d1\.kernel': its initializer gave .* dtype int32; it must give .* dtype float32"),
    ):
        with pytest.raises(LayoutError, match=message):
            build(layout_map_of(bias=("model",)), kernel_initializer=initializer)
        with layout_map_scope(layout_map_of(kernel=(None, "model"))):
            layer = keras.layers.Dense(20, name="d1", kernel_initializer=initializer)
        layer.build((None, 10))
        # Asking again gives the same error.
        for _ in range(2):
            with pytest.raises(LayoutError, match=message):
                layer.kernel.value  # noqa: B018


@case
def an_exception_in_the_scope_restores_the_one_before() -> None:
    with layout_map_scope(document_map()):
        with suppress(ZeroDivisionError), layout_map_scope(layout_map_of(d1__kernel=("data", None))):
            within = keras.layers.Dense(8, name="d1")
            raise ZeroDivisionError
        with pytest.raises(LayoutError):
            build(layout_map_of(kernel=("model",)))
        after = keras.layers.Dense(8, name="d1")
    outside = keras.layers.Dense(8, name="d1")
    for layer in (within, after, outside):
        layer.build((None, 4))
    assert within.kernel.layout == TensorLayout(("data", None), MESH)
    assert after.kernel.layout == layout_1
    assert not hasattr(outside.kernel, "layout")


@case
def a_model_that_fails_does_not_spoil_the_next() -> None:
    inputs = np.zeros((4, 10), "float32")
    for initializer, axes in ((failing, (None, "model")), ("ones", ("model", None))):
        with layout_map_scope(layout_map_of(d1__kernel=axes)):
            model = TwoLayers(keras.layers.Dense(20, kernel_initializer=initializer), keras.layers.Dense(10))
        for use in (model, lambda x, model=model: model.predict(x, verbose=0)):
            with pytest.raises(LayoutError, match=r"variable 'd1\.kernel'"):
                use(inputs)
        with layout_map_scope(layout_map_of(d1__kernel=(None, "model"))):
            good = TwoLayers(keras.layers.Dense(20), keras.layers.Dense(10))
        for other in (good, TwoLayers(keras.layers.Dense(20), keras.layers.Dense(10))):
            np.testing.assert_array_equal(other.predict(inputs, verbose=0), np.zeros((4, 10)))
        assert good.d1.kernel.layout == layout_1


@case
def no_rule_that_matches_is_warned_of_once() -> None:
    """With the nearest paths, and the user's own line."""
    layout_map = layout_map_of(**{"d1/kernel": ("model",)})
    message = r"no rule .* all 2 variables are replicated: 'd1\.kernel' \(nearest to rule 'd1/kernel'\)"
    with pytest.warns(UserWarning, match=message) as warned:
        build(layout_map)
    assert [warning.filename for warning in warned] == [__file__]
    with layout_map_scope(layout_map):
        layer, later = keras.layers.Dense(20, name="d1"), keras.layers.Dense(20, name="d2")
    with pytest.warns(UserWarning, match=message) as warned:
        layer(np.zeros((1, 10), "float32"))
    assert [warning.filename for warning in warned] == [__file__]
    later(np.zeros((1, 10), "float32"))  # a second warning would be an error


@case
def scopes() -> None:
    """Nested, and in threads: each layer has the rules of its own."""
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
def a_value_that_two_threads_want_is_made_once() -> None:
    """One makes it; the other waits, and does not see what is not there yet."""
    begun, calls = threading.Event(), []

    def slow(shape: Any, dtype: Any = None) -> Any:
        calls.append(shape)
        begun.set()
        time.sleep(0.2)
        return keras.ops.ones(shape, dtype)

    with layout_map_scope(layout_map_of(kernel=(None, "model"))):
        layer = keras.layers.Dense(8, name="d1", kernel_initializer=slow)
    layer.build((None, 4))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(values_of, layer.kernel)
        assert begun.wait(3600)
        second = pool.submit(values_of, layer.kernel)
        np.testing.assert_array_equal(first.result(), np.ones((4, 8)))
        np.testing.assert_array_equal(second.result(), np.ones((4, 8)))
    assert calls == [(4, 8)]


if __name__ == "__main__":
    run()
