"""Logits of vLLM's own model, on a CPU, of files that its own loader of ranks' files has loaded.

Run with a folder, the sizes `tp,pp`, the tokens as JSON, and a file for the answer; vLLM's sources are on the path.
Stages and the ranks of each are processes with gloo, in vLLM's own groups. In place of its attention, which needs a
cache, is that of PyTorch over the whole sequence; all other layers are vLLM's, by their forms without kernels.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.interop._recording import LoneGroup
from shardwise.interop.vllm import _settings

from .families.adapters import prepare
from .worker import run_ranks

__all__ = ["main"]


class CausalAttention(torch.nn.Module):  # type: ignore[misc]
    """Attention of a sequence's tokens to themselves and those before, by groups of heads."""

    def __init__(self, heads: int, size: int, scale: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.scale = heads, num_kv_heads, size, scale

    def forward(self, *given: Any) -> Any:
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (one.view(-1, count, self.size).transpose(0, 1) for one, count in zip(given, counts, strict=True))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return found.transpose(0, 1).flatten(1)


def answered(rank: int, folder: str, sizes: tuple[int, int], tokens: list[list[int]], store: str) -> None:
    tp, pp = sizes
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.sequence import IntermediateTensors

    settings = _settings(folder, rank, (tp, pp, False))
    settings.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(settings), torch.no_grad():
        parallel_state.init_distributed_environment(tp * pp, rank, f"file://{store}", rank, "gloo")
        world = np.arange(tp * pp).reshape(pp, tp)
        for name, ranks in {"tp": world, "pp": world.T}.items():  # Without vLLM's queue of messages.
            own = parallel_state.init_model_parallel_group(ranks.tolist(), rank, "gloo", group_name=name)
            setattr(parallel_state, f"_{name.upper()}", own)
        for name in ("dp", "ep", "dcp", "pcp"):
            setattr(parallel_state, f"_{name.upper()}", LoneGroup(0, 1))
        model = initialize_model(settings).eval()
        for value in model.parameters():  # Nothing of it is there by chance.
            value.fill_(float("nan"))
        ShardedStateLoader(settings.load_config).load_weights(model, settings.model_config)
        process_weights_after_loading(model, settings.model_config, torch.device("cpu"))
        stage, logits = parallel_state.get_pp_group(), []
        for sequence in tokens:
            ids, given = torch.tensor(sequence), None
            if not stage.is_first_rank:
                names = ("hidden_states", "residual")
                given = {name: torch.empty(len(ids), settings.model_config.get_hidden_size()) for name in names}
                for value in given.values():
                    dist.recv(value, rank - tp)
            found = model(ids, torch.arange(len(ids)), given and IntermediateTensors(given))
            if stage.is_last_rank:
                logits.append(model.compute_logits(found))
            else:
                for value in found.tensors.values():
                    dist.send(value, rank + tp)
        if rank == tp * (pp - 1):  # The others of the last stage gave it theirs.
            np.save(f"{store}.npy", torch.stack(logits).numpy())
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, sizes: str, tokens: str, answer: str) -> None:
    tp, pp = map(int, sizes.split(","))
    prepare("vllm")
    layers = importlib.import_module("vllm.model_executor.layers.attention")
    layers.Attention = CausalAttention  # type: ignore[attr-defined]
    importlib.import_module("vllm.model_executor.models.llama")
    torch.set_num_threads(1)
    given = folder, (tp, pp), json.loads(tokens), answer.removesuffix(".npy")
    run_ranks(answered, [(rank, *given) for rank in range(tp * pp)], "fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
