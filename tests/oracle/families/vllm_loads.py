"""vLLM's own models, each made for one rank of several on a CPU, and loaded by their own loaders with element numbers.

`PYTHONPATH=VLLM:. python -m tests.oracle.families.vllm_loads [FAMILY...]`, where VLLM is vLLM's sources, with torch
and transformers. With `--stages` it asks for two stages of two ranks each, and for experts spread over two ranks: what
vLLM's sharded loader then looks for.

What is not installed is replaced by empty stand-ins, and attention by a module without weights; the
layers and their loaders are vLLM's.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
warnings.filterwarnings("ignore")

import torch
import transformers

from .models import FAMILIES, RANKS, config_of, digest, elements, read, write

#: What vLLM imports and these loaders do not need.
ABSENT = frozenset(
    """
    PIL aiohttp blake3 cbor2 cpuinfo cv2 fastapi flash_attn flash_attn_interface flashinfer flashinfer_cubin gguf
    google humming ijson llguidance lm_format_enforcer mcp mistral_common numba openai openai_harmony opentelemetry
    outlines_core pandas partial_json_parser prometheus_client pybase64 ray requests scipy setproctitle soundfile
    tiktoken torchaudio torchvision uvicorn uvloop vllm._C vllm.vllm_flash_attn watchfiles xgrammar zmq
    """.split()  # noqa: SIM905 (a hundred lines as a list)
)


#: The models that load the layers that predict further tokens.
DRAFTS = {
    "deepseek-v3-mtp": ("deepseek_mtp", "DeepSeekMTP"),
    "glm4-moe-mtp": ("glm4_moe_mtp", "Glm4MoeMTP"),
    "qwen3-next-mtp": ("qwen3_next_mtp", "Qwen3NextMTP"),
}


class Anything:
    """A class in place of one that is not installed."""

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Kind(type):
    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: Any) -> None: ...

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (Anything,), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (Anything,), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> Any:
        if any(name == one or name.startswith(f"{one}.") for one in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "9.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: Any) -> None: ...


class Settings(types.SimpleNamespace):
    """Settings of which all that is not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Ranks:
    """A group of processes, of which there is one."""

    def __init__(self, rank: int, size: int) -> None:
        self.world_size, self.rank_in_group, self.rank, self.local_rank = size, rank, rank, rank
        self.ranks, self.is_first_rank, self.is_last_rank = list(range(size)), rank == 0, rank == size - 1
        self.device_group = self.cpu_group = types.SimpleNamespace(size=lambda: size, rank=lambda: rank)
        self.device, self.unique_name, self.first_rank, self.last_rank = torch.device("cpu"), "one", 0, size - 1

    def all_reduce(self, value: Any) -> Any:
        return value


