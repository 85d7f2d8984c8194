"""What every rank loads of a weight, by the loaders of vLLM and of SGLang themselves.

The modules of an engine that cut are run as they are; for the rest of the engine (servers, kernels, process groups)
stands `Around`, so that neither what they need nor a device has to be there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

#: The modules of an engine that are run.
OWN = {
    "vllm": {
        "vllm.model_executor.layers.fused_moe.expert_map_manager",
        "vllm.model_executor.layers.fused_moe.routed_experts",
        "vllm.model_executor.layers.linear",
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "vllm.model_executor.parameter",
        "vllm.model_executor.utils",
    },
    "sglang": {
        "sglang.srt.layers.linear",
        "sglang.srt.layers.parameter",
        "sglang.srt.layers.utils.common",
    },
}


class Around(ModuleType):
    """A module of the engine that is not run: its classes are empty, its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Classes are inherited from and asked for by `isinstance`.
        value = type(name, (), {}) if name[0].isupper() and not name.isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder:
    """Finds the modules of one engine: its own files for `OWN`, `Around` for all others."""

    def __init__(self, package: str, root: Path) -> None:
        self.package, self.root = package, root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.package:
            return None
        if name in OWN[self.package]:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Around(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def divide(numerator: int, denominator: int) -> int:
    """As both engines define it."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


def version(package: str) -> str:
    """Make the engine's modules ready; say which version they are of."""
    import torch

    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    sys.meta_path.insert(0, Finder(package, Path(next(iter(found.submodule_search_locations)))))
    if package == "vllm":

        class PluggableLayer(torch.nn.Module):  # type: ignore[misc]
            @staticmethod
            def register(_: str) -> Any:
                return lambda layer: layer

        around("vllm.model_executor.custom_op", PluggableLayer=PluggableLayer)
        around("vllm.distributed", divide=divide)
        around("vllm.config", get_current_vllm_config_or_none=lambda: None)
        platform = MagicMock(simple_compile_backend="eager")
        platform.is_cuda.return_value = platform.use_sync_weight_loader.return_value = False
        around("vllm.platforms", current_platform=platform)
    else:

        class UnquantizedLinearMethod:
            """Makes the weight as SGLang's does, and lets the layer fill it."""

            def create_weights(self, layer: Any, output_partition_sizes: list[int], **given: Any) -> None:
                parameter = importlib.import_module("sglang.srt.layers.parameter")
                data = torch.empty(sum(output_partition_sizes), given["input_size"], dtype=given["params_dtype"])
                layer.weight = parameter.ModelWeightParameter(
                    data=data, input_dim=1, output_dim=0, weight_loader=given["weight_loader"]
                )

        around("sglang.srt.layers.quantization.unquant", UnquantizedLinearMethod=UnquantizedLinearMethod)
        around("sglang.srt.distributed", divide=divide)
        around(
            "sglang.srt.distributed.utils",
            get_group_rank_size=lambda group: (group.rank_in_group, group.world_size),
        )
        around("sglang.srt.utils", is_hip=bool, is_cpu=bool, is_npu=bool, set_weight_attrs=set_attributes)
    for name in sorted(OWN[package]):
        importlib.import_module(name)
    return importlib.metadata.version(package)


def around(name: str, **values: Any) -> None:
    """Give a module of the engine that is not run these values."""
    vars(importlib.import_module(name)).update(values)


def set_attributes(parameter: Any, attributes: dict[str, Any] | None) -> None:
    for name, value in (attributes or {}).items():
        setattr(parameter, name, value)


def at_rank(package: str, rank: int, ranks: int) -> Any:
    """The module of the linear layers, which believes to be this rank of so many."""
    linear: Any = sys.modules["vllm.model_executor.layers.linear" if package == "vllm" else "sglang.srt.layers.linear"]
    if package == "sglang":
        linear._resolve_linear_group = lambda _: SimpleNamespace(rank_in_group=rank, world_size=ranks)
        return linear
    for name in sorted(OWN["vllm"]):
        module: Any = sys.modules[name]
        if hasattr(module, "get_tensor_model_parallel_rank"):
            module.get_tensor_model_parallel_rank = lambda: rank
            module.get_tensor_model_parallel_world_size = lambda: ranks
    return linear


def loaded(case: dict[str, Any]) -> list[list[int]]:
    """The rows that a layer's own loader puts into the weight of every rank; -1 where nothing is loaded.

    `case["from"]` says how the checkpoint has them: `"apart"`, each tensor by its own name, or `"fused"`, in one.
    `case["loader"]` names one of the two loaders that the layers have.
    """
    import torch

    if case["layer"] == "experts":
        return experts(case)
    held = []
    parts: dict[Any, int]
    for rank in range(case["ranks"]):
        linear = at_rank(case["engine"], rank, case["ranks"])
        options = {"bias": False, "params_dtype": torch.float64}
        if case["layer"] == "qkv":
            queries, kv_heads, size, value_size = case["numbers"]
            heads = queries * kv_heads
            layer = linear.QKVParallelLinear(1, size, heads, kv_heads, v_head_size=value_size, **options)
            parts = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * value_size}
        elif case["layer"] == "merged":
            layer = linear.MergedColumnParallelLinear(1, list(case["numbers"]), **options)
            parts = dict(enumerate(case["numbers"]))
        else:
            layer = vocabulary(case)
            parts = {None: case["numbers"][0]}
        layer.weight.data.fill_(-1)
        # Whole numbers below 2**53, which a float64 holds.
        rows = torch.arange(sum(parts.values()), dtype=torch.float64).reshape(-1, 1)
        load = getattr(layer, case["loader"])
        if case["layer"] == "vocabulary":
            # It fills what is padding with zeros; the rows count from one.
            load(layer.weight, rows + 1)
            layer.weight.data -= 1
        elif case["from"] == "fused":
            load(layer.weight, rows)
        else:
            for name, part in zip(parts, rows.split(list(parts.values())), strict=True):
                load(layer.weight, part, name)
        held.append([int(row) for row in layer.weight.data.flatten().tolist()])
    return held


