"""Megatron-Core's own loader on a folder of `torch_dist`: each of two ranks asks for its half of each tensor.

Run with a folder, the shapes, dtypes and cut dims of tensors as JSON, and a file for the answer, an archive of numpy's:
the tensors put together, under their keys, and `common` with what `common.pt` says.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, load, load_common_state_dict

from .worker import run_ranks

__all__ = ["main"]

WORLD = 2


def loaded(rank: int, folder: str, cuts: dict[str, Any], store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{store}")
    wanted = {}
    for key, (shape, dtype, dim) in cuts.items():
        own = [size // WORLD if at == dim else size for at, size in enumerate(shape)]
        data = torch.empty(own, dtype=getattr(torch, dtype))
        offsets = [] if dim is None else [(dim, rank, WORLD)]
        wanted[key] = ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=rank if dim is None else 0)
    found = load({"all": wanted}, folder, validate_access_integrity=False)["all"]
    arrays = {key: tensor.float().numpy() for key, tensor in found.items()}
    np.savez(f"{store}.{rank}.npz", **arrays)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, cuts: str, answer: str) -> None:
    said = json.loads(cuts)
    store = f"{answer}.store"
    run_ranks(loaded, [(rank, folder, said, store) for rank in range(WORLD)])
    ranks = [np.load(f"{store}.{rank}.npz") for rank in range(WORLD)]
    whole = {
        key: ranks[0][key] if dim is None else np.concatenate([each[key] for each in ranks], dim)
        for key, (_, _, dim) in said.items()
    }
    common = load_common_state_dict(folder)
    groups = common.get("optimizer", {"optimizer": {"param_groups": []}})["optimizer"]["param_groups"]
    layers = common["args"].num_layers if "args" in common else None
    text = json.dumps([common["iteration"], layers, [[g["lr"], g["wd_mult"], g["step"]] for g in groups]])
    np.savez(answer, **whole, common=np.array(text))  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main(*sys.argv[1:])
