"""The rules of inference engines for a model, by the names of Hugging Face's checkpoints, and what they fuse."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .._arguments import instance, integer
from .._text import counted, shown
from ..errors import LayoutError
from ..mesh import DeviceMesh
from ..packed import concat, gate_up, part
from ..rules.book import note_origin
from ..rules.model_shapes import is_tied
from ..rules.names import (
    architecture_of,
    expert_names,
    keys_of,
    merged_names,
    module_words,
    shipped_table,
    stated,
    types_with,
)
from ..rules.wrapped import language_config
from .deployment import Deployment
from .experts import ExpertMap
from .numbers import Number
from .parameters import FusedParameter
from .rule import DeploymentRule
from .stages import Stages

__all__ = ["SGLANG", "VLLM", "EngineModel", "EnginePlacement", "Experts", "World", "deployment_of", "model_of"]

World = Sequence[Hashable] | DeviceMesh | None
#: One map for all layers, or one for each layer by its number.
Experts = ExpertMap | Sequence[ExpertMap]

#: The beginning, before the names of a language model's own tensors, also within a model of text and images.
_LANGUAGE = rf"^(?:(?:{'|'.join(module_words('language'))})\.)*"
#: The beginning of the names of a layer's tensors, and the stage where a layer is.
_LAYER = rf"{_LANGUAGE}layers\.{{i}}\."
_OF_LAYER = {"pp": "stage[i]"}
#: The facts about each engine, with its version, date and source.
VLLM, SGLANG = (shipped_table("engines.toml")["engines"][name] for name in ("vllm", "sglang"))


@dataclass(frozen=True)
class EngineModel:
    """The numbers of a model's configuration that the rules need."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int | None
    experts: int
    #: The features between the projections of an expert; 0 if they are not stated.
    expert_inner: int
    tied: bool
    #: The rows per head of queries, and of keys and values, of multi-head latent attention; `None` without it.
    latent: tuple[int, int] | None
    #: True if the queries of latent attention are projected down first.
    latent_queries: bool
    v_head_dim: int
    #: Shared experts, and by what SGLang knows the model: its type, and its architecture, if that is known.
    shared: int
    kind: str
    architecture: str | None

    def shared_stacked(self, ep: int) -> bool:
        """Return whether SGLang stacks shared experts after the routed ones, as it does by default on CUDA."""
        stacked, apart = SGLANG["shared_stacked"], SGLANG["shared_apart"]
        if not self.experts or not self.shared or ep > 1 or self.architecture in apart:
            return False
        if self.architecture not in stacked:
            what = "names no architecture" if self.architecture is None else f"is of a {self.architecture}"
            raise LayoutError(
                f"config has shared experts and {what}. Whether SGLang stacks them after the routed ones is only known "
                f"for {', '.join([*stacked, *apart])}: give fuse_shared_experts=True or False"
            )
        counts = {"routed": self.experts, "shared": self.shared}
        return all(counts[name] == count for name, count in stacked[self.architecture].items())

    def check_heads(self, tp: int) -> None:
        """Refuse numbers of heads that `tp` devices can neither divide nor repeat.

        Raises:
            LayoutError: if they do not.
        """
        kv = self.heads if self.latent is not None else self.kv_heads
        for name, heads in (("num_attention_heads", self.heads), ("num_key_value_heads", kv)):
            if heads % tp and (name == "num_attention_heads" or tp % heads):
                raise LayoutError(f"{name} is {heads}, and {tp} devices neither divide it nor are a multiple of it")


