"""DeepSpeed's universal checkpoints, as `ds_to_universal.py` writes them, a folder for each parameter: their weights.

`zero/NAME/fp32.pt` has a parameter as a whole: with its shape, or of stage 3 flat, with its shape in the copies of the
trainer's `*_model_states.pt`. These also have what no optimizer holds: frozen parameters and buffers, and which names
are tied. The optimizer's states in the folder are not read.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, NamedTuple

from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location, entries_of, open_file, opening
from ...data.text import checked_name, checked_shape
from ...tensors.checkpoint import Besides, StoredCheckpoint
from ...tensors.stored import StoredTensor, UnsupportedError, whole_box
from .pickles import sizes_of
from .tensors import Container, SavedTensor, dict_of, sums_of

__all__ = ["LATEST", "MODEL_STATES", "latest_in", "open_form"]

#: The file beside such folders that names the last one.
LATEST = "latest_universal"
#: The files of a trainer that are copied.
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_VERSION = 0.4
#: Keys that an entry for a parameter may have besides its tensor: none of it changes what the tensor is.
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
_AGAIN = "run zero_to_fp32.py, without options, on the folder that it was made from, and open what that writes"


class _Model(NamedTuple):
    """The copies of the files of a trainer, of which each model-parallel rank has one, or several with stage 3.

    Attributes:
        containers: The first file of each model-parallel rank.
        shapes: The parameters that the optimizer holds, with their shapes on that rank.
        frozen: The parameters that it does not hold, if they are in parts.
        tied: Further names of parameters, and whose they are.
        module: The tensors of the first rank.
    """

    containers: list[Container]
    shapes: dict[str, Any]
    frozen: set[str]
    tied: dict[str, str]
    module: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """True if one rank has the model as a whole."""
        return len(self.containers) == 1


def open_form(path: Location) -> StoredCheckpoint:
    """Open a universal folder, or the last one in a folder of them."""
    if (path / LATEST).exists():
        path = path / latest_in(path / LATEST)
    inside = dict(entries_of(path))
    zero = path / "zero"
    if not inside.get("zero"):
        raise ParseError(f"{path}: has no folder zero, which has the parameters: files are missing")
    names = sorted(checked_name(name, zero) for name, is_folder in entries_of(zero) if is_folder)
    held = {name: {file for file, _ in entries_of(zero / name)} for name in names}
    without = next((name for name, files in held.items() if "fp32.pt" not in files), None)
    if without is not None:
        raise ParseError(f"{zero / without}: has no fp32.pt: files are missing, or the conversion was interrupted")
    chosen = _model_states(path, inside)
    if "tmp" in inside and not chosen:
        raise ParseError(f"{path}: has a folder tmp and no *_model_states.pt: the conversion was interrupted")
    found: dict[str, StoredTensor] = {}
    unreadable: dict[str, str] = {}
    with opening([path / name for name in chosen] + [zero / name / "fp32.pt" for name in names]) as (open_next, files):
        model, metadata = _model(path, [open_next(path / name) for name in chosen])
        absent = next((name for name in model.shapes if name not in held), None)
        if absent is not None:
            raise ParseError(f"{zero}: has no folder {shown(absent)}, a parameter of the trainer: files are missing")
        for name in names:
            file = open_next(zero / name / "fp32.pt")
            try:
                if name in model.shapes or not model.containers:
                    if not model.containers and len(held[name]) == 1 < max(map(len, held.values())):
                        raise UnsupportedError(
                            f"{file.path}: may be one rank's part: it has no optimizer state, and *_model_states.pt, "
                            "which say what it is, are missing"
                        )
                    found[name] = _parameter(file, name, model)
                elif name not in model.tied and name not in model.module:
                    found[name] = _parameter(file, name, model)
            except UnsupportedError as error:
                unreadable[name] = str(error)
        _others(found, unreadable, model)
    unread = sorted(f"zero/{name}/{file}" for name, files in held.items() for file in files if file != "fp32.pt")
    if (zero / "optimizer_state.pt").exists():
        unread.append("zero/optimizer_state.pt")
    return StoredCheckpoint(
        path, "universal", found, files, Besides(metadata=metadata, unreadable=unreadable, sums=partial(sums_of, files),
        unread=unread))  # fmt: skip


def latest_in(path: Location) -> str:
    """Give the folder beside a file that the file names."""
    file = open_file(path)
    try:
        name = file.read(0, min(file.size, 1024)).decode("utf-8", "replace").strip()
    finally:
        file.close()
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise ParseError(f"{path}: {shown(name)} is not the name of a folder beside it")
    if not (path.parent / name).is_dir():
        raise ParseError(f"{path}: names the folder {shown(name)}, which does not exist")
    return name


def _model_states(path: Location, inside: dict[str, bool]) -> list[str]:
    """The files of the first data-parallel rank of each model-parallel rank; all must be there."""
    ranks: dict[tuple[int, int], str] = {}
    for name in inside:
        match = MODEL_STATES.fullmatch(name)
        if match is not None:
            ranks[int(match[2]), int(match[1] or 0)] = name
    rows, columns = (len({rank[side] for rank in ranks}) for side in (0, 1))
    if rows * columns != len(ranks) or any(row >= rows or column >= columns for row, column in ranks):
        raise ParseError(
            f"{path}: has {len(ranks)} files *_model_states.pt, and not those of all ranks: some are missing"
        )
    return [ranks[row, 0] for row in range(rows)]


def _model(path: Location, files: list[Holder]) -> tuple[_Model, dict[str, Any]]:
    model = _Model([], {}, set(), {}, {})
    metadata: dict[str, Any] = {}
    for file in files:
        container = Container(file)
        said = dict_of(container.read_objects())
        if not isinstance(said.get("param_shapes"), list):
            raise ParseError(f"{file.path}: has no list param_shapes, which names a trainer's parameters")
        if type(ranks := said.get("mp_world_size")) is int and ranks > len(files):
            raise ParseError(f"{path}: has *_model_states.pt of {len(files)} of {ranks} ranks: files are missing")
        _check_versions(file, said)
        for group in said["param_shapes"]:
            for name, shape in dict_of(group).items():
                model.shapes.setdefault(checked_name(name, file.path), shape)
        if not model.containers:
            tied = dict_of(said.get("shared_params"))
            model.tied.update((alias, name) for alias, name in tied.items() if isinstance(name, str))
            model.frozen.update(dict_of(said.get("frozen_param_shapes")))
            model.module.update(dict_of(said.get("module")))
            metadata = {
                key: said[key] for key in ("ds_version", "global_steps") if isinstance(said.get(key), (str, int))
            }
        model.containers.append(container)
    return model, metadata


def _check_versions(file: Holder, said: dict[str, Any]) -> None:
    info = dict_of(said.get("universal_checkpoint_info"))
    version = info.get("universal_checkpoint_version", 0)
    if not isinstance(version, (int, float)) or not version <= _VERSION:
        raise UnsupportedError(
            f"{file.path}: is a universal checkpoint of version {shown(version)}; up to {_VERSION} are known; {_AGAIN}"
        )
    zero = dict_of(dict_of(said.get("ds_config")).get("zero_optimization"))
    if zero.get("round_robin_gradients") and zero.get("stage") in (1, 2) and said.get("dp_world_size") != 1:
        raise UnsupportedError(
            f"{file.path}: was trained with round_robin_gradients, of which ds_to_universal.py takes wrong elements "
            f"for most parameters; {_AGAIN}"
        )


def _parameter(file: Holder, name: str, model: _Model) -> StoredTensor:
    """The parameter in a file: as a whole, with its shape or flat."""
    container = Container(file)
    value = container.read_objects()
    keys = dict_of(value)
    if keys:
        other = next((key for key in keys if key not in _SAID), None)
        if other is not None or "param" not in keys:
            raise UnsupportedError(f"{file.path}: says {shown(other)} of its tensor, which is not known; {_AGAIN}")
        value = keys["param"]
    saved = container.tensor(value, name)
    if saved is None:
        raise ParseError(f"{file.path}: holds no tensor")
    said = sizes_of(model.shapes.get(name))
    if keys:
        if said is not None and model.is_whole and math.prod(said) != math.prod(saved.shape):
            raise ParseError(
                f"{file.path}: has the shape {saved.shape}; the trainer's parameter {shown(name)} has {said}"
            )
    elif said is None or not model.is_whole:
        raise UnsupportedError(
            f"{file.path}: is flat, and no *_model_states.pt beside zero says its shape as a whole; copy those "
            "that lie in the folder that it was made from"
        )
    else:
        shape = checked_shape(said, saved.dtype.bits, name, file.path)
        if len(saved.shape) != 1 or saved.strides != (1,) or saved.shape[0] != math.prod(shape):
            raise ParseError(
                f"{file.path}: has the shape {saved.shape}; the trainer's parameter {shown(name)} has {shape}"
            )
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        saved = saved._replace(shape=shape, strides=tuple(strides))
    return _stored(container, saved, name)


def _stored(container: Container, saved: SavedTensor, name: str) -> StoredTensor:
    return StoredTensor(name, saved.dtype, saved.shape, (container.piece(saved, name, whole_box(saved.shape)),))


def _others(found: dict[str, StoredTensor], unreadable: dict[str, str], model: _Model) -> None:
    """Add what the optimizer does not hold: further names of parameters, frozen parameters, buffers."""
    for alias, name in model.tied.items():
        if name in found and alias not in model.shapes:
            owner = found[name]
            checked_name(alias, model.containers[0].file.path)
            found[alias] = StoredTensor(alias, owner.known_dtype, owner.shape, owner.pieces, alias_of=name)
    for name, value in model.module.items():
        if name in found or name in unreadable:
            continue
        container = model.containers[0]
        where = f"{container.file.path}: {shown(checked_name(name, container.file.path))}"
        if name in model.frozen and not _is_held(container, value, name):
            unreadable[name] = f"{where} is not read: it is frozen, and each rank has a part of its elements; {_AGAIN}"
        elif not model.is_whole:
            unreadable[name] = (
                f"{where} is not read: no optimizer holds it, and nothing says how {len(model.containers)} "
                "model-parallel ranks cut it"
            )
        elif not _is_held(container, value, name):
            unreadable[name] = f"{where} is not read: its elements are in no file; it may be tied to another parameter"
        else:
            try:
                saved = container.tensor(value, name)
            except UnsupportedError as error:
                unreadable[name] = str(error)
                continue
            if saved is not None:
                found[name] = _stored(container, saved, name)


def _is_held(container: Container, value: Any, name: str) -> bool:
    """Return whether the elements of a value are there: with stage 3 a tensor without any stands for each parameter."""
    try:
        saved = container.tensor(value, name)
    except UnsupportedError:
        return True
    return saved is None or saved.shape != (0,)