class NoWeights(torch.nn.Module):  # type: ignore[misc]
    """In place of vLLM's attention."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def prepare() -> None:
    """Import vLLM, with what it needs on a machine without GPU."""
    sys.meta_path.append(_Absent())
    library = torch.library.Library("_C", "DEF")
    for name in ("gelu_new", "gelu_fast", "gelu_quick", "relu2"):
        library.define(f"{name}(Tensor! out, Tensor x) -> ()")
    globals()["_KEPT"] = library
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    import vllm.model_executor.layers.attention as attention

    for name in ("Attention", "MLAAttention", "EncoderOnlyAttention", "ChunkedLocalAttention"):
        setattr(attention, name, type(name, (NoWeights,), {}))
    for module, names in (
        ("vllm.model_executor.layers.attention.attention", ("Attention",)),
        ("vllm.model_executor.layers.attention.mla_attention", ("MLAAttention",)),
        ("vllm.model_executor.layers.attention.chunked_local_attention", ("ChunkedLocalAttention",)),
    ):
        for name in names:
            setattr(importlib.import_module(module), name, getattr(attention, name))
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe

    select = moe.select_unquantized_moe_backend

    def selected(*given: Any, **named: Any) -> Any:
        try:
            return select(*given, **named)
        except NotImplementedError:  # Of kernels, not of layouts.
            return moe.UnquantizedMoeBackend.CPU, None

    moe.select_unquantized_moe_backend = selected
    # What is refused there is a kernel, too.
    from vllm.model_executor.layers.fused_moe import config as moe_config

    moe_config.current_platform = types.SimpleNamespace(
        is_cuda_alike=lambda: True,
        is_xpu=lambda: False,
        is_cpu=lambda: True,
        is_rocm=lambda: False,
        is_cuda=lambda: False,
    )


def loaded(
    kind: Any,
    config: Any,
    tensors: Iterable[tuple[str, Any]],
    rank: int,
    size: int,
    stage: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The parameters of one rank; of one of several stages, or of a rank with its own experts, as the sharded loader
    looks for them.
    """
    from vllm.config import CompilationConfig, KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    for name in ("_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP", "_WORLD"):
        own = Ranks(rank, size) if name in ("_TP", "_WORLD") else Ranks(0, 1)
        if stage is not None and name in ("_PP", "_EP"):
            own = Ranks(*stage) if name == "_PP" else Ranks(rank, size)
        setattr(parallel_state, name, own)
    plain = ParallelConfig()
    parallel = Settings(**{key: getattr(plain, key, None) for key in plain.__dataclass_fields__})
    parallel.tensor_parallel_size, parallel.rank, parallel.is_moe_model = size, rank, True
    parallel.use_sequence_parallel_moe = False
    parallel.pipeline_parallel_size = 1 if stage is None else stage[1]
    parallel.enable_expert_parallel = stage == (0, 1)
    model = Settings(
        hf_config=config,
        hf_text_config=config,
        dtype=torch.float32,
        head_dtype=torch.float32,
        max_model_len=64,
        enforce_eager=True,
        is_attention_free=False,
        use_mla="kv_lora_rank" in config.to_dict(),
        runner_type="generate",
        seed=0,
        try_get_generation_config=dict,
        get_sliding_window=lambda: None,
        get_head_size=lambda: 8,
        pooler_config=Settings(
            get_tok_pooling_type=lambda: "ALL", get_seq_pooling_type=lambda: "CLS", seq_pooling_type="CLS"
        ),
        override_generation_config={},
    )
    settings = VllmConfig.__new__(VllmConfig)
    for key, value in {
        "model_config": model,
        "cache_config": Settings(
            cache_dtype="auto", block_size=16, mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto"
        ),
        "parallel_config": parallel,
        "quant_config": None,
        "lora_config": None,
        "speculative_config": Settings(draft_model_config=model) if "MTP" in kind.__name__ else None,
        "scheduler_config": Settings(max_num_batched_tokens=64, max_num_seqs=4),
        "compilation_config": CompilationConfig(custom_ops=["none"], mode=0),
        "device_config": Settings(device=torch.device("cpu"), device_type="cpu"),
        "load_config": Settings(),
        "attention_config": Settings(),
        "kernel_config": KernelConfig(),
        "observability_config": Settings(enable_layerwise_nvtx_tracing=False),
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "profiler_config": None,
        "additional_config": {},
    }.items():
        object.__setattr__(settings, key, value)
    with set_current_vllm_config(settings), torch.no_grad():
        made = kind(vllm_config=settings)
        for value in made.parameters():
            value.data.zero_()
        # Copies: some loaders write to what they are given.
        made.load_weights((name, value.clone()) for name, value in tensors)
        if stage is None:
            return {name: value.detach().float().numpy() for name, value in made.named_parameters()}
        from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

        known = {name for name, _ in made.named_parameters(remove_duplicate=False)}
        kept = ShardedStateLoader._filter_subtensors(made.state_dict())
        return {name: value.detach().float().numpy() for name, value in kept.items() if name in known}


def said_of(value: Any) -> list[Any]:
    """Shape and digest of a parameter; no digest if the loader computed with its values."""
    whole = value.astype("i4")
    return [list(value.shape), digest(whole) if (value == whole).all() else None]


