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
    other = sw.TensorLayout((None, "y"), mesh).partition((4, 3), "ceil")
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    for layouts, expected in (({}, array.tiling), ({"a": other}, other)):
        wanted = cut_one(array, layouts)
        assert wanted.partition is expected
        assert [piece.box for piece in wanted.pieces] == [piece.box for piece in wanted.replicas] == halves
    assert cut_one(np.zeros((4, 3)), {}).partition is None
    assert cut_one(np.zeros((4, 3)), {"a": other}).partition is other


def cut_one(array: Any, layouts: Mapping[str, Any]) -> Wanted:
    arrays = [wanted_array("a", array)]
    (found,) = DescribedTensors.of_arrays(arrays).cut(arrays, placing_of(layouts), "even")
    return found
