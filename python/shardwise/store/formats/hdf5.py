"""Datasets of HDF5 files as stored tensors: where their elements or chunks are, and the decoding of their filters."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._dtypes import DTYPES, Dtype, find_dtype
from ..._fork import importing
from ..._text import cut, shown
from ...errors import ParseError
from ...pieces import Bounds
from ..data.boxes import Located, contiguous_strides
from ..data.codecs import decompress
from ..data.files import Holder
from ..data.text import checked_name, checked_shape
from ..tensors.checkpoint import StoredObject
from ..tensors.chunks import ChunkIndex, grid_pieces, overlapping, stored_cells
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import Decoding, StoredPiece, whole_box

__all__ = ["read_datasets"]

_MAX_DEPTH = 100


class _Raw(io.RawIOBase):
    """A file-like object by which h5py reads a data file, through the file's one descriptor."""

    def __init__(self, file: Holder) -> None:
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


def h5py_module() -> Any:
    try:
        with importing:
            import h5py
    except ImportError:
        message = "Keras weights are HDF5 files, which need h5py: pip install 'shardwise[h5]'"
        raise ImportError(message, name="h5py") from None
    return h5py


def _opened(file: Holder) -> Any:
    h5py = h5py_module()
    try:
        return h5py.File(_Raw(file), "r")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ParseError(f"{file.path}: is not an HDF5 file that can be read: {cut(error)}") from None


class _Dataset(NamedTuple):
    """The facts about a dataset that are read while the file is open.

    Attributes:
        name: Its path in the file.
        dtype: Its dtype; `None` if it does not hold numbers.
        stored: The numpy dtype of its elements in the file.
        offset: The byte at which its elements begin in the file, if they are uncompressed and contiguous.
        alias_of: The first name of the same dataset, if this is another.
        chunk: The shape of its chunks, if it has chunks.
        filters: The numbers of the filters that were applied to a chunk, in order.
        chunks: The stored chunks.
        fill: The value of elements that are not stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None
    stored: np.dtype[Any]
    offset: int | None = None
    alias_of: str | None = None
    chunk: tuple[int, ...] | None = None
    filters: tuple[tuple[int, int], ...] = ()
    chunks: Mapping[ChunkIndex, _ChunkBytes] | None = None
    fill: npt.NDArray[Any] | None = None


class _ChunkBytes(NamedTuple):
    """A chunk in the file: its first byte, its size, and a bit for each filter that was not applied."""

    offset: int
    size: int
    left_out: int


#: The filters of HDF5 that are decoded here, in bounded memory; the output of others could be of any size.
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3


def read_datasets(
    file: Holder,
    tensors: dict[str, StoredTensor],
    objects: dict[str, StoredObject],
    unreadable: dict[str, str],
    layers: dict[str, str],
) -> None:
    """Add the datasets of a file to mappings by path: tensors, values of other types, and unreadable ones.

    Args:
        file: An open HDF5 file.
        tensors: Gets the tensors.
        objects: Gets the values.
        unreadable: Gets the reason why a dataset cannot be read.
        layers: Gets the names of groups.

    Raises:
        ParseError: if the file is not HDF5 or damaged, or a name is there already.
        ImportError: if h5py is not installed.
    """
    with _opened(file) as root:
        try:
            seen = {h5py_module().h5o.get_info(root.id).addr: "/"}
            datasets = list(_datasets(root, "", 0, file, layers, seen))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, ParseError):
                raise
            raise ParseError(f"{file.path}: cannot be read as HDF5: {cut(error)}") from None
    file.check()
    shared = overlapping(np.array([*_ranges(datasets)], np.uint64).reshape(-1, 2))
    if shared is not None:
        raise ParseError(f"{file.path}: datasets or their chunks share bytes: byte {shared} of the file")
    for each in datasets:
        name, shape, dtype = each.name, each.shape, each.dtype
        checked_name(name, file.path)
        if name in tensors or name in objects or name in unreadable:
            raise ParseError(f"{file.path}: {shown(name)} is also in another file of the checkpoint")
        if dtype is None:
            objects[name] = StoredObject(name, partial(_value, file, name))
            continue
        checked_shape(shape, dtype.bits, name, file.path)
        unknown = [number for number, _ in each.filters if number not in (_DEFLATE, _SHUFFLE, _FLETCHER32)]
        if unknown:
            unreadable[name] = (
                f"{file.path}: {shown(name)} is stored with HDF5's filter {unknown[0]}, which is not read; "
                "the filters that are read are gzip, shuffle and fletcher32"
            )
            continue
        tensors[name] = _tensor(file, each, dtype)


def _ranges(datasets: Iterable[_Dataset]) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the size of all stored data, to be checked for overlaps."""
    for each in datasets:
        if each.alias_of is None and each.chunks is not None:
            yield from ((one.offset, one.size) for one in each.chunks.values())
        elif each.alias_of is None and each.offset is not None:
            yield each.offset, int(np.prod(each.shape, dtype=object)) * each.stored.itemsize


