"""The deployments that engines make of the rules for a family: on stages, with experts over other axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .._text import counted, shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..rules.book import take_origin
from ..rules.layout_map import LayoutMap
from ..rules.names import shipped_table
from ..rules.wrapped import model_types
from .deployment import Deployment
from .preset_model import PresetModel
from .rule import DeploymentRule
from .stages import Stages

__all__ = ["layouts_of_file", "refuse_stages", "staged_deployment", "stages_of", "with_axes"]

#: The part of a prefix of rules that stands for a layer: `(layers\.\d+\.)?`.
_LAYER = re.compile(r"\(([A-Za-z_\\.]+?)\\\.\\d\+\\\.\)\?")
#: Keys of rules for experts, but not for shared ones.
_EXPERTS = re.compile(r"(?<!shared_)(?<![A-Za-z])experts\\\.(?!\)\?)")
#: Names of experts, by which a rule is found that is for experts and for others alike.
_NAMED = (
    *(
        f"{layer}.experts.{wrapped}{name}"
        for layer in ("model.layers.0.mlp", "model.layers.0.block_sparse_moe", "model.layers.0.feed_forward")
        for wrapped in ("", "routed_experts.")
        for name in ("w13_weight", "w2_weight")
    ),
    *(
        f"decoder.layers.0.mlp.experts.{name}"
        for fc in ("linear_fc1", "linear_fc2")
        for name in (f"{fc}.weight0", f"{fc}.bias0", f"local_experts.0.{fc}.weight", f"local_experts.0.{fc}.bias")
    ),
)
#: Names outside of layers, of each kind that engines place alike.
_OUTER = {
    "embedding": r"(?:embed_tokens|embed_in|wte|wpe|word_embeddings|embeddings?)\.",
    "norm": r"(?:norm|norm_f|ln_f|final_layernorm|final_norm)\.",
    "head": r"(?:lm_head|embed_out|output_layer)\.",
}


def stages_of(model: PresetModel, layers: list[int] | None, extra: str, pp: int) -> Stages:
    """Return the layers of each stage: as given, or as the engine splits them."""
    if pp == 1 and layers is None:
        return Stages.of_counts([0])  # Nothing asks for them.
    total = model.layers
    if layers is None:
        return Stages.split(total, pp, extra)
    if len(layers) != pp or sum(layers) != total:
        raise LayoutError(
            f"layers is {layers}, {counted(sum(layers), 'layer')} in all; it must have {counted(pp, 'stage')}, with "
            f"{counted(total, 'layer')} in all"
        )
    return Stages.of_counts(layers)


def with_axes(layout: TensorLayout, axes: Mapping[str, tuple[str, ...]]) -> TensorLayout:
    """Return the same layout with axes replaced by others."""

    def mapped(spec: Any) -> Any:
        if spec is None:
            return None
        if isinstance(spec, PackedDim):
            return spec.mapped({name: axes.get(name, (name,)) for name in spec.axis_names})
        names = (spec,) if isinstance(spec, str) else spec
        return tuple(new for name in names for new in axes.get(name, (name,)))

    return TensorLayout([mapped(spec) for spec in layout.axes], unreduced=layout.unreduced)


def layouts_of_file(
    found: LayoutMap,
    meshes: dict[str, DeviceMesh],
    stages: Stages,
    at: Mapping[str, Any],
    expert: Callable[[TensorLayout], TensorLayout] | None,
) -> Deployment:
    """Return the deployment of a rules file, with coordinates for names, and other layouts for experts.

    Args:
        found: the rules, without a mesh.
        meshes: `"dense"`, and `"experts"` if these have another one.
        stages: the layers of each stage.
        at: the coordinates of names.
        expert: makes the layout of a tensor of experts; `None` if they are placed as others.

    Raises:
        LayoutError: if a rule is for experts and for others alike, and these are placed otherwise.
    """
    rules = {}
    for name in _NAMED if expert is not None else ():
        for key in found.matching_rules(name):
            if _EXPERTS.search(key) is None:
                raise LayoutError(
                    f"the rules have {shown(key.removeprefix(found.prefix))} for both experts and other tensors, "
                    r"but experts are placed differently: give experts rules of their own, with experts\. in the key"
                )
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
    take_origin(made, found)
    return made


def staged_deployment(
    model: PresetModel,
    engine: str,
    file: Any,
    meshes: dict[str, DeviceMesh],
    stages: Stages,
    expert: Callable[[TensorLayout], TensorLayout] | None,
) -> Deployment:
    """Return the deployment of a rules file for vLLM or SGLang, on stages."""
    found = LayoutMap.from_toml(file, config=model.config_if_any)
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
        whole = {name for kind in model_types(model.config) for name in everywhere.get(kind, ())}
        at |= {f"{before}{_OUTER[name]}": {"pp": stage} for name, stage in places.items() if name not in whole}
    return layouts_of_file(found, meshes, stages, at, expert)


def refuse_stages(model: PresetModel, engine: str, pp: int) -> None:
    """Refuse stages of a model that the engine runs without."""
    said = shipped_table("engines.toml")["engines"][engine]
    if pp > 1 and (found := [kind for kind in model_types(model.config) if kind in said["no_stages"]]):
        raise LayoutError(f"{said['name']} has no pipeline stages for models of the type {found[-1]}; give pp=1")
