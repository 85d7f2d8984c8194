"""Constraints beside calls and loops: devices that compute with them have what the plain run gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.computation import Computation
from shardwise.propagate import propagate

from .test_whole import MESH, F, in_body


def test_a_constraint_on_what_a_call_gives_leaves_loops_where_they_are() -> None:
    said = in_body("call", {})
    loop = in_body("loop", {"trips": 3})["ops"][0]
    constraint = {"op": "constraint", "in": [1], "out": [[[8, 4], F]], "attrs": {"axes": [["x"], []]}}
    computation = Computation.from_json(said | {"ops": [*said["ops"], loop, constraint], "outputs": [2, 3]})
    arrays = [np.arange(32.0).reshape(8, 4) / 32]
    found = propagate(computation, [None], mesh=MESH)
    assert found.results[1] == sw.TensorLayout(("x", None), MESH)
    for array, expected in zip(found.run(arrays), computation.run(arrays), strict=True):
        np.testing.assert_allclose(array, expected)


@pytest.mark.parametrize("constrained", [2, 3])
@pytest.mark.parametrize("op", [{"op": "loop", "trips": 2}, {"op": "call"}])
def test_a_constraint_on_one_of_several_results_of_a_body(op: dict[str, Any], constrained: int) -> None:
    value = [[8, 4], F]
    ops = [{"op": name, "in": [at], "out": [value]} for at, name in enumerate(("tanh", "negate"))]
    body = {"inputs": [value] * 2, "ops": ops, "outputs": [2, 3]}
    constraint = {"op": "constraint", "in": [constrained], "out": [value], "attrs": {"axes": [["x"], []]}}
    said = [op | {"in": [0, 1], "out": [value] * 2, "body": body}, constraint]
    computation = Computation.from_json({"inputs": [value] * 2, "ops": said, "outputs": [2, 3, 4]})
    found = propagate(computation, [None, None], mesh=MESH)
    assert found.layouts[constrained - 2] == sw.TensorLayout(("x", None), MESH)
    arrays = [np.arange(32.0).reshape(8, 4) / 32 + shift for shift in (0, 1)]
    for array, expected in zip(found.run(arrays), computation.run(arrays), strict=True):
        np.testing.assert_allclose(array, expected)
