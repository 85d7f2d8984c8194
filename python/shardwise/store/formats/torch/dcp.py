"""PyTorch's distributed checkpoints: a `.metadata` that lists chunks, and `.distcp` files that hold them.

The index states for each tensor its whole shape and its chunks, and for each chunk a range of a file, which is a
container of `torch.save` with only that chunk. The place of the elements in it is looked up when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, starmap
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import Dtype
from ...._text import shown
from ...._types import Numbers
from ....errors import ParseError
from ....pieces import Bounds
from ...data.boxes import Located
from ...data.files import Holder
from ...data.location import Location, open_file, opening
from ...data.text import MAX_DIMS, box_text, checked_name, checked_shape, stays_inside
from ...tensors.checkpoint import Besides, Rest, StoredCheckpoint, StoredObject, StoredSum
from ...tensors.coverage import tile
from ...tensors.lazy import LazyTensors
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece
from .archive import Archive
from .pickles import named_dtype, read_columns
from .tensors import Container

__all__ = ["Contents", "Index", "Row", "open_folder", "open_form", "open_rest"]

#: The attributes of the index that are read; planners add others.
_ATTRIBUTES = ("state_dict_metadata", "storage_data", "storage_meta", "version")
_MAX_INDEX = 1 << 31
_MAX_OBJECT = 1 << 30
_OVERLAPS = "which overlaps what comes before it"
_MAX_BITS = 8 * (2**63 - 1)


def open_form(path: Location) -> StoredCheckpoint:
    """Open a folder, given by its path or that of its `.metadata`."""
    folder = path if path.is_dir() else path.parent
    return open_folder(folder, "dcp", {})


class Contents(NamedTuple):
    """The contents of a checkpoint, without its metadata; see `StoredCheckpoint`.

    Attributes:
        tensors: The tensors by name.
        objects: The values that are not tensors, by name.
        unreadable: For each tensor that cannot be read, the reason.
    """

    tensors: Mapping[str, StoredTensor]
    objects: dict[str, StoredObject]
    unreadable: dict[str, str]


def open_folder(
    folder: Location,
    form: str,
    metadata: Mapping[str, Any],
    complete: Callable[[Index, Contents], Contents] = lambda _, found: found,
) -> StoredCheckpoint:
    """Open a folder with a `.metadata` as a checkpoint of this format.

    `complete` turns the index and its contents into the checkpoint's contents; it may add files to those of the index.
    """
    index = Index(folder)
    try:
        index.open_files()
        objects = {name: index.object(name, place) for name, place in index.objects}
        found = complete(index, Contents(_tensors(index), objects, {}))
    except BaseException:
        for file in index.files:
            file.close()
        raise
    said = {key: value for key, value in index.rest.items() if key in ("version", "planner_data") and value is not None}
    return StoredCheckpoint(
        folder,
        form,
        found.tensors,
        index.files,
        Besides(metadata={**metadata, **said}, objects=found.objects, unreadable=found.unreadable, sums=index.sums),
    )


def open_rest(folder: Location, names: Collection[str]) -> Rest:
    """Open the files with these names, and leave out the elements in others."""
    index = Index(folder)
    opened = {number: open_file(folder / name) for number, name in enumerate(index.names) if name in names}
    pieces: dict[str, list[StoredPiece]] = {}
    items: dict[int, _Item] = {}
    for row in index.tensors:
        name, dtype = row.name, named_dtype(row.dtype)
        boxes = index.boxes(row).tolist()
        for place, sides in zip(index.chunk_places[row.chunks].tolist(), boxes, strict=True):
            file, offset, length = index.places[place].tolist() if place >= 0 else (-1, 0, 0)
            if file not in opened or dtype is None:
                continue
            item = items[place] = _Item(opened[file], offset, length)
            box = tuple((start, stop) for start, stop in sides)
            piece = StoredPiece(box, item.file.path, locate=partial(_locate, name, dtype, item, box))
            pieces.setdefault(name, []).append(piece)
    return Rest(pieces, chain.from_iterable(map(_sums, items.values())), list(opened.values()))


def _sums(item: _Item) -> Iterator[StoredSum]:
    """Yield the CRC-32 of every member of a container, or the reason why it has none."""
    try:
        yield from Archive(*item).sums()
    except ParseError as error:
        yield StoredSum(*item, 0, f"@{item.offset}", error)


class Row(NamedTuple):
    """A tensor of an index.

    Attributes:
        dtype: the name of its dtype.
        first: the position of its first chunk among the chunks of all tensors.
        number: the number of its chunks.
        bounds: the position of the first number of its chunks' boxes in the index's `bounds`.
        is_tiled: whether the chunks are known to tile it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    number: int
    bounds: int
    is_tiled: bool

    @property
    def chunks(self) -> slice:
        """The range of its chunks among those of all tensors."""
        return slice(self.first, self.first + self.number)


class _Item(NamedTuple):
    """A range of a file."""

    file: Holder
    offset: int
    length: int


