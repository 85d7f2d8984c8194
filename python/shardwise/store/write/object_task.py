"""One object of a new checkpoint, from its sources to its place in a store: a task that any process can do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..._text import bytes_text
from ...errors import ParseError
from ..boxes import Bounds
from ..files import DataFile, opened_again
from ..objects import ObjectPath
from ..pieces import NO_PIECES, Pieces
from .fetch import SourceObject, opened_object
from .formats.files import TargetFile
from .object_stream import stream_of
from .places.parts import parts_for
from .places.uploads import Comparison, Upload, upload_to
from .plans.plan import WritePlan
from .receipts import TaskReceipt, worker_name
from .task import SourceFile, check_head
from .tensors.gather import Gatherer
from .tensors.wanted import Wanted

__all__ = ["ObjectTask", "object_task"]


@dataclass(frozen=True, eq=False, repr=False)
class ObjectTask:
    """An object of a new checkpoint, to be made by any process that can reach its sources, any number of times.

    Attributes:
        plan: The digest of the plan that it is of.
        number: Its number in the plan.
        place: Its name.
    """

    plan: str
    number: int
    place: ObjectPath
    #: Which file of the plan it is; and by their positions, the tensors that it has something of.
    _file: TargetFile
    _wanted: dict[int, Wanted]
    _again: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """The bytes of the object."""
        return self._file.size

    @property
    def written(self) -> tuple[tuple[int, int, int, int], ...]:
        """The ranges that it writes: the file's number, the tensor's number, first byte, end."""
        start = self._file.start
        return tuple(
            (self.number, slot.tensor, start + slot.begin, start + slot.end)
            for slot in self._file.slots
            if slot.end > slot.begin
        )

    @property
    def again(self) -> frozenset[int]:
        """The positions of ranges that hold what ranges of other tasks hold."""
        return self._again

    def __repr__(self) -> str:
        return f"<ObjectTask {self.number}: {bytes_text(self.nbytes)}>"

    def run(
        self,
        *,
        memory: int = 256 * 2**20,
        sync: bool = True,
        threads: int | None = 1,
        check: str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> TaskReceipt:
        """Make it; where it was made already, see that it is what it should be.

        Args:
            memory: Bytes for buffers.
            sync: Has no meaning for a store, which has on its disks what it has acknowledged.
            threads: How many read; one per core if `None`.
            check: Whether only to see that what is there is right: then anything but `None`.
            progress: Called with the bytes of each part.

        Raises:
            FileExistsError: if another object is there.
            FileNotFoundError: if none is, and it is only checked.
            ParseError: if a source is not what it was when the plan was made, or replicas disagree.
            OSError: if a source cannot be read, or the store fails.
        """
        began = time.perf_counter()
        receipt = None
        if not (check is not None or self.place.is_file()):
            with suppress(FileExistsError):  # Another was faster: made by the same task, or not.
                receipt = self._made(memory, threads, progress, is_new=True)
            progress = None  # All bytes were counted.
        if receipt is None:
            receipt = self._made(memory, threads, progress, is_new=False)
        return receipt._replace(seconds=round(time.perf_counter() - began, 6))

    def _made(
        self, memory: int, threads: int | None, progress: Callable[[int], object] | None, *, is_new: bool
    ) -> TaskReceipt:
        part_bytes, flight, holds = parts_for([self._file], memory)
        run = f"{self.plan[:32]}-{self.number}"
        upload: Upload = (
            upload_to(self.place, flight=flight, is_new=True, run=run) if is_new else Comparison(self.place)
        )
        gatherer = Gatherer(self._wanted, threads)
        written = 0
        try:
            stream = stream_of(self._file, self._wanted, gatherer, part_bytes, holds=holds and upload.any_order)
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
        slots = [number for number, slot in enumerate(self._file.slots) if slot.end > slot.begin]
        return TaskReceipt(
            self.plan,
            self.number,
            tuple((file, begin, end) for file, _, begin, end in self.written),
            tuple(stream.slots[number] for number in slots),
            tuple(stream.crcs[number] for number in slots) if self._file.needs_crcs else (),
            gatherer.bytes_read,
            written if is_new else 0,
            0.0,
            worker_name(),
            made=(status.size, status.mark),
        )


def object_task(plan: WritePlan, number: int) -> ObjectTask:
    """Make the task of a plan that makes this object.

    Raises:
        ParseError: if a source is not what it was when the plan was made.
        OSError: if a source cannot be looked at.
    """
    file, path = plan.files[number], cast(Any, plan.path)
    wanted = {}
    for position, boxes in file.boxes().items():
        tensor = plan.tensors[position]
        pieces = _within(tensor.sources, boxes)
        replicas = _within(tensor.replicas, boxes) if tensor.has_replicas else NO_PIECES
        wanted[position] = Wanted(tensor.name, tensor.dtype, tensor.shape, pieces, replicas, is_object=tensor.is_object)
    place = path / file.name if plan.is_folder else path
    return ObjectTask(plan.digest, number, place, file.of(wanted), wanted, plan.repeated_in(number))


def _within(pieces: Pieces, boxes: Sequence[Bounds]) -> Pieces:
    """The pieces that share elements with one of these boxes, of files and objects that are opened."""
    found = np.unique(np.concatenate([pieces.meeting(box) for box in boxes]))
    return pieces.chosen(found).of_holders(
        lambda source: _opened(source) if isinstance(source, (SourceFile, SourceObject)) else source
    )


def _opened(source: SourceFile | SourceObject) -> DataFile:
    """The same file for the same source, so that a task sends it once; which must be what it was."""
    if isinstance(source, SourceObject):
        return opened_object(source)
    check_head(source)
    return _file(source)


@functools.lru_cache(maxsize=4096)
def _file(source: SourceFile) -> DataFile:
    return opened_again(source.path, source.size, source.times)
