"""Megatron-Core's own models, made for each rank on a CPU, filled by Megatron-Bridge and mbridge, and what they save.

`python -m tests.oracle.families.megatron [FAMILY...]`, in an environment with Megatron-Core, Megatron-Bridge, mbridge,
torch and transformers. Transformer Engine is replaced by modules that have its parameters, process groups by some
that do nothing: what a converter scatters to a rank is taken in place of the communication. Rows that pad a
vocabulary are zeros.

- `megatron`: each rank's parameters, by the names in its model;
- `torch_dist`: what each rank's `sharded_state_dict` says, by the names in a checkpoint, layers and experts stacked
  where it says so. That the ranks' parts make one tensor, the same for each number of ranks, is checked here.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from . import transformer_engine, vllm_loads  # noqa: E402
from .models import FAMILIES, FURTHER, elements, read, write  # noqa: E402

RANKS = (1, 2, 4, 8)
#: Of each family the module and the class of its bridge in Megatron-Bridge.
MEGATRON_BRIDGE = {
    "llama": ("llama.llama_bridge", "LlamaBridge"),
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
#: The weights of Llama 4 in Megatron-Core: it is a model of Megatron-Bridge, which has no bridge for it. The names are
#: those of `llama4_causal_lm_import` of ModelOpt 0.47.0, which also transposes experts.
LLAMA4 = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.feed_forward.down_proj.weight",
    "decoder.layers.*.mlp.router.weight": "model.layers.*.feed_forward.router.weight",
    "decoder.layers.*.mlp.shared_experts.linear_fc2.weight": (
        "model.layers.*.feed_forward.shared_expert.down_proj.weight"
    ),
    "decoder.layers.*.mlp.experts.linear_fc2.weight*": "model.layers.*.feed_forward.experts.*.down_proj.weight",
}
#: Those of GPT-2, which neither package has.
GPT2 = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    **{
        f"{name}{kind}": f"{of}.{kind}"
        for kind in ("weight", "bias")
        for name, of in {
            "decoder.final_layernorm.": "transformer.ln_f",
            "decoder.layers.*.self_attention.linear_qkv.layer_norm_": "transformer.h.*.ln_1",
            "decoder.layers.*.self_attention.linear_proj.": "transformer.h.*.attn.c_proj",
            "decoder.layers.*.mlp.linear_fc1.layer_norm_": "transformer.h.*.ln_2",
            "decoder.layers.*.mlp.linear_fc1.": "transformer.h.*.mlp.c_fc",
            "decoder.layers.*.mlp.linear_fc2.": "transformer.h.*.mlp.c_proj",
        }.items()
    },
}
GATED = {
    "decoder.layers.*.mlp.linear_fc1.weight": "model.layers.*.feed_forward",
    "decoder.layers.*.mlp.shared_experts.linear_fc1.weight": "model.layers.*.feed_forward.shared_expert",
    "decoder.layers.*.mlp.experts.linear_fc1.weight*": "model.layers.*.feed_forward.experts.*",
}
#: And in mbridge.
MBRIDGE = {
    "llama": ("llama", "LLaMABridge"),
    "qwen2": ("qwen2", "Qwen2Bridge"),
    "qwen3": ("qwen3", "Qwen3Bridge"),
    "qwen3-moe": ("qwen3moe", "Qwen3MoEBridge"),
    "mixtral": ("mixtral", "MixtralBridge"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Bridge"),
    "glm4-moe": ("glm4moe", "GLM4MoEBridge"),
}
#: The only number of layers for which mbridge has DeepSeek's layers that predict further tokens.
MBRIDGE_LAYERS = 61
#: What is in a model's state and is no weight.
NO_WEIGHT = re.compile(r"_extra_state$|tokens_per_expert$|rotary_pos_emb")
Tensors = dict[str, Any]
#: The values of a parameter: its name, what it holds now, and its module.
Filler = Callable[[str, Any, Any], Any]


def start(rank: int, size: int, experts_apart: bool) -> None:
    """Be this rank of so many; `experts_apart`: experts are not cut."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size,
        expert_tensor_parallel_size=1 if experts_apart else None,
        create_gloo_process_groups=False,
    )


