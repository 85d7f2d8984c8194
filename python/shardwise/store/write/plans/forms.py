"""What a new checkpoint can be: the files of each format, with the tensors that go into them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ...._arguments import instance, integer, optional
from ...._text import shown
from ....deploy.deployment import Deployment
from ....errors import LayoutError
from ....partition import Partition
from ....rules.layout_map import LayoutMap
from ...location import Location
from ...parts import RANKS
from ..formats.dcp import KeyPath, dcp_files, is_writable
from ..formats.files import TargetFile, hugging_face_files, sharded_files, single_file
from ..formats.form_files import ARRAY_FORMS, Target
from ..formats.rank_files import rank_files
from ..tensors.wanted import Layouts, Wanted
from ..work import MEMORY
from .checkpoint_plan import CheckpointPlan
from .one_rank import one_rank, ranks_of
from .planning import make_plan

__all__ = ["Target", "chosen_form", "only_read", "plan_form"]

#: What to do instead of writing a format that can only be read.
_ONLY_READ = {
    "orbax": "write safetensors or hf, load that into JAX, and save it with Orbax",
    "keras": "write safetensors or hf, set a model's weights from it, and save them with Keras",
}

#: The output layer, as vLLM and SGLang call it.
_HEAD = "lm_head.weight"


def plan_form(
    path: Location,
    wanted: list[Wanted],
    to: Target | None,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    aliases: dict[str, str],
    paths: Mapping[str, KeyPath],
    task_bytes: int | None = None,
    memory: int = MEMORY,
    *,
    compare: bool,
    beside: Mapping[str, bytes] | None = None,
    layouts: Layouts | None = None,
    rank: int | None = None,
) -> CheckpointPlan:
    """Plan a checkpoint of these tensors, in the given format or the one that the path and the cuts suggest.

    Args:
        path: Where it is to be.
        wanted: The tensors; those of one identity are written once, and the other names are noted in `aliases`.
        to: The form.
        metadata: Texts for the headers.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        aliases: Names that are tied, and to which names.
        paths: For `"dcp"`, where tensors lie in a nested state dict.
        task_bytes: How many bytes a task writes at most.
        memory: Bytes of memory that it will be run with: tasks that fetch what they write are not larger.
        compare: Whether pieces that are stored more than once are compared.
        beside: Further files of a folder; they replace none of its own.
        layouts: For files for ranks, the layouts, which say what ranks there are.
        rank: The only rank whose file is written.

    Raises:
        LayoutError: if the form is not one that is written, or does not go with the metadata; two tensors have one
            name; `max_file_bytes` is not a positive integer.
        TypeError: if the form cannot hold a tensor's dtype.
    """
    to = chosen_form(path, wanted, to)
    for tensor in wanted:
        if to == "dcp" and not is_writable(tensor.dtype.name):
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.stated}, which PyTorch does not have")
        if to != "dcp" and tensor.dtype.code is None:
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.name}, which a safetensors file cannot hold")
    metadata = optional("metadata", metadata, Mapping) or {}  # type: ignore[type-abstract]
    if to == "dcp" and metadata:
        raise LayoutError("metadata is given, but PyTorch's distributed checkpoint has no place for it")
    if to == "vllm":
        wanted = _with_head(wanted, layouts)
    kept = _without_ties(wanted, aliases, to)
    said = dict(metadata)
    if aliases:
        said["shardwise.aliases"] = json.dumps(aliases)
    max_file_bytes = integer("max_file_bytes", max_file_bytes)
    if max_file_bytes < 1:
        raise LayoutError(f"max_file_bytes is {shown(max_file_bytes)}; it must be a positive integer")
    rank = None if rank is None else integer("rank", rank)
    if rank is not None and to != "ranks":
        raise LayoutError(f"rank is {shown(rank)}, but {to!r} has no files for ranks; 'ranks' has")
    form: str = to
    files: Sequence[TargetFile]
    if to == "safetensors":
        files = single_file(path.name, kept, said)
    elif to == "hf":
        files = hugging_face_files(kept, max_file_bytes, said)
    elif to in ARRAY_FORMS:
        ranks = ranks_of(layouts, kept)
        if rank is None:
            files, text = rank_files(kept, ranks, said, to, max_file_bytes)
            beside = {**(beside or {}), RANKS: text}
        else:
            kept, said = one_rank(kept, ranks, said, rank)
            files, aliases, form = single_file(path.name, kept, said, has_digests=False), {}, "rank"
    else:
        files = dcp_files(kept) if to == "dcp" else sharded_files(kept, said)
    said_of: dict[Any, dict[str, Any]] = {}
    are_cut = form in ("sharded", "dcp", *ARRAY_FORMS)
    cuts = [_cut(tensor.partition, said_of) if are_cut else {} for tensor in kept]
    return make_plan(
        path,
        kept,
        files,
        form=form,
        metadata=said,
        aliases=aliases,
        paths=paths,
        cuts=cuts,
        beside=beside or {},
        compare_replicas=compare,
        task_bytes=task_bytes,
        memory=memory,
    )


def chosen_form(path: Location, wanted: Iterable[Wanted], to: Target | None) -> Target:
    """The given format, or the one that the path and the cuts suggest.

    Raises:
        LayoutError: if it is not one that is written.
    """
    if to is None:
        if path.name.endswith(".safetensors"):
            return "safetensors"
        return "sharded" if any(tensor.partition is not None for tensor in wanted) else "hf"
    if instance("to", to, str) not in get_args(Target):
        why = f"; {only_read(to)}" if only_read(to) else ""
        raise LayoutError(f"to is {shown(to)}; it must be one of {', '.join(map(repr, get_args(Target)))}{why}")
    return to


def only_read(form: Any) -> str:
    """Why a format that can be read cannot be written, and what to do; empty for any other format.

    >>> only_read("dcp"), only_read("orbax")
    ('', 'orbax is read, not written: write safetensors or hf, load that into JAX, and save it with Orbax')
    """
    instead = _ONLY_READ.get(form) if isinstance(form, str) else None
    return "" if instead is None else f"{form} is read, not written: {instead}"


def _cut(partition: Partition | None, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Say how a tensor is cut; the same object for the same cut, which many tensors have."""
    if partition is None:
        return {}
    found = known.get((partition.layout, partition.uneven))
    if found is not None:
        return found
    mesh = partition.device_mesh
    known[partition.layout, partition.uneven] = found = {
        "layout": [
            list(spec) if isinstance(spec, tuple) else spec if spec is None else str(spec)
            for spec in partition.layout.axes
        ],
        "uneven": partition.uneven,
        "mesh": {"shape": list(mesh.shape), "axis_names": list(mesh.axis_names)},
    }
    return found


