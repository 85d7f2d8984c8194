"""Shows that long calls release the interpreter's lock: two threads, a core each, take half the time of one doing both.

Each thread is bound to one core, so that a call uses no other and what is gained is gained by the threads. The ratio is
one thread's time for two calls over that of two threads for one call each, in turns: 2 is perfect, 1 is a lock held.

    python benches/lock.py
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import shardwise as sw

TURNS = 9


def calls() -> dict[str, Callable[[], Any]]:
    """Calls of some ten milliseconds and more."""
    mesh = sw.DeviceMesh((1 << 18, 4), ("x", "y"))
    many = sw.TensorLayout((("y", "x"), None), mesh).partition((3 << 20, 5), "chunk")
    offsets = np.arange(1 << 21)
    ids, local = many.locate(offsets)
    line = sw.DeviceMesh((16,), ("x",))
    rows, columns = (sw.TensorLayout(axes, line).partition((1 << 14, 256)) for axes in (("x", None), (None, "x")))
    plan, shards = sw.plan_reshard(rows, columns), [np.zeros((1 << 10, 256)) for _ in range(16)]
    sharded = sw.ShardedArray(rows, shards)
    wide = sw.DeviceMesh((1 << 16,), ("x",))
    ceil, balanced = (
        sw.TensorLayout(("x",), wide).partition((7 * 2**16 + 1,), "ceil"),
        sw.TensorLayout(("x",), wide).partition((7 * 2**16 + 1,), "balanced"),
    )
    return {
        "locate": lambda: many.locate(offsets),
        "global_offset": lambda: many.global_offset(ids, local),
        "boxes of 2**20 devices": many.boxes,
        "plan": lambda: sw.plan_reshard(ceil, balanced),
        "run": lambda: plan.run(shards),
        "gather": lambda: sw.array.gather(sharded),
    }


def on_core(core: int, work: Callable[[], Any]) -> threading.Thread:
    """A thread that does the work on one core."""

    def bound() -> None:
        os.sched_setaffinity(0, {core})
        work()

    return threading.Thread(target=bound)


def timed(*threads: threading.Thread) -> float:
    """The seconds until all have ended."""
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    print(f"{'call':24} {'one thread, both':>17} {'two threads':>12} {'ratio':>6}   (medians of {TURNS} turns)")
    for name, call in calls().items():
        call()

        def twice(call: Callable[[], Any] = call) -> None:
            call()
            call()

        pairs = [
            (timed(on_core(cores[0], twice)), timed(*(on_core(core, call) for core in cores))) for _ in range(TURNS)
        ]
        one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:24} {one * 1e3:14.1f} ms {two * 1e3:9.1f} ms {ratio:6.2f}")


if __name__ == "__main__":
    main()
