"""PyTorch's rows of docs/findings.md, in PyTorch itself; `tests/prove/against_torch.py` has random cases.

PyTorch's default packages bring gigabytes of GPU libraries and are therefore no requirement of any kind; where a CPU
build is installed, or SHARDWISE_TORCH_PYTHON names a Python that has one, this runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shardwise as sw
from shardwise.computation import Computation
from shardwise.interop.torch import Shard, StridedShard, local_shards, to_placements
from shardwise.propagate import propagate
from tests.oracle.torch_oracle import missing, torch_worker
from tests.oracle.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    worker = torch_worker()
    yield worker
    worker.stop()


def test_the_checkpoint_planner_takes_every_shard_for_a_box(worker: Worker) -> None:
    """13 rows over z, then y, then x: rank 5 holds the rows 7 and 10, and PyTorch would load 7 and 8 into it."""
    mesh = sw.DeviceMesh((2, 2, 2), ("x", "y", "z"))
    placements = to_placements(sw.TensorLayout((("z", "y", "x"),), mesh))
    assert placements == [StridedShard(0, 4), StridedShard(0, 2), Shard(0)]
    placed = [("strided", 0, 4), ("strided", 0, 2), ("shard", 0)]
    held = {"shape": [13], "mesh_shape": [2, 2, 2], "placements": placed, "elements": True}
    answer, *_ = worker.ask([held])
    assert answer["elements"][5] == [7, 10]
    chunk = (answer["offsets"][5], answer["shapes"][5])
    assert worker.ask([{"saved": [([0], [13])], "wanted": [chunk]}]) == [[(0, 0, [0], [7], [2])]]
    shards = local_shards(placements, mesh, (13,))
    assert shards.is_box.tolist() == [True] * 5 + [False] + [True] * 2


def test_the_calculator_takes_a_dim_and_its_negative_for_two(worker: Worker) -> None:
    positive, negative = (
        {"shape": [2, 8], "mesh_shape": [2, 2], "placements": [("shard", dim), ("shard", 1)]} for dim in (1, -1)
    )
    right, wrong = worker.ask([positive, negative])
    assert [offset[1] for offset in right["offsets"]] == [0, 2, 4, 6]
    assert [offset[1] for offset in wrong["offsets"]] == [0, 2, 0, 2]
    shards = local_shards([Shard(-1), Shard(1)], sw.DeviceMesh((2, 2), ("x", "y")), (2, 8))
    assert shards.offsets.tolist() == right["offsets"]


def test_the_checkpoint_planner_says_nothing_of_gaps_and_overlaps(worker: Worker) -> None:
    gap = {"saved": [([0], [3]), ([5], [3])], "wanted": [([0], [8])]}
    overlap = {"saved": [([0], [5]), ([3], [5])], "wanted": [([0], [8])]}
    assert [sum(read[4][0] for read in answer) for answer in worker.ask([gap, overlap])] == [6, 10]
    mesh = sw.DeviceMesh((1,), ("x",))
    whole = sw.TensorLayout((None,), mesh).partition((8,))
    for case in (gap, overlap):
        boxes = [[[offsets[0], offsets[0] + sizes[0]]] for offsets, sizes in case["saved"]]
        with pytest.raises(sw.LayoutError):
            sw.plan_reshard(sw.Tiling.from_boxes((8,), boxes), whole)


@pytest.mark.slow
def test_ops_of_dtensor_compute_another_thing_than_plain_ones(worker: Worker) -> None:
    """`conv2d` with a weight cut by outputs, `mse_loss` of a dim that does not divide, and its gradient."""
    for rank in worker.ask([{"ranks": 2, "sizes": [3, 4]}])[0]:
        # 2 of the 4 outputs: each device's own.
        assert rank["convolution"] == [2, 2, 8, 8]
        # The mean of 0, 1, 4 is 5/3; this is that of the means of 0, 1 and of 4.
        assert rank["loss"] == {3: 2.25, 4: 3.5}
        # 2x/4 is right; this is 2x/2, as if each device's elements were all.
        assert rank["gradient"][4] == [0, 1, 2, 3]
    shapes = [(2, 3, 8, 8), (4, 3, 3, 3)]
    names = {"lhs_spec": ["b", "f", 0, 1], "rhs_spec": ["o", "i", 0, 1], "out_spec": ["b", "f", 0, 1]}
    window = {"window_strides": [1, 1], "padding": [[1, 1]] * 2, "lhs_dilation": [1, 1], "rhs_dilation": [1, 1]}
    counts = {"feature_group_count": 1, "batch_group_count": 1}
    convolution = {"op": "convolution", "in": [0, 1], "out": [[(2, 4, 8, 8), "float32"]]}
    computation = Computation(
        [[shape, "float32"] for shape in shapes], [convolution | {"attrs": names | window | counts}], [2]
    )
    mesh = sw.DeviceMesh((2,), ("x",))
    found = propagate(computation, [(None,) * 4, ("x", None, None, None)], mesh=mesh)
    (ours,), (plain,) = (of([np.ones(shape) for shape in shapes]) for of in (found.run, computation.run))
    assert found.results[0] == sw.TensorLayout((None, "x", None, None), mesh)
    assert np.array_equal(ours, plain)
