"""What the installed TensorFlow makes of meshes and layouts; runs in a process of its own, because TensorFlow crashes.

The protocol is that of `worker`. An answer is a dict of results, in which an exception is `("raised", its type's
name)`. When the process dies in a batch, the batch has no answer: that is how the test learns of a crash.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracle.worker import serve

#: TensorFlow's modules, once `version` has imported them.
tf: Any = None
layout_pb2: Any = None

PATIENCE = 3
"""Seconds after which an expression that has not ended counts as one that never will."""


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return ("raised", type(error).__name__)


def describe_mesh(mesh: Any) -> dict[str, Any]:
    return {
        "text": mesh.to_string(),
        "bytes": mesh.as_proto().SerializeToString(deterministic=True),
        "dim_names": mesh.dim_names,
        "name": mesh.name,
        "size": mesh.size,
        "strides": mesh.strides,
        "shape": mesh.shape(),
        "device_type": mesh.device_type(),
        "global_device_ids": mesh.global_device_ids().tolist(),
        "global_devices": mesh.global_devices(),
        "local_device_ids": list(mesh.local_device_ids()),
        "local_devices": list(mesh.local_devices()),
        "local_device_locations": attempt(mesh.local_device_locations),
        "unravel_index": mesh.unravel_index(),
        "min_global_device_id": mesh.min_global_device_id(),
        "num_local_devices": mesh.num_local_devices(),
        "is_remote": mesh.is_remote(),
        "use_xla_spmd": mesh.use_xla_spmd(),
        "device_location": [mesh.device_location(index) for index in range(mesh.size)],
        "host_mesh": attempt(lambda: mesh.host_mesh().to_string()),
        "repr_holds_text": mesh.to_string() in repr(mesh),
    }


def describe_layout(layout: Any, case: dict[str, Any]) -> dict[str, Any]:
    rank = layout.rank
    cut = "match" not in layout.sharding_specs
    return {
        "text": layout.to_string(),
        "bytes": layout.as_proto().SerializeToString(deterministic=True),
        "sharding_specs": layout.sharding_specs,
        "rank": rank,
        "shape": layout.shape,
        "type": int(layout.type),
        "is_fully_replicated": layout.is_fully_replicated(),
        "is_batch_parallel": layout.is_batch_parallel(),
        "num_shards": [layout.num_shards(dim) for dim in range(rank)] if cut else None,
        "offset_to_shard": layout.offset_to_shard() if cut else None,
        "index": layout.offset_tuple_to_global_index(case["index"]) if cut else None,
        "global_shape": layout.global_shape_from_local_shape(case["local_shape"]) if cut else None,
        "local_shape": layout.local_shape_from_global_shape(case["global_shape"]) if cut else None,
        "deleted": layout.delete(case["delete"]).sharding_specs,
        "parted": layout.to_parted().to_string(),
    }


def answer_case(case: dict[str, Any]) -> dict[str, Any]:
    ids = np.arange(case["first"], case["first"] + case["size"]).reshape(case["shape"])
    mesh = tf.Mesh(
        case["dim_names"],
        ids,
        case["local_ids"],
        case["local_devices"],
        case["mesh_name"],
        case["global_devices"],
        case["use_xla_spmd"],
    )
    layout = tf.Layout(case["specs"], mesh)
    if case["parted"]:
        layout = layout.to_parted()
    our_mesh = layout_pb2.MeshProto.FromString(case["our_mesh_bytes"])
    our_layout = layout_pb2.LayoutProto.FromString(case["our_layout_bytes"])
    answer = {
        "mesh": describe_mesh(mesh),
        "layout": describe_layout(layout, case),
        "reads_mesh_bytes": tf.Mesh.from_proto(our_mesh) == mesh,
        "reads_layout_bytes": tf.Layout.from_proto(our_layout) == layout,
    }
    if case["readable"]:
        answer["reads_mesh_text"] = tf.Mesh.from_string(case["our_mesh_text"]) == mesh
        answer["reads_layout_text"] = tf.Layout.from_string(case["our_layout_text"]) == layout
        answer["unpickles"] = pickle.loads(pickle.dumps(layout)) == layout
    return answer


def answer_expression(expression: str) -> Any:
    """Evaluate in a child of this process, which may die or not end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        names = {"np": np, "Mesh": tf.Mesh, "Layout": tf.Layout}
        os.write(writer, pickle.dumps(attempt(lambda: eval(expression, names))))
        os._exit(0)
    os.close(writer)
    ready = select.select([reader], [], [], PATIENCE)[0]
    data = os.read(reader, 1 << 16) if ready else b""
    os.close(reader)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(data) if data else "dies"


def answer(case: Any) -> Any:
    return answer_case(case) if isinstance(case, dict) else answer_expression(case)


def version() -> str:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow
    from tensorflow.dtensor.proto import layout_pb2
    from tensorflow.dtensor.python import layout

    # For the functions above; imported late, since a test run looks into every module of the tests.
    globals().update(tf=layout, layout_pb2=layout_pb2)
    return str(tensorflow.__version__)


if __name__ == "__main__":
    serve(version, answer)