def base(family: str) -> str:
    return family.removesuffix("-tied").removesuffix("-mtp")


def settings(said: dict[str, Any]) -> Any:
    """The configuration as transformers' object, with what the bridges look for where transformers 4 had it."""
    given = {key: value for key, value in said["config"].items() if key != "time_step_limit"}  # Infinite.
    config = transformers.AutoConfig.for_model(**given)
    rope = getattr(config, "rope_parameters", None) or {}
    local = rope.get("sliding_attention", rope)
    rope = rope.get("full_attention", rope)
    older = {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_local_base_freq": local.get("rope_theta", 10000.0),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "head_dim": config.hidden_size // config.num_attention_heads,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": said["config"].get("num_nextn_predict_layers", 0),
    }
    if "full_attention" in (getattr(config, "layer_types", None) or ()):
        older["full_attention_interval"] = config.layer_types.index("full_attention") + 1
    for key, value in older.items():
        if getattr(config, key, None) is None:
            setattr(config, key, value)
    if "factor" not in (getattr(config, "rope_scaling", None) or {}):
        config.rope_scaling = None
    return config


def rows_of(words: int, ranks: int) -> int:
    """The rows of a vocabulary, padded so that each rank has a multiple of 128."""
    return -(-words // (128 * ranks)) * 128 * ranks


def padded(values: Any, held: Any) -> Any:
    """With zeros behind the rows."""
    more = held.shape[0] - values.shape[0]
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])]) if more else values


def bridge_of(family: str, config: Any) -> tuple[Any, Any]:
    """Megatron-Bridge's bridge of a family, and what it makes of a configuration."""
    module, kind = MEGATRON_BRIDGE[base(family)]
    found: Any = importlib.import_module(f"megatron.bridge.models.{module}")
    found.AutoConfig = types.SimpleNamespace(from_pretrained=lambda _: config)
    bridge = getattr(found, kind)()
    bridge.hf_config = bridge._hf_config = config
    provider = bridge.provider_bridge(
        types.SimpleNamespace(config=config, generation_config=None, _model_name_or_path="")
    )
    return bridge, provider


def bridge_with(names: dict[str, str], *more: Any) -> Any:
    """A bridge for models without one: Megatron-Bridge's own mappings for these names."""
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    registry: Any = importlib.import_module("megatron.bridge.models.conversion.mapping_registry")
    own = registry.MegatronMappingRegistry(
        *(mapping.AutoMapping(megatron_param=name, hf_param=of) for name, of in names.items()), *more
    )

    def found(of: Any, tensors: Tensors) -> Any:
        return tensors[of] if isinstance(of, str) else {key: tensors[one] for key, one in of.items()}

    return types.SimpleNamespace(mapping_registry=lambda: own, maybe_modify_loaded_hf_weight=found)


def llama4(config: Any, tensors: Tensors) -> tuple[Any, Any, Tensors]:
    """Mappings for Llama 4, Megatron-Bridge's model of it, and the weights with each expert by itself."""
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    models: Any = importlib.import_module("megatron.bridge.models.llama.llama_provider")
    more = [
        mapping.GatedMLPMapping(megatron_param=name, gate=f"{of}.gate_proj.weight", up=f"{of}.up_proj.weight")
        for name, of in GATED.items()
    ]
    parts = {part: f"model.layers.*.self_attn.{part}_proj.weight" for part in "qkv"}
    more.append(mapping.QKVMapping(megatron_param="decoder.layers.*.self_attention.linear_qkv.weight", **parts))
    apart = dict(tensors)
    for name, value in tensors.items():
        before = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith("experts.gate_up_proj"):
            for e, one in enumerate(value):
                apart[f"{before}{e}.gate_proj.weight"], apart[f"{before}{e}.up_proj.weight"] = one.T.chunk(2)
        elif name.endswith("experts.down_proj"):
            apart |= {f"{before}{e}.down_proj.weight": one.T for e, one in enumerate(value)}
    experts = [int(layer in config.moe_layers) for layer in range(config.num_hidden_layers)]
    provider = models.Llama4ModelProvider(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size_mlp,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        num_moe_experts=config.num_local_experts,
        moe_ffn_hidden_size=config.intermediate_size,
        moe_shared_expert_intermediate_size=config.intermediate_size,
        moe_layer_freq=1 if all(experts) else experts,  # As its models with 16 and with 128 experts have it.
    )
    return bridge_with(LLAMA4, *more), provider, apart


