"""One object of a new checkpoint, from its sources to its place in a store: a task that any process can do.

An object is made of parts in the order of its bytes. What comes before a tensor may depend on all of it: its CRC-32 in
a PyTorch container, its digest in the header of a single file. If the store takes parts in any order, the part that has
it is held back until it is known, so that everything is read once; otherwise everything is read twice.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..._boxes import consecutive
from ...errors import ParseError
from ..boxes import Bounds
from ..engine import add_digests
from ..objects import ObjectPath, ObjectStatus
from .files import TargetFile
from .gather import Gatherer
from .ledger import joined_crc
from .uploads import Comparison, Upload, upload_to
from .wanted import Wanted

__all__ = ["ObjectReceipt", "ObjectTask", "task_for"]


class ObjectReceipt(NamedTuple):
    """What a task has made.

    Attributes:
        number: The number of the task.
        status: The object's status.
        digests: The digest of what it has of each tensor, by the tensor's position.
        crcs: The CRC-32 of each slot, for objects that have them.
        bytes_read: Bytes read from files and objects.
        bytes_written: Bytes of the object.
    """

    number: int
    status: ObjectStatus
    digests: dict[int, int]
    crcs: dict[int, int]
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, eq=False)
class ObjectTask:
    """An object to make. It can be made any number of times, by any process that can reach its sources.

    Attributes:
        number: Its number.
        place: Its name.
        file: What it is.
        wanted: The tensors that it has something of, by their positions.
        part_bytes: The bytes of a part.
        flight: The number of parts under way at a time.
        holds: Whether the memory has room for a part that is held back.
        is_new: Whether there must be no object of this name.
        run: Distinguishes the objects of this run from others.
    """

    number: int
    place: ObjectPath
    file: TargetFile
    wanted: Sequence[Wanted] | Mapping[int, Wanted]
    part_bytes: int
    flight: int
    holds: bool
    is_new: bool
    run: str

    @property
    def nbytes(self) -> int:
        """The bytes of the object."""
        return self.file.size

    def make(self, *, threads: int | None, progress: Callable[[int], object] | None = None) -> ObjectReceipt:
        """Make it.

        Args:
            threads: The number of threads that read; one per core if left out.
            progress: Called with the bytes of each part when its upload has begun.

        Raises:
            FileExistsError: if another writer's object has this name.
            ParseError: if a source is not what it was, or the object not what was sent.
            OSError: if a source cannot be read, or the store fails.
        """
        upload = upload_to(self.place, flight=self.flight, is_new=self.is_new, run=f"{self.run}-{self.number}")
        return self._made(upload, threads, progress)

    def confirm(self, *, threads: int | None, progress: Callable[[int], object] | None = None) -> ObjectReceipt:
        """See that the object that is there is what `make` would make; nothing is written.

        Raises:
            FileNotFoundError: if there is none.
            FileExistsError: if another is there.
            ParseError, OSError: as for `make`.
        """
        return self._made(Comparison(self.place), threads, progress)

    def _made(self, upload: Upload, threads: int | None, progress: Callable[[int], object] | None) -> ObjectReceipt:
        gatherer = Gatherer(self.wanted, threads)
        written = 0
        try:
            stream = self._stream(gatherer, upload)
            for number, data in stream.parts():
                upload.put(number, data)
                written += len(data)
                if progress is not None:
                    progress(len(data))
            gatherer.check()
            stream.check(self.place)
            upload.commit()
        except BaseException:
            upload.abort()
            raise
        status = self.place.status()
        if status.size != self.nbytes:
            # Not a system error, after which the task would be retried and find this object in its way.
            raise ParseError(f"{self.place}: has {status.size} bytes; {self.nbytes} were written")
        return ObjectReceipt(self.number, status, stream.digests, stream.crcs, gatherer.bytes_read, written)

    def _stream(self, gatherer: Gatherer, upload: Upload) -> _Stream:
        file = self.file
        depends = file.has_digests or file.needs_crcs
        holds = depends and self.holds and upload.any_order and len(file.before(0)[1]) <= self.part_bytes
        known = None
        if depends and not holds:
            known = _Stream(file, self.wanted, gatherer, self.part_bytes, holds=False, known=None)
            for _ in known.parts():
                pass
        return _Stream(file, self.wanted, gatherer, self.part_bytes, holds=holds, known=known)


class _Text(NamedTuple):
    """A stretch of what surrounds the tensors, in a part."""

    #: The slot that it comes before.
    slot: int
    #: The bytes of it in this part: the first, and the one after the last; and their place there.
    begin: int
    end: int
    at: int


class _Stream:
    """The bytes of an object, in parts."""

    def __init__(
        self,
        file: TargetFile,
        wanted: Sequence[Wanted] | Mapping[int, Wanted],
        gatherer: Gatherer,
        part_bytes: int,
        *,
        holds: bool,
        known: _Stream | None,
    ) -> None:
        self._file, self._wanted, self._gatherer, self._part_bytes = file, wanted, gatherer, part_bytes
        self._holds, self._known = holds, known
        self.digests: dict[int, int] = {}
        self.crcs: dict[int, int] = {}
        file.digests = self.digests if known is None else known.digests
        file.crcs = self.crcs if known is None else known.crcs
        self._number = self._filled = 0
        self._texts: list[_Text] = []
        #: The number of a slot, the box, and where it is in the part.
        self._blocks: list[tuple[int, Bounds, int]] = []
        self._held: tuple[int, bytearray, _Text] | None = None
        self._cache: tuple[int, bytes] | None = None

    def check(self, place: ObjectPath) -> None:
        """Refuse sources that changed between two reads."""
        if self._known is not None and (self._known.digests, self._known.crcs) != (self.digests, self.crcs):
            raise OSError(errno.EIO, "a source changed while it was read, so the digests are wrong", str(place))

    def parts(self) -> Iterator[tuple[int, bytearray]]:
        """Give the parts with their numbers; each once, not always in order."""
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
        slot = self._file.slots[number]
        if slot.end == slot.begin:
            return
        itemsize = self._wanted[slot.tensor].itemsize
        extents = tuple(stop - start for start, stop in slot.box)
        for block in consecutive(extents, max(self._part_bytes // 4 // itemsize, 1)):
            nbytes = itemsize
            for side in block:
                nbytes *= side.stop - side.start
            if self._filled and self._filled + nbytes > self._part_bytes:
                yield from self._flush(number)
            box = tuple(
                (start + side.start, start + side.stop) for (start, _), side in zip(slot.box, block, strict=True)
            )
            self._blocks.append((number, box, self._filled))
            self._filled += nbytes

    def _flush(self, at: int) -> Iterator[tuple[int, bytearray]]:
        """Fill the part that was put together, when the slots before the one at hand have all of their blocks."""
        file, data = self._file, bytearray(self._filled)
        if self._blocks:
            blocks = [(file.slots[number].tensor, box, begin) for number, box, begin in self._blocks]
            digests, crcs = self._gatherer.fill(np.frombuffer(data, np.uint8), blocks, crc=file.needs_crcs)
            for (tensor, _, _), digest in zip(blocks, digests, strict=True):
                self.digests[tensor] = add_digests([self.digests.get(tensor, 0), digest])
            for (number, box, _), crc in zip(self._blocks, crcs, strict=False):
                nbytes = self._wanted[file.slots[number].tensor].itemsize
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

    def _put(self, data: bytearray, text: _Text) -> None:
        data[text.at : text.at + text.end - text.begin] = self._text(text.slot)[text.begin : text.end]

    def _text(self, number: int) -> bytes:
        # The header may take several parts; it is made once for each.
        if self._cache is None or self._cache[0] != number:
            self._cache = number, self._file.before(number)[1]
        return self._cache[1]


def task_for(task: ObjectTask) -> ObjectTask:
    """Give the task as it is sent to a worker: with the pieces that it reads, and nothing else."""
    gatherer = Gatherer(task.wanted, None)
    wanted: dict[int, Wanted] = {}
    for position, held in task.file.boxes().items():
        tensor = task.wanted[position]
        pieces = {}
        if tensor.nbytes:
            pieces = {id(piece): piece for box in held for piece in gatherer.meeting(position, box)}
        wanted[position] = replace(tensor, pieces=list(pieces.values()), replicas=(), partition=None, identity=None)
    return replace(task, file=task.file.of(wanted), wanted=wanted)
