"""DeepSpeed's universal checkpoints, as `ds_to_universal.py` writes them, with a folder for each parameter.

`zero/NAME/fp32.pt` holds a parameter as a whole, and the files next to it its states: with their shape, or, with stage
3, flat, with the shape in the copies of the trainer's `*_model_states.pt`. These copies also hold the frozen parameters
and buffers, and the names that are tied. Groups, and with stage 3 steps, are in `zero/optimizer_state.pt`.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

from ...._text import counted, shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location, entries_of, first_bytes, opening
from ...data.text import checked_name, checked_shape
from ...tensors.checkpoint import Besides, StoredCheckpoint
from ...tensors.lazy import LazyTensors
from ...tensors.stored import StoredTensor, UnsupportedError
from ...tensors.stored_pieces import whole_box
from .deepspeed_files import Grid, RankKey, ReadFile, Rows, frozen_row, grid_of, metadata_of, read_rank
from .flat_parts import WholeRow, dtype_and_shape, filled, is_flat, made
from .model_parallel import RankCut, whole
from .tensors import Container, SavedTensor, dict_of, items_within, sums_of
from .zero_partitions import RankArrays, group_shapes, parameters_of_groups

__all__ = ["LATEST", "MODEL_STATES", "latest_in", "open_form"]

#: The file next to the folders of steps that names the last one.
LATEST = "latest_universal"
#: The file next to the parameters' folders with the values that all parameters share.
OPTIMIZER = "optimizer_state.pt"
#: The names of the copied files of the trainer.
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_VERSION = 0.4
#: Keys that a parameter's file may have besides the tensor; none of them changes the tensor.
_SAID = frozenset(
    [
        "param",
        "cat_dim",
        "vocab_tensor",
        "param_n_sub_params",
        "sub_param_shape",
        "ep_is_expert_param",
        "ep_num_experts",
    ]
)
_AGAIN = (
    "run zero_to_fp32.py, without options, on the folder that the universal checkpoint was made from, and open its "
    "output"
)


def open_form(path: Location) -> StoredCheckpoint:
    """Open a universal folder; of a folder of them, the last one."""
    if (path / LATEST).exists():
        path = path / latest_in(path / LATEST)
    inside = dict(entries_of(path))
    zero = path / "zero"
    if not inside.get("zero"):
        raise ParseError(f"{path}: has no folder zero, which has the parameters: files are missing")
    beside = dict(entries_of(zero))
    names = sorted(checked_name(name, zero) for name, is_folder in beside.items() if is_folder)
    held = {name: {file for file, _ in entries_of(zero / name)} for name in names}
    without = next((name for name, files in held.items() if "fp32.pt" not in files), None)
    if without is not None:
        raise ParseError(f"{zero / without}: has no fp32.pt: files are missing, or the conversion was interrupted")
    chosen = _model_states(path, inside)
    if "tmp" in inside and not chosen:
        raise ParseError(f"{path}: has a folder tmp and no *_model_states.pt: the conversion was interrupted")
    common = [zero / OPTIMIZER] if OPTIMIZER in beside else []
    parts = {name: sorted(file for file in files if file.endswith(".pt")) for name, files in held.items()}
    # The same for stage 3, next to those for stages 1 and 2, which have the tensors as well.
    again = [name for name in inside if MODEL_STATES.fullmatch(name) and name not in chosen.values()]
    every = [*(path / name for name in (*chosen.values(), *again)), *common]
    every += [zero / name / file for name, files in parts.items() for file in files]
    with opening(every) as (open_next, files):
        models = grid_of({key: read_rank(open_next(path / name)) for key, name in chosen.items()}, "model")
        for name in again:
            read_rank(open_next(path / name))
        optimizer = read_rank(open_next(common[0])) if common else None
        folder = _UniversalFolder(path, models)
        absent = next((name for name in folder.shapes if name not in held), None)
        if absent is not None:
            raise ParseError(f"{zero}: has no folder {shown(absent)}, a parameter of the trainer: files are missing")
        has_states = max(map(len, held.values()), default=0) > 1
        lacks_groups = has_states and not common
        _check_alike(zero, {name: parts[name] for group in folder.groups for name in group if name in parts})
        for name in names:
            opened = {file.removesuffix(".pt"): open_next(zero / name / file) for file in parts[name]}
            folder.add_parameter(name, opened, has_states=has_states)
        folder.add_others()
        if optimizer is not None:
            folder.add_optimizer(optimizer)
        folder.add_values(models)
        tensors = LazyTensors(folder.rows, dtype_and_shape, made)
    unread = [f"zero/{name}/{file}" for name, found in held.items() for file in found - set(parts[name])]
    return StoredCheckpoint(
        path,
        "universal",
        tensors,
        files,
        Besides(
            metadata=metadata_of(models[0][0]) if models else {},
            objects=folder.objects,
            unreadable=folder.unreadable,
            sums=partial(sums_of, files),
            unread=sorted(unread + folder.unread),
            doubts=[
                *(
                    [f"{path}: has no *_model_states.pt, which have buffers and frozen parameters"]
                    if not models
                    else []
                ),
                *([f"{zero}: has no {OPTIMIZER}, so groups, and steps, are missing"] if lacks_groups else []),
            ],
        ),
    )


class _UniversalFolder(Rows):
    """A universal folder.

    Args:
        path: The folder.
        models: The copies of the trainer's files: one for each model-parallel rank, or one for each of its ranks.

    Attributes:
        shapes: The parameters that the optimizer holds, with their shapes on the first rank that has them.
        unread: Files of parameters that are not read.
    """

    def __init__(self, path: Location, models: Grid) -> None:
        super().__init__()
        self.models = models
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unread: list[str] = []
        self._tied: dict[str, str] = {}
        self._module: dict[str, Any] = {}
        for row in models:
            said = row[0].values
            if type(ranks := said.get("mp_world_size")) is int and ranks > len(models):
                raise ParseError(f"{path}: has *_model_states.pt of {len(models)} of {ranks} ranks: files are missing")
            layout = group_shapes(row[0])
            _check_versions(row[0])
            for group in layout:
                for name, shape in group.items():
                    self.shapes.setdefault(name, shape)
        if models:
            first = models[0][0].values
            self._layout = group_shapes(models[0][0])
            tied = dict_of(first.get("shared_params"))
            self._tied.update((alias, name) for alias, name in tied.items() if isinstance(name, str))
            self._module.update(dict_of(first.get("module")))

    @property
    def groups(self) -> list[list[str]]:
        """Return the parameters of each group of the optimizer; no groups if the folder does not state them."""
        return [list(group) for group in self._layout] if self.models else []

    @property
    def is_whole(self) -> bool:
        """True if one rank has the model as a whole."""
        return len(self.models) == 1

    def add_parameter(self, name: str, opened: dict[str, Holder], *, has_states: bool) -> None:
        """Add the tensors in the files of a parameter."""
        is_parameter = name in self.shapes or not self.models
        if not is_parameter and (name in self._tied or name in self._module):
            self.unread += [f"zero/{name}/{file}.pt" for file in opened if file != "fp32"]
            return  # The model's own is beside.
        for file, holder in opened.items():
            full = name if file == "fp32" else f"optimizer.state.{name}.{file}"
            try:
                if not self.models and has_states and len(opened) == 1:
                    raise UnsupportedError(
                        f"{holder.path}: may be one rank's part: it has no optimizer state, and *_model_states.pt, "
                        "which say what it is, are missing"
                    )
                if file == "step":
                    self.states[full] = _step(Container(holder), full)
                elif file == "fp32":
                    self.weights[name] = self._parameter(holder, name)
                else:
                    self.states[full] = self._parameter(holder, name, full)
            except UnsupportedError as error:
                self.unreadable[full] = str(error)
        if name in self.weights and (len(opened) > 1 or (has_states and name in self.shapes)):
            weight, master = self.weights[name], f"optimizer.state.{name}.master"
            self.states[master] = StoredTensor(master, weight.known_dtype, weight.shape, weight.pieces, alias_of=name)

    def _parameter(self, file: Holder, name: str, full: str = "") -> StoredTensor:
        """Return the tensor in a file: a parameter or a state of it, stored whole, either with its shape or flat."""
        container = Container(file)
        value = container.read_objects()
        keys = dict_of(value)
        if keys:
            other = next((key for key in keys if key not in _SAID), None)
            if other is not None or "param" not in keys:
                raise UnsupportedError(
                    f"{file.path}: says {shown(other)} about its tensor, which is not a known key; {_AGAIN}"
                )
            value = keys["param"]
        saved = container.tensor(value, name)
        if saved is None:
            raise ParseError(f"{file.path}: holds no tensor")
        said = self.shapes.get(name)
        if keys:
            if said is not None and self.is_whole and math.prod(said) != math.prod(saved.shape):
                raise ParseError(
                    f"{file.path}: has the shape {saved.shape}; the trainer's parameter {shown(name)} has {said}"
                )
        elif said is None or not self.is_whole:
            raise UnsupportedError(
                f"{file.path}: is flat, and no *_model_states.pt next to zero says its whole shape; copy these files "
                "from the folder that the checkpoint was made from"
            )
        else:
            shape = checked_shape(said, saved.dtype.bits, name, file.path)
            if not is_flat(saved) or saved.shape[0] != math.prod(shape):
                raise ParseError(
                    f"{file.path}: has the shape {saved.shape}; the trainer's parameter {shown(name)} has {shape}"
                )
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            saved = saved._replace(shape=shape, strides=tuple(strides))
        return _stored(container, saved, full or name)

    def add_others(self) -> None:
        """Add the tensors that the optimizer does not hold: further names of parameters, frozen parameters, buffers."""
        for alias, name in self._tied.items():
            if name in self.weights and alias not in self.shapes:
                owner = self.weights[name]
                checked_name(alias, self.models[0][0].path)
                self.weights[alias] = StoredTensor(alias, owner.known_dtype, owner.shape, owner.pieces, alias_of=name)
        for name, value in self._module.items():
            if name in self.weights or name in self.unreadable:
                continue
            container = self.models[0][0].container
            where = f"{container.file.path}: {shown(checked_name(name, container.file.path))}"
            is_held = _is_held(container, value, name)
            frozen = None if is_held or not self.is_whole else frozen_row(self.models, name, _as_whole)
            if frozen is not None:
                self.weights[name] = frozen
            elif not self.is_whole:
                self.unreadable[name] = (
                    f"{where} is not read: no optimizer holds it, and nothing says how {len(self.models)} "
                    "model-parallel ranks cut it"
                )
            elif not is_held:
                self.unreadable[name] = (
                    f"{where} is not read: its elements are in no file; it may be tied to another parameter"
                )
            else:
                try:
                    saved = container.tensor(value, name)
                except UnsupportedError as error:
                    self.unreadable[name] = str(error)
                    continue
                if saved is not None:
                    self.weights[name] = _stored(container, saved, name)

    def add_optimizer(self, file: ReadFile) -> None:
        """Add the values that all parameters share: groups, and steps that are not in the parameters' folders."""
        said = file.values
        inner = dict_of(said.get("optimizer_state_dict"))
        groups = [
            dict_of(group) for _, group in items_within(said.get("param_groups") or inner.get("param_groups")) or ()
        ]
        self.add_optimizer_values(file, {key: value for key, value in said.items() if key != "param_groups"})
        if not any(groups):
            groups = []
        if not self.models:
            self.add_groups(groups, [[] for _ in groups])
            return
        members = parameters_of_groups(RankArrays(file, said, [], [], groups), self._layout)
        self.add_groups(groups, members)
        states = {f"{key}": dict_of(value) for key, value in items_within(inner.get("state")) or ()}
        for number, group in enumerate(self._layout):
            step = states.get(f"{number}", {}).get("step", said.get("base_optimizer_state_step"))
            for name in group:
                full = f"optimizer.state.{name}.step"
                if step is not None and full not in self.states:
                    self.states[full] = _scalar(file.container, step, full)


