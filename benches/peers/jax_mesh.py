"""JAX meshes of any size, for what JAX computes about them without computing on them.

JAX makes threads for every host device: some hundreds are possible, thousands bring a machine down. Above
`HOST_DEVICES` the devices are stand-ins with the attributes that `Mesh` and `devices_indices_map` read; the slices
are computed by JAX's own code all the same.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

# Before JAX is imported: it makes its devices once.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=512"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

__all__ = ["HOST_DEVICES", "mesh_sharding"]

HOST_DEVICES = 512


class StandIn:
    """What JAX asks of a device when it makes a mesh of it."""

    platform = device_kind = "cpu"
    process_index = 0

    def __init__(self, index: int, client: Any) -> None:
        self.id, self.client = index, client


@cache
def devices(count: int) -> list[Any]:
    """Host devices as far as there are enough, else stand-ins."""
    if count <= HOST_DEVICES:
        return list(jax.devices()[:count])
    client = jax.devices()[0].client
    return [StandIn(index, client) for index in range(count)]


def mesh_sharding(grid: tuple[int, int], stand_ins: bool = False) -> Any:
    """The sharding that cuts two dims by the two axes of a mesh."""
    count = grid[0] * grid[1]
    found = devices(HOST_DEVICES + 1)[:count] if stand_ins else devices(count)
    mesh = jax.sharding.Mesh(np.array(found, object).reshape(grid), ("x", "y"))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
