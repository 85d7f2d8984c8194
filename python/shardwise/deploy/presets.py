"""Presets by one short text, `vllm(tp=2, pp=2)`: which device holds what, by whose names, in which form of files."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._arguments import instance, integer
from .._text import shown
from ..errors import LayoutError, ParseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim, concat, part
from ..rules.layout_map import LayoutMap
from ..rules.names import shipped_table, stated
from ..rules.numbers import Config, read_config
from ..rules.rewrites import Rewrites
from ..rules.shipped import example_rules
from ..rules.toml import read_compared, read_models
from ..rules.wrapped import language_config, model_types
from .deployment import Deployment
from .engine_rules import model_of
from .fsdp import fsdp2
from .megatron import Ranks, pipeline
from .notation import parse_call
from .rule import DeploymentRule
from .stages import Stages

__all__ = ["PRESETS", "Preset", "preset"]

#: The part of a prefix of rules that stands for a layer: `(layers\.\d+\.)?`.
_LAYER = re.compile(r"\(([A-Za-z_\\.]+?)\\\.\\d\+\\\.\)\?")
#: Keys of rules for experts, but not for shared ones.
_EXPERTS = re.compile(r"(?<!shared_)(?<![A-Za-z])experts\\\.(?!\)\?)")
#: Names outside of layers, of each kind that engines place alike.
_OUTER = {
    "embedding": r"(?:embed_tokens|embed_in|wte|wpe|word_embeddings|embeddings?)\.",
    "norm": r"(?:norm|norm_f|ln_f|final_layernorm|final_norm)\.",
    "head": r"(?:lm_head|embed_out|output_layer)\.",
}


class Preset(NamedTuple):
    """The layouts, rewrites and files that a preset means for a model.

    Attributes:
        layouts: Who holds what, by the names after the rewrites.
        rewrites: From Hugging Face's names to these; false if there are none.
        form: The form of files that its loader reads; `None` if it has none of its own.
        source: The origin of the layouts: the name of a rules file of the package, or the preset itself.
    """

    layouts: LayoutMap | Deployment
    rewrites: Rewrites
    form: str | None
    source: str


def preset(text: str, config: Config | None = None, *, rules: Any = None, form: str | None = None) -> Preset:
    """Return the deployment that a short text stands for, with the rewrites that lead to its names.

    Args:
        text: a preset with its options: `"vllm(tp=2, pp=2)"`, `"megatron(tp=2, pp=2, ep=4)"`, `"fsdp2(64)"`.
        config: the model's configuration: its family and its sizes are in it.
        rules: a rules file in place of that of the package for the family, over the axis `tp`.
        form: the form of files that is wanted, where an engine has several names for one tensor: Megatron-Core names
            those of its distributed checkpoints, `"megatron"` and `"dcp"`, otherwise than those in memory.

    Raises:
        ParseError: if the text is not a preset with its options; says what there is.
        LayoutError: if the package has no rules for the family, or the engine refuses the sizes.

    >>> config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    ...           "num_hidden_layers": 4, "vocab_size": 128}
    >>> engine = preset("vllm(tp=2, pp=2)", config)
    >>> engine.source, engine.form
    ('vllm/llama', 'vllm')
    >>> engine.layouts.partition("model.layers.3.self_attn.qkv_proj.weight", (96, 64)).holders
    ('cpu:2', 'cpu:3')
    """
    call = parse_call(instance("text", text, str))
    if call.name not in PRESETS:
        raise ParseError(f"{shown(text)}: there is no preset {shown(call.name)}; there are {', '.join(PRESETS)}")
    made = PRESETS[call.name]
    known = [name for name in inspect.signature(made).parameters if name != "_"]
    said = f"{call.name} takes {', '.join(known)}"
    if len(call.values) > 1:
        raise ParseError(f"{shown(text)}: only the first option, {known[0]}, goes without its name; {said}")
    options = {**dict(zip(known, call.values, strict=False))}
    for name, value in call.options.items():
        if name not in known:
            raise ParseError(f"{shown(text)}: there is no option {shown(name)}; {said}")
        if name in options:
            raise ParseError(f"{shown(text)} has {name} twice")
        options[name] = value
    for name, value in options.items():
        _check_kind(f"{shown(text)}: {name}", value, inspect.signature(made).parameters[name].annotation)
    try:
        return made(_Asked({} if config is None else read_config(config), rules, form), **options)
    except LayoutError as error:
        # Of a rule that does not take so many devices: which do is for another command.
        if not str(error).startswith("rule "):
            raise
        raise LayoutError(f"{shown(text)}: {error}; `shardwise fits` says which sizes fit the model") from None


def _check_kind(what: str, value: Any, kind: str) -> None:
    kinds = {"int": int, "bool": bool, "str": str, "list[int]": list}
    own = next(own for name, own in kinds.items() if kind.startswith(name))
    if type(value) is not own:
        called = {int: "a whole number", bool: "true or false", str: "a text", list: "a list, as in [3, 4]"}[own]
        raise ParseError(f"{what} is {shown(value)}; it must be {called}")
    if isinstance(value, int) and own is int and value < 1:
        raise ParseError(f"{what} is {value}; it must be at least 1")


class _Asked(NamedTuple):
    """The model, the rules and the form of files for which a preset is made."""

    config: Mapping[str, Any]
    rules: Any
    form: str | None

    def file(self, engine: str, *others: str) -> Any:
        """The rules file of an engine for the model's family; or of others, if they say that it is for this one too."""
        if self.rules is not None:
            return self.rules
        types = model_types(self.config)
        if not types:
            raise LayoutError(
                "the model's configuration names no model_type, which says whose rules to take: give its config.json, "
                "or rules"
            )
        known = example_rules()
        for folder in (engine, *others):
            found = [
                name
                for name in known
                if name.startswith(f"{folder}/")
                and not name.endswith("-mtp")
                and not {*types}.isdisjoint(read_models(known[name]))
                and (folder == engine or engine in " ".join(read_compared(known[name])).lower())
            ]
            if len(found) > 1:
                found = self._chosen(found)
            if found:
                return found[0]
        raise LayoutError(
            f"the package has no rules for models of the type {' with '.join(types)} in {engine}: give the rules file "
            "of another family that has the same names, or one of your own; `shardwise rules` lists those that there "
            "are"
        )

    def _chosen(self, names: list[str]) -> list[str]:
        """Return that one of several files for models of one type that fits this model.

        Raises:
            LayoutError: if the configuration does not tell.
        """
        method = self.config.get("quantization_config") or {}
        told = {
            "-mxfp4": isinstance(method, Mapping) and method.get("quant_method") == "mxfp4",
            "/falcon-7b": not language_config(self.config).get("new_decoder_architecture", False),
        }
        for end, is_so in told.items():
            one = [name for name in names if name.endswith(end)]
            if one:
                names = one if is_so else [name for name in names if name not in one]
        if len(names) > 1:
            raise LayoutError(
                f"several rules are for this type of models: {', '.join(names)}; give one of them as rules"
            )
        return names

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        said = language_config(self.config)
        found = stated(said, "layers")
        kinds = said.get("layers_block_type") or said.get("hybrid_override_pattern")
        if found is None and isinstance(kinds, (list, str)) and kinds:
            return len(kinds)
        if found is None:
            raise LayoutError("the model's configuration does not say how many layers there are (num_hidden_layers)")
        return integer(f"config[{found[0]!r}]", found[1])

    @property
    def is_tied(self) -> bool:
        """True if the output layer is the embedding."""
        return bool(language_config(self.config).get("tie_word_embeddings", False))

    @property
    def given(self) -> Mapping[str, Any] | None:
        """The configuration, if there is one."""
        return self.config or None

    @property
    def experts(self) -> int:
        """The number of routed experts."""
        found = stated(language_config(self.config), "experts")
        return 0 if found is None else integer(f"config[{found[0]!r}]", found[1])