def model_of(config: Any) -> EngineModel:
    """Return the numbers of a model's configuration, or of its part for text.

    Raises:
        LayoutError: if a number is missing or below 0.
        TypeError: if it is no mapping, or a number is no integer.
    """
    instance("config", config, Mapping)  # type: ignore[type-abstract]
    named, tied = config.get("architectures"), is_tied(config)
    config = language_config(config)
    kind = str(config.get("model_type", ""))

    def number(size: str, default: int | None = None) -> int:
        found = stated(config, size)
        if found is not None:
            value = integer(f"config[{found[0]!r}]", found[1])
            if value < 0:
                raise LayoutError(f"config[{found[0]!r}] is {value}; it must be 0 or more")
            return value
        if default is None:
            raise LayoutError(f"config has no {' or '.join(keys_of(size))}")
        return default

    heads = number("heads")
    if not heads:
        key, _ = stated(config, "heads") or ("", 0)
        raise LayoutError(f"config[{key!r}] is 0; it must be at least 1")
    is_latent = stated(config, "kv_rank") is not None
    dim = number("head_dim", default=number("hidden") // heads) if not is_latent else 0
    nope, v_dim = (number("nope_head_dim"), number("v_head_dim")) if is_latent else (0, dim)
    return EngineModel(
        layers=number("layers"),
        heads=heads,
        kv_heads=number("kv_heads", default=heads) or heads,
        head_dim=dim,
        vocab=number("vocabulary") if any(key in config for key in keys_of("vocabulary")) else None,
        experts=number("experts", default=0),
        expert_inner=number("expert_inner", default=0) or number("inner", default=0),
        tied=tied,
        latent=(nope + number("rope_head_dim"), nope + v_dim) if is_latent else None,
        latent_queries=stated(config, "q_rank") is not None,
        v_head_dim=v_dim,
        shared=number("shared_experts", default=0) or number("shared_inner", default=0),
        kind=kind,
        architecture=str(named[0]) if isinstance(named, Sequence) and named else architecture_of(kind),
    )


class EnginePlacement(NamedTuple):
    """The devices of a model in an engine, and the choices in which engines differ.

    Attributes:
        engine: The engine, as `engines.toml` has it.
        meshes: The meshes `"attention"` and `"experts"`, and another one if `outer` names it.
        stages: The layers of each stage.
        world: The labels of the devices.
        experts: The places of experts; `None` if all devices hold all of them, with their features cut.
        pads: The numbers to multiples of which the rows of the embedding and of the output layer are padded.
        outer: The mesh of the output layer and of dense MLPs.
        shared_stacked: Whether shared experts are stacked after the routed ones.
        tied_head: Whether the last stage has an output layer of its own although it is tied.
    """

    engine: Mapping[str, Any]
    meshes: dict[str, DeviceMesh]
    stages: Stages
    world: World
    experts: Experts | None
    pads: tuple[int, int]
    outer: str = "attention"
    shared_stacked: bool = False
    tied_head: bool = False


def deployment_of(model: EngineModel, placed: EnginePlacement) -> Deployment:
    """Return the deployment of a model in an engine: rules over its meshes, and the parameters that it fuses.

    Raises:
        LayoutError: if the stages or the experts are not those of the meshes.
    """
    meshes, stages = placed.meshes, placed.stages
    if stages.pp != meshes["attention"].axis_size("pp"):
        raise LayoutError(f"stages has {counted(stages.pp, 'stage')}, but pp is {meshes['attention'].axis_size('pp')}")
    numbers: dict[str, Number] = {"stage": stages.stage}
    rules = {**_end_rules(model, placed), **_attention_rules(model), **_dense_rules(placed.outer)}
    rules |= _vocabulary_adapters(model, placed)
    fused = _fused_projections(model, placed)
    if placed.tied_head:
        fused += [
            FusedParameter(f"{start}lm_head.weight", (f"{start}model.embed_tokens.weight",), at={"pp": stages.last})
            for start in ("", "{rest*}.")
        ]
    if model.experts:
        at, slots = _expert_places(model, placed.experts, meshes["experts"], numbers)
        rules |= _expert_rules(model, placed, at)
        fused += _fused_experts(placed, slots)
    made = Deployment(
        meshes["attention"].size if placed.world is None else placed.world,
        meshes,
        rules,
        numbers=numbers,
        parameters=fused,
        replicated=["dp"],
    )
    note_origin(made, (model.kind,) if model.kind else ())
    return made


def _rule(axes: Sequence[Any], mesh: str = "attention", at: Any = _OF_LAYER) -> DeploymentRule:
    """Return the rule of tensors of a layer, unless `at` says where else they are."""
    return DeploymentRule(axes, mesh, at)


def _end_places(model: EngineModel, placed: EnginePlacement) -> dict[str, dict[str, Any] | None]:
    """Return the stages of the embedding, the last norm and the head; `None` for what is on every stage."""
    stages = placed.stages
    first = sorted({stages.first, stages.last}) if model.tied else [stages.first]
    everywhere = placed.engine["on_every_stage"].get(model.kind, ())
    places = {"embedding": first, "norm": stages.last, "head": stages.last}
    return {kind: None if kind in everywhere else {"pp": at} for kind, at in places.items()}


def _end_rules(model: EngineModel, placed: EnginePlacement) -> dict[str, DeploymentRule]:
    """Return the rules of the tensors before and after the layers."""
    at = _end_places(model, placed)
    words, head = (concat(part((None,), axes="tp", pad_to=pad)) for pad in placed.pads)
    return {
        rf"{_LANGUAGE}embed_tokens\.weight$": _rule((words, None), at=at["embedding"]),
        rf"{_LANGUAGE}lm_head\.weight$": _rule((head, None), placed.outer, at["head"]),
        rf"{_LANGUAGE}norm\.weight$": _rule((None,), at=at["norm"]),
    }


def _attention_rules(model: EngineModel) -> dict[str, DeploymentRule]:
    """Return the rules of a layer's norms and of its attention."""
    attention = rf"{_LAYER}self_attn\."
    heads = concat(part((model.heads, model.latent[0] if model.latent else model.head_dim), axes="tp"))
    rules = {
        rf"{_LAYER}(?:\w+_)?(?:layernorm|norm)\.weight$": _rule((None,)),
        rf"{attention}[\w]*norm\.weight$": _rule((None,)),
        rf"{attention}o_proj\.weight$": _rule((None, "tp")),
        rf"{attention}o_proj\.bias$": _rule((None,)),
        rf"{attention}q_proj\.weight$": _rule((heads, None)),
    }
    if model.latent is not None:
        both = concat(part((model.heads, model.latent[1]), axes="tp"))
        return rules | {
            rf"{attention}(?:q_a_proj|kv_a_proj_with_mqa)\.weight$": _rule((None, None)),
            rf"{attention}q_b_proj\.weight$": _rule((heads, None)),
            rf"{attention}kv_b_proj\.weight$": _rule((both, None)),
        }
    kv_heads = concat(part((model.kv_heads, model.head_dim), axes="tp", at_most=model.kv_heads))
    return rules | {
        rf"{attention}q_proj\.bias$": _rule((heads,)),
        rf"{attention}[kv]_proj\.weight$": _rule((kv_heads, None)),
        rf"{attention}[kv]_proj\.bias$": _rule((kv_heads,)),
    }


def _dense_rules(mesh: str) -> dict[str, DeploymentRule]:
    """Return the rules of a layer's dense and shared MLPs, and of its routers, which every rank has whole."""
    rules = {}
    for mlp in (r"mlp\.", r"(?:mlp|block_sparse_moe)\.shared_experts?\."):
        rules[rf"{_LAYER}{mlp}(?:gate|up)_proj\.weight$"] = _rule(("tp", None), mesh)
        rules[rf"{_LAYER}{mlp}down_proj\.weight$"] = _rule((None, "tp"), mesh)
    return rules | {
        rf"{_LAYER}(?:mlp|block_sparse_moe)\.(?:gate|shared_expert_gate)\.weight$": _rule((None, None)),
        rf"{_LAYER}(?:mlp|block_sparse_moe)\.gate\.e_score_correction_bias$": _rule((None,)),
    }


def _vocabulary_adapters(model: EngineModel, placed: EnginePlacement) -> dict[str, DeploymentRule]:
    """Return the rules of adapters of what is cut by the vocabulary.

    They are added after it is whole again, except those of SGLang's output layer.
    """
    at = _end_places(model, placed)
    whole = (r"embed_tokens\.lora_embedding_[AB]", at["embedding"]), (r"lm_head\.lora_[AB]\.weight", at["head"])
    return {
        rf"^(?:.*\.)?{name}$": DeploymentRule((None, None), "attention", places, optional=True)
        for name, places in (whole if placed.engine is VLLM else whole[:1])
    }


def _expert_rules(model: EngineModel, placed: EnginePlacement, at: dict[str, str]) -> dict[str, DeploymentRule]:
    """Return the rules of experts' weights, one by one and in stacks, and of adapters of these."""
    features = "moe_tp" if "moe_tp" in placed.meshes["experts"].axis_names else None
    axis, size = _stack_axis(placed.experts), model.expert_inner
    rules = {}
    for group, (gate, up, down) in expert_names():
        start = rf"{_LAYER}{group}\.experts\."
        rules[rf"{start}{{e}}\.(?:{gate}|{up})\.weight$"] = _rule((features, None), "experts", at)
        rules[rf"{start}{{e}}\.{down}\.weight$"] = _rule((None, features), "experts", at)
        if axis is not False and size and model.kind != "gpt_oss":  # It has rows of gate and up in turn.
            # The sizes refuse a stack whose dims are in the other order.
            is_turned = model.kind in types_with("experts_in_out")
            halves = gate_up(features, size) if features else None
            inner = concat(part((size,), axes=features)) if features else None
            for last, dims in (("gate_up", (halves, None)), ("down", (None, inner))):
                axes = (axis, *(reversed(dims) if is_turned else dims))
                rules[rf"{start}{last}_proj$"] = DeploymentRule(axes, "experts", _OF_LAYER, optional=True)
    return rules


def _fused_experts(placed: EnginePlacement, slots: str | None) -> list[FusedParameter]:
    """Return the parameters in which an engine stacks experts, in the order `slots`."""
    found = []
    for group, (gate, up, down) in expert_names():
        name = f"{{rest*}}.layers.{{i}}.{group}"
        for stack, kinds in (("w13_weight", (gate, up)), ("w2_weight", (down,))):
            parts = tuple(f"{name}.experts.{{e}}.{x}.weight" for x in kinds)
            after = tuple(f"{name}.shared_experts.{x}.weight" for x in kinds) if placed.shared_stacked else ()
            found.append(FusedParameter(f"{name}.{placed.engine['experts']}.{stack}", parts, "e", slots, after))
    return found


def _fused_projections(model: EngineModel, placed: EnginePlacement) -> list[FusedParameter]:
    """Return the fused parameters of attention and of dense MLPs."""
    attention = "{rest*}.self_attn."
    (heads,) = (one.parts for one in merged_names() if one.parts[0] == "q_proj")
    (halves,) = (one.parts for one in merged_names() if one.parts[0] == "gate_proj")
    downs = tuple(f"{attention}{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa"))
    found = []
    if model.latent is None:
        found.append(FusedParameter(f"{attention}qkv_proj.{{kind}}", tuple(f"{attention}{x}.{{kind}}" for x in heads)))
    elif model.latent_queries:
        found.append(FusedParameter(f"{attention}{placed.engine['latent']}.weight", downs))
    for mlp in ("mlp", "shared_expert", *(() if placed.shared_stacked else ("shared_experts",))):
        parts = tuple(f"{{rest*}}.{mlp}.{x}.weight" for x in halves)
        found.append(FusedParameter(f"{{rest*}}.{mlp}.gate_up_proj.weight", parts))
    return found


