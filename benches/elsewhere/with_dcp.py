"""The same with PyTorch's distributed checkpoints: DTensors on a mesh of so many processes, saved, loaded on another.

Run, each after the other: torchrun --nproc-per-node 4 with_dcp.py cut model.safetensors WORK/for-4, then
torchrun --nproc-per-node 8 with_dcp.py again WORK/for-4 WORK/for-8, and python with_dcp.py merge WORK/for-8
WORK/merged.safetensors model.safetensors. It takes memory for the model. PyTorch compares no digest of what it loads,
so that damage is found by the comparison with the original only.
"""

# mypy: ignore-errors

import re
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

DIMS = {r"(q|k|v|gate|up)_proj\.weight$|(embed_tokens|lm_head)\.weight$": 0, r"(o|down)_proj\.weight$": 1}


def placements(name, shape, ways):
    dim = next((dim for pattern, dim in DIMS.items() if re.search(pattern, name)), None)
    if dim is not None and shape[dim] % ways:
        raise ValueError(f"{name}: dim {dim} of {tuple(shape)} is not cut by {ways}")
    return [Replicate() if dim is None else Shard(dim)]


def cut(source, target):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with safe_open(source, "pt") as file:
        state = {}
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            state[name] = distribute_tensor(tensor, mesh, placements(name, tensor.shape, mesh.size()))
        dcp.save(state, checkpoint_id=target)


def again(source, target):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, said in dcp.FileSystemReader(source).read_metadata().state_dict_metadata.items():
        cuts = placements(name, said.size, mesh.size())
        state[name] = zeros(said.size, dtype=said.properties.dtype, device_mesh=mesh, placements=cuts)
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)


def merge(source, target, original):
    dcp_to_torch_save(source, f"{target}.pt")
    merged, model = torch.load(f"{target}.pt"), load_file(original)
    save_file(merged, target, {"format": "pt"})
    if set(merged) != set(model):
        raise ValueError("other names")
    for name, tensor in model.items():
        other = merged[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            raise ValueError(f"{name} differs")
        if not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            raise ValueError(f"{name} differs")


if sys.argv[1] == "merge":
    merge(*sys.argv[2:])
else:
    dist.init_process_group("gloo")
    {"cut": cut, "again": again}[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
