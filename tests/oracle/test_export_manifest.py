"""The example that exports where a running model's weights are, with transformers under tensor parallelism."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", minversion="5.10")
pytest.importorskip("torch")

from shardwise import open_checkpoint, plan_model  # noqa: E402
from shardwise.deploy import Manifest, vllm  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_manifest.py"
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}

#: What each rank really has, beside what the example says.
RANK = """
import sys, runpy, numpy as np
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import torch.distributed as dist
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_plan="auto"))
found = {n: getattr(t, "to_local", lambda t=t: t)().float().numpy() for n, t in model.state_dict().items()}
np.savez(f"{sys.argv[2]}/rank-{dist.get_rank()}.npz", **found)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(intermediate_size=48, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def torchrun(*arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    package = str(Path(__file__).parents[2] / "python")
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": package})


def adapter() -> Any:
    spec = importlib.util.spec_from_file_location("export_manifest", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_rank_has_what_the_manifest_says(model: Path, tmp_path: Path) -> None:
    torchrun(EXAMPLE, model, tmp_path / "trainer.json")
    (tmp_path / "rank.py").write_text(RANK)
    torchrun(tmp_path / "rank.py", model, tmp_path)
    made = Manifest.load(tmp_path / "trainer.json")
    with open_checkpoint(model) as checkpoint:
        assert set(made) == set(checkpoint)
        for rank in range(2):
            with np.load(tmp_path / f"rank-{rank}.npz") as held:
                for name in made:
                    (piece,) = made[name].pieces(f"cpu:{rank}")
                    assert np.array_equal(held[name], checkpoint.read(name, piece.box)), name
        assert any(made[name].pieces("cpu:1")[0].box[0].start for name in made)
        # Another program plans with the file alone.
        engine = vllm({**SIZES, "intermediate_size": 48}, tp=2, world=["gpu:0", "gpu:1"])
        assert plan_model(made, engine, made.tensors).total_bytes() > 0


def test_a_model_that_is_whole(model: Path) -> None:
    made = adapter().of_transformers(transformers.LlamaForCausalLM.from_pretrained(model))
    assert {one.holders for one in made.values()} == {("cpu:0",)}


def test_the_sizes_that_vllm_runs_with(model: Path) -> None:
    """The attributes are those of vLLM 0.33: `LLM.llm_engine.vllm_config`, `ParallelConfig`, `ModelConfig`."""
    parallel = SimpleNamespace(
        tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False,
        expert_placement_strategy="linear", eplb_config=SimpleNamespace(num_redundant_experts=0),
    )  # fmt: skip
    config = transformers.LlamaConfig.from_pretrained(model)
    settings = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=config, model=str(model))
    )
    made = adapter().of_vllm(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=settings)))
    expected = vllm({**SIZES, "intermediate_size": 48}, tp=2)
    for name, tensor in made.tensors.items():
        assert made[name] == expected.partition(name, tensor.shape)
