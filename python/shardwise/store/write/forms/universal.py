"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for its master copy and for each state.

`latest_universal` names the folder `global_stepN_universal` next to it. Its folder `zero/NAME/` has the parameter NAME
as a whole: `fp32.pt`, `step.pt` and a file for each other state. Groups are in `zero/optimizer_state.pt`. Tensors that
no optimizer holds, and the trainer's own values, are in `mp_rank_00_model_states.pt`, which DeepSpeed reads with stages
1 and 2; with stage 3 it reads `zero_pp_rank_0_mp_rank_00_model_states.pt`, which has the same without the tensors.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES, Dtype
from ...._fork import cached_property
from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....partition import Partition
from ....rules.left_out import names_text
from ....rules.state_splits import MASTER
from ...rewritten.convert import is_float
from .archives import ROOT
from .dcp import envelope_of, rebuilt, tensor_pickle, value_bytes
from .files import whole_slots
from .nested import Nested
from .pickles import Call, Global, New, pickled
from .plain_values import Reference, TensorNumber, places_in, with_tensors
from .torch_file import TorchPart

__all__ = ["BESIDE", "FILES", "LATEST", "UniversalFile", "UniversalFiles", "universal_doubts", "universal_files"]

#: The file that names the folder of the checkpoint; DeepSpeed reads it first, so it is written last.
LATEST = "latest_universal"
_FOLDER, _NAME = r"global_step\d{1,19}_universal", r"(?!\.{1,2}/)[^/\\\0]{1,255}"
#: Patterns of the names of files with tensors, and of files without.
FILES = re.compile(rf"{_FOLDER}/(?:mp_rank_00_model_states\.pt|zero/{_NAME}/(?!\.)[^/\\\0]{{1,255}}\.pt)", re.DOTALL)
BESIDE = re.compile(
    rf"{LATEST}|{_FOLDER}/(?:zero_pp_rank_0_mp_rank_00_model_states\.pt|zero/optimizer_state\.pt|zero/{_NAME}/step\.pt)",
    re.DOTALL,
)
#: The version of DeepSpeed that the files state, if the source states none.
_VERSION = "0.19.8"
#: The number of groups to write if the source has none: DeepSpeed loads no parameters of groups beyond those written.
_GROUPS = 64
#: The optimizer's values that DeepSpeed keeps next to the groups.
_COMMON = ("dynamic_loss_scale", "overflow", "clip_grad")
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_MOST_NAME = 255


@dataclass(frozen=True, eq=False)
class UniversalFile(TorchPart):
    """A file of a universal checkpoint; the numbers of its tensors count from 0 in each file."""

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The number, in this file, of each tensor."""
        return {tensor: number for number, tensor in enumerate(sorted(self.boxes.tensors.tolist()))}

    def _name(self, tensor: int) -> bytes:
        if self.wanted[tensor].is_object:
            return f"{ROOT}/data.pkl".encode()
        return f"{ROOT}/data/{self._numbers[tensor]}".encode()


class UniversalFiles(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        files: The files with tensors.
        wanted: The tensors, and the pickles that are stored like tensors.
        beside: Further files, by name.
    """

    files: list[UniversalFile]
    wanted: list[Wanted]
    beside: dict[str, bytes]


class _ParameterFolder(NamedTuple):
    """A parameter that an optimizer holds: its weight, and its states by kind, as positions of tensors."""

    weight: int
    states: dict[str, int]


