"""Keras weights: one HDF5 file, or several with a `.weights.json` that says which file holds which group.

Tensors are named after the datasets, `layers/dense/vars/0`: Keras files do not have the names of the variables.
h5py is asked once where each dataset lies; contiguous ones are then read from the file itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._dtypes import DTYPES, Dtype, find_dtype
from .._fork import importing
from ..errors import ParseError
from .boxes import Bounds, Extent, contiguous_strides
from .files import DataFile
from .object_files import open_file
from .protocol import StoredCheckpoint, StoredObject, StoredPiece, StoredTensor, whole_box
from .text import MAX_JSON, checked_name, checked_shape, shorten, stays_inside, strict_json

__all__ = ["open_form"]

_MAX_DEPTH = 100
_INDEX = ".weights.json"
_SINGLE = ".weights.h5"


def open_form(path: Path) -> StoredCheckpoint:
    """Open a file of weights, the index of several, or a folder with either."""
    path = _located(path) if path.is_dir() else path
    weight_map, metadata = _index(path) if path.name.endswith(".json") else ({}, {})
    names = sorted({name for names in weight_map.values() for name in names}) or [path.name]
    files: list[DataFile] = []
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    layers: dict[str, str] = {}
    try:
        for name in names:
            try:
                files.append(open_file(path.parent / name))
            except FileNotFoundError:
                if not weight_map:
                    raise
                raise ParseError(f"{path}: weight_map names the file {shorten(name)}, which does not exist") from None
            _read(files[-1], tensors, objects, layers)
        _check(path, weight_map, metadata, tensors)
    except BaseException:
        for file in files:
            file.close()
        raise
    return StoredCheckpoint(path, "keras", tensors, files, metadata={**metadata, "layers": layers}, objects=objects)


def _located(path: Path) -> Path:
    """The only index in a folder, or the only file if there is no index."""
    for suffix in (_INDEX, _SINGLE):
        found = sorted(path.glob(f"*{suffix}"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found[:3])
            raise ParseError(f"{path}: {len(found)} *{suffix} files ({names}, ...); open one of them")
    raise ParseError(f"{path}: no {_INDEX} and no {_SINGLE} file")


def _index(path: Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Which files hold each group, and the metadata of the index."""
    file = open_file(path)
    try:
        index = strict_json(file.read(0, min(file.size, MAX_JSON + 1)), path)
    finally:
        file.close()
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ParseError(f"{path}: no weight_map from groups to the files that hold them")
    found: dict[str, list[str]] = {}
    for group, names in weight_map.items():
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ParseError(f"{path}: weight_map names no files for {shorten(group)}")
        for name in names:
            if not stays_inside(name):
                raise ParseError(f"{path}: weight_map names the file {shorten(name)}, outside the index's own folder")
        found[group] = names
    metadata = index.get("metadata")
    return found, metadata if isinstance(metadata, dict) else {}


def _check(
    path: Path, weight_map: dict[str, list[str]], metadata: dict[str, Any], tensors: dict[str, StoredTensor]
) -> None:
    """Check that the files hold what the index says."""
    held: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        held.setdefault(f"/{name.rpartition('/')[0]}", set()).add(tensor.pieces[0].path.name)
    for group, names in weight_map.items():
        for name in names:
            if Path(name).name not in held.get(f"/{group.strip('/')}", ()):
                raise ParseError(f"{path}: lists {shorten(group)} in {shorten(name)}, which does not hold any of it")
    total, there = metadata.get("total_size"), sum(tensor.nbytes for tensor in tensors.values())
    if weight_map and isinstance(total, (int, float)) and not isinstance(total, bool) and total != float(there):
        raise ParseError(f"{path}: says that the weights have {total:.0f} bytes, but the files hold {there}")


class _Raw(io.RawIOBase):
    """A data file as h5py reads it, through the one descriptor."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._file.size - self._at))
        self._file.read_into(view[:count], self._at)
        self._at += count
        return count


def _h5py() -> Any:
    try:
        with importing:
            import h5py
    except ImportError:
        message = "Keras weights are HDF5 files, which need h5py: pip install 'shardwise[h5]'"
        raise ImportError(message, name="h5py") from None
    return h5py


def _opened(file: DataFile) -> Any:
    h5py = _h5py()
    try:
        return h5py.File(_Raw(file), "r")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ParseError(f"{file.path}: is not an HDF5 file that can be read: {str(error)[:200]}") from None


class _Dataset(NamedTuple):
    """What is read about a dataset while the file is open.

    Attributes:
        name: Its path in the file.
        shape: Its shape.
        dtype: Its dtype; None if it does not hold numbers.
        offset: Where its elements begin in the file, if they are stored uncompressed and contiguous.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None
    offset: int | None