def _tensor(file: Holder, each: _Dataset, dtype: Dtype) -> StoredTensor:
    name, shape, box = each.name, each.shape, whole_box(each.shape)
    alias = each.alias_of
    if each.chunk is None or each.chunks is None:
        if each.offset is None:
            piece = StoredPiece(box, file.path, key=name, decoding=Decoding(partial(_decoded, file, name, dtype)))
        else:
            locate = partial(_extent, file, each.offset, shape, dtype.bits // 8)
            piece = StoredPiece(box, file.path, key=name, locate=locate)
        # What HDF5 converts, it converts little by little.
        chunk = (1,) * len(shape) if each.offset is None else None
        return StoredTensor(name, dtype, shape, (piece,), alias_of=alias, chunk=chunk)
    is_plain = not each.filters and each.stored.byteorder != ">"

    def make(cell: ChunkIndex, box: Bounds) -> StoredPiece:
        assert each.chunk is not None
        assert each.chunks is not None
        stored = each.chunks[cell]
        if is_plain:
            locate = partial(_extent, file, stored.offset, each.chunk, dtype.bits // 8)
            return StoredPiece(box, file.path, key=name, locate=locate)
        decoded = int(np.prod(each.chunk, dtype=object)), dtype.bits // 8
        decoding = Decoding(partial(_chunk_of, file, each, stored, dtype), decoded)
        return StoredPiece(box, file.path, key=name, decoding=decoding)

    cells = stored_cells(shape, each.chunk, iter(each.chunks))
    pieces = grid_pieces(shape, each.chunk, cells, make, each.fill, file.path)
    return StoredTensor(name, dtype, shape, pieces, alias_of=alias, chunk=None if is_plain else each.chunk)


def _chunk_of(file: Holder, each: _Dataset, stored: _ChunkBytes, dtype: Dtype, local: Bounds) -> npt.NDArray[Any]:
    """Decode a chunk, and return a box of it."""
    assert each.chunk is not None
    where = f"{file.path}: {shown(each.name)}"
    size = int(np.prod(each.chunk, dtype=object)) * each.stored.itemsize
    if stored.size > size + size // 8 + 65536:
        raise ParseError(f"{where}: a chunk has {stored.size} bytes for {size} bytes of elements")
    data: Any = file.read(stored.offset, stored.size)
    file.check()
    for position in reversed(range(len(each.filters))):
        number, parameter = each.filters[position]
        if stored.left_out >> position & 1:
            continue
        if number == _FLETCHER32:
            said = [int.from_bytes(data[-4:-2], "little"), int.from_bytes(data[-2:], "little")]
            if _fletcher32(data[:-4]) != [half % 65535 for half in said]:
                raise ParseError(f"{where}: the checksum of a chunk is wrong")
            data = data[:-4]
        elif number == _DEFLATE:
            inside = sum(4 for other, _ in each.filters[:position] if other == _FLETCHER32)
            data = decompress("zlib", bytes(data), size + inside, where)
        else:
            data = _unshuffled(np.frombuffer(data, np.uint8), parameter or each.stored.itemsize)
    if len(data) != size:
        raise ParseError(f"{where}: a chunk has {len(data)} bytes; {size} were expected")
    elements = np.frombuffer(data, each.stored).reshape(each.chunk)
    inner: Any = (*(slice(start, stop) for start, stop in local), ...)
    part: npt.NDArray[Any] = elements[inner]
    return _as(part, dtype, each.name)


def _unshuffled(data: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.uint8]:
    """Undo the filter that stores the first bytes of all elements, then the second bytes, and so on."""
    count = len(data) // itemsize
    whole = np.ascontiguousarray(data[: count * itemsize].reshape(itemsize, count).T).reshape(-1)
    return np.concatenate([whole, data[count * itemsize :]]) if len(whole) < len(data) else whole


def _fletcher32(data: Any) -> list[int]:
    """Return HDF5's checksum of a chunk, as two numbers below 65,535, from its 16-bit big-endian words."""
    raw = np.frombuffer(data, np.uint8)
    padded = raw if len(raw) % 2 == 0 else np.append(raw, np.uint8(0))
    words, sums = padded.view(">u2"), [0, 0]
    for start in range(0, len(words), 1 << 16):
        part = words[start : start + (1 << 16)].astype(np.uint64)
        count = len(part)
        sums[1] += count * sums[0] + int((part * np.arange(count, 0, -1, dtype=np.uint64)).sum())
        sums[0] += int(part.sum())
    return [each % 65535 for each in sums]


def _datasets(
    group: Any, prefix: str, depth: int, file: Holder, layers: dict[str, str], seen: dict[Any, str]
) -> Iterator[_Dataset]:
    """Yield the datasets below a group, each once per name.

    Links to other places are not followed: a file could name any other file. A group with two names is refused: nested
    groups with two names each would have any number of paths. A dataset with two names is a tied tensor.
    """
    h5py = h5py_module()
    if depth > _MAX_DEPTH:
        raise ParseError(f"{file.path}: groups are nested more than {_MAX_DEPTH} deep")
    called = group.attrs.get("name")
    if isinstance(called, str) and prefix:
        layers[prefix.removesuffix("/")] = called
    for key in group:
        name = f"{prefix}{key}"
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise ParseError(f"{file.path}: {shown(name)} is a link to another place; links are not followed")
        child = group[key]
        place = h5py.h5o.get_info(child.id).addr
        first = seen.setdefault(place, name)
        if isinstance(child, h5py.Group):
            if first != name:
                raise ParseError(
                    f"{file.path}: the group {shown(name)} is {shown(first)} under another name; give it one name"
                )
            yield from _datasets(child, f"{name}/", depth + 1, file, layers, seen)
        elif isinstance(child, h5py.Dataset):
            described = _described(child, name, file)
            yield described if first == name else described._replace(alias_of=first)


def _described(dataset: Any, name: str, file: Holder) -> _Dataset:
    h5py = h5py_module()
    shape = tuple(map(int, dataset.shape or ()))
    dtype = _dtype(dataset) if dataset.shape is not None else None
    creation = dataset.id.get_create_plist()
    if creation.get_external_count() or creation.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED, 0):
        raise ParseError(f"{file.path}: {shown(name)} is in other files; links to them are not followed")
    found = _Dataset(name, shape, dtype, dataset.dtype)
    if dtype is None or 0 in shape:
        return found
    if creation.get_layout() == h5py.h5d.CHUNKED:
        return _chunked(dataset, found, dtype, creation, file)
    nbytes = int(np.prod(shape, dtype=object)) * dtype.bits // 8
    is_written = dataset.id.get_storage_size() == nbytes
    if creation.get_layout() == h5py.h5d.CONTIGUOUS and not is_written:
        # Nothing is stored: one chunk that is not there.
        chunk = tuple(max(size, 1) for size in shape)
        return found._replace(chunk=chunk, chunks={}, fill=_as(np.asarray(dataset.fillvalue), dtype, name))
    if creation.get_layout() == h5py.h5d.CONTIGUOUS and dataset.dtype.byteorder != ">":
        found = found._replace(offset=_within(file, name, dataset.id.get_offset(), nbytes))
    return found


def _within(file: Holder, name: str, offset: Any, size: int) -> int:
    if not isinstance(offset, int) or offset < 0 or offset + size > file.size:
        end = offset + size if isinstance(offset, int) else "?"
        raise ParseError(f"{file.path}: is truncated: {shown(name)} is at bytes {offset} to {end} of {file.size}")
    return offset


def _chunked(dataset: Any, found: _Dataset, dtype: Dtype, creation: Any, file: Holder) -> _Dataset:
    chunk = tuple(map(int, dataset.chunks))
    filters = tuple(_filter_of(creation, number) for number in range(creation.get_nfilters()))
    chunks: dict[ChunkIndex, _ChunkBytes] = {}

    def add(info: Any) -> None:
        cell = tuple(int(at) // step for at, step in zip(info.chunk_offset, chunk, strict=True))
        offset = _within(file, found.name, info.byte_offset, info.size)
        chunks[cell] = _ChunkBytes(offset, info.size, info.filter_mask)

    dataset.id.chunk_iter(add)
    return found._replace(
        chunk=chunk, filters=filters, chunks=chunks, fill=_as(np.asarray(dataset.fillvalue), dtype, found.name)
    )


def _filter_of(creation: Any, number: int) -> tuple[int, int]:
    """Return the number and the first parameter of a filter."""
    kind, _, parameters, _ = creation.get_filter(number)
    return int(kind), int(parameters[0]) if parameters else 0


def _dtype(dataset: Any) -> Dtype | None:
    said = dataset.attrs.get("dtype")
    if said == "bfloat16" and dataset.dtype.itemsize == 2 and dataset.dtype.kind in "Vu":
        return DTYPES["bfloat16"]  # HDF5 has no such type; Keras notes it next to the dataset.
    return find_dtype(dataset.dtype.newbyteorder("="))


def _as(values: npt.NDArray[Any], dtype: Dtype, name: str) -> npt.NDArray[Any]:
    """Return elements that h5py has read, in their own dtype."""
    wanted = dtype.numpy(f"tensor {shown(name)}")
    if values.dtype.kind in "Vu" and values.dtype.itemsize == wanted.itemsize and wanted.kind not in "biufc":
        return values.view(wanted) if values.ndim else values.reshape(1).view(wanted).reshape(())
    return values.view(wanted) if values.dtype.kind == "V" else values.astype(wanted, copy=False)


def _extent(file: Holder, offset: int, shape: tuple[int, ...], itemsize: int) -> Located:
    return (file, offset, contiguous_strides(shape, itemsize))


def _decoded(file: Holder, name: str, dtype: Dtype, local: Bounds) -> npt.NDArray[Any]:
    """Read a dataset by h5py: one of another byte order, or one stored within the file's own tables."""
    with _opened(file) as root:
        try:
            dataset = root[name]
            box = (*(slice(start, stop) for start, stop in local), ...)
            read: npt.NDArray[Any] = np.asarray(dataset[box])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ParseError(f"{file.path}: {shown(name)} cannot be read: {cut(error)}") from None
    return _as(read, dtype, name)


def _value(file: Holder, name: str) -> Any:
    with _opened(file) as root:
        try:
            value = root[name][()]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ParseError(f"{file.path}: {shown(name)} cannot be read: {cut(error)}") from None
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
