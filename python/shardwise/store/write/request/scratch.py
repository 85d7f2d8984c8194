"""Tensors that cannot be copied from the source as they are: converted or decoded into a temporary file first."""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...._atomic import naming_file
from ...._boxes import consecutive
from ...._dtypes import Dtype
from ...._text import bytes_text, shown
from ....conversion.assembled import Assembled
from ....conversion.tables import Wanted
from ....errors import LayoutError
from ....partition import Partition
from ....piece import sides_of
from ....pieces import NO_PIECES, Bounds, LocatedPiece, Pieces
from ....shared_tiling import SharedTiling
from ...data.boxes import contiguous_strides
from ...data.engine import CopyJob
from ...data.files import DataFile, status_of
from ...data.location import Location
from ...rewritten.convert import Overflow, converted_values, is_converted, lost_text
from ...rewritten.wanted import wanted_stored
from ...tensors.stored import StoredTensor
from ..places import ScratchFolder
from ..places.fetch import compare_replicas, fetched_box

__all__ = ["ScratchFile", "opened_scratch"]

#: The bytes of memory per element, for a tensor in which each element is a piece by itself.
_PER_ELEMENT = 512
#: The modification time that the file gets, 1 January 1980: a resumed run makes the file again, and its plan, which
#: states the times of all sources, must be the same.
_TIME = 315_532_800 * 10**9


def _identity(tensor: StoredTensor, kept: Dtype) -> Any:
    """Return a key that is equal for tied tensors: those with the same stored pieces and the same new dtype."""
    if tensor.is_addressable:
        return wanted_stored("", tensor, None).identity, kept.name
    return id(tensor.pieces), kept.name


def _kept(tensor: StoredTensor, dtype: Dtype | None) -> Dtype:
    """Return the dtype in which a tensor is written."""
    return dtype if dtype is not None and is_converted(tensor, dtype) else tensor.known_dtype


class _GrowingFile(DataFile):
    """A file to which tensors are added, and which can be read before it is finished."""

    def __init__(self, path: Path) -> None:
        with naming_file(path):
            self._stream = path.open("wb", buffering=2**20)
        self._digest: Any = hashlib.sha256()
        super().__init__(path)

    def add(self, blocks: Iterable[np.ndarray[Any, Any]]) -> int:
        """Append the elements of arrays, and return the byte at which they begin."""
        begin = self.size
        with naming_file(self.path):
            for values in blocks:
                data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                self._stream.write(data)
                self._digest.update(data)
            self._stream.flush()
            self._note(self._stream.fileno())
        return begin

    def fill(self, shape: tuple[int, ...], itemsize: int, boxes: Iterable[tuple[Bounds, np.ndarray[Any, Any]]]) -> int:
        """Append a tensor given as boxes in any order, the rest zeros, and return the byte at which it begins."""
        begin = self.size
        strides = contiguous_strides(shape, itemsize)
        with naming_file(self.path):
            # Not the stream's own, which is not repeated when a signal interrupts it.
            os.ftruncate(self._stream.fileno(), begin + math.prod(shape) * itemsize)
            self._stream.seek(0, os.SEEK_END)
            self._note(self._stream.fileno())
        self._digest.update(repr(shape).encode())
        for box, values in boxes:
            job = CopyJob()
            at = begin + sum(map(operator.mul, (start for start, _ in box), strides))
            source = LocatedPiece(box, job.read_array(values), 0, values.strides)
            target = LocatedPiece(box, job.fill_file(self.path, self.size), at, strides)
            job.add_tensor(shape, itemsize, [source], [target], digest=True)
            # Where it is, and what it is: the same file is made of the same source only.
            self._digest.update(repr((box, job.run().digests)).encode())
            self._note(self._stream.fileno())
        return begin

    def finish(self) -> None:
        """Name the file by a digest of its contents, and set its fixed modification time."""
        path = self.path.with_name(f"{self._digest.hexdigest()}.bin")
        self._digest = None
        with naming_file(self.path):
            self._stream.close()
            self._descriptor.end()  # It is opened again when it is read.
            os.utime(self.path, ns=(_TIME, _TIME))
            self.path = self.path.rename(path)
            with path.open("rb") as stream:
                self._note(stream.fileno())

    @property
    def times(self) -> tuple[int, int | None]:
        """Return the fixed modification time, and no change time."""
        return self.status[3], None

    def check(self) -> None:
        """Raise ParseError if the file changed after it was finished."""
        if self._digest is None:
            super().check()

    def close(self) -> None:
        """Close the file, once all reads of it are done."""
        with suppress(OSError):  # It writes what is left, for which there may be no room.
            self._stream.close()
        super().close()

    def _note(self, number: int) -> None:
        status = os.fstat(number)
        self.status = status_of(status)
        self.size = status.st_size


