"""The nested dict that `torch.save` pickles: a model and its optimizers as PyTorch's own classes load them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....rules.left_out import names_text
from ....rules.optax import kinds_in_pytorch
from ....rules.state_splits import MASTER
from ....rules.states import TrainingNames, training_names
from ...tensors.checkpoint import KeyPath
from .pickles import Call, Global
from .plain_values import Reference

__all__ = ["Nested", "groups_by_name", "nested_of", "tree_names", "with_masters"]

#: The part of a state's name that names the optimizer.
_STATE = re.compile(r"(?:(?P<key>.*?)\.)?(?:state|distributed)\.")
#: The name of a value of a group.
_GROUP = re.compile(r"(?:(?P<key>.*?)\.)?param_groups\.(?P<rest>.+)", re.DOTALL)
#: The beginning of a name that is the path of a value outside of any optimizer.
_BESIDE = re.compile(r"(?!(?:[^.]*optim[^.]*)\.)[^.]+(?:\.[^.]+)+", re.DOTALL)


class Nested(NamedTuple):
    """A nested dict of tensors and values.

    Attributes:
        tree: The dict, with references in place of tensors.
        tensors: The tensors in the order of the dict, in which PyTorch numbers them. States of optimizers are never
            tied: each is updated by itself.
        doubts: Warnings, a sentence each.
        has_optimizer: Whether there is an optimizer.
    """

    tree: Any
    tensors: list[Wanted]
    doubts: tuple[str, ...] = ()
    has_optimizer: bool = False


def tree_names(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors in a tree; a name is repeated as often as the tensor occurs."""
    if isinstance(tree, Reference):
        yield tree.name
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tree_names(value)
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, (Call, Global)):
        for value in tree:
            yield from tree_names(value)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Reference):
        return Reference(names.get(value.name, value.name))
    if isinstance(value, dict):
        return {key: _renamed(held, names) for key, held in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, (Call, Global)):
        return type(value)(_renamed(held, names) for held in value)
    return value


class _FoundGroup(NamedTuple):
    """A group of an optimizer: its values, and the names of its parameters."""

    values: dict[str, Any]
    params: list[str]


def nested_of(
    wanted: Sequence[Wanted], paths: Mapping[str, KeyPath], values: Mapping[str, Any], form: str = "torch"
) -> Nested:
    """Return the nested dict of tensors and values.

    Weights are under `model`, by the names of parameters; optimizers under `optimizer`, with numbers, as
    `load_state_dict` of `torch.optim` takes them; other values where they were. Without an optimizer everything is
    where it was: most often by name in one dict, as the state dict of a model.

    Args:
        wanted: The tensors.
        paths: The paths of tensors and values in a nested state dict, as far as they are known.
        values: The values that are not tensors.
        form: The form that is written. In `"universal"`, weights are under `model` even without an optimizer; in
            `"fsdp2"`, tensors are named by their parameters, `NAME` and `optimizer.state.NAME.KIND`.

    Raises:
        LayoutError: if two states of a parameter are of one kind, or a state's parameter is in no group.
    """
    names = [tensor.name for tensor in wanted]
    known = training_names(names, values)
    leaves: dict[str, Any] = {**{name: Reference(name) for name in names}, **values}
    grouped = {name: match for name in leaves if (match := _GROUP.fullmatch(name)) and known.is_state(name)}
    if not known.states and not grouped and form != "universal":
        placed = _placed(leaves, paths, {})
        return Nested(placed, _in_order(wanted, placed))
    states: dict[str, dict[str, dict[str, Reference]]] = {}
    in_pytorch, of_optax = kinds_in_pytorch(known), set[str]()
    for name, state in known.states.items():
        if name in in_pytorch:
            state = state._replace(kind=in_pytorch[name])
        elif state.before.endswith(f".{state.kind}.") and "opt" in state.before:
            of_optax.add(state.kind)
        of_key = states.setdefault(_key_of(state.before), {})
        kinds = of_key.setdefault(state.parameter, {})
        if state.kind in kinds:
            raise LayoutError(
                f"{shown(name)} and {shown(kinds[state.kind].name)} are both the state {shown(state.kind)} of "
                f"{shown(state.parameter)}, but a file of PyTorch's optimizers has one"
            )
        kinds[state.kind] = Reference(name)
    said: dict[str, dict[str, Any]] = {}
    for name, match in grouped.items():
        said.setdefault(match["key"] or "", {})[match["rest"]] = leaves[name]
    doubts: list[str] = []
    if of_optax and form != "universal":
        doubts.append(
            f"states of optax that are not Adam's keep optax's names, which PyTorch's optimizers do not look for: "
            f"{names_text(sorted(of_optax))}"
        )
    made = [
        _optimizer(key, states.get(key, {}), said.get(key, {}), known, doubts, form)
        for key in sorted({*states, *said}, key=_natural)
    ]
    tree: dict[str, Any] = {"model": {parameter: Reference(name) for parameter, name in known.weights.items()}}
    if made:
        tree["optimizer"] = made[0] if len(made) == 1 else made
    gone = {*known.states, *known.weights.values(), *grouped}
    rest = {name: leaf for name, leaf in leaves.items() if name not in gone}
    known_paths = {name: paths[name] if name in paths else _path_of(name) for name in rest if name in values}
    placed = _placed(rest, {**paths, **known_paths}, tree)
    tensors = [replace(tensor, identity=None) if tensor.name in known.states else tensor for tensor in wanted]
    if form == "fsdp2":
        parameters = {name: parameter for parameter, name in known.weights.items()}
        parameters |= {name: f"optimizer.state.{state.parameter}.{state.kind}" for name, state in known.states.items()}
        placed = _renamed(placed, parameters)
        tensors = [replace(tensor, name=parameters.get(tensor.name, tensor.name)) for tensor in tensors]
    return Nested(placed, _in_order(tensors, placed), tuple(doubts), bool(made))