def _check_alike(zero: Location, parts: dict[str, list[str]]) -> None:
    """Refuse a parameter of a group that has some of the files of another one: an optimizer keeps the same states.

    Groups may have other states, such as those of Muon and of Adam, but none has a part of another's.
    """
    kinds = [frozenset(files) for files in dict.fromkeys(map(tuple, parts.values()))]
    for name, files in parts.items():
        more = next((kind for kind in kinds if kind > set(files)), None)
        if more is not None:
            absent = min(more.difference(files))
            raise ParseError(f"{zero / name}: has no {absent}, which other parameters have: files are missing")


def _as_whole(name: str, shapes: list[tuple[int, ...]], *, is_certain: bool) -> RankCut:
    return whole(shapes[0])


def _step(container: Container, name: str) -> WholeRow | StoredTensor:
    return _scalar(container, container.read_objects(), name)


def _scalar(container: Container, value: Any, name: str) -> WholeRow | StoredTensor:
    """Return a tensor without dims, or a number, as a tensor without dims."""
    saved = container.tensor(value, name)
    if saved is not None and not saved.shape:
        return WholeRow(saved.dtype, whole(()), ((container, saved),))
    if type(value) not in (int, float):
        raise ParseError(f"{container.file.path}: {shown(name)} is {shown(value)}, which is not a number")
    return filled(name, value, container.file.path)


