"""Cut a checkpoint for 4 devices on a Dask cluster, whose workers see the same files.

    python examples/clusters/dask_reshard.py [SRC DST [SCHEDULER]]

Without arguments: a small checkpoint of random numbers, on two worker processes of this machine.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from dask.distributed import Client, LocalCluster

import shardwise as sw


def main(arguments: list[str]) -> None:
    """Reshard, and compare the new checkpoint with the old one."""
    rules = sw.LayoutMap(sw.DeviceMesh((4,), ("model",)))
    rules[r"\.weight$"] = (None, "model")
    with tempfile.TemporaryDirectory() as folder:
        src, dst = arguments[:2] if arguments else (Path(folder, "small.safetensors"), Path(folder, "for-4"))
        if not arguments:
            rng = np.random.default_rng(0)
            sw.save_checkpoint(src, {f"{i}.weight": rng.standard_normal((512, 2048), "f4") for i in range(8)})
        cluster = (
            arguments[2]
            if len(arguments) > 2
            else LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
        )
        with Client(cluster) as client:
            report = sw.reshard_checkpoint(src, dst, rules, executor=client.get_executor())
        print(report)
        print(sw.diff_checkpoints(src, dst) or "the same tensors")


if __name__ == "__main__":
    main(sys.argv[1:])
