"""Tiny models of many families, two sizes of each, whose elements are the numbers 1, 2, 3, …

`python -m tests.oracle.families.models` makes their configurations and the names and shapes of their files, with
transformers; the other modules of this folder say what engines make of them. A file of `tests/data/families` has

- `config`: what `config.json` holds, and `class`: the class of transformers;
- `tensors`: name and shape of each tensor on the disk, in the order in which their elements are numbered;
- `plan`: transformers' tensor-parallel plan of the model, `model.tp_plan`, if it has one;
- `same`: of some, the names of tensors that have the same elements;
- `engines`: for each engine, `of` (what made the answer, in which version), and `ranks`: for each number of
  tensor-parallel ranks, for each rank, each tensor's shape and the digest of its elements as int32; or `refused`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .sizes import drawn

__all__ = [
    "DATA",
    "FAMILIES",
    "FURTHER",
    "RANKS",
    "SEED",
    "config_of",
    "digest",
    "elements",
    "numbered",
    "read",
    "write",
]

#: `SHARDWISE_SEED=5` is for other sizes, drawn from this seed, in a folder that is not kept.
SEED = os.environ.get("SHARDWISE_SEED")
DATA = Path(__file__).parents[2] / "data" / "families"
if SEED:
    DATA = Path(tempfile.gettempdir()) / "shardwise-families" / SEED
    DATA.mkdir(parents=True, exist_ok=True)

#: How many ranks engines are asked for.
RANKS = (1, 2, 3, 4, 6, 8) if SEED else (1, 2, 4, 8)

_ALL = {"num_hidden_layers": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
#: Two sizes: in the second, no size is a multiple of another that it should not be.
_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, **_ALL}
_OTHER = {"vocab_size": 150, "hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 8, **_ALL}
_GROUPS = ({**_SMALL, "num_key_value_heads": 2}, {**_OTHER, "num_key_value_heads": 2, "num_hidden_layers": 3})
_EXPERTS = (
    {"moe_intermediate_size": 16, "num_experts_per_tok": 2},
    {"moe_intermediate_size": 24, "num_experts_per_tok": 3},
)


def _both(*more: Any, start: tuple[Any, ...] = _GROUPS) -> list[dict[str, Any]]:
    """The two sizes, with what one dict says for both, or two dicts for each."""
    made = [dict(one) for one in start]
    for extra in more:
        for one, add in zip(made, extra if isinstance(extra, tuple) else (extra, extra), strict=True):
            one.update(add)
    return made


#: Of each family the classes of model and configuration, and its two sizes.
FAMILIES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _both(({}, {"head_dim": 16}))),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", _both({"tie_word_embeddings": True})),
    "mistral": ("MistralForCausalLM", "MistralConfig", _both(({"head_dim": None}, {"head_dim": 12}))),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _both()),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _both(({"head_dim": 16}, {"head_dim": 8}))),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _both(_EXPERTS, ({"head_dim": 8, "num_experts": 4}, {"head_dim": 16, "num_experts": 6})),
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _both(({"num_local_experts": 4}, {"num_local_experts": 3}))),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        [
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16},
            {"n_embd": 48, "n_layer": 3, "n_head": 8, "vocab_size": 150, "n_positions": 24},
        ],
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", _both(start=(_SMALL, _OTHER))),
    "bert-model": ("BertModel", "BertConfig", _both(start=(_SMALL, _OTHER))),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _both(
            _EXPERTS,
            {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
            (
                {
                    "num_key_value_heads": 4,
                    "n_routed_experts": 4,
                    "n_shared_experts": 1,
                    "q_lora_rank": 16,
                    "kv_lora_rank": 16,
                },
                {
                    "num_key_value_heads": 8,
                    "n_routed_experts": 6,
                    "n_shared_experts": 2,
                    "q_lora_rank": 24,
                    "kv_lora_rank": 12,
                },
            ),
            (
                {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
                {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10},
            ),
        ),
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        _both(
            _EXPERTS,
            {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
            (
                {"head_dim": 16, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True},
                {"head_dim": 8, "n_routed_experts": 6, "use_qk_norm": False, "attention_bias": True},
            ),
        ),
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _both({"tie_word_embeddings": True}, ({"head_dim": 16}, {"head_dim": 8})),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _both({"tie_word_embeddings": True}, ({"head_dim": 16}, {"head_dim": 8})),
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _both({"pad_token_id": 0})),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _both(start=(_SMALL, _OTHER))),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        _both(
            {"bias": False, "new_decoder_architecture": True, "tie_word_embeddings": True, "num_kv_heads": 2},
            start=(
                {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
                {"vocab_size": 150, "hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 3},
            ),
        ),
    ),
    "falcon-7b": (
        "FalconForCausalLM",
        "FalconConfig",
        _both(
            {"bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
            {"tie_word_embeddings": True},
            start=(
                {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
                {"vocab_size": 150, "hidden_size": 48, "num_attention_heads": 8, "num_hidden_layers": 3},
            ),
        ),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _both(
            {"num_experts_per_tok": 2},
            ({"head_dim": 8, "num_local_experts": 4}, {"head_dim": 16, "num_local_experts": 6}),
        ),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _both(
            {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            (
                {"intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 4},
                {"intermediate_size_mlp": 64, "head_dim": 16, "num_local_experts": 6, "num_hidden_layers": 4},
            ),
        ),
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _both(
            _EXPERTS,
            {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
            {"full_attention_interval": 2},  # As released files have it.
            (
                {"head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16},
                {"head_dim": 16, "num_experts": 6, "shared_expert_intermediate_size": 24},
            ),
            (
                {
                    "linear_num_value_heads": 4,
                    "linear_num_key_heads": 2,
                    "linear_key_head_dim": 8,
                    "linear_value_head_dim": 8,
                },
                {
                    "linear_num_value_heads": 8,
                    "linear_num_key_heads": 4,
                    "linear_key_head_dim": 6,
                    "linear_value_head_dim": 10,
                },
            ),
        ),
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        [
            {
                "vocab_size": 64,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_heads": 8,
                "head_dim": 8,
                "state_size": 16,
                "n_groups": 2,
                "expand": 2,
            },
            {
                "vocab_size": 150,
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_heads": 8,
                "head_dim": 12,
                "state_size": 10,
                "n_groups": 4,
                "expand": 2,
            },
        ],
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _both(
            {
                "layers_block_type": ["mamba", "mlp", "attention", "moe"],
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
            },
            (
                {"head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8},
                {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 10},
            ),
            ({"ssm_state_size": 16, "n_groups": 2}, {"ssm_state_size": 6, "n_groups": 4}),
            (
                {"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
                {"n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
            ),
        ),
    ),
}
_kind, _config, _sizes = FAMILIES["llama4"]
#: All layers have experts.
FAMILIES["llama4-scout"] = (_kind, _config, [{**size, "interleave_moe_layer_step": 1} for size in _sizes])
#: More layers than have their kinds in turn, which MaxText stacks.
FAMILIES["gemma3"][2].append({**FAMILIES["gemma3"][2][0], "num_hidden_layers": 14})
FAMILIES["qwen3-next"][2].append(
    {
        **FAMILIES["qwen3-next"][2][1],
        "num_hidden_layers": 6,
        "layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"],
        "full_attention_interval": 3,
    }
)
# Llama 4 Scout has experts in all layers, and Mamba 2 as first released one group and one tensor for words. Four ranks
# do not divide the features of this gpt-oss.
FAMILIES["gpt-oss"][2].append(FAMILIES["gpt-oss"][2][0] | {"intermediate_size": 42})
FAMILIES["llama4"][2].append(FAMILIES["llama4"][2][0] | {"interleave_moe_layer_step": 1})
FAMILIES["mamba2"][2].append(FAMILIES["mamba2"][2][1] | {"n_groups": 1, "tie_word_embeddings": True})
FAMILIES["nemotron-h"][2].append(FAMILIES["nemotron-h"][2][1] | {"n_groups": 1})
for _, _, _sizes in FAMILIES.values():
    for _size in _sizes:
        if "layers_block_type" in _size:
            del _size["num_hidden_layers"]
if SEED:
    for _family, (_, _, _sizes) in FAMILIES.items():
        _sizes[:] = [drawn(_family, one, 2 * int(SEED) + i) for i, one in enumerate(_sizes)]

#: Families whose files have layers that predict further tokens, which transformers leaves out.
FURTHER = ("deepseek-v3", "glm4-moe", "qwen3-next")


def with_further(family: str, said: dict[str, Any]) -> dict[str, Any]:
    """A model with one such layer, named as in the files of DeepSeek, Zhipu and Qwen; it is like the last layer."""
    layers, hidden = said["config"]["num_hidden_layers"], said["config"]["hidden_size"]
    before, tensors, same = f"model.layers.{layers - 1}.", dict(said["tensors"]), {}
    after = "mtp.layers.0." if family == "qwen3-next" else f"model.layers.{layers}."
    tensors |= {name.replace(before, after): shape for name, shape in tensors.items() if name.startswith(before)}
    if family == "qwen3-next":
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        tensors["mtp.fc.weight"] = [hidden, 2 * hidden]
    else:
        norms = (f"{after}enorm", f"{after}hnorm", f"{after}shared_head.norm")
        tensors[f"{after}eh_proj.weight"] = [hidden, 2 * hidden]
        same = {
            f"{after}embed_tokens.weight": "model.embed_tokens.weight",
            f"{after}shared_head.head.weight": "lm_head.weight",
        }
    tensors |= {f"{norm}.weight": [hidden] for norm in norms}
    tensors |= {copy: tensors[name] for copy, name in same.items()}
    config = said["config"] | {"num_nextn_predict_layers": 1}
    return {"class": said["class"], "config": config, "tensors": tensors, "same": same}


def digest(array: np.ndarray[Any, Any]) -> str:
    """Twelve digits that say which element numbers an array has, in which order."""
    return hashlib.sha256(np.ascontiguousarray(array, "<i4").tobytes()).hexdigest()[:12]


def numbered(tensors: dict[str, list[int]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors, whose elements are numbered from 1."""
    made, start = {}, 1
    for name, shape in tensors.items():
        size = math.prod(shape)
        made[name] = np.arange(start, start + size, dtype="<i4").reshape(shape)
        start += size
    return made


