"""Megatron's distributed checkpoint, `torch_dist`: PyTorch's `dcp`, with two more files that Megatron-Core needs.

States of an optimizer have Megatron's names for `fully_reshardable` checkpoints: `optimizer.state.KIND.KEY`, with the
KEY of the weight, and the KIND `param` for the master copy. Groups, steps, schedulers and arguments are in `common.pt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...._core import Persistent, Record
from ...._text import shown
from ....conversion.assembled import Assembled
from ....errors import LayoutError
from ....rules.state_splits import MASTER
from ....rules.states import training_names
from .dcp import value_bytes
from .nested import groups_by_name
from .pickles import Call, Global, New

__all__ = ["COMMON", "METADATA", "NONE", "MegatronForm", "extra_states", "is_of_group", "is_said", "megatron_form"]

#: The files next to the index.
METADATA, COMMON = "metadata.json", "common.pt"
_SAID = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_GROUP = re.compile(r"(?:optim|optimizer)\.param_groups\.(\d{1,4})\.(\w+)")
#: The beginning of the name of a group's value that is repeated for each parameter.
_OF_PARAMETER = re.compile(r"(?:optim|optimizer)\.param_groups\.(.+)")
#: Names of values at the top of `common.pt`; and names of dicts there.
_PLAIN = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_SHARDING = "optimizer.param_state_sharding_type"
_NESTED = ("opt_param_scheduler", "content_metadata")
#: The weight of a layer that has a state of FP8, or may have one: linear layers, and norms of Transformer Engine.
_LAYER = re.compile(r"((?:.*\.)?(?:decoder|mtp)\..*?(?:linear_\w+|\w*norm|(?:eh|in|out)_proj))\.weight")
_STATE = "._extra_state/"
#: The state of a layer that has none, as Megatron-Core saves it; Transformer Engine takes it too.
NONE = [None]
#: The keys, with default values, by which Megatron matches a group of a checkpoint with one of its own.
_KEYS: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class MegatronForm(NamedTuple):
    """The tensors and files of a checkpoint of Megatron.

    Attributes:
        names: The name of each tensor of the checkpoint, with the name of the tensor that it is taken from.
        beside: The files next to the index.
        values: The names of the values that are in these files.
        doubts: Warnings of what Megatron does differently, a sentence each.
        unrounded: Weights that serve as their own master copies, in the dtype they are stored in, by the copies' names.
    """

    names: dict[str, str]
    beside: dict[str, bytes]
    values: set[str]
    doubts: list[str]
    unrounded: dict[str, str]


def megatron_form(
    kept: Mapping[str, Assembled],
    values: Mapping[str, Any],
    number: Callable[[str, Assembled], float],
    stored: Mapping[str, Assembled],
    *,
    is_state: bool,
) -> MegatronForm:
    """Give tensors Megatron's names, and put values into Megatron's files.

    Args:
        kept: The tensors to be written.
        values: Values that are no tensors, by name.
        number: Reads a tensor that has one element.
        stored: The same tensors before weights are converted to another dtype.
        is_state: Whether states are written alone, on purpose.

    Raises:
        LayoutError: if a state has no weight, or a weight with states no master copy; if there is no group, or several
            counts of steps.
    """
    names = training_names(kept, values)
    shapes = {name: made.shape for name, made in kept.items()}
    found: dict[str, str] = {}
    steps: dict[float, str] = {}
    with_states: dict[str, set[str]] = {}
    for name, made in kept.items():
        state = names.states.get(name)
        if state is None:
            found[name] = name
            continue
        weight = state.weight
        if weight is None:
            if not is_state:
                raise LayoutError(f"the optimizer's state {shown(name)} has no weight among the tensors to be written")
            weight = state.parameter
            shapes[weight] = max(shapes.get(weight, ()), made.shape, key=len)
        kinds = with_states.setdefault(weight, set())
        if state.kind == "step":
            steps.setdefault(number(name, made), name)
            continue
        kind = "param" if state.kind == MASTER else state.kind
        kinds.add(kind)
        found[f"optimizer.state.{kind}.{weight}"] = name
    unrounded = {}
    for weight, kinds in with_states.items():
        master = f"optimizer.state.param.{weight}"
        is_converted = weight in kept and kept[weight].dtype != stored[weight].dtype
        if "param" in kinds:
            if is_converted and kept[weight].dtype == kept[found[master]].dtype:
                found[weight] = found[master]  # Which is what it was before it was rounded.
        elif weight not in kept:
            raise LayoutError(
                f"the optimizer has states of {shown(weight)} but no master copy, because the weight itself is the "
                "master copy. Megatron needs one when states are written alone; which = 'all' writes weights and "
                "states"
            )
        elif kept[weight].dtype.name == "float32":
            found[master] = weight
        elif is_converted and stored[weight].dtype.name == "float32":
            unrounded[master] = weight
        else:
            raise LayoutError(
                f"{shown(weight)} is {kept[weight].dtype.name} and has states of an optimizer but no master copy, "
                "which Megatron's distributed optimizer needs in float32; drop = '^optimizer' leaves the states out"
            )
    if len(steps) > 1:
        (one, first), (other, second) = list(steps.items())[:2]
        raise LayoutError(
            f"{shown(first)} is {one:g} and {shown(second)} is {other:g}, but Megatron has one number of steps for all"
        )
    groups = _Groups(next(iter(steps), None), {
        weight: len(shapes[weight]) - _is_stacked(weight) > 1 and not weight.endswith(".bias")
        for weight in with_states
    })  # fmt: skip
    common, used = _common(values, groups)
    beside = {METADATA: json.dumps(_SAID).encode(), COMMON: value_bytes(common)}
    return MegatronForm(found, beside, used, groups.doubts, unrounded)


def extra_states(shapes: Mapping[str, tuple[int, ...]], values: Iterable[str]) -> list[str]:
    """Return the names of states of FP8, one of each layer and expert, for which Megatron-Core asks; each is `NONE`.

    Args:
        shapes: The shape of each tensor, by Megatron's keys.
        values: The names of the values that there are: with states of a source, no others are made.
    """
    if any(_STATE in name for name in values):
        return []
    found: list[str] = []
    for name, shape in shapes.items():
        if (match := _LAYER.fullmatch(name)) is None:
            continue
        whole = shape[: _is_stacked(name) + (".experts.experts." in name)] or (1,)
        modules = [match[1]]
        if modules[0].endswith("attention.linear_proj"):
            modules.append(modules[0].replace("linear_proj", "core_attention"))
        for module in modules:
            ends = ".".join(map(str, whole))
            found += [f"{module}{_STATE}shard_{'.'.join(map(str, at))}_{ends}" for at in np.ndindex(whole)]
    return found


def is_said(name: str) -> bool:
    """Return whether Megatron keeps the value of this name in `common.pt`."""
    first, _, rest = name.partition(".")
    return name in (*_PLAIN, _SHARDING) or (first in _NESTED and rest != "") or _OF_PARAMETER.match(name) is not None


def is_of_group(name: str) -> bool:
    """Return whether the value of this name repeats, for one parameter, a value of the optimizer's group."""
    return _OF_PARAMETER.match(name) is not None


