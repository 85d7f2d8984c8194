"""PyTorch's distributed checkpoints: a `.metadata` that lists chunks, and `.distcp` files that hold them.

The index says for each tensor its whole shape and its chunks, and for each chunk a stretch of a file, which is a
container of `torch.save` with that chunk alone. Where the elements lie in it is looked up when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._dtypes import Dtype
from ...errors import ParseError
from ..boxes import Bounds, Extent
from ..coverage import tile
from ..files import DataFile
from ..protocol import ListedPieces, Piece, StoredCheckpoint, StoredObject, StoredTensor
from ..text import box_text, checked_name, checked_shape, shorten, stays_inside
from .pickles import Record, dtype_of_global, read_strict, sizes_of, state_of
from .tensors import Container

__all__ = ["open_form"]

#: The attributes of the index that mean something; planners put others beside them.
_ATTRIBUTES = ("state_dict_metadata", "storage_data", "storage_meta", "version")
_MAX_INDEX = 1 << 31
_MAX_OBJECT = 1 << 30


class _Item(NamedTuple):
    """A stretch of a file."""

    file: str
    offset: int
    length: int


def open_form(path: Path) -> StoredCheckpoint:
    """Open the folder, or its `.metadata`."""
    folder = path if path.is_dir() else path.parent
    return open_folder(folder, "dcp", {})


def open_folder(folder: Path, form: str, metadata: Mapping[str, Any]) -> StoredCheckpoint:
    """Open a folder with a `.metadata` as a checkpoint of this form."""
    index = _Index(folder)
    files: dict[str, DataFile] = {}
    try:
        for name in sorted({item.file for items in index.items.values() for item in items.values()}):
            try:
                files[name] = DataFile(folder / name)
            except FileNotFoundError:
                raise ParseError(f"{index.path}: names the file {shorten(name)}, which does not exist") from None
        index.check_items(files)
        tensors = {name: index.tensor(name, entry, files) for name, entry in index.tensors.items()}
        objects = {name: index.object(name, files) for name in index.objects}
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return StoredCheckpoint(
        folder, form, tensors, list(files.values()), metadata={**metadata, **index.metadata}, objects=objects
    )


class _Index:
    """The `.metadata` of a folder, checked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".metadata"
        file = DataFile(self.path)
        try:
            if file.size > _MAX_INDEX:
                raise self.error(f"an index of {file.size} bytes; at most {_MAX_INDEX} are read")
            root = read_strict(file.read(0, file.size), self.path, attributes=_ATTRIBUTES)
        finally:
            file.close()
        state = state_of(root, "Metadata")
        entries = None if state is None else state.get("state_dict_metadata")
        if state is None or not isinstance(entries, dict):
            raise self.error("not the Metadata of a distributed checkpoint")
        self.tensors: dict[str, dict[str, Any]] = {}
        self.objects: list[str] = []
        for name, entry in entries.items():
            checked_name(name, self.path)
            tensor = state_of(entry, "TensorStorageMetadata")
            if tensor is not None:
                self.tensors[name] = tensor
            elif state_of(entry, "BytesStorageMetadata") is not None:
                self.objects.append(name)
            else:
                raise self.error(f"{shorten(name)} is neither a tensor nor an object")
        self.items = self._items(state.get("storage_data"))
        self.metadata = {
            key: value
            for key, value in (("version", state.get("version")), ("planner_data", state.get("planner_data")))
            if isinstance(value, (str, dict))
        }

    def error(self, problem: str) -> ParseError:
        return ParseError(f"{self.path}: {problem}")

    def _items(self, value: Any) -> dict[str, dict[tuple[int, ...] | None, _Item]]:
        """The stretches by name and by the offsets of the chunk; None for an object."""
        pairs = value.items if isinstance(value, Record) and value.name == "dict" else None
        if pairs is None:
            if value == {}:
                return {}
            raise self.error("storage_data is not a dict of chunks")
        items: dict[str, dict[tuple[int, ...] | None, _Item]] = {}
        files: dict[str, str] = {}
        for key, info in pairs:
            index, place = state_of(key, "MetadataIndex"), state_of(info, "_StorageInfo")
            if index is None or place is None:
                raise self.error("storage_data holds what is not a chunk and its place")
            name, offset = index.get("fqn"), index.get("offset")
            start = None if offset is None else sizes_of(offset)
            file, at, length = place.get("relative_path"), place.get("offset"), place.get("length")
            if not isinstance(name, str) or (offset is not None and start is None) or not isinstance(file, str):
                raise self.error("storage_data holds what is not a chunk and its place")
            if type(at) is not int or type(length) is not int or at < 0 or length < 0:
                raise self.error(f"{shorten(name)}: a chunk of {shorten(length)} bytes at {shorten(at)}")
            if place.get("transform_descriptors"):
                what = shorten(place["transform_descriptors"])
                raise self.error(
                    f"{shorten(name)} is transformed by {what}, which is not read; save it without extensions"
                )
            if file not in files:
                if not stays_inside(file):
                    raise self.error(f"names the file {shorten(file)}, outside of its own folder")
                files[file] = file
            chunks = items.setdefault(name, {})
            if start in chunks:
                raise self.error(f"{shorten(name)}: two places for the chunk at {start}")
            chunks[start] = _Item(files[file], at, length)
        return items

    def check_items(self, files: Mapping[str, DataFile]) -> None:
        """Check that every stretch lies in its file, and that no two share bytes."""
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for name, chunks in self.items.items():
            for item in chunks.values():
                by_file.setdefault(item.file, []).append((item.offset, item.length, name))
        for path, items in by_file.items():
            size, end = files[path].size, 0
            for offset, length, name in sorted(items):
                if offset + length > size:
                    raise self.error(
                        f"{shorten(name)} is at bytes {offset} to {offset + length} of {path}, which has {size} bytes"
                    )
                if offset < end:
                    raise self.error(f"{shorten(name)} at byte {offset} of {path} overlaps what lies before it")
                end = offset + length

    def tensor(self, name: str, entry: Mapping[str, Any], files: Mapping[str, DataFile]) -> StoredTensor:
        dtype = _dtype(entry.get("properties"))
        if dtype is None:
            raise self.error(f"tensor {shorten(name)}: its dtype is not one that is read")
        shape = checked_shape(sizes_of(entry.get("size")), dtype.bits, name, self.path)
        chunks, items = entry.get("chunks"), self.items.get(name, {})
        if not isinstance(chunks, list):
            raise self.error(f"tensor {shorten(name)}: has no list of chunks")
        boxes = np.empty((len(chunks), len(shape), 2), np.int64)
        found = []
        try:
            for position, chunk in enumerate(chunks):
                state = state_of(chunk, "ChunkStorageMetadata")
                if state is None:
                    raise ValueError("a chunk that is none")
                offsets, sizes = sizes_of(state.get("offsets")), sizes_of(state.get("sizes"))
                if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                    raise ValueError(f"a chunk of {shorten(sizes)} at {shorten(offsets)} in the shape {shape}")
                boxes[position, :, 0] = offsets
                boxes[position, :, 1] = [start + size for start, size in zip(offsets, sizes, strict=True)]
                item = items.get(offsets)
                if item is None and 0 not in sizes:
                    raise ValueError(f"storage_data has no place for the chunk at {offsets}")
                found.append(item)
        except (ValueError, OverflowError) as error:
            raise self.error(f"tensor {shorten(name)}: {error}") from None

        def where(position: int) -> str:
            item = found[position]
            return "no file" if item is None else item.file

        kept, replicas = tile(name, shape, boxes, where, self.path)
        places = [found[position] for position in kept]
        make = partial(_piece, name, dtype, files, places)
        again = ListedPieces(boxes[replicas], partial(_piece, name, dtype, files, [found[at] for at in replicas]))
        return StoredTensor(name, dtype, shape, ListedPieces(boxes[kept], make), replicas=again)

    def object(self, name: str, files: Mapping[str, DataFile]) -> StoredObject:
        item = self.items.get(name, {}).get(None)
        if item is None:
            raise self.error(f"storage_data has no place for the object {shorten(name)}")
        return StoredObject(name, partial(_load, files[item.file], item))


