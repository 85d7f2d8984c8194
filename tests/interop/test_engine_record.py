"""Recordings of engines: their own loaders where their sources are importable, and a small engine elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardwise as sw

torch = pytest.importorskip("torch")

from shardwise.interop import sglang, vllm  # noqa: E402

CONFIG = {"model_type": "tiny", "architectures": ["Tiny"], "hidden_size": 4}
SHAPES = {"q": ((8, 4), "bfloat16"), "k": ((4, 4), "bfloat16"), "norm": ((4,), "bfloat16"), "scale": ((1,), "bfloat16")}


class Tiny(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Fuses two tensors, and cuts each; the norm is on the last stage."""

    def __init__(self, groups: Any, is_cut: bool = True) -> None:
        super().__init__()
        self.groups, self.is_cut = groups, is_cut
        size = groups["tp"].world_size
        # As engines do: in the dtype of the configuration, and not filled.
        self.qk = torch.nn.Parameter(torch.empty(12 // size, 4, dtype=torch.float32))
        if groups["pp"].is_last_rank:
            self.norm = torch.nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        rank, size = self.groups["tp"].rank_in_group, self.groups["tp"].world_size
        for name, tensor in weights:
            if name in ("q", "k"):
                rows = len(tensor) // size
                start = 0 if name == "q" else 8 // size
                self.qk.data[start : start + rows] = tensor[rank * rows : (rank + 1) * rows]
            elif name == "norm" and hasattr(self, "norm"):
                self.norm.data.copy_(tensor)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the adapter for vLLM imports of it, by the names and with the arguments that these have in vLLM 0.33."""
    known = SimpleNamespace(made=[], folders=[], kind=Tiny)
    state = SimpleNamespace(**dict.fromkeys(("_WORLD", "_TP", "_PP", "_DP", "_EP", "_EPLB", "_DCP", "_PCP")))

    def initialize_model(vllm_config: Any) -> Any:
        known.made.append(vllm_config)
        known.folders.append(json.loads(Path(vllm_config.model_config.model, "config.json").read_text()))
        return known.kind({"tp": state._TP, "pp": state._PP})

    kinds = ("DeviceConfig", "LoadConfig", "ModelConfig", "ParallelConfig", "VllmConfig")
    config: dict[str, Any] = {kind: lambda *_, **given: SimpleNamespace(**given) for kind in kinds}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": config,
        "vllm.distributed": {"parallel_state": state},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.utils": {"initialize_model": initialize_model},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    known.state = state
    return known


def test_each_rank_of_vllm_is_recorded(engine: SimpleNamespace) -> None:
    ranks = vllm.record_ranks(CONFIG, 2, pp=2, tensors=SHAPES)
    numbers = {"q": np.arange(1, 33).reshape(8, 4), "k": np.arange(33, 49).reshape(4, 4), "norm": np.arange(49, 53)}
    assert [one.holder for one in ranks] == [0, 1, 2, 3]
    for rank, one in enumerate(ranks):
        own = rank % 2
        parts = [np.split(numbers[name], 2)[own] for name in ("q", "k")]
        assert np.array_equal(one.element_numbers("qk"), np.concatenate(parts))
        assert ("norm" in one.parameters) == (rank > 1)
        assert one.unused == (("scale",) if rank > 1 else ("norm", "scale"))
    assert np.array_equal(ranks[3].element_numbers("norm"), numbers["norm"])
    assert engine.folders[0]["model_type"] == "tiny"
    assert {one.parallel_config.tensor_parallel_size for one in engine.made} == {2}
    assert engine.state._TP is None  # As before.


def test_what_an_engine_refuses_or_computes_is_named(engine: SimpleNamespace) -> None:
    class Scaled(Tiny):
        def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
            super().load_weights((name, tensor * 2 if name == "k" else tensor) for name, tensor in weights)

    engine.kind = Scaled
    with pytest.raises(sw.LayoutError, match="the loader computes 16 of 48 elements of 'qk'"):
        vllm.record_ranks(CONFIG, tensors=SHAPES)
    (one,) = vllm.record_ranks(CONFIG, tensors=SHAPES, computed="leave")
    assert dict(one.computed) == {"qk": 16}

    class Odd(Tiny):
        def __init__(self, groups: Any) -> None:
            raise ValueError("12 is not divisible by 5")

    engine.kind = Odd
    with pytest.raises(sw.LayoutError, match="vLLM cannot load the model with tp 5, pp 1: ValueError: 12 is not div"):
        vllm.record_ranks(CONFIG, 5, tensors=SHAPES)
    with pytest.raises(sw.LayoutError, match="tp must be 1 or more, got 0"):
        vllm.record_ranks(CONFIG, 0, tensors=SHAPES)
    with pytest.raises(sw.LayoutError, match="the configuration has no architectures"):
        vllm.record_ranks({"model_type": "tiny"}, tensors=SHAPES)
    with pytest.raises(sw.LayoutError, match="ep is 3, which does not divide tp, 4"):
        sglang.record_ranks(CONFIG, 4, ep=3, tensors=SHAPES)
    engine.state._WORLD = "workers"
    with pytest.raises(sw.LayoutError, match="this process is one of vLLM's own; record in a process of its own"):
        vllm.record_ranks(CONFIG, tensors=SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "sglang", "megatron"])
def test_the_engines_own_loaders_do_what_the_rules_say(name: str) -> None:
    """With tensor parallelism, stages and experts, in sizes of no file; sources of the engine must be importable."""
    sources = "megatron.bridge" if name == "megatron" and importlib.util.find_spec(name) is not None else name
    if importlib.util.find_spec(sources) is None or importlib.util.find_spec("transformers") is None:
        pytest.skip(f"{name} or transformers cannot be imported")
    families = ["llama", "qwen3-moe"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.oracle.families.adapters", name, *families],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"family"')]
    assert [one["family"] for one in lines] == families, run.stderr[-2000:]
    for one in lines:
        for text, said in one["presets"].items():
            is_dense = one["family"] == "llama" and ("expert" in text or "ep=" in text)
            assert is_dense or (said.get("wrong") == [] and said["elements"] > 50000), (one["family"], text, said)