def gpt2(config: Any, tensors: Tensors) -> tuple[Any, Any, Tensors]:
    """Mappings for GPT-2, Megatron-Core's model of it, and the weights as linear layers have them."""
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    models: Any = importlib.import_module("megatron.bridge.models.gpt_provider")
    more = [
        mapping.QKVMapping(
            megatron_param=f"decoder.layers.*.self_attention.linear_qkv.{kind}",
            **{part: f"transformer.h.*.attn.{part}.{kind}" for part in "qkv"},
        )
        for kind in ("weight", "bias")
    ]
    more.append(mapping.ReplicatedMapping("embedding.position_embeddings.weight", "transformer.wpe.weight"))
    apart: Tensors = {}
    for name, value in tensors.items():
        whole = value.T if re.search(r"\.c_\w+\.weight$", name) else value
        if "c_attn" in name:
            apart |= {name.replace("c_attn", part): one for part, one in zip("qkv", whole.chunk(3), strict=True)}
        else:
            apart[name] = whole
    provider = models.GPTModelProvider(
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        ffn_hidden_size=4 * config.n_embd,
        num_attention_heads=config.n_head,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        seq_length=config.n_positions,
        share_embeddings_and_output_weights=True,
    )
    return bridge_with(GPT2, *more), provider, apart


#: What is put together here for families without a bridge.
OWN = {"llama4": llama4, "llama4-scout": llama4, "gpt2": gpt2}


def set_up(provider: Any, family: str, config: Any, size: int) -> None:
    """Have the model made for so many ranks, on the CPU."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    vars(provider).update(
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bf16=False,
        fp16=False,
        gradient_accumulation_fusion=False,
        should_pad_vocab=False,
        vocab_size=rows_of(config.vocab_size, size),
        mtp_num_layers=1 if family.endswith("-mtp") else None,
        _pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    if base(family) == "gpt-oss":
        provider.expert_tensor_parallel_size = 1  # Biases of experts: it refuses another.
    provider.finalize()


def by_megatron_bridge(family: str, config: Any, tensors: Tensors, rank: int, size: int) -> tuple[Any, Filler]:
    """The model that Megatron-Bridge makes of a configuration, and what it makes of Hugging Face's tensors."""
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    parts: Any = mapping.MegatronParamMapping
    parts.scatter_to_tp_ranks = lambda _, splits, *__, **___: splits[rank]
    parts.broadcast_tensor_to_tp_ranks = lambda _, tensor, **__: tensor
    parts.tp_rank = property(lambda _: 0)
    mapping.ReplicatedMapping.hf_to_megatron = lambda _, weights, __: weights
    if family in OWN:
        bridge, provider, tensors = OWN[family](config, tensors)
    else:
        bridge, provider = bridge_of(family, config)
    set_up(provider, family, config, size)
    model = provider.provide(pre_process=True, post_process=True)
    registry = bridge.mapping_registry()

    def values(name: str, held: Any, module: Any) -> Any:
        one = registry.megatron_to_hf_lookup(name)
        weights = bridge.maybe_modify_loaded_hf_weight(one.hf_param, tensors)
        if re.search("word_embeddings|output_layer", name):
            weights = padded(weights, torch.empty(held.shape[0] * size, 0))
        if not hasattr(module, "config"):
            module.config = model.config  # As `build_conversion_tasks` does.
        made = one.hf_to_megatron(weights, module)
        # Computed: no element numbers.
        return made + 0.5 if type(one).__name__ == "RMSNorm2ZeroCenteredRMSNormMapping" else made

    return model, values


