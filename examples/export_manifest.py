"""Write where the weights of a running model are, as JSON: any other program can then plan what it sends or receives.

    torchrun --nproc-per-node 2 examples/export_manifest.py MODEL trainer.json     # transformers, tensor-parallel

Of a running vLLM: `of_vllm(llm).save("engine.json")`, where `llm` is a `vllm.LLM`; nothing is asked of its workers.
"""

import sys
from typing import Any

import shardwise as sw
from shardwise.deploy import Manifest, vllm
from shardwise.interop.torch import manifest_of


def of_transformers(model: Any) -> Manifest:
    """Read the placements of a model's own tensors; those that are not sharded are whole on every rank."""
    state = model.state_dict()
    is_sharded = any(hasattr(tensor, "placements") for tensor in state.values())
    return manifest_of(state, None if is_sharded else sw.DeviceMesh((1,), ("world",)))


def of_vllm(llm: Any) -> Manifest:
    """Read the sizes that vLLM runs with, and the shapes of its checkpoint, by whose names the tensors are called."""
    settings = llm.llm_engine.vllm_config
    parallel, model = settings.parallel_config, settings.model_config
    engine = vllm(
        model.hf_text_config.to_dict(), tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size,
        dp=parallel.data_parallel_size, expert_parallel=parallel.enable_expert_parallel,
        placement=parallel.expert_placement_strategy, redundant=parallel.eplb_config.num_redundant_experts,
    )  # fmt: skip
    with sw.open_checkpoint(model.model) as checkpoint:
        return engine.manifest(checkpoint)


if __name__ == "__main__":
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_plan="auto"))
    if dist.get_rank() == 0:
        of_transformers(loaded).save(sys.argv[2])
    dist.destroy_process_group()
