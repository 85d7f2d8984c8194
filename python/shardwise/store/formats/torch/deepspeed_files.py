"""The files of a step of DeepSpeed's: which rank's each is, and whether they are of one step and of one world."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location
from ...tensors.stored import UnsupportedError
from .tensors import Container, children, dict_of

__all__ = ["Grid", "Key", "RankFile", "check_world", "grid_of", "ranks_of", "read_rank"]

_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_(model|optim)_states\.pt")
#: Files of models whose layers or experts are in files of their own.
_OTHERS = re.compile(r"layer_\d+-model_.*\.pt|layer_\d+_expert_.*\.pt|expert_\d+_.*_states\.pt|expp_rank_.*_states\.pt")


class RankFile(NamedTuple):
    """A file of a rank, read.

    Attributes:
        container: The file.
        said: Its values.
    """

    container: Container
    said: dict[str, Any]

    @property
    def path(self) -> Location:
        """Its path."""
        path: Location = self.container.file.path
        return path


#: The kind of a file, and its model-parallel and data-parallel rank; -1 if its file is of all data-parallel ranks.
Key = tuple[str, int, int]


#: The files of each model-parallel rank, and in them of each data-parallel rank.
Grid = list[list[RankFile]]


def ranks_of(path: Location, inside: list[str]) -> dict[Key, str]:
    """The files of all ranks, in the order of these; each must be there once."""
    other = next((name for name in inside if _OTHERS.fullmatch(name)), None)
    if other is not None:
        raise UnsupportedError(
            f"{path}: has {shown(other)}: the layers of a pipeline, or the experts of a mixture, are in files that are "
            "not read; DeepSpeed's own ds_to_universal.py may convert it to what can be opened"
        )
    found: dict[Key, str] = {}
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
            raise ParseError(f"{path}: has {shown(held[next(iter(held))])} and files of data-parallel ranks beside it")
        rows = max((mp for _, mp, _ in found), default=0) + 1
        wanted = columns if columns[:1] == [-1] else range(max(columns, default=-1) + 1)
        if len(held) != rows * len(wanted):
            missing = next((mp, dp) for mp in range(rows) for dp in wanted if (kind, mp, dp) not in held)
            raise ParseError(f"{path}: has no *{_rank_text(*missing)}_{kind}_states.pt: files are missing")
    return dict(sorted(found.items()))


def _rank_text(mp: int, dp: int) -> str:
    return f"{'' if dp < 0 else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}"


def read_rank(file: Holder) -> RankFile:
    """Read the pickle of a file.

    Raises:
        ParseError: if it was saved under the name of another rank's.
    """
    container = Container(file)
    saved_as, stem = container.saved_as, file.path.name.removesuffix(".pt")
    if _FILE.fullmatch(f"{saved_as}.pt") and saved_as != stem:
        raise ParseError(f"{file.path}: was saved as {saved_as}.pt: it is the file of another rank")
    return RankFile(container, dict_of(container.read_objects()))


def grid_of(read: Mapping[Key, RankFile], kind: str) -> Grid:
    """Give the files of a kind."""
    rows: dict[int, list[RankFile]] = {}
    for (of, mp, _), file in read.items():
        if of == kind:
            rows.setdefault(mp, []).append(file)
    return [rows[mp] for mp in sorted(rows)]


def check_world(path: Location, models: Grid, optims: Grid) -> None:
    """Check that all files are of the same step, of one world."""
    first, file_of_first = models[0][0].said, models[0][0]
    for key in ("pp_degree",):
        degree = dict_of(first.get("checkpoint_parallel_dimensions")).get(key, 1)
        if degree != 1:
            raise UnsupportedError(f"{file_of_first.path}: is of {shown(degree)} pipeline stages, which is not read")
    if any(size != 1 for _, size in children(first.get("num_experts")) or ()) or first.get("ds_autoep_layers"):
        raise UnsupportedError(f"{file_of_first.path}: is of a mixture of experts, whose partitions are not read")
    if dict_of(dict_of(first.get("ds_config")).get("zero_optimization")).get("mics_shard_size", -1) not in (-1, 0):
        raise UnsupportedError(f"{file_of_first.path}: was trained with MiCS, whose partitions are not read")
    for row in models:
        for file in row:
            for key in ("global_steps", "dp_world_size", "mp_world_size"):
                if file.said.get(key) != first.get(key):
                    raise ParseError(
                        f"{file.path}: {key} is {shown(file.said.get(key))}, but {shown(first.get(key))} in "
                        f"{file_of_first.path.name}: it is of another step, or of another world"
                    )
    ranks = first.get("mp_world_size", len(models))
    if ranks != len(models):
        raise ParseError(f"{path}: has files of {len(models)} of {shown(ranks)} model-parallel ranks")
    world = first.get("dp_world_size")
    for rows in (optims, models if len(models[0]) > 1 else []):
        if rows and len(rows[0]) != world:
            raise ParseError(
                f"{path}: has files of {len(rows[0])} data-parallel ranks; {file_of_first.path.name} is of "
                f"{shown(world)}: files are missing, or two worlds are mixed"
            )