def vocabulary(case: dict[str, Any]) -> Any:
    import torch

    module: Any = sys.modules["vllm.model_executor.layers.vocab_parallel_embedding"]
    size, multiple = case["numbers"]
    return module.VocabParallelEmbedding(size, 1, params_dtype=torch.float64, padding_size=multiple)


def experts(case: dict[str, Any]) -> list[list[int]]:
    """The rows of stacked experts, gate and up one after the other: by `_load_w13` of features, or of whole experts."""
    import torch

    moe = "vllm.model_executor.layers.fused_moe"
    count, size = case["numbers"]
    rows = torch.arange(count * 2 * size).reshape(count, 2, size, 1)
    held = []
    for rank in range(case["ranks"]):
        if case["from"] == "experts":
            own = sys.modules[f"{moe}.expert_map_manager"].determine_expert_map(case["ranks"], rank, count)[1]
            held.append(rows if own is None else rows[own >= 0])
            continue
        owner = sys.modules[f"{moe}.routed_experts"].RoutedExperts
        parallel = SimpleNamespace(tp_size=case["ranks"])
        around_it = SimpleNamespace(
            moe_config=SimpleNamespace(is_act_and_mul=True, moe_parallel_config=parallel),
            _get_hidden_dim=owner._get_hidden_dim,
            _narrow_expert_data_for_padding=owner._narrow_expert_data_for_padding,
        )
        weight = torch.full((count, 2 * (size // case["ranks"]), 1), -1)
        for expert in range(count):
            for part, name in enumerate(("w1", "w3")):
                owner._load_w13(around_it, weight[expert], 0, name, rows[expert, part], rank)
        held.append(weight)
    return [tensor.flatten().tolist() for tensor in held]
