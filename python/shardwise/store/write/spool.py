"""A file beside the destination, for tensors that cannot be copied from the source as they are."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..._dtypes import Dtype
from ..._text import bytes_text, shown
from ...errors import LayoutError
from ...partition import Partition
from ..boxes import contiguous_strides
from ..files import DataFile
from ..protocol import StoredTensor
from .wanted import SourcePiece, Wanted

__all__ = ["Spool", "spooling"]

#: What the name of a folder beside the destination ends in that holds what had to be converted.
_SPOOL = ".spool"


class Spool:
    """A file beside the destination, for what cannot be copied from the source as it is."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder: Path | None = None
        self._count = 0
        self._made: list[DataFile] = []

    def tensor(self, name: str, tensor: StoredTensor, kept: Dtype, partition: Partition | None, memory: int) -> Wanted:
        """Write the tensor whole, converted if need be, and give it as one that lies in that file."""
        into = kept.numpy(f"tensor {shown(name)}")
        if self._folder is None:
            name_of_folder = f".{self._target.name}."
            self._folder = Path(tempfile.mkdtemp(prefix=name_of_folder, suffix=_SPOOL, dir=self._target.parent))
        path = self._folder / f"{self._count}.bin"
        self._count += 1
        with path.open("wb") as stream:
            for block in _blocks(tensor, memory):
                values = tensor.read(block)
                stream.write(np.ascontiguousarray(values.astype(into, copy=False)).tobytes())
        file = DataFile(path)
        self._made.append(file)
        shape = tensor.shape
        piece = SourcePiece(tuple((0, size) for size in shape), file, 0, contiguous_strides(shape, kept.bits // 8))
        return Wanted(name, kept, shape, [piece] if tensor.size else [], (), partition, None)

    def close(self) -> None:
        """Remove it."""
        for file in self._made:
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def spooling(target: Path) -> Iterator[Spool]:
    """Give a spool for a destination, which is removed at the end of the body.

    Raises:
        FileNotFoundError: if the folder that is to hold the destination is not there.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "the folder that is to hold the checkpoint is not there", str(target.parent))
    for stale in target.parent.glob(f".{glob.escape(target.name)}.*{_SPOOL}"):
        shutil.rmtree(stale, ignore_errors=True)  # Of a run that was killed.
    spool = Spool(target)
    try:
        yield spool
    finally:
        spool.close()


def _blocks(tensor: StoredTensor, memory: int) -> Iterable[tuple[slice, ...]]:
    """Boxes that follow one another in C order, each of which takes no more than a part of the memory."""
    if not tensor.shape:
        yield ()
        return
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    row = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    # A block, the piece that it is decoded from, and its conversion.
    rows = min(max(memory // (4 * row), 1), tensor.shape[0])
    if row * 2 > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)}; a row of tensor {shown(tensor.name)} takes {bytes_text(row)}, which has "
            f"to be converted or decoded in memory: at least {bytes_text(2 * row)} are needed"
        )
    for start in range(0, tensor.shape[0], max(rows, 1)):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)