def by_mbridge(family: str, config: Any, tensors: Tensors, rank: int, size: int) -> tuple[Any, Filler]:
    """The model that mbridge makes of a configuration, and what it makes of Hugging Face's tensors.

    For DeepSeek-V3 it gives Megatron-Core a size that this no longer takes, and it makes no GLM with layers that
    predict further tokens: those models are those of Megatron-Bridge.
    """
    module, name = MBRIDGE[base(family)]
    kind = getattr(importlib.import_module(f"mbridge.models.{module}"), name)
    deepseek = base(family) == "deepseek-v3"
    if deepseek or family.endswith("-mtp"):
        model, _ = by_megatron_bridge(family, config, tensors, rank, size)
        bridge = kind.__new__(kind)
        bridge.config, bridge.hf_config, bridge.dtype = copy.copy(model.config), config, torch.float32
        bridge.config.num_layers = MBRIDGE_LAYERS if deepseek else config.num_hidden_layers
        bridge.make_vocab_size_divisible_by = 128 * size
        bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, rows_of(config.vocab_size, size)
    else:
        bridge = kind(config, dtype=torch.float32, make_vocab_size_divisible_by=128 * size)
        bridge.config.use_cpu_initialization, bridge.config.gradient_accumulation_fusion = True, False
        model = bridge._model_provider([])(True, True)

    def values(name: str, held: Any, _: Any) -> Any:
        stored = bridge._weight_name_mapping_mcore_to_hf(name)
        if deepseek:
            stored = [one.replace(f".{MBRIDGE_LAYERS}.", f".{config.num_hidden_layers}.") for one in stored]
        whole = bridge._weight_to_mcore_format(name, [tensors[one] for one in stored])
        return list(bridge._weight_split_across_tp(name, whole, held, size))[rank]

    return model, values


def filled(model: Any, values: Filler) -> None:
    """Give the model its values: each of them is set, and has the shape that the model wants."""
    for name, held in model.state_dict(keep_vars=True).items():
        if held is None or NO_WEIGHT.search(name):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        made = values(name, held, module)
        assert made.shape == held.shape, (name, made.shape, held.shape)
        with torch.no_grad():
            held.copy_(made)


def parameters(model: Any) -> Tensors:
    """A rank's parameters."""
    state = model.state_dict().items()
    return {name: value for name, value in state if value is not None and not NO_WEIGHT.search(name)}


