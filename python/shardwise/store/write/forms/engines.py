"""Checks and renames for files that the sharded loaders of vLLM and SGLang read: unsuitable tensors are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....layout import UnevenRule
from ....placing import Placing
from ....rules.adapters import adapter_names
from ....rules.left_out import names_text
from ....rules.names import WeightRole, merged_names, shipped_table, weights
from ....rules.shipped import example_rules
from ....rules.templates import parse_template
from ....rules.toml import read_models, search_of
from ....rules.wrapped import model_types
from ....shared_tiling import SharedTiling
from ...rewritten.partitions import partition_for
from .rank_files import FileRanks

__all__ = ["check_blocks", "check_family", "check_stages", "engine_tensors"]

#: The output layer, as the engines call it.
_HEAD = "lm_head.weight"
#: A pattern found in the names of embeddings: `embed_tokens`, `word_embeddings`, `embed_in`, `wte`.
_EMBEDDING = re.compile(r"embed|\bwte\b")
#: Groups of sibling modules that the engines fuse into one parameter in every model.
_FUSED = tuple(merged.parts for merged in merged_names() if merged.always)
_MODULE = re.compile(
    rf"(.*?)\b({'|'.join(name for names in _FUSED for name in names)})\.(weight|bias|weight_packed|qweight)$"
)
#: A pattern found in the name of a tensor of one expert; the engines stack experts.
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_ADVICE = (
    "rules of the engine's own names make them, as vllm/llama or sglang/qwen3-moe do for their families (`shardwise "
    "rules` lists them), and so does the preset vllm(tp=…) (--for, or shardwise.deploy.preset); to='ranks' has files "
    "for ranks of any names"
)


def engine_tensors(wanted: list[Wanted], layouts: Placing, uneven: UnevenRule) -> list[Wanted]:
    """Return tensors as the engines' sharded loaders look for them: under all names that an engine has for them.

    Raises:
        LayoutError: if a tensor is an adapter's, or the loaders do not know its name, because an engine fuses or
            stacks it.
    """
    _check_names(wanted, layouts)
    return _with_other_names(_with_head(wanted, layouts, uneven), layouts)


def _check_names(wanted: Sequence[Wanted], layouts: Placing) -> None:
    """Refuse adapters, and tensors that an engine fuses or stacks: the engines' sharded loaders do not know them.

    Raises:
        LayoutError: if there is such a tensor; the message names one, and says what to do.
    """
    names = [tensor.name for tensor in wanted]
    if adapter := next(iter(adapter_names(names)), None):
        raise LayoutError(
            f"the sharded loaders of vLLM and SGLang do not take adapters, such as {shown(adapter)}: give the engine "
            "the adapter's own folder, which it cuts by itself; to='ranks' writes the part of each rank"
        )
    found = _fused_by(names, layouts) or _fused(names) or next(filter(_EXPERT.search, names), None)
    if found is not None:
        raise LayoutError(
            f"the sharded loaders of vLLM and SGLang do not take the tensor {shown(found)}, because the engines hold "
            f"it in one parameter with others: {_ADVICE}"
        )
    for tensor in wanted:
        # Linear layers of GPT-2 are stored as (inputs, outputs), and the engines have them as (outputs, inputs).
        linear = _linear_of_gpt2(tensor.name)
        if linear is not None and len(tensor.shape) == 2 and _is_cut(tensor, 1 if linear.cut == "rows" else 0):
            raise LayoutError(
                f"the sharded loaders of vLLM and SGLang take {shown(tensor.name)} as (outputs, inputs), but the "
                f"layouts cut it as (inputs, outputs), as Hugging Face stores it: {_ADVICE}"
            )


def check_family(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Refuse names for which the package's rules of an engine for this family of models have no rule.

    Raises:
        LayoutError: if there is such a name. Families without rules in the package are not checked.
    """
    types = {*model_types(config)}
    for engine in ("vllm", "sglang"):
        known = {name: path for name, path in example_rules().items() if name.startswith(f"{engine}/")}
        own = [name for name, path in known.items() if not types.isdisjoint(read_models(path))]
        if not own:
            continue
        searches = [search_of(known[name]) for name in own]
        found = [name for name in names if not any(each.matching(name) for each in searches)]
        if not found:
            return
        _, _, family = own[0].rpartition("/")
        others = [name for name in example_rules() if name in (f"sglang/{family}", f"vllm/{family}")]
        if engine == "vllm" and f"sglang/{family}" in others:
            continue
        raise LayoutError(
            f"{names_text(found)}: the rules with the engine's names for models of the type "
            f"{' with '.join(sorted(types))}, {' and '.join(others)}, have no rule for it, so the engine's sharded "
            "loader would not take it: `only` can leave it out; to='ranks' takes any names"
        )


def _linear_of_gpt2(name: str) -> WeightRole | None:
    """Return the role of a linear layer that is stored transposed, as (inputs, outputs); `None` for other names."""
    last = name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""
    return next((one for one in weights() if one.in_out and last in one.names), None)


def _is_cut(tensor: Wanted, dim: int) -> bool:
    layout = None if tensor.partition is None else tensor.partition.layout
    return layout is not None and layout.rank > dim and layout.axes[dim] is not None


def _fused_by(names: Iterable[str], layouts: Placing) -> str | None:
    """Return the first name that a deployment of an engine fuses or stacks into a parameter; else `None`."""
    fused = layouts.parameters
    templates = [parse_template(part) for one in fused if len(one.parts) > 1 or one.stack for part in one.parts]
    return next((name for name in names if any(one.matched(name) is not None for one in templates)), None)


