"""Tensors as they are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.conversion.tables import Wanted
from shardwise.placing import placing_of
from shardwise.store.rewritten.partitions import DescribedTensors
from shardwise.store.rewritten.wanted import wanted_array


def test_a_sharded_array_is_cut_as_it_is_unless_a_layout_says_otherwise() -> None:
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    array = sw.distribute_tensor(np.arange(12).reshape(4, 3), sw.TensorLayout(("x", None), mesh))
    own = sw.ShardedArray(array.tiling, [shard.copy() for shard in array.shard_arrays()])
    other = sw.TensorLayout((None, "y"), mesh).partition((4, 3), "ceil")
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    for layouts, expected in (({}, array.tiling), ({"a": other}, other)):
        wanted = cut_one(own, layouts)
        assert wanted.partition is expected
        assert [piece.box for piece in wanted.pieces] == [piece.box for piece in wanted.replicas] == halves
        wanted = cut_one(array, layouts)
        assert wanted.partition is expected
        assert [piece.box for piece in wanted.pieces] == [((0, 4), (0, 3))]
        assert not wanted.replicas
    assert cut_one(np.zeros((4, 3)), {}).partition is None
    assert cut_one(np.zeros((4, 3)), {"a": other}).partition is other


def test_shards_of_packed_dims_are_not_copied_to_be_written() -> None:
    layout = sw.TensorLayout((sw.packed.gate_up("x"), None), sw.DeviceMesh((2,), ("x",)))
    whole = np.arange(24).reshape(8, 3)[:, ::-1]
    wanted = cut_one(sw.distribute_tensor(whole, layout), {})
    assert [np.shares_memory(holder, whole) for holder in wanted.pieces.holders] == [True]


def cut_one(array: Any, layouts: Mapping[str, Any]) -> Wanted:
    arrays = [wanted_array("a", array)]
    (found,) = DescribedTensors.of_arrays(arrays).cut(arrays, placing_of(layouts), "even")
    return found
