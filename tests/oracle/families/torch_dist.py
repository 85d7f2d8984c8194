"""What Megatron-Core itself saves of DeepSeek-V3 as `torch_dist`, filled as mbridge fills it.

`python -m tests.oracle.families.torch_dist`, in an environment with Megatron-Core, mbridge, torch and transformers. A
`GPTModel` is made on the CPU, with the layers that need no Transformer Engine; its `sharded_state_dict` says the names,
the shapes and where each parameter lies in them. Three of these norms have another name than with Transformer Engine,
whose names mbridge knows and the rules have.
"""

from __future__ import annotations

import importlib
import os
import re
import types
import warnings
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from . import vllm_loads  # noqa: E402
from .models import FAMILIES, elements, read, write  # noqa: E402

FAMILY, FURTHER = "deepseek-v3", "deepseek-v3-mtp"
#: The names of the norms with Transformer Engine; the last is that of layers without experts.
NORMS = {
    r"\.(q|kv)_layernorm\.weight$": r".linear_\1_up_proj.layer_norm_weight",
    r"\.pre_mlp_layernorm\.weight$": ".mlp.linear_fc1.layer_norm_weight",
}
#: The only number of layers for which mbridge has the layers that predict further tokens.
MBRIDGE_LAYERS = 61


def padded(words: int) -> int:
    """The rows of a vocabulary for one rank."""
    return -(-words // 128) * 128


def model_of(config: dict[str, Any]) -> Any:
    """Megatron-Core's model, with norms and linear layers of its own, and a layer that predicts further tokens."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.identity_op import IdentityOp

    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    sizes = MLATransformerConfig(
        num_layers=layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        multi_latent_attention=True,
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        num_moe_experts=config["n_routed_experts"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"] * config["n_shared_experts"],
        moe_layer_freq=[0] * dense + [1] * (layers - dense),
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_token_dispatcher_type="allgather",
        mtp_num_layers=1,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        rope_type="rope",
    )
    spec = get_gpt_decoder_block_spec(sizes, use_transformer_engine=False)
    for one in spec.layer_specs:
        one.submodules.self_attention.submodules.core_attention = IdentityOp  # It has no weights.
    return GPTModel(
        sizes,
        spec,
        vocab_size=padded(config["vocab_size"]),
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(sizes, spec, use_transformer_engine=False),
    )


def with_further(said: dict[str, Any]) -> dict[str, Any]:
    """The model with the layer that transformers leaves out, named as in DeepSeek's own files and listed by mbridge."""
    layers, hidden = said["config"]["num_hidden_layers"], said["config"]["hidden_size"]
    before, after = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors = dict(said["tensors"])
    tensors |= {name.replace(before, after): shape for name, shape in tensors.items() if name.startswith(before)}
    tensors |= {f"{after}{norm}.weight": [hidden] for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{after}eh_proj.weight"] = [hidden, 2 * hidden]
    same = {
        f"{after}embed_tokens.weight": "model.embed_tokens.weight",
        f"{after}shared_head.head.weight": "lm_head.weight",
    }
    tensors |= {copy: tensors[name] for copy, name in same.items()}
    return {"class": said["class"], "config": said["config"], "tensors": tensors, "same": same, "engines": {}}


def named(name: str, dense: int) -> str:
    """The name with Transformer Engine of what has this name without."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    for pattern, with_engine in NORMS.items():
        if "pre_mlp" not in pattern or (layer and int(layer[1]) < dense):
            name = re.sub(pattern, with_engine, name)
    return name


def bridge_of(config: dict[str, Any]) -> Any:
    """mbridge's bridge, which is asked for names and orders only."""
    kind = importlib.import_module("mbridge.models.deepseek_v3").DeepseekV3Bridge
    bridge = kind.__new__(kind)
    bridge.config = types.SimpleNamespace(mtp_num_layers=1, num_layers=MBRIDGE_LAYERS)
    bridge.hf_config = types.SimpleNamespace(**config)
    bridge.dtype, bridge.make_vocab_size_divisible_by = None, 128
    bridge.vocab_size, bridge.padded_vocab_size = config["vocab_size"], padded(config["vocab_size"])
    return bridge


def fill(model: Any, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Give the model the values that mbridge gives it."""
    bridge = bridge_of(config)
    for name, value in model.state_dict(keep_vars=True).items():
        if value is None or name.endswith("_extra_state") or "tokens_per_expert" in name:
            continue
        known = named(name, config["first_k_dense_replace"])
        known = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", known)
        stored = bridge._weight_name_mapping_mcore_to_hf(known)
        stored = [one.replace(f".{MBRIDGE_LAYERS}.", f".{config['num_hidden_layers']}.") for one in stored]
        with torch.no_grad():
            made = bridge._weight_to_mcore_format(known, [tensors[one] for one in stored])
            assert made.shape == value.shape, (name, made.shape, value.shape)
            value.copy_(made)


def saved(model: Any, dense: int) -> dict[str, Any]:
    """The whole tensors that `sharded_state_dict` says, put together from where it says that their parts are."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    whole: dict[str, Any] = {}
    for one in model.sharded_state_dict().values():
        for part in _listed(one.build()) if isinstance(one, ShardedTensorFactory) else [one]:
            if not isinstance(part, ShardedTensor):
                continue
            name = named(part.key, dense)
            held = whole.setdefault(name, torch.full(part.global_shape, -1.0))
            data = part.data.reshape(part.local_shape)
            lead = len(part.global_shape) - data.ndim
            ends = [at + size for at, size in zip(part.global_offset[lead:], data.shape, strict=True)]
            place = (*part.global_offset[:lead], *map(slice, part.global_offset[lead:], ends))
            held[place] = data
    return {name: value.to(torch.int32).numpy() for name, value in whole.items()}


def _listed(built: Any) -> list[Any]:
    return list(built.values()) if isinstance(built, dict) else list(built)


def start() -> None:
    """Have Megatron-Core in one process, and no GPU."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29571"))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    torch.cuda.current_device = lambda: "cpu"
    import megatron.core.transformer.multi_latent_attention as attention
    from megatron.core import parallel_state

    if not isinstance(attention.TELinear, type):  # Transformer Engine is not there.
        attention.TELinear = types.SimpleNamespace
    parallel_state.initialize_model_parallel()


def main() -> None:
    """Ask for each model."""
    start()
    of = f"Megatron-Core {version('megatron-core')}, mbridge {version('mbridge')}: GPTModel.sharded_state_dict"
    for size in range(len(FAMILIES[FAMILY][2])):
        said, name = with_further(read(f"{FAMILY}-{size}")), f"{FURTHER}-{size}"
        config = said["config"]
        tensors = {one: torch.from_numpy(value).float() for one, value in elements(said).items()}
        model = model_of(config)
        fill(model, config, tensors)
        held = saved(model, config["first_k_dense_replace"])
        said["engines"]["torch_dist"] = {
            "of": of,
            "ranks": {"1": [{one: vllm_loads.said_of(value) for one, value in held.items()}]},
        }
        write(name, said)
        print(name, len(held), "tensors", flush=True)


if __name__ == "__main__":
    main()
