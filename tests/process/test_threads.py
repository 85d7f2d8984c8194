"""One of each value shared by many threads, and other threads that go on while one computes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import dtensor as dt
from tests.checks import lets_others_run
from tests.store.conftest import encode

THREADS = 32


def questions(tmp_path: Path) -> dict[str, Callable[[], object]]:
    """What can be asked of one of each value; the values are fresh, so that what is made on demand is made at once."""
    mesh = sw.DeviceMesh((4, 2, 4), ("x", "y", "z"), [f"d{i}" for i in reversed(range(32))])
    layout = sw.TensorLayout((("z", "x"), "y"), mesh)
    partition = layout.partition((50, 7), "chunk")
    array, offsets = np.arange(350).reshape(50, 7), np.arange(350)
    sharded = sw.distribute_tensor(array, layout, "chunk")
    rules = sw.LayoutMap(mesh, backtracking=True)
    rules[r"kernel\d*$"] = (None, "y")
    rules[r"(?<=b)ias"] = ("x",)
    paths = [f"layer{i}/{name}" for i in range(20) for name in ("kernel", "kernel3", "bias", "other")]
    plan = sw.plan_reshard(partition, sw.TensorLayout((None, ("x", "z")), mesh).partition((50, 7), "balanced"))
    shards = [view.copy() for view in partition.views(array)]
    sums = sw.TensorLayout((None, None), mesh, unreduced=("y",)).partition((50, 7))
    total = sw.plan_reshard(sums, partition)
    dtensor_mesh = dt.create_mesh({"x": 4, "y": 8}, devices=[f"CPU:{i}" for i in range(32)])
    dtensor_layout = dt.Layout(["y", dt.UNSHARDED, "x"], dtensor_mesh)
    header = {"a": {"dtype": "I64", "shape": [50, 7], "data_offsets": [0, 2800]}}
    (tmp_path / "shared.safetensors").write_bytes(encode(header, array.astype("<i8").tobytes()))
    checkpoint = sw.open_checkpoint(tmp_path / "shared.safetensors")
    return {
        "mesh": lambda: (
            hash(mesh),
            mesh.devices.tolist(),
            mesh.coordinates().tolist(),
            mesh.index_of_label("d7"),
            repr(mesh),
        ),
        "layout": lambda: (layout.num_shards, layout.partition((50, 7), "chunk") == partition, hash(layout)),
        "partition": lambda: (
            partition.boxes().tolist(),
            list(partition.devices_indices_map().items()),
            [part.tolist() for part in partition.locate(offsets)],
            partition.global_offset(*partition.locate(offsets)).tolist(),
            [partition.runs(device).tolist() for device in mesh.devices.flat],
            [view.tolist() for view in partition.views(array)],
        ),
        "sharded array": lambda: (sharded.numpy().tolist(), [s.data.tolist() for s in sharded.shards]),
        "layout map": lambda: ([rules[path] for path in paths], [rules.matching_rules(path) for path in paths]),
        "plan": lambda: (
            plan.transfers.tobytes(),
            plan.kept.tobytes(),
            [part.tolist() for part in plan.run(shards)],
            [part.tolist() for part in total.run([array] * 32)],
            [piece.tobytes() for piece in plan.rounds(1000, "int64")],
        ),
        "dtensor mesh": lambda: (
            dtensor_mesh.to_string(),
            dtensor_mesh.unravel_index(),
            dtensor_mesh.as_proto().SerializeToString(),
            hash(dtensor_mesh),
        ),
        "dtensor layout": lambda: (
            dtensor_layout.to_string(),
            dtensor_layout.offset_to_shard(),
            dtensor_layout.serialized_string(),
        ),
        "checkpoint": lambda: (
            checkpoint["a"].array().tolist(),
            checkpoint.read("a").tolist(),
            repr(checkpoint["a"]),
            list(checkpoint),
        ),
    }


@pytest.mark.heavy
def test_32_threads_get_from_one_value_what_one_thread_gets(tmp_path: Path) -> None:
    expected = {name: ask() for name, ask in questions(tmp_path).items()}
    for _ in range(3):
        shared = list(questions(tmp_path).items())
        barrier = threading.Barrier(THREADS)

        def wrong(number: int, shared: list[Any] = shared, barrier: threading.Barrier = barrier) -> list[str]:
            barrier.wait(timeout=3600)
            turned = shared[number % len(shared) :] + shared[: number % len(shared)]
            return [name for name, ask in turned if ask() != expected[name]]

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(wrong, range(THREADS))) == [[]] * THREADS


def long_calls() -> dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]]:
    """Calls that are said to release the lock: how to make their argument, of a size that grows, and the call."""
    names = [f"a{i}" for i in range(32)]
    axes = [tuple(names[i : i + 8]) for i in (0, 8, 16, 24)]
    slow = sw.TensorLayout(axes, sw.DeviceMesh((2,) * 32, names)).partition((999,) * 4, "chunk")

    def devices(size: int) -> sw.Partition:
        mesh = sw.DeviceMesh((size, 2), ("x", "y"))
        return sw.TensorLayout((("y", "x"), None), mesh).partition((3 * size, 5), "chunk")

    def pair(size: int) -> tuple[sw.Partition, sw.Partition]:
        mesh = sw.DeviceMesh((size,), ("x",))
        line, shape = sw.TensorLayout(("x",), mesh), (7 * size + 1,)
        return line.partition(shape, "ceil"), line.partition(shape, "balanced")

    def copies(size: int) -> tuple[sw.reshard.ReshardPlan, list[Any]]:
        mesh = sw.DeviceMesh((16,), ("x",))
        a, b = (sw.TensorLayout(axes, mesh).partition((size, 160)) for axes in (("x", None), (None, "x")))
        return sw.plan_reshard(a, b), [np.zeros((size // 16, 160), "u1") for _ in range(16)]

    def sharded(size: int) -> sw.ShardedArray:
        plan, shards = copies(size)
        assert isinstance(plan.src, sw.Partition)
        return sw.ShardedArray(plan.src, shards)

    return {
        "locate": (lambda n: np.zeros(n, np.int64), slow.locate),
        "global_offset": (lambda n: np.zeros(n, np.int64), lambda zeros: slow.global_offset(zeros, zeros)),
        "boxes": (devices, lambda partition: partition.boxes()),
        "shard_ids": (devices, lambda partition: partition.shard_ids()),
        "replica_ids": (devices, lambda partition: partition.replica_ids()),
        "coordinates": (lambda n: sw.DeviceMesh((n, 2), ("x", "y")), lambda mesh: mesh.coordinates()),
        "plan": (pair, lambda both: sw.plan_reshard(*both)),
        "run": (copies, lambda both: both[0].run(both[1])),
        "gather": (sharded, sw.array.gather),
    }


@pytest.mark.parametrize("name", long_calls())
def test_a_thread_goes_on_while_another_computes(name: str) -> None:
    make, call = long_calls()[name]
    assert lets_others_run(make, call, range(12, 20))


def test_a_call_that_keeps_the_lock_is_found() -> None:
    """What the test above would say of a kernel that does not release it."""
    assert not lets_others_run(lambda n: range(n), sum, range(12, 18))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_without_memory_for_a_thread_there_is_an_error(tmp_path: Path) -> None:
    """In processes that have called once: the stack of a thread that has ended is there, but nothing for another."""
    pytest.importorskip("fsspec")
    sw.save_checkpoint(tmp_path / "a.safetensors", {f"w{i}": np.full((64, 64), i + 1.0) for i in range(8)})
    done = subprocess.run(
        [sys.executable, "-c", _STARVED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    found = json.loads(done.stdout)
    assert {name: set(statuses) <= {0, 1} for name, statuses in found.items()} == {"learn": True, "store": True}, found
    assert all(statuses[0] == 1 and statuses[-1] == 0 for statuses in found.values()), found


_STARVED = """
import itertools, json, os, resource, signal, sys
import shardwise as sw
from shardwise.store import learn_rewrites
path = sys.argv[1] + "/a.safetensors"
numbers = itertools.count()
calls = {
    "learn": lambda: learn_rewrites(path, path, threads=4),
    "store": lambda: sw.reshard_checkpoint(path, f"memory://new/{next(numbers)}", to="hf", memory=64 << 20),
}
found = {name: [] for name in calls}
for name, call in calls.items():
    for left in (0, 1 << 20, 12 << 20, 512 << 20):
        child = os.fork()
        if not child:
            call()  # All that is made once is there, and so is a stack.
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + left, used + left))
            signal.alarm(20)
            try:
                call()
            except MemoryError:
                os._exit(1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found[name].append(os.waitstatus_to_exitcode(status))
print(json.dumps(found))
"""
