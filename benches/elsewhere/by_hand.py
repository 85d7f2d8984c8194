"""A Llama cut for 4 ranks, again for 8, merged, verified and compared, with safetensors and PyTorch.

Run: python by_hand.py model.safetensors WORK. It takes memory for the largest file; what it was killed at begins anew.
"""

# mypy: ignore-errors

import hashlib
import json
import re
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DIMS = {r"(q|k|v|gate|up)_proj\.weight$|(embed_tokens|lm_head)\.weight$": 0, r"(o|down)_proj\.weight$": 1}


def dim_of(name):
    return next((dim for pattern, dim in DIMS.items() if re.search(pattern, name)), None)


def write(folder, ranks):
    """A file for each rank and a manifest of digests, under another name until all is there."""
    made = folder.with_name(folder.name + ".tmp")
    made.mkdir()
    digests = {}
    for rank, tensors in enumerate(ranks):
        path = made / f"rank{rank}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (made / "manifest.json").write_text(json.dumps(digests))
    made.rename(folder)


def whole(files, name):
    """A tensor of all ranks' files; what is in each of them must be the same."""
    shards, dim = [file.get_tensor(name) for file in files], dim_of(name)
    if dim is not None:
        return torch.cat(shards, dim)
    if not all(torch.equal(shard.view(torch.uint8), shards[0].view(torch.uint8)) for shard in shards):
        raise ValueError(f"{name} differs between ranks")
    return shards[0]


def reshard(sources, folder, ways):
    files = [safe_open(path, "pt") for path in sources]

    def rank_of(rank):
        tensors = {}
        for name in files[0].keys():  # noqa: SIM118
            tensor, dim = whole(files, name), dim_of(name)
            if dim is not None and tensor.shape[dim] % ways:
                raise ValueError(f"{name}: dim {dim} of {tuple(tensor.shape)} is not cut by {ways}")
            tensors[name] = tensor if dim is None else tensor.chunk(ways, dim)[rank].contiguous()
        return tensors

    write(folder, map(rank_of, range(ways)))
    verify(folder)


def verify(folder):
    for name, digest in json.loads((folder / "manifest.json").read_text()).items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{folder / name} is damaged")


def compare(one, other):
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        if set(first.keys()) != set(second.keys()):
            raise ValueError("other names")
        for name in first.keys():  # noqa: SIM118
            a, b = first.get_tensor(name), second.get_tensor(name)
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise ValueError(f"{name} differs")


model, work = map(Path, sys.argv[1:])
reshard([model], work / "for-4", 4)
reshard([work / "for-4" / f"rank{rank}.safetensors" for rank in range(4)], work / "for-8", 8)
reshard([work / "for-8" / f"rank{rank}.safetensors" for rank in range(8)], work / "merged", 1)
compare(model, work / "merged" / "rank0.safetensors")
