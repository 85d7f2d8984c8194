"""Where a checkpoint is written: what each kind of place can do, and the one question of which kind it is.

A folder gets its name when all is there; in a store each object has its name from the beginning, and the index that
readers look for comes last. Whoever runs a plan asks its place, and never what kind of place that is.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...files import hidden_name
from ...objects import ObjectPath
from ..crew import Crew
from ..ledger import Ledger
from ..plans.plan import WritePlan
from ..receipts import TaskReceipt
from ..reports import WriteOutline
from ..work import Work
from . import folder, store
from .opened import OpenFolder, make_marked, remove_marked

__all__ = [
    "Place",
    "Recorder",
    "Scratch",
    "check_writable",
    "claim_name",
    "is_store",
    "locked",
    "place_of_plan",
    "refuse_source",
]


class Recorder(Protocol):
    """Keeps receipts, each after its data is on the disk."""

    def add(self, receipt: TaskReceipt) -> None:
        """Keep a receipt, now or a little later."""

    def flush(self) -> None:
        """Keep what was added."""


class Place(Protocol):
    """The place of a plan's checkpoint."""

    #: What a task is told that only checks what is there: where that is.
    finished: str

    def locked(self) -> AbstractContextManager[None]:
        """Hold the checkpoint's lock, if there is one: BlockingIOError if another process has it."""

    def is_finished(self) -> bool:
        """Whether a checkpoint has the name."""

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken; unless `resume`, remove what other runs have left."""

    def check_room(self) -> None:
        """Refuse, with OSError, a checkpoint that there is no room for."""

    def begin(self, *, parts: bool) -> None:
        """Make what tasks write to; `parts` says that processes run them that do not know each other."""

    def crew(self, work: Work) -> AbstractContextManager[Crew]:
        """Give what runs the tasks.

        Raises:
            LayoutError: if the memory is too little.
            TypeError: if the workers do not see the place or the sources.
        """

    def outline(self, work: Work) -> WriteOutline:
        """Say what it takes to run the plan in this process."""

    def task_bytes(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """The bytes that each of these tasks writes."""

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts; of these tasks only, if given.

        Raises:
            ParseError: if one is not what was written.
        """

    def recorder(self, numbers: range | None, work: Work, part: str, crew: Crew) -> Recorder:
        """Give what keeps the receipts of tasks with these numbers, run in this part."""

    def check_written(self, ledger: Ledger, work: Work) -> None:
        """Read all that was written, and refuse, with ParseError, what the receipts do not say."""

    def check_finished(self, ledger: Ledger) -> None:
        """Refuse, with FileExistsError, a finished checkpoint with other headers, texts or manifest than the plan's."""

    def finish(self, ledger: Ledger, *, sync: bool) -> None:
        """Write what depends on everything, and make it a checkpoint.

        Raises:
            ParseError, FileExistsError: if what was written is no longer there.
            OSError: if it cannot be written.
        """

    def discard(self, ledger: Ledger | None = None) -> None:
        """Remove what is beside a finished checkpoint; with the ledger of a run that failed, what that has made too."""


def is_store(path: object) -> bool:
    """Whether a path is in an object store."""
    return isinstance(path, ObjectPath)


def place_of_plan(plan: WritePlan) -> Place:
    """Give the place of a plan's checkpoint."""
    return store.StorePlace(plan) if is_store(plan.path) else folder.FolderPlace(plan)


def locked(path: Path) -> AbstractContextManager[None]:
    """Hold the lock of a new checkpoint; in a store there is none."""
    return nullcontext() if is_store(path) else folder.locked(path)


def claim_name(path: Path, *, is_written: bool, resume: bool = False) -> None:
    """Refuse a path that is taken, before a plan is made; in a store only the plan knows what would be.

    Args:
        path: The path, whose lock is held if it `is_written`: then what a killed run left of a finished one is removed.
        is_written: Whether something is written now.
        resume: Whether what is there may be the finished checkpoint itself.
    """
    if not is_store(path) and not (resume and path.exists()):
        (folder.claim_name if is_written else folder.refuse_existing)(path)


def refuse_source(source: Path, target: Path) -> None:
    """Refuse a destination that is the source, or lies inside of it: a source is only read.

    Raises:
        FileExistsError: if it is the source.
        OSError: if it lies inside of it.
    """
    if is_store(source) != is_store(target):
        return
    if is_store(source):
        is_same, is_inside = source == target, str(target).startswith(f"{source}/")
    else:
        is_same = target.exists() and source.exists() and target.samefile(source)
        is_inside = source.is_dir() and target.resolve().is_relative_to(source.resolve())
    if is_same:
        raise FileExistsError(errno.EEXIST, "dst is the source", str(target))
    if is_inside:
        raise OSError(errno.EINVAL, f"dst lies inside of the source {source}, which is only read", str(target))


def check_writable(path: Path, nbytes: int = 0) -> None:
    """Refuse, before anything is made beside it, a place that cannot be written or has no room for so many bytes."""
    if isinstance(path, ObjectPath):
        store.check_writable(path)
    else:
        folder.check_room(path, nbytes, "the checkpoint, with what is written beside it first,")


#: What the mark of the folder beside a destination says.
_MARK = "shardwise spool\n"


class Scratch:
    """A folder for what is put together before it is written: beside the destination, for a store a temporary one."""

    def __init__(self, target: Path) -> None:
        self._beside = None if is_store(target) else target.with_name(f"{hidden_name(target.name)}.spool")
        self._prefix = f"{hidden_name(target.name)}."
        self._made: Path | None = None

    def clear(self) -> None:
        """Remove what a killed run has left; the destination's lock is held."""
        if self._beside is not None:
            with OpenFolder.at(self._beside.parent) as parent:
                remove_marked(parent, self._beside.name, _MARK)

    def folder(self) -> Path:
        """Give the folder, which is made if it is not there."""
        if self._made is None:
            if self._beside is None:
                self._made = Path(tempfile.mkdtemp(prefix=self._prefix))
            else:
                with OpenFolder.at(self._beside.parent) as parent, make_marked(parent, self._beside.name, _MARK):
                    self._made = self._beside
        return self._made

    def remove(self) -> None:
        """Remove the folder; what stays is for the next run to remove."""
        if self._made is not None and self._beside is None:
            shutil.rmtree(self._made, ignore_errors=True)
        elif self._made is not None:
            with suppress(OSError):
                self.clear()
