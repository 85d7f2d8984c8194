"""Zarr arrays, versions 2 and 3, as stored tensors whose pieces are chunks."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...._boxes import positions
from ...._core import crc32c
from ...._json import strict_json
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.boxes import Located, contiguous_strides
from ...data.codecs import decompress
from ...data.location import Location
from ...tensors.chunks import ChunkIndex, grid_pieces, missing_cell, overlapping, stored_cells
from ...tensors.stored import StoredTensor, UnsupportedError
from ...tensors.stored_pieces import Decoding, StoredPiece
from .keyvalue import KeyValueStore, Value
from .zarr_metadata import MakeError, ZarrArray, array_of_version_2, array_of_version_3

__all__ = ["arrays_of", "read_array"]

_METADATA = {".zarray": 2, "zarr.json": 3}
_MAX_METADATA = 1 << 20
_MISSING = 2**64 - 1
_NUMBERS = re.compile(r"[0-9]{1,19}")
#: The most characters of a chunk's key: of 64 dims, with the letter that may come first.
_LONGEST_KEY = 64 * 20 + 2


def arrays_of(keys: Sequence[str]) -> dict[str, int]:
    """Return the names of the arrays in a store, given its keys, each with the array's zarr version."""
    found: dict[str, int] = {}
    for key in keys:
        name, _, last = key.rpartition("/")
        if last in _METADATA and name:
            found[name] = max(found.get(name, 0), _METADATA[last])
    return found


def read_array(
    store: KeyValueStore, keys: Sequence[str], name: str, version: int, where: str, *, complete: bool
) -> StoredTensor | None:
    """Return an array of a store; `None` for a group of arrays.

    Args:
        store: The store that has the array's keys.
        keys: All keys of the store, sorted.
        name: The array's name in the store.
        version: The version of zarr.
        where: The beginning of messages.
        complete: Whether all chunks must exist; otherwise missing chunks have the fill value.

    Raises:
        UnsupportedError: if its elements are of a kind, or stored in a way, that is not read.
        ParseError: if it does not follow the format, or lacks a chunk.
    """
    key = f"{name}/{'.zarray' if version == 2 else 'zarr.json'}"
    value = store.get(key)
    if value is None:
        return None
    said = strict_json(store.files.read(value, _MAX_METADATA), f"{where}: {shown(key)}")
    if not isinstance(said, dict):
        raise ParseError(f"{where}: {shown(key)} is not a JSON object")
    if version == 3 and said.get("node_type") == "group":
        return None
    error = partial(_error, where, name)
    unsupported = partial(_unsupported, where, name)
    array = (
        array_of_version_2(name, said, error, unsupported)
        if version == 2
        else array_of_version_3(name, said, error, unsupported)
    )
    if complete:
        array = array._replace(fill=None)
    return _tensor(store, keys, array, where, error)


