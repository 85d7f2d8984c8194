"""A checkpoint on a disk: unfinished files, receipts of their contents, a lock, and a rename at the end.

The workplace is a folder next to the checkpoint whose name begins with a dot. It has a folder for each plan, named by
the plan's digest, so that a late task of another plan finds no file to write to. Anything else in the workplace
is left alone: see `opened`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from ...._atomic import naming_file
from ...._core import FileLock, publish, sync_files
from ....errors import ParseError
from ...data.engine import CopyJob
from ...data.location import hidden_name, taken, workplace_of
from ...data.own_folders import (
    MadeFolders,
    OpenFolder,
    make_marked,
    opened_below,
    refuse_stranger,
    remove_marked,
    write_all,
)
from .folder_recorder import FolderRecorder
from .leftovers import (
    DATA,
    PARTS,
    check_room,
    free_bytes,
    is_left_by_others,
    marker_of,
    remove_plans,
    unfinished_name,
)
from .place import Completion, NewCheckpoint
from .receipts import receipt_from_line
from .regions import FolderSink
from .task import TaskReceipt
from .work import Work, Workers, workers_for

__all__ = ["FolderPlace", "claim_name", "locked", "refuse_existing"]

#: The folder of receipts in a plan's folder.
_RECEIPTS = "receipts"
#: The longest line of receipts that is read.
_MOST_LINE = 2**26
#: The most bytes that the two buffers of a thread take.
_MOST_BUFFERS = 16 * 2**20
#: The unit, in bytes, in which a file system gives room to files and folders; and the bytes of a receipt.
_BLOCK, _RECEIPT = 4096, 512
#: With this many bytes to spare, the room for the files next to the tensors is not worked out.
_AMPLE = 4 * 2**30


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a checkpoint's lock; BlockingIOError if another process, or another run in this process, has it."""
    _check_parent(path)
    lock = FileLock(path.with_name(f"{hidden_name(path.name)}.lock"))
    try:
        yield
    finally:
        lock.release()


def claim_name(path: Path) -> None:
    """Refuse a path that exists. The caller holds its lock; remains of a run that was killed at its end are removed."""
    if path.exists():
        remove_plans(path)
    refuse_existing(path)


def refuse_existing(path: Path) -> None:
    """Refuse a path that exists, and a path in a folder that does not exist."""
    if path.exists() or path.is_symlink():
        raise taken(path)
    _check_parent(path)


