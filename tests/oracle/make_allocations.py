"""Make `alloc_optimizers.json.gz`: what PyTorch allocates for small models, by optimizer and way to shard.

`python make_allocations.py FOLDER SEED [RANKS]` with a Python that has PyTorch; it imports nothing of ours. Ranks are
processes on the CPU. `tests.oracle.allocations` compares.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
MODELS = 4


def model_of(seed: int) -> nn.Sequential:
    draw = random.Random(seed)
    sizes = [draw.randint(2, 70) for _ in range(draw.randint(3, 5))]
    bias = draw.random() < 0.6
    return nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes)))


def sums(tensors: Any) -> dict[str, int]:
    """The bytes of tensors, and those of their storages, each once."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {one.untyped_storage().data_ptr() or id(one): one.untyped_storage().nbytes() for one in local}
    return {"bytes": sum(one.numel() * one.element_size() for one in local), "allocated": sum(storages.values())}


def wrapped(model: nn.Sequential, sharding: str) -> nn.Module:
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if sharding == "fsdp2":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=sharding == "fsdp1-orig", device_id=torch.device("cpu")
    )


def kept(model: nn.Sequential, sharding: str, name: str) -> dict[str, Any]:
    """The sums of one rank after a step; or why PyTorch does not do it."""
    inputs = torch.randn(4, model[0].in_features)
    try:
        outer = wrapped(model, sharding)
        optimizer = OPTIMIZERS[name](outer.parameters())
        outer(inputs).sum().backward()
        params: list[Any] = list(outer.parameters())
        if sharding.startswith("fsdp1"):
            params = [one._handle.flat_param for one in FullyShardedDataParallel.fsdp_modules(outer) if one._handle]
        grads = [one.grad if one.grad is not None else one._saved_grad_shard for one in params]
        before = {"param": sums(params), "grad": sums(grads)}
        optimizer.step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}"[:200]}
    states = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
    return {"sums": {**before, "optimizer": sums(states)}}


def run(rank: int, ranks: int, seed: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29713")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for number in range(MODELS):
        for sharding in ("ddp", "fsdp1", "fsdp1-orig", "fsdp2"):
            for name in OPTIMIZERS:
                torch.manual_seed(seed)
                model = model_of(seed + number)
                params = [
                    {"name": key, "shape": list(one.shape), "dtype": "float32"} for key, one in model.named_parameters()
                ]
                case = {"framework": sharding, "optimizer": name, "world": ranks, "params": params}
                results.put((rank, len(params), number, case, kept(model, sharding, name)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=run, args=(rank, ranks, seed, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    cases: dict[Any, Any] = {}
    for _ in range(MODELS * 4 * len(OPTIMIZERS) * ranks):
        rank, _, number, case, found = results.get()
        own = cases.setdefault((number, case["framework"], case["optimizer"]), {**case, "ranks": [None] * ranks})
        own["ranks"][rank] = found
    for process in processes:
        process.join()
    document = {"source": f"torch {torch.__version__}, CPU/gloo", "seed": seed, "cases": list(cases.values())}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alloc_optimizers.json.gz").write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))


if __name__ == "__main__":
    main()
