"""A checkpoint in an object store: objects under their final names, receipts next to them, and the index last.

A store has neither renames nor folders that appear at once. A folder becomes a checkpoint by its index, which is
written when everything else is there, on condition that no index exists. A single object appears when it is complete.
Receipts have names of their own, so that no listing is needed. Receipts agree if the contents that they state are
equal, even if an object was made again and has another ETag.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from ....errors import ParseError
from ...data.engine import LEAST_MEMORY
from ...data.location import taken, workplace_of
from ...data.objects import ObjectPath, ObjectStatus
from ...data.retries import ATTEMPTS
from .part_sizes import LIMITS, Limits, parts_for, parts_of_workers
from .parts import PartsSink, too_little
from .place import Completion, NewCheckpoint
from .receipts import receipt_from_line, receipt_line
from .shared_objects import SharedObjects
from .stream import ObjectSink
from .task import TaskReceipt
from .uploads import check_store, put_object
from .whole_objects import ask_all, has_bytes, has_text, put_same, remove, small_object
from .work import Work, Workers, executor_workers, one_worker, workers_for

__all__ = ["ObjectSink", "PartsSink", "StorePlace"]


class StorePlace:
    """The place of a checkpoint in a store, and of its receipts."""

    def __init__(self, new: NewCheckpoint, limits: Limits = LIMITS) -> None:
        self._new, self._limits = new, limits
        self.path: ObjectPath = new.path
        if new.is_shared and not self.path.is_s3:
            raise ParseError(f"{self.path}: the plan is for a store whose objects are put together from parts")
        self._root: ObjectPath = workplace_of(self.path) / new.digest[:16]
        self._kept: bool | None = None
        self._shared = SharedObjects(new, limits, self._root, self._object)
        check_store(self.path)

    @property
    def inside(self) -> str:
        """The checkpoint's URL if it is in the memory of this process, else an empty string."""
        return str(self.path) if self.path.protocol == "memory" else ""

    @property
    def takes_whole_files(self) -> bool:
        """True if a task makes a whole object; False if tasks make parts of objects."""
        return not self._new.is_shared

    def least_part(self, size: int) -> int:
        """Return the least bytes of a part of an object of this size that several tasks make."""
        return self._limits.least_shared(size)

    def sink(self, number: int) -> ObjectSink | PartsSink:
        """Return the sink of a task: one object, or parts of several."""
        if not self._new.is_shared:
            return ObjectSink(self._object(number), self._new.files[number].alone(), self._limits)
        shares = self._new.shares(number)
        texts = tuple(b"" if begin else self._new.known_before(file) for file, begin, _, _ in shares)
        uploads, remainder = self._shared.uploads, self._shared.remainder(number)
        return PartsSink(self.path, self._new.is_folder, uploads, remainder, tuple(shares), texts, self._limits)

    @property
    def _is_kept(self) -> bool:
        """True if receipts are stored; they are useless if another run would not find the same sources."""
        if self._kept is None:
            self._kept = self._new.is_kept
        return self._kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Do nothing: stores have no locks."""
        yield

    @property
    def _last(self) -> ObjectPath:
        """Path of the object that is written last; the checkpoint exists once it does."""
        return self.path / self._new.last if self._new.is_folder else self.path

    def is_finished(self) -> bool:
        """Return whether a checkpoint exists under the name. A single object with a receipt is not committed yet."""
        is_at_once = self._new.is_folder or self._new.is_shared
        return self._last.is_file() and (is_at_once or not self._receipt_of(0).is_file())

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken, or, unless `resume`, has any objects under it."""
        # Only an index blocks a folder; other objects are compared one by one, when they are made.
        is_folder = self._new.is_folder
        goes_on = resume and (is_folder or self._receipt_of(0).is_file())
        is_there = (is_folder and self.path.is_file()) if goes_on else self.path.exists()
        if is_there or (is_folder and self._last.is_file()):
            why = "" if resume else "; resume=True goes on with what an interrupted run left"
            raise taken(self.path, f"exists already; a checkpoint is written to a new name{why}")

    def is_of_another_run(self) -> bool:
        """Return `False`: objects of any run are compared one by one, when they are made."""
        return False

    def free(self) -> None:
        """Return `None`: a store does not say how much room it has."""

    def check_room(self, beside: object) -> None:
        """Do nothing: a store does not say how much room it has."""

    def begin(self) -> None:
        """Begin the uploads of shared objects, also those that are gone.

        Raises:
            FileExistsError: as `begin_parts`.
        """
        self._begin(are_checked=True)

    def begin_parts(self) -> None:
        """Begin the uploads of shared objects, unless another process has.

        Raises:
            FileExistsError: if there is a checkpoint or another object under the name.
        """
        self._begin(are_checked=False)

    def _begin(self, *, are_checked: bool) -> None:
        if self.is_finished() or (self._new.is_folder and self.path.is_file()):
            raise taken(self.path)
        if self._new.is_shared:
            self._shared.begin(are_checked=are_checked)

    def workers(self, work: Work, each: int) -> AbstractContextManager[Workers]:
        """Return the workers: a caller's executor, or this thread for one task after the other with all threads."""
        if self._new.is_shared:
            return self._workers_of_parts(work, each)
        if work.executor is None:
            parts_for(self._new.files, work.memory, limits=self._limits)
            return nullcontext(one_worker(work))
        workers = executor_workers(work)
        parts_of_workers(self._new.files, work.memory, workers, self._limits)
        return nullcontext(workers)

    @contextmanager
    def _workers_of_parts(self, work: Work, each: int) -> Iterator[Workers]:
        held, tasks = self._new.most_shared, len(self._new.tasks)
        with workers_for(work, nbytes=sum(self._new.sizes), tasks=tasks, each=each + held) as workers:
            if workers.memory < held + LEAST_MEMORY:
                raise too_little(workers.memory, held)
            yield workers

    def buffers(self, work: Work, workers: Workers) -> int:
        """Return the most bytes that the buffers of all workers take."""
        if self._new.is_shared:
            return workers.count * workers.memory
        part, window, holds = parts_for(self._new.files, work.memory, limits=self._limits)
        return part * (3 + holds + window)

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts of these tasks, as far as they exist; of shared objects only if their parts still do."""
        numbers = range(len(self._new.tasks)) if numbers is None else numbers
        read = ask_all(self._read, numbers)
        found = [receipt for receipt in read if receipt is not None]
        if not self._new.is_shared or not found:
            yield from found
            return
        yield from self._shared.still_there(found)

    def recorder(self, numbers: range | None, work: Work, part: str, workers: Workers) -> StoreRecorder:
        """Return a recorder that writes the receipts to the store, or none if another run could not use them."""
        return StoreRecorder(self, part) if self._is_kept else StoreRecorder(None, part)

    def keep(self, receipt: TaskReceipt) -> None:
        """Store a receipt. It replaces one with the same contents for another object.

        Raises:
            ParseError: if there is one for the same task with other contents.
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
        if (other.uploaded, other.shares) != (
            receipt.uploaded,
            receipt.shares,
        ):  # Made again: now these are the objects.
            put_object(place, receipt_line(receipt), is_new=False)

    def check_finished(self, completion: Completion) -> None:
        """Refuse, with FileExistsError, other texts, index or manifest than these; the tasks compare the objects."""
        if self._new.is_folder:
            for name, text in completion.texts().items():
                if not has_text(self.path / name, text):
                    raise taken(self.path / name)
        for number in range(len(self._new.files)) if self._new.is_shared else ():
            there = self._object(number)
            status = there.status()
            if not all(has_bytes(there, status, at, text) for at, text in completion.headers(number)):
                raise taken(there)

    def unfinished(self, number: int) -> None:
        """Return `None`: an object has its final name from the beginning."""

    def finish(self, completion: Completion, *, sync: bool) -> None:
        """Check that every object is still the one that was made; then write the manifest and, last, the index."""
        texts = completion.texts() if self._new.is_folder else {}
        if self._new.is_shared:
            self._shared.put_together(completion)
        found = list(ask_all(lambda number: self._object(number).status(), range(len(self._new.files))))
        for number, (status, size) in enumerate(zip(found, self._new.sizes, strict=True)):
            if self._new.is_shared and status.size != size:
                raise taken(self._object(number), f"has {status.size} bytes; {size} were put")
        for number in range(len(self._new.tasks)):
            is_same = self._new.is_shared or completion.uploaded.get(number) == tuple(found[number])
            if completion.is_checked or not is_same:
                completion.confirm(number)
        if self._new.is_folder:
            for name in sorted(texts, key=lambda name: name == self._new.last):
                put_same(self.path / name, texts[name])
        self.discard()
        self._see_that_it_stays(found)

    def _see_that_it_stays(self, found: Sequence[ObjectStatus]) -> None:
        """Check that no failed run has removed objects after they were found.

        Raises:
            FileNotFoundError: if one has; the checkpoint is then incomplete, and its index is removed.
            TimeoutError: if another run is still removing objects.
        """
        for attempt in range(1, ATTEMPTS + 1):
            if not self._removal.is_file():
                break
            self.path.wait(attempt)
        else:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"is committed, but {self._removal} says that a failed run of the same work is removing its objects; "
                "if no such run is left, remove that object, and verify the checkpoint",
                str(self.path),
            )
        if attempt > 1:
            for number, status in enumerate(found):
                there = self._object(number)
                if not there.is_file() or there.status() != status:
                    if self._new.is_folder:
                        remove(self._last)
                    raise FileNotFoundError(
                        errno.ENOENT, "was removed meanwhile by a run of the same work that failed", str(there)
                    )

    def discard(self) -> None:
        """Remove the receipts, and give up the uploads of shared objects."""
        if self._new.is_shared:
            self._shared.forget()
        self._remove_receipts()

    def withdraw(self, uploaded: Mapping[int, tuple[int, str]]) -> None:
        """Remove the receipts, and the objects that a failed run has uploaded, if they are still the same.

        Another run of the same work may commit a checkpoint with these objects meanwhile; then they must stay. So a
        failed run first writes a marker, and then looks for a checkpoint; a run that commits first makes the
        checkpoint, and then looks for a marker. At least one of the two sees the other.
        """
        if self._new.is_shared or not uploaded:
            self.discard()  # No shared object is complete before all are sure to be.
            return
        try:
            put_object(self._removal, b"", is_new=True)
        except (OSError, ParseError):
            self.discard()  # Nobody can be told, or another is at it: the objects stay, as after a kill.
            return

        def remove_same(item: tuple[int, tuple[int, str]]) -> None:
            with suppress(OSError, ParseError):
                if tuple(self._object(item[0]).status()) == item[1]:
                    remove(self._object(item[0]))

        try:
            # Who keeps no receipts cannot tell its own single object from a finished checkpoint.
            is_others = (self._new.is_folder or self._is_kept) and self.is_finished()
            self._remove_receipts()
            if not is_others:
                list(ask_all(remove_same, list(uploaded.items())))
        finally:
            remove(self._removal)

    def _remove_receipts(self) -> None:
        if self._is_kept:
            list(ask_all(lambda number: remove(self._receipt_of(number)), range(len(self._new.tasks))))

    @property
    def _removal(self) -> ObjectPath:
        """Path of a marker object that exists while a failed run removes its objects."""
        return workplace_of(self.path) / "removal"

    def _object(self, number: int) -> ObjectPath:
        return self.path / self._new.files[number].name if self._new.is_folder else self.path

    def _receipt_of(self, number: int) -> ObjectPath:
        return self._root / f"{number}.receipt"

    def _read(self, number: int) -> TaskReceipt | None:
        place = self._receipt_of(number)
        line = small_object(place)
        if line is None:
            return None
        receipt = receipt_from_line(line, place)
        is_right = receipt.task == number
        if self._new.is_shared:
            put = [
                (file, *span)
                for file, begin, end, part in self._new.shares(number)
                for span in ((begin, part), (part, end))
                if span[0] < span[1]
            ]
            is_right &= not receipt.shares or [share[:3] for share in receipt.shares] == put
            held = sum(end - begin for _, begin, end, etag in receipt.shares if not etag)
            is_right &= receipt.uploaded[0] == held > 0 if receipt.uploaded is not None else not held
        else:
            is_right &= receipt.uploaded is not None and receipt.uploaded[0] == self._new.sizes[number]
        if not is_right:
            raise ParseError(f"{place}: the receipt of task {number} does not agree with the plan")
        return receipt


class StoreRecorder:
    """A recorder that stores receipts as objects, or drops them if it has no place."""

    def __init__(self, place: StorePlace | None, part: str) -> None:
        self._place, self._part = place, part

    def add(self, receipt: TaskReceipt) -> None:
        """Store a receipt."""
        if self._place is not None:
            self._place.keep(receipt._replace(part=self._part))

    def flush(self) -> None:
        """Do nothing: each receipt is stored as soon as it is added."""