def _is_stacked(key: str) -> bool:
    """Return whether a key of Megatron's names a tensor of all layers, whose first dim counts the layers."""
    return re.fullmatch(r".*\blayers\.(?!\d+\.).+", key) is not None


def _common(values: Mapping[str, Any], made: _Groups) -> tuple[dict[str, Any], set[str]]:
    """Return the contents of `common.pt`, and the names of the values that went into it."""
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": int(made.steps or 0)}
    used: set[str] = set()
    groups: dict[int, dict[str, Any]] = {}
    by_name: dict[str, Any] = {}
    for name, value in values.items():
        match = _GROUP.fullmatch(name)
        first, _, rest = name.partition(".")
        if match is not None:
            groups.setdefault(int(match[1]), {})[match[2]] = value
        elif (match := _OF_PARAMETER.match(name)) is not None:
            by_name[match[1]] = value
        elif name == _SHARDING:
            pass
        elif name not in _PLAIN and not (first in _NESTED and rest):
            continue
        else:
            try:
                node = _node(value)
            except TypeError:
                continue  # It is said that it is not written.
            if name in _PLAIN:
                common[name] = node
            else:
                common.setdefault(first, {})[rest] = node
        used.add(name)
    if made.matrices:
        if not groups:
            groups = {at: {**one.values, "params": one.params} for at, one in enumerate(groups_by_name(by_name))}
        if not groups:
            raise LayoutError(
                "there are states of an optimizer, but no values optimizer.param_groups.0.lr and so on, which "
                "Megatron has in common.pt; drop = '^optimizer' leaves the states out"
            )
        for number, group in sorted(groups.items()):
            made.add(number, group)
        sharding = "fully_reshardable"
        common["optimizer"] = {"optimizer": {"param_groups": made.groups}, "param_state_sharding_type": sharding}
        said = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        common["content_metadata"] = {
            **said, **common.pop("content_metadata", {}), "distrib_optim_sharding_type": sharding
        }  # fmt: skip
    return common, used