def _stack_axis(experts: Experts | None) -> str | Literal[False] | None:
    """Return the axis that cuts a stack of all experts; `False` if none places experts as they are placed."""
    if experts is None:
        return None
    if not isinstance(experts, ExpertMap) or experts.num_experts % experts.ep:
        return False
    each = experts.num_experts // experts.ep
    rows = [tuple(range(rank * each, (rank + 1) * each)) for rank in range(experts.ep)]
    return "ep" if [tuple(row) for row in experts.slots] == rows else False


def _expert_places(
    model: EngineModel, experts: Experts | None, mesh: DeviceMesh, numbers: dict[str, Number]
) -> tuple[dict[str, str], str | None]:
    """Return the coordinates of experts, and the order in which a device stacks them; their lists go into `numbers`."""
    if experts is None:  # All of them in turn, on each device.
        numbers["slots"] = (tuple(range(model.experts)),)
        return _OF_LAYER, "slots[0]"
    maps = [experts] if isinstance(experts, ExpertMap) else list(experts)
    ep = mesh.axis_size("ep")
    for each in maps:
        if not isinstance(each, ExpertMap) or each.ep != ep or each.num_experts != model.experts:
            raise LayoutError(
                f"experts must place {counted(model.experts, 'expert')} on {counted(ep, 'rank')}, got {shown(each)}"
            )
    if not isinstance(experts, ExpertMap) and len(maps) != model.layers:
        raise LayoutError(f"experts has maps for {counted(len(maps), 'layer')}; the model has {model.layers}")
    numbers["where"] = tuple(places for each in maps for places in each.where)
    numbers["slots"] = tuple(row for each in maps for row in each.slots)
    if isinstance(experts, ExpertMap):
        return {**_OF_LAYER, "ep": "where[e]"}, "slots[ep]"
    numbers["experts"] = model.experts
    return {**_OF_LAYER, "ep": "where[i * experts + e]"}, f"slots[i * {ep} + ep]"
