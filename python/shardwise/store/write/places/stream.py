"""An object of a store that one task makes as a whole: its bytes, in parts.

The parts are made in the order of the bytes. Bytes before a tensor may depend on the whole tensor: its CRC-32 in a
PyTorch container, its digest in the header of a single file. If the store takes parts in any order, the part with these
bytes is held back until they are known, so that everything is read once; otherwise everything is read twice.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...._boxes import consecutive
from ...._core import joined_crc
from ....errors import ParseError
from ...data.boxes import contiguous_strides
from ...data.engine import add_digests
from ...data.objects import ObjectPath
from ..forms.files import FileDigests, TargetFile
from .gatherer import BufferBox, Gatherer
from .part_sizes import LIMITS, Limits, parts_for
from .task import Outcome, Progress, Task
from .uploads import Comparison, Upload, upload_to

__all__ = ["ObjectSink", "Stream", "stream_of"]


@dataclass(frozen=True, eq=False)
class ObjectSink:
    """An object of a store that a task makes as a whole.

    Attributes:
        path: The object's name.
        file: The file whose bytes the object has.
        limits: The limits of the store on parts.
    """

    path: ObjectPath
    file: TargetFile
    limits: Limits = LIMITS

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._said() == other._said()

    def __hash__(self) -> int:
        return hash((self.path, self.file.size))

    def _said(self) -> tuple[Any, ...]:
        """Return all that distinguishes the sink from another, as a tuple to compare."""
        file = self.file
        return self.path, self.limits, type(file), file.name, file.size, list(file.slots), list(file.headers())

    def count(self, task: Task) -> int:
        """Return the number of files that the task writes: always 1."""
        return len(task.files)

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Upload the object, assembled by the gatherer; if it exists already, compare it instead.

        Raises:
            FileExistsError: if another object has the name.
        """
        if not self.path.is_file():
            with suppress(FileExistsError):  # Another was faster: made by the same task, or not.
                run = f"{task.plan[:32]}-{task.number}"
                return self._made(task, gatherer, memory, threads, progress, run)
            gatherer.compares, progress = True, None  # All bytes were counted.
        return self._made(task, gatherer, memory, threads, progress, None)

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """Compare the object with the assembled tensors.

        Raises:
            FileExistsError, FileNotFoundError: if it differs, or does not exist.
        """
        return self._made(task, gatherer, memory, threads, progress, None)

    def _made(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress, run: str | None
    ) -> Outcome:
        file = self.file
        part_bytes, window, holds = parts_for([file], memory, limits=self.limits)
        is_new = run is not None
        upload: Upload = upload_to(self.path, window=window, is_new=True, run=run) if is_new else Comparison(self.path)
        gatherer.watch()
        nbytes = 0
        try:
            stream = stream_of(file, gatherer, part_bytes, threads, holds=holds and upload.any_order)
            for number, data in stream.parts():
                upload.put(number, data)
                nbytes += len(data)
                if progress is not None:
                    progress(len(data))
            gatherer.check()
            stream.check(self.path)
            upload.commit()
        except BaseException:
            upload.abort()
            raise
        status = self.path.status()
        if status.size != file.size:
            # Not a system error, after which the task would be retried and find this object in its way.
            raise ParseError(f"{self.path}: has {status.size} bytes; {file.size} were written")
        slots = [number for number, slot in enumerate(file.slots) if slot.end > slot.begin]
        crcs = [stream.crcs[number] for number in slots] if file.needs_crcs else []
        made = status.size, status.etag
        return Outcome([stream.slots[number] for number in slots], crcs, nbytes if is_new else 0, made)


def stream_of(file: TargetFile, gatherer: Gatherer, part_bytes: int, threads: int | None, *, holds: bool) -> Stream:
    """Return the bytes of an object as a stream. If no part can be held back, all elements are read once before.

    Args:
        file: The file whose bytes the object has.
        gatherer: Assembles the boxes of the file's tensors.
        part_bytes: The bytes of a part.
        threads: The number of threads that copy; one per core if `None`.
        holds: Whether there is room for a part that is held back, and parts may come in any order.
    """
    holds = file.needs_values and holds and len(file.before(0)[1]) <= part_bytes
    known = None
    if file.needs_values and not holds:
        known = Stream(file, gatherer, part_bytes, threads, holds=False, known=None)
        for _ in known.parts():
            pass
        gatherer.compares = False  # That was done.
    return Stream(file, gatherer, part_bytes, threads, holds=holds, known=known)


class _Text(NamedTuple):
    """A range of bytes around the tensors that is in a part."""

    #: The number of the slot after the text.
    slot: int
    #: The bytes of the text that are in this part, and the byte of the part at which they begin.
    begin: int
    end: int
    at: int


