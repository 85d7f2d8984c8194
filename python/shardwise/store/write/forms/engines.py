"""Tensors as the sharded loaders of vLLM and SGLang want them: what these would not take is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...._text import shown
from ....conversion.assembled import Wanted
from ....errors import LayoutError
from ....layout import UnevenRule
from ....placing import Placing
from ....rules.layout_map import LayoutMap
from ....rules.left_out import names_text
from ....rules.names import WeightRole, merged_names, shipped_table, weights
from ....rules.shipped import example_rules
from ....rules.templates import parse_template
from ....rules.toml import prefixed, read_document, read_models
from ....rules.wrapped import model_types
from ....shared_tiling import SharedTiling
from ...rewritten.wanted import partition_for
from .rank_files import FileRanks

__all__ = ["check_blocks", "check_engine_names", "check_family", "check_stages", "with_head", "with_other_names"]

#: The output layer, as the engines call it.
_HEAD = "lm_head.weight"
#: The texts in names of embeddings: `embed_tokens`, `word_embeddings`, `embed_in`, `wte`.
_EMBEDDING = re.compile(r"embed|\bwte\b")
#: Modules beside each other that the engines hold as one, whatever the model is.
_FUSED = tuple(merged.parts for merged in merged_names() if merged.always)
_MODULE = re.compile(
    rf"(.*?)\b({'|'.join(name for names in _FUSED for name in names)})\.(weight|bias|weight_packed|qweight)$"
)
#: An expert that is a tensor of its own; the engines stack them.
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_ADVICE = (
    "rules of the engine's own names make them, as vllm/llama or sglang/qwen3-moe do for their families (`shardwise "
    "rules` lists them), and so does the preset vllm(tp=…) (--for, or shardwise.deploy.preset); to='ranks' has files "
    "for ranks of any names"
)


def check_engine_names(wanted: Sequence[Wanted], layouts: Placing) -> None:
    """Refuse tensors of names that the engines' sharded loaders do not know, as they hold several in one parameter.

    Raises:
        LayoutError: if there are some; names one, and the way on.
    """
    names = [tensor.name for tensor in wanted]
    found = _fused_by(names, layouts) or _fused(names) or next(filter(_EXPERT.search, names), None)
    if found is not None:
        raise LayoutError(
            f"the sharded loaders of vLLM and SGLang take no tensor {shown(found)}, which the engines hold in one "
            f"parameter with others: {_ADVICE}"
        )
    for tensor in wanted:
        # Linear layers of GPT-2 are stored as (inputs, outputs), and the engines have them as (outputs, inputs).
        linear = _linear_of_gpt2(tensor.name)
        if linear is not None and len(tensor.shape) == 2 and _is_cut(tensor, 1 if linear.cut == "rows" else 0):
            raise LayoutError(
                f"the sharded loaders of vLLM and SGLang take {shown(tensor.name)} as (outputs, inputs), and the "
                f"layouts cut it as (inputs, outputs), as Hugging Face has it: {_ADVICE}"
            )


def check_family(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Refuse names for which an engine's rules for the model's family, if the package has some, have no rule.

    Raises:
        LayoutError: if there are some; names them.
    """
    types = {*model_types(config)}
    for engine in ("vllm", "sglang"):
        known = {name: path for name, path in example_rules().items() if name.startswith(f"{engine}/")}
        own = [name for name, path in known.items() if not types.isdisjoint(read_models(path))]
        if not own:
            continue
        maps = [_keys_of(known[name]) for name in own]
        found = [name for name in names if not any(each.matching_rules(name) for each in maps)]
        if not found:
            return
        _, _, family = own[0].rpartition("/")
        others = [name for name in example_rules() if name in (f"sglang/{family}", f"vllm/{family}")]
        if engine == "vllm" and f"sglang/{family}" in others:
            continue
        raise LayoutError(
            f"{names_text(found)}: in the rules with the engine's names for models of the type "
            f"{' with '.join(sorted(types))}, {' and '.join(others)}, there is none for it, so the engine's sharded "
            "loader would not take it: `only` leaves it out; to='ranks' has files for ranks of any names"
        )


