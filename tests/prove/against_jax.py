"""Boxes, shard shapes and replica ids in JAX, on a host of 64 devices."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np

import shardwise as sw

from .frameworks import Framework
from .layouts import NAMES, LayoutCase, random_layout_case
from .subject import Mismatch, Subject, answered, same, sampled

JAX = Framework("jax", "tests.oracle.worker_jax", {"SHARDWISE_JAX_DEVICES": "64"})
HOST = 64
#: Of so many cases, one is made as an array in JAX, shard by shard.
MAKE_EVERY = 50


def random_case(rng: random.Random) -> LayoutCase:
    """A mesh of some of the devices in any order; the rule is "even", the only one that JAX has."""
    case = random_layout_case(rng, most_devices=rng.choice((4, 8, 8, 8, 16, 16, 24, HOST)))
    shards = [math.prod(case.sizes[name] for name in spec) for spec in case.specs]
    shape = tuple(n * (0 if rng.random() < 0.05 else rng.randint(1, 4)) + (rng.random() < 0.02) for n in shards)
    devices = rng.sample(range(HOST), math.prod(case.mesh_shape))
    return replace(case, devices=tuple(devices), unreduced=(), shape=shape, rule="even")


def question(case: LayoutCase, make: bool) -> dict[str, Any]:
    assert case.devices is not None
    return {
        "mesh_shape": case.mesh_shape,
        "axis_names": NAMES[: len(case.mesh_shape)],
        "devices": case.devices,
        "specs": case.specs,
        "shape": case.shape,
        "make": make,
    }


def compare(case: LayoutCase, answer: dict[str, Any]) -> None:
    if "refused" in answer:
        try:
            case.partition()
        except sw.LayoutError:
            return
        raise Mismatch(f"JAX refuses: {answer['refused']}")
    partition = case.partition()
    same("boxes()", partition.boxes().tolist(), answer["boxes"])
    same("shard_shape", partition.largest_shard_shape, tuple(answer["shard_shape"]))
    # JAX takes shards for replicas whose slices are equal, so all shards of a tensor without elements; here they are
    # those with an equal shard index.
    if partition.size:
        same("replica_ids()", partition.replica_ids().tolist(), answer["replica_ids"])
    if "data" in answer:
        values = np.arange(partition.size).reshape(case.shape)
        same("views", [view.ravel().tolist() for view in partition.views(values)], answer["data"])
        shards = sw.distribute_tensor(values, case.layout()).shards
        same("devices of the shards", [shard.device for shard in shards], list(case.devices or ()))
        same("shards", [shard.data.ravel().tolist() for shard in shards], answer["data"])


def answers(cases: list[LayoutCase]) -> list[Any]:
    return JAX.ask([question(case, number % MAKE_EVERY == 0) for number, case in enumerate(cases)])


SUBJECTS = [
    Subject("JAX", "layouts", 200_000, 2_000, sampled(random_case, answered(answers, compare)), JAX.missing, JAX.stop)
]