def _in_order(tensors: Iterable[Wanted], tree: Any) -> list[Wanted]:
    places = {name: place for place, name in enumerate(dict.fromkeys(tree_names(tree)))}
    return sorted(tensors, key=lambda tensor: places[tensor.name])


def with_masters(wanted: Sequence[Wanted], values: Iterable[str] = (), *, own: bool = False) -> list[Wanted]:
    """Return the tensors with each weight replaced by its master copy, which PyTorch's optimizers update.

    Tied weights stay tied.

    Args:
        wanted: The tensors to be written.
        values: The names of values that are not tensors.
        own: Whether only names of the form `….NAME.master` count as master copies; no framework uses such names.
    """
    known = training_names([tensor.name for tensor in wanted], values)
    by_name = {tensor.name: tensor for tensor in wanted}
    masters: dict[Any, Wanted] = {}
    gone = set()
    for name, state in known.states.items():
        weight = None if state.weight is None else by_name[state.weight]
        is_master = state.kind == MASTER and (state.after == f".{MASTER}" or not own)
        if is_master and weight is not None and by_name[name].shape == weight.shape:
            masters[weight.name] = by_name[name]
            if weight.identity is not None:
                masters[weight.identity] = by_name[name]
            gone.add(name)
    if not masters:
        return list(wanted)
    made = []
    for tensor in wanted:
        is_weight = tensor.name not in known.states
        master = masters.get(tensor.name, masters.get(tensor.identity)) if is_weight else None
        if master is not None and master.shape == tensor.shape:
            made.append(replace(master, name=tensor.name, partition=tensor.partition))
        elif tensor.name not in gone:
            made.append(tensor)
    return made


def _path_of(name: str) -> KeyPath:
    """Return the path in the dict that a name stands for; a name outside of optimizers is split at its dots."""
    if _BESIDE.match(name) is None:
        return (name,)
    return tuple(int(part) if part.isdecimal() and str(int(part)) == part else part for part in name.split("."))


def _key_of(before: str) -> str:
    """Return the key of the optimizer in the dict, from the text before the parameter in a state's name."""
    match = _STATE.match(before)
    return before.split(".")[0] if match is None else match["key"] or ""


def _natural(key: str) -> list[tuple[bool, int, str]]:
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in key.split(".")]


