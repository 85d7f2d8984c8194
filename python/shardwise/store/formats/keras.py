"""Keras weights: one HDF5 file, or several with a `.weights.json` that says which file holds which group.

Tensors are named after the datasets, `layers/dense/vars/0`: Keras files do not state the names of the variables. h5py
is asked once for the place of each dataset; contiguous ones are then read from the file directly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..._text import shown
from ...errors import ParseError
from ..data.files import Holder
from ..data.location import open_file, read_json
from ..data.parts import check_whole
from ..data.text import stays_inside
from ..tensors.checkpoint import Besides, StoredCheckpoint, StoredObject
from ..tensors.stored import StoredTensor
from .hdf5 import read_datasets

__all__ = ["open_form"]

_INDEX = ".weights.json"
_SINGLE = ".weights.h5"


def open_form(path: Path, *, part: bool = False) -> StoredCheckpoint:
    """Open a file of weights, the index of several files, or a folder with either; `part` allows one of several."""
    path = _located(path) if path.is_dir() else path
    if not part:
        check_whole(path)
    weight_map, metadata = _index(path) if path.name.endswith(".json") else ({}, {})
    names = sorted({name for names in weight_map.values() for name in names}) or [path.name]
    files: list[Holder] = []
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    unreadable: dict[str, str] = {}
    layers: dict[str, str] = {}
    try:
        for name in names:
            try:
                files.append(open_file(path.parent / name))
            except FileNotFoundError:
                if not weight_map:
                    raise
                raise ParseError(f"{path}: weight_map names the file {shown(name)}, which does not exist") from None
            read_datasets(files[-1], tensors, objects, unreadable, layers)
        _check(path, weight_map, metadata, tensors)
    except BaseException:
        for file in files:
            file.close()
        raise
    return StoredCheckpoint(
        path,
        "keras",
        tensors,
        files,
        Besides(metadata={**metadata, "layers": layers}, objects=objects, unreadable=unreadable),
    )


def _located(path: Path) -> Path:
    """Return the only index in a folder; without an index, the only file."""
    for suffix in (_INDEX, _SINGLE):
        found = sorted(path.glob(f"*{suffix}"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found[:3])
            raise ParseError(f"{path}: {len(found)} *{suffix} files ({names}, ...); open one of them")
    raise ParseError(f"{path}: no {_INDEX} and no {_SINGLE} file")


def _index(path: Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the file of each group, and the metadata of the index."""
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ParseError(f"{path}: no weight_map from groups to the files that hold them")
    found: dict[str, list[str]] = {}
    for group, names in weight_map.items():
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ParseError(f"{path}: weight_map names no files for {shown(group)}")
        for name in names:
            if not stays_inside(name):
                raise ParseError(f"{path}: weight_map names the file {shown(name)}, outside the index's own folder")
        found[group] = names
    metadata = index.get("metadata")
    return found, metadata if isinstance(metadata, dict) else {}


def _check(
    path: Path, weight_map: dict[str, list[str]], metadata: dict[str, Any], tensors: dict[str, StoredTensor]
) -> None:
    """Check that the files hold the groups that the index states."""
    held: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        held.setdefault(f"/{name.rpartition('/')[0]}", set()).add(tensor.pieces[0].path.name)
    for group, names in weight_map.items():
        for name in names:
            if Path(name).name not in held.get(f"/{group.strip('/')}", ()):
                raise ParseError(f"{path}: lists {shown(group)} in {shown(name)}, which does not hold any of it")
    total, there = metadata.get("total_size"), sum(tensor.nbytes for tensor in tensors.values())
    if weight_map and isinstance(total, (int, float)) and not isinstance(total, bool) and total != float(there):
        raise ParseError(f"{path}: says that the weights have {total:.0f} bytes, but the files hold {there}")
