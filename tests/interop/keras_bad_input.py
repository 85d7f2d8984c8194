"""What goes wrong under the scope, and scopes in scopes and threads; a program that `test_keras.py` runs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import keras

from shardwise import LayoutError, LayoutMap, TensorLayout, layout_map_scope

from .keras_support import MESH, case, document_map, layout_1, layout_map_of, run


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


if __name__ == "__main__":
    run()