class FolderPlace:
    """The place of a checkpoint in a file system."""

    inside = ""
    takes_whole_files = False

    def __init__(self, new: NewCheckpoint) -> None:
        if new.is_shared:
            raise ParseError(f"{new.path}: the plan is for a store whose objects are put together from parts")
        self._new, self.path = new, Path(new.path)
        self.root = workplace_of(self.path) / new.digest[:16]
        self.folder = self.root / DATA
        self._finished = str(self.path if new.is_folder else self.path.parent)

    def least_part(self, size: int) -> int:
        """Always 1: tasks write any bytes of a file in place."""
        return 1

    def sink(self, number: int) -> FolderSink:
        """Return the sink of all tasks: each task writes regions of the unfinished files."""
        return FolderSink(str(self.folder), self._finished)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the checkpoint's lock; BlockingIOError if another process has it."""
        with locked(self.path):
            yield

    def is_finished(self) -> bool:
        """Return whether a checkpoint exists under the final name."""
        return self.path.exists()

    def free(self) -> int:
        """Return the free bytes of the file system."""
        return free_bytes(self.path)

    def check_room(self, beside: Callable[[], Iterable[int]]) -> None:
        """Refuse, with OSError, a checkpoint that there is no room for; remains of an interrupted run count as room."""
        nbytes = sum(self._new.sizes)
        if self.free() - nbytes >= _AMPLE:
            return  # Nothing beside the tensors is as large, and to know how large it is takes a while.
        more = _RECEIPT * len(self._new.tasks) + _BLOCK * 4 + sum(size + _BLOCK for size in beside())
        check_room(self.path, nbytes + more)

    def workers(self, work: Work, each: int) -> AbstractContextManager[Workers]:
        """Return the workers for tasks that need `each` bytes of memory: threads, or the caller's executor."""
        return workers_for(work, nbytes=sum(self._new.sizes), tasks=len(self._new.tasks), each=each)

    def buffers(self, work: Work, workers: Workers) -> int:
        """Return the most bytes that the buffers of all workers take."""
        return workers.count * min(workers.memory, _MOST_BUFFERS)

    def claim(self, resume: bool) -> None:
        """Refuse a name that is taken, and remove the remains of other runs; with `resume`, those of this plan stay.

        Raises:
            FileExistsError: if the name is taken, or another plan is being run there in parts.
        """
        claim_name(self.path)
        remove_plans(self.path, but=self.root.name if resume else "", parts=False)

    def is_of_another_run(self) -> bool:
        """Return whether the unfinished work next to the checkpoint is that of other plans alone."""
        return is_left_by_others(self.path, self.root.name)

    def begin(self) -> None:
        """Make the unfinished files in full size, without contents, unless another process has made them."""
        with self._begun():
            pass

    def begin_parts(self) -> None:
        """Make the unfinished files, and note that the plan is run in parts."""
        with self._begun() as root:
            root.write(PARTS, b"", sync=False)

    @contextmanager
    def _begun(self) -> Iterator[OpenFolder]:
        """Make the unfinished files, and yield the open folder of the plan."""
        refuse_existing(self.path)
        with ExitStack() as stack:
            beside = stack.enter_context(OpenFolder.at(self.root.parent.parent))
            with suppress(FileExistsError):
                beside.make(self.root.parent.name, 0o700)
            top = stack.enter_context(beside.enter(self.root.parent.name))
            root = stack.enter_context(make_marked(top, self.root.name, marker_of(self.root.name)))
            if root.status(DATA) is None:
                self._make_files(root)
            with suppress(FileExistsError):
                root.make(_RECEIPTS)
            for name in (DATA, _RECEIPTS):
                root.enter(name).__exit__()
            yield root

    def _make_files(self, root: OpenFolder) -> None:
        name = f"making.{secrets.token_hex(8)}"
        root.make(name)
        try:
            job = CopyJob()
            with root.enter(name) as made:
                for number, size in enumerate(self._new.sizes):
                    job.write_file(made.path / self._unfinished_name(number), size, made.descriptor)
                job.run(threads=1)
            root.rename(name, DATA)
        except OSError:
            if root.status(DATA) is None or root.status(name) is None:  # If both exist, another process was faster.
                raise
        finally:
            with suppress(OSError):
                root.remove(name)

    def recorder(self, numbers: range | None, work: Work, part: str, workers: Workers) -> FolderRecorder:
        """Return a recorder that writes the receipts of tasks with these numbers to a file of its own."""
        first, end = (numbers.start, numbers.stop) if numbers is not None else (0, len(self._new.tasks))
        token = secrets.token_hex(4)
        host = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter in "-_")[:64]
        name = f"{first}-{end}-{host}-{os.getpid()}-{token}.jsonl"
        return FolderRecorder(self.sync, self.root / _RECEIPTS / name, work, part, gather=workers.is_here)

    def sync(self, numbers: Iterable[int]) -> None:
        """Sync the data of the files with these numbers to the disk."""
        sync_files([self.unfinished(number) for number in sorted(numbers)])

    def _unfinished_name(self, number: int) -> str:
        return unfinished_name(number, self._new.files[number].name)

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read all receipts, or those of the tasks in `numbers`.

        Raises:
            ParseError: if a receipt is damaged.
        """
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(opened_below(self.root / _RECEIPTS, 3))
            except FileNotFoundError:
                return
            for name in folder.names():
                if not name.endswith(".jsonl") or (numbers is not None and not _may_hold(name, numbers)):
                    continue
                path = folder.path / name
                with folder.file(name, os.O_RDONLY) as raw, naming_file(path), BufferedReader(raw) as stream:  # type: ignore[type-var]
                    for line in iter(lambda stream=stream: stream.readline(_MOST_LINE), b""):  # type: ignore[misc]
                        if not line.endswith(b"\n"):
                            break  # Its writer was killed.
                        receipt = receipt_from_line(line, path)
                        if numbers is None or receipt.task in numbers:
                            yield receipt

    def finish(self, completion: Completion, *, sync: bool) -> None:
        """Write headers, texts and manifest, and rename the folder or file to the checkpoint's name.

        Raises:
            ParseError: if a file is missing or does not have its full size.
            OSError: if a file cannot be written.
        """
        if not len(self._new.tasks):
            self.begin_parts()  # Tensors without elements have no tasks.
        with opened_below(self.folder, 3) as folder:
            self._write_headers(folder, completion)
            with MadeFolders(folder) as folders:
                for number, file in enumerate(self._new.files):
                    if "/" in file.name and folder.status(self._unfinished_name(number)) is not None:
                        inner, name = folders.of(file.name)
                        folder.move(self._unfinished_name(number), inner, name)
                for path, text in completion.texts().items() if self._new.is_folder else ():
                    inner, name = folders.of(path)
                    inner.write(name, text, sync=sync)
                if sync:
                    self.sync(range(len(self._new.files)))
                    folders.sync()
            if self._new.is_folder:
                with opened_below(self.root, 2) as root:
                    self._publish(self.folder, root, sync=sync)
            else:
                (file,) = self._new.files
                self._publish(self.folder / file.name, folder, sync=sync)
        self.discard()

    def _write_headers(self, folder: OpenFolder, completion: Completion) -> None:
        """Write the bytes around the tensors of each file.

        Raises:
            ParseError: if a file does not have its full size.
            FileExistsError: if something else is in the folder, or at the path of a file.
        """
        known = {file.name for file in self._new.files} | set(completion.names if self._new.is_folder else ())
        folders = {name[: match.start()] for name in known for match in re.finditer("/", name)}
        known.update(map(self._unfinished_name, range(len(self._new.files))))
        strange = next(_strangers(folder, "", known, folders), None)
        if strange is not None:
            raise refuse_stranger(folder.path / strange)
        names = set(folder.names())
        for number, (file, size) in enumerate(zip(self._new.files, self._new.sizes, strict=True)):
            path = folder.path / self._unfinished_name(number)
            with ExitStack() as stack:
                inner, depth = folder, file.name.count("/")
                if depth and path.name not in names:  # A run that was killed may have moved it to its own folder.
                    path = folder.path / file.name
                    inner = stack.enter_context(opened_below(path.parent, 3 + depth))
                stream = stack.enter_context(inner.file(path.name, os.O_RDWR))
                stack.enter_context(naming_file(path))
                found = os.fstat(stream.fileno()).st_size
                if found != size:
                    raise ParseError(f"{path}: has {found} bytes, but was made with {size}")
                for at, text in completion.headers(number):
                    stream.seek(at)
                    write_all(stream, text)

    def _publish(self, made: Path, folder: OpenFolder, *, sync: bool) -> None:
        """Rename what was made, in this open folder, to the checkpoint's name."""
        found = folder.status(made.name)
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise refuse_stranger(made)
        try:
            publish(made, folder.descriptor, self.path, sync=sync)
        except OSError as error:
            if found is None or folder.status(made.name) is not None:
                raise
            self.discard()
            reason = f"{error.strerror}; the checkpoint is complete, but a loss of power may undo its final rename"
            raise OSError(error.errno, reason, str(self.path)) from None

    def check_finished(self, completion: Completion) -> None:
        """Refuse, with FileExistsError, a finished checkpoint whose headers, texts or manifest differ from these."""
        wanted = [
            (Path(self._finished, file.name), at, text)
            for number, file in enumerate(self._new.files)
            for at, text in completion.headers(number)
        ]
        if self._new.is_folder:
            wanted += [(self.path / name, 0, text) for name, text in completion.texts().items()]
        for path, at, text in wanted:
            found = b""
            with suppress(OSError), path.open("rb") as stream:
                stream.seek(at)
                found = stream.read(len(text))
            if found != text:
                raise taken(self.path, "exists already, and is not what this plan makes")

    def unfinished(self, number: int) -> Path:
        """Return the path that a file has until the checkpoint is renamed."""
        path = self.folder / self._unfinished_name(number)
        name = self._new.files[number].name
        return self.folder / name if "/" in name and not path.exists() else path

    def withdraw(self, uploaded: object) -> None:
        """Remove the unfinished files, as `discard` does: a failed run leaves nothing else."""
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished files, as far as possible; the next run removes what is left."""
        with suppress(OSError), opened_below(self.root.parent, 1) as top:
            remove_marked(top, self.root.name, marker_of(self.root.name))
        with (
            suppress(OSError),
            OpenFolder.at(self.root.parent.parent) as beside,
        ):  # Another plan may have a folder there.
            beside.remove_empty(self.root.parent.name)


def _strangers(folder: OpenFolder, path: str, known: Collection[str], folders: Collection[str]) -> Iterator[str]:
    """Yield the paths in a folder of unfinished files that no run makes."""
    for name in folder.names():
        if path + name in folders:
            with folder.enter(name) as inner:
                yield from _strangers(inner, f"{path}{name}/", known, folders)
        elif path + name not in known:
            yield path + name


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder for the checkpoint does not exist", str(path.parent))


def _may_hold(name: str, numbers: range) -> bool:
    first, _, rest = name.partition("-")
    end = rest.partition("-")[0]
    if not (first.isdecimal() and end.isdecimal()):
        return True
    return int(first) < numbers.stop and numbers.start < int(end)
