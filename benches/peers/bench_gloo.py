"""A model's weights among processes of PyTorch with gloo, beside a bare all-to-all of the same bytes.

Four trainers that cut dim 0 send to four engines under tensor parallelism. All-to-all sends as many bytes between each
two processes, out of the same memory into the same memory, and knows no tensors. Llama-3-8B's first two layers take
6 GB of memory; all of its tensors go with each dim divided by four.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from figures import Row, at_most_times, quantity
from models import llama
from part import QUICK, main

import shardwise as sw
from shardwise.deploy import Deployment, fsdp2
from shardwise.execute import torch as executor
from shardwise.reshard import ModelPlan

TRAINERS = ENGINES = 4
TURNS = 2 if QUICK else 15
#: Bytes of a process's messages in a round.
MEMORY = 256 * 2**20


class Model(NamedTuple):
    """What is moved: the first layers of Llama-3-8B, each dim divided by a number."""

    layers: int
    divided: int


class Taken(NamedTuple):
    """What the first process says: tensors, bytes, and the seconds of the turns of both."""

    tensors: int
    size: int
    ours: list[float]
    theirs: list[float]


def plan_of(model: Model) -> ModelPlan:
    """From 4 devices that cut dim 0 to 4 others that cut what tensor parallelism cuts."""
    rules: dict[str, Any] = {"embed_tokens|lm_head|[qkv]_proj|(gate|up)_proj": ("tp", None)}
    rules |= {"o_proj|down_proj": (None, "tp"), "norm": (None,)}
    engine = Deployment([f"gpu:{i}" for i in range(ENGINES)], sw.DeviceMesh((ENGINES,), ("tp",)), rules)
    shapes = {name: shape for name, (shape, _) in llama(model.layers).items()}
    tensors = {name: (tuple(size // model.divided for size in shape), "bfloat16") for name, shape in shapes.items()}
    return sw.plan_model(fsdp2(TRAINERS), engine, tensors)


def process(rank: int, port: int, model: Model, said: Any) -> None:
    """Take turns; the first process says what came of it."""
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=TRAINERS + ENGINES)
    plan = plan_of(model)
    label = list(plan.bytes_sent())[rank]
    program = plan.program(label, MEMORY)
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
    for turn in range(TURNS + 1):
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
        said.put(Taken(len(plan), sum(plan.bytes_received().values()), *taken.values()))
    dist.destroy_process_group()


def compared(model: Model) -> Taken:
    """Start the processes, and hear what the first of them says."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    said = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(process, (port, model, said), TRAINERS + ENGINES)
    taken: Taken = said.get()
    return taken


def rows() -> Iterator[Row]:
    for model in (Model(1, 16),) if QUICK else (Model(2, 1), Model(32, 4)):
        tensors, size, ours, theirs = compared(model)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        shapes = "Llama-3-8B's shapes" if model.divided == 1 else f"Llama-3-8B's, each dim over {model.divided}"
        yield Row(
            f"{shapes}: {tensors} tensors, {quantity(size, 'B')} from {TRAINERS} to {ENGINES} processes",
            "gloo's bare all-to-all",
            statistics.median(ours),
            statistics.median(theirs),
            least=min(ratios),
            greatest=max(ratios),
            goal=at_most_times(1.25),
        )


if __name__ == "__main__":
    main(rows)
