"""Folders with a file for each rank, as trainers with FSDP write them: the model, its optimizer, random states.

| files | written by |
|---|---|
| `model_world_size_W_rank_R.pt`, `optim_…`, `extra_state_…`, `fsdp_config.json` | verl and others, of FSDP2 and FSDP1 |
| `optim_state_dict_rank_R.pt` | FSDP1: states by name, next to those by number |
| `pytorch_model_fsdp_0_rankR.bin`, `optimizer_0_rankR.bin` | accelerate without distributed checkpoints |

Tensors that are cut say where their parts belong (`rank_parts`); states get the names of their parameters
(`fsdp_states`), and flat parameters are taken apart (`flat_units`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ...._text import shown
from ....errors import ParseError
from ...data.location import Location, entries_of, opening, read_json
from ...tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ...tensors.stored import UnsupportedError
from .flat_units import FLAT, local_weights, wrapped_modules
from .fsdp_states import States
from .rank_parts import Gathered, tied_tensors
from .run_values import Extras
from .tensors import Container, named_values, sums_of, value_object

__all__ = ["open_form"]

_NAME = re.compile(r"(.*)(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_NAMED = re.compile(r"()(optim_state_dict)()_rank_(\d{1,9})\.pt")
_ACCELERATE = re.compile(r"()(pytorch_model_fsdp|optimizer)(_\d{1,4})?_rank_?(\d{1,9})\.bin")
_CONFIG = "fsdp_config.json"
_MAX_RANKS = 1_000_000


class _Files(NamedTuple):
    """The names of the files of a folder, by rank; no names of a kind that is missing.

    Attributes:
        world: The number of ranks.
        models: The files of the model.
        optimizers: The files of the optimizer.
        named: The files with FSDP1's optimizer by name, if there are any.
        extras: The files of other values, such as random states.
    """

    world: int
    models: list[str]
    optimizers: list[str]
    named: list[str]
    extras: list[str]


class _ModelFiles(NamedTuple):
    """The contents of the files of the model.

    Attributes:
        gathered: The tensors by name, in the order of the first rank's file.
        objects: The values that are not tensors.
        unreadable: The reasons why other tensors cannot be read.
        wrapped: The modules that FSDP1 had wrapped, if a file states them.
    """

    gathered: dict[str, Gathered]
    objects: dict[str, StoredObject]
    unreadable: dict[str, str]
    wrapped: tuple[str, ...]


def open_form(
    path: Location, *, padded: bool = False, parameter_names: Sequence[str] | None = None
) -> StoredCheckpoint:
    """Open a folder in which each rank of FSDP wrote files of its own, with the tensors put together over the ranks.

    Args:
        path: The folder.
        padded: Whether ranks' tensors may be padded to the length that they have on the first rank.
        parameter_names: The names of the optimizer's parameters in the order of their numbers, if they are known.
    """
    found = _files(path)
    metadata: dict[str, Any] = {"world_size": found.world, **_config(path, found.world)}
    listed = [*found.models, *found.optimizers, *found.named, *found.extras]
    with opening([path / name for name in listed]) as (open_next, files):

        def opened(names: list[str]) -> list[Container]:
            return [_of_rank(Container(open_next(path / name))) for name in names]

        model = _read_model(path, opened(found.models), padded)
        optimizers, named = opened(found.optimizers), opened(found.named)
        unread = found.optimizers if named else []
        states = States(path, named or optimizers, found.world)
        if any(_is_flat(name) for name in model.gathered):
            weights, lost = local_weights(path, model.gathered, states.shapes())
            model = model._replace(gathered=weights, unreadable=model.unreadable | lost)
        states.name(model.gathered, model.wrapped, parameter_names)
        extras = Extras(path, opened(found.extras))
        tensors = tied_tensors(path, model.gathered)
        objects = {**model.objects}
        for more in (states, extras):
            for name in (*more.tensors, *more.objects):
                if name in tensors or name in objects:
                    raise ParseError(f"{path}: two of its files hold {shown(name)}")
            tensors |= more.tensors
            objects |= more.objects
    meshes: dict[str, int] = {}
    for held in model.gathered.values():
        if (mesh := held.mesh) is not None:
            meshes[str(mesh)] = meshes.get(str(mesh), 0) + 1
    return StoredCheckpoint(
        path,
        "fsdp2" if meshes or not any(held.is_sharded for held in model.gathered.values()) else "fsdp1",
        tensors,
        files,
        Besides(
            metadata=metadata | {"meshes": meshes} | ({"planner_data": extras.paths} if extras.paths else {}),
            objects=objects,
            unreadable=model.unreadable | states.unreadable,
            sums=partial(sums_of, files),
            unread=unread,
            doubts=states.doubts,
        ),
    )


def _of_rank(container: Container) -> Container:
    """Return a rank's file, whose contents may not say whose they are; PyTorch notes the name that it was saved by.

    Raises:
        ParseError: if it was saved as the file of another rank or world.
    """
    name = container.file.path.name
    saved_as = f"{container.saved_as}.{name.rpartition('.')[2]}"
    for form in (_NAME, _NAMED, _ACCELERATE):
        own, its = form.fullmatch(name), form.fullmatch(saved_as)
        if own is not None and its is not None and own.groups()[2:] != its.groups()[2:]:
            raise ParseError(f"{container.file.path}: was saved as {saved_as}: it is the file of another rank or world")
    return container


def _is_flat(name: str) -> bool:
    return name.rpartition(".")[2] in FLAT


def _files(path: Location) -> _Files:
    """Return the files of one world, each kind for every rank."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for name, _ in entries_of(path):
        for form in (_NAME, _NAMED, _ACCELERATE):
            match = form.fullmatch(name)
            if match is not None:
                found.setdefault((match[1], match[2], match[3] or ""), {})[int(match[4])] = name
                break
    models = [key for key in found if key[1] in ("model", "pytorch_model_fsdp")]
    if len(models) != 1:
        kinds = ", ".join(sorted(_stem(key) for key in models)[:4])
        raise ParseError(f"{path}: holds checkpoints of several kinds or world sizes ({kinds}); there must be one")
    prefix, kind, number = models[0]
    own = found.pop(models[0])
    size = int(number) if kind == "model" else max(own) + 1
    if not 0 < size <= _MAX_RANKS:
        raise ParseError(f"{path}: a world of {size} ranks, over the limit of {_MAX_RANKS}")
    held = {kind: _complete(path, models[0], own, size)}
    for key, ranks in found.items():
        if key[1] != "optim_state_dict" and (key[0], key[2]) != (prefix, number):
            first = ranks[min(ranks)]
            raise ParseError(
                f"{path}: {shown(first)} and {shown(_stem(models[0]))} are of different worlds or models; a folder "
                "must have the files of one"
            )
        held[key[1]] = _complete(path, key, ranks, size)
    optimizers = held.get("optim", held.get("optimizer", []))
    named = held.get("optim_state_dict", [])
    return _Files(size, held[kind], optimizers, named, held.get("extra_state", []))