class _Groups:
    """The optimizer's groups, rewritten as Megatron has them: with the keys by which it matches groups with its own.

    Megatron has matrices in other groups than vectors and biases.
    """

    def __init__(self, steps: float | None, matrices: Mapping[str, bool]) -> None:
        self.steps, self.matrices = steps, matrices
        self.groups: list[dict[str, Any]] = []
        self.doubts: list[str] = []
        self._found: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}

    def add(self, number: int, said: Mapping[str, Any]) -> None:
        """Add the groups that a group of the source is split into.

        Raises:
            LayoutError: if it has a value that cannot be written, or Megatron could not tell the group from another
                one.
        """
        try:
            group = {key: _node(value) for key, value in said.items() if key != "params"}
        except TypeError as error:
            raise LayoutError(
                f"group {number} of the optimizer has {error}, which is not written in common.pt"
            ) from None
        if self.steps is not None:
            group["step"] = self.steps
        if "wd_mult" in group:
            self._add_as(number, {**_KEYS, **group})
            return
        names = [name for name in said.get("params", ()) if name in self.matrices]
        # The loader takes those that it has parameters for.
        experts = (False, True) if any(".experts." in name for name in names) else (False,)
        for is_matrix in (True, False):
            count = sum(self.matrices[name] == is_matrix for name in names)
            if not count:
                continue
            if not is_matrix and group.get("weight_decay"):
                self.doubts.append(
                    f"group {number} of the optimizer has a weight decay of {group['weight_decay']:g}, and {count} of "
                    f"its {len(names)} parameters are vectors or biases, for which Megatron's scheduler sets it to 0, "
                    "unless its optimizer is made with other config_overrides"
                )
            for is_expert in experts:
                keys = {**_KEYS, "wd_mult": float(is_matrix), "is_expert_parallel": is_expert}
                self._add_as(number, {**keys, **group})

    def _add_as(self, number: int, group: dict[str, Any]) -> None:
        key = tuple(group[name] for name in _KEYS)
        other, known = self._found.setdefault(key, (number, group))
        if known is group:
            self.groups.append(group)
        elif known != group:
            differ = sorted(name for name in {**known, **group} if known.get(name) != group.get(name))
            raise LayoutError(
                f"groups {other} and {number} of the optimizer differ in {', '.join(differ[:4])}, but Megatron cannot "
                f"tell them apart: it knows groups by {', '.join(_KEYS)}; drop = '^optimizer' leaves the states out"
            )


def _node(value: Any) -> Any:
    """Return a value ready to be pickled: inert records become the objects that they stand for.

    Raises:
        TypeError: if it contains a tensor.
    """
    if isinstance(value, Persistent):
        raise TypeError("a tensor")
    if isinstance(value, dict):
        return {_node(key): _node(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_node, value))
    if not isinstance(value, Record):
        return value
    module, _, name = value.name.rpartition(".")
    kind = Global(module, name)
    if value.kwargs or value.elements:
        raise TypeError(f"an object of {value.name}")
    if value.args is None:
        return kind
    if value.name in ("dict", "builtins.dict"):
        return {_node(key): _node(held) for key, held in value.items}
    if value.state is not None:
        if value.args or value.items:
            raise TypeError(f"an object of {value.name}")
        return New(kind, _node(value.state))
    if value.items:
        return Call(kind, ([(_node(key), _node(held)) for key, held in value.items],))
    return Call(kind, tuple(map(_node, value.args)))