class ScratchFile:
    """A temporary file for tensors that must be converted first; beside the destination, or elsewhere for a store.

    Args:
        target: The destination.
        is_dry: Whether to write nothing: the tensors then have no values, and `nbytes` is the size that would be
            written.
        overflow: What happens to values beyond the range of the dtype that they are converted to.

    Attributes:
        warnings: For each tensor with such values, a sentence with their number.
    """

    def __init__(self, target: Location, *, is_dry: bool = False, overflow: Overflow = "refuse") -> None:
        self._folder = ScratchFolder(target)
        self._overflow = overflow
        self.warnings: list[str] = []
        self.is_dry = is_dry
        #: Bytes of all tensors in the file.
        self.nbytes = 0
        self._file: _GrowingFile | None = None
        #: The tensors in the file, by the identity of their elements.
        self._known: dict[Any, Wanted] = {}

    def tensor(
        self,
        name: str,
        tensor: StoredTensor,
        dtype: Dtype | None,
        partition: Partition | SharedTiling | None,
        memory: int,
        *,
        compare: bool = False,
    ) -> Wanted:
        """Write a tensor whole, converted if necessary, and return it as a tensor of this file; tied ones once.

        With `compare`, pieces that are stored more than once are compared as they are stored: values that differ may
        be equal once converted.
        """
        kept = _kept(tensor, dtype)
        identity = _identity(tensor, kept)
        itemsize = kept.bits // 8
        if tensor.is_addressable:
            _rows_of(tensor, memory)
        else:
            tensor.check_decodable(memory, itemsize if kept != tensor.known_dtype else 0)
        if identity not in self._known:
            if tensor.is_addressable or not tensor.size:
                replicas = wanted_stored(name, tensor, None).replicas if compare and tensor.replicas else NO_PIECES
                blocks = self._converted(name, tensor, kept, memory, replicas)
                made = self._written(name, tensor.shape, kept, blocks)
            else:
                self.nbytes += math.prod(tensor.shape) * itemsize
                boxes = self._decoded(name, tensor, kept, memory)
                blank = _blank(tensor.shape, itemsize), 0
                place = blank if self.is_dry else self._placed(lambda file: file.fill(tensor.shape, itemsize, boxes))
                made = _lying(name, tensor.shape, kept, *place)
            self._known[identity] = replace(made, identity=identity)
        return replace(self._known[identity], name=name, partition=partition)

    def assembled(
        self, name: str, tensor: Assembled, partition: Partition | SharedTiling | None, memory: int
    ) -> Wanted:
        """Write a tensor whose pieces are too many and too short to be copied; return it as a tensor of this file."""
        identity = tensor.identity()
        if identity not in self._known:
            itemsize = tensor.dtype.bits // 8
            boxes = map(sides_of, consecutive(tensor.shape, max(memory // _PER_ELEMENT, 1)))
            blocks = (fetched_box(tensor.pieces_in(box).pieces, box, itemsize) for box in boxes)
            made = self._written(name, tensor.shape, tensor.dtype, blocks)
            # Still compared one by one: nothing else would find replicas that disagree.
            replicas = NO_PIECES if self.is_dry else tensor.replicas()
            self._known[identity] = replace(made, replicas=replicas, identity=identity)
        return replace(self._known[identity], name=name, partition=partition)

    def _written(
        self, name: str, shape: tuple[int, ...], dtype: Dtype, blocks: Iterable[np.ndarray[Any, Any]]
    ) -> Wanted:
        if 0 in shape:
            # It has no bytes, and may be of sizes that no array has.
            return Wanted(name, dtype, shape, NO_PIECES)
        itemsize = dtype.bits // 8
        self.nbytes += math.prod(shape) * itemsize
        place = (_blank(shape, itemsize), 0) if self.is_dry else self._placed(lambda file: file.add(blocks))
        return _lying(name, shape, dtype, *place)

    def _placed(self, write: Callable[[_GrowingFile], int]) -> tuple[DataFile, int]:
        """Call a function that adds a tensor to the file; return the file, and the byte at which the tensor begins."""
        if self._file is None:
            self._file = _GrowingFile(self._folder.folder() / "making.bin")
        return self._file, write(self._file)

    def _converted(
        self, name: str, tensor: StoredTensor, dtype: Dtype, memory: int, replicas: Pieces
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the elements of a tensor that is stored as plain bytes, in their order, in this dtype."""
        with self._converting(name, dtype) as convert:
            for block in _blocks(tensor, memory):
                values = tensor.read(block)
                box = tuple((side.start, side.stop) for side in block)
                compare_replicas(name, tensor.shape, replicas, box, values)
                yield convert(values, 1)

    def _decoded(
        self, name: str, tensor: StoredTensor, dtype: Dtype, memory: int
    ) -> Iterator[tuple[Bounds, np.ndarray[Any, Any]]]:
        """Yield boxes of a tensor whose stored chunks must be decoded, in this dtype; chunks of zeros are left out."""
        with self._converting(name, dtype) as convert:
            for piece in tensor.pieces:
                fill = piece.rest if piece.fill is None else piece.fill
                if fill is not None and any(fill.tobytes()):  # Before what is stored, which may lie within.
                    sizes = [stop - start for start, stop in piece.bounds]
                    yield piece.bounds, np.broadcast_to(convert(fill, math.prod(sizes)), sizes)
            for box, values in tensor.decoded(memory):
                yield box, convert(np.asarray(values), 1)

    @contextmanager
    def _converting(
        self, name: str, dtype: Dtype
    ) -> Iterator[Callable[[np.ndarray[Any, Any], int], np.ndarray[Any, Any]]]:
        """Yield a function that converts values; a warning is noted at the end if values were lost."""
        into = dtype.numpy(f"tensor {shown(name)}")
        lost = 0

        def convert(values: np.ndarray[Any, Any], times: int) -> np.ndarray[Any, Any]:
            nonlocal lost
            if values.dtype != into:
                values, count = converted_values(values, into, self._overflow)
                lost += count * times
            return values

        yield convert
        if lost:
            text = lost_text(name, dtype, lost, self._overflow)
            if self._overflow == "refuse":
                raise LayoutError(text)
            self.warnings.append(text)

    def finish(self) -> None:
        """Finish the file; no tensors can be added afterwards."""
        if self._file is not None:
            self._file.finish()

    def close(self) -> None:
        """Close and remove the file."""
        if self._file is not None:
            self._file.close()
        self._folder.remove()


@contextmanager
def opened_scratch(target: Location, *, is_written: bool, overflow: Overflow) -> Iterator[ScratchFile]:
    """Yield a scratch file for a target, removed at the end.

    Args:
        target: The new checkpoint.
        is_written: Whether it is written now, under its lock: then a file that a killed run has left is removed.
        overflow: What happens to values beyond the range of the dtype that they are converted to.
    """
    if is_written:
        ScratchFolder(target).clear()
    scratch = ScratchFile(target, overflow=overflow)
    try:
        yield scratch
    finally:
        scratch.close()


def _blank(shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.zeros((), f"V{itemsize}"), shape)


def _lying(
    name: str, shape: tuple[int, ...], dtype: Dtype, holder: DataFile | np.ndarray[Any, Any], begin: int
) -> Wanted:
    """Return a tensor that is stored in one piece, in C order."""
    strides = contiguous_strides(shape, dtype.bits // 8)
    piece = LocatedPiece(tuple((0, size) for size in shape), holder, begin, strides)
    return Wanted(name, dtype, shape, Pieces.of([piece] if 0 not in shape else [], len(shape)))


def _blocks(tensor: StoredTensor, memory: int) -> Iterable[tuple[slice, ...]]:
    """Yield boxes of a tensor that follow one another in C order, each small enough for the memory."""
    if not tensor.shape:
        yield ()
        return
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    rows = _rows_of(tensor, memory)
    for start in range(0, tensor.shape[0], rows):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)


def _rows_of(tensor: StoredTensor, memory: int) -> int:
    """Return the number of rows of a tensor that are converted at a time.

    Raises:
        LayoutError: if the memory is too small for one row.
    """
    count = tensor.shape[0] if tensor.shape else 1
    row = max(tensor.nbytes // max(count, 1), 1)
    if row * 2 > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)}; a row of tensor {shown(tensor.name)} takes {bytes_text(row)} and must "
            f"be converted in memory: at least {bytes_text(2 * row)} are needed"
        )
    # A block, and its conversion.
    return max(min(memory // (4 * row), count), 1)