class Index:
    """The `.metadata` of a folder, in columns; `rust/core/dcp.rs` describes them."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.path = folder / ".metadata"
        file = open_file(self.path)
        try:
            if file.size > _MAX_INDEX:
                raise self.error(f"an index of {file.size} bytes, over the limit of {_MAX_INDEX}")
            columns = read_columns(file.read(0, file.size), self.path, _ATTRIBUTES)
        finally:
            file.close()
        tensors, self.objects, self.bounds, self.chunk_places, places, self.names, self.rest = columns
        self.tensors = list(starmap(Row, tensors))
        self.places: Numbers = places.reshape(-1, 3)
        self.files: list[Holder] = []
        #: Files of `torch.save` that the index does not name; they are in `files` too.
        self.beside: list[Holder] = []
        #: For each place, the number of the first equal one; `None` if all differ.
        self._first: Numbers | None = None

    def error(self, problem: str) -> ParseError:
        """Return the error for a problem of the index, or of the data that it describes."""
        return ParseError(f"{self.path}: {problem}")

    def open_files(self) -> None:
        """Open the files, and check that every range lies in its file and that no two share bytes."""
        outside = next((name for name in self.names if not stays_inside(name)), None)
        if outside is not None:
            raise self.error(f"names the file {shown(outside)}, outside its own folder")
        with opening([self.folder / name for name in self.names]) as (open_next, self.files):
            for name in self.names:
                try:
                    open_next(self.folder / name)
                except FileNotFoundError:
                    raise self.error(f"names the file {shown(name)}, which does not exist") from None
        files, offsets, lengths = self.places.T
        sizes = np.array([file.size for file in self.files], np.int64)[files]
        beyond = np.flatnonzero((offsets > sizes) | (lengths > sizes - np.minimum(offsets, sizes)))
        if len(beyond):
            raise self._wrong_place(beyond[0], f"in a file of {sizes[beyond[0]]} bytes")
        order = np.lexsort((offsets, files))
        ordered = self.places[order]
        ends = ordered[:, 1] + ordered[:, 2]
        again = (ordered[1:, 0] == ordered[:-1, 0]) & (ordered[1:, 1] < ends[:-1])
        same = again & (ordered[1:] == ordered[:-1]).all(axis=1)
        if (again & ~same).any():
            raise self._wrong_place(order[1:][again & ~same][0], _OVERLAPS)
        if same.any():
            # The first of the places that are the same stands for all of them.
            self._first = np.arange(len(self.places))
            starts = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(order))))
            self._first[order] = order[starts]

    def tied(self) -> dict[str, str]:
        """Return the tensors that share all bytes with another, as second names of it; other overlaps are errors."""
        found: dict[str, str] = {}
        if self._first is None:
            return found
        owners: dict[int, tuple[Any, ...]] = {}
        claimed: set[int] = set()
        for row in self.tensors:
            name, count = row.name, row.number
            held = self.chunk_places[row.chunks]
            held = held[held >= 0]  # Chunks that no file holds are refused when they are read.
            places = self._first[held].tolist()
            said = (row.dtype, row.shape, places, self.boxes(row).tobytes())
            owner = owners.get(places[0]) if len(places) == count > 0 else None
            if owner is not None and owner[1:] == said:
                found[name] = owner[0]
                continue
            for place, mine in zip(places, held, strict=True):
                if place in claimed:
                    raise self._wrong_place(mine, _OVERLAPS)
                claimed.add(place)
            owners |= {places[0]: (name, *said)} if places else {}
        for _, place in self.objects:
            if self._first[place] != place or int(place) in claimed:
                raise self._wrong_place(place, _OVERLAPS)
        return found

    def _wrong_place(self, place: np.int64, problem: str) -> ParseError:
        file, offset, length = self.places[place].tolist()
        name = next((name for name, held in self.objects if held == place), None)
        chunks = np.flatnonzero(self.chunk_places == place)
        for row in self.tensors if len(chunks) else ():
            if row.first <= chunks[0] < row.first + row.number:
                name = row.name
        which = "a value without a name" if name is None else shown(name)
        return self.error(f"{which} is at bytes {offset} to {offset + length} of {shown(self.names[file])}, {problem}")

    def item(self, place: int) -> _Item:
        """Return a range by its number."""
        file, offset, length = self.places[place].tolist()
        return _Item(self.files[file], offset, length)

    def object(self, name: str, place: int) -> StoredObject:
        """Return the value in a range of a file."""
        item = self.item(place)
        return StoredObject(name, partial(_load, item), item)

    def sums(self) -> Iterator[StoredSum]:
        """Yield the CRC-32 of every member of every container, and of the further files."""
        for place in range(len(self.places)):
            if self._first is None or self._first[place] == place:
                yield from _sums(self.item(place))
        for file in self.beside:
            yield from _sums(_Item(file, 0, file.size))

    def check(self, name: str, dtype_name: str, dtype: Dtype | None, shape: tuple[int, ...]) -> Dtype:
        """Check a row's statements about a tensor, except for its chunks; return the dtype, which must be known."""
        checked_name(name, self.path)
        if dtype is None:
            raise self.error(f"tensor {shown(name)}: the dtype {shown(dtype_name)} is not supported")
        if len(shape) > MAX_DIMS or math.prod(shape) * dtype.bits > _MAX_BITS:
            checked_shape(shape, dtype.bits, name, self.path)
        return dtype

    def boxes(self, row: Row) -> Numbers:
        """Return the boxes of a tensor's chunks: int64 of shape (chunks, dims, 2)."""
        rank = len(row.shape)
        boxes: Numbers = self.bounds[row.bounds : row.bounds + 2 * rank * row.number].reshape(row.number, rank, 2)
        return boxes

    def tensor(self, alias_of: str | None, row: Row) -> StoredTensor:
        """Return the tensor that a row of the index describes."""
        name, shape = row.name, row.shape
        dtype = self.check(name, row.dtype, named_dtype(row.dtype), shape)
        if row.is_tiled:
            chunks = _Chunks(self, row, dtype)
            return StoredTensor(name, dtype, shape, chunks, alias_of=alias_of)
        boxes, places = self.boxes(row), self.chunk_places[row.chunks]

        def where(chunk: int) -> str:
            place = int(places[chunk])
            return "no file" if place < 0 else str(self.names[self.places[place, 0]])

        kept, again = (np.array(part, np.int64) for part in tile(name, shape, boxes, where, self.path))
        pieces = ListedPieces(boxes[kept], partial(self._piece, name, dtype, places[kept]))
        replicas = ListedPieces(boxes[again], partial(self._piece, name, dtype, places[again]))
        return StoredTensor(name, dtype, shape, pieces, replicas=replicas, alias_of=alias_of)

    def _piece(self, name: str, dtype: Dtype, places: Numbers, position: int, box: Bounds) -> StoredPiece:
        return self.piece(name, dtype, int(places[position]), box)

    def piece(self, name: str, dtype: Dtype, place: int, box: Bounds) -> StoredPiece:
        """Return the piece of a tensor that is in a range of a file."""
        if place < 0:
            raise self.error(f"tensor {shown(name)}: no file holds the chunk {box_text(box)}")
        item = self.item(place)
        return StoredPiece(box, item.file.path, key=f"@{item.offset}", locate=partial(_locate, name, dtype, item, box))