def _dtype(properties: Any) -> Dtype | None:
    """The dtype in a TensorProperties, whose state is a tuple; its length differs between versions."""
    if not isinstance(properties, Record) or not properties.name.endswith(".TensorProperties"):
        return None
    state = properties.state
    if isinstance(state, dict):
        return dtype_of_global(state.get("dtype"))
    return dtype_of_global(state[0]) if isinstance(state, tuple) and state else None


def _piece(
    name: str, dtype: Dtype, files: Mapping[str, DataFile], places: list[_Item | None], position: int, box: Bounds
) -> Piece:
    item = places[position]
    if item is None:
        raise ParseError(f"tensor {shorten(name)}: no file holds the chunk {box_text(box)}")
    return Piece(
        box, files[item.file].path, key=f"@{item.offset}", locate=partial(_locate, name, dtype, files, item, box)
    )


def _locate(name: str, dtype: Dtype, files: Mapping[str, DataFile], item: _Item, box: Bounds) -> Extent:
    file = files[item.file]
    container = Container(file, item.offset, item.length)
    tensor = container.tensor(container.read(), name)
    sizes = tuple(stop - start for start, stop in box)
    if tensor is None or tensor.shape != sizes or tensor.dtype != dtype:
        held = "no tensor" if tensor is None else f"{tensor.dtype.name} of shape {tensor.shape}"
        raise ParseError(
            f"{file.path}: byte {item.offset}: holds {held}, where .metadata says that it is the chunk "
            f"{box_text(box)} of {shorten(name)}, {dtype.name} of shape {sizes}"
        )
    return container.extent(tensor, name)


def _load(file: DataFile, item: _Item) -> Any:
    if item.length > _MAX_OBJECT:
        raise ParseError(
            f"{file.path}: byte {item.offset}: an object of {item.length} bytes; at most {_MAX_OBJECT} are read"
        )
    return Container(file, item.offset, item.length).read_objects()
