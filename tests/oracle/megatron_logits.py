"""Logits of Megatron-Core's own model, on a CPU, of a folder that its own `dist_checkpointing.load` has loaded.

Run with a folder, the contents of a `config.json`, the sizes `tp,pp`, the tokens as JSON, and a file for the answer.
Layers are those of the specification without Transformer Engine, which loads the same checkpoints. Stages and the ranks
of each are processes with gloo. In place of a GPU: the current device, and random numbers, of which there are none.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

from .worker import run_ranks

__all__ = ["main"]

#: The rows of the vocabulary of a rank are a multiple of it.
ROWS = 128


def model_of(said: dict[str, Any], tp: int, pp: int) -> Any:
    config = TransformerConfig(
        num_layers=said["num_hidden_layers"],
        hidden_size=said["hidden_size"],
        num_attention_heads=said["num_attention_heads"],
        num_query_groups=said["num_key_value_heads"],
        kv_channels=said["head_dim"],
        ffn_hidden_size=said["intermediate_size"],
        layernorm_epsilon=said["rms_norm_eps"],
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=-(-said["vocab_size"] // (ROWS * tp)) * ROWS * tp,
        max_sequence_length=said["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=said["rope_theta"],
        share_embeddings_and_output_weights=said["tie_word_embeddings"],
    )


def answered(rank: int, folder: str, said: dict[str, Any], sizes: tuple[int, int], tokens: Any, store: str) -> None:
    tp, pp = sizes
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda own, *_, **__: own
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    dist.init_process_group("gloo", rank=rank, world_size=tp * pp, init_method=f"file://{store}")
    parallel_state.initialize_model_parallel(tp, pp)
    model = model_of(said, tp, pp).eval()
    wanted = model.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)})
    for value in model.parameters():  # Nothing of it is there by chance.
        value.data.fill_(float("nan"))
    assert any("_extra_state" in name for name in wanted)  # States of FP8, for which layers ask.
    loaded = dist_checkpointing.load({"model": wanted}, folder)["model"]
    model.load_state_dict(loaded)
    ids = torch.tensor(tokens)
    length = ids.shape[1]
    places = torch.arange(length).expand_as(ids)
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    stage = rank // tp
    with torch.no_grad():
        if stage:
            given = torch.empty(length, ids.shape[0], said["hidden_size"])
            dist.recv(given, rank - tp)
            model.set_input_tensor(given)
        found = model(ids, places, mask)
        if stage < pp - 1:
            dist.send(found.contiguous(), rank + tp)
        else:
            np.save(f"{store}.{rank % tp}.npy", found.numpy())
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, config: str, sizes: str, tokens: str, answer: str) -> None:
    tp, pp = map(int, sizes.split(","))
    given = folder, json.loads(config), (tp, pp), json.loads(tokens), f"{answer}.store"
    run_ranks(answered, [(rank, *given) for rank in range(tp * pp)])
    np.save(answer, np.concatenate([np.load(f"{answer}.store.{rank}.npy") for rank in range(tp)], -1))


if __name__ == "__main__":
    main(*sys.argv[1:])
