"""Boxes of tensors put together in memory, from files, objects and arrays, with their digests."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....errors import ParseError
from ...boxes import Bounds, Extent, read_extent
from ...engine import CopyJob, HeldPiece
from ...files import DataFile
from ...mapped import MappedFiles
from ...object_files import FLIGHT, ObjectFile
from ...pieces import Piece, Pieces, within
from ...same_files import SameFiles
from ..formats.manifest import differing_replica
from .wanted import Wanted

__all__ = ["Block", "Gatherer", "compare_replicas"]

#: Bytes of the engine's own buffers, besides what it fills.
_BUDGET = 4 * 2**20


class Block(NamedTuple):
    """A box of a tensor, and where it goes in a buffer.

    Attributes:
        tensor: The position of the tensor; in a stream, of its slot.
        box: The box.
        at: The byte at which it begins.
        strides: The bytes from one element to the next, per dim; None for C order without gaps.
    """

    tensor: int
    box: Bounds
    at: int
    strides: tuple[int, ...] | None


class Gatherer:
    """Fills buffers with boxes of tensors.

    Attributes:
        bytes_read: Bytes that were read from files and objects.
        compares: Whether what is read is compared with the tensors' replicas.
    """

    def __init__(self, wanted: Sequence[Wanted] | Mapping[int, Wanted], threads: int | None) -> None:
        self._wanted = wanted
        self._threads = threads
        self._mapped, self._files = MappedFiles(), SameFiles()
        self.bytes_read = 0
        self.compares = True

    def fill(
        self, buffer: npt.NDArray[np.uint8], blocks: Sequence[Block], *, crc: bool = False
    ) -> tuple[list[int], list[int]]:
        """Put boxes into a buffer, and give their digests and, if asked for, their CRC-32.

        Args:
            buffer: Bytes.
            blocks: The boxes, and where each goes.
            crc: Whether to compute the CRC-32.

        Raises:
            ParseError: if replicas disagree, or a source is not what it was.
            OSError: if one cannot be read.
        """
        job = CopyJob()
        target = job.write_array(buffer)
        holders: dict[int, int] = {}
        arrays: list[npt.NDArray[Any]] = []
        fetched: list[tuple[Extent, npt.NDArray[Any]]] = []

        def source(tensor: Wanted, piece: Piece) -> HeldPiece:
            holder = piece.holder
            if isinstance(holder, ObjectFile):
                values = np.empty([stop - start for start, stop in piece.box], f"V{tensor.itemsize}")
                fetched.append((Extent(holder, piece.offset, piece.strides), values))
                return HeldPiece(job.read_array(values), 0, *_corners(piece.box), values.strides)
            if id(holder) not in holders:
                if isinstance(holder, DataFile):
                    self._files.add([holder.path])
                    holders[id(holder)] = job.read_file(holder.path, holder.size, holder.times)
                else:
                    holders[id(holder)] = job.read_array(holder)
                    arrays.append(holder)
            return HeldPiece(holders[id(holder)], piece.offset, *_corners(piece.box), piece.strides)

        # The parts of one array may interleave there, as those of one tensor may.
        for position, together in groupby(blocks, lambda block: block.tensor):
            tensor, parts = self._wanted[position], list(together)
            pieces = [source(tensor, piece) for part in parts for piece in tensor.pieces.clipped(part.box)]
            wanted = [HeldPiece(target, part.at, *_corners(part.box), part.strides) for part in parts]
            job.add_tensor(tensor.shape, tensor.itemsize, pieces, wanted, digest=True, crc=crc)
        self._mapped.add(arrays)
        self._fetch(fetched)
        done = job.run(budget=_BUDGET, threads=self._threads)
        self._mapped.check()
        self.bytes_read += done.bytes_read + sum(values.nbytes for _, values in fetched)
        for position, box, at, strides in blocks if self.compares else ():
            tensor = self._wanted[position]
            extents = [stop - start for start, stop in box]
            values: npt.NDArray[Any] = np.ndarray(extents, f"V{tensor.itemsize}", buffer, at, strides)
            self.bytes_read += compare_replicas(tensor.name, tensor.shape, tensor.replicas, box, values)
            self._files.add([piece.path for piece in tensor.replicas.holders if not isinstance(piece, ObjectFile)])
        return done.digests, done.crcs

    def check(self) -> None:
        """Refuse, with ParseError, what was read if a file was replaced meanwhile."""
        self._files.check()

    def _fetch(self, wanted: list[tuple[Extent, npt.NDArray[Any]]]) -> None:
        def read(item: tuple[Extent, npt.NDArray[Any]]) -> None:
            read_extent(item[0], (0,) * item[1].ndim, item[1])

        if len(wanted) > 1:
            with ThreadPoolExecutor(FLIGHT, thread_name_prefix="shardwise-fetch") as pool:
                list(pool.map(read, wanted))
        else:
            for item in wanted:
                read(item)
        for file in {id(extent.file): extent.file for extent, _ in wanted}.values():
            file.check()


def compare_replicas(name: str, shape: tuple[int, ...], replicas: Pieces, box: Bounds, values: npt.NDArray[Any]) -> int:
    """Compare what was read of a box with the further pieces that hold some of it, and give the bytes that these took.

    Args:
        name: The tensor.
        shape: Its shape.
        replicas: The further pieces.
        box: The box.
        values: Its elements.

    Raises:
        ParseError: if they disagree; names the tensor, and the first element of a replica that differs.
        OSError: if a replica cannot be read.
    """
    read, itemsize = 0, values.dtype.itemsize
    for replica in replicas.clipped(box):
        # A scalar stays one, which numpy's ascontiguousarray makes an array of one element.
        ours = np.array(values[within(replica.box, box)], order="C")
        theirs = np.empty(ours.shape, f"V{itemsize}")
        read_extent(Extent(replica.holder, replica.offset, replica.strides), (0,) * ours.ndim, theirs)
        replica.holder.check()
        read += theirs.nbytes
        differs = np.flatnonzero(ours.reshape(-1).view(np.uint8) != theirs.reshape(-1).view(np.uint8))
        if len(differs):
            index = np.unravel_index(int(differs[0]) // itemsize, ours.shape) if ours.ndim else ()
            at = map(operator.add, map(int, index), (start for start, _ in replica.box))
            element = int(np.ravel_multi_index(tuple(at), shape)) if ours.ndim else 0
            raise ParseError(differing_replica(name, shape, replica.holder.path, element))
    return read


def _corners(box: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in box], [stop for _, stop in box]
