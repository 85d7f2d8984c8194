"""The deployment of a GPT model of Megatron-Core, by the keys of its checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..._text import counted
from ...errors import LayoutError
from ...mesh import DeviceMesh
from ...packed import gate_up
from ..deployment import Deployment
from ..rule import DeploymentRule
from ..stages import Stages
from .ranks import Ranks

__all__ = ["gpt"]


def gpt(
    ranks: Ranks,
    stages: Stages,
    *,
    gated: bool = True,
    tied: bool = False,
    world: Sequence[Hashable] | DeviceMesh | None = None,
) -> Deployment:
    """Return the deployment of a GPT model, dense or with experts, as Megatron-Core holds it.

    Args:
        ranks: Megatron's ranks.
        stages: the layers of each stage; `pipeline` splits them as Megatron does.
        gated: whether the first projection of an MLP is a gate and an up projection one after the other, as for SwiGLU.
        tied: whether the output layer is the embedding, which is then also on the last stage.
        world: labels of the devices, in the order of the ranks; `"cpu:0"`, … by default.

    Raises:
        LayoutError: if the stages are not those of the ranks, or do not hold every layer once.

    The names are the keys of `GPTModel.sharded_state_dict()`, in which experts are stacked in a first dim. Multi-head
    latent attention is that of Megatron's local specification, whose down projections are cut.

    >>> from shardwise.deploy.megatron import Ranks, gpt, pipeline
    >>> trainer = gpt(Ranks(8, tp=2, pp=2, ep=2, etp=1), pipeline(4, pp=2))
    >>> trainer.partition("decoder.layers.3.self_attention.linear_qkv.weight", (24, 8)).holders
    ('cpu:4', 'cpu:5', 'cpu:6', 'cpu:7')
    >>> trainer.partition("decoder.layers.3.mlp.experts.experts.linear_fc2.weight", (4, 8, 6)).box("cpu:5")
    (slice(2, 4, None), slice(0, 8, None), slice(0, 6, None))
    """
    if stages.pp != ranks.pp:
        raise LayoutError(f"stages has {counted(stages.pp, 'stage')}, but ranks has pp {ranks.pp}")
    held = [(number, chunk) for number, row in enumerate(stages.chunks) for chunk in row]
    # The stages of multi-token prediction have the embedding too.
    embeds = sorted({number for number, chunk in held if chunk.embedding or chunk.mtp})
    words = sorted({*embeds, *([stages.last] if tied else [])})
    layer = {"pp": "stage[i]"}
    rows: Any = gate_up("tp") if gated else "tp"
    expert_rows: Any = gate_up("etp") if gated else "etp"

    def dense(axes: Sequence[Any], at: Any = layer) -> DeploymentRule:
        return DeploymentRule(axes, "dense", at)

    rules = {
        r"^embedding\.word_embeddings\.weight$": dense(("tp", None), {"pp": words}),
        r"^embedding\.position_embeddings\.weight$": dense((None, None), {"pp": embeds}),
        r"^decoder\.layers\.{i}\.self_attention\.linear_(qkv|q_proj|[qk]v?_(down|up)_proj)\.weight$": dense(
            ("tp", None)
        ),
        r"^decoder\.layers\.{i}\.self_attention\.linear_qkv\.bias$": dense(("tp",)),
        r"^decoder\.layers\.{i}\.self_attention\.linear_proj\.weight$": dense((None, "tp")),
        r"^decoder\.layers\.{i}\.self_attention\.linear_proj\.bias$": dense((None,)),
        r"^decoder\.layers\.{i}\..*(layernorm|layer_norm)[._](weight|bias)$": dense((None,)),
        r"^decoder\.layers\.{i}\.mlp\.(shared_experts\.)?linear_fc1\.weight$": dense((rows, None)),
        r"^decoder\.layers\.{i}\.mlp\.(shared_experts\.)?linear_fc1\.bias$": dense((rows,)),
        r"^decoder\.layers\.{i}\.mlp\.(shared_experts\.)?linear_fc2\.weight$": dense((None, "tp")),
        r"^decoder\.layers\.{i}\.mlp\.(shared_experts\.)?linear_fc2\.bias$": dense((None,)),
        r"^decoder\.layers\.{i}\.mlp\.router\.weight$": dense((None, None)),
        r"^decoder\.layers\.{i}\.mlp\.router\.(bias|expert_bias)$": dense((None,)),
        r"^decoder\.layers\.{i}\.mlp\.shared_experts\.gate_weight$": dense((None, None)),
        r"^decoder\.layers\.{i}\.mlp\.experts\.experts\.linear_fc1\.weight$": DeploymentRule(
            ("ep", expert_rows, None), "expert", layer
        ),
        r"^decoder\.layers\.{i}\.mlp\.experts\.experts\.linear_fc2\.weight$": DeploymentRule(
            ("ep", None, "etp"), "expert", layer
        ),
        r"^decoder\.final_layernorm\.(weight|bias)$": dense((None,), {"pp": stages.last}),
        r"^output_layer\.weight$": dense(("tp", None), {"pp": stages.last}),
    }
    meshes = {"dense": ranks.dense, "expert": ranks.expert}
    devices = ranks.world if world is None else world
    return Deployment(devices, meshes, rules, numbers={"stage": stages.stage}, replicated=["dp", "edp", "cp"])
