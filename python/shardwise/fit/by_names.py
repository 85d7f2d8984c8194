"""The deployment of a model by the names of its weights: over tensor, pipeline, data and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._text import counted, shown
from ..deploy import Deployment, DeploymentRule, Stages
from ..deploy.megatron import Ranks
from ..errors import LayoutError
from ..packed import gate_up, qkv
from ..quantized.forms import AlikeTensors
from ..rules.model_shapes import is_tied
from ..rules.wrapped import model_types
from .answer import Unknown
from .evidence import Judged, judged, number_of_experts

__all__ = ["Named", "ParallelSizes", "deployed_by_names"]

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])")
_OUTPUT = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)(?:\.|$)")
#: Names after the last layer, of tensors that are in none.
_AFTER = re.compile(r"(?:^|\.)(?:\w*norm\w*|ln_f|lm_head|embed_out|output\w*)(?:\.|$)")


class ParallelSizes(NamedTuple):
    """The sizes of a deployment, as Megatron names them.

    Attributes:
        tp: Tensor parallelism.
        pp: Pipeline stages.
        dp: Data parallelism of what is no expert.
        ep: Expert parallelism, over the ranks of tensor and data parallelism.
        etp: Tensor parallelism of experts; 1 if not given.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.dp


class Named(NamedTuple):
    """A deployment by names.

    Attributes:
        unknown: The kinds of tensors that are not recognised; if there are some, what they take is not known.
        rests_on: The evidence for how tensors are cut.
    """

    deployment: Deployment
    unknown: tuple[Unknown, ...]
    rests_on: tuple[str, ...]


def deployed_by_names(
    kinds: Iterable[AlikeTensors],
    config: Mapping[str, Any],
    sizes: ParallelSizes,
    layers: Sequence[int] | None = None,
) -> Named:
    """Give the deployment of a model of which names and the configuration say how its weights are cut, as `fits` does.

    Args:
        kinds: the kinds of its tensors, as `find_kinds` finds them.
        config: what `config.json` says.
        sizes: the sizes of tensor, pipeline, data and expert parallelism.
        layers: the layers of each stage; if not given as many on each, and one more on the last stages but the very
            last where they do not divide.

    Raises:
        LayoutError: if heads, experts or layers do not divide.
        MeshError: if sizes do not make a world.
    """
    for name, size in zip(sizes._fields, sizes, strict=True):
        if size is not None and size < 1:
            raise LayoutError(f"{name} is {size}; it must be at least 1")
    known = judged(kinds, config)
    unknown = tuple(
        Unknown(one.name, len(one.kind.names), one.kind.tensor.shape, one.role.unknown)
        for one in known
        if one.role.unknown
    )
    experts = number_of_experts((one.kind, one.role) for one in known)
    ranks = Ranks(sizes.world, tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp if experts else None)
    if not experts and sizes.ep > 1:
        raise LayoutError(f"ep is {sizes.ep}, but no experts are known in this model")
    if experts % sizes.ep:
        raise LayoutError(f"ep is {sizes.ep}, which does not divide the {experts} experts")
    stages = _stages(known, sizes.pp, layers)
    tied = is_tied(config) and not any(_OUTPUT.search(one.name) for one in known)
    rules: dict[str, DeploymentRule] = {}
    cut_rows: dict[str, Any] = {}
    for one in known:
        axes = _axes(one, sizes)
        if one.kind.tensor.name.endswith(".weight") and len(axes) == 2:
            cut_rows[one.name.removesuffix(".weight")] = axes[0]
        _add(rules, one, axes, _at(one, stages, experts, sizes.ep, tied=tied))
    for one in known:  # A bias is cut as the rows of its weight.
        if one.kind.tensor.name.endswith(".bias") and (rows := cut_rows.get(one.name.removesuffix(".bias"))):
            key = _key(one.kind.tensor.name)[0]
            rules[key] = DeploymentRule((rows,), rules[key].mesh, dict(rules[key].at), uneven=rules[key].uneven)
    deployment = Deployment(
        sizes.world,
        {"dense": ranks.dense, "expert": ranks.expert},
        rules,
        numbers={"stage": stages.stage},
        replicated=["dp", "cp", "edp"],
    )
    return Named(deployment, unknown, _reasons(known, config))


def _reasons(known: Iterable[Judged], config: Mapping[str, Any]) -> tuple[str, ...]:
    cuts = [one for one in known if one.role.dim is not None]
    names = sorted({one.rests_on.split("; ")[0].removeprefix("the name ") for one in cuts})
    said = dict.fromkeys(part for one in cuts for part in one.rests_on.split("; ")[1:])
    types = [f"model_type = {one}" for one in model_types(config)]
    return (f"names as in Hugging Face's checkpoints: {', '.join(names)}", *said, *types) if cuts else ()


