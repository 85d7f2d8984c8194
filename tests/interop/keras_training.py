"""Training under the scope, and Keras's own distribution API; a program that `test_keras.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from shardwise import DeviceMesh, LayoutError, LayoutMap, TensorLayout, layout_map_scope
from shardwise.interop.keras import from_keras, to_keras

from .keras_support import (
    MESH,
    case,
    check_shards,
    document_map,
    functional,
    layout_1,
    layout_2,
    layout_map_of,
    run,
    sequential,
    subclassed,
    values,
)


def losses(make: Callable[[], Any], width: int, scope: Any = None, optimizer: str = "adam") -> tuple[Any, list[float]]:
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(64, 10)).astype("float32"), rng.normal(size=(64, width)).astype("float32")
    with scope or nullcontext():
        model = make()
        model.compile(optimizer=optimizer, loss="mse")
        history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model, history.history["loss"]


class Return:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> Any:
        return self.model


def losses_start(make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(11)
    return make()


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


if __name__ == "__main__":
    run()
