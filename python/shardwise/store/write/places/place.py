"""The protocol of places: their operations, the questions that they ask of a checkpoint, and receipts.

A folder gets its name when all is there; in a store each object has its name from the beginning, and the index that
readers look for comes last (rule 2.12 h). Whoever runs a plan asks its place, and never what kind of place that is
(rule 2.12 e). A receipt is a line of JSON with a digest of itself (rule 2.12 d).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ....errors import ParseError
from ...data.engine import DIGEST_MODULUS
from ..forms.files import TargetFile
from .task import Share, Sink, TaskReceipt
from .work import Work, Workers

__all__ = [
    "Completion",
    "FileShare",
    "NewCheckpoint",
    "Place",
    "Recorder",
    "receipt_from_line",
    "receipt_line",
    "sealed_line",
    "unsealed",
]


class FileShare(NamedTuple):
    """A task's share of a file that several tasks make.

    Attributes:
        file: The number of the file.
        begin: The first byte.
        end: One past the last.
        part: The first byte that is in a part of its own; what is before it is too short for that.
    """

    file: int
    begin: int
    end: int
    part: int


class NewCheckpoint(Protocol):
    """A checkpoint that is to be written."""

    @property
    def path(self) -> Any:
        """Its place."""

    @property
    def is_folder(self) -> bool:
        """True if that is a folder; else it is the only file."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the plan."""

    @property
    def files(self) -> Sequence[TargetFile]:
        """Its files with tensors."""

    @property
    def sizes(self) -> Sequence[int]:
        """The bytes of each."""

    @property
    def last(self) -> str:
        """Name of the file that makes a folder a checkpoint (manifest or index); it is written last."""

    @property
    def tasks(self) -> Sized:
        """The tasks of the plan."""

    @property
    def is_kept(self) -> bool:
        """True if another run finds the same sources, so that receipts are of use to it."""

    @property
    def is_shared(self) -> bool:
        """True if tasks make parts of several files, which are put together at the end."""

    @property
    def most_shared(self) -> int:
        """The most bytes that a task holds of such files."""

    def shares(self, number: int) -> Sequence[FileShare]:
        """Return a task's shares of files."""

    def known_before(self, file: int) -> bytes:
        """Return the bytes before the first tensor of a file, if they do not depend on the tasks; else no bytes."""


