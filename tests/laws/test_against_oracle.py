"""Every answer of a partition against the oracle that lists and searches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

import shardwise as sw
from tests.oracle.numpy_oracle import Oracle
from tests.strategies import partitions


def oracle_of(partition: sw.Partition) -> Oracle:
    mesh = partition.device_mesh
    specs = [() if s is None else (s,) if isinstance(s, str) else s for s in partition.layout.axes]
    return Oracle(dict(zip(mesh.axis_names, mesh.shape, strict=True)), specs, partition.shape, partition.uneven)  # type: ignore[arg-type]


@given(partitions())
@settings(max_examples=150)
def test_devices_and_boxes(partition: sw.Partition) -> None:
    oracle, mesh = oracle_of(partition), partition.device_mesh
    boxes = oracle.boxes()
    assert mesh.coordinates().tolist() == [list(c) for c in oracle.devices]
    assert partition.num_shards == oracle.num_shards
    assert partition.boxes().tolist() == [[list(bounds) for bounds in box] for box in boxes]
    assert partition.shard_ids().tolist() == oracle.shard_ids
    assert partition.replica_ids().tolist() == oracle.replica_ids
    for i, (device, index) in enumerate(partition.devices_indices_map().items()):
        assert device == mesh.device(i)
        assert index == tuple(slice(start, stop) for start, stop in boxes[i])
        assert partition.box(device) == index
        assert partition.shard_shape(device) == tuple(stop - start for start, stop in boxes[i])
        assert partition.shard_id(device) == oracle.shard_ids[i]
        assert partition.replica_id(device) == oracle.replica_ids[i]
    for shard_id in range(partition.total_shards):
        assert partition.devices_holding(shard_id) == [mesh.device(i) for i in oracle.devices_holding(shard_id)]


@given(partitions(max_dim=5))
@settings(max_examples=150)
def test_elements(partition: sw.Partition) -> None:
    oracle, mesh = oracle_of(partition), partition.device_mesh
    offsets = np.linspace(0, partition.size - 1, min(partition.size, 12), dtype=np.int64)
    shard_ids, locals_ = partition.locate(offsets)
    assert list(zip(shard_ids.tolist(), locals_.tolist(), strict=True)) == [oracle.locate(o) for o in offsets.tolist()]
    views = partition.views(np.arange(partition.size).reshape(partition.shape))
    itemsize_8 = partition.nbytes("int64").tolist()
    for i in range(min(mesh.size, 12)):
        assert partition.runs(mesh.device(i)).tolist() == oracle.runs(i)
        assert views[i].tolist() == oracle.held[i].tolist()
        assert itemsize_8[i] == oracle.held[i].nbytes
