"""Megatron's distributed checkpoint, `torch_dist`: PyTorch's, with the two files that Megatron-Core looks for.

States of an optimizer have Megatron's names, as it writes `fully_reshardable`: `optimizer.state.KIND.KEY`, with the
KEY of the weight, and `param` for the master copy. Groups, steps, schedulers and arguments are in `common.pt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...._core import Persistent, Record
from ...._text import shown
from ....conversion.assembled import Assembled
from ....errors import LayoutError
from ....rules.states import MASTER, training_names
from .dcp import value_bytes
from .pickles import Call, Global, New

__all__ = ["METADATA", "MegatronForm", "is_said", "megatron_form"]

#: The files beside the index.
METADATA, COMMON = "metadata.json", "common.pt"
_SAID = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_GROUP = re.compile(r"(?:optim|optimizer)\.param_groups\.(\d{1,4})\.(\w+)")
#: Values that are in `common.pt` as they are; and those that are in it as a dict.
_PLAIN = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_SHARDING = "optimizer.param_state_sharding_type"
_NESTED = ("opt_param_scheduler", "content_metadata")
#: By these keys Megatron finds the group of a checkpoint that is one of its own.
_KEYS = {"wd_mult": None, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class MegatronForm(NamedTuple):
    """The tensors and files of a checkpoint of Megatron.

    Attributes:
        names: The names of its tensors, each with the name of the one that is written under it.
        beside: The files beside the index.
        values: The names of the values that are in these files.
    """

    names: dict[str, str]
    beside: dict[str, bytes]
    values: set[str]


def megatron_form(
    kept: Mapping[str, Assembled], values: Mapping[str, Any], number: Callable[[str, Assembled], float]
) -> MegatronForm:
    """Give tensors Megatron's names, and put values into Megatron's files.

    Args:
        kept: The tensors to be written.
        values: Values that are no tensors, by name.
        number: Reads a tensor that has one element.

    Raises:
        LayoutError: if a state has no weight, or a weight with states no master copy; if there is no group, or several
            counts of steps.
    """
    names = training_names(kept, values)
    found: dict[str, str] = {}
    steps: dict[float, str] = {}
    with_states: dict[str, set[str]] = {}
    for name, made in kept.items():
        state = names.states.get(name)
        if state is None:
            found[name] = name
            continue
        if state.weight is None:
            raise LayoutError(f"the optimizer's state {shown(name)} has no weight among the tensors to be written")
        kinds = with_states.setdefault(state.weight, set())
        if state.kind == "step":
            steps.setdefault(number(name, made), name)
            continue
        kind = "param" if state.kind == MASTER else state.kind
        kinds.add(kind)
        found[f"optimizer.state.{kind}.{state.weight}"] = name
    for weight, kinds in with_states.items():
        if "param" in kinds:
            continue
        if kept[weight].dtype.name != "float32":
            raise LayoutError(
                f"{shown(weight)} is {kept[weight].dtype.name} and has states of an optimizer but no master copy, "
                "which Megatron's distributed optimizer has in float32; drop = '^optimizer' leaves the states out"
            )
        found[f"optimizer.state.param.{weight}"] = weight
    if len(steps) > 1:
        (one, first), (other, second) = list(steps.items())[:2]
        raise LayoutError(
            f"{shown(first)} is {one:g} and {shown(second)} {other:g}, but Megatron has one number of steps for all"
        )
    common, used = _common(values, next(iter(steps), None), {
        weight: len(kept[weight].shape) - _is_stacked(weight) > 1 for weight in with_states
    })  # fmt: skip
    return MegatronForm(found, {METADATA: json.dumps(_SAID).encode(), COMMON: value_bytes(common)}, used)


def is_said(name: str) -> bool:
    """Return whether a value of this name is one that Megatron has in `common.pt`."""
    first, _, rest = name.partition(".")
    return name in (*_PLAIN, _SHARDING) or (first in _NESTED and rest != "") or _GROUP.fullmatch(name) is not None


def _is_stacked(key: str) -> bool:
    """Return whether a key of Megatron's is of all layers together, which are then the first dim."""
    return re.fullmatch(r".*\blayers\.(?!\d+\.).+", key) is not None


def _common(
    values: Mapping[str, Any], steps: float | None, matrices: Mapping[str, bool]
) -> tuple[dict[str, Any], set[str]]:
    """The value of `common.pt`, and the names of the values in it."""
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": int(steps or 0)}
    used: set[str] = set()
    groups: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        match = _GROUP.fullmatch(name)
        first, _, rest = name.partition(".")
        if match is not None:
            groups.setdefault(int(match[1]), {})[match[2]] = value
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
    if matrices:
        if not groups:
            raise LayoutError(
                "there are states of an optimizer, but no values optimizer.param_groups.0.lr and so on, which "
                "Megatron has in common.pt; drop = '^optimizer' leaves the states out"
            )
        held = [_group(number, group, steps, matrices) for number, group in sorted(groups.items())]
        sharding = "fully_reshardable"
        common["optimizer"] = {"optimizer": {"param_groups": held}, "param_state_sharding_type": sharding}
        said = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        common["content_metadata"] = {
            **said, **common.get("content_metadata", {}), "distrib_optim_sharding_type": sharding
        }  # fmt: skip
    return common, used


def _group(number: int, said: Mapping[str, Any], steps: float | None, matrices: Mapping[str, bool]) -> dict[str, Any]:
    """A group of parameters as Megatron has it: without these, and with the keys by which it finds its own."""
    try:
        group = {key: _node(value) for key, value in said.items() if key != "params"}
    except TypeError as error:
        raise LayoutError(f"group {number} of the optimizer has {error}, which is not written in common.pt") from None
    if steps is not None:
        group["step"] = steps
    for key, value in _KEYS.items():
        if key in group:
            continue
        kinds = {matrices.get(name) and not name.endswith(".bias") for name in said.get("params", ())}
        if key == "wd_mult" and len(kinds - {None}) != 1:
            raise LayoutError(
                f"group {number} of the optimizer has {len(said.get('params', ()))} parameters, which are not all "
                "matrices, and not all vectors and biases, as those of each group of Megatron's are; drop = "
                "'^optimizer' leaves the states out"
            )
        group[key] = float(bool(kinds.pop())) if key == "wd_mult" else value
    return group


def _node(value: Any) -> Any:
    """A value as it is pickled, inert records as the objects that they stand for; TypeError if it has a tensor."""
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