def _stages(asked: _Asked, layers: list[int] | None, extra: str, pp: int) -> Stages:
    """Return the layers of each stage: as given, or as the engine splits them."""
    if pp == 1 and layers is None:
        return Stages.of_counts([0])  # Nothing asks for them.
    total = asked.layers
    if layers is None:
        return Stages.split(total, pp, extra)
    if len(layers) != pp or sum(layers) != total:
        raise LayoutError(f"layers is {layers}, of {sum(layers)} layers; it must be {pp} stages of {total} in all")
    return Stages.of_counts(layers)


def _mapped(layout: TensorLayout, axes: Mapping[str, tuple[str, ...]]) -> TensorLayout:
    """Return the same layout with axes replaced by others."""

    def mapped(spec: Any) -> Any:
        if spec is None:
            return None
        if isinstance(spec, PackedDim):
            return spec.mapped({name: axes.get(name, (name,)) for name in spec.axis_names})
        names = (spec,) if isinstance(spec, str) else spec
        return tuple(new for name in names for new in axes.get(name, (name,)))

    return TensorLayout([mapped(spec) for spec in layout.axes], unreduced=layout.unreduced)


def _deployment(
    asked: _Asked,
    found: LayoutMap,
    meshes: dict[str, DeviceMesh],
    stages: Stages,
    at: Mapping[str, Any],
    expert: Callable[[TensorLayout], TensorLayout] | None,
) -> Deployment:
    """Return the deployment of a rules file, with coordinates for names, and other layouts for experts.

    Args:
        asked: the model.
        found: the rules, without a mesh.
        meshes: `"dense"`, and `"experts"` if these have another one.
        stages: the layers of each stage.
        at: the coordinates of names.
        expert: makes the layout of a tensor of experts.
    """
    rules = {}
    for key, rule in found.rules().items():
        layout, mesh = rule.layout, "dense"
        if expert is not None and _EXPERTS.search(key) is not None:
            layout, mesh = expert(layout), "experts" if "experts" in meshes else "dense"
        rules[key] = DeploymentRule(layout, mesh, None, rule.uneven, rule.shared, rule.optional)
    default = found.default
    made = Deployment(
        meshes["dense"].size,
        meshes,
        rules,
        numbers={"stage": stages.stage},
        default=None if default is None else DeploymentRule(default.layout, "dense", None, default.uneven),
        match=found.match,
        replicated=[*found.replicated, "dp", "edp", "cp"],
        at=at,
    )
    made._models, made._notes, made._prefix = found.models, found._notes, found.prefix
    return made