def as_released(family: str, size: int, said: dict[str, Any]) -> Any:
    """The configuration of a model."""
    config = config_of(family, size)
    for key, value in said["config"].items():
        if not hasattr(config, key):
            setattr(config, key, value)
    if family.startswith("deepseek-v3"):
        config.topk_method = "noaux_tc"  # As in the released files.
    return config


def ask_for_stages(families: Iterable[str], models: dict[str, Any]) -> None:
    """Ask for two stages of two ranks, and for two ranks with experts of their own, of each family's first size."""
    for family in families:
        entry = models.get(FAMILIES[family][0])
        said = read(f"{family}-0")
        if entry is None or "transformers" in entry[0]:
            continue
        tensors = [(name, torch.from_numpy(array).float()) for name, array in elements(said).items()]
        found: dict[str, Any] = {}
        for name, places in {
            "pp=2,tp=2": [(rank, (stage, 2)) for stage in range(2) for rank in range(2)],
            "tp=2,expert_parallel=true": [(rank, (0, 1)) for rank in range(2)],
        }.items():
            try:
                if "expert" in name and not any(".experts." in one for one, _ in tensors):
                    continue
                kind = getattr(importlib.import_module(f"vllm.model_executor.models.{entry[0]}"), entry[1])
                ranks = [loaded(kind, as_released(family, 0, said), tensors, rank, 2, at) for rank, at in places]
                found[name] = [{one: said_of(value) for one, value in each.items()} for each in ranks]
            except Exception as error:
                found[name] = {"refused": f"{type(error).__name__}: {error}"[:200]}
        said["stages"] = {"vllm": found}
        write(f"{family}-0", said)
        counts = {name: one if "refused" in one else list(map(len, one)) for name, one in found.items()}
        print(family, counts, flush=True)


def main() -> None:
    """Ask vLLM for each family that it has."""
    transformers.logging.set_verbosity_error()
    prepare()
    from vllm.model_executor.models.registry import _VLLM_MODELS

    version = os.environ.get("VLLM_VERSION", "0.33.0")
    if "--stages" in sys.argv:
        ask_for_stages([one for one in sys.argv[1:] if one != "--stages"] or [*FAMILIES], _VLLM_MODELS)
        return
    for family in sys.argv[1:] or [*FAMILIES, *DRAFTS]:
        kind, _, sizes = FAMILIES[family.removesuffix("-mtp")]
        entry = DRAFTS.get(family) or _VLLM_MODELS.get(kind)
        for size in range(len(sizes)):
            said = read(f"{family}-{size}")
            tensors = [(name, torch.from_numpy(array).float()) for name, array in elements(said).items()]
            ranks: dict[str, Any] = {}
            for count in RANKS:
                try:
                    if entry is None or "transformers" in entry[0]:
                        raise LookupError("vLLM has no model of its own")
                    config = as_released(family, size, said)
                    if family in DRAFTS:
                        config.num_nextn_predict_layers = 1
                    module = importlib.import_module(f"vllm.model_executor.models.{entry[0]}")
                    found = [loaded(getattr(module, entry[1]), config, tensors, rank, count) for rank in range(count)]
                except Exception as error:
                    ranks[str(count)] = {"refused": f"{type(error).__name__}: {error}"[:200]}
                    if count == 1:
                        import traceback

                        traceback.print_exc(limit=-3)
                else:
                    ranks[str(count)] = [{name: said_of(value) for name, value in one.items()} for one in found]
            if "refused" not in ranks["1"]:
                said["engines"]["vllm"] = {"of": f"vLLM {version}: {entry[1]}.load_weights", "ranks": ranks}
                write(f"{family}-{size}", said)
            print(
                family,
                size,
                {count: "refused" if "refused" in one else len(one[0]) for count, one in ranks.items()},
                flush=True,
            )


if __name__ == "__main__":
    main()