def _optimizer(
    key: str,
    states: Mapping[str, Mapping[str, Reference]],
    said: Mapping[str, Any],
    known: TrainingNames,
    doubts: list[str],
    form: str,
) -> dict[str, Any]:
    """Return the state dict of an optimizer, whose parameters are numbered through all its groups."""
    places = {parameter: number for number, parameter in enumerate(known.weights)}

    def in_order(parameters: Iterable[str]) -> list[str]:
        return sorted(parameters, key=lambda parameter: places.get(parameter, len(places)))

    groups = _groups_by_number(said)
    if not groups:
        groups = [_FoundGroup(group.values, in_order(group.params)) for group in groups_by_name(said)]
        if len(groups) > 1:
            doubts.append(
                f"the source does not state the order of the {len(groups)} groups of {shown(key)}, nor that "
                "of their parameters: load it into an optimizer whose groups have the parameters of "
                f"{'param_shapes' if form == 'universal' else 'param_names'}, in this order"
            )
    if not groups:
        groups = [_FoundGroup({}, in_order(states))]
    if form != "universal" and any("lr" not in group.values for group in groups):
        doubts.append(
            f"the source does not say the hyperparameters of the optimizer {shown(key)}: its param_groups have "
            "parameters and no lr; put those of a new optimizer there before load_state_dict"
        )
    there = {*states, *known.weights}
    groups = [_FoundGroup(group.values, [name for name in group.params if name in there]) for group in groups]
    listed = [name for group in groups for name in group.params]
    lost = sorted(states.keys() - set(listed))
    if lost and len(groups) == 1 and not listed:
        groups[0].params.extend(in_order(lost))
        listed = list(groups[0].params)
    elif lost:
        raise LayoutError(
            f"the optimizer {shown(key)} has states of {names_text(lost)}, but no group has their parameters; rename "
            "changes the names in groups as well, rewrites do not"
        )
    if len(set(listed)) != len(listed):
        raise LayoutError(f"the optimizer {shown(key)} has a parameter in two groups")
    if form != "universal" and any(MASTER in kinds for kinds in states.values()):
        doubts.append(
            f"the optimizer {shown(key)} has master copies, which PyTorch's optimizers do not use: they are under "
            f"{MASTER!r} of each state, and loading converts states to the dtype of the parameter"
        )
    numbers = {name: number for number, name in enumerate(listed)}
    are_named = not all(name.isdecimal() for name in listed)
    groups_made = [
        {
            **group.values,
            **({"param_names": list(group.params)} if are_named else {}),
            "params": [numbers[name] for name in group.params],
        }
        for group in groups
    ]
    return {
        "state": {number: dict(states[name]) for name, number in numbers.items() if name in states},
        "param_groups": groups_made,
    }


def _groups_by_number(said: Mapping[str, Any]) -> list[_FoundGroup]:
    """Return the groups whose values are named by the group's number; such groups list their parameters."""
    lists = [held for rest, held in said.items() if rest.endswith(".params") and isinstance(held, (list, tuple))]
    parameters = {f"{name}" for held in lists for name in held if not f"{name}".isdecimal()}
    found: dict[int, dict[str, Any]] = {}
    for rest, value in said.items():
        if rest.rpartition(".")[0] in parameters:
            continue  # The same once more, for the parameter alone.
        number, _, key = rest.partition(".")
        if not number.isdecimal() or not key:
            return []
        found.setdefault(int(number), {})[key] = value
    groups = []
    for _, values in sorted(found.items()):
        params = values.pop("params", None)
        values.pop("param_names", None)
        if not isinstance(params, (list, tuple)):
            return []
        groups.append(_FoundGroup(values, [f"{name}" for name in params]))
    return groups


def groups_by_name(said: Mapping[str, Any]) -> list[_FoundGroup]:
    """Return groups made of values that are named by parameter: parameters with equal values share a group."""
    by_name: dict[str, dict[str, Any]] = {}
    for rest, value in said.items():
        name, _, key = rest.rpartition(".")
        if not name:
            return []
        by_name.setdefault(name, {})[key] = value
    groups: dict[str, _FoundGroup] = {}
    for name, values in by_name.items():
        groups.setdefault(repr(sorted(values.items())), _FoundGroup(values, [])).params.append(name)
    return list(groups.values())


def _placed(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath], tree: dict[Any, Any]) -> Any:
    """Put leaves into a tree by their paths; a leaf whose path is occupied goes under its name, at the top."""
    for name, leaf in leaves.items():
        path = paths.get(name, (name,))
        at: Any = tree
        for key, following in pairwise(path):
            at = at.setdefault(key, _ListItems() if type(following) is int else {}) if isinstance(at, dict) else None
        if not isinstance(at, dict) or path[-1] in at:
            at, path = tree, (name,)
            if name in tree:
                raise LayoutError(f"two values would be called {shown(name)}")
        at[path[-1]] = leaf
    return _with_lists(tree)


class _ListItems(dict[Any, Any]):
    """The items of a list by their positions, while the list is incomplete."""


def _with_lists(value: Any) -> Any:
    """Turn items by position into lists, unless a position is missing."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(held) for key, held in value.items()}
    is_list = isinstance(value, _ListItems) and set(made) == set(range(len(made)))
    return [made[number] for number in range(len(made))] if is_list else made