def _with_head(wanted: list[Wanted], layouts: Layouts | None) -> list[Wanted]:
    """The tensors, and the output layer if it is tied with the embedding: under its own name the engines look for both.

    It is, if there is none, and the rule of another tensor is for its name too.
    """
    if not isinstance(layouts, (LayoutMap, Deployment)) or any(tensor.name == _HEAD for tensor in wanted):
        return wanted
    rules = set(layouts.matching_rules(_HEAD))
    embeddings = [tensor for tensor in wanted if rules and rules == set(layouts.matching_rules(tensor.name))]
    return [*wanted, *(replace(tensor, name=_HEAD) for tensor in embeddings)] if len(embeddings) == 1 else wanted


def _without_ties(wanted: Iterable[Wanted], aliases: dict[str, str], to: Target) -> list[Wanted]:
    """The tensors, each once; records which names are tied to which.

    Of tied tensors the engines' loaders look for the first by name. In files for ranks they are cut alike.
    """
    wanted = sorted(wanted, key=lambda tensor: tensor.name) if to == "vllm" else wanted
    first: dict[Any, Wanted] = {}
    kept, names = [], set()
    for tensor in wanted:
        if tensor.name in names:
            raise LayoutError(f"two values would be called {shown(tensor.name)}")
        names.add(tensor.name)
        key = tensor.identity
        key = key if key is None or to not in ARRAY_FORMS else (key, tensor.partition)
        other = first.setdefault(key, tensor) if key is not None and tensor.pieces else tensor
        if other is tensor:
            kept.append(tensor)
        else:
            aliases[tensor.name] = other.name
    return kept