class Stream:
    """The bytes of an object, in parts.

    Args:
        file: The file whose bytes the object has.
        gatherer: Assembles the boxes of the file's tensors: of each slot that has bytes, in order.
        threads: The number of threads that copy; one per core if `None`.
        holds: Whether a part is held back whose bytes depend on later ones.
        known: A stream of the same object that was read to its end, and so has all digests.

    Attributes:
        digests: The digest of the elements of each tensor that were read, by the tensor's position.
        slots: The digest of each slot, by its number in the file.
        crcs: The CRC-32 of each slot, for files that state it.
    """

    def __init__(
        self,
        file: TargetFile,
        gatherer: Gatherer,
        part_bytes: int,
        threads: int | None,
        *,
        holds: bool,
        known: Stream | None,
    ) -> None:
        self._file, self._gatherer, self._part_bytes, self._threads = file, gatherer, part_bytes, threads
        self._holds, self._known = holds, known
        filled = [number for number, slot in enumerate(file.slots) if slot.end > slot.begin]
        self._positions = {number: at for at, number in enumerate(filled)}
        self.digests: dict[int, int] = {}
        self.crcs: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        source = self if known is None else known
        #: The digests that the bytes around tensors state; filled while elements are read, unless known before.
        self._file_digests = FileDigests(source.digests, source.crcs)
        self._number = self._filled = 0
        self._texts: list[_Text] = []
        #: Boxes of slots, and their places in the part.
        self._blocks: list[BufferBox] = []
        self._held: tuple[int, bytearray, _Text] | None = None
        self._cache: tuple[int, bytes] | None = None

    def check(self, place: ObjectPath) -> None:
        """Refuse sources that changed between two reads; `place` is the object, for the message."""
        if self._known is not None and (self._known.digests, self._known.crcs) != (self.digests, self.crcs):
            raise OSError(errno.EIO, "a source changed while it was read, so the digests are wrong", str(place))

    def parts(self) -> Iterator[tuple[int, bytearray]]:
        """Yield the parts with their numbers, each once, not always in order."""
        file = self._file
        for number in range(len(file.slots) + 1):
            size = len(self._text(number))
            begin = 0
            while begin < size:
                if self._filled and self._filled + min(size, self._part_bytes) > self._part_bytes:
                    yield from self._flush(number)
                end = min(size, begin + self._part_bytes - self._filled)
                self._texts.append(_Text(number, begin, end, self._filled))
                self._filled += end - begin
                begin = end
            if number < len(file.slots):
                yield from self._elements(number)
        if self._filled:
            yield from self._flush(len(file.slots))
        if self._held is not None:
            yield self._released()

    def _elements(self, number: int) -> Iterator[tuple[int, bytearray]]:
        array = self._file.array_at(number)
        if array is None or 0 in array.shape:
            return
        itemsize = self._itemsize(array.tensor)
        for block in consecutive(array.shape, max(self._part_bytes // 4 // itemsize, 1)):
            extents = tuple(side.stop - side.start for side in block)
            nbytes = itemsize * math.prod(extents)
            if self._filled and self._filled + nbytes > self._part_bytes:
                yield from self._flush(number)
            strides = contiguous_strides(extents, itemsize)
            for slot, box, begins in array.parts:
                # The part of the box that is in the block: in the tensor, and where it begins in the block.
                sides = [
                    (max(side.start, at), min(side.stop, at + stop - start), start - at, side.start)
                    for (start, stop), at, side in zip(box, begins, block, strict=True)
                ]
                if all(low < high for low, high, _, _ in sides):
                    own = tuple((low + shift, high + shift) for low, high, shift, _ in sides)
                    begin = sum((low - first) * step for (low, _, _, first), step in zip(sides, strides, strict=True))
                    self._blocks.append(BufferBox(slot, array.tensor, own, self._filled + begin, strides))
            self._filled += nbytes

    def _flush(self, at: int) -> Iterator[tuple[int, bytearray]]:
        """Fill and yield the current part, once all earlier slots are in it; `at` is the number of the current slot."""
        file, data = self._file, bytearray(self._filled)
        if self._blocks:
            blocks = [block._replace(position=self._positions[block.position]) for block in self._blocks]
            done = self._gatherer.into_memory(np.frombuffer(data, np.uint8), blocks, self._threads)
            for (number, tensor, *_), digest in zip(self._blocks, done.digests, strict=True):
                self.digests[tensor] = add_digests([self.digests.get(tensor, 0), digest])
                self.slots[number] = add_digests([self.slots.get(number, 0), digest])
            for (number, tensor, box, *_), crc in zip(self._blocks, done.crcs, strict=False):
                nbytes = self._itemsize(tensor)
                for start, stop in box:
                    nbytes *= stop - start
                before = self.crcs.get(number)
                self.crcs[number] = crc if before is None else joined_crc(before, crc, nbytes)
        self._cache = None
        for text in self._texts:
            self._put(data, text)
        part = self._number, data
        open_slot = at if self._texts and self._texts[-1].slot == at < len(file.slots) else None
        opened = self._texts[-1] if self._texts else None
        self._number, self._filled, self._texts, self._blocks = self._number + 1, 0, [], []
        # What was held for a slot is known when another slot begins.
        if self._held is not None and file.needs_crcs and at != self._held[2].slot:
            yield self._released()
        if self._holds and opened is not None and (open_slot is not None or file.has_digests):
            self._held = (*part, opened)
        else:
            yield part

    def _released(self) -> tuple[int, bytearray]:
        assert self._held is not None
        (number, data, text), self._held = self._held, None
        self._cache = None
        self._put(data, text)
        return number, data

    def _itemsize(self, tensor: int) -> int:
        return int(self._file.slots.table.itemsizes[tensor])

    def _put(self, data: bytearray, text: _Text) -> None:
        data[text.at : text.at + text.end - text.begin] = self._text(text.slot)[text.begin : text.end]

    def _text(self, number: int) -> bytes:
        # The header may take several parts; it is made once for each.
        if self._cache is None or self._cache[0] != number:
            self._cache = number, self._file.before(number, self._file_digests)[1]
        return self._cache[1]
