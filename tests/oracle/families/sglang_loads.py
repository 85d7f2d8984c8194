"""SGLang's own models, each made for one rank of several on a CPU, and loaded by their loaders with element numbers.

`PYTHONPATH=SGLANG:. python -m tests.oracle.families.sglang_loads [FAMILY...]`, where SGLANG is SGLang's sources, with
torch and transformers. Kernels and servers are replaced by empty stand-ins, and attention by a module without weights;
the layers and their loaders are SGLang's.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore")

import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.test_operators
import transformers

from . import vllm_loads
from .models import FAMILIES, RANKS, config_of, elements, read, write
from .vllm_loads import Ranks, said_of

#: What SGLang imports and these loaders do not need.
ABSENT = frozenset(
    """
    IPython aiohttp anthropic av blobfile compressed_tensors cuda cv2 datasets decord deep_gemm fastapi flash_attn
    flashinfer gguf llguidance modelscope nvidia openai openai_harmony outlines partial_json_parser pydantic_settings
    sgl_kernel
    sglang.kernels.jit soundfile starlette tiktoken timm torchaudio torchcodec torchvision torchao triton tvm_ffi
    uvicorn uvloop vllm xgrammar zmq
    """.split()  # noqa: SIM905 (as a list it is long)
)
#: The module and the class of each family.
MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "deepseek-v3": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "glm4-moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "phi3": ("llama", "Phi3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "llama-tied": ("llama", "LlamaForCausalLM"),
    "gemma3": ("gemma3_causal", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "llama4": ("mllama4", "Llama4ForConditionalGeneration"),
    "qwen3-next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "nemotron-h": ("nemotron_h", "NemotronHForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "bert": ("bert", "BertForSequenceClassification"),
    "bert-model": ("bert", "BertModel"),
    "deepseek-v3-mtp": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "glm4-moe-mtp": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN"),
    "qwen3-next-mtp": ("qwen3_next_mtp", "Qwen3NextForCausalLMMTP"),
}

#: SGLang's own classes of configurations.
CONFIGS = {"qwen3-next": "Qwen3NextConfig", "nemotron-h": "NemotronHConfig", "mamba2": "Mamba2Config"}
#: Names that the classes of SGLang's configurations have beside those of transformers, and what released files have.
OTHER_NAMES = {"hidden_act": "hidden_activation"}
ABSOLUTE = {"position_embedding_type": "absolute"}
#: As in the released files of DeepSeek-V3.
RELEASED: dict[str, Any] = {
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "deepseek_yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    },
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def configured(family: str, size: int, given: dict[str, Any]) -> Any:
    """The configuration as SGLang has it."""
    if family.endswith("-mtp"):
        made = configured(family.removesuffix("-mtp"), size, given)
        made.num_nextn_predict_layers = 1
        return made
    if family in CONFIGS:
        configs: Any = importlib.import_module("sglang.srt.configs")
        given = {key: value for key, value in given.items() if key != "time_step_limit"}  # It has an infinity.
        if family == "nemotron-h":  # Two keys have other names there and in released files.
            kinds = FAMILIES[family][2][size]["layers_block_type"]
            given |= {"mamba_n_groups": given["n_groups"], "layers_block_type": kinds}
        if family == "mamba2":
            given |= {"intermediate_size": given["expand"] * given["hidden_size"], "rms_norm": True}
        made = getattr(configs, CONFIGS[family])(**given)
        if family == "qwen3-next":
            made.full_attention_interval = given["layer_types"].index("full_attention") + 1
        return made
    config = config_of(family, size)
    for key, value in OTHER_NAMES.items():
        if not hasattr(config, key) and hasattr(config, value):
            setattr(config, key, getattr(config, value))
    for key, own in (RELEASED if family == "deepseek-v3" else ABSOLUTE if family.startswith("bert") else {}).items():
        setattr(config, key, own)
    return config


def prepare() -> None:
    """Import SGLang, with what it needs on a machine without GPU."""
    vllm_loads.ABSENT = ABSENT
    sys.meta_path.insert(0, vllm_loads._Absent())
    torch.cuda.current_device = lambda: "cpu"
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    runtime_context._CONTEXT.set_server_args(ServerArgs(model_path="none", device="cpu"))
    runtime_context._CONTEXT.override("none", boundary_reduction="ar")


def placed(rank: int, size: int) -> Any:
    """What SGLang reads about parallelism: tensor parallelism of everything, and nothing else."""
    cut = ("tp", "attn_tp", "moe_tp", "shared_experts_tp")

    def read_one(context: Any, name: str) -> Any:
        what, _, kind = name.rpartition("_")
        if what not in cut and name in context._config._fields:
            return getattr(context._config, name)
        if kind not in ("rank", "size", "group"):
            return 0
        own = Ranks(rank, size) if what in cut else Ranks(0, 1)
        return {"rank": own.rank_in_group, "size": own.world_size, "group": own}[kind]

    return read_one


def loaded(kind: Any, config: Any, tensors: Any, rank: int, size: int) -> dict[str, Any]:
    """The parameters of one rank."""
    from sglang.srt import runtime_context

    runtime_context.ParallelContext._read = placed(rank, size)
    with torch.no_grad():
        made = kind(config=config)
        # The numbers of positions are not loaded.
        held = {name: value for name, value in made.named_parameters() if name[-12:] != "position_ids"}
        for value in held.values():
            value.data = torch.zeros(value.shape)  # In bfloat16 numbers would be rounded.
        made.load_weights((name, value.clone()) for name, value in tensors)
        return {name: value.detach().float().numpy() for name, value in held.items()}


def main() -> None:
    """Ask SGLang for each family that it has."""
    transformers.logging.set_verbosity_error()
    prepare()

    for family in sys.argv[1:] or MODELS:
        module, name = MODELS[family]
        for size in range(len(FAMILIES[family.removesuffix("-mtp")][2])):
            said = read(f"{family}-{size}")
            tensors = [(name, torch.from_numpy(array).float()) for name, array in elements(said).items()]
            ranks: dict[str, Any] = {}
            for count in RANKS:
                try:
                    kind = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
                    config = configured(family, size, said["config"])
                    found = [loaded(kind, config, tensors, rank, count) for rank in range(count)]
                    if family.endswith("-mtp"):  # What is not loaded is shared with the main model.
                        found = [{name: value for name, value in one.items() if value.any()} for one in found]
                except Exception as error:
                    ranks[str(count)] = {"refused": f"{type(error).__name__}: {error}"[:200]}
                    if count == 1:
                        import traceback

                        traceback.print_exc(limit=-6)
                else:
                    ranks[str(count)] = [{name: said_of(value) for name, value in one.items()} for one in found]
            if "refused" not in ranks["1"]:
                said["engines"]["sglang"] = {"of": f"SGLang 0.5.23: {name}.load_weights", "ranks": ranks}
                write(f"{family}-{size}", said)
            said_ranks = {
                count: one["refused"][:60] if "refused" in one else len(one[0]) for count, one in ranks.items()
            }
            print(family, size, said_ranks, flush=True)


if __name__ == "__main__":
    main()
