"""The values that Megatron saves besides tensors: its script's arguments, the optimizer's groups, and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES
from ...._text import shown
from ....errors import ParseError
from ...data.location import Location
from ...tensors.checkpoint import StoredObject
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import StoredPiece
from ..torch.pickles import Record, state_of
from ..torch.tensors import Container, items_within, named_values, value_object

__all__ = [
    "Arguments",
    "Group",
    "as_dict",
    "groups_of",
    "members_of",
    "objects_of",
    "read_arguments",
    "saved_step",
    "step_tensor",
    "with_groups",
]

_MOST_RANKS = 1_000_000
_MOST_GROUPS = 10_000
#: The first number of steps that float32 cannot count exactly.
_MOST_STEPS = 1 << 24


class Arguments(NamedTuple):
    """The arguments of Megatron's script that describe the parallelism and the model.

    Attributes:
        tp: The number of tensor-parallel ranks.
        pp: The number of stages.
        chunks: The chunks of the model on each stage.
        world: The number of all ranks; 0 if unknown.
        layers: The layers of the model; 0 if unknown.
        gated: Whether the first projection of an MLP is a gate and an up projection; `None` if unknown.
        tied: Whether the output layer is the embedding; `None` if unknown.
        instances: The instances of the distributed optimizer, each of which has all states.
        by_stage: Whether the ranks of a stage are not consecutive.
        experts: The number of expert-parallel ranks.
        vocabulary: The rows of the embedding, padding included; 0 if unknown.
    """

    tp: int
    pp: int
    chunks: int
    world: int
    layers: int
    gated: bool | None
    tied: bool | None
    instances: int
    by_stage: bool
    experts: int
    vocabulary: int

    def stage_of(self, rank: int) -> tuple[int, int] | None:
        """Return the tensor-parallel rank and the stage of a process; `None` if unknown."""
        if self.pp == 1:
            return rank % self.tp, 0
        if self.by_stage:
            return rank % self.tp, rank // self.tp % self.pp
        if self.world and self.world % self.pp == 0 and rank < self.world:
            return rank % self.tp, rank // (self.world // self.pp)
        return None

    @property
    def ways(self) -> int:
        """The number of ranks that share the states of one model-parallel rank; 0 if unknown."""
        return self.world // (self.tp * self.pp * self.instances) if self.world else 0


def read_arguments(value: Any, where: object) -> Arguments:
    """Read the `args` of a checkpoint.

    Raises:
        ParseError: if they are missing, or a number in them is impossible.
    """
    said = state_of(value, "Namespace")
    if said is None:
        raise ParseError(f"{where}: lacks the args of Megatron's training script, so its parallelism is not known")

    def number(name: str, other: int, least: int = 1) -> int:
        held = said.get(name, other)
        held = other if held is None else held
        if type(held) is not int or not least <= held <= _MOST_RANKS:
            raise ParseError(f"{where}: args has the invalid value {name} = {shown(held)}")
        return held

    def flag(name: str) -> bool | None:
        held = said.get(name)
        return held if isinstance(held, bool) else None

    untied = flag("untie_embeddings_and_output_weights")
    found = Arguments(
        tp=number("tensor_model_parallel_size", 1),
        pp=number("pipeline_model_parallel_size", 1),
        chunks=number("virtual_pipeline_model_parallel_size", 1),
        world=number("world_size", 0, 0),
        layers=number("num_layers", 0, 0),
        gated=flag("swiglu"),
        tied=None if untied is None else not untied,
        instances=number("num_distributed_optimizer_instances", 1),
        by_stage=bool(flag("use_tp_pp_dp_mapping")),
        experts=number("expert_model_parallel_size", 1),
        vocabulary=number("padded_vocab_size", 0, 0),
    )
    if found.world % (found.tp * found.pp * found.instances):
        raise ParseError(
            f"{where}: args says that the world_size is {found.world}, which is not a multiple of "
            f"tensor_model_parallel_size {found.tp}, pipeline_model_parallel_size {found.pp} and {found.instances} "
            "instances of the optimizer"
        )
    return found


class Group(NamedTuple):
    """A group of the optimizer's parameters.

    Attributes:
        values: Its hyperparameters.
        step: The number of steps done; `None` if the group does not state it.
        decays: Whether it is the group of matrices, which have weight decay; `None` if unknown.
        numbers: The numbers of its parameters; `None` if the group has none.
    """

    values: dict[str, Any]
    step: int | None
    decays: bool | None
    numbers: list[int] | None


def groups_of(value: Any, where: object) -> list[Group]:
    """Read the `param_groups` of an optimizer.

    Raises:
        ParseError: if they have another form.
    """
    if not isinstance(value, list) or len(value) > _MOST_GROUPS:
        raise ParseError(f"{where}: the optimizer's param_groups are {shown(value)}, not a list of groups")
    found = []
    for group in value:
        pairs = None if isinstance(group, (list, tuple)) else items_within(group)
        if pairs is None:
            raise ParseError(f"{where}: a group of the optimizer is not a mapping: {shown(group)}")
        values = {key: held for key, held in pairs if isinstance(key, str)}
        numbers = values.pop("params", None)
        if numbers is not None and not (isinstance(numbers, list) and all(type(each) is int for each in numbers)):
            raise ParseError(f"{where}: the parameters of a group are {shown(numbers)}, not numbers")
        factor, step = values.get("wd_mult"), values.get("step")
        whole = isinstance(step, (int, float)) and math.isfinite(step) and step == int(step) >= 0
        decays = {1.0: True, 0.0: False}.get(factor) if isinstance(factor, (int, float)) else None
        found.append(Group(values, int(step) if whole and step is not None else None, decays, numbers))
    return found


def with_groups(groups: Iterable[Group], members: Mapping[int, list[str]]) -> dict[str, StoredObject]:
    """Return the values of groups by name, with the names of their parameters."""
    found: dict[str, StoredObject] = {}
    for number, group in enumerate(groups):
        start = f"optimizer.param_groups.{number}"
        values = {**group.values, **({"params": members[number]} if number in members else {})}
        found.update((f"{start}.{key}", value_object(f"{start}.{key}", value)) for key, value in values.items())
    return found


def members_of(groups: list[Group], decays: Mapping[str, bool]) -> dict[int, list[str]]:
    """Return the names of each group's parameters, by Megatron's own rule; empty if the rule leaves a choice.

    Args:
        groups: The groups of the optimizer, in its order.
        decays: For each parameter, whether it is a matrix and not a bias, and so has weight decay.
    """
    number_of = {group.decays: number for number, group in enumerate(groups)}
    if len(number_of) != len(groups) or None in number_of or not set(decays.values()) <= number_of.keys():
        return {}
    found: dict[int, list[str]] = {number: [] for number in range(len(groups))}
    for name, is_matrix in decays.items():
        found[number_of[is_matrix]].append(name)
    return found


def as_dict(value: Any) -> dict[Any, Any]:
    """Return a dict or an ordered dict as a dict; an empty one for any other value."""
    return {} if isinstance(value, (list, tuple)) else dict(items_within(value) or ())


def objects_of(
    values: Mapping[Any, Any], where: Location, size: int, whole: tuple[str, ...] = ()
) -> dict[str, StoredObject]:
    """Return the saved values by name; values under the keys in `whole` are not divided further."""
    found: dict[str, StoredObject] = {}
    for key, held in values.items():
        name = f"{key}"
        if name in whole or items_within(held) is None:
            found[name] = value_object(name, held)
            continue
        for inner, leaf in named_values(held, where, size):
            text = f"{name}.{inner}" if inner else name
            found[text] = value_object(text, leaf)
    return found


def step_tensor(name: str, step: int, path: Location) -> StoredTensor:
    """Return the number of steps as a tensor without dims, as PyTorch's optimizers have it."""
    dtype = DTYPES["float32" if step < _MOST_STEPS else "int64"]
    fill = np.array(step, np.float32 if step < _MOST_STEPS else np.int64)
    return StoredTensor(name, dtype, (), (StoredPiece((), path, fill=fill),))


def saved_step(container: Container, value: Any, name: str) -> Callable[[str], StoredTensor] | None:
    """Return a function that makes a tensor without dims of the steps in a container; `None` if it has none."""
    saved = container.tensor(value, name) if isinstance(value, Record) else None
    if saved is None or saved.shape != ():
        return None
    piece = container.piece(saved, name, ())
    return lambda text: StoredTensor(text, saved.dtype, (), (piece,))