def _engine(
    asked: _Asked,
    engine: str,
    file: Any,
    meshes: dict[str, DeviceMesh],
    stages: Stages,
    expert: Callable[[TensorLayout], TensorLayout] | None,
) -> Deployment:
    """Return the deployment of a rules file for vLLM or SGLang, on stages."""
    found = LayoutMap.from_toml(file, config=asked.given)
    at: dict[str, Any] = {}
    if stages.pp > 1:
        layer = _LAYER.search(found.prefix)
        if layer is None:
            raise LayoutError(
                f"the rules {shown(str(file))} do not say how the names of layers begin (a prefix with a part like "
                r"(layers\.\d+\.)?), so nothing says on which stage a tensor is: give pp=1, or the file of a deployment"
            )
        before = found.prefix[: layer.start()]
        at[rf"{before}{layer[1]}\.{{i}}\."] = {"pp": "stage[i]"}
        places = {"embedding": stages.first, "norm": stages.last, "head": stages.last}
        everywhere = shipped_table("engines.toml")["engines"][engine]["on_every_stage"]
        whole = {name for kind in model_types(asked.config) for name in everywhere.get(kind, ())}
        at |= {f"{before}{_OUTER[name]}": {"pp": stage} for name, stage in places.items() if name not in whole}
    return _deployment(asked, found, meshes, stages, at, expert)


def _made(asked: _Asked, file: Any, layouts: LayoutMap | Deployment, form: str | None) -> Preset:
    return Preset(layouts, Rewrites.from_toml(file, config=asked.given), form, str(file))


def _check_stages(asked: _Asked, engine: str, pp: int) -> None:
    said = shipped_table("engines.toml")["engines"][engine]
    if pp > 1 and (found := [kind for kind in model_types(asked.config) if kind in said["no_stages"]]):
        raise LayoutError(f"{said['name']} has no pipeline stages for models of the type {found[-1]}; give pp=1")


def _vllm(
    _: _Asked,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    placement: str = "linear",
    layers: list[int] | None = None,
) -> Preset:
    file = _.file("vllm")
    _check_stages(_, "vllm", pp)
    stages = _stages(_, layers, "middle", pp)
    if placement not in ("linear", "round_robin"):
        raise LayoutError(f"placement is {shown(placement)}; it must be 'linear' or 'round_robin'")
    if expert_parallel and not _.experts:
        raise LayoutError("expert_parallel is true, but the model's configuration names no experts")
    together = ("dp", "tp")

    def expert(layout: TensorLayout) -> TensorLayout:
        if not expert_parallel:
            return _mapped(layout, {"tp": together})
        whole = _mapped(layout, {"tp": ()})
        if placement == "linear":
            first: Any = concat(part((None,), axes=together, uneven="balanced"))
        else:
            if _.experts % (dp * tp):
                raise LayoutError(f"placement is round_robin, and {dp * tp} ranks do not divide {_.experts} experts")
            first = concat(part((None, dp * tp), 1, together))
        return TensorLayout([first, *whole.axes[1:]])

    mesh = DeviceMesh((dp, pp, tp), ("dp", "pp", "tp"))
    changed = expert if expert_parallel or dp > 1 else None
    return _made(_, file, _engine(_, "vllm", file, {"dense": mesh}, stages, changed), "vllm")


