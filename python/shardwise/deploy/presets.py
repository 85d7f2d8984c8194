"""Presets by one short text, `vllm(tp=2, pp=2)`: which device holds what, by whose names, in which form of files."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError, ParseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import concat, part
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config, read_config
from ..rules.rewrites import Rewrites
from .deployment import Deployment
from .engine_rules import model_of
from .fsdp import fsdp2
from .megatron import Ranks, pipeline
from .notation import parse_call
from .preset_layouts import layouts_of_file, refuse_stages, staged_deployment, stages_of, with_axes
from .preset_model import PresetModel

__all__ = ["PRESETS", "Preset", "preset"]


class Preset(NamedTuple):
    """The layouts, rewrites and files that a preset means for a model.

    Attributes:
        layouts: The layouts of the tensors, by their names after the rewrites.
        rewrites: The rewrites from Hugging Face's names to those of `layouts`; false if there are none.
        form: The form of the files that the engine's loader reads; `None` if the engine has no form of its own.
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
        form: the format of files, needed where an engine has several names for one tensor: Megatron-Core's names in
            distributed checkpoints (`"megatron"`, `"dcp"`) differ from those in memory.

    Raises:
        ParseError: if the text is not a preset with its options; the message lists the presets, or the options.
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
    kind = PRESETS[call.name]
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = list(fields)
    said = f"{call.name} takes {', '.join(known)}"
    if len(call.values) > 1:
        raise ParseError(f"{shown(text)}: only the first option, {known[0]}, can be given without its name; {said}")
    options = {**dict(zip(known, call.values, strict=False))}
    for name, value in call.options.items():
        if name not in known:
            raise ParseError(f"{shown(text)}: there is no option {shown(name)}; {said}")
        if name in options:
            raise ParseError(f"{shown(text)} has {name} twice")
        options[name] = value
    for name, value in options.items():
        _check_kind(f"{shown(text)}: {name}", value, fields[name])
    try:
        model = PresetModel({} if config is None else read_config(config), rules, form)
        return kind(**options).preset(model)
    except LayoutError as error:
        # Of a rule that does not take so many devices: which do is for another command.
        if not str(error).startswith("rule "):
            raise
        raise LayoutError(f"{shown(text)}: {error}; `shardwise fits` says which sizes fit the model") from None
    except TypeError as error:
        # Of a configuration in a file the types are part of its form.
        if not str(error).startswith("config["):
            raise
        raise ParseError(f"{shown(text)}: {error}") from None


def _check_kind(what: str, value: Any, kind: str) -> None:
    kinds = {"int": int, "bool": bool, "str": str, "list[int]": list}
    own = next(own for name, own in kinds.items() if kind.startswith(name))
    if type(value) is not own:
        called = {int: "a whole number", bool: "true or false", str: "a text", list: "a list, as in [3, 4]"}[own]
        raise ParseError(f"{what} is {shown(value)}; it must be {called}")
    if isinstance(value, int) and own is int and value < 1:
        raise ParseError(f"{what} is {value}; it must be at least 1")


def _made(model: PresetModel, file: Any, layouts: LayoutMap | Deployment, form: str | None) -> Preset:
    return Preset(layouts, Rewrites.from_toml(file, config=model.config_if_any), form, str(file))


def _by_tp(model: PresetModel, engine: str, tp: int) -> Preset:
    """Return the layouts of an engine whose only axis is tensor parallelism."""
    file = model.file(engine)
    layouts = LayoutMap.from_toml(file, DeviceMesh((tp,), ("tp",)), config=model.config_if_any)
    return _made(model, file, layouts, None)


class _Engine(Protocol):
    """The options of a preset, which are its fields."""

    def preset(self, model: PresetModel) -> Preset:
        """Return the layouts, rewrites and files for a model."""


