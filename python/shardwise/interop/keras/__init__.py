"""Keras 3: models built under `layout_map_scope`, and Keras's own distribution API in both directions.

| module | answers |
|---|---|
| `scope` | `layout_map_scope` for layers |
| `variables` | variables that wait for their layout |
| `placing`, `compiled` | values put on devices; made there in shards |
| `convert` | `keras.distribution`, in both directions |

With `keras` imported, `shardwise.layout_map_scope` reaches Keras models by itself:

    import keras
    from ... import DeviceMesh, LayoutMap, layout_map_scope

    layout_map = LayoutMap(DeviceMesh((8,), ("model",)))
    layout_map["d1.kernel"] = (None, "model")
    with layout_map_scope(layout_map):
        model = MyModel()          # with the attribute d1, a keras.layers.Dense
    model(inputs)                  # inside the scope or after it
    model.d1.kernel.layout         # what "d1.kernel" found
    model.d1.kernel.shards

Paths are attribute names and indices. The layers of functional and sequential models, nested ones too, have no
    attribute; their part of the path is `layer.name`. Where Keras keeps `_kernel` behind a property `kernel`, the path
    says `kernel`. A variable that no attribute leads to has its Keras path, with dots for slashes.

On the JAX backend, if the devices of the mesh exist, a value is a `jax.Array` with the `NamedSharding` of the layout;
over 4 MiB it is computed sharded from the start (except for `Orthogonal`), below that it is computed whole and then
placed. `shards` holds views of the buffers of CPU devices and copies of others. On other backends the value stays what
it is without the scope; `shards` holds views of a numpy value, and for others what `keras.ops.convert_to_numpy` gives:
a view where the backend can share its memory with numpy, else a copy.
"""

from ...model.hooks import register
from .convert import from_keras, to_keras
from .scope import building

__all__ = ["building", "from_keras", "to_keras"]

register("keras", building)
