"""The tensor of the reshard benchmarks: 1 GiB of float32, cut into rows, to be cut into columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from part import QUICK

import shardwise as sw

__all__ = ["SIDE", "SIZE", "RowsToColumns", "rows_to_columns"]

SIDE = 1 << (11 if QUICK else 14)
SIZE = f"{SIDE * SIDE / 2**28:g} GiB"


class RowsToColumns(NamedTuple):
    """A plan, what it starts from, and where it may write."""

    array: npt.NDArray[np.float32]
    shards: list[npt.NDArray[np.float32]]
    out: list[npt.NDArray[np.float32]]
    #: Into memory that is there, as the loops below do.
    run: Callable[[], Any]
    #: Into memory of its own, as JAX does.
    run_new: Callable[[], Any]
    #: From the columns to the rows again.
    back: Callable[[], Any]


def rows_to_columns(devices: int) -> RowsToColumns:
    """Row shards with memory of their own, and a plan that has been seen to be right."""
    src = sw.TensorLayout(("x", None), sw.DeviceMesh((devices,), ("x",))).partition((SIDE, SIDE))
    # Other devices, so that nothing stays where it is.
    other = sw.DeviceMesh((devices,), ("x",), [f"gpu:{i}" for i in range(devices)])
    dst = sw.TensorLayout((None, "x"), other).partition((SIDE, SIDE))
    array = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    shards = [view.copy() for view in src.views(array)]
    out = [np.zeros(dst.shard_shape(device), np.float32) for device in other.devices]
    plan, back = sw.plan_reshard(src, dst), sw.plan_reshard(dst, src)
    plan.run(shards, out)
    assert all(np.array_equal(got, view) for got, view in zip(out, dst.views(array), strict=True))
    for shard in shards:
        shard[...] = 0
    back.run(out, shards)
    assert all(np.array_equal(got, view) for got, view in zip(shards, src.views(array), strict=True))
    return RowsToColumns(
        array, shards, out, lambda: plan.run(shards, out), lambda: plan.run(shards), lambda: back.run(out, shards)
    )
