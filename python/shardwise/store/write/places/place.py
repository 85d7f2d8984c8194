"""The protocol of places: their operations, and the questions that they ask about a checkpoint.

A folder gets its name when everything is written; in a store each object has its name from the beginning, and the index
that readers look for comes last (rule 2.12 h). The code that runs a plan calls its place, and never asks what kind of
place that is (rule 2.12 e).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..forms.files import TargetFile
from .task import Share, Sink, TaskReceipt
from .work import Work, Workers

__all__ = ["Completion", "FileShare", "Place", "Recorder"]


class FileShare(NamedTuple):
    """A task's share of a file that several tasks make.

    Attributes:
        file: The number of the file.
        begin: The first byte.
        end: The byte after the last.
        part: The first byte that is uploaded in a part; the bytes from `begin` to it are too few for a part.
    """

    file: int
    begin: int
    end: int
    part: int


class NewCheckpoint(Protocol):
    """The members of a plan that the place of its checkpoint needs; `CheckpointTasks` documents each member."""

    @property
    def path(self) -> Any: ...
    @property
    def is_folder(self) -> bool: ...
    @property
    def digest(self) -> str: ...
    @property
    def files(self) -> Sequence[TargetFile]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def last(self) -> str: ...
    @property
    def tasks(self) -> Sized: ...
    @property
    def is_kept(self) -> bool: ...
    @property
    def is_shared(self) -> bool: ...
    @property
    def most_shared(self) -> int: ...
    def shares(self, number: int) -> Sequence[FileShare]: ...
    def known_before(self, file: int) -> bytes: ...


class Completion(Protocol):
    """The bytes of a checkpoint that are written when all tasks are done."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the folder's files without tensors."""

    @property
    def uploaded(self) -> Mapping[int, tuple[int, str]]:
        """The size in bytes and the ETag of the object that a task made, by the task's number."""

    @property
    def shares(self) -> Mapping[int, tuple[Share, ...]]:
        """The parts of objects that a task uploaded, by the task's number."""

    @property
    def is_checked(self) -> bool:
        """True if all objects of a store are compared with the sources."""

    def headers(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes around the tensors of a file: each run after the byte at which it begins."""

    def texts(self) -> dict[str, bytes]:
        """Return the contents of the folder's files without tensors, with the manifest, by name."""

    def confirm(self, number: int) -> None:
        """Compare the object that a task made with its sources and its receipt.

        Raises:
            FileExistsError, FileNotFoundError: if there is another object, or none.
            ParseError: if it is not what the receipt says.
        """


class Recorder(Protocol):
    """Stores receipts, each after its task's data is on the disk."""

    def add(self, receipt: TaskReceipt) -> None:
        """Take a receipt, to be stored now or a little later."""

    def flush(self) -> None:
        """Store the receipts that were taken and not stored yet."""


class Place(Protocol):
    """The place of a checkpoint: all operations that depend on whether it is on a disk or in a store."""

    @property
    def takes_whole_files(self) -> bool:
        """True if each task makes one whole file; False if tasks write parts of any files."""

    def least_part(self, size: int) -> int:
        """Return the least bytes of a part of a file of this size, for tasks that make parts of files."""

    @property
    def inside(self) -> str:
        """The checkpoint's URL if it is in the memory of this process, else an empty string."""

    def sink(self, number: int) -> Sink:
        """Return the sink into which the task with this number writes."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the checkpoint's lock, if the place has locks; BlockingIOError if another process has it."""

    def is_finished(self) -> bool:
        """Return whether a checkpoint exists under the final name."""

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken. Remove remains of runs; `resume` keeps this plan's."""

    def is_of_another_run(self) -> bool:
        """Return whether the unfinished work next to the checkpoint is that of other plans alone."""

    def free(self) -> int | None:
        """Return the free bytes, or `None` if the place does not know."""

    def check_room(self, beside: Callable[[], Iterable[int]]) -> None:
        """Refuse, with OSError, a checkpoint that there is no room for.

        Args:
            beside: Returns the size of each file that is written besides those with tensors.
        """

    def begin(self) -> None:
        """Prepare for the tasks of one run: make unfinished files, or begin uploads, also those that are gone."""

    def begin_parts(self) -> None:
        """Prepare for the parts of a plan, which independent processes run: make what no other has made."""

    def workers(self, work: Work, each: int) -> AbstractContextManager[Workers]:
        """Return the workers that run tasks, each of which needs `each` bytes of memory.

        Raises:
            LayoutError: if the memory is too little.
        """

    def buffers(self, work: Work, workers: Workers) -> int:
        """Return the most bytes that the buffers of all workers take."""

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read all receipts, or those of the tasks in `numbers`.

        Raises:
            ParseError: if a receipt is damaged.
        """

    def recorder(self, numbers: range | None, work: Work, part: str, workers: Workers) -> Recorder:
        """Return a recorder for the tasks with these numbers, run in this part of the plan."""

    def unfinished(self, number: int) -> Path | None:
        """Return the path that a file has until the checkpoint is renamed; `None` if the place renames nothing."""

    def check_finished(self, completion: Completion) -> None:
        """Refuse, with FileExistsError, a finished checkpoint whose headers, texts or manifest differ from these."""

    def finish(self, completion: Completion, *, sync: bool) -> None:
        """Write the bytes that depend on all tasks, and give the checkpoint its name.

        Raises:
            ParseError, FileExistsError: if data that was written is no longer there.
            OSError: if a file cannot be written.
        """

    def discard(self) -> None:
        """Remove unfinished files and receipts."""

    def withdraw(self, uploaded: Mapping[int, tuple[int, str]]) -> None:
        """Remove unfinished files and receipts, and the objects that a failed run has uploaded."""