def _keys_of(file: Path) -> LayoutMap:
    """Return the keys of a rules file as a map that matches names; its layouts may need numbers that nobody gave."""
    tables = read_document(file).tables
    keys = LayoutMap(match=tables.get("match", "search"), backtracking=tables.get("backtracking", False))
    for key in tables.get("rules", {}):
        keys[prefixed(tables.get("prefix", ""), key)] = ()
    return keys


def _linear_of_gpt2(name: str) -> WeightRole | None:
    """Return the role of a linear layer that is stored as (inputs, outputs)."""
    last = name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""
    return next((one for one in weights() if one.in_out and last in one.names), None)


def _is_cut(tensor: Wanted, dim: int) -> bool:
    layout = None if tensor.partition is None else tensor.partition.layout
    return layout is not None and layout.rank > dim and layout.axes[dim] is not None


def _fused_by(names: Iterable[str], layouts: Placing) -> str | None:
    """A tensor that a deployment of an engine has in a parameter with others."""
    fused = layouts.parameters
    templates = [parse_template(part) for one in fused if len(one.parts) > 1 or one.stack for part in one.parts]
    return next((name for name in names if any(one.matched(name) is not None for one in templates)), None)


def _fused(names: Sequence[str]) -> str | None:
    """The first of tensors that an engine fuses, with or without the others: half of a parameter is none of its own."""
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
    """Return whether engines have no other parts: queries of latent attention, `up_proj` of layers without a gate."""
    if parts == ["q_proj"]:
        return any(name.startswith("kv_") for name in beside)
    return parts == ["up_proj"] and "down_proj" in beside


def check_stages(wanted: Sequence[Wanted], ranks: FileRanks) -> None:
    """Refuse a pipeline all of whose stages would get all layers: a loader takes the tensors of its own only.

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
        f"the mesh has {mesh.axis_size('pp')} stages (pp), and no layout says which has which layers, so that the "
        "files of each would have them all, which vLLM's loader does not take: leave pp out of the mesh, take the "
        "preset vllm(tp=…, pp=…) (--for, or shardwise.deploy.preset), or a Deployment that has `at = { pp = … }`"
    )


def check_blocks(wanted: Sequence[Wanted]) -> None:
    """Refuse scales whose blocks begin before a rank's rows: the engines count blocks from the rank's first row.

    Raises:
        LayoutError: if there are some; names them, and the way on.
    """
    names = [one.name for one in wanted if isinstance(one.partition, SharedTiling) and one.partition.begins_within]
    if names:
        raise LayoutError(
            f"{names_text(names)}: what a rank has begins within a block, which it shares with the rank before (shared "
            "= true), and vLLM and SGLang count blocks from the rank's first element, so they would take wrong scales: "
            "to='ranks' has files for ranks; `shardwise fits` says which sizes are cut between blocks"
        )


def with_other_names(wanted: list[Wanted], layouts: Placing) -> list[Wanted]:
    """The tensors, and those of modules that a model of vLLM has under two names, under the other one as well.

    Its loader takes the first by name. The rules must say for which types of models they are.
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
    """The name that the loader looks for, of a module that models of these types have under two names."""
    for entry in shipped_table("engines.toml")["engines"]["vllm"]["other_names"]:
        if set(entry["types"]).isdisjoint(models):
            continue
        before, found, after = f"{name}.".partition(f".{entry['name']}.")
        if found:
            return f"{before}.{entry['also']}.{after}".removesuffix(".")
    return name


def with_head(wanted: list[Wanted], layouts: Placing, uneven: UnevenRule) -> list[Wanted]:
    """The tensors, and the output layer if it is tied with the embedding: under its own name the engines look for both.

    It is, if there is none, and the rule of the one embedding is for its name too. A tensor is one by its name: a
    rule as loose as `"w"` is for `lm_head.weight` as well. It may be on another stage than the embedding.
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
