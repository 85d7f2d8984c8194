"""The planner of all verbs: from the tensors of a new checkpoint to the files of a form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from ...._arguments import instance
from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....partition import Partition
from ....shared_tiling import SharedTiling
from ...data.parts import RANKS
from ...rewritten.wanted import number_of, wanted_bytes
from ...tensors.checkpoint import KeyPath
from ..forms.dcp import dcp_files, is_writable
from ..forms.engines import check_blocks, check_stages, engine_tensors
from ..forms.forms import WRITTEN, Target
from ..forms.fsdp import DEVICES, fsdp_files
from ..forms.nested import Nested, nested_of
from ..forms.one_rank import file_ranks, one_rank
from ..forms.plain_values import nested_pickle
from ..forms.rank_files import rank_files
from ..forms.safetensors import hugging_face_files, sharded_files, single_file
from ..forms.torch_file import torch_file
from ..forms.universal import universal_files
from ..run.checkpoint_plan import CheckpointPlan
from .contents import CheckpointContents, make_plan
from .request import Request

__all__ = ["OF_NESTED", "FormTensors", "chosen_form", "form_tensors", "only_read", "plan_form"]


#: For formats that can only be read: what to do instead of writing them.
_ONLY_READ = {
    "orbax": "write safetensors or hf, load that into JAX, and save it with Orbax",
    "keras": "write safetensors or hf, set a model's weights from it, and save them with Keras",
}
#: PyTorch's own forms, which hold only dtypes of PyTorch.
_OF_TORCH = {"dcp": "distributed checkpoint", "torch": "file", "fsdp2": "folder of ranks", "universal": "files"}
#: Forms whose files have a nested dict of tensors and values.
OF_NESTED = ("torch", "fsdp2", "universal")
#: An empty mapping, for arguments without entries.
NONE: Mapping[str, Any] = MappingProxyType({})


class FormTensors(NamedTuple):
    """Tensors as a form has them, under its names.

    Attributes:
        form: The form that is written; see `chosen_form`.
        wanted: The tensors; those with equal `identity` are written once, and the other names become aliases.
        nested: For `OF_NESTED`, the nested dict of these tensors.
    """

    form: Target
    wanted: list[Wanted]
    nested: Nested | None = None


def form_tensors(
    request: Request,
    form: Target,
    wanted: list[Wanted],
    paths: Mapping[str, KeyPath] = NONE,
    values: Mapping[str, Any] = NONE,
) -> FormTensors:
    """Return tensors as a form has them.

    Args:
        request: The request, which has the layouts.
        form: The form that is written.
        wanted: The tensors.
        paths: For `OF_NESTED`, the paths of tensors and values in a nested state dict, as far as they are known.
        values: For `OF_NESTED`, the values that are not tensors.

    Raises:
        LayoutError: if the form does not have such tensors, by their names.
        TypeError: if the form cannot hold a tensor's dtype.
    """
    for tensor in wanted:
        if form in _OF_TORCH and not is_writable(tensor.dtype.name):
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.stated}, which PyTorch does not have")
        if form not in _OF_TORCH and tensor.dtype.code is None:
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.name}, which a safetensors file cannot hold")
    if form == "vllm":
        return FormTensors(form, engine_tensors(wanted, request.layouts, request.uneven))
    if form in OF_NESTED:
        nested = nested_of(wanted, paths, values, form)
        return FormTensors(form, nested.tensors, nested)
    return FormTensors(form, wanted)


def plan_form(
    request: Request,
    tensors: FormTensors,
    paths: Mapping[str, KeyPath] = NONE,
    beside: Mapping[str, bytes] = NONE,
) -> CheckpointPlan:
    """Return the plan of a checkpoint of these tensors.

    Args:
        request: The request, which has the path and the layouts.
        tensors: The tensors, as the form has them.
        paths: For `"dcp"`, the path of each tensor in a nested state dict.
        beside: Further files of a folder; they replace none of its own.

    Raises:
        LayoutError: if the form does not go with the metadata; two tensors have one name; a layout does not say what
            ranks there are.
    """
    to, wanted, nested = tensors
    device = _device_of(request) if to == "fsdp2" else ""
    if to in _OF_TORCH and request.metadata and not device:
        raise LayoutError(f"metadata is given, but PyTorch's {_OF_TORCH[to]} has no place for it")
    kept, aliases = _without_ties(wanted, to)
    said = dict(request.metadata or {})
    if aliases:
        said["shardwise.aliases"] = json.dumps(aliases)
    if request.rank is not None and to != "ranks":
        raise LayoutError(f"rank is {shown(request.rank)}, but {to!r} has no files for ranks; use 'ranks'")
    contents = CheckpointContents(kept, (), to, said, aliases, paths, beside=beside)
    contents = _FILES[to](request, contents) if nested is None else _NESTED_FILES[to](request, contents, nested)
    said_of: dict[Any, dict[str, Any]] = {}
    are_cut = WRITTEN[contents.form].is_cut
    cuts = [_cut(tensor.partition, said_of) if are_cut else {} for tensor in contents.wanted]
    return make_plan(request, replace(contents, cuts=cuts))


def _single_file(request: Request, contents: CheckpointContents) -> CheckpointContents:
    return replace(contents, files=single_file(request.target.name, contents.wanted, contents.metadata))


def _hugging_face_files(request: Request, contents: CheckpointContents) -> CheckpointContents:
    return replace(contents, files=hugging_face_files(contents.wanted, request.max_file_bytes, contents.metadata))


def _sharded_files(_: Request, contents: CheckpointContents) -> CheckpointContents:
    return replace(contents, files=sharded_files(contents.wanted, contents.metadata))


def _dcp_files(_: Request, contents: CheckpointContents) -> CheckpointContents:
    return replace(contents, files=dcp_files(contents.wanted))


def _rank_files(request: Request, contents: CheckpointContents) -> CheckpointContents:
    """Add the files of all ranks, or the only file of the rank that the request names."""
    kept, said, form = contents.wanted, contents.metadata, contents.form
    ranks = file_ranks(request.layouts, kept)
    if form == "vllm":
        check_stages(kept, ranks)
        check_blocks(kept)
    if request.rank is None:
        files, text = rank_files(kept, ranks, said, form, request.max_file_bytes)
        return replace(contents, files=files, beside={**contents.beside, RANKS: text})
    kept, said = one_rank(kept, ranks, said, request.rank)
    one = single_file(request.target.name, kept, said, has_digests=False)
    return replace(contents, wanted=kept, files=one, form="rank", metadata=said, aliases={})


def _torch_file(request: Request, contents: CheckpointContents, nested: Nested) -> CheckpointContents:
    kept = [*contents.wanted, _pickle_of(nested, contents.wanted, contents.aliases)]
    return replace(contents, wanted=kept, files=[torch_file(request.target.name, kept)], aliases={}, paths=NONE)


def _fsdp_files(request: Request, contents: CheckpointContents, nested: Nested) -> CheckpointContents:
    kept = contents.wanted
    ranks, device = file_ranks(request.layouts, kept), _device_of(request)
    made = fsdp_files(nested, kept, contents.aliases, ranks, wanted_bytes, device)
    return replace(
        contents, wanted=[*kept, *made.values], files=made.files, metadata={}, aliases={}, paths=NONE,
        beside={**contents.beside, **made.beside},
    )  # fmt: skip


def _universal_files(_: Request, contents: CheckpointContents, nested: Nested) -> CheckpointContents:
    made = universal_files(nested, contents.wanted, contents.aliases, wanted_bytes, number_of)
    return replace(contents, wanted=made.wanted, files=made.files, aliases={}, paths=NONE, beside=made.beside)


#: The function of each form that adds its files to the contents of a checkpoint.
_FILES: dict[str, Callable[[Request, CheckpointContents], CheckpointContents]] = {
    "safetensors": _single_file,
    "hf": _hugging_face_files,
    "sharded": _sharded_files,
    "ranks": _rank_files,
    "vllm": _rank_files,
    "dcp": _dcp_files,
}
#: The same of forms whose files have a nested dict of tensors and values.
_NESTED_FILES: dict[str, Callable[[Request, CheckpointContents, Nested], CheckpointContents]] = {
    "torch": _torch_file,
    "fsdp2": _fsdp_files,
    "universal": _universal_files,
}


def _device_of(request: Request) -> str:
    """Return the device type for the meshes of DTensors, which the request's metadata may set."""
    said = dict(request.metadata or {})
    device = said.pop("device_type", "cpu")
    if said or device not in DEVICES:
        raise LayoutError(
            f"metadata is {shown(dict(request.metadata or {}))}; a folder of ranks stores only the mesh's "
            f"device_type, one of {', '.join(map(repr, DEVICES))}"
        )
    return device


