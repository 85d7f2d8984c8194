"""Move a model's weights among processes of PyTorch with gloo, beside a bare all-to-all of the same bytes.

Run, with torch: `python benches/beside_gloo.py [--layers 4] [--scale 1] [--turns 7]`. Four trainers that cut dim 0 send
to four engines under tensor parallelism: the tensors of Llama-3-8B, of its first layers, each dim divided by `--scale`.
Four layers take 8 GB of memory. All-to-all sends as many bytes between each two processes, out of the same memory into
the same memory, and knows no tensors.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import time
from typing import Any

from beside_mooncake import llama

import shardwise as sw
from shardwise.deploy import Deployment, fsdp2
from shardwise.execute import ModelPlan
from shardwise.execute import torch as executor

TRAINERS = ENGINES = 4


def plan_of(layers: int, scale: int) -> ModelPlan:
    """From 4 devices that cut dim 0 to 4 others that cut what tensor parallelism cuts."""
    rules: dict[str, Any] = {"embed_tokens|lm_head|[qkv]_proj|(gate|up)_proj": ("tp", None)}
    rules |= {"o_proj|down_proj": (None, "tp"), "norm": (None,)}
    engine = Deployment([f"gpu:{i}" for i in range(ENGINES)], sw.DeviceMesh((ENGINES,), ("tp",)), rules)
    tensors = {name: (tuple(size // scale for size in shape), "bfloat16") for name, (shape, _) in llama(layers).items()}
    return sw.plan_model(fsdp2(TRAINERS), engine, tensors)


def process(rank: int, port: int, chosen: argparse.Namespace) -> None:
    """Take turns; the first process says what came of it."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=TRAINERS + ENGINES)
    plan = plan_of(chosen.layers, chosen.scale)
    label = list(plan.bytes_sent())[rank]
    program = plan.program(label, chosen.memory * 2**20)
    peers = program.descriptors.peers
    split = {True: [0] * len(peers), False: [0] * len(peers)}
    for message in program.messages:
        split[bool(message["sends"])][int(message["peer"])] += int(message["bytes"])
    shapes: dict[bool, dict[str, tuple[int, ...]]] = {True: {}, False: {}}
    for name in plan:
        for before, tiling in ((True, plan[name].src), (False, plan[name].dst)):
            if label in tiling.holders:
                shapes[before][name] = tiling.holder_shape(label)
    flat: dict[bool, Any] = {}
    tensors: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for before in (True, False):
        sizes = [2 * math.prod(shape) for shape in shapes[before].values()]
        flat[before] = torch.full((max(sum(sizes), sum(split[before])),), int(before), dtype=torch.uint8)
        for (name, shape), one in zip(
            shapes[before].items(), torch.split(flat[before][: sum(sizes)], sizes), strict=True
        ):
            tensors[before][name] = one.view(torch.bfloat16).reshape(shape)
    sent, received = flat[True][: sum(split[True])], flat[False][: sum(split[False])]

    def bare() -> None:
        dist.all_to_all_single(received, sent, split[False], split[True])

    works = {"the plan": lambda: executor.run(program, tensors[True], tensors[False]), "bare all-to-all": bare}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(chosen.turns + 1):
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            if turn:  # The first turn touches the memory.
                taken[name].append(time.perf_counter() - start)
    flat[False].zero_()
    works["the plan"]()
    assert all(bool((tensor.view(torch.uint8) == 1).all()) for tensor in tensors[False].values())
    if rank == 0:
        ours, theirs = taken.values()
        moved = sum(plan.bytes_received().values())
        print(f"{len(plan)} tensors, {moved / 2**20:,.0f} MiB among {len(peers)} processes, {chosen.turns} turns")
        for name, seconds in taken.items():
            print(f"{name:16} {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
        ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        print(f"as fast as all-to-all: {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    import torch.multiprocessing as multiprocessing

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="how many of the 32")
    parser.add_argument("--scale", type=int, default=1, help="by what each dim is divided")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--memory", type=int, default=256, help="MiB of a process's messages in a round")
    chosen = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    multiprocessing.spawn(process, (port, chosen), TRAINERS + ENGINES)


if __name__ == "__main__":
    main()
