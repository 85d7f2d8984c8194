"""What `keras.distribution` makes of meshes, layouts and maps, and how its look-ups end; the protocol is `worker`'s.

A case is a dict: "mesh" is (shape, axis names, devices), "rules" a list of (key, axes), "paths" a list of paths.
Keras's objects are described as plain values; shardwise's, which were made of them, by their `repr`.
"""

from __future__ import annotations

import os
from typing import Any

from tests.oracle.worker import serve


def look_up(layout_map: Any, path: str) -> Any:
    try:
        layout = layout_map[path]
    except ValueError:
        return "several"
    return None if layout is None else tuple(layout.axes)


def answer(case: dict[str, Any]) -> Any:
    import keras
    import numpy as np

    import shardwise as sw
    from shardwise.interop.keras import from_keras, to_keras

    shape, names, devices = case["mesh"]
    theirs = keras.distribution.DeviceMesh(shape, list(names), np.array(devices))
    ours = sw.DeviceMesh(shape, names, devices)
    mesh = to_keras(ours)
    layout_map = keras.distribution.LayoutMap(theirs)
    our_map = sw.LayoutMap(ours, match=case["match"], backtracking=True)
    for key, axes in case["rules"]:
        layout_map[key] = tuple(axes)
        our_map[key] = axes
    converted = to_keras(our_map)
    return {
        "mesh": (tuple(mesh.shape), tuple(mesh.axis_names), mesh.devices.ravel().tolist(), mesh.devices.shape),
        "mesh_back": (repr(from_keras(mesh)), repr(from_keras(theirs))),
        "axes": [tuple(to_keras(sw.TensorLayout(axes, ours)).axes) for _, axes in case["rules"]],
        "back": [repr(from_keras(keras.distribution.TensorLayout(tuple(a), theirs))) for _, a in case["rules"]],
        "found": [look_up(layout_map, path) for path in case["paths"]],
        "found_converted": [look_up(converted, path) for path in case["paths"]],
        "map_back": from_keras(converted) == our_map,
    }


def version() -> str:
    os.environ["KERAS_BACKEND"] = "numpy"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import keras

    return str(keras.__version__)


if __name__ == "__main__":
    serve(version, answer)
