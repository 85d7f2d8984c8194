"""A tensor cut by rows among MPI ranks, each of which wants a block of columns.

pip install 'shardwise[mpi]' mpich
mpirun -n 4 python examples/mpi_ranks.py
"""

import numpy as np
from mpi4py import MPI

import shardwise as sw
from shardwise.execute import mpi

SHAPE = (1000, 640)

comm = MPI.COMM_WORLD
rank, ranks = comm.Get_rank(), comm.Get_size()
mesh = sw.DeviceMesh((ranks,), ("rank",))
rows = sw.TensorLayout(("rank", None), mesh).partition(SHAPE, "balanced")
columns = sw.TensorLayout((None, "rank"), mesh).partition(SHAPE, "balanced")
plan = sw.plan_reshard(rows, columns)

# Element (i, j) is 640 * i + j, so that each rank can make its own rows, and check its columns.
first, last = rows.box(mesh.device(rank))[0].start, rows.box(mesh.device(rank))[0].stop
mine = np.arange(first * SHAPE[1], last * SHAPE[1], dtype=np.float64).reshape(-1, SHAPE[1])

got = mpi.run(plan, comm, mine, memory=1 << 20)

wanted = columns.box(mesh.device(rank))[1]
expected = np.arange(SHAPE[0])[:, None] * SHAPE[1] + np.arange(wanted.start, wanted.stop)
wrong = comm.allreduce(int(got is None or not np.array_equal(got, expected)))
if rank == 0:
    sent = plan.bytes_sent(mine.dtype).sum()
    print(f"{ranks} ranks sent {sent} bytes to each other;", "wrong" if wrong else "every rank has its columns")
raise SystemExit(wrong)
