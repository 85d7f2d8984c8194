"""Tensors that cannot be copied from the source as they are: converted, decoded, put together in a file beside it."""

from __future__ import annotations

import glob
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..._atomic import naming
from ..._dtypes import Dtype
from ..._text import bytes_text, shown
from ...errors import LayoutError
from ...partition import Partition
from ..boxes import Bounds, contiguous_strides
from ..files import DataFile
from ..objects import ObjectPath
from ..protocol import StoredTensor
from .assembled import Assembled
from .wanted import SourcePiece, Wanted, wanted_stored

__all__ = ["Spool", "is_addressable", "is_converted", "is_float", "opened_spool"]

#: The ending of the name of the folder beside the destination that holds converted tensors.
_SPOOL = ".spool"


def is_addressable(tensor: StoredTensor) -> bool:
    """Whether all its elements are stored in files as they are."""
    return all(piece.is_addressable for piece in tensor.pieces)


def is_converted(tensor: StoredTensor, dtype: Dtype | None) -> bool:
    """Whether it must be converted to another floating-point dtype."""
    return dtype is not None and is_float(tensor._dtype) and tensor.dtype != dtype.name


def is_float(dtype: Dtype) -> bool:
    """Whether it is a floating-point dtype."""
    return "float" in dtype.name


def _identity(tensor: StoredTensor, kept: Dtype) -> Any:
    """Equal for tied tensors, whose pieces lie in the same places and are converted to the same dtype."""
    if is_addressable(tensor):
        return wanted_stored("", tensor, None).identity, kept.name
    return id(tensor.pieces), kept.name


def _kept(tensor: StoredTensor, dtype: Dtype | None) -> Dtype:
    """The dtype that a tensor is written with."""
    return dtype if dtype is not None and is_converted(tensor, dtype) else tensor._dtype


class Spool:
    """A folder beside the destination (for a store, a temporary one), for tensors that are not copied as they are.

    Args:
        target: The destination.
        is_rough: Whether to write nothing: the tensors then have no values, and `nbytes` says what they would take.
    """

    def __init__(self, target: Path, *, is_rough: bool = False) -> None:
        self._target = target
        self.is_rough = is_rough
        #: Bytes of all the tensors.
        self.nbytes = 0
        self._folder: Path | None = None
        self._made: list[DataFile] = []
        #: What was written, by what it is made of.
        self._known: dict[Any, Wanted] = {}

    def tensor(
        self, name: str, tensor: StoredTensor, dtype: Dtype | None, partition: Partition | None, memory: int
    ) -> Wanted:
        """Write the tensor whole, converted if necessary, and give it as a tensor in that file; tied ones once."""
        kept = _kept(tensor, dtype)
        identity = _identity(tensor, kept)
        if identity not in self._known:
            made = self._written(name, tensor.shape, kept, _converted(name, tensor, kept, memory))
            self._known[identity] = replace(made, identity=identity)
        return replace(self._known[identity], name=name, partition=partition)

    def assembled(self, name: str, tensor: Assembled, partition: Partition | None, memory: int) -> Wanted:
        """Put a tensor together in that file, whose pieces are too many and too short to be copied one by one."""
        blocks = (tensor.read(block) for block in _runs(tensor.shape, tensor.dtype.bits // 8, memory // 16))
        made = self._written(name, tensor.shape, tensor.dtype, blocks)
        # Still compared one by one: nothing else would find replicas that disagree.
        return replace(made, replicas=() if self.is_rough else tensor.replicas(), partition=partition)

    def _written(
        self, name: str, shape: tuple[int, ...], dtype: Dtype, blocks: Iterable[np.ndarray[Any, Any]]
    ) -> Wanted:
        itemsize = dtype.bits // 8
        self.nbytes += math.prod(shape) * itemsize
        holder = np.broadcast_to(np.zeros((), f"V{itemsize}"), shape) if self.is_rough else self._file(blocks)
        piece = SourcePiece(tuple((0, size) for size in shape), holder, 0, contiguous_strides(shape, itemsize))
        return Wanted(name, dtype, shape, [piece] if 0 not in shape else [])

    def _file(self, blocks: Iterable[np.ndarray[Any, Any]]) -> DataFile:
        if self._folder is None:
            name_of_folder = f".{self._target.name}."
            beside = None if isinstance(self._target, ObjectPath) else self._target.parent
            self._folder = Path(tempfile.mkdtemp(prefix=name_of_folder, suffix=_SPOOL, dir=beside))
        path = self._folder / f"{len(self._made)}.bin"
        with naming(path), path.open("wb") as stream:
            for values in blocks:
                stream.write(np.ascontiguousarray(values).tobytes())
        file = DataFile(path)
        self._made.append(file)
        return file

    def close(self) -> None:
        """Close and remove what was made."""
        for file in self._made:
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def opened_spool(target: Path) -> Iterator[Spool]:
    """A spool beside the target, removed at the end; leftovers of a killed run are removed too."""
    if not isinstance(target, ObjectPath):
        if not target.parent.is_dir():
            raise FileNotFoundError(2, "the folder for the checkpoint does not exist", str(target.parent))
        for stale in target.parent.glob(f".{glob.escape(target.name)}.*{_SPOOL}"):
            shutil.rmtree(stale, ignore_errors=True)  # Left by a run that was killed.
    spool = Spool(target)
    try:
        yield spool
    finally:
        spool.close()


def _converted(name: str, tensor: StoredTensor, dtype: Dtype, memory: int) -> Iterator[np.ndarray[Any, Any]]:
    """The tensor in the order of its elements, in this dtype."""
    into = dtype.numpy(f"tensor {shown(name)}")
    for block in _blocks(tensor, memory):
        yield tensor.read(block).astype(into, copy=False)


def _blocks(tensor: StoredTensor, memory: int) -> Iterable[tuple[slice, ...]]:
    """Boxes that follow one another in C order, each of which takes only a part of the memory."""
    if not tensor.shape:
        yield ()
        return
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    row = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    # A block, the piece that it is decoded from, and its conversion.
    rows = min(max(memory // (4 * row), 1), tensor.shape[0])
    if row * 2 > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)}; a row of tensor {shown(tensor.name)} takes {bytes_text(row)} and must "
            f"be converted or decoded in memory: at least {bytes_text(2 * row)} are needed"
        )
    for start in range(0, tensor.shape[0], max(rows, 1)):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)


def _runs(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[Bounds]:
    """Boxes that follow one another in C order; none has more bytes than `most`, except single elements."""
    row, dim = itemsize, len(shape)
    while dim and row * shape[dim - 1] <= most:
        dim -= 1
        row *= max(shape[dim], 1)
    rest = tuple((0, size) for size in shape[dim:])
    if dim == 0:
        yield rest
        return
    step = max(most // row, 1)
    for place in np.ndindex(*shape[: dim - 1]):
        for start in range(0, shape[dim - 1], step):
            yield (*((at, at + 1) for at in place), (start, min(start + step, shape[dim - 1])), *rest)
