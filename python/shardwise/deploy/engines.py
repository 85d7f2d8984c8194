"""The deployments of inference engines, by the names of Hugging Face's checkpoints: vLLM and SGLang. Needs neither."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._arguments import instance, integer
from .._text import shown
from ..errors import LayoutError, MeshError
from ..mesh import DeviceMesh
from ..packed import concat, part
from ..rules.wrapped import language_config
from .deployment import Deployment
from .experts import ExpertMap
from .numbers import Number
from .parameters import FusedParameter
from .rule import DeploymentRule
from .stages import Stages

__all__ = ["sglang", "vllm"]

World = Sequence[Hashable] | DeviceMesh | None
#: One map for all layers, or one for each layer by its number.
Experts = ExpertMap | Sequence[ExpertMap]

#: The beginning, before the names of a language model's own tensors, also within a model of text and images.
_LANGUAGE = r"^(?:(?:model|language_model|language|text_model|llm|thinker)\.)*"

#: The architectures in which SGLang 0.5.23 stacks shared experts after the routed ones, on CUDA from capability 8.0 on
#: and with `ep` 1, by its default options: whether it does, given the numbers of routed and shared experts.
_SHARED_STACKED: dict[str, Callable[[int, int], bool]] = {
    "DeepseekV3ForCausalLM": lambda routed, shared: routed == 256 and shared == 1,
    "Glm4MoeForCausalLM": lambda routed, shared: True,
    "Glm4MoeLiteForCausalLM": lambda routed, shared: shared == 1,
}
#: Architectures with shared experts that SGLang never stacks by default on CUDA.
_SHARED_APART = ("DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3NextForCausalLM")
#: The architecture of a `model_type` that has one.
_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
#: Types of which SGLang ties the output layer to an embedding that is on the first stage only.
_TIED_TO_THE_FIRST = ("llama", "mistral")


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
    """Give the deployment of a model in vLLM.

    Args:
        config: the model's `config.json`, or its text part.
        tp: tensor parallelism, in which key-value heads are repeated if there are fewer.
        pp: pipeline stages.
        dp: data parallelism, of attention only: experts are cut over `dp * tp`.
        expert_parallel: `enable_expert_parallel`: whole experts over `dp * tp`; otherwise their features are cut.
        placement: `expert_placement_strategy`, `"linear"` or `"round_robin"`.
        redundant: redundant experts, placed as before any balancing.
        experts: which experts are where, instead of the two before; of each layer, if balanced.
        stages: the layers of each stage; otherwise vLLM's own split, in which further layers go to the stages before
            the last.
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
    model = _model(config)
    model.check_heads(tp)
    base = DeviceMesh((dp, pp, tp), ("dp", "pp", "tp"))
    together = base.transpose("pp", "dp", "tp").flatten(("dp", "tp"), "ep" if expert_parallel else "moe_tp")
    if expert_parallel and model.experts and experts is None:
        experts = _placed(model.experts, instance("placement", placement, str), redundant, dp * tp)
    counts = [model.layers // pp + (0 < pp - 1 - s <= model.layers % pp) for s in range(pp)]
    return _engine(
        model, {"attention": base, "experts": together}, stages or Stages.of_counts(counts), world,
        head="attention", dense="attention", experts=experts if expert_parallel else None, pads=(64, 64),
        stacked="experts.routed_experts", latent="fused_qkv_a_proj", shared_stacked=False, tied_head=False,
    )  # fmt: skip


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
    """Give the deployment of a model in SGLang.

    Args:
        config: the model's `config.json`, or its text part.
        tp: the devices of a stage.
        pp: pipeline stages.
        dp: data-parallel attention within `tp`: attention and the embedding are cut over `tp // dp`, dense and shared
            MLPs and the output layer over `tp`.
        ep: expert parallelism within `tp`; the features of experts are cut over `tp // ep`.
        redundant: redundant experts, placed as before any balancing.
        experts: which experts are where, instead; of each layer, if balanced.
        stages: the layers of each stage; otherwise SGLang's own split, in which further layers go to the last stages.
        fuse_shared_experts: whether shared experts are stacked after the routed ones. If not given, as SGLang 0.5.23
            does by default on CUDA (compute capability 8.0 or later): for DeepSeek-V3 (256 experts and a shared one),
            GLM-4.5 and GLM-4.7-Flash, if `ep` is 1. It is `False` with `--disable-shared-experts-fusion`, with DeepEP,
            with FlashInfer's TRT-LLM or CuteDSL kernels for experts, and on a CPU.
        world: labels of the devices, in the order of SGLang's ranks, (pp, tp).

    Raises:
        LayoutError: if sizes do not divide; if the configuration does not tell whether shared experts are stacked; if
            tied embeddings over several stages are cut in two ways, or the model has no output layer there.
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
    model = _model(config)
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
        raise LayoutError(f"fuse_shared_experts is True, but ep is {ep}: on CUDA SGLang stacks them with ep 1 only")
    tied_head = model.tied and pp > 1
    if tied_head and dp > 1:
        raise LayoutError(
            f"tied embeddings are cut over tp // dp = {tp // dp} devices on the first stage and over tp = {tp} on the "
            "last, which no rule can say; give dp=1 or pp=1"
        )
    if tied_head and model.kind in _TIED_TO_THE_FIRST:
        raise LayoutError(
            f"SGLang 0.5.23 has no output layer on the last stage of a {model.kind} with tied embeddings; give pp=1"
        )
    return _engine(
        model, meshes, stages or Stages.of_counts(counts), world,
        head="whole", dense="whole", experts=experts, pads=pads, stacked="experts",
        latent="fused_qkv_a_proj_with_mqa", shared_stacked=fuse_shared_experts, tied_head=tied_head,
    )  # fmt: skip


@dataclass(frozen=True)
class _Model:
    """The numbers of a model's configuration that the rules need."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int | None
    experts: int
    tied: bool
    #: For multi-head latent attention, rows per head of queries, and of keys and values; `None` without it.
    latent: tuple[int, int] | None
    v_head_dim: int
    #: Shared experts, and by what SGLang knows the model: its type, and its architecture, if that is known.
    shared: int
    kind: str
    architecture: str | None

    def shared_stacked(self, ep: int) -> bool:
        """Tell if SGLang stacks shared experts after the routed ones, by default on CUDA."""
        if not self.experts or not self.shared or ep > 1 or self.architecture in _SHARED_APART:
            return False
        if self.architecture not in _SHARED_STACKED:
            what = "names no architecture" if self.architecture is None else f"is of a {self.architecture}"
            raise LayoutError(
                f"config has shared experts and {what}; whether SGLang stacks these after the routed ones is known of "
                f"{', '.join([*_SHARED_STACKED, *_SHARED_APART])}: give fuse_shared_experts=True or False"
            )
        return _SHARED_STACKED[self.architecture](self.experts, self.shared)

    def check_heads(self, tp: int) -> None:
        kv = self.heads if self.latent is not None else self.kv_heads
        for name, heads in (("num_attention_heads", self.heads), ("num_key_value_heads", kv)):
            if heads % tp and (name == "num_attention_heads" or tp % heads):
                raise LayoutError(f"{name} is {heads}, and {tp} devices neither divide it nor are a multiple of it")


def _model(config: Any) -> _Model:
    instance("config", config, Mapping)  # type: ignore[type-abstract]
    named = config.get("architectures")
    config = language_config(config)
    kind = str(config.get("model_type", ""))

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if config.get(key) is not None:
                value = integer(f"config[{key!r}]", config[key])
                if value < 0:
                    raise LayoutError(f"config[{key!r}] is {value}; it must be 0 or more")
                return value
        if default is None:
            raise LayoutError(f"config has no {' or '.join(keys)}")
        return default

    heads = number("num_attention_heads")
    if not heads:
        raise LayoutError("config['num_attention_heads'] is 0; it must be at least 1")
    is_latent = config.get("kv_lora_rank") is not None
    dim = number("head_dim", default=number("hidden_size") // heads) if not is_latent else 0
    nope, v_dim = (number("qk_nope_head_dim"), number("v_head_dim")) if is_latent else (0, dim)
    return _Model(
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads) or heads,
        head_dim=dim,
        vocab=number("vocab_size") if "vocab_size" in config else None,
        experts=number("num_experts", "num_local_experts", "n_routed_experts", default=0),
        tied=bool(config.get("tie_word_embeddings", False)),
        latent=(nope + number("qk_rope_head_dim"), nope + v_dim) if is_latent else None,
        v_head_dim=v_dim,
        shared=number("n_shared_experts", default=0) or number("shared_expert_intermediate_size", default=0),
        kind=kind,
        architecture=str(named[0]) if isinstance(named, Sequence) and named else _ARCHITECTURES.get(kind),
    )


def _engine(
    model: _Model,
    meshes: dict[str, DeviceMesh],
    stages: Stages,
    world: World,
    *,
    head: str,
    dense: str,
    experts: Experts | None,
    pads: tuple[int, int],
    stacked: str,
    latent: str,
    shared_stacked: bool,
    tied_head: bool,
) -> Deployment:
    """Rules over the meshes `attention` and `experts`, and over those named for the output layer and dense MLPs."""
    if stages.pp != dict(zip(meshes["attention"].axis_names, meshes["attention"].shape, strict=True))["pp"]:
        raise LayoutError(f"stages has {stages.pp} stages, which is not pp")
    numbers: dict[str, Number] = {"stage": stages.stage}
    here = {"pp": "stage[i]"}
    layer = rf"{_LANGUAGE}layers\.{{i}}\."
    attention = rf"{layer}self_attn\."
    heads = concat(part((model.heads, model.latent[0] if model.latent else model.head_dim), axes="tp"))
    kv_heads = (
        concat(part((model.kv_heads, model.head_dim), axes="tp", at_most=model.kv_heads)) if not model.latent else None
    )

    def rule(axes: Sequence[Any], mesh: str = "attention", at: Any = here) -> DeploymentRule:
        return DeploymentRule(axes, mesh, at)

    def vocabulary(pad: int) -> Any:
        return concat(part((None,), axes="tp", pad_to=pad))

    ends = sorted({stages.first, stages.last}) if model.tied else [stages.first]
    rules = {
        rf"{_LANGUAGE}embed_tokens\.weight$": rule((vocabulary(pads[0]), None), at={"pp": ends}),
        rf"{_LANGUAGE}lm_head\.weight$": rule((vocabulary(pads[1]), None), head, {"pp": stages.last}),
        rf"{_LANGUAGE}norm\.weight$": rule((None,), at={"pp": stages.last}),
        rf"{layer}(?:\w+_)?(?:layernorm|norm)\.weight$": rule((None,)),
        rf"{attention}[\w]*norm\.weight$": rule((None,)),
        rf"{attention}o_proj\.weight$": rule((None, "tp")),
        rf"{attention}o_proj\.bias$": rule((None,)),
        rf"{attention}q_proj\.weight$": rule((heads, None)),
    }
    if model.latent is not None:
        both = concat(part((model.heads, model.latent[1]), axes="tp"))
        rules |= {
            rf"{attention}(?:q_a_proj|kv_a_proj_with_mqa)\.weight$": rule((None, None)),
            rf"{attention}q_b_proj\.weight$": rule((heads, None)),
            rf"{attention}kv_b_proj\.weight$": rule((both, None)),
        }
    else:
        rules |= {
            rf"{attention}q_proj\.bias$": rule((heads,)),
            rf"{attention}[kv]_proj\.weight$": rule((kv_heads, None)),
            rf"{attention}[kv]_proj\.bias$": rule((kv_heads,)),
        }
    for mlp in (r"mlp\.", r"(?:mlp|block_sparse_moe)\.shared_experts?\."):
        rules[rf"{layer}{mlp}(?:gate|up)_proj\.weight$"] = rule(("tp", None), dense)
        rules[rf"{layer}{mlp}down_proj\.weight$"] = rule((None, "tp"), dense)
    rules |= {
        rf"{layer}(?:mlp|block_sparse_moe)\.(?:gate|shared_expert_gate)\.weight$": rule((None, None)),
        rf"{layer}(?:mlp|block_sparse_moe)\.gate\.e_score_correction_bias$": rule((None,)),
    }
    fused = _fused_projections(latent, shared_stacked)
    if tied_head:
        fused += [
            FusedParameter(f"{start}lm_head.weight", (f"{start}model.embed_tokens.weight",), at={"pp": stages.last})
            for start in ("", "{rest*}.")
        ]
    if model.experts:
        at, slots = _expert_places(model, experts, meshes["experts"], numbers, here)
        features = "moe_tp" if "moe_tp" in meshes["experts"].axis_names else None
        for group, (gate, up, down) in (
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
            ("block_sparse_moe", ("w1", "w3", "w2")),
        ):
            start = rf"{layer}{group}\.experts\.{{e}}\."
            rules[rf"{start}(?:{gate}|{up})\.weight$"] = rule((features, None), "experts", at)
            rules[rf"{start}{down}\.weight$"] = rule((None, features), "experts", at)
            name = f"{{rest*}}.layers.{{i}}.{group}"
            for stack, kinds in (("w13_weight", (gate, up)), ("w2_weight", (down,))):
                parts = tuple(f"{name}.experts.{{e}}.{x}.weight" for x in kinds)
                after = tuple(f"{name}.shared_experts.{x}.weight" for x in kinds) if shared_stacked else ()
                fused.append(FusedParameter(f"{name}.{stacked}.{stack}", parts, "e", slots, after))
    size = meshes["attention"].size
    made = Deployment(
        size if world is None else world, meshes, rules, numbers=numbers, parameters=fused, replicated=["dp"]
    )
    made._models = (model.kind,) if model.kind else ()
    return made


def _fused_projections(latent: str, shared_stacked: bool) -> list[FusedParameter]:
    """The parameters of attention and of dense MLPs; `latent` is the name of what projects down in latent attention."""
    attention = "{rest*}.self_attn."
    heads = tuple(f"{attention}{x}_proj.{{kind}}" for x in "qkv")
    downs = tuple(f"{attention}{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa"))
    found = [
        FusedParameter(f"{attention}qkv_proj.{{kind}}", heads),
        FusedParameter(f"{attention}{latent}.weight", downs),
    ]
    for mlp in ("mlp", "shared_expert", *(() if shared_stacked else ("shared_experts",))):
        halves = tuple(f"{{rest*}}.{mlp}.{x}_proj.weight" for x in ("gate", "up"))
        found.append(FusedParameter(f"{{rest*}}.{mlp}.gate_up_proj.weight", halves))
    return found


