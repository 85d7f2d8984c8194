"""Megatron-Bridge's own mappings, from Hugging Face's tensors to Megatron-Core's, for each tensor-parallel rank.

`python -m tests.oracle.families.bridges [FAMILY...]`, in an environment with Megatron-Bridge, Megatron-Core, torch and
transformers; Transformer Engine and the like are replaced by empty stand-ins. Each mapping is called as by the bridge
on rank 0, and what it scatters to a rank is taken in place of the communication. Which kind of module holds a parameter
is that of Megatron-Core's `get_gpt_layer_with_transformer_engine_spec` and `mamba_stack_spec`.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
import warnings
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from . import vllm_loads  # noqa: E402
from .models import FAMILIES, config_of, numbered, read, write  # noqa: E402

RANKS = (1, 2, 4, 8)
ABSENT = frozenset(
    """
    apex causal_conv1d einops_exts energon fla flash_attn hydra mamba_ssm megatron.energon mlflow
    modelopt nvidia_resiliency_ext open_clip qwen_vl_utils tensorboard transformer_engine
    transformer_engine_torch wandb
    """.split()  # noqa: SIM905 (as a list it is long)
)
#: Of each family the module and the class of its bridge.
BRIDGES = {
    "llama": ("llama.llama_bridge", "LlamaBridge"),
    "llama-tied": ("llama.llama_bridge", "LlamaBridge"),
    "mistral": ("mistral.mistral_bridge", "MistralBridge"),
    "qwen2": ("qwen.qwen2_bridge", "Qwen2Bridge"),
    "qwen3": ("qwen.qwen3_bridge", "Qwen3Bridge"),
    "qwen3-moe": ("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"),
    "qwen3-next": ("qwen.qwen3_next_bridge", "Qwen3NextBridge"),
    "deepseek-v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
    "glm4-moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "gemma2": ("gemma.gemma2_bridge", "Gemma2Bridge"),
    "gemma3": ("gemma.gemma3_bridge", "Gemma3ModelBridge"),
    "gpt-oss": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
    "nemotron-h": ("nemotronh.nemotron_h_bridge", "NemotronHBridge"),
}
#: The class of the module that holds a parameter, by its name: the first pattern that matches.
MODULES = {
    r"layer_norm_(weight|bias)$|layernorm\.|\.norm\.|final_norm": "TENorm",
    r"router\.|shared_experts\.gate_weight|linear_q_down_proj|linear_kv_down_proj|eh_proj": "TopKRouter",
    r"linear_(qkv|fc1|q_proj|q_up_proj|kv_up_proj)\.|in_proj\.": "TELayerNormColumnParallelLinear",
    r"linear_(proj|fc2)\.weight|out_proj\.weight": "TERowParallelLinear",
    r"linear_(proj|fc2)\.bias|out_proj\.bias": "IdentityOp",
    r"word_embeddings|output_layer": "VocabParallelEmbedding",
    r"softmax_offset|A_log|dt_bias|\.D$|conv1d|linear_attn|self_attention\.in_proj": "DotProductAttention",
    r"out_norm": "TENorm",
}


class _Ranks:
    """The rank that receives, and how many there are."""

    rank, size = 0, 1


def patch(mapping: Any) -> None:
    """Replace what communicates."""
    base = mapping.MegatronParamMapping
    base.tp_size = property(lambda _: _Ranks.size)
    base.tp_rank = property(lambda _: 0)
    base.ep_size = base.pp_size = property(lambda _: 1)
    base.scatter_to_tp_ranks = lambda _, splits, *__, **___: splits[_Ranks.rank]
    base.broadcast_tensor_to_tp_ranks = lambda _, tensor, **__: tensor
    mapping.ReplicatedMapping.hf_to_megatron = lambda _, weights, __: weights
    # The dtype and the device of a parameter.
    mapping.get_module_and_param_from_name = lambda module, *_: (module, torch.zeros(1))


def module_of(name: str, config: Any) -> Any:
    """A module of the class that holds this parameter."""
    kind = next(kind for pattern, kind in MODULES.items() if re.search(pattern, name))
    made = type(kind, (torch.nn.Module,), {})()
    made.config = config
    return made


def sizes_of(config: Any) -> types.SimpleNamespace:
    """What the mappings ask of Megatron's configuration."""
    heads = config.num_attention_heads
    linear = {key: getattr(config, key, None) for key in dir(config) if key.startswith("linear_")}
    return types.SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=getattr(config, "num_key_value_heads", heads),
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        attention_output_gate=config.model_type == "qwen3_next",
        mamba_num_heads=getattr(config, "mamba_num_heads", None),
        mamba_head_dim=getattr(config, "mamba_head_dim", None),
        mamba_state_dim=getattr(config, "ssm_state_size", None),
        mamba_num_groups=getattr(config, "n_groups", None),
        **linear,
    )


def filled(pattern: str, captures: tuple[str, ...]) -> str:
    for text in captures:
        pattern = pattern.replace("*", text, 1)
    return pattern