def _stem(key: tuple[str, str, str]) -> str:
    prefix, kind, number = key
    return f"{prefix}{kind}_world_size_{number}" if kind in ("model", "optim", "extra_state") else f"{kind}{number}"


def _complete(path: Location, key: tuple[str, str, str], ranks: dict[int, str], size: int) -> list[str]:
    """Return the files of all ranks, in order."""
    missing = [rank for rank in range(size) if rank not in ranks]
    if missing or len(ranks) > size:
        which = f"no file of rank {missing[0]}" if missing else f"a file of rank {max(ranks)}, but only {size} ranks"
        raise ParseError(f"{path}: {_stem(key)}: there is {which}")
    return [ranks[rank] for rank in range(size)]


def _config(path: Location, world: int) -> dict[str, Any]:
    """Return the contents of `fsdp_config.json`, which must be of the same world."""
    file = path / _CONFIG
    try:
        said = read_json(file)
    except FileNotFoundError:
        return {}
    if not isinstance(said, dict) or said.get("world_size", world) != world:
        size = said.get("world_size") if isinstance(said, dict) else said
        raise ParseError(f"{file}: world_size is {shown(size)}, but the files are those of {world} ranks")
    return {"FSDP_version": said["FSDP_version"]} if "FSDP_version" in said else {}


def _read_model(path: Location, containers: list[Container], padded: bool) -> _ModelFiles:
    gathered: dict[str, Gathered] = {}
    objects: dict[str, StoredObject] = {}
    unreadable: dict[str, str] = {}
    wrapped: tuple[str, ...] = ()
    has_flats = False
    for container in containers:
        root = container.root()
        wrapped = wrapped or wrapped_modules(root)
        leaves = list(named_values(root, container.file.path, container.pickle_bytes))
        has_flats = has_flats or any(_is_flat(key) for key, _ in leaves)
        for key, value in leaves:
            held = gathered.setdefault(key, Gathered(key))
            try:
                is_tensor = held.add(container, value, len(containers), padded=padded, is_cut=has_flats)
            except UnsupportedError as error:
                unreadable.setdefault(key, str(error))
                continue
            if not is_tensor:
                if held.first:
                    raise ParseError(f"{container.file.path}: {shown(key)} is not a tensor, but is one in {held.first}")
                del gathered[key]
                objects.setdefault(key, value_object(key, value))
    for held in gathered.values():
        held.check_ranks(containers)
    both = next((key for key in gathered if key in objects), None)
    if both is not None:
        raise ParseError(f"{path}: {shown(both)} is a tensor in some files and not in others")
    return _ModelFiles(
        {key: held for key, held in gathered.items() if key not in unreadable}, objects, unreadable, wrapped
    )
