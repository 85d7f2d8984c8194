"""Prints what Megatron itself calls the tensors of small models in a distributed checkpoint, with their dims, as JSON.

Run by tests/store/rewritten/test_engine_names.py, where Megatron is installed. It needs a process group, which is
of this process alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from .engines import EXPERTS, LAYERS

#: What all have that Llama has.
LLAMA: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 24,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "use_cpu_initialization": True,
}
GPT2 = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "normalization": "LayerNorm",
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mixtral": {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 24, "moe_router_topk": 2},
}


def dims_of(value: Any) -> dict[str, int]:
    """The dims of each tensor in a state dict, by the name that it has in a checkpoint."""
    if isinstance(value, ShardedTensorFactory):
        return dims_of(value.build())
    if isinstance(value, ShardedTensor):
        return {value.key: len(value.global_shape)}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {name: dims for part in parts for name, dims in dims_of(part).items()}


def main() -> None:
    """Make each model, and ask it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "group").as_uri()
        torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        found = {}
        for model, extra in MODELS.items():
            config = TransformerConfig(**{**LLAMA, **extra})
            spec = get_gpt_layer_local_spec(
                num_experts=config.num_moe_experts,
                moe_grouped_gemm=False,
                qk_layernorm=config.qk_layernorm,
                normalization=config.normalization,
            )
            made = GPTModel(
                config,
                spec,
                vocab_size=128,
                max_sequence_length=8,
                position_embedding_type="learned_absolute" if model == "gpt2" else "rope",
                share_embeddings_and_output_weights=model == "gpt2",
            )
            found[model] = dims_of(made.sharded_state_dict())
        print(json.dumps(found))


if __name__ == "__main__":
    main()