class Completion(Protocol):
    """The part of a checkpoint that is written when all tasks are done."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the further files of a folder."""

    @property
    def made(self) -> Mapping[int, tuple[int, str]]:
        """For tasks that made an object, its bytes and its ETag."""

    @property
    def shares(self) -> Mapping[int, tuple[Share, ...]]:
        """For tasks that made parts of objects, what they have put."""

    @property
    def is_checked(self) -> bool:
        """True if all that a store has is compared with its sources."""

    def headers(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes around the tensors of a file, each run with the byte at which it begins."""

    def texts(self) -> dict[str, bytes]:
        """The further files of a folder, with the manifest."""

    def confirm(self, number: int) -> None:
        """Compare what a task has made with its sources and its receipt.

        Raises:
            FileExistsError, FileNotFoundError: if something else is there, or nothing.
            ParseError: if it is not what the receipt says.
        """


class Recorder(Protocol):
    """Keeps receipts, each after its data is on the disk."""

    def add(self, receipt: TaskReceipt) -> None:
        """Keep a receipt, now or a little later."""

    def flush(self) -> None:
        """Keep what was added."""


class Place(Protocol):
    """The place of a checkpoint."""

    @property
    def takes_whole_files(self) -> bool:
        """True if a task makes a whole file of the checkpoint; else it writes a part of any."""

    def least_part(self, size: int) -> int:
        """The least bytes of a part of a file of this size, if tasks make parts of files, which are put together."""

    @property
    def inside(self) -> str:
        """The checkpoint's URL if it is in the memory of this process, else an empty string."""

    def sink(self, number: int) -> Sink:
        """Return the sink into which the task with this number writes."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the checkpoint's lock, if there is one: BlockingIOError if another process has it."""

    def is_finished(self) -> bool:
        """Return whether a checkpoint has the name."""

    def claim(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name that is taken; unless `resume`, remove what other runs have left."""

    def free(self) -> int | None:
        """The bytes that are free, if the place knows."""

    def check_room(self, beside: Callable[[], Iterable[int]]) -> None:
        """Refuse, with OSError, a checkpoint that there is no room for.

        Args:
            beside: Gives the bytes of each range that is written besides the tensors.
        """

    def begin(self, *, parts: bool) -> None:
        """Make what tasks write to; `parts` says that processes run them that do not know each other."""

    def workers(self, work: Work, each: int) -> AbstractContextManager[Workers]:
        """Give what runs the tasks, each of which needs so many bytes of memory.

        Raises:
            LayoutError: if the memory is too little.
        """

    def buffers(self, work: Work, workers: Workers) -> int:
        """The most bytes that the buffers of workers take."""

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts; of these tasks only, if given.

        Raises:
            ParseError: if one is not what was written.
        """

    def recorder(self, numbers: range | None, work: Work, part: str, workers: Workers) -> Recorder:
        """Give what keeps the receipts of tasks with these numbers, run in this part."""

    def unfinished(self, number: int) -> Path | None:
        """Return the path of a file until the checkpoint has its name; `None` if the file has its own already."""

    def check_finished(self, completion: Completion) -> None:
        """Refuse, with FileExistsError, a finished checkpoint with other headers, texts or manifest than these."""

    def finish(self, completion: Completion, *, sync: bool) -> None:
        """Write what depends on everything, and make it a checkpoint.

        Raises:
            ParseError, FileExistsError: if what was written is no longer there.
            OSError: if it cannot be written.
        """

    def discard(self, made: Mapping[int, tuple[int, str]] | None = None) -> None:
        """Remove what is beside a finished checkpoint; of a run that failed also the objects that it has `made`."""


def receipt_line(receipt: TaskReceipt) -> bytes:
    """Write a receipt as a line."""
    said = [*receipt[:3], [f"{digest:x}" for digest in receipt.digests], *receipt[4:]]
    return sealed_line(said)


def sealed_line(said: Any) -> bytes:
    """Write something as a line of JSON with a digest of it."""
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(text), text)


def receipt_from_line(line: bytes, where: object) -> TaskReceipt:
    """Read a receipt.

    Raises:
        ParseError: if the line is not what `receipt_line` wrote.
    """
    with unsealed(line, where, "a receipt") as said:
        plan, task, ranges, digests, crcs, read, written, seconds, worker, part, shares, made = said
        receipt = TaskReceipt(
            str(plan),
            task,
            tuple((file, begin, end) for file, begin, end in ranges),
            tuple(int(digest, 16) for digest in digests),
            tuple(crcs),
            read,
            written,
            float(seconds),
            str(worker),
            str(part),
            tuple((file, begin, end, str(etag)) for file, begin, end, etag in shares),
            None if made is None else _made(*made),
        )
        numbers = [number for row in receipt.ranges for number in row]
        numbers += [number for row in receipt.shares for number in row[:3]]
        sizes = [] if receipt.made is None else [receipt.made[0]]
        if not all(type(number) is int for number in (task, read, written, *numbers, *sizes, *receipt.crcs)):
            raise ValueError
        if not all(0 <= digest < DIGEST_MODULUS for digest in receipt.digests):
            raise ValueError
        if not all(0 <= crc < 2**32 for crc in receipt.crcs):
            raise ValueError
    return receipt


def _made(size: int, etag: str) -> tuple[int, str]:
    return size, str(etag)


@contextmanager
def unsealed(line: bytes, where: object, what: str) -> Iterator[Any]:
    """Give what a line says; refuse, with ParseError, one that is not of `sealed_line`, or that says no such thing."""
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if _digest(text) != digest:
        raise ParseError(f"{where}: {what} is not what was written: it was edited or is damaged")
    try:
        yield json.loads(text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ParseError(f"{where}: {what} has contents that no task writes") from None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()