def _sglang(
    _: _Asked,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    layers: list[int] | None = None,
    fuse_shared_experts: bool | None = None,
) -> Preset:
    file = _.file("sglang", "vllm")
    _check_stages(_, "sglang", pp)
    if pp > 1 and _.is_tied:
        raise LayoutError(
            "the embedding and the output layer are tied, and the last stage of SGLang has one of its own: give pp=1, "
            "or take shardwise.deploy.sglang for who holds what"
        )
    if tp % ep:
        raise LayoutError(f"ep is {ep}, which does not divide tp, {tp}")
    if ep > 1 and not _.experts:
        raise LayoutError(f"ep is {ep}, but the model's configuration names no experts")
    model = model_of(_.config) if _.experts else None
    if model is not None and (fuse_shared_experts or (fuse_shared_experts is None and model.shared_stacked(ep))):
        raise LayoutError(
            "SGLang stacks the shared experts of this model after the routed ones on CUDA, which its rules here do "
            "not: give fuse_shared_experts=false for a server that is told to hold them apart"
        )
    stages = _stages(_, layers, "last", pp)
    meshes = {
        "dense": DeviceMesh((pp, tp), ("pp", "tp")),
        "experts": DeviceMesh((pp, ep, tp // ep), ("pp", "ep", "moe_tp")),
    }

    def expert(layout: TensorLayout) -> TensorLayout:
        return TensorLayout(["ep", *_mapped(layout, {"tp": ("moe_tp",)}).axes[1:]])

    if ep == 1:
        del meshes["experts"]
    made = _engine(_, "sglang", file, meshes, stages, expert if ep > 1 else None)
    # Its sharded loader asks for the rank of tensor parallelism only.
    return _made(_, file, made, "vllm" if pp == 1 else "ranks")


def _megatron(
    _: _Asked,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dp: int | None = None,
    vpp: int | None = None,
    first: int | None = None,
    last: int | None = None,
    layout: str | None = None,
    order: str = "tp-cp-ep-dp-pp",
) -> Preset:
    least = math.lcm(tp * pp * cp, (etp or tp) * ep * pp)
    world = least if dp is None else tp * pp * cp * dp
    ranks = Ranks(world, tp, pp, cp, ep, etp, order)
    stages = pipeline(_.layers, pp, vpp, first=first, last=last, layout=layout)
    if ep > 1 and (not _.experts or _.experts % ep):
        raise LayoutError(f"ep is {ep}, which does not divide the model's {_.experts} experts")
    if _.form in (None, "megatron", "dcp"):
        # A distributed checkpoint is the same whatever the stages are, and how experts are spread.
        file = _.file("torch_dist")
        found = LayoutMap.from_toml(file, DeviceMesh((tp,), ("tp",)), config=_.given)
        return _made(_, file, found, "megatron")
    if ep > 1 and _.form != "report":
        raise LayoutError(
            f"ep is {ep}: Megatron-Core numbers the experts of each rank from 0, but files for ranks give each tensor "
            "one name; --to megatron writes a checkpoint that all its ranks load"
        )
    file = _.file("megatron")
    embeds = [stages.first, stages.last] if _.is_tied else [stages.first]
    meshes = {"dense": ranks.dense, "experts": ranks.expert}

    def expert(layout: TensorLayout) -> TensorLayout:
        return _mapped(layout, {"tp": ("etp",)})

    start = r"^(?:(?:module|language_model)\.)*"
    layer, end = {"pp": "stage[i]"}, {"pp": stages.last}
    at: dict[str, Any] = {
        rf"{start}embedding\.": {"pp": sorted({*embeds})},
        rf"{start}(?:output_layer|mtp)\.": end,
        rf"{start}decoder\.final_(?:layer)?norm\.": end,
    }
    layers = rf"{start}decoder\.layers\.{{i}}\."
    if ep > 1:
        names = r"mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)){e}(?:\.|$)"
        at[f"{layers}{names}"] = {**layer, "ep": f"e // {_.experts // ep}"}
        layers += r"(?:[^m]|m[^l]|ml[^p]|mlp\.[^e])"  # All others.
    at[layers] = layer
    found = LayoutMap.from_toml(file, config=_.given)
    return _made(_, file, _deployment(_, found, meshes, stages, at, expert), "ranks")


def _fsdp2(_: _Asked, shard: int = 1, replicate: int = 1) -> Preset:
    return Preset(fsdp2(shard, replicate), Rewrites(), None, "fsdp2")


def _transformers(_: _Asked, tp: int = 1) -> Preset:
    file = _.file("hf")
    return _made(_, file, LayoutMap.from_toml(file, DeviceMesh((tp,), ("tp",)), config=_.given), None)


def _maxtext(_: _Asked, tp: int = 1) -> Preset:
    file = _.file("maxtext")
    return _made(_, file, LayoutMap.from_toml(file, DeviceMesh((tp,), ("tp",)), config=_.given), None)


#: The presets by their names; their options are the arguments after the first.
PRESETS: dict[str, Callable[..., Preset]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "megatron": _megatron,
    "fsdp2": _fsdp2,
    "transformers": _transformers,
    "maxtext": _maxtext,
}