def converted(registry: Any, tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """What each mapping makes of the tensors that it is for, by Megatron's names."""
    made: dict[str, Any] = {}
    for mapping in registry:
        patterns = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        first = re.compile(re.escape(next(iter(patterns.values()))).replace(r"\*", r"(\d+)"))
        for name in tensors:
            found = first.fullmatch(name)
            if found is None or not all(filled(one, found.groups()) in tensors for one in patterns.values()):
                continue
            target = filled(mapping.megatron_param, found.groups())
            if re.match("embedding.word_embeddings|output_layer", target):
                continue  # Padded by the model that is made, not by the bridge.
            if ".local_experts." in target:
                continue  # As grouped experts are.
            if ("kv_a" in name and "kv_layernorm" in target) or ("q_a" in name and "q_layernorm" in target):
                continue  # Fused with the projection after it.
            if name.endswith(("input_layernorm.weight", ".norm.weight")) and not is_kind(target, tensors):
                continue
            if re.search(r"\.(input_layernorm|pre_mlp_layernorm)\.", target) and not is_own(target, tensors):
                continue
            if "mlp.linear_fc1.layer_norm_weight" in target and is_own(
                target.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), tensors
            ):
                continue
            weights = {key: tensors[filled(one, found.groups())] for key, one in patterns.items()}
            one = mapping.resolve(found.groups())
            given = weights if isinstance(mapping.hf_param, dict) else weights[""]
            made[target] = one.hf_to_megatron(given, module_of(target, config))
            if type(one).__name__ == "RMSNorm2ZeroCenteredRMSNormMapping":
                made[target] = made[target] + 0.5  # Computed: no element numbers.
    return made


def is_own(name: str, tensors: dict[str, Any]) -> bool:
    """Whether a norm is a module of its own, with Transformer Engine: before experts, and before latent attention."""
    layer = name.split("layers.")[1].split(".")[0]
    experts = any(f"layers.{layer}." in one and ("experts." in one) for one in tensors)
    latent = any("kv_a_proj" in one for one in tensors)
    return latent if "input_layernorm" in name else experts


#: What a layer has of which the norm is a part.
NORMS = {
    "in_proj.layer_norm_weight": ("linear_attn.A_log", "mixer.A_log"),
    "linear_qkv.layer_norm_weight": ("self_attn.k_proj.weight", "mixer.k_proj.weight", "self_attn.kv_b_proj.weight"),
    "mlp.linear_fc1.layer_norm_weight": ("mixer.up_proj.weight",),
    "pre_mlp_layernorm.weight": ("mixer.gate.weight",),
}


def is_kind(name: str, tensors: dict[str, Any]) -> bool:
    """Whether a layer with this name's number is of the kind that has this norm."""
    if ".layers." not in name:
        return True
    layer = name.split("layers.")[1].split(".")[0]
    for part, of in NORMS.items():
        if name.endswith(part):
            return any(f"layers.{layer}.{one}" in other for one in of for other in tensors)
    return "input_layernorm" in name or "mixer.norm" in name or "final" in name or "out_norm" in name


def check(config: Any, ranks: int) -> None:
    """Let Megatron-Core's own configuration refuse a number of ranks."""
    from megatron.core.transformer import TransformerConfig

    sizes = sizes_of(config)
    TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups,
        tensor_model_parallel_size=ranks,
    )
    if config.model_type == "qwen3_next" and sizes.linear_num_key_heads % ranks:
        raise ValueError("TransformerConfig: linear_num_key_heads must be a multiple of tensor_model_parallel_size")
    if config.model_type == "nemotron_h" and sizes.mamba_num_groups % ranks:
        raise ValueError("MambaMixer: ngroups must be evenly divisible by tp_size")


def main() -> None:
    """Ask each bridge."""
    transformers.logging.set_verbosity_error()
    vllm_loads.ABSENT = ABSENT
    sys.meta_path.insert(0, vllm_loads._Absent())
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    patch(mapping)
    for family in sys.argv[1:] or BRIDGES:
        module, kind = BRIDGES[family]
        bridge = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), kind)()
        for size in range(len(FAMILIES[family][2])):
            said, config = read(f"{family}-{size}"), config_of(family, size)
            bridge.hf_config = config
            tensors = {name: torch.from_numpy(array).float() for name, array in numbered(said["tensors"]).items()}
            ranks: dict[str, Any] = {}
            registry = bridge.mapping_registry().mappings
            for count in RANKS:
                try:
                    found = []
                    check(config, count)
                    for _Ranks.rank in range(count):
                        _Ranks.size = count
                        found.append(converted(registry, tensors, sizes_of(config)))
                except (ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
                    ranks[str(count)] = {"refused": f"{type(error).__name__}: {error}"[:200]}
                else:
                    ranks[str(count)] = [
                        {name: vllm_loads.said_of(value.numpy()) for name, value in one.items()} for one in found
                    ]
            if "refused" not in ranks["1"]:
                of = f"Megatron-Bridge {version('megatron-bridge')}: {kind}.mapping_registry"
                said["engines"]["megatron"] = {"of": of, "ranks": ranks}
                write(f"{family}-{size}", said)
            print(family, size, {n: one if "refused" in one else len(one[0]) for n, one in ranks.items()}, flush=True)


if __name__ == "__main__":
    main()