def _fused(names: Sequence[str]) -> str | None:
    """Return the name of the first tensor that engines fuse with others, present or not; `None` if there is none."""
    there: dict[tuple[str, str], dict[str, str]] = {}
    beside: dict[str, set[str]] = {}
    for name in names:
        parent, _, module = name.rpartition(".")[0].rpartition(".")
        beside.setdefault(parent, set()).add(module)
        match = _MODULE.search(name)
        if match is not None:
            there.setdefault((match[1], match[3]), {})[match[2]] = name
    for (prefix, _), held in there.items():
        for each in _FUSED:
            parts = [part for part in each if part in held]
            if parts and not _is_alone(parts, beside.get(prefix.removesuffix("."), set())):
                return held[parts[0]]
    return None


def _is_alone(parts: list[str], beside: set[str]) -> bool:
    """Return whether these parts have no partner to fuse with.

    That holds for `q_proj` in latent attention, and for `up_proj` in a layer without a gate.
    """
    if parts == ["q_proj"]:
        return any(name.startswith("kv_") for name in beside)
    return parts == ["up_proj"] and "down_proj" in beside


def check_stages(wanted: Sequence[Wanted], ranks: FileRanks) -> None:
    """Refuse a pipeline in which every stage would get every layer: a loader takes only the tensors of its own stage.

    Raises:
        LayoutError: if no tensor is on some stages only.
    """
    mesh = None if ranks.whole is None else ranks.meshes[ranks.whole]
    if mesh is None or "pp" not in mesh.axis_names or mesh.axis_size("pp") < 2 or not wanted:
        return
    for tensor in wanted:
        own = None if tensor.partition is None else tensor.partition.device_mesh
        if own is not None and own.size < len(ranks.labels):
            return
    raise LayoutError(
        f"the mesh has {mesh.axis_size('pp')} stages (pp), but no layout says which layers each stage has. The files "
        "of each stage would have all layers, and vLLM's loader does not take these: leave pp out of the mesh, take "
        "the preset vllm(tp=…, pp=…) (--for, or shardwise.deploy.preset), or a Deployment that has `at = { pp = … "
        "}`"
    )


def check_blocks(wanted: Sequence[Wanted]) -> None:
    """Refuse scales whose blocks begin before a rank's rows: engines count blocks from the rank's first row.

    Raises:
        LayoutError: if there are such scales; the message names one, and says what to do.
    """
    names = [one.name for one in wanted if isinstance(one.partition, SharedTiling) and one.partition.begins_within]
    if names:
        raise LayoutError(
            f"{names_text(names)}: the part of a rank begins within a block that it shares with the rank before "
            "(shared = true). vLLM and SGLang count blocks from the rank's first element, so they would take wrong "
            "scales: to='ranks' writes files with such parts; `shardwise fits` says which sizes are cut between "
            "blocks"
        )


def _with_other_names(wanted: list[Wanted], layouts: Placing) -> list[Wanted]:
    """Return the tensors, with a second entry for each tensor of a module that vLLM knows under two names.

    vLLM's loader takes the first by name. The rules must say for which types of models they are.
    """
    if not any(".routed_experts." in tensor.name for tensor in wanted):
        return wanted  # SGLang's names.
    known = {tensor.name for tensor in wanted}
    blocks = {name.partition(".routed_experts.")[0] for name in known if ".routed_experts." in name}
    made = []
    for tensor in wanted:
        name = _other_name(tensor.name, layouts.models)
        # A layer without experts has such a module alone.
        block, found, _ = name.partition(".experts.")
        is_alone = found and f"{block}.experts" not in blocks
        if name in known or name == tensor.name or is_alone:
            made.append(tensor)
            continue
        both = replace(tensor, identity=("name", tensor.name) if tensor.identity is None else tensor.identity)
        made += [both, replace(both, name=name)]
    return made


def _other_name(name: str, models: Sequence[str]) -> str:
    """Return the name that vLLM's loader looks for; the same name unless its models have the module under two names."""
    for entry in shipped_table("engines.toml")["engines"]["vllm"]["other_names"]:
        if set(entry["types"]).isdisjoint(models):
            continue
        before, found, after = f"{name}.".partition(f".{entry['name']}.")
        if found:
            return f"{before}.{entry['also']}.{after}".removesuffix(".")
    return name


def _with_head(wanted: list[Wanted], layouts: Placing, uneven: UnevenRule) -> list[Wanted]:
    """Return the tensors, with an entry for an output layer tied to the embedding: engines look for both names.

    The output layer counts as tied if it is missing and the rule of the only embedding also matches its name. Tensors
    are recognised by name: a rule as loose as `"w"` matches `lm_head.weight` too. The output layer may be on another
    stage than the embedding.
    """
    if any(tensor.name == _HEAD for tensor in wanted):
        return wanted
    rules = set(layouts.matching_rules(_HEAD))
    embeddings = [
        tensor
        for tensor in wanted
        if rules and _EMBEDDING.search(tensor.name) and rules == set(layouts.matching_rules(tensor.name))
    ]
    if len(embeddings) != 1:
        return wanted
    partition = partition_for(_HEAD, embeddings[0].shape, layouts, uneven)
    return [*wanted, replace(embeddings[0], name=_HEAD, partition=partition)]
