"""Files of `torch.save`: a state dict in one `.pt` or `.bin`, or in several with an index in Hugging Face's format."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...._json import MAX_JSON, strict_json
from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import entries_of, open_file
from ...data.parts import check_whole, complete_set
from ...data.text import are_sizes
from ...tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ...tensors.stored import StoredTensor, UnsupportedError, whole_box
from ..safetensors.folder import read_index
from .pickles import Record
from .tensors import Container, SavedTensor, sums_of, value_object

__all__ = ["open_form"]

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
#: Meta's file of a model that is on one rank, and what lies beside it.
_META, _PARAMS = "consolidated.00.pth", "params.json"


def open_form(path: Path, *, part: bool = False) -> StoredCheckpoint:
    """Open a file, which may be a part of a checkpoint; a folder with `pytorch_model.bin`, or its index."""
    folder = path if path.is_dir() else path.parent
    weight_map: dict[str, str] | None = None
    if path.is_dir():
        path = next((path / name for name in (_SINGLE, _INDEX, _META) if (path / name).exists()), path)
    if path == folder:
        names = complete_set(folder, (name for name, _ in entries_of(folder)), ".bin", _INDEX)
    elif path.suffix == ".json":
        weight_map = read_index(path)
        names = sorted(set(weight_map.values()))
    else:
        if not part:
            check_whole(path)
        names = [path.name]
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    unreadable: dict[str, str] = {}
    files: list[Holder] = []
    try:
        for name in names:
            try:
                files.append(open_file(folder / name))
            except FileNotFoundError:
                if weight_map is None:
                    raise
                raise ParseError(f"{path}: weight_map names the file {shown(name)}, which does not exist") from None
            _read(files[-1], tensors, objects, unreadable)
        for tensor, name in (weight_map or {}).items():
            if tensor not in unreadable and (
                tensor not in tensors or tensors[tensor].pieces[0].path.name != Path(name).name
            ):
                raise ParseError(f"{path}: lists {shown(tensor)} in {shown(name)}, which does not hold it")
        if path.name == _META and not part:
            _check_ranks(path, tensors)
    except BaseException:
        for file in files:
            file.close()
        raise
    return StoredCheckpoint(
        path, "torch", tensors, files, Besides(objects=objects, unreadable=unreadable, sums=partial(sums_of, files))
    )


def _read(
    file: Holder, tensors: dict[str, StoredTensor], objects: dict[str, StoredObject], unreadable: dict[str, str]
) -> None:
    container = Container(file)
    owners: dict[str, _Owners] = {}
    for name, value in container.values():
        if name in tensors or name in objects or name in unreadable:
            raise ParseError(f"{file.path}: {shown(name)} is also in another file of the checkpoint")
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
            unreadable[name] = str(error)
            continue
        if tensor is None:
            if not name and isinstance(value, Record):
                raise UnsupportedError(
                    f"{file.path}: holds one object, {shown(value.name)}, which has no meaning here; save a state dict"
                )
            objects[name] = value_object(name, value)
            continue
        owner = owners.setdefault(tensor.storage, _Owners([], [])).of(tensor, name)
        tensors[name] = StoredTensor(
            name,
            tensor.dtype,
            tensor.shape,
            (container.piece(tensor, name, whole_box(tensor.shape)),),
            alias_of=None if owner == name else owner,
        )


def _check_ranks(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Refuse Meta's file of a rank whose columns of heads are fewer than `params.json` says."""
    cut = tensors.get("layers.0.attention.wo.weight")
    if cut is None or cut.ndim != 2 or not (path.parent / _PARAMS).exists():
        return
    file = open_file(path.parent / _PARAMS)
    try:
        said = strict_json(file.read(0, min(file.size, MAX_JSON + 1)), file.path)
    finally:
        file.close()
    held = said if isinstance(said, dict) else {}
    sizes: Any = [held.get("n_heads"), held.get("head_dim")] if "head_dim" in held else [held.get("dim")]
    whole = math.prod(sizes) if are_sizes(sizes) else cut.shape[1]
    if whole != cut.shape[1]:
        raise ParseError(
            f"{path}: has {cut.shape[1]} columns of {shown(cut.name)}, of {whole} by {_PARAMS}: it is what one of "
            "several ranks has, and the files of the others are missing"
        )


class _Owners(NamedTuple):
    """The tensors of a storage that share no byte with one before them: where each begins, in order, and its name.

    Optimizers and recurrent layers keep many tensors side by side in one storage, and these are not tied.
    """

    begins: list[int]
    found: list[tuple[int, str]]

    def of(self, tensor: SavedTensor, name: str) -> str:
        """The first owner that this tensor shares a byte with; it becomes one itself if there is none."""
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
    """The class of a value that is one rank's part of a tensor; None for any other value."""
    args = getattr(value, "args", None)
    if getattr(value, "name", "") == "torch._tensor._rebuild_from_type_v2" and args and len(args) == 4:
        kind = str(getattr(args[1], "name", "")).rpartition(".")[2]
        return kind if kind in ("DTensor", "ShardedTensor") else None
    return None
