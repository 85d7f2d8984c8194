"""Transformer Engine's modules with the parameters that they have, and nothing that computes.

Megatron-Core's own layers are built on these: their names, their shapes and their cuts are those of a training run.
Names and shapes are those of `transformer_engine.pytorch` 2.9: `module/linear.py`, `layernorm_linear.py`,
`grouped_linear.py`, `attention/dot_product_attention`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

import torch

from . import vllm_loads

ABSENT = frozenset(
    """
    apex causal_conv1d einops_exts energon fla flash_attn hydra mamba_ssm megatron.energon mlflow
    modelopt nvidia_resiliency_ext open_clip qwen_vl_utils tensorboard transformer_engine
    transformer_engine_torch wandb
    """.split()  # noqa: SIM905 (as a list it is long)
)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape))


class Module(torch.nn.Module):  # type: ignore[misc]
    """What has the state of quantization beside its parameters."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, _: Any) -> None: ...


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, normalized_shape: int = 0, *, hidden_size: int = 0, **_: Any) -> None:
        super().__init__()
        self.weight = parameter(normalized_shape or hidden_size)


class LayerNorm(RMSNorm):
    def __init__(self, *args: int, **given: Any) -> None:
        super().__init__(*args, **given)
        self.bias = parameter(*self.weight.shape)


def cut(inputs: int, outputs: int, mode: str | None, ranks: int) -> tuple[int, int]:
    """The shape of a rank's weight."""
    return outputs // (ranks if mode == "column" else 1), inputs // (ranks if mode == "row" else 1)


class Linear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        shape = cut(in_features, out_features, parallel_mode, tp_size)
        self.use_bias, self.parallel_mode, self.weight = bias, parallel_mode, parameter(*shape)
        if bias:
            self.bias = parameter(shape[0])


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, normalization: str = "LayerNorm", **given: Any) -> None:
        super().__init__(in_features, out_features, **given)
        self.layer_norm_weight = parameter(in_features)
        if normalization == "LayerNorm":
            self.layer_norm_bias = parameter(in_features)


class GroupedLinear(Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        shape = cut(in_features, out_features, parallel_mode, tp_size)
        self.num_gemms, self.use_bias = num_gemms, bias
        for i in range(num_gemms):
            setattr(self, f"weight{i}", parameter(*shape))
            if bias:
                setattr(self, f"bias{i}", parameter(shape[0]))


class DotProductAttention(Module):
    def __init__(
        self, num_attention_heads: int, *_: Any, tp_size: int = 1, softmax_type: str = "vanilla", **__: Any
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = parameter(num_attention_heads // tp_size)


class RMSNormGated(RMSNorm):
    """That of `mamba_ssm`."""

    def __init__(self, hidden_size: int, *_: Any, **__: Any) -> None:
        super().__init__(hidden_size)


class OnTheCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """What is to be made on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def stand_in() -> None:
    """Have these modules imported in place of what is not installed."""
    vllm_loads.ABSENT = ABSENT
    sys.meta_path.insert(0, vllm_loads._Absent())
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    for kind in (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention):
        setattr(engine, kind.__name__, kind)
    top: Any = importlib.import_module("transformer_engine")
    top.pytorch, top.__version__ = engine, "2.9.0"
    offload: Any = importlib.import_module("transformer_engine.pytorch.cpu_offload")
    offload.get_cpu_offload_context = lambda *_, **__: (None, None)
    engine.cpu_offload = types.ModuleType("cpu_offload")
    norms: Any = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")
    norms.RMSNorm = RMSNormGated
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = types.SimpleNamespace
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
