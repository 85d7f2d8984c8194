"""What shardwise needs of Keras beyond its public interface; a program that `test_keras.py` runs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from shardwise import layout_map_scope

from .keras_support import case, layout_map_of, run, values_of


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
def private_names() -> None:
    """What shardwise needs of Keras beyond its public interface is there, and means what it did."""
    from shardwise.interop.keras import variables

    in_stateless_scope = vars(variables)["in_stateless_scope"]
    with keras.StatelessScope(initialize_variables=False):
        assert in_stateless_scope()
        waiting = keras.Variable(keras.initializers.Ones(), shape=(2,), name="w")
    assert not in_stateless_scope()
    assert callable(getattr(keras.Layer, variables.AFTER_BUILD))
    assert callable(getattr(keras.Layer, variables.AFTER_TRACKING))
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
    run()
