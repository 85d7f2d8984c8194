"""The contents of files of `torch.save`: tensors and values by name, and the states of optimizers by parameter."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES
from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.text import checked_name
from ...tensors.checkpoint import Besides, KeyPath, StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError
from ...tensors.stored_pieces import StoredPiece, whole_box
from .optimizers import (
    NAMED,
    NamedShape,
    OptimizerDict,
    as_optimizer,
    dict_entries,
    is_by_name,
    is_norm_buffer,
    numbered_names,
)
from .pickles import Record
from .tensors import Container, SavedTensor, items_within, located_values, sums_of, value_object

__all__ = ["FLOATS", "ModelParameters", "StateDicts", "is_plain", "number_tensor", "sharded_kind"]

#: The keys under which a file has the model that its optimizer trains, where it has several.
_MODELS = ("model", "state_dict", "model_state_dict", "module", "net", "network")
#: The first count that float32 cannot hold exactly.
_MOST_FLOAT = 1 << 24
#: The functions whose results are tensors.
_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_parameter", "torch._tensor._rebuild_from_type")
#: The dtypes of tensors that can have gradients.
FLOATS = re.compile(r"b?float|complex")
#: The most numbers and texts of a list that is kept as one value; Python's random state has 625.
_MOST_PLAIN = 4096


class ModelParameters(NamedTuple):
    """The tensors of a model that may be the parameters of an optimizer.

    Attributes:
        candidates: The tensors.
        is_ordered: Whether they are in the order of the model's modules.
    """

    candidates: Sequence[NamedShape]
    is_ordered: bool


class _FoundOptimizer(NamedTuple):
    """An optimizer in a file.

    Attributes:
        optimizer: Its state dict.
        path: The keys that lead to it.
        model: The text before the names of its model's tensors; `None` if the file has no model, or several.
        why: The reason why `model` is `None`.
    """

    optimizer: OptimizerDict
    path: KeyPath
    container: Container
    model: str | None
    why: str


class StateDicts:
    """The contents of one or several files.

    Attributes:
        objects: The values that are not tensors.
        unreadable: The reasons why other tensors cannot be read.
        paths: The keys and positions that lead to each value, if they are more than its name.
        doubts: Warnings about optimizers whose parameters keep their numbers.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        self.unreadable: dict[str, str] = {}
        self.paths: dict[str, KeyPath] = {}
        self.doubts: list[str] = []
        self._saved: dict[str, tuple[Container, SavedTensor]] = {}
        self._owners: dict[tuple[int, str], _Owners] = {}
        self._held: list[_FoundOptimizer] = []
        self._containers: list[Container] = []

    def read(self, file: Holder, within: KeyPath = ()) -> None:
        """Add a file's contents; the states of its optimizers are named later, by `name_optimizers`.

        Args:
            file: A container of `torch.save`.
            within: The keys before those in the file.
        """
        container = Container(file)
        self._containers.append(container)  # They are told apart by what they are.
        root = container.root()
        shape_of = partial(_shape_of, container)

        def keep(value: Any) -> bool:
            return as_optimizer("", value, shape_of) is not None or is_plain(value)

        for name, path, value in located_values(root, file.path, container.pickle_bytes, keep):
            full = _joined((*map(str, within), name) if name else tuple(map(str, within)))
            optimizer = as_optimizer(f"{full}." if full else "", value, shape_of)
            if optimizer is None:
                self._add(container, full, (*within, *path), value)
            else:
                self._held.append(_FoundOptimizer(optimizer, (*within, *path), container, *_model_of(root, path)))

    def name_optimizers(self, model: ModelParameters | None = None, names: Sequence[str] | None = None) -> None:
        """Add the states of the optimizers, under the names of their parameters if these are certain.

        Args:
            model: The model's tensors, if they are in other files.
            names: The names in the order of the numbers, if the caller knows them.

        Raises:
            ParseError: if `names` are given, and do not fit.
        """
        numbered: dict[str | None, list[_FoundOptimizer]] = {}
        for held in self._held:
            said = held.optimizer.said_names() if held.optimizer.is_numbered else {}
            if said is None:
                numbered.setdefault(held.model if model is None else None, []).append(held)
            else:
                self._add_optimizer(held, said)
        if names is not None and len(numbered) != 1:
            several = "the optimizers of several models" if numbered else "no optimizer whose parameters have numbers"
            raise ParseError(f"parameter_names is given, but the checkpoint has {several}")
        for prefix, group in numbered.items():
            self._match(group, self._model(prefix) if model is None else model, names)
        self._held = []

    def take(self, other: StateDicts) -> None:
        """Add the contents that another `StateDicts` has.

        Raises:
            ParseError: if both have a name.
        """
        for name in (*other.tensors, *other.objects, *other.unreadable):
            self._new(name, other._containers[0])
        self.tensors |= other.tensors
        self.objects |= other.objects
        self.unreadable |= other.unreadable
        self.paths |= other.paths
        self._containers += other._containers

    def besides(self, files: Sequence[Holder]) -> Besides:
        """Return the contents besides the tensors, as a checkpoint takes them, with these open files."""
        return Besides(
            metadata={"planner_data": self.paths} if self.paths else {},
            objects=self.objects,
            unreadable=self.unreadable,
            sums=partial(sums_of, files),
            doubts=self.doubts,
        )

    def _match(self, group: Sequence[_FoundOptimizer], model: ModelParameters, names: Sequence[str] | None) -> None:
        optimizers = [held.optimizer for held in group]
        where = group[0].container.file.path
        found: list[dict[int, str]] = []
        if not model.candidates and names is None:
            why = f"{group[0].why or 'the model is not in the file'}; open its folder, if that has the model; {NAMED}"
        else:
            try:
                found, why = numbered_names(optimizers, model.candidates, is_ordered=model.is_ordered, names=names)
            except ParseError as error:
                raise ParseError(f"{where}: {error}") from None
        if why:
            self.doubts.append(f"{where}: the parameters of its optimizer keep their numbers: {why}")
        for number, held in enumerate(group):
            self._add_optimizer(held, found[number] if found else {})

    def _model(self, prefix: str | None) -> ModelParameters:
        """Return the candidates among the tensors of a model in the same file."""
        if prefix is None:
            return ModelParameters((), False)
        own = [name for name in self._saved if name.startswith(prefix)]
        tied: set[Any] = set()
        found = []
        for name in own:
            container, saved = self._saved[name]
            # A second name of the same tensor is no further parameter; buffers of integers are none at all.
            is_parameter = (id(container), saved) not in tied and not is_norm_buffer(name, self._saved)
            if is_parameter and FLOATS.match(saved.dtype.name):
                found.append(NamedShape(name[len(prefix) :], saved.shape))
            tied.add((id(container), saved))
        return ModelParameters(found, not is_by_name(own))

    def _add_optimizer(self, held: _FoundOptimizer, names: Mapping[int, str]) -> None:
        optimizer, container = held.optimizer, held.container
        for key, states in optimizer.state.items():
            own = names.get(key, f"{key}")
            for kind, value in states.items():
                path = (*held.path, "state", own, f"{kind}")
                name = f"{optimizer.prefix}state.{own}.{kind}"
                if kind == "step" and type(value) in (int, float):
                    self._new(name, container)
                    self.tensors[name] = number_tensor(name, value, container)
                    self.paths[name] = path
                else:
                    self._add_all(container, name, path, value)
        for number, (group, params) in enumerate(zip(optimizer.groups, optimizer.params, strict=True)):
            for key, value in group.items():
                path = (*held.path, "param_groups", number, f"{key}")
                name = f"{optimizer.prefix}param_groups.{number}.{key}"
                if key == "params":
                    value = [names.get(each, each) for each in params]
                elif key == "param_names" and names:
                    continue  # They are in `params` now.
                self._add_all(container, name, path, value)

    def _add_all(self, container: Container, name: str, path: KeyPath, value: Any) -> None:
        """Add the values that a value contains, each under its own name."""
        for more, inner, leaf in located_values(value, container.file.path, container.pickle_bytes, is_plain):
            self._add(container, f"{name}.{more}" if more else name, (*path, *inner), leaf)

    def _new(self, name: str, container: Container) -> None:
        """Refuse a name that is taken already."""
        if name in self.tensors or name in self.objects or name in self.unreadable:
            raise ParseError(f"{container.file.path}: {shown(name)} is also in another file of the checkpoint")

    def _add(self, container: Container, name: str, path: KeyPath, value: Any) -> None:
        """Add one value."""
        file = container.file
        if name:
            checked_name(name, file.path)
        self._new(name, container)
        if sharded_kind(value):
            raise ParseError(
                f"{file.path}: {shown(name)} is one rank's part of a tensor ({sharded_kind(value)}); open the folder "
                "that has the files of all ranks, named model_world_size_W_rank_R.pt"
            )
        try:
            tensor = container.tensor(value, name)
        except UnsupportedError as error:
            if not name:
                raise  # It is all there is.
            self.unreadable[name] = str(error)
            return
        if len(path) > 1:
            self.paths[name] = path
        if tensor is None:
            if not name and isinstance(value, Record):
                raise UnsupportedError(
                    f"{file.path}: holds one object, {shown(value.name)}, which has no meaning here; save a state dict"
                )
            self.objects[name] = value_object(name, value)
            return
        owner = self._owners.setdefault((id(container), tensor.storage), _Owners([], [])).of(tensor, name)
        self._saved[name] = container, tensor
        self.tensors[name] = StoredTensor(
            name,
            tensor.dtype,
            tensor.shape,
            (container.piece(tensor, name, whole_box(tensor.shape)),),
            alias_of=None if owner == name else owner,
        )


