"""Meshes, shardings and arrays, where JAX has eight CPU devices; run in a process of its own."""

from __future__ import annotations

import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwise as sw
from shardwise.interop.jax import (
    from_array,
    from_mesh,
    from_named_sharding,
    to_array,
    to_mesh,
    to_named_sharding,
)

SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4), (3, 2), (4,), (1,)]


def random_case(source: random.Random) -> sw.TensorLayout:
    shape = source.choice(SHAPES)
    names = [f"a{i}" for i in range(len(shape))]
    devices = [f"cpu:{i}" for i in range(8)]
    source.shuffle(devices)
    mesh = sw.DeviceMesh(shape, names, devices[: math.prod(shape)])
    axes: list[list[str]] = [[] for _ in range(source.randint(0, 3))]
    source.shuffle(names)
    for name in names:
        place = source.randint(-1, len(axes) - 1)
        if place >= 0:
            axes[place].append(name)
    return sw.TensorLayout(axes, mesh)


def check(layout: sw.TensorLayout, source: random.Random) -> None:
    mesh = layout.device_mesh
    assert mesh is not None
    assert from_mesh(to_mesh(mesh)) == mesh
    sharding = to_named_sharding(layout)
    assert from_named_sharding(sharding, layout.rank) == layout
    shape = tuple(count * source.randint(0, 3) for count in layout.num_shards)
    # JAX writes slice(None) for a dim that is not cut.
    theirs = {
        f"{device.platform}:{device.id}": tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    assert theirs == layout.partition(shape).devices_indices_map(), (layout, shape)
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    placed = to_array(sw.distribute_tensor(array, layout))
    assert placed.sharding == sharding
    assert np.array_equal(np.asarray(placed), array)
    for theirs_shard in placed.addressable_shards:
        assert theirs_shard.index == sharding.devices_indices_map(shape)[theirs_shard.device]
        # JAX takes all empty shards for replicas of one another.
        ours = layout.partition(shape).replica_id(f"cpu:{theirs_shard.device.id}")
        assert ours == theirs_shard.replica_id or not array.size, (layout, shape)
    back = from_array(placed)
    assert back.layout == layout
    assert np.array_equal(back.numpy(), array)


def check_zero_copy() -> None:
    memory = np.zeros(64 * 4 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    array = memory[begin : begin + 256].view(np.float32).reshape(4, 16)
    rows = sw.TensorLayout(("x", None), sw.DeviceMesh((4,), ("x",)))
    placed = to_array(sw.distribute_tensor(array, rows))
    for shard in placed.addressable_shards:
        assert shard.data.unsafe_buffer_pointer() == array[shard.index].ctypes.data
    for view, shard in zip(from_array(placed).shards, placed.addressable_shards, strict=True):
        assert view.data.ctypes.data == shard.data.unsafe_buffer_pointer()
        assert not view.data.flags.writeable


def check_unreduced() -> None:
    layout = sw.TensorLayout(("x",), sw.DeviceMesh((2, 4), ("x", "y")), unreduced=["y"])
    parts = [np.full(3, i, np.float32) for i in range(8)]
    placed = to_array(sw.ShardedArray(layout.partition((6,)), parts))
    assert placed.sharding.spec == PartitionSpec("x", unreduced={"y"})
    back = from_array(placed)
    assert back.layout == layout
    assert [int(shard.data[0]) for shard in back.shards] == list(range(8))


def check_refusals() -> None:
    uneven = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))
    with pytest.raises(sw.LayoutError, match="dim 0 of 5"):
        to_array(sw.distribute_tensor(np.zeros(5, np.float32), uneven, uneven="ceil"))
    with pytest.raises(sw.LayoutError, match="jax_enable_x64"):
        to_array(sw.distribute_tensor(np.zeros(4), uneven))
    jax.config.update("jax_enable_x64", True)
    assert to_array(sw.distribute_tensor(np.zeros(4), uneven)).dtype == np.float64
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(sw.LayoutError, match="SingleDeviceSharding, which has no named axes; give a NamedSharding"):
        from_array(jax.numpy.zeros(4))
    assert from_array(jax.device_put(np.zeros(4), to_named_sharding(uneven))).layout == uneven
    with pytest.raises(sw.MeshError, match="'tpu:1', which JAX does not have"):
        to_mesh(sw.DeviceMesh((2,), ("x",), devices=["cpu:0", "tpu:1"]))


def main() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    for _ in range(150):
        check(random_case(source), source)
    check_zero_copy()
    check_unreduced()
    check_refusals()
    trailing = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    assert from_named_sharding(trailing, 3).axes == ("x", None, None)
    print("all hold")


if __name__ == "__main__":
    main()