def elements(said: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of one of the files, with their elements."""
    made = numbered(said["tensors"])
    return made | {copy: made[name] for copy, name in said.get("same", {}).items()}


def read(name: str) -> dict[str, Any]:
    """One of the files: `llama-0` is Llama in the first size."""
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return found


def write(name: str, said: dict[str, Any]) -> None:
    """Write one of the files, the same bytes for the same content."""
    text = json.dumps(said, indent=0, sort_keys=False, separators=(",", ":"))
    (DATA / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def config_of(family: str, size: int) -> Any:
    """The configuration of a family, as transformers' object."""
    import transformers

    _, config, sizes = FAMILIES[family.removesuffix("-mtp")]
    return getattr(transformers, config)(**sizes[size])


def main() -> None:
    """Write what transformers itself says of the models, and keep what engines said before."""
    import torch
    import transformers
    from safetensors import safe_open

    transformers.logging.set_verbosity_error()
    for family in sys.argv[1:] or FAMILIES:
        kind, _, sizes = FAMILIES[family]
        for size in range(len(sizes)):
            torch.manual_seed(0)
            model = getattr(transformers, kind)(config_of(family, size))
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                tensors: dict[str, list[int]] = {}
                for file in sorted(Path(folder).glob("*.safetensors")):
                    with safe_open(str(file), "pt") as opened:
                        for name in sorted(opened.keys()):
                            tensors[name] = list(opened.get_slice(name).get_shape())
                config = json.loads((Path(folder) / "config.json").read_text())
            said = {"class": kind, "config": config, "tensors": tensors}
            keep(f"{family}-{size}", said)
            if family in FURTHER:
                keep(f"{family}-mtp-{size}", with_further(family, said))


def keep(name: str, said: dict[str, Any]) -> None:
    """Write a model, with what engines said of it before."""
    known = read(name) if (DATA / f"{name}.json.gz").exists() else {"engines": {}}
    write(name, known | said)
    print(name, len(said["tensors"]), "tensors", sum(map(math.prod, said["tensors"].values())), "elements")


if __name__ == "__main__":
    main()
