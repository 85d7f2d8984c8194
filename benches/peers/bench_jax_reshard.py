"""Rows to columns on eight host devices, beside JAX's `device_put` of a sharded array to another sharding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from figures import Row, faster
from part import main
from tensors import SIZE, rows_to_columns
from timing import compare


def rows() -> Iterator[Row]:
    work = rows_to_columns(8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    by_row, by_column = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (("x", None), (None, "x"))
    )
    source = jax.device_put(work.array, by_row)
    source.block_until_ready()

    def device_put() -> Any:
        return jax.device_put(source, by_column).block_until_ready()

    assert np.array_equal(device_put().addressable_shards[3].data, work.out[3])
    name = f"rows → columns of {SIZE}, 8 shards"
    new, there = f"{name}, into new memory", f"{name}, into memory that is there"
    yield compare(new, work.run_new, "JAX `device_put`", device_put, goal=faster(3), turns=7)
    yield compare(there, work.run, "JAX `device_put`, into new memory", device_put, turns=7)


if __name__ == "__main__":
    main(rows)
