"""Random meshes and layouts that TensorFlow and `shardwise.dtensor` both accept, and the comparison of all they say."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np

from shardwise.dtensor import Layout, Mesh


def random_case(rng: random.Random) -> tuple[dict[str, Any], Layout]:
    """A mesh and a layout that both libraries accept, as TensorFlow's arguments, and as ours made of them."""
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    size = math.prod(shape)
    names = rng.sample(["x", "y", "z", "batch", "model", "é", "a.b", "A_1", "x;y", "数据"], len(shape))
    device_type = rng.choice(["CPU", "GPU", "TPU", "XPU"])
    clients = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    held = size // clients
    client = rng.randrange(clients)
    remote = rng.random() < 0.1
    first = rng.choice([0, 0, 0, rng.randint(1, 1000)])
    job, replica = rng.choice(["localhost", "worker", "tpu_worker_1"]), rng.choice(["/replica:0", ""])

    def device(index: int) -> str:
        return f"/job:{job}{replica}/task:{index // held}/device:{device_type}:{index % held}"

    local = [] if remote else list(range(client * held, (client + 1) * held))
    if rng.random() < 0.2:
        rng.shuffle(local)
    global_devices = [device(index) for index in range(size)] if remote or rng.random() < 0.2 else None
    specs = (rng.sample(names, rng.randint(0, len(names))) + ["unsharded"] * rng.randint(0, 3))[:6]
    if rng.random() < 0.1:
        specs.append("match")
    rng.shuffle(specs)
    use_xla_spmd = device_type == "TPU" and rng.random() < 0.3
    mesh_name = rng.choice(["", "mesh", "my mesh", "网格"])
    case: dict[str, Any] = {
        "dim_names": names,
        "shape": shape,
        "size": size,
        "first": first,
        "local_ids": [first + index for index in local],
        "local_devices": [device(index) for index in local],
        "mesh_name": mesh_name,
        "global_devices": global_devices,
        "use_xla_spmd": use_xla_spmd,
        "specs": specs,
        "parted": rng.random() < 0.2,
        "delete": rng.sample(range(len(specs)), rng.randint(0, len(specs))),
        # TensorFlow loses the global devices beside `use_xla_spmd`, and cannot read a layout with a space in a name.
        "readable": not (use_xla_spmd and global_devices) and " " not in mesh_name,
    }
    layout = Layout(specs, our_mesh(case))
    if case["parted"]:
        layout = layout.to_parted()
    shards = [1 if spec in ("unsharded", "match") else shape[names.index(spec)] for spec in specs]
    case["index"] = tuple(rng.randrange(count) for count in shards)
    case["local_shape"] = [rng.randint(0, 5) for _ in specs]
    case["global_shape"] = [count * rng.randint(0, 5) for count in shards]
    case["our_mesh_text"] = layout.mesh.to_string()
    case["our_mesh_bytes"] = layout.mesh.as_proto().SerializeToString()
    case["our_layout_text"] = layout.to_string()
    case["our_layout_bytes"] = layout.serialized_string()
    return case, layout


def our_mesh(case: dict[str, Any]) -> Mesh:
    ids = np.arange(case["first"], case["first"] + case["size"]).reshape(case["shape"])
    return Mesh(
        case["dim_names"],
        ids,
        case["local_ids"],
        case["local_devices"],
        case["mesh_name"],
        case["global_devices"],
        case["use_xla_spmd"],
    )


def check(case: dict[str, Any], layout: Layout, answer: dict[str, Any]) -> None:
    mesh = layout.mesh
    theirs = answer["mesh"]
    ours: dict[str, Any] = {
        "text": mesh.to_string(),
        "bytes": mesh.as_proto().SerializeToString(),
        "dim_names": mesh.dim_names,
        "name": mesh.name,
        "size": mesh.size,
        "strides": mesh.strides,
        "shape": mesh.shape(),
        "device_type": mesh.device_type(),
        "global_device_ids": mesh.global_device_ids().tolist(),
        "global_devices": mesh.global_devices(),
        "local_device_ids": mesh.local_device_ids(),
        "local_devices": mesh.local_devices(),
        "local_device_locations": mesh.local_device_locations(),
        "unravel_index": mesh.unravel_index(),
        "min_global_device_id": mesh.min_global_device_id(),
        "num_local_devices": mesh.num_local_devices(),
        "is_remote": mesh.is_remote(),
        "use_xla_spmd": mesh.use_xla_spmd(),
        "device_location": [mesh.device_location(index) for index in range(mesh.size)],
        "host_mesh": mesh.host_mesh().to_string(),
        "repr_holds_text": mesh.to_string() in repr(mesh),
    }
    if case["first"] != 0:
        # TensorFlow counts from 0 where its documentation says ids, and fails where it looks up ids.
        ours["unravel_index"] = {key - case["first"]: location for key, location in ours["unravel_index"].items()}
        ours["local_device_locations"] = theirs["local_device_locations"]
    if mesh.is_remote():
        ours["host_mesh"] = theirs["host_mesh"]  # without any device in TensorFlow
    assert ours == theirs

    cut = "match" not in layout.sharding_specs
    ours = {
        "text": layout.to_string(),
        "bytes": layout.serialized_string(),
        "sharding_specs": layout.sharding_specs,
        "rank": layout.rank,
        "shape": layout.shape,
        "type": int(layout.type),
        "is_fully_replicated": layout.is_fully_replicated(),
        "is_batch_parallel": layout.is_batch_parallel(),
        "num_shards": [layout.num_shards(dim) for dim in range(layout.rank)] if cut else None,
        "offset_to_shard": layout.offset_to_shard() if cut else None,
        "index": layout.offset_tuple_to_global_index(case["index"]) if cut else None,
        "global_shape": layout.global_shape_from_local_shape(case["local_shape"]) if cut else None,
        "local_shape": layout.local_shape_from_global_shape(case["global_shape"]) if cut else None,
        "deleted": layout.delete(case["delete"]).sharding_specs,
        "parted": layout.to_parted().to_string(),
    }
    assert ours == answer["layout"]
    assert answer["reads_mesh_bytes"]
    assert answer["reads_layout_bytes"]
    if case["readable"]:
        assert answer["reads_mesh_text"]
        assert answer["reads_layout_text"]
        assert answer["unpickles"]

    assert Mesh.from_string(theirs["text"]) == mesh
    assert Layout.from_string(answer["layout"]["text"]) == layout
    assert Layout.from_str(answer["layout"]["bytes"]) == layout
    assert Layout.from_proto(SimpleMessage(answer["layout"]["bytes"])) == layout
    assert Mesh.from_proto(SimpleMessage(theirs["bytes"])) == mesh
    assert pickle.loads(pickle.dumps(layout)) == layout


class SimpleMessage:
    """A message of another library, as far as `from_proto` is concerned."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._data
