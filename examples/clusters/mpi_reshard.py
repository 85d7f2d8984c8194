"""Cut a checkpoint for 4 devices with the processes of an MPI job, which see the same files.

    mpiexec -n 4 python -m mpi4py.futures examples/clusters/mpi_reshard.py [SRC DST]

The first process gives out the tasks, the others run them. Without arguments: a small checkpoint of random numbers.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from mpi4py.futures import MPIPoolExecutor

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
        with MPIPoolExecutor() as executor:
            report = sw.reshard_checkpoint(src, dst, rules, executor=executor)
        print(report)
        print(sw.diff_checkpoints(src, dst) or "the same tensors")


if __name__ == "__main__":
    main(sys.argv[1:])