def parts_of(model: Any) -> dict[str, list[Any]]:
    """A rank's parts of each tensor of a checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found: dict[str, list[Any]] = {}
    for one in model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD}).values():
        built = one.build() if isinstance(one, ShardedTensorFactory) else [one]
        for part in built.values() if isinstance(built, dict) else built:
            if isinstance(part, ShardedTensor):
                found.setdefault(part.key, []).append(part)
    return found


def of_rank(parts: list[Any]) -> Any:
    """What a rank holds of a tensor: its parts along the cut dim one after the other, layers and experts stacked."""
    lead = parts[0].prepend_axis_num
    sizes = parts[0].global_shape[:lead]
    stacked: dict[tuple[int, ...], list[Any]] = {}
    for part in sorted(parts, key=lambda part: part.global_offset):
        stacked.setdefault(part.global_offset[:lead], []).append(part)
    made = []
    for some in stacked.values():
        dims = [dim for dim in range(lead, len(some[0].global_shape)) if len({p.global_offset[dim] for p in some}) > 1]
        made.append(torch.cat([part.data for part in some], (dims or [lead])[0] - lead))
    return torch.stack(made).reshape(*sizes, *made[0].shape)


def of_all(ranks: list[dict[str, list[Any]]]) -> Tensors:
    """The whole tensors, put together from where the ranks say that their parts are."""
    whole: Tensors = {}
    for name, first in ranks[0].items():
        made = torch.full(first[0].global_shape, -1.0)
        for part in (part for rank in ranks for part in rank[name]):
            lead = part.prepend_axis_num
            ends = [at + size for at, size in zip(part.global_offset[lead:], part.data.shape, strict=True)]
            place = (*part.global_offset[:lead], *map(slice, part.global_offset[lead:], ends))
            made[place] = part.data
        assert not (made == -1).any(), name
        whole[name] = made
    return whole


def same(whole: Tensors, other: Tensors) -> None:
    """Refuse checkpoints of one model that differ in more than the padding of a vocabulary."""
    assert whole.keys() == other.keys()
    for name, value in whole.items():
        rows = min(len(value), len(other[name]))
        assert torch.equal(value[:rows], other[name][:rows]), name
        assert "word_embeddings" in name or "output_layer" in name or value.shape == other[name].shape, name


def answers(make: Any, family: str, said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each number of ranks holds and saves, by one of the converters."""
    config = settings(said)
    tensors = {name: torch.from_numpy(value).float() for name, value in elements(said).items()}
    found: dict[str, dict[str, Any]] = {"megatron": {}, "torch_dist": {}}
    first = None
    for count in RANKS:
        held, saved = [], []
        try:
            for rank in range(count):
                start(rank, count, base(family) == "gpt-oss")
                with transformer_engine.OnTheCpu():
                    model, values = make(family, config, tensors, rank, count)
                    filled(model, values)
                held.append(parameters(model))
                saved.append(parts_of(model))
        except (ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
            if count == 1:
                raise
            refused = {"refused": f"{type(error).__name__}: {error}"[:200]}
            found["megatron"][str(count)] = found["torch_dist"][str(count)] = refused
            continue
        whole = of_all(saved)
        first = first or whole
        same(first, whole)
        stacked = [{name: of_rank(parts) for name, parts in one.items()} for one in saved]
        for engine, ranks in (("megatron", held), ("torch_dist", stacked)):
            found[engine][str(count)] = [
                {name: vllm_loads.said_of(value.detach().numpy()) for name, value in one.items()} for one in ranks
            ]
    return found


def main() -> None:
    """Ask both converters; where both have a family, they have to agree."""
    transformers.logging.set_verbosity_error()
    transformer_engine.stand_in()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    both = (("megatron-bridge", {*MEGATRON_BRIDGE, *OWN}, by_megatron_bridge), ("mbridge", MBRIDGE, by_mbridge))
    known = [*MEGATRON_BRIDGE, *OWN, *(MBRIDGE.keys() - MEGATRON_BRIDGE.keys()), "llama-tied"]
    for family in sys.argv[1:] or [*known, *(f"{family}-mtp" for family in FURTHER)]:
        for size in range(len(FAMILIES[base(family) if family.endswith("-mtp") else family][2])):
            said, by, found = read(f"{family}-{size}"), [], None
            if family == "llama4" and said["config"]["interleave_moe_layer_step"] == 1:
                continue  # Checkpoints of Scout have all layers in one tensor: llama4-scout.
            for package, families, make in both:
                if base(family) not in families or (family, package) == ("deepseek-v3-mtp", "megatron-bridge"):
                    continue
                made = answers(make, family, said)
                for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
                    os.environ.pop(name, None)
                assert found is None or not (those := differing(found, made)), (family, package, those)
                found = made
                by.append({"megatron-bridge": "Megatron-Bridge"}.get(package, package) + " " + version(package))
            assert found is not None
            of = f"Megatron-Core {version('megatron-core')}, {', '.join(by)}: sharded_state_dict"
            for engine, ranks in found.items():
                said["engines"][engine] = {"of": of, "ranks": ranks}
            write(f"{family}-{size}", said)
            counts = {n: "refused" if "refused" in one else len(one[0]) for n, one in found["torch_dist"].items()}
            print(family, size, by, counts, flush=True)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, int, str]]:
    """Engine, number of ranks, rank and name of what two converters give otherwise, where neither refuses."""
    found = []
    for engine, count in ((engine, count) for engine, ranks in one.items() for count in ranks):
        both = one[engine][count], other[engine][count]
        if any("refused" in ranks for ranks in both):
            assert both[0] == both[1], both
            continue
        for rank, (first, second) in enumerate(zip(*both, strict=True)):
            names = first.keys() | second.keys()
            found += [(engine, count, rank, name) for name in names if first.get(name) != second.get(name)]
    return found


if __name__ == "__main__":
    main()
