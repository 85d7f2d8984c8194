"""Files of a training run next to a model: optimizers, schedulers and random states.

The Trainer of transformers writes `optimizer.pt`, `scheduler.pt` and `rng_state.pth` next to the weights; accelerate
writes `optimizer.bin`, `scheduler.bin` and `random_states_0.pkl`; with FSDP they write folders of distributed
checkpoints, `pytorch_model_fsdp_0` and `optimizer_0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ...._json import MAX_JSON
from ...._text import shown
from ....errors import ParseError
from ....rules.parameter_order import parameter_order
from ...data.files import Holder
from ...data.location import Location, entries_of, first_bytes, json_in, open_file
from ...data.parts import FSDP_FOLDER, OPTIMIZER_FILE
from ...tensors.checkpoint import Besides, KeyPath, StoredCheckpoint, StoredObject
from ...tensors.model_config import config_of
from ...tensors.stored import StoredTensor
from .dcp import open_form as open_dcp
from .optimizers import NamedShape, is_by_name, is_norm_buffer
from .state_dicts import FLOATS, ModelParameters, StateDicts
from .tensors import value_object

__all__ = ["open_form", "with_training_files"]

#: Patterns of other files, with the first part of their values' names; for a file of one rank, the rank follows.
_OTHERS = {
    r"scheduler(?:_(?P<number>\d{1,4}))?\.(?:pt|bin)": "lr_scheduler",
    r"rng_state(?:_(?P<rank>\d{1,6}))?\.pth": "rng",
    r"random_states_(?P<rank>\d{1,6})\.pkl": "rng",
    r"scaler\.(?:pt|bin)": "grad_scaler",
}
#: The first bytes of a zip container.
_MAGIC = b"PK\3\4"
#: The file in which the Trainer records the course of a run.
_STATE = "trainer_state.json"


def open_form(path: Location, *, parameter_names: Sequence[str] | None = None) -> StoredCheckpoint:
    """Open a folder in which accelerate has saved distributed checkpoints of a model and of its optimizer."""
    return with_training_files(_opened(path), path, parameter_names)


def _opened(path: Location) -> StoredCheckpoint:
    names = [name for name, is_folder in sorted(entries_of(path)) if is_folder and re.fullmatch(FSDP_FOLDER, name)]
    opened: list[StoredCheckpoint] = []
    try:
        for name in sorted(names, key=lambda name: name.startswith("optimizer")):
            opened.append(open_dcp(path / name))
        if not any(name.startswith("pytorch") for name in names):
            raise ParseError(f"{path}: has {', '.join(names)}, and no pytorch_model_fsdp_0 with the weights next to it")
        return _joined(path, "dcp", opened)
    except BaseException:
        for each in opened:
            each.close()
        raise


def with_training_files(
    checkpoint: StoredCheckpoint, folder: Location, parameter_names: Sequence[str] | None
) -> StoredCheckpoint:
    """Return a model's checkpoint with what the files of a training run in its folder hold.

    Args:
        checkpoint: The model, open; it is closed if there is an error.
        folder: The folder that the model is in.
        parameter_names: The names of the parameters in the order of the optimizer's numbers, if the caller knows them.

    Raises:
        ParseError: if a file of an optimizer is none; if `parameter_names` do not fit.
    """
    files: list[Holder] = []
    held = StateDicts()
    try:
        names = sorted(name for name, is_folder in entries_of(folder) if not is_folder)
        optimizers = [match for name in names if (match := re.fullmatch(OPTIMIZER_FILE, name))]
        optimizers = [match for match in optimizers if _is_container(folder / match[0])]
        for match in optimizers:
            within: KeyPath = ("optimizer", int(match["number"] or 0)) if len(optimizers) > 1 else ("optimizer",)
            _read(folder / match[0], within, held, files)
        if not optimizers and parameter_names is not None:
            raise ParseError(
                f"{folder}: parameter_names is given, but there is no optimizer whose parameters have numbers"
            )
        held.name_optimizers(_model(checkpoint, folder) if optimizers else None, parameter_names)
        for name in names:
            for pattern, prefix in _OTHERS.items():
                if found := re.fullmatch(pattern, name):
                    _read_other(folder / name, prefix, found.groupdict(), held, files)
        if _STATE in names:
            _read_json(folder / _STATE, held)
    except BaseException:
        checkpoint.close()
        for file in files:
            file.close()
        raise
    if not files and not held.objects:
        return checkpoint
    more = StoredCheckpoint(folder, checkpoint.format, held.tensors, files, held.besides(files))
    return _joined(checkpoint.path, checkpoint.format, [checkpoint, more])


def _is_container(path: Location) -> bool:
    """Return whether a file is a zip container, as `torch.save` writes since PyTorch 1.6.

    Raises:
        ParseError: if it is empty, or begins with zeros, as a copy that was interrupted may.
    """
    first = first_bytes(path, len(_MAGIC))
    if not first.strip(b"\0"):
        raise ParseError(f"{path}: is {'filled with zeros' if first else 'empty'}: it was not copied as a whole")
    return first == _MAGIC


def _read(path: Location, within: KeyPath, held: StateDicts, files: list[Holder]) -> None:
    file = open_file(path)
    files.append(file)
    held.read(file, within)


def _read_other(
    path: Location, prefix: str, said: Mapping[str, str | None], held: StateDicts, files: list[Holder]
) -> None:
    """Read a file that may be unreadable; if it is, it is listed as not read instead of raising an error."""
    number, rank = said.get("number"), said.get("rank")
    within: KeyPath = (prefix, number) if number else (prefix, f"rank_{rank}") if rank else (prefix,)
    trial, opened = StateDicts(), list[Holder]()
    try:
        _read(path, within, trial, opened)
        trial.name_optimizers()
    except ParseError:
        for file in opened:
            file.close()
        return
    held.take(trial)
    files += opened


def _read_json(path: Location, held: StateDicts) -> None:
    file = open_file(path)
    try:
        if file.size <= MAX_JSON:
            name = path.name.removesuffix(".json")
            held.objects[name] = value_object(name, json_in(file))
    finally:
        file.close()


def _model(checkpoint: StoredCheckpoint, folder: Location) -> ModelParameters:
    """Return the tensors of a model that may be parameters, in order if the order is known."""
    found = []
    for name, tensor in checkpoint.items():
        owner = None if tensor.alias_of is None else checkpoint[tensor.alias_of]
        is_tied = owner is not None and (owner.shape, owner.dtype) == (tensor.shape, tensor.dtype)
        if FLOATS.match(tensor.dtype) and not is_tied and not is_norm_buffer(name, checkpoint):
            found.append(NamedShape(name, tensor.shape))
    names = [each.name for each in found]
    if checkpoint.format == "torch" and not is_by_name(checkpoint):
        return ModelParameters(found, True)
    order = parameter_order(config_of(folder), names)
    if order is None:
        return ModelParameters(found, False)
    shapes = dict(found)
    return ModelParameters([NamedShape(name, shapes[name]) for name in order], True)


def _joined(path: Location, form: str, parts: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
    """Return one checkpoint with the contents of several."""
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    metadata: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for part in parts:
        for name in chain(part, part.objects, part.unreadable):
            if name in tensors or name in objects:
                raise ParseError(f"{path}: two of its files hold {shown(name)}")
        tensors.update(part.items())
        objects |= part.objects
        metadata |= part.metadata
        said = part.metadata.get("planner_data")
        paths |= said if isinstance(said, Mapping) else {}
    besides = Besides(
        metadata=metadata | ({"planner_data": paths} if paths else {}),
        objects=objects,
        unreadable={name: why for part in parts for name, why in part.unreadable.items()},
        sums=lambda: chain.from_iterable(part.sums() for part in parts),
        unread=[name for part in parts for name in part.unread],
        doubts=[text for part in parts for text in part.doubts],
    )
    return StoredCheckpoint(path, form, tensors, _files_of(parts), besides)


def _files_of(parts: Iterable[StoredCheckpoint]) -> list[Any]:
    return [file for part in parts for file in part._files]
