"""The files of a step of DeepSpeed: the rank of each, and the check that all are of one step and one world."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import Dtype
from ...._text import counted, shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location
from ...data.text import checked_name, checked_shape
from ...tensors.checkpoint import StoredObject
from ...tensors.stored import UnsupportedError
from .flat_parts import Arrays, FlatRow, WholeRow, is_flat
from .model_parallel import RankCut, whole
from .pickles import Record, state_of, torch_sizes
from .tensors import Container, SavedTensor, dict_of, items_within, named_values, value_object

__all__ = [
    "Grid",
    "RankKey",
    "ReadFile",
    "Rows",
    "check_world",
    "expert_files",
    "experts_of",
    "files_by_rank",
    "frozen_row",
    "grid_of",
    "metadata_of",
    "read_rank",
]

_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_(model|optim)_states\.pt")
#: The name of a file with the weights of one expert of a layer.
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
#: Names of files with one layer each, and of experts' files of old versions.
_OTHERS = re.compile(r"layer_\d+-model_.*\.pt|expert_\d+_.*_states\.pt")


#: The keys of a model's file that describe its parameters; other keys are the trainer's or the user's.
_STRUCTURE = frozenset(
    ["module", "optimizer", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments",
     "shared_params", "universal_checkpoint_info", "checkpoint_parallel_dimensions", "dp_world_size", "mp_world_size"]
)  # fmt: skip
#: The keys of an optimizer that hold its partitions or describe them.
_OF_PARTITIONS = frozenset(
    ["base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
     "optimizer_state_dict", "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count",
     "param_slice_mappings", "ds_version", "universal_checkpoint_info"]
)  # fmt: skip


class ReadFile(NamedTuple):
    """A file of a rank, with the contents of its pickle.

    Attributes:
        values: The values at the top of its dict.
    """

    container: Container
    values: dict[str, Any]

    @property
    def path(self) -> Location:
        """The path of the file."""
        path: Location = self.container.file.path
        return path


#: The kind of a file, its model-parallel and its data-parallel rank; -1 for a file of all data-parallel ranks.
RankKey = tuple[str, int, int]


#: Files, for each model-parallel rank a list by data-parallel rank.
Grid = list[list[ReadFile]]


def files_by_rank(path: Location, inside: list[str]) -> dict[RankKey, str]:
    """Return the files of all ranks, in order; each must be there exactly once."""
    other = next((name for name in inside if _OTHERS.fullmatch(name)), None)
    if other is not None:
        raise UnsupportedError(
            f"{path}: has {shown(other)}: the layers of a pipeline, or the experts of an old version, are in files "
            "that are not read; DeepSpeed's own ds_to_universal.py may convert it to what can be opened"
        )
    found: dict[RankKey, str] = {}
    for name in sorted(inside):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        key = (match[3], int(match[2]), -1 if match[1] is None else int(match[1]))
        if key in found:
            raise ParseError(f"{path}: has {shown(found[key])} and {shown(name)}, two files of one rank")
        found[key] = name
    for kind in ("model", "optim"):
        held = {key: name for key, name in found.items() if key[0] == kind}
        columns = sorted({dp for _, _, dp in held})
        if kind == "model" and not held:
            raise ParseError(f"{path}: has no *_model_states.pt: files are missing")
        if len(columns) > 1 and columns[0] < 0:
            raise ParseError(f"{path}: has {shown(held[next(iter(held))])} and files of data-parallel ranks next to it")
        rows = max((mp for _, mp, _ in found), default=0) + 1
        wanted = columns if columns[:1] == [-1] else range(max(columns, default=-1) + 1)
        if len(held) != rows * len(wanted):
            missing = next((mp, dp) for mp in range(rows) for dp in wanted if (kind, mp, dp) not in held)
            raise ParseError(f"{path}: has no *{_rank_text(*missing)}_{kind}_states.pt: files are missing")
    return dict(sorted(found.items()))


def expert_files(path: Location, inside: list[str]) -> dict[tuple[int, int], str]:
    """Return the files of the experts, by layer and expert.

    Raises:
        UnsupportedError: if there are several model-parallel ranks.
    """
    found = {}
    for name in sorted(inside):
        match = _EXPERT.fullmatch(name)
        if match is None:
            continue
        if int(match[3]):
            raise UnsupportedError(f"{path}: has {shown(name)}: experts that model-parallel ranks cut are not read")
        found[int(match[1]), int(match[2])] = name
    return dict(sorted(found.items()))


def experts_of(first: ReadFile, read: Mapping[tuple[int, int], ReadFile]) -> dict[str, tuple[Container, SavedTensor]]:
    """Return the weights of all experts, each with its file.

    Args:
        first: A file of the model, which states how many experts each layer has.
        read: The files of experts, by layer and expert.

    Raises:
        ParseError: if one is missing, or two have one weight.
    """
    counts = [size for _, size in items_within(first.values.get("num_experts")) or ()]
    if not read and all(size == 1 for size in counts):
        return {}
    if not all(type(size) is int and size > 0 for size in counts):
        raise ParseError(f"{first.path}: num_experts is {shown(counts)}")
    # At most one more than there are files is looked at.
    each = ((layer, expert) for layer, size in enumerate(counts) for expert in range(size))
    missing = next((key for key in each if key not in read), None)
    if missing is not None or sum(counts) != len(read):
        layer, expert = missing or max(read)
        raise ParseError(
            f"{first.path}: has {shown(counts)} experts in layers, and the file of expert {expert} of layer {layer} "
            f"is {'missing' if missing else 'not expected'}: files are missing, or two checkpoints are mixed"
        )
    found: dict[str, tuple[Container, SavedTensor]] = {}
    for file in read.values():
        for name, value in file.values.items():
            saved = file.container.tensor(value, checked_name(name, file.path))
            if saved is None or name in found:
                raise ParseError(f"{file.path}: {shown(name)} is not a tensor, or is in the file of another expert too")
            found[name] = file.container, saved
    return found


def _rank_text(mp: int, dp: int) -> str:
    return f"{'' if dp < 0 else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}"


def read_rank(file: Holder) -> ReadFile:
    """Return a file with the contents of its pickle.

    Raises:
        ParseError: if it was saved under the name of another rank's file.
    """
    container = Container(file)
    saved_as, stem = container.saved_as, file.path.name.removesuffix(".pt")
    if any(form.fullmatch(f"{saved_as}.pt") for form in (_FILE, _EXPERT)) and saved_as != stem:
        raise ParseError(f"{file.path}: was saved as {saved_as}.pt: it is the file of another rank")
    return ReadFile(container, dict_of(container.read_objects()))


def grid_of(read: Mapping[RankKey, ReadFile], kind: str) -> Grid:
    """Return the files of a kind, by model-parallel and data-parallel rank."""
    rows: dict[int, list[ReadFile]] = {}
    for (of, mp, _), file in read.items():
        if of == kind:
            rows.setdefault(mp, []).append(file)
    return [rows[mp] for mp in sorted(rows)]


def check_world(path: Location, models: Grid, optims: Grid) -> None:
    """Check that all files are of the same step and of one world."""
    first, file_of_first = models[0][0].values, models[0][0]
    for key in ("pp_degree",):
        degree = dict_of(first.get("checkpoint_parallel_dimensions")).get(key, 1)
        if degree != 1:
            raise UnsupportedError(f"{file_of_first.path}: is of {shown(degree)} pipeline stages, which is not read")
    if first.get("ds_autoep_layers"):
        raise UnsupportedError(f"{file_of_first.path}: is of AutoEP's mixture of experts, whose parts are not read")
    if dict_of(dict_of(first.get("ds_config")).get("zero_optimization")).get("mics_shard_size", -1) not in (-1, 0):
        raise UnsupportedError(f"{file_of_first.path}: was trained with MiCS, whose partitions are not read")
    for row in models:
        for file in row:
            for key in ("global_steps", "dp_world_size", "mp_world_size"):
                if file.values.get(key) != first.get(key):
                    raise ParseError(
                        f"{file.path}: {key} is {shown(file.values.get(key))}, but {shown(first.get(key))} in "
                        f"{file_of_first.path.name}: it is of another step, or of another world"
                    )
    ranks = first.get("mp_world_size", len(models))
    if ranks != len(models):
        raise ParseError(f"{path}: has files of {len(models)} of {shown(ranks)} model-parallel ranks")
    world = first.get("dp_world_size")
    for rows in (optims, models if len(models[0]) > 1 else []):
        if rows and len(rows[0]) != world:
            raise ParseError(
                f"{path}: has files of {counted(len(rows[0]), 'data-parallel rank')}; {file_of_first.path.name} is of "
                f"{shown(world)}: files are missing, or two worlds are mixed"
            )


class Rows:
    """The rows for a folder's tensors, its values, and the tensors that cannot be read.

    Attributes:
        weights: Rows of weights and buffers.
        states: Rows of the optimizer's states.
        others: Rows of other tensors.
        objects: Values that are not tensors.
        unreadable: The reason why a tensor cannot be read, by name.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.objects: dict[str, StoredObject] = {}
        self.unreadable: dict[str, str] = {}

    @property
    def rows(self) -> dict[str, Any]:
        """All rows: weights first."""
        return {**self.weights, **self.states, **self.others}

    def add_values(self, models: Grid) -> None:
        """Add the trainer's and the user's values: those of the first rank, and those in which other ranks differ."""
        files = [file for row in models for file in row]
        values: dict[str, Any] = {}
        for rank, file in enumerate(files):
            own = {key: value for key, value in file.values.items() if key not in _STRUCTURE}
            for name, value in _leaves(own, file):
                if rank and not isinstance(value, Record) and name in values and values[name] == value:
                    continue
                if not rank:
                    values[name] = value
                top, dot, rest = name.partition(".")
                self._add_value(name if not rank else f"{top}.rank_{rank}{dot}{rest}", value, file.container)

    def add_optimizer_values(self, file: ReadFile, said: dict[str, Any]) -> None:
        """Add an optimizer's values besides states and groups, such as its loss scale."""
        own = {key: state_of(value) or value for key, value in said.items() if key not in _OF_PARTITIONS}
        for name, value in _leaves(own, file):
            self._add_value(f"optimizer.{name}", value, file.container)

    def add_groups(self, groups: list[dict[str, Any]], members: list[list[str]]) -> None:
        """Add the groups of an optimizer, with the names of the parameters of each."""
        for number, said in enumerate(groups):
            values = {key: value for key, value in said.items() if key != "params"} | {"params": members[number]}
            for key, value in values.items():
                name = f"optimizer.param_groups.{number}.{key}"
                self.objects[name] = value_object(name, value)

    def _add_value(self, name: str, value: Any, container: Container) -> None:
        if name in self.weights or name in self.states or name in self.others or name in self.objects:
            raise ParseError(f"{container.file.path}: two values have the name {shown(name)}")
        try:
            saved = container.tensor(value, name)
        except UnsupportedError as error:
            self.unreadable[name] = str(error)
            return
        if saved is None:
            self.objects[name] = value_object(name, value)
        else:
            self.others[name] = WholeRow(saved.dtype, whole(saved.shape), ((container, saved),))