def universal_files(
    nested: Nested,
    wanted: Sequence[Wanted],
    aliases: Mapping[str, str],
    value: Callable[[str, bytes], Wanted],
    number: Callable[[Wanted], float],
) -> UniversalFiles:
    """Return the files of a universal checkpoint.

    Args:
        nested: The nested dict of the tensors, with the weights under `model`.
        wanted: The tensors.
        aliases: Further names of tensors.
        value: Makes a value of a name and its bytes, to be written after the tensors.
        number: Reads a tensor that has one element.

    Raises:
        LayoutError: if DeepSpeed cannot hold the states: those of several optimizers, of another shape than their
            parameter, of one that has no weight, or of one whose name is not that of a folder.
    """
    folder = _UniversalContents(nested, wanted, aliases, number)
    steps = folder.steps()
    tag = f"global_step{folder.global_step(steps)}_universal"
    kept: list[Wanted] = []
    members: list[list[int]] = []
    names: list[str] = []
    pickles: dict[bytes, Wanted] = {}

    def add(file: str, tensors: Sequence[tuple[int, str]], data: bytes) -> None:
        own = range(len(kept), len(kept) + len(tensors))
        kept.extend(replace(wanted[at], name=name, partition=None) for at, name in tensors)
        if data not in pickles:  # Parameters of one shape have the same.
            pickles[data] = value("", data)
        kept.append(replace(pickles[data], name=f"{tag}/{file}"))
        members.append([*own, len(kept) - 1])
        names.append(f"{tag}/{file}")

    beside = {LATEST: tag.encode()}
    for name, parameter in folder.parameters.items():
        weight = wanted[parameter.weight]
        dim, shape = _cut_of(weight, name), tuple(weight.shape)
        add(f"zero/{name}/fp32.pt", [(parameter.weight, name)], _entry_pickle(weight.dtype, shape, dim))
        for kind, at in parameter.states.items():
            full, dtype = f"optimizer.state.{name}.{kind}", wanted[at].dtype
            if kind != "step":
                add(f"zero/{name}/{kind}.pt", [(at, full)], _entry_pickle(dtype, shape, dim))
            elif folder.has_numbers:
                beside[f"{tag}/zero/{name}/step.pt"] = value_bytes(int(steps[name]))
            else:
                add(f"zero/{name}/step.pt", [(at, full)], tensor_pickle(dtype, tuple(wanted[at].shape)))
    others, states = folder.others(steps)
    made = [rebuilt(wanted[at].dtype, tuple(wanted[at].shape), f"{key}") for key, (at, _) in enumerate(others)]
    add("mp_rank_00_model_states.pt", others, pickled(with_tensors(states, others, made)))
    alone = {key: held for key, held in states.items() if not any(places_in(held))}
    beside[f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"] = value_bytes({**alone, "module": {}})
    beside[f"{tag}/zero/optimizer_state.pt"] = folder.optimizer_state(steps)
    files = [UniversalFile(name, slots, kept) for name, slots in zip(names, whole_slots(kept, members), strict=True)]
    return UniversalFiles(files, kept, beside)


def universal_doubts(nested: Nested, wanted: Sequence[Wanted], number: Callable[[Wanted], float]) -> list[str]:
    """Return warnings about a universal checkpoint of these tensors, a sentence each."""
    folder = _UniversalContents(nested, wanted, {}, number)
    folder.steps()
    return folder.doubts


class _UniversalContents:
    """The contents of a checkpoint's folder.

    Attributes:
        parameters: The parameters that the optimizer holds, by name.
        groups: The values of each group, and the names of its parameters; empty if the source has no groups.
        doubts: Warnings, a sentence each.
    """

    def __init__(
        self, nested: Nested, wanted: Sequence[Wanted], aliases: Mapping[str, str], number: Callable[[Wanted], float]
    ) -> None:
        self._wanted, self._number = wanted, number
        numbers = {tensor.name: at for at, tensor in enumerate(wanted)}
        numbers |= {alias: numbers[name] for alias, name in aliases.items()}
        self._numbers = numbers
        tree = dict(nested.tree)
        self._model: dict[str, int] = {name: numbers[each.name] for name, each in tree.pop("model").items()}
        optimizer = tree.pop("optimizer", {"state": {}, "param_groups": []})
        self._rest = tree
        self.doubts: list[str] = []
        if isinstance(optimizer, list):
            raise LayoutError(
                f"there are {len(optimizer)} optimizers, and DeepSpeed has one; drop leaves out the others, or dcp "
                "holds all"
            )
        self._common = {key: said for key, said in optimizer.items() if key not in ("state", "param_groups")}
        states = optimizer["state"]
        self.groups: list[tuple[dict[str, Any], list[str]]] = []
        self.parameters: dict[str, _ParameterFolder] = {}
        without: list[str] = []
        for group in optimizer["param_groups"]:
            said = {key: held for key, held in group.items() if key not in ("params", "param_names")}
            if "param_names" not in group and group["params"]:
                raise LayoutError(
                    "the parameters of the optimizer have numbers but no names, and DeepSpeed finds them by name; "
                    "parameter_names= (--parameter-names FILE) gives the names, or drop = '^optimizer' leaves the "
                    "states out"
                )
            own = []
            for key, name in zip(group["params"], group.get("param_names", ()), strict=True):
                if key in states:
                    self.parameters[name] = self._parameter(name, states[key])
                    own.append(name)
                else:
                    without.append(name)
            self._check_alike(own)
            self.groups.append((said, own))
        if without and self.parameters:
            self.doubts.append(
                f"the optimizer has no state of {names_text(without)}, so DeepSpeed takes these parameters for "
                "frozen ones, and refuses to load them into trained ones"
            )
        if not self.parameters:
            first = {at: name for name, at in reversed(self._model.items()) if _is_parameter(wanted[at].dtype)}
            self.parameters = {name: self._parameter(name, {}) for name in reversed(first.values())}
        if not any(said for said, _ in self.groups):
            self.groups = []

    @property
    def has_numbers(self) -> bool:
        """True if steps are numbers, as DeepSpeed's own optimizers have them, and not tensors."""
        return any("bias_correction" in said for said, _ in self.groups)

    def _parameter(self, name: str, kinds: Mapping[str, Reference]) -> _ParameterFolder:
        if (
            not name
            or name in (".", "..", "optimizer_state.pt")
            or re.search(r"[/\\\0]", name)
            or len(name.encode()) > _MOST_NAME
        ):
            raise LayoutError(f"{shown(name)} cannot name a folder, and DeepSpeed has a folder for each parameter")
        states = {kind: self._numbers[reference.name] for kind, reference in kinds.items()}
        weight = states.pop(MASTER, self._model.get(name))
        if weight is None:
            raise LayoutError(
                f"the optimizer has a state of {shown(name)}, which has no weight among the tensors to be written"
            )
        shape = self._wanted[weight].shape
        for kind, at in states.items():
            if kind == "fp32" or (kind != "step" and self._wanted[at].shape != shape):
                raise LayoutError(
                    f"the state {shown(kind)} of {shown(name)} has the shape {self._wanted[at].shape}, but the "
                    f"parameter has {shape}; a universal checkpoint only holds states of the parameter's shape; torch "
                    "and dcp hold any"
                )
        return _ParameterFolder(weight, states)

    def _check_alike(self, names: Sequence[str]) -> None:
        """Refuse a group whose parameters have different kinds of states: DeepSpeed assumes the same kinds for all."""
        every = {kind: name for name in names for kind in self.parameters[name].states}
        for name in names:
            for kind, other in every.items():
                if kind not in self.parameters[name].states:
                    raise LayoutError(
                        f"the optimizer has the state {shown(kind)} of {shown(other)} but not of {shown(name)}, which "
                        "is in the same group: DeepSpeed keeps the same states for a whole group; torch and dcp hold "
                        "any"
                    )

    def steps(self) -> dict[str, float]:
        """Return the step of each parameter that has one, by name."""
        found = {}
        for name, parameter in self.parameters.items():
            if "step" in parameter.states:
                found[name] = self._number(self._wanted[parameter.states["step"]])
        for _, members in self.groups:
            own = {found[name]: name for name in members if name in found}
            if len(own) > 1:
                (one, first), (other, second) = list(own.items())[:2]
                self.doubts.append(
                    f"the step of {shown(first)} is {one:g} and that of {shown(second)} is {other:g}, but DeepSpeed "
                    "has one step for a group: stages 1 and 2 refuse to load them, stage 3 takes the largest"
                )
        return found

    def global_step(self, steps: Mapping[str, float]) -> int:
        """Return the step of the run: the source's value, else the highest step of a parameter."""
        said = self._rest.get("global_steps")
        return said if type(said) is int and said >= 0 else int(max(steps.values(), default=0))

    def others(self, steps: Mapping[str, float]) -> tuple[list[tuple[int, str]], dict[str, Any]]:
        """Return the tensors that no optimizer holds, as (position, name), and their file, with a place for each."""
        owners = {self._model[name]: name for name in self.parameters if name in self._model}
        names = {at: name for name, at in reversed(self._model.items())}

        def shapes(parameters: Iterable[str]) -> dict[str, Call]:
            weights = {name: self._wanted[self.parameters[name].weight] for name in parameters}
            return {name: Call(Global("torch", "Size"), (tuple(each.shape),)) for name, each in weights.items()}

        def held(value: Any) -> Any:
            if isinstance(value, Reference):
                return TensorNumber(self._numbers[value.name])
            if isinstance(value, dict):
                return {key: held(each) for key, each in value.items()}
            return [held(each) for each in value] if isinstance(value, list) else value

        states = {
            **{"lr_scheduler": None, "skipped_steps": 0, "ds_version": _VERSION},
            **{key: held(each) for key, each in self._rest.items() if not _is_common(key)},
            "global_steps": self.global_step(steps),
            "module": {name: TensorNumber(at) for name, at in self._model.items() if at not in owners},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [shapes(own) for _, own in self.groups] or [shapes(self.parameters)],
            "shared_params": {name: owners[at] for name, at in self._model.items() if owners.get(at, name) != name},
            **{"dp_world_size": 1, "mp_world_size": 1},
        }
        found = dict.fromkeys(places_in(states))
        return [(each.at, names.get(each.at, self._wanted[each.at].name)) for each in found], states

    def optimizer_state(self, steps: Mapping[str, float]) -> bytes:
        """Return the bytes of `optimizer_state.pt`, with the values that all parameters share."""
        common = {**self._common}
        common |= {key.partition(".")[2]: held for key, held in self._rest.items() if _is_common(key)}
        groups = [{**said, "params": [0]} for said, _ in self.groups] or [{} for _ in range(_GROUPS)]
        # With stage 3 DeepSpeed gives what it finds of the first group to all.
        first = groups[0]
        alike = {key: held for key, held in first.items() if all(key in each and each[key] == held for each in groups)}
        step = max(steps.values(), default=None)
        said = {
            "ds_version": self._rest.get("ds_version", _VERSION),
            **{key: common[key] for key in _COMMON if key in common},
            **_loss_scaler(common),
            "param_groups": groups,
        }
        if step is None or self.has_numbers:
            return value_bytes(_stage_3(said, None if step is None else int(step), alike))
        made = _stage_3(said, rebuilt(DTYPES["float32"], (), "0"), alike)
        data = np.array(step, "<f4").tobytes()
        around = envelope_of(pickled(made), len(data), zlib.crc32(data))
        return around.head + data + around.tail


def _stage_3(said: dict[str, Any], step: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Add the entries that stage 3 reads: the step of all parameters, if there is one, and the values of all groups."""
    state = {} if step is None else {0: {"step": step}}
    return {**said, "optimizer_state_dict": {"state": state, "param_groups": [group]}}


def _loss_scaler(common: Mapping[str, Any]) -> dict[str, New]:
    """Return the loss scale as an object of DeepSpeed's class, under its key; empty if the source has none."""
    state = {key.partition(".")[2]: held for key, held in common.items() if key.startswith("loss_scaler.")}
    if isinstance(common.get("loss_scaler"), dict):
        state |= common["loss_scaler"]
    if "cur_scale" not in state:
        return {}
    kind = "DynamicLossScaler" if state.get("dynamic") else "LossScaler"
    return {"loss_scaler": New(Global(_SCALER, kind), state)}


@lru_cache(maxsize=1024)
def _entry_pickle(dtype: Dtype, shape: tuple[int, ...], dim: int | None) -> bytes:
    """Return the pickle of a weight or a state, with the dim along which tensor-parallel ranks cut it."""
    cut = {} if dim is None else {"cat_dim": dim}
    return pickled({**cut, "param": rebuilt(dtype, shape, "0")})


def _cut_of(tensor: Wanted, name: str) -> int | None:
    """Return the dim along which tensor-parallel ranks cut a parameter; `None` if it is not cut.

    Raises:
        LayoutError: if several dims are cut.
    """
    partition = tensor.partition
    if partition is None or partition.total_shards == 1:
        return None
    dims: list[int] = []
    if isinstance(partition, Partition) and not partition.layout.is_packed:
        dims = [dim for dim, spec in enumerate(partition.layout.axes) if spec]
    if len(dims) != 1:
        raise LayoutError(
            f"tensor {shown(name)} is not cut along one dim; a universal checkpoint holds it whole, and says the dim "
            "along which tensor-parallel ranks cut it; without layouts that dim is unknown"
        )
    return dims[0]


def _is_parameter(dtype: Dtype) -> bool:
    """Return whether DeepSpeed trains weights of this dtype."""
    return is_float(dtype) and dtype.bits >= 16


def _is_common(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("optimizer.")