def _expert_places(
    model: _Model, experts: Experts | None, mesh: DeviceMesh, numbers: dict[str, Number], here: dict[str, str]
) -> tuple[dict[str, str], str | None]:
    """Return the coordinates of experts, and the order in which a device stacks them; their lists go into `numbers`."""
    if experts is None:
        return here, None
    maps = [experts] if isinstance(experts, ExpertMap) else list(experts)
    ep = mesh.axis_size("ep")
    for each in maps:
        if not isinstance(each, ExpertMap) or each.ep != ep or each.num_experts != model.experts:
            raise LayoutError(f"experts must be of {model.experts} experts on {ep} ranks, got {shown(each)}")
    if not isinstance(experts, ExpertMap) and len(maps) != model.layers:
        raise LayoutError(f"experts has maps for {len(maps)} layers; the model has {model.layers}")
    numbers["where"] = tuple(places for each in maps for places in each.where)
    numbers["slots"] = tuple(row for each in maps for row in each.slots)
    if isinstance(experts, ExpertMap):
        return {**here, "ep": "where[e]"}, "slots[ep]"
    numbers["experts"] = model.experts
    return {**here, "ep": "where[i * experts + e]"}, f"slots[i * {ep} + ep]"


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
    """SGLang's padding: to 64, or to 64 for each device where that does not divide."""
    return 64 if vocab is None or -(-vocab // 64) * 64 % devices == 0 else 64 * devices


def _sizes(**sizes: int) -> list[int]:
    found = []
    for name, value in sizes.items():
        size = integer(name, value)
        if size < 1:
            raise MeshError(f"{name} is {shown(size)}; it must be at least 1")
        found.append(size)
    return found
