"""A checkpoint in an object store: objects under their final names, receipts beside them, and the index last.

There is no rename in a store, and no folder that appears at once. What makes a folder a checkpoint is its index, which
is written when everything else is there, on condition that there is none. A single object appears when it is complete.
Receipts have names of their own, so that no listing is asked for them; those of equal contents agree, also if the
object was made again and is another one to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....errors import ParseError
from ...objects import ATTEMPTS, ObjectPath
from ...sharded import MANIFEST
from ..crew import Crew, crew_of, one_worker
from ..fetch import SourceObject
from ..formats.dcp import INDEX
from ..formats.manifest import manifest_text
from ..ledger import Ledger
from ..object_task import ObjectTask, object_task
from ..plans.plan import WritePlan
from ..receipts import TaskReceipt, receipt_from_line, receipt_line
from ..reports import WriteOutline
from ..task import SourceFile
from ..work import Work
from .parts import FLIGHT, parts_for, parts_of_crew
from .uploads import check_writable, put_object, refusal

__all__ = ["StorePlace", "check_writable"]

#: The longest receipt that is read.
_MOST = 2**28

Answer = TypeVar("Answer")


class StorePlace:
    """Where a plan's checkpoint is to be, and its receipts."""

    finished = ""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.path = cast(ObjectPath, cast(object, plan.path))
        self._root = cast(ObjectPath, cast(object, plan.workplace))
        self._kept: bool | None = None
        check_writable(self.path)

    @property
    def _is_kept(self) -> bool:
        """Whether there are receipts: not of arrays, nor of files that each run makes anew, which no other knows."""
        if self._kept is None:
            self._kept = all(
                isinstance(source, SourceObject) or (isinstance(source, SourceFile) and source.changed is not None)
                for source in self.plan.sources
            )
        return self._kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Stores have no locks."""
        yield

    @property
    def _last(self) -> ObjectPath:
        """What makes it a checkpoint: PyTorch looks for its own index, and does not know the manifest."""
        if not self.plan.is_folder:
            return self.path
        return self.path / (INDEX if INDEX in self.plan.texts else MANIFEST)

    def is_finished(self) -> bool:
        """Whether a checkpoint has the name. A single object that has a receipt still is not committed."""
        return self._last.is_file() and (self.plan.is_folder or not self._receipt_of(0).is_file())

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken, or at which there is anything unless `resume`."""
        # Only an index blocks a folder; other objects are compared one by one, when they are made.
        goes_on = resume and (self.plan.is_folder or self._receipt_of(0).is_file())
        is_there = (self.plan.is_folder and self.path.is_file()) if goes_on else self.path.exists()
        if is_there or (self.plan.is_folder and self._last.is_file()):
            hint = "; resume=True goes on with what an interrupted run left" if not resume else ""
            raise refusal(self.path, hint)

    def check_room(self) -> None:
        """A store does not say how much room it has."""

    def begin(self, *, parts: bool) -> None:
        """Refuse, with FileExistsError, a name at which there is a checkpoint or another object."""
        if self.is_finished() or (self.plan.is_folder and self.path.is_file()):
            raise refusal(self.path)

    def crew(self, work: Work) -> Any:
        """Give what runs the tasks: one after the other in this process, each with all threads; or an executor."""
        if work.executor is None:
            parts_for(self.plan.files, work.memory)
            return nullcontext(one_worker(work))
        crew = crew_of(work)
        places = [self.path, *(source.path for source in self.plan.sources if isinstance(source, SourceObject))]
        inside = next((path for path in places if path.protocol == "memory"), None)
        if inside is not None and not crew.is_here:
            raise TypeError(f"{inside}: is in the memory of this process; give a ThreadPoolExecutor")
        parts_of_crew(self.plan.files, work.memory, crew)
        return nullcontext(crew)

    def outline(self, work: Work) -> WriteOutline:
        """Say what it takes to make the objects in this process."""
        files = self.plan.files
        part, flight, holds = parts_for(files, work.memory)
        sizes = tuple((file.name, file.size) for file in files)
        total = sum(size for _, size in sizes)
        return WriteOutline(sizes, total, part * (3 + holds + flight), work.threads or 1, len(sizes), free=2**63 - 1)

    def task_bytes(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """The bytes of the object of each task."""
        return np.array([self.plan.sizes[number] for number in numbers], np.int64)

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

    def check_written(self, ledger: Ledger, work: Work) -> None:
        """Compare all objects with the sources and the receipts."""
        for number in range(len(self.plan.files)):
            self._confirm(number, ledger, work.memory)

    def check_finished(self, ledger: Ledger) -> None:
        """Refuse, with FileExistsError, other texts, index or manifest than the plan's; objects were compared."""
        if self.plan.is_folder:
            for name, text in self._texts(ledger).items():
                if not _has(self.path / name, text):
                    raise refusal(self.path / name)

    def finish(self, ledger: Ledger, *, sync: bool) -> None:
        """See that every object is still the one that was made; write index and manifest, last what makes it one."""
        found = list(self._each(lambda number: self._object(number).status(), range(len(self.plan.files))))
        for number, status in enumerate(found):
            if ledger.made.get(number) != tuple(status):
                self._confirm(number, ledger, None)
        if self.plan.is_folder:
            texts, last = self._texts(ledger), self._last.name
            for name in sorted(texts, key=lambda name: name == last):
                _put_same(self.path / name, texts[name])
        self.discard()

    def discard(self, ledger: Ledger | None = None) -> None:
        """Remove the receipts, and objects that a failed run has made, if they are still what it made.

        Another run of the same plan may have finished it meanwhile, with these objects: then they are its, and stay.
        """
        # Who keeps no receipts cannot tell its own single object from a finished checkpoint.
        is_others = ledger is not None and (self.plan.is_folder or self._is_kept) and self.is_finished()

        def remove(path: ObjectPath) -> None:
            with suppress(OSError):  # Nobody looks for them any more.
                path.ask(lambda: path.filesystem.rm_file(path.key))

        def remove_made(item: tuple[int, tuple[int, str]]) -> None:
            with suppress(OSError, ParseError):
                if tuple(self._object(item[0]).status()) == item[1]:
                    remove(self._object(item[0]))

        if self._is_kept:
            list(self._each(lambda number: remove(self._receipt_of(number)), range(len(self.plan.files))))
        if ledger is not None and not is_others:
            list(self._each(remove_made, [item for item in ledger.made.items() if item[0] in ledger.own]))

    def _object(self, number: int) -> ObjectPath:
        return self.path / self.plan.files[number].name if self.plan.is_folder else self.path

    def _receipt_of(self, number: int) -> ObjectPath:
        return self._root / f"{number}.receipt"

    def _numbers(self, numbers: range | None) -> range:
        return range(len(self.plan.files)) if numbers is None else numbers

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
        if receipt.task != number or receipt.made is None or receipt.made[0] != self.plan.sizes[number]:
            raise ParseError(
                f"{place}: the receipt of task {number} says that it made something else than the plan says"
            )
        return receipt

    def _confirm(self, number: int, ledger: Ledger, memory: int | None) -> None:
        """Compare an object with its sources, and with its receipt.

        Raises:
            FileExistsError, FileNotFoundError: if it is another one, or none.
            ParseError: if it is not what the receipt says.
        """
        task: ObjectTask = object_task(self.plan, number)
        try:
            ledger.add(task.run(check="") if memory is None else task.run(memory=memory, check="", threads=None))
        except ParseError as error:
            if "two receipts" not in str(error):
                raise
            raise ParseError(f"{self._object(number)}: is not what its receipt says") from None

    def _texts(self, ledger: Ledger) -> dict[str, bytes]:
        """The manifest, and what else is beside the objects with tensors."""
        plan = self.plan
        for number, file in enumerate(plan.files):
            file.digests, file.crcs = {}, ledger.crcs(number) if file.needs_crcs else {}
            for slot in file.slots:
                if slot.tensor not in file.digests and slot.end > slot.begin:
                    file.digests[slot.tensor] = ledger.digest(number, slot.tensor)
        texts: Mapping[str, bytes] = plan.texts
        return {
            **texts,
            MANIFEST: manifest_text(plan.manifest, list(plan.tensors), ledger.digests, plan.files, plan.sizes, texts),
        }


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
            raise refusal(path) from None
