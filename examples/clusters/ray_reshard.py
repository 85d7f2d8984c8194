"""Cut a checkpoint for 4 devices on a Ray cluster, whose nodes see the same files.

    python examples/clusters/ray_reshard.py [SRC DST [ADDRESS]]

Without arguments: a small checkpoint of random numbers, on two processes of this machine.
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import ray

import shardwise as sw


class RayExecutor(Executor):
    """All that shardwise needs from Ray: a function is a task of one core, and its result a future."""

    def __init__(self) -> None:
        self.num_workers = int(ray.cluster_resources()["CPU"])
        self._call = ray.remote(num_cpus=1)(lambda fn, args, kwargs: fn(*args, **kwargs))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Give a function to Ray."""
        return self._call.remote(fn, args, kwargs).future()


def main(arguments: list[str]) -> None:
    """Reshard, and compare the new checkpoint with the old one."""
    rules = sw.LayoutMap(sw.DeviceMesh((4,), ("model",)))
    rules[r"\.weight$"] = (None, "model")
    if len(arguments) > 2:
        ray.init(arguments[2])
    else:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        src, dst = arguments[:2] if arguments else (Path(folder, "small.safetensors"), Path(folder, "for-4"))
        if not arguments:
            rng = np.random.default_rng(0)
            sw.save_checkpoint(src, {f"{i}.weight": rng.standard_normal((512, 2048), "f4") for i in range(8)})
        report = sw.reshard_checkpoint(src, dst, rules, executor=RayExecutor())
        print(report)
        print(sw.diff_checkpoints(src, dst) or "the same tensors")


if __name__ == "__main__":
    main(sys.argv[1:])
