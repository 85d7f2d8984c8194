"""Files of `torch.save`: a state dict in one `.pt` or `.bin`, or in several with an index in Hugging Face's format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...._fork import importing
from ...._text import counted, shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import entries_of, open_file, read_json
from ...data.parts import MODEL_FILES, WHOLE_FILE, check_whole, complete_set
from ...data.text import are_sizes
from ...tensors.checkpoint import StoredCheckpoint
from ...tensors.stored import StoredTensor
from ..safetensors.folder import read_index
from .state_dicts import StateDicts

__all__ = ["open_form"]

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
#: The names of Meta's file of a model on one rank, and of the file that describes the model.
_META, _PARAMS = "consolidated.00.pth", "params.json"


def open_form(path: Path, *, part: bool = False, parameter_names: Sequence[str] | None = None) -> StoredCheckpoint:
    """Open a file (`part` allows a part of a checkpoint), a folder with `pytorch_model.bin`, or its index.

    Files of a training run in a folder are read as well.
    """
    if path.is_dir():
        with importing:
            from .training import with_training_files
        return with_training_files(_opened(path), path, parameter_names)
    return _opened(path, part, parameter_names)


def _opened(path: Path, part: bool = False, parameter_names: Sequence[str] | None = None) -> StoredCheckpoint:
    folder = path if path.is_dir() else path.parent
    weight_map: dict[str, str] | None = None
    if path.is_dir():
        known = (_SINGLE, _INDEX, _META, *MODEL_FILES, WHOLE_FILE)
        path = next((path / name for name in known if (path / name).exists()), path)
    if path == folder:
        names = complete_set(folder, (name for name, _ in entries_of(folder)), ".bin", _INDEX)
    elif path.suffix == ".json":
        weight_map = read_index(path)
        names = sorted(set(weight_map.values()))
    else:
        if not part:
            check_whole(path)
        names = [path.name]
    held = StateDicts()
    files: list[Holder] = []
    try:
        for name in names:
            try:
                files.append(open_file(folder / name))
            except FileNotFoundError:
                if weight_map is None:
                    raise
                raise ParseError(f"{path}: weight_map names the file {shown(name)}, which does not exist") from None
            held.read(files[-1])
        held.name_optimizers(names=parameter_names)
        for tensor, name in (weight_map or {}).items():
            if tensor not in held.unreadable and (
                tensor not in held.tensors or held.tensors[tensor].pieces[0].path.name != Path(name).name
            ):
                raise ParseError(f"{path}: lists {shown(tensor)} in {shown(name)}, which does not hold it")
        if path.name == _META and not part:
            _check_ranks(path, held.tensors)
    except BaseException:
        for file in files:
            file.close()
        raise
    return StoredCheckpoint(path, "torch", held.tensors, files, held.besides(files))


def _check_ranks(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Refuse a file of Meta's that is one rank's part: it has fewer columns of heads than `params.json` states."""
    cut = tensors.get("layers.0.attention.wo.weight")
    if cut is None or cut.ndim != 2 or not (path.parent / _PARAMS).exists():
        return
    said = read_json(path.parent / _PARAMS)
    held = said if isinstance(said, dict) else {}
    sizes: Any = [held.get("n_heads"), held.get("head_dim")] if "head_dim" in held else [held.get("dim")]
    whole = math.prod(sizes) if are_sizes(sizes) else cut.shape[1]
    if whole != cut.shape[1]:
        raise ParseError(
            f"{path}: has {counted(cut.shape[1], 'column')} of {shown(cut.name)}, but by {_PARAMS} the whole has "
            f"{whole}: it is "
            "one rank's part, and the files of the other ranks are missing"
        )