def latest_in(path: Location) -> str:
    """Return the folder that a file such as `latest` names, next to the file."""
    name = first_bytes(path, 1024).decode("utf-8", "replace").strip()
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise ParseError(f"{path}: {shown(name)} is not the name of a folder next to it")
    if not (path.parent / name).is_dir():
        raise ParseError(f"{path}: names the folder {shown(name)}, which does not exist")
    return name


def _model_states(path: Location, inside: dict[str, bool]) -> dict[RankKey, str]:
    """Return the files of all ranks of each model-parallel rank; all must be there."""
    ranks: dict[RankKey, str] = {}
    found = [match for name in sorted(inside) if (match := MODEL_STATES.fullmatch(name)) is not None]
    found = [match for match in found if match[1] is None] or found
    for match in found:
        ranks["model", int(match[2]), int(match[1] or 0)] = match[0]
    rows, columns = (len({rank[side] for rank in ranks}) for side in (1, 2))
    if rows * columns != len(ranks) or any(row >= rows or column >= columns for _, row, column in ranks):
        raise ParseError(
            f"{path}: has {counted(len(ranks), 'file')} *_model_states.pt, which are not all ranks: some are missing"
        )
    return dict(sorted(ranks.items()))


def _check_versions(file: ReadFile) -> None:
    said = file.values
    info = dict_of(said.get("universal_checkpoint_info"))
    version = info.get("universal_checkpoint_version", 0)
    if not isinstance(version, (int, float)) or not version <= _VERSION:
        raise UnsupportedError(
            f"{file.path}: is a universal checkpoint of version {shown(version)}; up to {_VERSION} are known; {_AGAIN}"
        )
    zero = dict_of(dict_of(said.get("ds_config")).get("zero_optimization"))
    if zero.get("round_robin_gradients") and zero.get("stage") in (1, 2) and said.get("dp_world_size") != 1:
        raise UnsupportedError(
            f"{file.path}: was trained with round_robin_gradients, and then ds_to_universal.py takes wrong elements "
            f"for most parameters; {_AGAIN}"
        )


def _stored(container: Container, saved: SavedTensor, name: str) -> StoredTensor:
    return StoredTensor(name, saved.dtype, saved.shape, (container.piece(saved, name, whole_box(saved.shape)),))


def _is_held(container: Container, value: Any, name: str) -> bool:
    """Return whether a value has its elements: with stage 3, a tensor without elements stands for each parameter."""
    try:
        saved = container.tensor(value, name)
    except UnsupportedError:
        return True
    return saved is None or saved.shape != (0,)
