"""Threads, signals, forks and faults, while large arrays are computed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from tests.checks import interrupted


def slow_partition() -> sw.Partition:
    names = [f"a{i}" for i in range(32)]
    axes = [tuple(names[i : i + 8]) for i in (0, 8, 16, 24)]
    return sw.TensorLayout(axes, sw.DeviceMesh((2,) * 32, names)).partition((999,) * 4, "chunk")


def apart(count: int) -> npt.NDArray[np.int64]:
    """Boxes of one dim, of lengths 1 and 2 in turn, with gaps between them."""
    starts = 3 * np.arange(count)
    return np.stack([starts, starts + 1 + starts % 2], axis=1)[:, None]


def run(program: str, timeout: float = 3600) -> list[str]:
    """What a Python program prints, run in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


linux = pytest.mark.skipif(sys.platform != "linux", reason="uses signals, forks and affinity as Linux has them")

SLOW = slow_partition()
CALLS: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "locate": (lambda n: np.zeros(n, np.int64), SLOW.locate),
    "global_offset": (lambda n: np.zeros(n, np.int64), lambda offsets: SLOW.global_offset(offsets, offsets)),
    "coordinates": (
        lambda n: sw.DeviceMesh(((n >> 6) + 1, *(2,) * 6), [f"a{i}" for i in range(7)]),
        lambda mesh: mesh.coordinates(),
    ),
    "devices_indices_map": (
        lambda n: sw.TensorLayout(("x",), sw.DeviceMesh((n >> 3,), ("x",), range(n >> 3))).partition((n,)),
        lambda partition: partition.devices_indices_map(),
    ),
    "views": (
        lambda n: sw.TensorLayout(("x",), sw.DeviceMesh((n >> 3,), ("x",))).partition((n,)),
        lambda partition: partition.views(np.broadcast_to(np.int8(), partition.shape)),
    ),
    "views of packed dims": (
        lambda n: sw.TensorLayout((sw.packed.gate_up("x"),), sw.DeviceMesh((n >> 4,), ("x",))).partition((n,)),
        lambda partition: partition.views(np.broadcast_to(np.int8(), partition.shape)),
    ),
    "pieces": (
        lambda n: sw.Tiling.from_boxes((3 * (n >> 4),), {"a": apart(n >> 4)}),
        lambda tiling: tiling.core.pieces(0),
    ),
    "boxes": (
        lambda n: (apart(n >> 5), n >> 5, ((3 * (n >> 5),), apart(n >> 5)[:, 0, 0])),
        lambda holder: sw._core.Tiling.boxes(holder[2][0], [holder], False),
    ),
    "shapes": (
        lambda n: sw.TensorLayout(("x",), sw.DeviceMesh((n >> 2,), ("x",))).partition((n,)),
        lambda partition: partition.holder_shapes(),
    ),
}


@pytest.mark.heavy
@linux
@pytest.mark.parametrize("name", CALLS)
def test_control_c_ends_a_long_call(name: str) -> None:
    make, call = CALLS[name]
    # The fastest of them handles four million items within a dozen ticks of the timer: few on a busy machine.
    assert interrupted(call, (make(1 << exponent) for exponent in range(12, 27)), KeyboardInterrupt)


@linux
def test_a_call_that_no_signal_ends_is_found() -> None:
    """What the test above would say of a kernel that does not look at signals."""
    assert not interrupted(lambda n: sum(range(n)), (1 << exponent for exponent in range(12, 23)), KeyboardInterrupt)


@pytest.mark.heavy
@linux
def test_what_a_signal_handler_raises_comes_out_unchanged_and_the_next_call_works() -> None:
    class Mine(Exception):
        pass

    offsets = [np.zeros(1 << exponent, np.int64) for exponent in range(12, 23)]
    assert interrupted(SLOW.locate, offsets, Mine)
    assert not any(array.any() for array in offsets)
    assert [part.tolist() for part in SLOW.locate(offsets[0][:1])] == [[0], [0]]


def test_32_threads_share_one_of_each() -> None:
    mesh = sw.DeviceMesh((4, 2, 4), ("x", "y", "z"), [f"d{i}" for i in reversed(range(32))])
    layout = sw.TensorLayout((("z", "x"), "y"), mesh)
    partition = layout.partition((50, 7), "chunk")
    array = np.arange(350).reshape(50, 7)
    offsets = np.arange(350)
    barrier = threading.Barrier(32)

    def everything() -> tuple[object, ...]:
        shards = sw.ShardedArray(partition, partition.views(array))
        return (
            mesh.devices.tolist(),
            mesh.coordinates().tolist(),
            hash(mesh),
            layout.partition((50, 7), "chunk") == partition,
            partition.boxes().tolist(),
            list(partition.devices_indices_map().items()),
            [part.tolist() for part in partition.locate(offsets)],
            [view.tolist() for view in partition.views(array)],
            shards.numpy().tolist(),
        )

    expected = everything()

    def one(_: int) -> bool:
        barrier.wait(timeout=3600)
        return all(everything() == expected for _ in range(5))

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(32)))


def test_large_calls_from_several_threads_at_once() -> None:
    partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((8,), ("x",))).partition((500, 400))
    offsets = np.arange(partition.size)
    expected = partition.locate(offsets)
    with ThreadPoolExecutor(4) as pool:
        for shards, local in pool.map(lambda _: partition.locate(offsets), range(8)):
            assert (shards == expected[0]).all()
            assert (local == expected[1]).all()


@pytest.mark.heavy
@linux
def test_fork_after_a_parallel_call() -> None:
    program = """
        import os, signal
        import numpy as np
        import shardwise as sw
        partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((8,), ("x",))).partition((500, 400))
        offsets = np.arange(partition.size)
        expected = partition.locate(offsets)
        child = os.fork()
        if child == 0:
            signal.alarm(3600)
            same = all((a == b).all() for a, b in zip(partition.locate(offsets), expected))
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        print(status, all((a == b).all() for a, b in zip(partition.locate(offsets), expected)))
    """
    assert run(program) == ["0", "True"]


@linux
def test_a_call_leaves_no_thread_behind() -> None:
    partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((8,), ("x",))).partition((500, 400))

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    partition.locate(np.arange(partition.size))
    deadline = time.monotonic() + 600
    # The kernel lists a thread for a moment after it has been joined.
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before


def test_an_error_in_a_parallel_call_leaves_the_next_one_whole() -> None:
    partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((8,), ("x",))).partition((500, 400))
    offsets = np.arange(partition.size)
    bad = offsets.copy()
    bad[-1] = -1
    for _ in range(3):
        with pytest.raises(IndexError, match="offsets"):
            partition.locate(bad)
        shards, local = partition.locate(offsets)
        assert (partition.global_offset(shards, local) == offsets).all()
