"""The deployments of inference engines, by the names of Hugging Face's checkpoints: vLLM and SGLang. Needs neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._arguments import instance, integer
from .._text import shown
from ..errors import LayoutError, MeshError
from ..mesh import DeviceMesh
from .deployment import Deployment
from .engine_rules import SGLANG, VLLM, EnginePlacement, Experts, World, deployment_of, model_of
from .experts import ExpertMap
from .stages import Stages

__all__ = ["sglang", "vllm"]


def vllm(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    placement: str = "linear",
    redundant: int = 0,
    experts: Experts | None = None,
    stages: Stages | None = None,
    world: World = None,
) -> Deployment:
    """Return the deployment of a model in vLLM.

    Args:
        config: the model's `config.json`, or its text part.
        tp: tensor parallelism, in which key-value heads are repeated if there are fewer.
        pp: pipeline stages.
        dp: data parallelism, of attention only: experts are cut over `dp * tp`.
        expert_parallel: `enable_expert_parallel`: whole experts over `dp * tp`; otherwise their features are cut.
        placement: `expert_placement_strategy`, `"linear"` or `"round_robin"`.
        redundant: redundant experts, placed as before any balancing.
        experts: the experts of each rank, in place of `placement` and `redundant`; for each layer, if balanced.
        stages: the layers of each stage. By default vLLM's own split: if `pp` does not divide the layers, the stages
            just before the last one have one more each.
        world: labels of the devices, in the order of vLLM's ranks, (dp, pp, tp).

    Raises:
        LayoutError: where vLLM refuses: heads, features or the padded vocabulary that tp does not divide.
        TypeError: if an argument is of the wrong type.

    It is for models whose layers are named as those of Llama, Qwen and DeepSeek. `parameters_of` gives vLLM's own
    parameters: fused projections, stacked experts, padded vocabularies. Other names have no rule. The rules are those
    of vLLM 0.33 with its defaults on CUDA, as a model is loaded, before kernels rearrange it: `linear.py`,
    `vocab_parallel_embedding.py`, `fused_moe/`, `parallel_state.py`. `docs/deployments.md` says what differs.

    >>> config = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
    >>> engine = vllm(config, tp=4, pp=2)
    >>> engine.partition("model.layers.3.self_attn.k_proj.weight", (16, 64)).box("cpu:7")
    (slice(8, 16, None), slice(0, 64, None))
    """
    tp, pp, dp = _sizes(tp=tp, pp=pp, dp=dp)
    model = model_of(config)
    model.check_heads(tp)
    base = DeviceMesh((dp, pp, tp), ("dp", "pp", "tp"))
    together = base.transpose("pp", "dp", "tp").flatten(("dp", "tp"), "ep" if expert_parallel else "moe_tp")
    if expert_parallel and model.experts and experts is None:
        experts = _placed(model.experts, instance("placement", placement, str), redundant, dp * tp)
    counts = [model.layers // pp + (0 < pp - 1 - s <= model.layers % pp) for s in range(pp)]
    placed = EnginePlacement(
        VLLM,
        {"attention": base, "experts": together},
        stages or Stages.of_counts(counts),
        world,
        experts if expert_parallel else None,
        (VLLM["pad_to"], VLLM["pad_to"]),
    )
    return deployment_of(model, placed)


def sglang(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    redundant: int = 0,
    experts: Experts | None = None,
    stages: Stages | None = None,
    fuse_shared_experts: bool | None = None,
    world: World = None,
) -> Deployment:
    """Return the deployment of a model in SGLang.

    Args:
        config: the model's `config.json`, or its text part.
        tp: the devices of a stage.
        pp: pipeline stages.
        dp: data-parallel attention within `tp`: attention and the embedding are cut over `tp // dp`, dense and shared
            MLPs and the output layer over `tp`.
        ep: expert parallelism within `tp`; the features of experts are cut over `tp // ep`.
        redundant: redundant experts, placed as before any balancing.
        experts: the experts of each rank, in place of `redundant`; for each layer, if balanced.
        stages: the layers of each stage. By default SGLang's own split: if `pp` does not divide the layers, the last
            stages have one more each.
        fuse_shared_experts: whether shared experts are stacked after the routed ones. If not given, they are stacked as
            SGLang 0.5.23 does it by default on CUDA (compute capability 8.0 or later): for DeepSeek-V3 (256 experts and
            a shared one), GLM-4.5 and GLM-4.7-Flash, if `ep` is 1. Give `False` with
            `--disable-shared-experts-fusion`, with DeepEP, with FlashInfer's TRT-LLM or CuteDSL kernels for experts,
            and on a CPU.
        world: labels of the devices, in the order of SGLang's ranks, (pp, tp).

    Raises:
        LayoutError: if sizes do not divide; if the configuration does not tell whether shared experts are stacked; if
            embeddings are tied over several stages, and `dp` is above 1 or SGLang gives the last stage of such a model
            no output layer.
        TypeError: if an argument is of the wrong type.

    The names are as for `vllm`. With tied embeddings the last of several stages has an output layer of its own,
    `lm_head.weight`. The rules are those of SGLang 0.5.23 with its defaults on CUDA, as a model is loaded, before
    kernels rearrange it: `dp_attention.py`, `parallel_state.py`, `vocab_parallel_embedding.py`, with
    `moe_dense_tp_size` and `enable_dp_lm_head` unset. `docs/deployments.md` says what differs.

    >>> config = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "num_experts": 4}
    >>> engine = sglang(config, tp=4, dp=2, ep=2)
    >>> engine.partition("model.layers.1.mlp.experts.3.up_proj.weight", (32, 64)).holders
    ('cpu:2', 'cpu:3')
    """
    tp, pp, dp, ep = _sizes(tp=tp, pp=pp, dp=dp, ep=ep)
    for name, size in (("dp", dp), ("ep", ep)):
        if tp % size:
            raise LayoutError(f"{name} is {size}, which does not divide tp, {tp}")
    model = model_of(config)
    model.check_heads(tp // dp)
    meshes = {
        "whole": DeviceMesh((pp, tp), ("pp", "tp")),
        "attention": DeviceMesh((pp, dp, tp // dp), ("pp", "dp", "tp")),
        "experts": DeviceMesh((pp, ep, tp // ep), ("pp", "ep", "moe_tp")),
    }
    if model.experts and experts is None:
        experts = _placed(model.experts, "even", redundant, ep)
    counts = [model.layers // pp + (s >= pp - model.layers % pp) for s in range(pp)]
    pads = (_pad(model.vocab, tp // dp), _pad(model.vocab, tp))
    if fuse_shared_experts is None:
        fuse_shared_experts = model.shared_stacked(ep)
    elif instance("fuse_shared_experts", fuse_shared_experts, bool) and ep > 1:
        raise LayoutError(
            f"fuse_shared_experts is True, but ep is {ep}: on CUDA SGLang stacks shared experts with ep 1 only"
        )
    tied_head = model.tied and pp > 1
    if tied_head and dp > 1:
        raise LayoutError(
            f"tied embeddings are cut over tp // dp = {tp // dp} devices on the first stage and over tp = {tp} on the "
            "last, and no rule can express both; give dp=1 or pp=1"
        )
    if tied_head and model.kind in SGLANG["tied_to_the_first"]:
        engine = f"{SGLANG['name']} {SGLANG['version']}"
        raise LayoutError(
            f"{engine} has no output layer on the last stage of a {model.kind} with tied embeddings; give pp=1"
        )
    placed = EnginePlacement(
        SGLANG,
        meshes,
        stages or Stages.of_counts(counts),
        world,
        experts,
        pads,
        outer="whole",
        shared_stacked=fuse_shared_experts,
        tied_head=tied_head,
    )
    return deployment_of(model, placed)


def _placed(num_experts: int, placement: str, redundant: int, ep: int) -> ExpertMap:
    redundant = integer("redundant", redundant)
    if redundant < 0:
        raise LayoutError(f"redundant is {redundant}; it must be 0 or more")
    if redundant:
        return ExpertMap.redundant(num_experts, redundant, ep)
    if placement not in ("linear", "round_robin", "even"):
        raise LayoutError(f"placement is {shown(placement)}; it must be 'linear' or 'round_robin'")
    made: ExpertMap = getattr(ExpertMap, placement)(num_experts, ep)
    return made


def _pad(vocab: int | None, devices: int) -> int:
    """Return SGLang's padded vocabulary: a multiple of 64, or of 64 for each device if 64 does not divide."""
    pad: int = SGLANG["pad_to"]
    return pad if vocab is None or -(-vocab // pad) * pad % devices == 0 else pad * devices


def _sizes(**sizes: int) -> list[int]:
    found = []
    for name, value in sizes.items():
        size = integer(name, value)
        if size < 1:
            raise MeshError(f"{name} is {shown(size)}; it must be at least 1")
        found.append(size)
    return found
