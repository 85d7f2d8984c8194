"""Plans between any two partitions, run on arrays between forbidden pages: every byte arrives, no other is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import shardwise as sw
from tests.fuzz.limits import limited
from tests.process.guarded import FORMS, Placed
from tests.strategies import layouts

AXES = ("x", "y", "z")


@st.composite
def meshes(draw: st.DrawFn) -> sw.DeviceMesh:
    """Meshes of up to 16 devices, whose labels are in any order."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (8,), (16,), (2, 3), (3, 1), (4, 4), (2, 2, 3)]))
    count = int(np.prod(sizes))
    return sw.DeviceMesh(sizes, AXES[: len(sizes)], draw(st.none() | st.permutations([f"d{i}" for i in range(count)])))


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[Any], sw.Partition, sw.Partition, list[tuple[str, bool, int]]]:
    """An array, two partitions of its shape, and how to place each shard."""
    shape = tuple(draw(st.lists(st.integers(0, 12) | st.sampled_from([16, 40, 200]), max_size=3)))
    if np.prod(shape) > 40_000:
        shape = tuple(min(n, 20) for n in shape)
    unreduced = draw(st.integers(0, 4)) == 0
    named = st.sampled_from(["u1", "u2", "f4", ">i8", "c16", "S3", "m8[s]"])
    any_size = st.one_of(st.integers(1, 200).map("V{}".format), named)
    dtype = np.dtype(draw(st.sampled_from(["f4", "i8", "u1"]) if unreduced else any_size))
    size = int(np.prod(shape))
    values = np.random.default_rng(draw(st.integers(0, 99))).bytes(size * dtype.itemsize)
    array = np.frombuffer(values, f"V{dtype.itemsize}").view(dtype).reshape(shape)
    if unreduced:
        array = np.arange(size).astype(dtype).reshape(shape)
    rules: list[sw.UnevenRule] = ["ceil", "chunk", "balanced", "floor"]
    a = draw(layouts(draw(meshes()), rank=len(shape), partial=unreduced)).partition(shape, draw(st.sampled_from(rules)))
    b = draw(layouts(draw(meshes()), rank=len(shape), partial=False)).partition(shape, draw(st.sampled_from(rules)))
    place = st.tuples(st.sampled_from(FORMS), st.booleans(), st.integers(1, 7))
    return array, a, b, draw(st.lists(place, min_size=1, max_size=4))


def run_any_plan(case: tuple[npt.NDArray[Any], sw.Partition, sw.Partition, list[tuple[str, bool, int]]]) -> None:
    """Fuzz one plan, with outputs of its own and into given ones."""
    array, a, b, places = case
    with limited():
        plan = sw.plan_reshard(a, b)
        sources = [Placed(view, *places[i % len(places)]) for i, view in enumerate(a.views(array))]
        outputs = [Placed(np.zeros_like(view), *places[~i % len(places)]) for i, view in enumerate(b.views(array))]
        # Each of the partial sums is the whole value here, so as many of them are that many times as much.
        total = array if plan.addends == 1 else np.asarray(array * plan.addends).astype(array.dtype)
        for got in (
            plan.run([s.array for s in sources]),
            plan.run([s.array for s in sources], [o.array for o in outputs]),
        ):
            for shard, expected in zip(got, b.views(total), strict=True):
                assert shard.tobytes() == expected.tobytes()
        assert all(placed.is_untouched_outside() for placed in sources + outputs)
        if not a.layout.unreduced:
            assert sw.ShardedArray(a, [s.array for s in sources]).numpy().tobytes() == array.tobytes()
