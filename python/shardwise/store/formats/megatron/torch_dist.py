"""Megatron's distributed checkpoints, `torch_dist`: PyTorch's, with an extra file that marks them as complete.

Optimizers have states under the keys of their weights, or as grids of flattened parts (up to Megatron-Core 0.14), or as
buckets of one model-parallel rank, in which no entry states the place of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ....errors import ParseError
from ...data.location import Location, open_file
from ...tensors.checkpoint import StoredCheckpoint, StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from ..torch.dcp import Contents, Index, open_folder
from ..torch.tensors import Container
from .buffers import LAYERS, Buffers, SavedBuffers
from .grids import with_grids
from .parameters import unlike
from .said import (
    Group,
    as_dict,
    groups_of,
    members_of,
    objects_of,
    read_arguments,
    saved_step,
    step_tensor,
    with_groups,
)

__all__ = ["open_iteration"]

_COMMON = "common.pt"
#: The kinds of states that are master copies.
_MASTERS = ("param", "fp32_param")


def open_iteration(path: Location, said: Any) -> StoredCheckpoint:
    """Open the folder of an iteration; `said` is the contents of its `metadata.json`."""
    return open_folder(path, "megatron", {"megatron": said}, _completed)


def _completed(index: Index, found: Contents) -> Contents:
    """Return the contents of a checkpoint, given those that PyTorch's index lists."""
    common = _Common.of(index)
    found = with_grids(found, index)._replace(objects={**found.objects, **common.objects})
    held = SavedBuffers.of(index, found.objects)
    if not held.names:
        found = _without_shifted(found, index)
        return _with_groups(found, common, common.groups, _named_states(found))
    try:
        buffers = Buffers(index, read_arguments(common.values.get("args"), common.path), held)
        groups = buffers.groups(found.objects)
        found = buffers.added_to(found)
        return _with_groups(found, common, groups, {key: f"optimizer.state.{key}.step" for key in buffers.kinds})
    except UnsupportedError as error:
        tensors = {name: tensor for name, tensor in found.tensors.items() if name not in held.names}
        return Contents(tensors, found.objects, {name: str(error) for name in held.names})


class _Common(NamedTuple):
    """The contents of `common.pt`, the file with all values that are not sharded.

    Attributes:
        values: The values at the top of its dict.
        objects: Its values by name, without the optimizer's groups and steps.
        groups: The groups of the optimizer, if the file has them.
        step: Makes a tensor of the steps, if the file has one number for all parameters.
    """

    path: Location
    values: dict[Any, Any]
    objects: dict[str, StoredObject]
    groups: list[Group]
    step: Callable[[str], StoredTensor] | None

    @classmethod
    def of(cls, index: Index) -> _Common:
        """Read `common.pt`, and add it to the files of the index."""
        path = index.folder / _COMMON
        if not path.exists():
            raise ParseError(f"{index.folder}: has no {_COMMON}, which Megatron writes next to the other files")
        file = open_file(path)
        index.files.append(file)
        index.beside.append(file)
        container = Container(file)
        values = as_dict(container.read_objects())
        optimizer = as_dict(values.get("optimizer"))
        inner = as_dict(optimizer.get("optimizer")) or optimizer  # That of float32 has no other one in it.
        groups = groups_of(inner["param_groups"], path) if "param_groups" in inner else []
        common_step = as_dict(inner.get("state")).get("common_step")
        step = None if common_step is None else saved_step(container, common_step, "common_step")
        objects = objects_of(values, path, file.size, whole=("args",))
        start = "optimizer.optimizer." if "optimizer" in optimizer else "optimizer."
        taken = (f"{start}param_groups.", f"{start}state.common_step")
        kept = {name: held for name, held in objects.items() if not name.startswith(taken)}
        return cls(path, values, kept, groups, step)


def _with_groups(found: Contents, common: _Common, groups: list[Group], states: Mapping[str, str]) -> Contents:
    """Add the optimizer's groups, with the names of their parameters, and the steps of each parameter.

    Args:
        found: The contents, which are added to.
        common: The contents of `common.pt`.
        groups: The optimizer's groups.
        states: For each parameter that has states, the name for the tensor of its steps.
    """
    decays = {key: _decays(key, one) for key in states if (one := _weight_of(key, found)) is not None}
    members = members_of(groups, decays)
    steps = {group.step for group in groups}
    tensors = dict(found.tensors)
    for number, group in enumerate(groups):
        for key in members.get(number, ()) if len(steps) > 1 else decays if number == 0 else ():
            if group.step is not None:
                tensors.setdefault(states[key], step_tensor(states[key], group.step, common.path))
    if common.step is not None:
        tensors.update((name, common.step(name)) for name in states.values())
    return found._replace(tensors=tensors, objects={**found.objects, **with_groups(groups, members)})


def _weight_of(key: str, found: Contents) -> StoredTensor | None:
    """Return the weight of this key; if only states are saved, its master copy."""
    names = (key, *(f"optimizer.state.{kind}.{key}" for kind in _MASTERS))
    return next((found.tensors[name] for name in names if name in found.tensors), None)


def _decays(key: str, weight: StoredTensor) -> bool:
    """Return whether a parameter has weight decay by Megatron's rule: it is a matrix in its own layer, and no bias."""
    match = LAYERS.fullmatch(key)
    return weight.ndim - (match is not None and match["layer"] is None) > 1 and not key.endswith(".bias")


def _without_shifted(found: Contents, index: Index) -> Contents:
    """Return the contents without the states if their master copies do not match the weights."""
    start = "optimizer.state."
    for name, master in found.tensors.items():
        kind, _, key = name.removeprefix(start).partition(".")
        if not name.startswith(start) or kind not in _MASTERS or key not in found.tensors or master.dtype != "float32":
            continue
        if wrong := unlike(found.tensors[key], master):
            why = (
                f"{index.path}: {wrong}; Megatron-Core 0.16.1 stores other elements in fully_reshardable where a "
                "bucket before the last one has padding, or files of two checkpoints are mixed: continue from a save "
                "with dp_reshardable, its default"
            )
            states = [each for each in found.tensors if each.startswith(start)]
            kept = {each: tensor for each, tensor in found.tensors.items() if each not in states}
            return Contents(kept, found.objects, {**found.unreadable, **dict.fromkeys(states, why)})
    return found


def _named_states(found: Contents) -> dict[str, str]:
    """Return the parameters whose states are under their own keys, each with a name for the tensor of its steps."""
    start = "optimizer.state."
    keys = (name.removeprefix(start).partition(".")[2] for name in found.tensors if name.startswith(start))
    return {key: f"{start}step.{key}" for key in keys if _weight_of(key, found) is not None}