def _tensors(index: Index) -> LazyTensors[Row]:
    """Return the tensors of an index by name, all of them checked."""
    tied = index.tied()
    rows = {row.name: row for row in index.tensors}
    dtypes = {dtype: named_dtype(dtype) for dtype in {row.dtype for row in index.tensors}}
    checked: dict[str, Dtype] = {}
    made = {}
    for row in index.tensors:
        checked[row.dtype] = index.check(row.name, row.dtype, dtypes[row.dtype], row.shape)
        if not row.is_tiled:  # An error in its boxes is raised now.
            made[row.name] = index.tensor(tied.get(row.name), rows[row.name])
    return LazyTensors(
        rows, lambda row: (checked[row.dtype], row.shape), lambda name, row: index.tensor(tied.get(name), row), made
    )


class _Chunks(ListedPieces):
    """The chunks of one tensor, as a range of the columns."""

    def __init__(self, index: Index, row: Row, dtype: Dtype) -> None:
        self._index, self._row, self._dtype = index, row, dtype

    @property
    def boxes(self) -> Numbers:
        """The boxes: int64 of shape (pieces, dims, 2)."""
        return self._index.boxes(self._row)

    def __len__(self) -> int:
        return self._row.number

    def make(self, position: int, box: Bounds) -> StoredPiece:
        """Return the chunk at a position, which holds this box."""
        place = int(self._index.chunk_places[self._row.first + position])
        return self._index.piece(self._row.name, self._dtype, place, box)


def _locate(name: str, dtype: Dtype, item: _Item, box: Bounds) -> Located:
    container = Container(item.file, item.offset, item.length)
    tensor = container.tensor(container.read(), name)
    sizes = tuple(stop - start for start, stop in box)
    if tensor is None or tensor.shape != sizes or tensor.dtype != dtype:
        held = "no tensor" if tensor is None else f"{tensor.dtype.name} of shape {tensor.shape}"
        raise ParseError(
            f"{item.file.path}: byte {item.offset}: holds {held}, but .metadata says that it is the chunk "
            f"{box_text(box)} of {shown(name)}, {dtype.name} of shape {sizes}"
        )
    return container.extent(tensor, name)


def _load(item: _Item) -> Any:
    if item.length > _MAX_OBJECT:
        raise ParseError(
            f"{item.file.path}: byte {item.offset}: an object of {item.length} bytes, over the limit of {_MAX_OBJECT}"
        )
    return Container(item.file, item.offset, item.length).read_objects()