def _joined(parts: Sequence[str]) -> str:
    return ".".join(parts)


def number_tensor(name: str, value: float, container: Container) -> StoredTensor:
    """Return a number of steps as a tensor without dims, as PyTorch's optimizers keep it."""
    dtype = DTYPES["float32" if abs(value) < _MOST_FLOAT else "int64"]
    fill = np.array(value, dtype.name)
    return StoredTensor(name, dtype, (), (StoredPiece((), container.file.path, fill=fill),))


def _shape_of(container: Container, value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value that is a tensor; else `None`."""
    try:
        found = container.tensor(value, "")
    except UnsupportedError:
        return None
    return None if found is None else found.shape


def is_plain(value: Any) -> bool:
    """Return whether a list or tuple has only numbers, texts and lists of them, and so is kept as one value."""
    if not isinstance(value, (list, tuple)):
        return False
    waiting, seen = [value], 0
    while waiting:
        held = waiting.pop()
        seen += len(held)
        if seen > _MOST_PLAIN or not all(each is None or isinstance(each, _PLAIN) for each in held):
            return False
        waiting += [each for each in held if isinstance(each, (list, tuple))]
    return True


#: The types of the items of a list that is kept as one value.
_PLAIN = (bool, int, float, str, list, tuple)


def _model_of(root: Any, path: KeyPath) -> tuple[str | None, str]:
    """Return the text before the names of the model that a file's optimizer trains; or `None`, and the reason."""
    around = [root]
    for key in path:
        around.append(dict(items_within(around[-1]) or ())[key])
    for depth in range(len(path) - 1, -1, -1):
        held = dict_entries(around[depth])
        if held is None:
            continue
        models = [key for key, value in held.items() if isinstance(key, str) and _is_model(value)]
        named = [key for key in models if key in _MODELS]
        if len(models) > 1 and len(named) != 1:
            return None, f"the file has several models: {', '.join(map(shown, models[:4]))}"
        if models:
            return _joined((*map(str, path[:depth]), named[0] if named else models[0], "")), ""
    return None, ""


def _is_model(value: Any) -> bool:
    held = dict_entries(value)
    if held is None or not all(isinstance(key, str) for key in held):
        return False
    return any(isinstance(each, Record) and each.name.startswith(_TENSORS) for each in held.values())


class _Owners(NamedTuple):
    """The tensors of a storage that share no byte with an earlier one: the first byte of each, in order, and its name.

    Optimizers and recurrent layers keep many tensors side by side in one storage; these are not tied.
    """

    begins: list[int]
    found: list[tuple[int, str]]

    def of(self, tensor: SavedTensor, name: str) -> str:
        """Return the first owner that a tensor shares a byte with; without one, the tensor becomes an owner."""
        if 0 in tensor.shape:
            return name
        begin, end = tensor.span
        at = bisect_right(self.begins, begin)
        if at and self.found[at - 1][0] > begin:
            return self.found[at - 1][1]
        if at < len(self.begins) and self.begins[at] < end:
            return self.found[at][1]
        self.begins.insert(at, begin)
        self.found.insert(at, (end, name))
        return name


def sharded_kind(value: object) -> str | None:
    """Return the class of a value that is one rank's part of a tensor; `None` for any other value."""
    args = getattr(value, "args", None)
    if getattr(value, "name", "") == "torch._tensor._rebuild_from_type_v2" and args and len(args) == 4:
        kind = str(getattr(args[1], "name", "")).rpartition(".")[2]
        return kind if kind in ("DTensor", "ShardedTensor") else None
    return None
