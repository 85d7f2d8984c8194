"""Everything about a partition against the oracle that lists elements and searches."""

from __future__ import annotations

import random

import numpy as np

import shardwise as sw
from tests.oracle.numpy_oracle import Oracle

from .layouts import LayoutCase, random_layout_case
from .subject import Mismatch, Subject, one_by_one, same, sampled


def oracle_of(case: LayoutCase) -> Oracle:
    return Oracle(case.sizes, list(case.specs), case.shape, case.rule)


def check_layout(case: LayoutCase) -> None:
    """Compare every answer about every device, every shard and every element."""
    try:
        oracle = oracle_of(case)
    except ValueError:
        try:
            case.partition()
        except sw.LayoutError:
            return
        raise Mismatch("a dim that does not divide is not refused") from None
    partition = case.partition()
    check_devices(partition, oracle)
    check_elements(partition, oracle)


def check_devices(partition: sw.Partition, oracle: Oracle) -> None:
    mesh = partition.device_mesh
    boxes = oracle.boxes()
    labels = [mesh.device(i) for i in range(mesh.size)]
    same("coordinates()", list(map(tuple, mesh.coordinates().tolist())), oracle.devices)
    same("num_shards", partition.num_shards, oracle.num_shards)
    same("boxes()", [list(map(tuple, box)) for box in partition.boxes().tolist()], boxes)
    same("shard_ids()", partition.shard_ids().tolist(), oracle.shard_ids)
    same("replica_ids()", partition.replica_ids().tolist(), oracle.replica_ids)
    slices = [tuple(slice(start, stop) for start, stop in box) for box in boxes]
    same("devices_indices_map()", list(partition.devices_indices_map().items()), list(zip(labels, slices, strict=True)))
    for i, label in enumerate(labels):
        same("index_of", mesh.index_of_label(label), i)
        same("coordinate", mesh.coordinate(i), oracle.devices[i])
        same("device_index", mesh.device_index(oracle.devices[i]), i)
        same("box", partition.box(label), slices[i])
        same("shard_shape", partition.shard_shape(label), oracle.held[i].shape)
        same("shard_id", partition.shard_id(label), oracle.shard_ids[i])
        same("replica_id", partition.replica_id(label), oracle.replica_ids[i])
    for shard_id in range(partition.total_shards):
        held = [labels[i] for i in oracle.devices_holding(shard_id)]
        same(f"devices_holding({shard_id})", partition.devices_holding(shard_id), held)


def check_elements(partition: sw.Partition, oracle: Oracle) -> None:
    mesh = partition.device_mesh
    shard_ids, local_offsets = oracle.owners()
    offsets = np.arange(partition.size)
    located = partition.locate(offsets)
    same("locate", [answer.tolist() for answer in located], [shard_ids.tolist(), local_offsets.tolist()])
    same("global_offset", partition.global_offset(*located).tolist(), offsets.tolist())
    if partition.size:
        last = partition.size - 1
        same("locate of one", partition.locate(last), (int(shard_ids[last]), int(local_offsets[last])))
        same("global_offset of one", partition.global_offset(*partition.locate(last)), last)
    array = offsets.reshape(partition.shape)
    views = partition.views(array)
    first = [oracle.shard_ids.index(shard_id) for shard_id in oracle.shard_ids]
    runs = {i: oracle.runs(i) for i in set(first)}
    for i, view in enumerate(views):
        same("runs", partition.runs(mesh.device(i)).tolist(), runs[first[i]])
        held = oracle.held[i]
        if view.shape != held.shape or view.tobytes() != held.tobytes():
            raise Mismatch(f"views: that of device {i} is {view.tolist()}, expected {held.tolist()}")
        if view.base is not array and view.base is not array.base:
            raise Mismatch(f"views: that of device {i} is a copy")
    same("nbytes", partition.nbytes("int64").tolist(), [held.nbytes for held in oracle.held])


def random_case(rng: random.Random) -> LayoutCase:
    return random_layout_case(rng)


SUBJECTS = [Subject("numpy", "layouts", 2_000_000, 4_000, sampled(random_case, one_by_one(check_layout)))]
