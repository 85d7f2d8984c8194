"""What every rank gets of a fused weight, from the engines' own code: a worker, see `worker`.

`SHARDWISE_ENGINE` says which engine the process is to ask, and so what must be installed beside PyTorch in the Python
that `SHARDWISE_TORCH_PYTHON` names: `transformers`, `megatron-core`, `deepspeed`, `vllm` or `sglang`, or nothing for
PyTorch itself.

A tensor's elements are its flat offsets. What stands in for an engine's surroundings is said where it is used; all that
cuts is theirs.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from . import engines_loaders
from .worker import serve

Answer = Any


def engine() -> str:
    return os.environ.get("SHARDWISE_ENGINE", "torch")


def version() -> str:
    import torch

    torch.set_num_threads(1)
    if engine() in engines_loaders.OWN:
        return engines_loaders.version(engine())
    needed = {
        "torch": "torch.distributed.tensor",
        "transformers": "transformers.distributed.sharding_utils",
        "megatron": "megatron.core.transformer.attention",
        "deepspeed": "deepspeed.module_inject.fusedqkv_utils",
    }
    importlib.import_module(needed[engine()])
    package = importlib.import_module("megatron.core" if engine() == "megatron" else engine())
    return str(package.__version__)


def answer(case: dict[str, Any]) -> Answer:
    try:
        return ANSWERS[case["what"]](case)
    except Exception as error:
        return ("raised", type(error).__name__, str(error))


def whole(shape: list[int]) -> Any:
    import torch

    return torch.arange(math.prod(shape)).reshape(shape)


def strided(case: dict[str, Any]) -> Answer:
    """`_split_tensor` of `Shard` and `_StridedShard`, over one mesh dim after the other."""
    from torch.distributed.tensor import placement_types as types

    tensors = [whole(case["shape"])]
    for size, (kind, *numbers) in zip(case["mesh_shape"], case["placements"], strict=True):
        if kind == "replicate":
            tensors = [tensor for tensor in tensors for _ in range(size)]
            continue
        made: Any = types._StridedShard(numbers[0], split_factor=numbers[1]) if kind == "strided" else types.Shard
        placement = made if kind == "strided" else made(numbers[0])
        tensors = [part for one in tensors for part in placement._split_tensor(one, size, with_padding=False)[0]]
    return [tensor.flatten().tolist() for tensor in tensors]


@functools.cache
def rank_mesh(size: int, rank: int) -> Any:
    """A mesh of one dim as a rank sees it; without a process group, which knows nothing but the rank here."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("tp",), _init_backend=False, _rank=rank)
    mesh.get_local_rank = lambda *_: rank
    return mesh


def transformers(case: dict[str, Any]) -> Answer:
    """A style's own `shard_param`, and what `DtensorShardOperation` reads of the checkpoint for it on every rank."""
    import torch
    from transformers.distributed.sharding_utils import DtensorShardOperation
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    name, tensor, ranks = case["parameter"], whole(case["shape"]), case["ranks"]
    module = torch.nn.Module()
    module.register_parameter(name, torch.nn.Parameter(torch.empty(case["shape"], device="meta")))
    ALL_PARALLEL_STYLES[case["style"]].shard_param(module, name, rank_mesh(ranks, 0))
    cut: Any = module._parameters[name]
    if not hasattr(cut, "placements"):
        return [tensor.flatten().tolist()] * ranks
    held = []
    for rank in range(ranks):
        # Equal meshes are one in PyTorch's caches, so what says which rank this is stands in for the parameter.
        own = SimpleNamespace(
            device_mesh=rank_mesh(ranks, rank), placements=cut.placements, ndim=cut.ndim, shape=cut.shape
        )
        held.append(DtensorShardOperation(own).shard_tensor(tensor).flatten().tolist())
    return held


def megatron_weight(case: dict[str, Any]) -> Answer:
    """`_initialize_affine_weight_cpu`, with which the parallel layers fill their part of a weight."""
    import torch
    from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

    rows, ranks = case["rows"], case["ranks"]
    held = []
    for rank in range(ranks):
        weight = torch.nn.Parameter(torch.empty(rows // ranks, 1))
        _initialize_affine_weight_cpu(
            weight,
            rows,
            1,
            rows // ranks,
            0,
            # Whole numbers below 2**24, which a float32 holds.
            lambda master: master.copy_(whole([rows, 1])),
            stride=case["stride"],
            rank=rank,
            world_size=ranks,
        )
        held.append([int(value) for value in weight.flatten().tolist()])
    return held


def megatron_used(case: dict[str, Any]) -> Answer:
    """The query, key and value rows that `SelfAttention.get_query_key_value_tensors` computes with on every rank.

    The ranks' activations stand for their rows of the weight, as `linear_qkv` gives them; the gather between ranks, and
    what the constructor of `Attention` takes from the configuration, are written here.
    """
    import torch
    from megatron.core.transformer import attention

    heads, groups, head_dim, ranks = (case[key] for key in ("heads", "groups", "head_dim", "ranks"))
    rows = torch.tensor(megatron_weight({"rows": (heads + 2 * groups) * head_dim, "stride": 1, "ranks": ranks}))
    few = groups < ranks
    used = []
    for rank in range(ranks):

        class Linear(torch.nn.Module):  # type: ignore[misc]
            def __init__(self, own: Any) -> None:
                super().__init__()
                self.own = own

            def forward(self, _: Any) -> Any:
                return self.own, None

        own = rows[rank].reshape(1, 1, -1)
        around = SimpleNamespace(
            linear_qkv=Linear(own),
            num_attention_heads_per_partition=heads // (groups if few else ranks),
            num_query_groups_per_partition=1 if few else groups // ranks,
            hidden_size_per_attention_head=head_dim,
            config=SimpleNamespace(num_query_groups=groups, test_mode=False),
            world_size=ranks,
            q_layernorm=None,
            k_layernorm=None,
        )
        attention.get_tensor_model_parallel_rank = functools.partial(int, rank)
        attention.all_gather_last_dim_from_tensor_parallel_region = lambda _: rows.reshape(1, 1, -1)
        tensors = attention.SelfAttention.get_query_key_value_tensors(around, own)
        used.append([tensor.flatten().tolist() for tensor in tensors])
    return used


def deepspeed(case: dict[str, Any]) -> Answer:
    """`prepare_tp_fused_qkvw`, which knows the form of a fused weight by the name of the module around it."""
    from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    meta = AutoTPMeta(**case["meta"])
    tensor, columns = whole(case["shape"]), case["shape"][1]
    parts = [prepare_tp_fused_qkvw(case["module"], tensor, case["ranks"], i, meta) for i in range(case["ranks"])]
    return [(part[:, 0] // columns).tolist() for part in parts]


ANSWERS: dict[str, Callable[[dict[str, Any]], Answer]] = {
    "strided": strided,
    "transformers": transformers,
    "megatron weight": megatron_weight,
    "megatron used": megatron_used,
    "deepspeed": deepspeed,
    "loaded": engines_loaders.loaded,
}

if __name__ == "__main__":
    serve(version, answer)
