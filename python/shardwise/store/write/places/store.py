"""A checkpoint in an object store: objects under their final names, receipts beside them, and the index last.

There is no rename in a store, and no folder that appears at once. What makes a folder a checkpoint is its index, which
is written when everything else is there, on condition that there is none. A single object appears when it is complete.
Receipts have names of their own, so that no listing is asked for them; those of equal contents agree, also if the
object was made again and is another one to the store.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ....errors import ParseError
from ...formats.files import TargetFile
from ...location import taken, workplace_of
from ...objects import ATTEMPTS, ObjectPath, ObjectStatus
from ..task import Gatherer, Progress, Task, TaskReceipt, Written
from ..work import Crew, Work, crew_of, one_worker
from .place import Ending, NewCheckpoint, receipt_from_line, receipt_line
from .stream import stream_of
from .uploads import (
    FLIGHT,
    LIMITS,
    Comparison,
    Limits,
    Upload,
    check_writable,
    parts_for,
    parts_of_crew,
    put_object,
    upload_to,
)

__all__ = ["ObjectSink", "StorePlace", "check_writable"]

#: The longest receipt that is read.
_MOST = 2**28

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ObjectSink:
    """An object of a store, which a task makes as a whole.

    Attributes:
        path: Its name.
        file: What it is.
        limits: What the store takes.
    """

    path: ObjectPath
    file: TargetFile
    limits: Limits = LIMITS

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Written:
        """Make it of what the gatherer gives; where it was made already, see that it is that.

        Raises:
            FileExistsError: if another object is there.
        """
        if not self.path.is_file():
            with suppress(FileExistsError):  # Another was faster: made by the same task, or not.
                run = f"{task.plan[:32]}-{task.number}"
                return self._made(task, gatherer, memory, threads, progress, run)
            gatherer.compares, progress = True, None  # All bytes were counted.
        return self._made(task, gatherer, memory, threads, progress, None)

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Written:
        """Compare it with what the gatherer gives.

        Raises:
            FileExistsError, FileNotFoundError: if it is another one, or there is none.
        """
        return self._made(task, gatherer, memory, threads, progress, None)

    def _made(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress, run: str | None
    ) -> Written:
        file = copy.copy(self.file)  # It learns digests.
        part_bytes, flight, holds = parts_for([file], memory, limits=self.limits)
        is_new = run is not None
        upload: Upload = upload_to(self.path, flight=flight, is_new=True, run=run) if is_new else Comparison(self.path)
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
        made = status.size, status.mark
        return Written([stream.slots[number] for number in slots], crcs, nbytes if is_new else 0, made)


class StorePlace:
    """The place of a checkpoint in a store, and its receipts."""

    takes_whole_files = True

    def __init__(self, new: NewCheckpoint, limits: Limits = LIMITS) -> None:
        self._new, self._limits = new, limits
        self.path: ObjectPath = new.path
        self._root: ObjectPath = workplace_of(self.path) / new.digest[:16]
        self._kept: bool | None = None
        check_writable(self.path)

    @property
    def inside(self) -> str:
        """Where it is in the memory of this process, if it is."""
        return str(self.path) if self.path.protocol == "memory" else ""

    def sink(self, number: int) -> ObjectSink:
        """Where a task writes: an object of its own."""
        return ObjectSink(self._object(number), self._new.files[number].alone(), self._limits)

    @property
    def _is_kept(self) -> bool:
        """Whether there are receipts: not of what no other run would find again."""
        if self._kept is None:
            self._kept = self._new.is_kept
        return self._kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Stores have no locks."""
        yield

    @property
    def _last(self) -> ObjectPath:
        """What makes it a checkpoint."""
        return self.path / self._new.last if self._new.is_folder else self.path

    def is_finished(self) -> bool:
        """Whether a checkpoint has the name. A single object that has a receipt still is not committed."""
        return self._last.is_file() and (self._new.is_folder or not self._receipt_of(0).is_file())

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken, or at which there is anything unless `resume`."""
        # Only an index blocks a folder; other objects are compared one by one, when they are made.
        is_folder = self._new.is_folder
        goes_on = resume and (is_folder or self._receipt_of(0).is_file())
        is_there = (is_folder and self.path.is_file()) if goes_on else self.path.exists()
        if is_there or (is_folder and self._last.is_file()):
            why = "" if resume else "; resume=True goes on with what an interrupted run left"
            raise taken(self.path, f"exists already; a checkpoint is written to a new name{why}")

    def free(self) -> None:
        """A store does not say how much room it has."""

    def check_room(self, beside: object) -> None:
        """A store does not say how much room it has."""

    def begin(self, *, parts: bool) -> None:
        """Refuse, with FileExistsError, a name at which there is a checkpoint or another object."""
        if self.is_finished() or (self._new.is_folder and self.path.is_file()):
            raise taken(self.path)

    def crew(self, work: Work, each: int) -> AbstractContextManager[Crew]:
        """Give what runs the tasks: one after the other in this process, each with all threads; or an executor."""
        if work.executor is None:
            parts_for(self._new.files, work.memory, limits=self._limits)
            return nullcontext(one_worker(work))
        crew = crew_of(work)
        parts_of_crew(self._new.files, work.memory, crew, self._limits)
        return nullcontext(crew)

    def buffers(self, work: Work, crew: Crew) -> int:
        """The most bytes that the buffers of a crew take."""
        part, flight, holds = parts_for(self._new.files, work.memory, limits=self._limits)
        return part * (3 + holds + flight)

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts of these tasks, as many as there are."""
        yield from (found for found in self._each(self._read, self._numbers(numbers)) if found is not None)

    def recorder(self, numbers: range | None, work: Work, part: str, crew: Crew) -> StoreRecorder:
        """Give what keeps receipts."""
        return StoreRecorder(self, part) if self._is_kept else StoreRecorder(None, part)

    def keep(self, receipt: TaskReceipt) -> None:
        """Keep a receipt; one for the same contents that is there already gives way to it.

        Raises:
            ParseError: if there is one for the same task that says otherwise.
        """
        place, other = self._receipt_of(receipt.task), None
        for _ in range(ATTEMPTS):
            try:
                put_object(place, receipt_line(receipt), is_new=True)
                return
            except FileExistsError as error:
                other, refused = self._read(receipt.task), error
            if other is not None:
                break
            # Meanwhile removed, by another run that has committed the plan, or given it up.
        else:
            raise refused
        if other.plan != receipt.plan or other.contents != receipt.contents:
            raise ParseError(
                f"{place}: two receipts of task {receipt.task} disagree: one is not of this checkpoint, or a source "
                "changed"
            )
        if other.made != receipt.made:  # The same bytes, made again: now this is the object.
            put_object(place, receipt_line(receipt), is_new=False)

    def check_finished(self, ending: Ending) -> None:
        """Refuse, with FileExistsError, other texts, index or manifest than these; objects were compared."""
        if self._new.is_folder:
            for name, text in ending.texts().items():
                if not _has(self.path / name, text):
                    raise taken(self.path / name)

    def unfinished(self, number: int) -> None:
        """An object has its name from the beginning."""

    def finish(self, ending: Ending, *, sync: bool) -> None:
        """See that every object is still the one that was made; write index and manifest, last what makes it one."""
        found = list(self._each(lambda number: self._object(number).status(), range(len(self._new.files))))
        for number, status in enumerate(found):
            if ending.made.get(number) != tuple(status):
                ending.confirm(number)
        if self._new.is_folder:
            texts = ending.texts()
            for name in sorted(texts, key=lambda name: name == self._new.last):
                _put_same(self.path / name, texts[name])
        self.discard()
        self._see_that_it_stays(found)

    def _see_that_it_stays(self, found: Sequence[ObjectStatus]) -> None:
        """See that no run that failed has removed objects since they were found.

        Raises:
            FileNotFoundError: if one has; then this is no checkpoint any more.
            TimeoutError: if one does not end.
        """
        for attempt in range(1, ATTEMPTS + 1):
            if not self._removal.is_file():
                break
            self.path.wait(attempt)
        else:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"is committed, but a run of the same work that failed says in {self._removal} that it removes what it "
                "has made; if no such run is left, remove that object, and verify the checkpoint",
                str(self.path),
            )
        if attempt > 1:
            for number, status in enumerate(found):
                there = self._object(number)
                if not there.is_file() or there.status() != status:
                    if self._new.is_folder:
                        _remove(self._last)
                    raise FileNotFoundError(
                        errno.ENOENT, "was removed meanwhile by a run of the same work that failed", str(there)
                    )

    def discard(self, made: Mapping[int, tuple[int, str]] | None = None) -> None:
        """Remove the receipts, and objects that a failed run has `made`, if they are still what it made.

        Another run of the same work may finish it meanwhile, with these objects: then they are its, and stay. So this
        run first says what it is about to do, and then looks whether there is a checkpoint; who commits makes it one,
        and then looks whether somebody said so. At least one of the two sees the other.
        """
        if made:
            try:
                put_object(self._removal, b"", is_new=True)
            except (OSError, ParseError):
                made = None  # Nobody can be told, or another is at it: they stay, as after a kill.

        def remove_made(item: tuple[int, tuple[int, str]]) -> None:
            with suppress(OSError, ParseError):
                if tuple(self._object(item[0]).status()) == item[1]:
                    _remove(self._object(item[0]))

        try:
            # Who keeps no receipts cannot tell its own single object from a finished checkpoint.
            is_others = made and (self._new.is_folder or self._is_kept) and self.is_finished()
            if self._is_kept:
                list(self._each(lambda number: _remove(self._receipt_of(number)), range(len(self._new.files))))
            if made and not is_others:
                list(self._each(remove_made, list(made.items())))
        finally:
            if made:
                _remove(self._removal)

    @property
    def _removal(self) -> ObjectPath:
        """What is there while a run that failed removes what it has made."""
        return workplace_of(self.path) / "removal"

    def _object(self, number: int) -> ObjectPath:
        return self.path / self._new.files[number].name if self._new.is_folder else self.path

    def _receipt_of(self, number: int) -> ObjectPath:
        return self._root / f"{number}.receipt"

    def _numbers(self, numbers: range | None) -> range:
        return range(len(self._new.files)) if numbers is None else numbers

    def _each(self, ask: Callable[[Any], Answer], items: Sequence[Any]) -> Iterator[Answer]:
        with ThreadPoolExecutor(FLIGHT, thread_name_prefix="shardwise-ask") as pool:
            yield from pool.map(ask, items)

    def _read(self, number: int) -> TaskReceipt | None:
        place = self._receipt_of(number)
        try:
            status = place.status()
        except FileNotFoundError:
            return None
        if not 0 < status.size <= _MOST:
            raise ParseError(f"{place}: a receipt is damaged: it has {status.size} bytes")
        try:
            line = place.read(0, status.size, status.mark)
        except ParseError:
            if place.is_file():
                raise
            return None  # Another process has committed the plan, and removed it.
        receipt = receipt_from_line(line, place)
        if receipt.task != number or receipt.made is None or receipt.made[0] != self._new.sizes[number]:
            raise ParseError(
                f"{place}: the receipt of task {number} says that it made something else than the plan says"
            )
        return receipt


class StoreRecorder:
    """Keeps receipts in the store, or only knows the part."""

    def __init__(self, place: StorePlace | None, part: str) -> None:
        self._place, self._part = place, part

    def add(self, receipt: TaskReceipt) -> None:
        """Keep a receipt."""
        if self._place is not None:
            self._place.keep(receipt._replace(part=self._part))

    def flush(self) -> None:
        """Nothing waits."""


def _remove(path: ObjectPath) -> None:
    with suppress(OSError):  # Nobody looks for it any more.
        path.ask(lambda: path.filesystem.rm_file(path.key))


def _has(path: ObjectPath, text: bytes) -> bool:
    """Whether there is an object with these bytes."""
    if not path.is_file():
        return False
    status = path.status()
    return status.size == len(text) and (not text or path.read(0, status.size, status.mark) == text)


def _put_same(path: ObjectPath, text: bytes) -> None:
    """Make a small object, unless it is there already, from a commit that was interrupted or is under way elsewhere."""
    try:
        put_object(path, text, is_new=True)
    except FileExistsError:
        if not _has(path, text):
            raise taken(path) from None
