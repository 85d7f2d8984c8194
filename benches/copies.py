"""The copy kernels by processor time, which a machine that others use as well does not spoil much.

Run: `python benches/copies.py [--devices 8,64,512] [--turns 7]`, a minute and 4 GiB of memory.

Rows to columns of 1 GiB and back, with ordinary stores, with streaming ones and with those that a run chooses, beside
copying the tensor with two threads; a small reshard; the check of many views of one array; short boxes of few rows and
of more. The constants that these figures set are in `rust/core/copy/tuning.rs`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from machine import load, machine
from tensors import SIDE, SIZE, rows_to_columns

import shardwise as sw

WAYS = {"ordinary": False, "streaming": True, "chosen": None}


def processor_time(work: Callable[[], Any], times: int = 1) -> float:
    """What one call takes of the processors, in milliseconds, shared between two threads."""
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) * 500 / times


def column(devices: int, spec: tuple[Any, ...], prefix: str, shape: tuple[int, int] = (SIDE, SIDE)) -> sw.Partition:
    """The tensor of the benchmark, or one of another shape, on devices of its own."""
    mesh = sw.DeviceMesh((devices,), ("x",), [f"{prefix}:{i}" for i in range(devices)])
    return sw.TensorLayout(spec, mesh).partition(shape)


def compare(devices: int, turns: int) -> None:
    """One size: each turn asks everybody once; medians of the ratios, and the best."""
    work = rows_to_columns(devices)
    there = sw.plan_reshard(column(devices, ("x", None), "a"), column(devices, (None, "x"), "b"))
    back = sw.plan_reshard(column(devices, (None, "x"), "b"), column(devices, ("x", None), "a"))
    target, middle = np.zeros_like(work.array), SIDE // 2
    pool = ThreadPoolExecutor(2)
    outputs = list(range(devices))

    def memcpy() -> None:
        array = work.array
        list(pool.map(np.copyto, (target[:middle], target[middle:]), (array[:middle], array[middle:])))

    works: dict[str, Callable[[], Any]] = {"memcpy": memcpy}
    for way, streaming in WAYS.items():
        works[f"to columns, {way}"] = lambda s=streaming: there.core.run(work.shards, work.out, outputs, None, s)  # type: ignore[misc]
        works[f"to rows, {way}"] = lambda s=streaming: back.core.run(work.out, work.shards, outputs, None, s)  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, call in works.items():
            taken[name].append(processor_time(call))
    print(f"{SIZE}, {devices} shards (load {load()}): memcpy {statistics.median(taken['memcpy']):.0f} ms")
    for name, times in taken.items():
        ratios = [a / b for a, b in zip(taken["memcpy"], times, strict=True)]
        print(
            f"  {name:24} {statistics.median(times):6.1f} ms {statistics.median(ratios):5.2f}x, best {max(ratios):.2f}x"
        )


def small() -> None:
    """One MiB over four devices, into arrays that are there."""
    mesh, other = (sw.DeviceMesh((4,), ("x",), [f"{kind}:{i}" for i in range(4)]) for kind in ("cpu", "gpu"))
    src = sw.TensorLayout(("x", None), mesh).partition((512, 512))
    dst = sw.TensorLayout((None, "x"), other).partition((512, 512))
    array = np.ones((512, 512), np.float32)
    shards = [view.copy() for view in src.views(array)]
    out = [np.empty(dst.shard_shape(device), np.float32) for device in other.devices]
    plan = sw.plan_reshard(src, dst)
    least, copying = (min(_clock(call) for _ in range(2000)) for call in (lambda: plan.run(shards, out), array.copy))
    print(f"1 MiB, 4 devices: {least * 1e6:.1f} us at least; copying it: {copying * 1e6:.1f} us")


def short_boxes(devices: int = 512) -> None:
    """Boxes of so many rows, among so many devices that they are too many to be listed."""
    for rows in (1, 2, 4, 8, 16, 32):
        shape = (rows * devices, 16 * devices)
        src, dst = column(devices, ("x", None), "a", shape), column(devices, (None, "x"), "b", shape)
        shards, out = ([view.copy() for view in end.views(np.ones(shape, np.float32))] for end in (src, dst))
        there, back = sw.plan_reshard(src, dst), sw.plan_reshard(dst, src)
        taken = [
            min(processor_time(call) for _ in range(5))
            for call in (lambda: there.run(shards, out), lambda: back.run(out, shards))  # noqa: B023
        ]
        print(f"{devices} x {devices} boxes of {rows} x 16: to columns {taken[0]:.1f} ms, to rows {taken[1]:.1f} ms")


def _clock(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def views() -> None:
    """A reshard into 16,000 column views of one array."""
    count = 16_000
    mesh = sw.DeviceMesh((count,), ("x",))
    dst = sw.TensorLayout((None, "x"), mesh).partition((16, count))
    src = sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("y",), ["one"])).partition((16, count))
    plan, whole = sw.plan_reshard(src, dst), np.empty((16, count))
    out = dst.views(whole)
    print(f"{count:,} views of one array: {processor_time(lambda: plan.run([np.ones((16, count))], out)) * 2:.0f} ms")


def main() -> None:
    """Everything, or some sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,64,512", help="how many shards, with commas between")
    parser.add_argument("--turns", type=int, default=7)
    chosen = parser.parse_args()
    print(machine())
    small()
    views()
    short_boxes()
    for devices in map(int, filter(None, chosen.devices.split(","))):
        compare(devices, chosen.turns)


if __name__ == "__main__":
    main()
