"""What the installed PyTorch makes of placements and of saved chunks, without a process group.

Runs in a process of its own, in the Python that SHARDWISE_TORCH_PYTHON names: an interpreter, or a script that starts
one. Without it, in this Python. The standard library and torch are all that must be there, so it may be another
version, or a Python for another processor under an emulator. A case is a dict, of one of three kinds.

*What every rank holds*: "shape" and "mesh_shape", lists of int; "placements", one entry per mesh dim: `("replicate",)`,
`("partial",)`, `("shard", dim)` or `("strided", dim, split_factor)`. The answer is a dict of "shapes" and "offsets",
each with one list of int per rank, in row-major order of the mesh, as DTensor's calculator gives them when asked rank
by rank. With `"elements": True` it is also a dict of "elements": for each rank the offsets of the elements that it
holds, found by cutting a real tensor of them as `distribute_tensor` does where no rank sends.

*What to read of a checkpoint*: "saved" and "wanted", lists of chunks, each a pair of offsets and sizes. The answer is
the list of reads that the checkpoint planner gives for them: the number of the wanted chunk, that of the saved one,
where in the wanted chunk it goes, where in the saved one it comes from, and the sizes.

*What ops of DTensor compute*: "ranks", as many processes as that. The answer is a dict for each rank: "convolution",
the shape of `conv2d` of (2, 3, 8, 8) with a weight of 4 outputs, cut by them; "loss" and "gradient" of `mse_loss` of
0, 1, ... against zeros, cut, for each number of elements that is one of "sizes".

An answer may also be `("raised", the exception's type, its text)`; a PyTorch whose private functions are others than
those that this module knows raises, so that the comparison fails instead of testing nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import math
import os
import sys
import tempfile
from typing import Any

from tests.oracle.worker import Worker, serve

MODULE = "tests.oracle.torch_oracle"
VARIABLE = "SHARDWISE_TORCH_PYTHON"
PARAMETERS = ["global_shape", "mesh_shape", "my_coordinate", "placements"]


def missing() -> str | None:
    """Say why PyTorch cannot be asked, or None. If a Python is named, it is expected to answer."""
    if os.environ.get(VARIABLE) or importlib.util.find_spec("torch") is not None:
        return None
    return f"PyTorch is not installed (a build for the CPU is enough), and {VARIABLE} names no Python that has it"


def torch_worker() -> Worker:
    """Give the process that answers."""
    return Worker(MODULE, os.environ.get(VARIABLE) or sys.executable)


def version() -> str:
    import torch

    torch.set_num_threads(1)
    return str(torch.__version__)


def answer(case: dict[str, Any]) -> Any:
    try:
        if "ranks" in case:
            return computed(case["ranks"], case["sizes"])
        return reads(case["saved"], case["wanted"]) if "saved" in case else held(case)
    except Exception as error:
        return ("raised", type(error).__name__, str(error))


def held(case: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import _utils

    calculate = _utils._compute_local_shape_and_global_offset
    parameters = list(inspect.signature(calculate).parameters)
    if parameters[: len(PARAMETERS)] != PARAMETERS:
        raise RuntimeError(f"the calculator of PyTorch {version()} takes {parameters}; known are {PARAMETERS}")
    shape, sizes = tuple(case["shape"]), tuple(case["mesh_shape"])
    placements = [placement_of(entry) for entry in case["placements"]]
    coordinates = list(itertools.product(*map(range, sizes)))
    answers = [calculate(shape, sizes, list(coordinate), placements) for coordinate in coordinates]
    result = {
        "shapes": [list(map(int, local_shape)) for local_shape, _ in answers],
        "offsets": [list(map(int, offset)) for _, offset in answers],
    }
    if case.get("elements"):
        result["elements"] = elements(shape, sizes, placements)
    return result


def placement_of(entry: tuple[Any, ...]) -> Any:
    from torch.distributed.tensor import placement_types as types

    kind, *numbers = entry
    if kind == "strided":
        return types._StridedShard(numbers[0], split_factor=numbers[1])
    return {"replicate": types.Replicate, "partial": types.Partial, "shard": types.Shard}[kind](*numbers)


def elements(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> list[list[int]]:
    """Cut a tensor of all offsets over one mesh dim after the other; the tensors of all ranks, in row-major order."""
    import torch
    from torch.distributed.tensor import placement_types as types

    tensors = [torch.arange(math.prod(shape)).reshape(shape)]
    for size, placement in zip(sizes, placements, strict=True):
        if isinstance(placement, (types.Shard, types._StridedShard)):
            tensors = [
                part for tensor in tensors for part in placement._split_tensor(tensor, size, with_padding=False)[0]
            ]
        else:
            tensors = [tensor for tensor in tensors for _ in range(size)]
    return [tensor.flatten().tolist() for tensor in tensors]


def reads(saved: list[Any], wanted: list[Any]) -> list[tuple[int, int, list[int], list[int], list[int]]]:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunks(pairs: list[Any]) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pairs]

    stored = TensorStorageMetadata(TensorProperties(), torch.Size(()), chunks(saved))
    return [
        (
            item.dest_index.index,
            item.storage_index.index,
            list(item.dest_offsets),
            list(item.storage_offsets),
            list(item.lengths),
        )
        for item in create_read_items_for_chunk_list("tensor", stored, chunks(wanted))
    ]


def computed(ranks: int, sizes: list[int]) -> list[dict[str, Any]]:
    """Compute in processes that form a group; the answers of all ranks."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        with context.Pool(ranks) as pool:
            rank = functools.partial(compute, ranks, f"file://{folder}/group", sizes)
            found: list[dict[str, Any]] = pool.map(rank, range(ranks), chunksize=1)
    return found


def compute(ranks: int, group: str, sizes: list[int], rank: int) -> dict[str, Any]:
    import torch
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.nn import functional

    distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    image = distribute_tensor(torch.ones(2, 3, 8, 8), mesh, [Replicate()])
    weight = distribute_tensor(torch.ones(4, 3, 3, 3), mesh, [Shard(0)])
    convolution = functional.conv2d(image, weight, padding=1).full_tensor()
    found: dict[str, Any] = {"convolution": list(convolution.shape), "loss": {}, "gradient": {}}
    for size in sizes:
        given = distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)]).requires_grad_()
        loss = functional.mse_loss(given, distribute_tensor(torch.zeros(size), mesh, [Shard(0)]))
        loss.backward()
        found["loss"][size] = loss.full_tensor().item()
        found["gradient"][size] = given.grad.full_tensor().tolist()
    distributed.barrier()
    distributed.destroy_process_group()
    return found


# Only then, since a test run looks into every module of the tests for examples.
if __name__ == "__main__":
    serve(version, answer)
