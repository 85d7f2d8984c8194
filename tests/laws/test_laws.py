"""The laws of docs/semantics.md 2.7 that concern meshes, partitions and views, each as a property."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.strategies import layouts, meshes, partitions

EVAL_SCOPE = {"DeviceMesh": sw.DeviceMesh, "TensorLayout": sw.TensorLayout, "Partition": sw.Partition}


@given(meshes())
def test_law_1_ravel_is_the_inverse_of_unravel(mesh: sw.DeviceMesh) -> None:
    coordinates = [mesh.coordinate(i) for i in range(mesh.size)]
    assert [mesh.device_index(coordinate) for coordinate in coordinates] == list(range(mesh.size))
    assert len(set(coordinates)) == mesh.size
    assert mesh.coordinates().tolist() == [list(coordinate) for coordinate in coordinates]
    by_hand = [
        tuple((i // stride) % n for stride, n in zip(mesh.strides, mesh.shape, strict=True)) for i in range(mesh.size)
    ]
    assert coordinates == by_hand


@given(meshes())
def test_law_1_label_and_device_index_are_inverse(mesh: sw.DeviceMesh) -> None:
    assert [mesh.index_of_label(mesh.device(i)) for i in range(mesh.size)] == list(range(mesh.size))
    assert list(mesh.devices.ravel()) == [mesh.device(i) for i in range(mesh.size)]


@given(partitions())
def test_law_2_the_shards_tile_the_tensor(partition: sw.Partition) -> None:
    held = np.zeros(partition.shape, dtype=int)
    for shard_id in range(partition.total_shards):
        held[partition.box(partition.devices_holding(shard_id)[0])] += 1
    assert (held == 1).all()


@given(partitions())
def test_law_2_replicas_hold_one_box_and_are_numbered(partition: sw.Partition) -> None:
    boxes = partition.boxes()
    ids, replicas = partition.shard_ids(), partition.replica_ids()
    for shard_id in range(partition.total_shards):
        holders = np.flatnonzero(ids == shard_id)
        assert replicas[holders].tolist() == list(range(partition.replicas))
        assert (boxes[holders] == boxes[holders[0]]).all()
        assert partition.canonical_device(shard_id) == partition.device_mesh.device(holders[0])
        assert [[part.start, part.stop] for part in partition.shard_box(shard_id)] == boxes[holders[0]].tolist()
    for shard_id in (-1, partition.total_shards):
        for ask in (partition.shard_box, partition.canonical_device):
            with pytest.raises(IndexError, match="shard_id"):
                ask(shard_id)
    extents = boxes[..., 1] - boxes[..., 0]
    assert partition.largest_shard_shape == tuple(extents.max(axis=0).tolist())


@given(partitions())
def test_law_3_global_offset_is_the_inverse_of_locate(partition: sw.Partition) -> None:
    offsets = np.arange(partition.size)
    shard_ids, local_offsets = partition.locate(offsets)
    assert (partition.global_offset(shard_ids, local_offsets) == offsets).all()
    for offset in range(min(partition.size, 20)):
        shard_id, local = partition.locate(offset)
        assert (shard_id, local) == (shard_ids[offset], local_offsets[offset])
        assert partition.global_offset(shard_id, local) == offset


@given(partitions())
def test_law_3_the_owner_found_by_arithmetic_is_found_by_searching(partition: sw.Partition) -> None:
    if partition.size == 0:
        return
    shard_ids, local_offsets = partition.locate(np.arange(partition.size).reshape(partition.shape))
    for shard_id in range(partition.total_shards):
        box = partition.box(partition.devices_holding(shard_id)[0])
        assert (shard_ids[box] == shard_id).all()
        assert local_offsets[box].ravel().tolist() == list(range(local_offsets[box].size))


@given(partitions(), st.sampled_from(["C", "F"]))
def test_law_4_the_views_put_back_are_the_array(partition: sw.Partition, order: Any) -> None:
    array = np.asarray(np.random.default_rng(0).integers(-100, 100, partition.shape), order=order)
    views = partition.views(array)
    back = np.full(partition.shape, -999)
    for view, box in zip(views, partition.devices_indices_map().values(), strict=True):
        back[box] = view
        assert view.size == 0 or np.shares_memory(view, array)
    assert back.tobytes() == array.tobytes()
    again = sw.ShardedArray(partition, views)
    if not partition.layout.unreduced:
        assert again.numpy().tobytes() == array.tobytes()


@given(partitions())
@settings(max_examples=50)
def test_law_8_values_are_copied_pickled_and_evaluated_to_equals(partition: sw.Partition) -> None:
    layout, mesh = partition.layout, partition.device_mesh
    for value in (mesh, layout, partition):
        others = [copy.copy(value), copy.deepcopy(value), eval(repr(value), EVAL_SCOPE)]
        others += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for other in others:
            assert other == value
            assert hash(other) == hash(value)
            assert repr(other) == repr(value)
            assert (other != value) is False


@given(layouts(), layouts())
def test_law_8_equality_is_equality_of_what_was_given(first: sw.TensorLayout, second: sw.TensorLayout) -> None:
    same = (
        first.axes == second.axes
        and set(first.unreduced) == set(second.unreduced)
        and first.device_mesh == second.device_mesh
    )
    assert (first == second) is same
    assert (first.device_mesh == second.device_mesh) is (repr(first.device_mesh) == repr(second.device_mesh))