def _pickle_of(nested: Nested, kept: Sequence[Wanted], aliases: Mapping[str, str]) -> Wanted:
    """Return the pickle in a file of `torch.save` as a value to write, under a name that no tensor has."""
    tensors = {tensor.name: (tensor.dtype, tensor.shape, f"{number}") for number, tensor in enumerate(kept)}
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    name = "data.pkl"
    while name in tensors:
        name += "_"
    return wanted_bytes(name, nested_pickle(nested.tree, tensors))


def chosen_form(request: Request, *, is_cut: bool) -> Target:
    """Return the format of the request, or the one suggested by the path and by whether any tensor is cut.

    Raises:
        LayoutError: if it cannot be written.
    """
    to = request.to
    if to is None:
        if request.target.name.endswith(".safetensors"):
            return "safetensors"
        if request.target.name.endswith((".pt", ".pth", ".bin")):
            return "torch"
        return "sharded" if is_cut else "hf"
    if instance("to", to, str) not in get_args(Target):
        why = f"; {only_read(to)}" if only_read(to) else ""
        raise LayoutError(f"to is {shown(to)}; it must be one of {', '.join(map(repr, get_args(Target)))}{why}")
    return to


def only_read(form: Any) -> str:
    """Return the reason why a format that can be read cannot be written, and what to do; else an empty text.

    >>> only_read("dcp"), only_read("orbax")
    ('', 'orbax is read, not written: write safetensors or hf, load that into JAX, and save it with Orbax')
    """
    instead = _ONLY_READ.get(form) if isinstance(form, str) else None
    return "" if instead is None else f"{form} is read, not written: {instead}"


def _cut(partition: Partition | SharedTiling | None, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return how a tensor is cut, as the manifest states it; equal cuts share one object."""
    if partition is None or isinstance(partition, SharedTiling):  # No layout says how it is cut.
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


def _without_ties(wanted: Iterable[Wanted], to: Target) -> tuple[list[Wanted], dict[str, str]]:
    """Return the tensors without further names of the same elements, and these names with those they are tied to.

    In `"vllm"`, the first of tied names is kept, for which the engines' loaders look. Files for ranks need equal cuts.
    """
    wanted = sorted(wanted, key=lambda tensor: tensor.name) if to == "vllm" else wanted
    first: dict[Any, Wanted] = {}
    kept, names, aliases = [], set(), dict[str, str]()
    for tensor in wanted:
        if tensor.name in names:
            raise LayoutError(f"two values would be called {shown(tensor.name)}")
        names.add(tensor.name)
        key = tensor.identity
        key = key if key is None or not WRITTEN[to].has_arrays else (key, tensor.partition)
        other = first.setdefault(key, tensor) if key is not None and tensor.pieces else tensor
        if other is tensor:
            kept.append(tensor)
        else:
            aliases[tensor.name] = other.name
    return kept, aliases