def _unsupported(where: str, name: str, problem: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: array {shown(name)}: {problem}")


def _error(where: str, name: str, problem: str) -> ParseError:
    return ParseError(f"{where}: array {shown(name)}: {problem}")


def _tensor(store: KeyValueStore, keys: Sequence[str], array: ZarrArray, where: str, error: MakeError) -> StoredTensor:
    cells = stored_cells(array.shape, array.chunk, _cells(keys, array))
    missing = missing_cell(array.shape, array.chunk, cells)
    if missing is not None and array.fill is None:
        raise error(f"the chunk {shown(array.key(missing))} is missing")
    fill = None if missing is None else _filled(array)
    pieces = grid_pieces(array.shape, array.chunk, cells, partial(_piece, store, array, where), fill, store.folder)
    chunk = None if _is_plain(array) else array.chunk if array.inner is None else array.inner
    _check_places(store, array, where, cells)
    return StoredTensor(array.name, array.dtype, array.shape, pieces, chunk=chunk)


def _check_places(store: KeyValueStore, array: ZarrArray, where: str, cells: Sequence[ChunkIndex]) -> None:
    """Refuse chunks that share bytes: a short file could otherwise state any number of chunks."""
    held: dict[Location, list[tuple[int, int]]] = {}
    for cell in cells:
        key = array.key(cell)
        value = store.get(key)
        assert value is not None
        if value.inline is None and value.length is not None:
            held.setdefault(value.path, []).append((value.offset, value.length))
        # What must be fetched is looked at when it is read; a damaged index is named when it is.
        if array.inner is not None and (value.inline is not None or not store.files[value.path].is_fetched):
            chunk = _StoredChunk(store, array, f"{where}: {shown(key)}", value, ())
            try:
                index = chunk.load()[0]
            except ParseError:
                continue
            chunk.check(index)
    for path, ranges in held.items():
        at = overlapping(np.array(ranges, np.uint64))
        if at is not None:
            raise ParseError(f"{where}: chunks of the array {shown(array.name)} share bytes: byte {at} of {path}")


def _cells(keys: Sequence[str], array: ZarrArray) -> Iterator[ChunkIndex]:
    """Yield the positions of an array's chunks that exist among the keys of its store."""
    first = f"{array.name}/"
    for at in range(bisect_left(keys, first), bisect_left(keys, f"{array.name}0")):  # The character after the slash.
        rest = keys[at][len(first) :]
        cell = tuple(map(int, _NUMBERS.findall(rest))) if len(rest) <= _LONGEST_KEY else ()
        cell = cell if array.shape else ()
        if len(cell) == len(array.shape) and array.key(cell) == keys[at]:
            yield cell


def _piece(store: KeyValueStore, array: ZarrArray, where: str, cell: ChunkIndex, box: Bounds) -> StoredPiece:
    key = array.key(cell)
    value = store.get(key)
    assert value is not None
    chunk = _StoredChunk(store, array, f"{where}: {shown(key)}", value, box)
    if _is_plain(array) and value.inline is None:
        return StoredPiece(box, value.path, key=key, locate=chunk.locate)
    decoded = math.prod(array.chunk if array.inner is None else array.inner), array.dtype.bits // 8
    if array.inner is None or array.fill is None:
        return StoredPiece(box, value.path, key=key, decoding=Decoding(chunk.read, decoded))
    rest = _filled(array)
    return StoredPiece(box, value.path, key=key, decoding=Decoding(chunk.read, decoded, chunk.stored, rest))


def _is_plain(array: ZarrArray) -> bool:
    """Return whether an array's elements are stored without codecs, in native byte order."""
    return not array.codecs and array.inner is None and (array.stored == "<" or array.dtype.bits == 8)


def _stored(array: ZarrArray) -> np.dtype[Any]:
    """Return the numpy dtype of the elements in a chunk, with their byte order."""
    dtype = array.dtype.numpy()
    return dtype.newbyteorder(">") if array.stored == ">" and dtype.itemsize > 1 else dtype


def _filled(array: ZarrArray) -> npt.NDArray[Any]:
    """Return the fill value, which elements of missing chunks have."""
    assert array.fill is not None
    return np.frombuffer(array.fill, _stored(array)).astype(array.dtype.numpy()).reshape(())


class _StoredChunk:
    """A chunk of an array, and the place of its value in the store."""

    def __init__(self, store: KeyValueStore, array: ZarrArray, where: str, value: Value, box: Bounds) -> None:
        self.store, self.array, self.where, self.value, self.box = store, array, where, value, box
        self._known: tuple[npt.NDArray[np.uint64], int, int] | None = None

    def locate(self) -> Located:
        """Return the place of the elements of an uncompressed chunk."""
        array = self.array
        file, offset, length = self.store.files.range_of(self.value)
        itemsize = array.dtype.bits // 8
        if length != math.prod(array.chunk) * itemsize:
            raise ParseError(f"{self.where}: has {length} bytes; {math.prod(array.chunk) * itemsize} were expected")
        if array.order == "C":
            return (file, offset, contiguous_strides(array.chunk, itemsize))
        return (file, offset, contiguous_strides(array.chunk[::-1], itemsize)[::-1])

    def read(self, bounds: Bounds) -> npt.NDArray[Any]:
        """Decode a box of the chunk, counted from the chunk's beginning."""
        array = self.array
        self.store.files.check_open(self.store.folder)
        shape = tuple(stop - start for start, stop in bounds)
        if array.inner is None:
            whole = self._decoded(self._value(self.value), array.chunk)
            box: Any = (*(slice(start, stop) for start, stop in bounds), ...)
            part: npt.NDArray[Any] = whole[box]
            return part
        return self._from_shard(array.inner, bounds, shape)

    def _value(self, value: Value) -> bytes:
        # Compressed data may be slightly longer than the data.
        most = math.prod(self.array.chunk) * self.array.dtype.bits // 8
        return self.store.files.read(value, most + most // 8 + 65536)

    def _decoded(self, data: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        array = self.array
        size = math.prod(shape) * array.dtype.bits // 8
        for position in reversed(range(len(array.codecs))):
            codec = array.codecs[position]
            if codec == "crc32c":
                if len(data) < 4 or crc32c(bytes(data[:-4])) != int.from_bytes(data[-4:], "little"):
                    raise ParseError(f"{self.where}: the checksum of the chunk is wrong")
                data = data[:-4]
            else:
                # Checksums under a compression are 4 bytes each; another compression can have any length up to this.
                inside = array.codecs[:position]
                expected = size + 4 * inside.count("crc32c")
                if any(other != "crc32c" for other in inside):
                    raise ParseError(f"{self.where}: is compressed twice, which is not supported")
                data = decompress(codec, data, expected, self.where)
        if len(data) != size:
            raise ParseError(f"{self.where}: has {len(data)} bytes; {size} were expected")
        dtype = array.dtype.numpy()
        elements = np.frombuffer(data, _stored(array))
        if array.stored == ">":
            elements = elements.astype(dtype)
        return elements.reshape(shape, order="F" if array.order == "F" else "C")

    def _from_shard(self, inner: tuple[int, ...], bounds: Bounds, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Read those inner chunks of a shard that a box needs."""
        array, value = self.array, self.value
        counts = [outer // size for outer, size in zip(array.chunk, inner, strict=True)]
        index, begin, end = self.index()
        out: npt.NDArray[Any] = np.empty(shape, array.dtype.numpy())
        ranges = [range(start // size, -(-stop // size)) for (start, stop), size in zip(bounds, inner, strict=True)]
        for cell in positions(list(map(len, ranges))):
            at = [side[position] for side, position in zip(ranges, cell, strict=True)]
            number = int(np.ravel_multi_index(at, counts)) if at else 0
            offset, length = int(index[number, 0]), int(index[number, 1])
            source: list[Any] = []
            target: list[Any] = []
            for (start, stop), size, position in zip(bounds, inner, at, strict=True):
                low, high = max(start, position * size), min(stop, (position + 1) * size)
                source.append(slice(low - position * size, high - position * size))
                target.append(slice(low - start, high - start))
            place = (*target, Ellipsis)  # With an ellipsis, so that the result is an array even without dims.
            if (offset, length) == (_MISSING, _MISSING):
                if array.fill is None:
                    raise ParseError(f"{self.where}: its chunk {number} is missing")
                out[place] = _filled(array)
                continue
            if not begin <= offset <= offset + length <= end:
                raise ParseError(f"{self.where}: its chunk {number} is at bytes {offset} to {offset + length} of it")
            data = self._range(value, offset, length)
            out[place] = self._decoded(data, inner)[tuple(source)]
        return out

    def stored(self) -> Iterator[Bounds]:
        """Yield the boxes of a shard's inner chunks that exist, clipped to the tensor."""
        inner = self.array.inner
        assert inner is not None
        counts = [outer // size for outer, size in zip(self.array.chunk, inner, strict=True)]
        index, _, _ = self.index()
        sizes = [stop - start for start, stop in self.box]
        for number in np.flatnonzero((index != _MISSING).any(axis=1)).tolist():
            cell = np.unravel_index(number, counts) if counts else ()
            box = tuple(
                (int(at) * step, min((int(at) + 1) * step, size))
                for at, step, size in zip(cell, inner, sizes, strict=True)
            )
            if all(start < stop for start, stop in box):
                yield box

    def _range(self, value: Value, offset: int, length: int) -> bytes:
        if value.inline is not None:
            return value.inline[offset : offset + length]
        file, start, _ = self.store.files.range_of(value)
        return file.read(start + offset, length)

    def index(self) -> tuple[npt.NDArray[np.uint64], int, int]:
        """Return the offsets and sizes of a shard's inner chunks, and the range of bytes that they must be in.

        Raises:
            ParseError: if the index is damaged, or chunks share bytes.
        """
        if self._known is None:
            found = self.load()
            self.check(found[0])
            self._known = found
        return self._known

    def check(self, index: npt.NDArray[np.uint64]) -> None:
        """Refuse, with ParseError, inner chunks of a shard that share bytes."""
        at = overlapping(index[(index != _MISSING).any(axis=1)])
        if at is not None:
            raise ParseError(f"{self.where}: chunks of the shard share bytes: byte {at} of it")

    def load(self) -> tuple[npt.NDArray[np.uint64], int, int]:
        """Read the index of a shard."""
        value = self.value
        assert self.array.inner is not None
        count = math.prod(self.array.chunk) // math.prod(self.array.inner)
        size = 16 * count + 4 * self.array.index_checked
        length = len(value.inline) if value.inline is not None else self.store.files.range_of(value)[2]
        if length < size:
            raise ParseError(f"{self.where}: a shard of {length} bytes with an index of {size}")
        data = self._range(value, 0 if self.array.index_first else length - size, size)
        if self.array.index_checked:
            if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
                raise ParseError(f"{self.where}: the checksum of the shard's index is wrong")
            data = data[:-4]
        index = np.frombuffer(data, "<u8").reshape(count, 2)
        return (index, size, length) if self.array.index_first else (index, 0, length - size)