def _read(
    file: DataFile, tensors: dict[str, StoredTensor], objects: dict[str, StoredObject], layers: dict[str, str]
) -> None:
    with _opened(file) as root:
        try:
            datasets = list(_datasets(root, "", 0, file, layers))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, ParseError):
                raise
            raise ParseError(f"{file.path}: cannot be read as HDF5: {str(error)[:200]}") from None
    file.check()
    for name, shape, dtype, offset in datasets:
        checked_name(name, file.path)
        if name in tensors or name in objects:
            raise ParseError(f"{file.path}: {shorten(name)} is also in another file of the checkpoint")
        if dtype is None:
            objects[name] = StoredObject(name, partial(_value, file, name))
            continue
        checked_shape(shape, dtype.bits, name, file.path)
        box = whole_box(shape)
        if offset is None:
            piece = StoredPiece(box, file.path, key=name, decode=partial(_decoded, file, name, dtype))
        else:
            piece = StoredPiece(box, file.path, key=name, locate=partial(_extent, file, offset, shape, dtype.bits // 8))
        tensors[name] = StoredTensor(name, dtype, shape, (piece,))


def _datasets(group: Any, prefix: str, depth: int, file: DataFile, layers: dict[str, str]) -> Iterator[_Dataset]:
    """The datasets below a group. Links to other places are not followed: a file could name any other file."""
    h5py = _h5py()
    if depth > _MAX_DEPTH:
        raise ParseError(f"{file.path}: groups are nested more than {_MAX_DEPTH} deep")
    called = group.attrs.get("name")
    if isinstance(called, str) and prefix:
        layers[prefix.removesuffix("/")] = called
    for key in group:
        name = f"{prefix}{key}"
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise ParseError(f"{file.path}: {shorten(name)} is a link to another place; links are not followed")
        child = group[key]
        if isinstance(child, h5py.Group):
            yield from _datasets(child, f"{name}/", depth + 1, file, layers)
        elif isinstance(child, h5py.Dataset):
            yield _described(child, name, file)


def _described(dataset: Any, name: str, file: DataFile) -> _Dataset:
    h5py = _h5py()
    shape = tuple(map(int, dataset.shape or ()))
    dtype = _dtype(dataset) if dataset.shape is not None else None
    creation = dataset.id.get_create_plist()
    if creation.get_external_count() or creation.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED, 0):
        raise ParseError(f"{file.path}: {shorten(name)} lies in other files; links to them are not followed")
    offset = None
    if dtype is not None and 0 not in shape and dataset.dtype.byteorder != ">":
        nbytes = int(np.prod(shape, dtype=object)) * dtype.bits // 8
        if creation.get_layout() == h5py.h5d.CONTIGUOUS and dataset.id.get_storage_size() == nbytes:
            offset = dataset.id.get_offset()
        if offset is not None and offset + nbytes > file.size:
            raise ParseError(
                f"{file.path}: {shorten(name)} is at bytes {offset} to {offset + nbytes} of a file of {file.size}"
            )
    return _Dataset(name, shape, dtype, offset)


def _dtype(dataset: Any) -> Dtype | None:
    said = dataset.attrs.get("dtype")
    if said == "bfloat16" and dataset.dtype.itemsize == 2 and dataset.dtype.kind in "Vu":
        return DTYPES["bfloat16"]  # HDF5 has no such type; Keras notes it beside the dataset.
    return find_dtype(dataset.dtype.newbyteorder("="))


def _extent(file: DataFile, offset: int, shape: tuple[int, ...], itemsize: int) -> Extent:
    return Extent(file, offset, contiguous_strides(shape, itemsize))


def _decoded(file: DataFile, name: str, dtype: Dtype, local: Bounds | None) -> npt.NDArray[Any]:
    """Have h5py read a dataset that is compressed, in chunks, or in another byte order."""
    with _opened(file) as root:
        try:
            dataset = root[name]
            box = Ellipsis if local is None else tuple(slice(start, stop) for start, stop in local)
            read: npt.NDArray[Any] = np.asarray(dataset[box])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ParseError(f"{file.path}: {shorten(name)} cannot be read: {str(error)[:200]}") from None
    wanted = dtype.numpy(f"tensor {shorten(name)}")
    return read.view(wanted) if read.dtype.kind == "V" else read.astype(wanted, copy=False)


def _value(file: DataFile, name: str) -> Any:
    with _opened(file) as root:
        try:
            value = root[name][()]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ParseError(f"{file.path}: {shorten(name)} cannot be read: {str(error)[:200]}") from None
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