def _leaves(values: dict[str, Any], file: ReadFile) -> Iterator[tuple[str, Any]]:
    return named_values(values, file.path, 1 << 30) if values else iter(())


def metadata_of(file: ReadFile) -> dict[str, Any]:
    """Return the version and the step that a model's file states."""
    return {
        key: file.values[key] for key in ("ds_version", "global_steps") if isinstance(file.values.get(key), (str, int))
    }


def frozen_row(models: Grid, name: str, cut: Callable[..., RankCut]) -> FlatRow | None:
    """Return the row of a frozen parameter of stage 3, of which each data-parallel rank's file has a part.

    Args:
        models: The files of all ranks.
        name: The parameter's name.
        cut: Returns the cut of a parameter, given its name and its shapes on model-parallel ranks.

    Returns:
        The row; `None` if it is not a frozen parameter.

    Raises:
        ParseError: if a part is missing.
        UnsupportedError: if the files do not state how model-parallel ranks cut it.
    """
    if dict_of(models[0][0].values.get("frozen_param_shapes")).get(name) is None:
        return None
    held: list[tuple[Container, SavedTensor]] = []
    spans: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = []
    dtype: Dtype | None = None
    for mp, row in enumerate(models):
        said = torch_sizes(dict_of(row[0].values.get("frozen_param_shapes")).get(name))
        shapes.append(checked_shape(said, 64, name, row[0].path))
        count = math.prod(shapes[-1])
        size = -(-count // len(row))
        for dp, file in enumerate(row):
            flat = file.container.tensor(dict_of(file.values.get("frozen_param_fragments")).get(name), name)
            dtype = flat.dtype if flat is not None and dtype is None else dtype
            if flat is None or flat.shape != (size,) or not is_flat(flat) or flat.dtype != dtype:
                raise ParseError(
                    f"{file.path}: frozen_param_fragments does not have the {size} elements of {shown(name)}, of "
                    f"shape {shapes[-1]} among {len(row)} ranks"
                )
            start = min(dp * size, count)
            if start < count:
                spans.append((len(held), 0, mp, start, min(start + size, count)))
                held.append((file.container, flat))
    if dtype is None:
        return None
    table = np.array(spans, np.int64).reshape(len(spans), 5)
    return FlatRow(dtype, cut(name, shapes, is_certain=False), Arrays(held, f"part of {name}"), table)
