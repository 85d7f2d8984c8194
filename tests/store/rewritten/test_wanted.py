"""Tensors as they are wanted."""

from __future__ import annotations

import numpy as np

import shardwise as sw
from shardwise.store.rewritten.wanted import wanted_array


def test_a_sharded_array_is_cut_as_it_is_unless_a_layout_says_otherwise() -> None:
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    array = sw.distribute_tensor(np.arange(12).reshape(4, 3), sw.TensorLayout(("x", None), mesh))
    other = sw.TensorLayout((None, "y"), mesh).partition((4, 3), "ceil")
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    for given_one, expected in ((None, array.tiling), (other, other)):
        wanted = wanted_array("a", array, given_one)
        assert wanted.partition is expected
        assert [piece.box for piece in wanted.pieces] == [piece.box for piece in wanted.replicas] == halves
    assert wanted_array("a", np.zeros((4, 3)), None).partition is None
    assert wanted_array("a", np.zeros((4, 3)), other).partition is other
