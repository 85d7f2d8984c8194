"""The same partitions in JAX: boxes, shard shapes, replica ids and the values of every shard."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.oracle.worker import Worker
from tests.oracle.worker_jax import DEVICES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")

CASES = 400
#: Of which the array itself is made in JAX, shard by shard, every so many.
MAKE_EVERY = 8


def random_case(rng: random.Random, number: int) -> dict[str, Any]:
    """A mesh of some of the devices in any order; axis tuples in any order; dims that mostly divide."""
    names = ["x", "y", "z", "w"]
    shape: list[int] = []
    for _ in range(rng.randint(1, 4)):
        shape.append(rng.choice([n for n in (1, 2, 3, 4) if n * int(np.prod(shape)) <= DEVICES]))
    axes = names[: len(shape)]
    size = int(np.prod(shape))
    specs: list[list[str]] = [[] for _ in range(rng.randint(0, 3))]
    for axis in rng.sample(axes, len(axes)):
        dim = rng.randint(-1, len(specs) - 1)
        if dim >= 0:
            specs[dim].append(axis)
    sizes = dict(zip(axes, shape, strict=True))
    divides = rng.random() < 0.9
    dims = [
        int(np.prod([sizes[axis] for axis in spec])) * rng.randint(0, 3) if divides else rng.randint(0, 12)
        for spec in specs
    ]
    return {
        "mesh_shape": shape,
        "axis_names": axes,
        "devices": rng.sample(range(DEVICES), size),
        "specs": specs,
        "shape": dims,
        "make": number % MAKE_EVERY == 0,
    }


@pytest.fixture(scope="module")
def answered() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """All cases with JAX's answers, from one process that has that many devices."""
    rng = random.Random(20)
    cases = [random_case(rng, number) for number in range(CASES)]
    worker = Worker("tests.oracle.worker_jax")
    answers = worker.ask(cases)
    worker.stop()
    assert len(answers) == CASES
    return list(zip(cases, answers, strict=True))


def layout_of(case: dict[str, Any]) -> sw.TensorLayout:
    mesh = sw.DeviceMesh(case["mesh_shape"], case["axis_names"], case["devices"])
    return sw.TensorLayout(case["specs"], mesh)


def test_boxes_and_shapes(answered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    compared = 0
    for case, answer in answered:
        if "refused" in answer:
            continue
        partition = layout_of(case).partition(case["shape"])
        assert partition.boxes().tolist() == answer["boxes"], case
        assert partition.largest_shard_shape == tuple(answer["shard_shape"]), case
        compared += 1
    assert compared > CASES * 0.8


def test_what_jax_refuses_is_refused(answered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    refused = 0
    for case, answer in answered:
        if "refused" in answer:
            with pytest.raises(sw.LayoutError, match="divide"):
                layout_of(case).partition(case["shape"])
            refused += 1
    assert refused > 10


def test_replica_ids_and_values(answered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    compared = 0
    for case, answer in answered:
        if "data" not in answer:
            continue
        values = np.arange(int(np.prod(case["shape"]))).reshape(case["shape"])
        shards = sw.distribute_tensor(values, layout_of(case)).shards
        assert [shard.device for shard in shards] == case["devices"]
        # JAX takes shards for replicas whose slices are equal, so all shards of a tensor without elements; here they
        # are those with an equal shard index.
        if values.size:
            assert [shard.replica_id for shard in shards] == answer["replica_ids"], case
        assert [shard.data.ravel().tolist() for shard in shards] == answer["data"], case
        compared += 1
    assert compared > CASES / MAKE_EVERY / 2
