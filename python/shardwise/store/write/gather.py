"""Boxes of tensors put together in memory, from files, objects and arrays, with their digests."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._boxes import consecutive
from ...errors import ParseError
from ..boxes import Bounds, Extent, read_extent
from ..engine import CopyJob, HeldPiece
from ..files import DataFile
from ..mapped import MappedFiles
from ..object_files import FLIGHT, ObjectFile
from ..same_files import SameFiles
from .manifest import differing_replica
from .wanted import SourcePiece, Wanted

__all__ = ["Gatherer", "check_stored_replicas"]

#: Bytes of the engine's own buffers, besides what it fills.
_BUDGET = 4 * 2**20


class Gatherer:
    """Fills buffers with boxes of tensors; knows for each tensor which pieces meet a box."""

    def __init__(self, wanted: Sequence[Wanted] | Mapping[int, Wanted], threads: int | None) -> None:
        self._wanted = wanted
        self._threads = threads
        self._mapped, self._files = MappedFiles(), SameFiles()
        self._boxes: dict[int, npt.NDArray[np.int64]] = {}
        #: Bytes that were read from files and objects.
        self.bytes_read = 0

    def fill(
        self, buffer: npt.NDArray[np.uint8], blocks: Sequence[tuple[int, Bounds, int]], *, crc: bool = False
    ) -> tuple[list[int], list[int]]:
        """Put boxes into a buffer, and give their digests and, if asked for, their CRC-32.

        Args:
            buffer: Bytes.
            blocks: For each box the position of its tensor, the box, and the byte of the buffer where it begins.
            crc: Whether to compute the CRC-32.
        """
        job = CopyJob()
        target = job.write_array(buffer)
        holders: dict[int, int] = {}
        arrays: list[npt.NDArray[Any]] = []
        fetched: list[tuple[Extent, list[int], npt.NDArray[Any]]] = []

        def source(tensor: Wanted, piece: SourcePiece, box: Bounds) -> HeldPiece:
            holder = piece.holder
            if isinstance(holder, ObjectFile):
                common = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(piece.box, box, strict=True)]
                values = np.empty([stop - start for start, stop in common], f"V{tensor.itemsize}")
                inner = [start - origin for (start, _), (origin, _) in zip(common, piece.box, strict=True)]
                fetched.append((Extent(holder, piece.offset, piece.strides), inner, values))
                return HeldPiece(job.read_array(values), 0, *_corners(common), values.strides)
            if id(holder) not in holders:
                if isinstance(holder, DataFile):
                    self._files.add([holder.path])
                    holders[id(holder)] = job.read_file(holder.path, holder.size, holder.times)
                else:
                    holders[id(holder)] = job.read_array(holder)
                    arrays.append(holder)
            return HeldPiece(holders[id(holder)], piece.offset, *_corners(piece.box), piece.strides)

        for position, box, at in blocks:
            tensor = self._wanted[position]
            pieces = [source(tensor, piece, box) for piece in self.meeting(position, box)]
            wanted = HeldPiece(target, at, *_corners(box))
            job.add_tensor(tensor.shape, tensor.itemsize, pieces, [wanted], digest=True, crc=crc)
        self._mapped.add(arrays)
        self._fetch(fetched)
        done = job.run(budget=_BUDGET, threads=self._threads)
        self._mapped.check()
        self.bytes_read += done.bytes_read + sum(values.nbytes for _, _, values in fetched)
        return done.digests, done.crcs

    def check(self) -> None:
        """Refuse, with ParseError, what was read if a file was replaced meanwhile."""
        self._files.check()

    def _fetch(self, wanted: list[tuple[Extent, list[int], npt.NDArray[Any]]]) -> None:
        if len(wanted) > 1:
            with ThreadPoolExecutor(FLIGHT, thread_name_prefix="shardwise-fetch") as pool:
                list(pool.map(lambda item: read_extent(*item), wanted))
        else:
            for item in wanted:
                read_extent(*item)
        for file in {id(extent.file): extent.file for extent, _, _ in wanted}.values():
            file.check()

    def meeting(self, position: int, box: Bounds) -> list[SourcePiece]:
        """The pieces of a tensor that share elements with a box."""
        tensor = self._wanted[position]
        if len(tensor.pieces) == 1:
            return list(tensor.pieces)
        rank = len(tensor.shape)
        if position not in self._boxes:
            rows = np.array([piece.box for piece in tensor.pieces], np.int64)
            self._boxes[position] = rows.reshape(len(tensor.pieces), rank, 2)
        boxes, sides = self._boxes[position], np.array(box, np.int64).reshape(rank, 2)
        meets = (np.maximum(boxes[..., 0], sides[:, 0]) < np.minimum(boxes[..., 1], sides[:, 1])).all(axis=1)
        return [tensor.pieces[i] for i in np.flatnonzero(meets).tolist()]


def check_stored_replicas(wanted: Sequence[Wanted], memory: int) -> None:
    """Compare pieces that are stored more than once with those that are used.

    Raises:
        ParseError: if two disagree; names the tensor, and the first element that differs.
    """
    gatherer = Gatherer(wanted, None)
    for position, tensor in enumerate(wanted):
        for replica in tensor.replicas:
            again = Wanted(tensor.name, tensor.dtype, tensor.shape, [replica])
            other = Gatherer([again], None)
            shape = [stop - start for start, stop in replica.box]
            for part in consecutive(tuple(shape), max(memory // (4 * tensor.itemsize), 1)):
                box = tuple(
                    (start + side.start, start + side.stop) for (start, _), side in zip(replica.box, part, strict=True)
                )
                size = tensor.itemsize
                for start, stop in box:
                    size *= stop - start
                here, there = np.empty(size, np.uint8), np.empty(size, np.uint8)
                gatherer.fill(here, [(position, box, 0)])
                other.fill(there, [(0, box, 0)])
                differs = np.flatnonzero(here != there)
                if len(differs):
                    extents = [stop - start for start, stop in box]
                    index = np.unravel_index(int(differs[0]) // tensor.itemsize, extents) if extents else ()
                    at = map(operator.add, map(int, index), (start for start, _ in box))
                    element = int(np.ravel_multi_index(tuple(at), tensor.shape)) if extents else 0
                    path = getattr(replica.holder, "path", "an array")
                    raise ParseError(differing_replica(tensor.name, tensor.shape, path, element))


def _corners(box: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in box], [stop for _, stop in box]
