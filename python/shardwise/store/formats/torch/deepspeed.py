"""DeepSpeed's own checkpoints: the flat partitions of ZeRO 1, 2 and 3, divided into parameters and their states.

Each data-parallel rank's file has one flat array for each group of parameters. With stages 1 and 2 it is a part of the
elements of all parameters, one after the other; with stage 3 it is the rank's part of each parameter, one after the
other. `param_shapes` of the `*_model_states.pt` lists the parameters in order. Elements beyond the last parameter are
padding, which is never read. With stage 3 the masters are the weights: no file has others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ...._text import shown
from ....errors import ParseError
from ...data.location import Location, entries_of, opening
from ...data.text import checked_name
from ...tensors.checkpoint import Besides, StoredCheckpoint
from ...tensors.lazy import LazyTensors
from ...tensors.stored import UnsupportedError
from .deepspeed_files import (
    RankKey,
    ReadFile,
    Rows,
    check_world,
    expert_files,
    experts_of,
    files_by_rank,
    frozen_row,
    grid_of,
    metadata_of,
    read_rank,
)
from .flat_parts import Arrays, FlatRow, WholeRow, dtype_and_shape, filled, is_flat, made
from .model_parallel import CutRules, RankCut, whole
from .optimizers import NamedShape, numbered_names
from .tensors import SavedTensor, dict_of, items_within, sums_of, value_object
from .universal import latest_in
from .zero_partitions import Spans, group_shapes, parameters_of_groups, rank_arrays, step_elsewhere
from .zero_states import number_in, state_value, whole_optimizer

__all__ = ["open_form"]

#: The file next to the folders of steps that names the last one.
LATEST = "latest"
#: The keys of an optimizer of stage 0 that hold its states and masters.
_OF_STAGE_0 = frozenset(["state", "param_groups", "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"])


def open_form(path: Location) -> StoredCheckpoint:
    """Open the folder of a step; of a folder of steps, the last one."""
    if (path / LATEST).exists():
        path = path / latest_in(path / LATEST)
    inside = [name for name, is_folder in entries_of(path) if not is_folder]
    ranks, experts = files_by_rank(path, inside), expert_files(path, inside)
    taken = {*ranks.values(), *experts.values()}
    with opening([path / name for name in (*ranks.values(), *experts.values())]) as (open_next, files):
        read = {key: read_rank(open_next(path / name)) for key, name in ranks.items()}
        folder = _StepFolder(path, read, {key: read_rank(open_next(path / name)) for key, name in experts.items()})
        tensors = LazyTensors(folder.rows, dtype_and_shape, made)
    return StoredCheckpoint(
        path,
        "deepspeed",
        tensors,
        files,
        Besides(
            metadata=metadata_of(folder.first),
            objects=folder.objects,
            unreadable=folder.unreadable,
            doubts=folder.doubts,
            sums=partial(sums_of, files),
            unread=sorted(name for name in inside if name.endswith(".pt") and name not in taken),
        ),
    )


class _StepFolder(Rows):
    """A folder of one step."""

    def __init__(
        self, path: Location, read: Mapping[RankKey, ReadFile], experts: Mapping[tuple[int, int], ReadFile]
    ) -> None:
        super().__init__()
        self.doubts: list[str] = []
        #: The files of the model, for each model-parallel rank a list by data-parallel rank.
        self.models = grid_of(read, "model")
        self.first = self.models[0][0]
        self._optims = grid_of(read, "optim")
        check_world(path, self.models, self._optims)
        self._experts = experts_of(self.first, experts)
        if self._experts and len(self.models) > 1:
            raise UnsupportedError(f"{path}: experts that model-parallel ranks cut are not read")
        has_states = not self._experts or self._has_experts()
        self._optims = self._optims if has_states else []
        self.is_split = len(self.models[0]) > 1 or ("model", 0, 0) in read
        info = self.first.values.get("universal_checkpoint_info")
        self._rules = None if len(self.models) == 1 else _rules(self.first, info)
        self.cuts: dict[str, RankCut] = {}
        if self._optims:
            self._partitions = [[rank_arrays(file) for file in row] for row in self._optims]
            self.layouts = [group_shapes(row[0]) for row in self.models]
            self._cut_parameters()
            self._spans = Spans(self._partitions, self.layouts)
            self._add_states()
        self._add_weights()
        if not self._optims and has_states:
            self._add_whole_states()
        self.add_values(self.models)
        if self._optims:
            self.add_optimizer_values(self._optims[0][0], self._partitions[0][0].values)

    def _has_experts(self) -> bool:
        """Return whether the partitions have the states of all experts; if not, note it as a warning."""
        listed = {name for group in group_shapes(self.first) for name in group} if self._optims else set()
        if self._experts.keys() <= listed:
            return True
        self.unreadable["optimizer.state.experts"] = (
            f"{self.first.path}: the states of its optimizer are not read: it has {len(self._experts)} weights of "
            "experts, of which "
            + (
                "each rank of expert parallelism has some, and no file says which partition has which"
                if self._optims
                else "the optimizer without ZeRO numbers its states, and no file says whose they are"
            )
            + "; which = 'weights' takes the weights; with ZeRO 1 or 2 and ep_size 1 states are read"
        )
        return False

    def _cut_parameters(self) -> None:
        for number, group in enumerate(self.layouts[0]):
            for name in group:
                shapes = []
                for row, layout in zip(self.models, self.layouts, strict=True):
                    if len(layout) != len(self.layouts[0]) or list(layout[number]) != list(group):
                        raise ParseError(
                            f"{row[0].path}: its param_shapes has other parameters than the one in "
                            f"{self.first.path.name}"
                        )
                    shapes.append(layout[number][name])
                if name in self.cuts:
                    raise ParseError(f"{self.first.path}: param_shapes has {shown(name)} twice")
                try:
                    self.cuts[name] = self._cut(name, shapes, is_certain=True)
                except UnsupportedError as error:
                    self.unreadable[name] = str(error)

    def _cut(self, name: str, shapes: Sequence[tuple[int, ...]], *, is_certain: bool) -> RankCut:
        if self._rules is None:
            return whole(shapes[0])
        return self._rules.cut(name, shapes, 64, is_certain=is_certain)

    def _add_states(self) -> None:
        """Add masters, the optimizer's states and groups, under the names of their parameters."""
        first = self._partitions[0][0]
        groups = first.groups or []
        members = parameters_of_groups(first, self.layouts[0])
        for number, group in enumerate(self.layouts[0]):
            self._add_flat(number, "master", [[part.masters[number] for part in row] for row in self._partitions])
            kinds = first.states[number]
            for row in self._partitions:
                for part in row:
                    if part.states[number].keys() != kinds.keys():
                        raise ParseError(
                            f"{part.file.path}: has the states {', '.join(map(shown, part.states[number]))} of group "
                            f"{number}; {first.file.path.name} has {', '.join(map(shown, kinds))}"
                        )
            for kind in kinds:
                values = [[state_value(part, number, kind) for part in row] for row in self._partitions]
                if all(isinstance(value, SavedTensor) and value.shape for row in values for value in row):
                    self._add_flat(number, kind, values)
                else:
                    self._add_scalar(group, kind, [value for row in values for value in row])
            if "step" not in kinds:
                step = step_elsewhere(first, groups, members, number)
                if step is not None:
                    self._add_scalar(group, "step", [step])
        self.add_groups(groups, members)

    def _add_whole_states(self) -> None:
        """Add the states of stage 0, which are whole in the file of the model, by numbers that count the parameters."""
        held = [whole_optimizer(row[0]) for row in self.models]
        optimizers = [optimizer for optimizer, _ in held if optimizer is not None]
        if len(optimizers) != len(self.models):
            return
        listed = items_within(self.first.values.get("buffer_names")) or ()
        buffers = {name for _, name in listed if isinstance(name, str)}
        candidates = [
            NamedShape(name, row.cut.local[0])
            for name, row in self.weights.items()
            if row.alias_of is None and "float" in row.dtype.name and name not in buffers
        ]
        found, why = numbered_names(optimizers[:1], candidates, is_ordered=True)
        if why:
            self.doubts.append(f"{self.first.path}: the parameters of its optimizer keep their numbers: {why}")
            if len(optimizers) > 1:
                return
        names = found[0] if found else {}
        optimizer, masters = optimizers[0], [one for _, one in held]
        for number in (key for params in optimizer.params for key in params):
            name = names.get(number, f"{number}")
            states = [one.state.get(number, {}) for one in optimizers]
            if masters[0]:
                states = [{"master": own[number], **state} for own, state in zip(masters, states, strict=True)]
            for kind in states[0]:
                self._add_whole(name, f"{kind}", [state.get(kind) for state in states])
        members = [[names.get(key, key) for key in params] for params in optimizer.params]
        self.add_groups([dict_of(group) for group in optimizer.groups], members)
        said = dict_of(self.first.values.get("optimizer"))
        if "fp32_groups_flat" in said:
            self.unreadable["optimizer.fp32_groups_flat"] = (
                f"{self.first.path}: 'optimizer.fp32_groups_flat' is not read: nothing says "
                "which parameters are in it; train with ZeRO stage 1, whose files say it"
            )
        self.add_optimizer_values(self.first, {key: one for key, one in said.items() if key not in _OF_STAGE_0})

    def _add_whole(self, name: str, kind: str, values: list[Any]) -> None:
        """Add a state of which each model-parallel rank has its whole part."""
        full = f"optimizer.state.{name}.{kind}"
        containers = [row[0].container for row in self.models]
        held = [container.tensor(value, full) for container, value in zip(containers, values, strict=True)]
        arrays = [one for one in held if one is not None]
        if not arrays:
            number = values[0] if type(values[0]) in (int, float) else None
            if number is None:
                self.objects[full] = value_object(full, values[0])
            else:
                self.states[full] = filled(full, number, self.first.path)
            return
        weight = self.weights.get(name)
        shapes = tuple(one.shape for one in arrays)
        if len(arrays) != len(held) or any(one.dtype != arrays[0].dtype for one in arrays):
            raise ParseError(
                f"{self.first.path}: {shown(full)} is not a tensor of one dtype on all model-parallel ranks"
            )
        if not shapes[0] or weight is None:
            cut = whole(shapes[0])
        elif weight.cut.local == shapes:
            cut = weight.cut
        else:
            self.unreadable[full] = (
                f"{self.first.path}: {shown(full)} is not read: of shape {shapes[0]}, it does not follow the cut of "
                "its weight"
            )
            return
        self.states[full] = WholeRow(
            arrays[0].dtype, cut, tuple(zip(containers, arrays, strict=True))[: len(cut.parts)]
        )

    def _add_flat(self, number: int, kind: str, flats: list[list[SavedTensor]]) -> None:
        first = flats[0][0]
        for row, parts in zip(flats, self._partitions, strict=True):
            for flat, part in zip(row, parts, strict=True):
                if flat.dtype != first.dtype or not is_flat(flat):
                    raise ParseError(
                        f"{part.file.path}: {kind} of group {number} is {flat.dtype.name} of shape {flat.shape}; it "
                        f"must be flat, and {first.dtype.name} as in {self._partitions[0][0].file.path.name}"
                    )
        if kind != "master":
            self._spans.check(number, kind, [[flat.shape[0] for flat in row] for row in flats])
        parts_of_all = [part for parts in self._partitions for part in parts]
        held = [(part.file.container, flat) for part, flat in zip(parts_of_all, chain(*flats), strict=True)]
        arrays = Arrays(held, f"{kind} of group {number}")
        for name in self.layouts[0][number]:
            full = f"optimizer.state.{name}.{kind}"
            if name in self.unreadable:
                self.unreadable[full] = self.unreadable[name]
            elif "float" not in first.dtype.name:
                self.unreadable[full] = (
                    f"{self._partitions[0][0].file.path}: {shown(full)} is not read: it is {first.dtype.name}, in "
                    "blocks that cross the boundaries between parameters"
                )
            else:
                self.states[full] = FlatRow(first.dtype, self.cuts[name], arrays, self._spans.table(number, name))

    def _add_scalar(self, group: Mapping[str, Any], kind: str, values: list[Any]) -> None:
        """Add a value that all parameters of a group share, such as their step."""
        parts = [part for row in self._partitions for part in row]
        first = parts[0].file
        read = [number_in(part, value) for part, value in zip(parts, values, strict=False)]
        for part, number in zip(parts, read, strict=False):
            if number is None or number != read[0]:
                raise ParseError(
                    f"{part.file.path}: {kind} is {shown(number)}, but {shown(read[0])} in {first.path.name}: "
                    f"the files are of different steps, or {kind} is not one number for all ranks"
                )
        for name in group:
            full = f"optimizer.state.{name}.{kind}"
            value = values[0]
            if isinstance(value, SavedTensor):
                self.states[full] = WholeRow(value.dtype, whole(()), ((first.container, value),))
            else:
                self.states[full] = filled(full, read[0], first.path)

    def _add_weights(self) -> None:
        """Add the weights, frozen parameters and buffers, and further names of each."""
        first = self.first
        module = dict_of(first.values.get("module"))
        modules = [dict_of(row[0].values.get("module")) for row in self.models]
        if not module:
            raise UnsupportedError(f"{first.path}: has no module, whose tensors are in other files")
        tied = {
            alias: name for alias, name in dict_of(first.values.get("shared_params")).items() if isinstance(name, str)
        }
        owners: dict[Any, str] = {}
        for name in module:
            checked_name(name, first.path)
            if name in self.unreadable or name in self.weights:
                continue
            where = f"{first.path}: {shown(name)}"
            try:
                held = [
                    row[0].container.tensor(one.get(name), name) for row, one in zip(self.models, modules, strict=True)
                ]
                saved = held[0]
                if saved is None and not any(held):
                    self.objects[name] = value_object(name, module[name])
                    continue
                if saved is None or any(one is None or one.dtype != saved.dtype for one in held):
                    raise ParseError(f"{where} is not a tensor of one dtype on all model-parallel ranks")
                arrays = [one for one in held if one is not None]
                if self.is_split and saved.shape == (0,):
                    self._add_split(name, tied.get(name))
                    continue
                shapes = [one.shape for one in arrays]
                if name in self.cuts and self.cuts[name].local != tuple(shapes):
                    raise ParseError(
                        f"{where} has the shape {saved.shape}; param_shapes says {self.cuts[name].local[0]}"
                    )
                owner = tied.get(name)
                key = tuple((one.storage, one.offset, one.shape, one.strides) for one in arrays)
                if math.prod(saved.shape):
                    owner = owners.setdefault(key, name) if owner not in module else owner
                cut = self.cuts.get(name) or (self.cuts.get(owner) if owner is not None else None)
                if cut is None or cut.local != tuple(shapes):
                    cut = self._cut(name, shapes, is_certain=False)
            except UnsupportedError as error:
                self.unreadable[name] = str(error)
                continue
            alias = None if owner == name else owner
            containers = [row[0].container for row in self.models]
            self.weights[name] = WholeRow(saved.dtype, cut, tuple(zip(containers, arrays, strict=True)), alias)
        for name, (container, saved) in self._experts.items():
            if name in self.weights or (name in self.cuts and self.cuts[name].local != (saved.shape,)):
                raise ParseError(
                    f"{container.file.path}: {shown(name)} is a weight of {first.path.name} too, or has another shape "
                    "than param_shapes says"
                )
            self.weights[name] = WholeRow(saved.dtype, whole(saved.shape), ((container, saved),))
        for name in self.cuts:
            if name not in self.weights:
                self._add_split(name)

    def _add_split(self, name: str, owner: str | None = None) -> None:
        """Add a weight that is cut over the data-parallel ranks: its master copy or, if it is frozen, its own parts.

        Args:
            name: The weight.
            owner: The weight that it is tied to, of which it becomes an alias.
        """
        if owner is not None and name not in self.cuts:
            if owner not in self.weights:
                self._add_split(owner)
            if owner in self.weights:
                self.weights[name] = self.weights[owner]._replace(alias_of=owner)
            else:
                self.unreadable[name] = self.unreadable[owner]
            return
        master = f"optimizer.state.{name}.master"
        if master in self.states:
            row = self.states[master]
            self.weights[name], self.states[master] = row, row._replace(alias_of=name)
            return
        row = None if master in self.unreadable else frozen_row(self.models, name, self._cut)
        if row is not None:
            self.weights[name] = row
        else:
            self.unreadable[name] = (
                f"{self.first.path}: {shown(name)} is not read: its elements are in no file; it may be tied to another "
                "parameter, which stage 3 may not say"
            )


def _rules(file: ReadFile, info: Any) -> CutRules:
    if not dict_of(info):
        raise UnsupportedError(
            f"{file.path}: has no universal_checkpoint_info, which says how model-parallel ranks cut parameters; save "
            "it once with engine.save_checkpoint(..., client_state={'universal_checkpoint_info': {...}})"
        )
    return CutRules(info, file.path)