@dataclass(frozen=True)
class _Vllm:
    """The options of vLLM."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    placement: str = "linear"
    layers: list[int] | None = None

    def preset(self, model: PresetModel) -> Preset:
        tp, pp, dp = self.tp, self.pp, self.dp
        file = model.file("vllm")
        refuse_stages(model, "vllm", pp)
        stages = stages_of(model, self.layers, "middle", pp)
        if self.placement not in ("linear", "round_robin"):
            raise LayoutError(f"placement is {shown(self.placement)}; it must be 'linear' or 'round_robin'")
        if self.expert_parallel and not model.experts:
            raise LayoutError("expert_parallel is true, but the model's configuration names no experts")
        together = ("dp", "tp")

        def expert(layout: TensorLayout) -> TensorLayout:
            if not self.expert_parallel:
                return with_axes(layout, {"tp": together})
            whole = with_axes(layout, {"tp": ()})
            if self.placement == "linear":
                first: Any = concat(part((None,), axes=together, uneven="balanced"))
            else:
                if model.experts % (dp * tp):
                    raise LayoutError(
                        f"placement is round_robin, and {dp * tp} ranks do not divide {model.experts} experts"
                    )
                first = concat(part((None, dp * tp), 1, together))
            return TensorLayout([first, *whole.axes[1:]])

        mesh = DeviceMesh((dp, pp, tp), ("dp", "pp", "tp"))
        changed = expert if self.expert_parallel or dp > 1 else None
        return _made(model, file, staged_deployment(model, "vllm", file, {"dense": mesh}, stages, changed), "vllm")


@dataclass(frozen=True)
class _SGLang:
    """The options of SGLang."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    layers: list[int] | None = None
    fuse_shared_experts: bool | None = None

    def preset(self, model: PresetModel) -> Preset:
        tp, pp, ep = self.tp, self.pp, self.ep
        file = model.file("sglang", "vllm")
        refuse_stages(model, "sglang", pp)
        if pp > 1 and model.is_tied:
            raise LayoutError(
                "the embedding and the output layer are tied: with several stages, SGLang's last stage has its own "
                "output layer or none. Give pp=1, or use shardwise.deploy.sglang, which says what each device holds"
            )
        if tp % ep:
            raise LayoutError(f"ep is {ep}, which does not divide tp, {tp}")
        if ep > 1 and not model.experts:
            raise LayoutError(f"ep is {ep}, but the model's configuration names no experts")
        served, fused = model_of(model.config) if model.experts else None, self.fuse_shared_experts
        if served is not None and (fused or (fused is None and served.shared_stacked(ep))):
            raise LayoutError(
                "on CUDA SGLang stacks the shared experts of this model after the routed ones, and these rules do "
                "not: give fuse_shared_experts=false if the server keeps them separate"
            )
        stages = stages_of(model, self.layers, "last", pp)
        meshes = {
            "dense": DeviceMesh((pp, tp), ("pp", "tp")),
            "experts": DeviceMesh((pp, ep, tp // ep), ("pp", "ep", "moe_tp")),
        }

        def expert(layout: TensorLayout) -> TensorLayout:
            return TensorLayout(["ep", *with_axes(layout, {"tp": ("moe_tp",)}).axes[1:]])

        if ep == 1:
            del meshes["experts"]
        made = staged_deployment(model, "sglang", file, meshes, stages, expert if ep > 1 else None)
        # Its sharded loader asks for the rank of tensor parallelism only.
        return _made(model, file, made, "vllm" if pp == 1 else "ranks")


@dataclass(frozen=True)
class _Megatron:
    """The options of Megatron-Core."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    vpp: int | None = None
    first: int | None = None
    last: int | None = None
    layout: str | None = None
    order: str = "tp-cp-ep-dp-pp"

    def preset(self, model: PresetModel) -> Preset:
        tp, pp, cp, ep = self.tp, self.pp, self.cp, self.ep
        least = math.lcm(tp * pp * cp, (self.etp or tp) * ep * pp)
        world = least if self.dp is None else tp * pp * cp * self.dp
        ranks = Ranks(world, tp, pp, cp, ep, self.etp, self.order)
        # A layout says itself whether further tokens are predicted.
        mtp = model.predicted if self.layout is None or "m" in self.layout else None
        stages = pipeline(model.layers, pp, self.vpp, first=self.first, last=self.last, layout=self.layout, mtp=mtp)
        if ep > 1 and (not model.experts or model.experts % ep):
            raise LayoutError(f"ep is {ep}, which does not divide the model's {model.experts} experts")
        if model.form in (None, "megatron", "dcp"):
            # A distributed checkpoint is the same whatever the stages are, and how experts are spread.
            file = model.file("torch_dist")
            found = LayoutMap.from_toml(file, DeviceMesh((tp,), ("tp",)), config=model.config_if_any)
            return _made(model, file, found, "megatron")
        if ep > 1 and model.form != "report":
            raise LayoutError(
                f"ep is {ep}: Megatron-Core numbers the experts of each rank from 0, but files for ranks give each "
                "tensor one name; --to megatron writes a checkpoint that all its ranks load"
            )
        if pp > 1 and model.is_tied and model.form != "report":
            raise LayoutError(
                f"the embedding and the output layer are tied, and pp is {pp}: the last stage of Megatron-Core names "
                "its copy output_layer.weight, but files for ranks give each tensor one name; --to megatron writes a "
                "checkpoint that all its ranks load"
            )
        file = model.file("megatron")
        predicting = {stage for stage, row in enumerate(stages.chunks) for chunk in row if chunk.mtp}
        embeds = {stages.first, *([stages.last] if model.is_tied else []), *predicting}
        meshes = {"dense": ranks.dense}
        if is_apart := ep > 1 or self.etp not in (None, tp):
            meshes["experts"] = ranks.expert

        def expert(layout: TensorLayout) -> TensorLayout:
            return with_axes(layout, {"tp": ("etp",)})

        start = r"^(?:(?:module|language_model)\.)*"
        layer, end, last = {"pp": "stage[i]"}, {"pp": stages.last}, {"pp": sorted(predicting or {stages.last})}
        at: dict[str, Any] = {
            rf"{start}embedding\.": {"pp": sorted(embeds)},
            rf"{start}output_layer\.": end,
            rf"{start}decoder\.final_(?:layer)?norm\.": end,
        }
        layers, later = rf"{start}decoder\.layers\.{{i}}\.", rf"{start}mtp\.layers\.\d+\."
        if ep > 1:
            names = r"mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)){e}(?:\.|$)"
            others = r"(?:[^m]|m[^l]|ml[^p]|mlp\.[^e])"
            spread = {"ep": f"e // {model.experts // ep}"}
            at |= {f"{layers}{names}": {**layer, **spread}, rf"{later}\w+\.{names}": {**last, **spread}}
            layers, later = f"{layers}{others}", rf"{later}\w+\.{others}"
        at |= {layers: layer, later: last}
        found = LayoutMap.from_toml(file, config=model.config_if_any)
        return _made(model, file, layouts_of_file(found, meshes, stages, at, expert if is_apart else None), "ranks")


@dataclass(frozen=True)
class _Fsdp2:
    """The options of PyTorch's FSDP2."""

    shard: int = 1
    replicate: int = 1

    def preset(self, model: PresetModel) -> Preset:
        return Preset(fsdp2(self.shard, self.replicate), Rewrites(), None, "fsdp2")


@dataclass(frozen=True)
class _Transformers:
    """The options of the library transformers."""

    tp: int = 1

    def preset(self, model: PresetModel) -> Preset:
        return _by_tp(model, "hf", self.tp)


@dataclass(frozen=True)
class _MaxText:
    """The options of MaxText."""

    tp: int = 1

    def preset(self, model: PresetModel) -> Preset:
        return _by_tp(model, "maxtext", self.tp)


#: The presets by their names.
PRESETS: dict[str, type[_Engine]] = {
    "vllm": _Vllm,
    "sglang": _SGLang,
    "megatron": _Megatron,
    "fsdp2": _Fsdp2,
    "transformers": _Transformers,
    "maxtext": _MaxText,
}
