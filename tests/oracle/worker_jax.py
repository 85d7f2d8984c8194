"""Answers questions about shardings with JAX, in the protocol of `worker`; SHARDWISE_JAX_DEVICES is its host's size."""

from __future__ import annotations

import os
from typing import Any

from tests.oracle.worker import serve

DEVICES = int(os.environ.get("SHARDWISE_JAX_DEVICES", "16"))


def answer(case: dict[str, Any]) -> Any:
    import jax
    import numpy as np
    from jax._src.sharding_impls import device_replica_id_map  # what `Shard.replica_id` asks
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = [jax.devices()[i] for i in case["devices"]]
    mesh = Mesh(np.array(devices).reshape(case["mesh_shape"]), case["axis_names"])
    specs = [tuple(spec) if spec else None for spec in case["specs"]]
    sharding = NamedSharding(mesh, PartitionSpec(*specs))
    shape = tuple(case["shape"])
    try:
        indices = sharding.devices_indices_map(shape)
        shard_shape = sharding.shard_shape(shape)
    except ValueError as error:
        return {"refused": str(error)}
    boxes = [
        [list(index.indices(n)[:2]) for index, n in zip(indices[device], shape, strict=True)] for device in devices
    ]
    replicas = device_replica_id_map(sharding, shape)
    result: dict[str, Any] = {
        "boxes": boxes,
        "shard_shape": list(shard_shape),
        "replica_ids": [replicas[device] for device in devices],
    }
    if case["make"]:
        values = np.arange(int(np.prod(shape))).reshape(shape)
        shards = {shard.device: shard for shard in jax.device_put(values, sharding).addressable_shards}
        result["replica_ids"] = [shards[device].replica_id for device in devices]
        result["data"] = [np.asarray(shards[device].data).ravel().tolist() for device in devices]
    return result


def version() -> str:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    return str(jax.__version__)


if __name__ == "__main__":
    serve(version, answer)