def _stages(known: Iterable[Judged], pp: int, layers: Sequence[int] | None) -> Stages:
    count = max((number for one in known for number in _layers(one.kind.names)), default=-1) + 1
    if layers is None:
        if pp > max(count, 1):
            raise LayoutError(f"pp is {pp}, but the model has only {counted(count, 'layer')}")
        layers = [count // pp + (0 < pp - 1 - stage <= count % pp) for stage in range(pp)]
    if len(layers) != pp or sum(layers) != count:
        raise LayoutError(
            f"layers is {shown(list(layers))}; it must have {counted(pp, 'stage')}, with {counted(count, 'layer')} "
            "in all"
        )
    return Stages.of_counts(layers)


def _layers(names: Sequence[str]) -> set[int]:
    """Return the numbers of the layers in names that differ in numbers only; empty if they have none."""
    found = _NUMBER.search(names[0])
    if found is None:
        return set()
    at, after = found.start(), names[0][found.end() : found.end() + 1]
    return {int(text) for text in {name[at : name.index(after, at) if after else None] for name in names}}


def _key(name: str) -> tuple[str, bool, bool]:
    """Return the rule for names like this one, and whether it has the number of a layer, and of an expert."""
    parts, at, numbers = [], 0, 0
    is_expert = False
    for found in _NUMBER.finditer(name):
        before = name[at : found.start()]
        parts.append(re.escape(before))
        if numbers == 0:
            parts.append("{i}")
        elif before.endswith("experts."):
            parts.append("{e}")
            is_expert = True
        else:
            parts.append("[0-9]+")
        at, numbers = found.end(), numbers + 1
    return f"^{''.join(parts)}{re.escape(name[at:])}$", numbers > 0, is_expert


def _add(rules: dict[str, DeploymentRule], one: Judged, axes: Sequence[Any], at: Any) -> None:
    is_expert = one.role.expert != ""
    uneven: Any = "ceil" if one.role.vocabulary else None
    rule = DeploymentRule(axes, "expert" if is_expert else "dense", at, uneven=uneven)
    key, _, _ = _key(one.kind.tensor.name)
    if rules.setdefault(key, rule) != rule:
        raise LayoutError(f"the tensors {one.name} have several shapes, which need different cuts; give a rules file")


def _at(one: Judged, stages: Stages, experts: int, ep: int, *, tied: bool) -> dict[str, Any]:
    _, has_layer, has_expert = _key(one.kind.tensor.name)
    if one.role.elsewhere:
        return {"pp": 0}
    at: dict[str, Any] = {"pp": "stage[i]"} if has_layer else {}
    if has_expert and one.role.expert == "one":
        at["ep"] = f"e // {experts // ep}"
    if not has_layer:
        last = stages.pp - 1
        at["pp"] = last if _AFTER.search(one.name) else [0, last] if tied and one.role.vocabulary and last else 0
    return at


def _axes(one: Judged, sizes: ParallelSizes) -> list[Any]:
    """Return the axes of a tensor, dim by dim."""
    tensor, role, tp = one.kind.tensor, one.role, sizes.tp
    axes: list[Any] = [None] * len(tensor.shape)
    if role.dim is None or role.unknown or role.elsewhere:
        return axes
    dim = len(tensor.shape) + role.dim
    axis = "etp" if role.expert else "tp"
    if role.expert == "stacked":
        axes[0] = "ep"
    q, kv = one.heads.q, one.heads.kv
    if role.heads in ("q", "kv", "qkv") and q % tp:
        raise _undivided(tp, counted(q, "head"), one)
    if role.heads == "linear" and one.heads.linear % tp:
        raise _undivided(tp, counted(one.heads.linear, "head"), one)
    if role.heads in ("kv", "qkv") and kv % tp and tp % kv:
        raise _undivided(tp, counted(kv, "key-value head"), one)
    axes[dim] = axis
    if role.heads == "kv" and kv < tp:
        axes[dim] = f"{axis}:(1){kv}" if kv > 1 else None
    elif role.heads == "qkv" and kv < tp:
        size = one.heads.size or tensor.shape[dim] // (q + 2 * kv)
        axes[dim] = qkv(q, kv, size, axis, v_head_dim=one.heads.value_size or None)
    elif role.parts == 2:
        axes[dim] = gate_up(axis)
    return axes


def _undivided(tp: int, heads: str, one: Judged) -> LayoutError:
    said = f"tp is {tp}, which does not divide the {heads} of {one.name}"
    return LayoutError(f"{said}; `shardwise fits` says which sizes fit the model")
