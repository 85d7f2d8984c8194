"""A tensor cut by rows among PyTorch processes, resharded with only `torch.distributed`'s send and receive.

    pip install torch                      # a CPU build is enough
    python examples/torch_send_receive.py  # starts four processes, which communicate by gloo

What a process does is its program: data of shardwise, carried out by two functions of a few lines. `send` and `recv`
wait for each other here; the order of the programs is such that nobody waits in a circle.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw

RANKS = 4
SHAPE = (1000, 640)


def work(rank: int, meeting: str) -> None:
    """Reshard the tensor as one of the processes, and check the resulting columns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    mesh = sw.DeviceMesh((RANKS,), ("rank",), devices=range(RANKS))  # a device's label is its rank
    rows = sw.TensorLayout(("rank", None), mesh).partition(SHAPE, "balanced")
    columns = sw.TensorLayout((None, "rank"), mesh).partition(SHAPE, "balanced")
    program = sw.plan_reshard(rows, columns).program(rank)

    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    mine = whole[rows.box(rank)].clone()
    out = torch.empty(columns.shard_shape(rank))

    def send(peer: int, tag: int, values: np.ndarray) -> None:
        dist.send(torch.from_numpy(np.ascontiguousarray(values)), peer, tag=tag)

    def receive(peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        values = torch.from_numpy(np.empty(shape, dtype))
        dist.recv(values, peer, tag=tag)
        return values.numpy()

    program.run(mine.numpy(), out.numpy(), send, receive)  # views of the tensors' memory

    assert torch.equal(out, whole[columns.box(rank)])
    dist.barrier()
    if rank == 0:
        print(f"{RANKS} processes: every one has its columns")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder, "meeting")),), RANKS)
