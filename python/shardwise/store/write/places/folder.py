"""A checkpoint on a disk: unfinished files, receipts for what is in them, a lock, and a name at the end.

The workplace is a folder beside the checkpoint whose name begins with a dot. Each plan has a folder of its own in it,
named by the plan's digest, so that a late task of another plan finds nothing to write to. Whatever else is found there
is not touched: see `opened`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .... import _core
from ...._atomic import naming
from ...._text import bytes_text, shown
from ....errors import ParseError
from ...engine import CopyJob, HeldPiece, add_digests, check_memory
from ...files import hidden_name
from ...sharded import MANIFEST
from ..crew import Crew, crew_for
from ..fetch import is_in_memory, is_remote, memory_for
from ..formats.manifest import manifest_text
from ..ledger import Ledger
from ..plans.forecast import bytes_to_read, estimated_seconds, runs_to_copy
from ..plans.plan import WritePlan, workplace_of
from ..receipts import TaskReceipt, receipt_from_line, receipt_line
from ..reports import WriteOutline
from ..work import Work
from .opened import (
    OpenFolder,
    make_marked,
    opened_below,
    refuse_stranger,
    refuse_unmarked,
    remove_marked,
    write_all,
)

__all__ = ["FolderPlace", "check_room", "claim_name", "locked", "refuse_existing"]

#: The name of a plan's folder: the beginning of its digest.
_PLAN = re.compile(r"[0-9a-f]{16}")
#: In a plan's folder, the file that says that parts of the plan are run by processes that do not know each other.
_PARTS = "parts"
#: The folders in a plan's folder.
_DATA, _RECEIPTS = "data", "receipts"
#: The longest line of receipts that is read.
_MOST_LINE = 2**26
#: Seconds after which receipts are written whose data is on the disk already.
_SOON = 0.1
#: The most bytes that the two buffers of a thread take.
_MOST_BUFFERS = 16 * 2**20
#: The bytes that files and folders take in a file system at a time, and those of a receipt while it is needed.
_BLOCK, _RECEIPT = 4096, 512
#: With so many bytes to spare there is room for what is beside the tensors.
_AMPLE = 4 * 2**30


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a checkpoint's lock: BlockingIOError if another process has it, or another run of this one."""
    _check_parent(path)
    lock = _core.FileLock(path.with_name(f"{hidden_name(path.name)}.lock"))
    try:
        yield
    finally:
        lock.release()


def claim_name(path: Path) -> None:
    """Refuse a path that exists, under its lock; remove what a run has left that was killed when all was done."""
    if path.exists():
        _remove_plans(path)
    refuse_existing(path)


def refuse_existing(path: Path) -> None:
    """Refuse a path that exists, or whose folder does not."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(17, "exists already; a checkpoint is written to a new name", str(path))
    _check_parent(path)


class FolderPlace:
    """The place of a plan's checkpoint on a disk."""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.finished = str(plan.path if plan.is_folder else plan.path.parent)
        self.root = plan.workplace
        self.folder = plan.folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the checkpoint's lock: BlockingIOError if another process has it."""
        with locked(self.plan.path):
            yield

    def is_finished(self) -> bool:
        """Whether a checkpoint has the name."""
        return self.plan.path.exists()

    def check_room(self) -> None:
        """Refuse, with OSError, a checkpoint that there is no room for; what an interrupted run left makes room."""
        plan = self.plan
        if _core.free_space(plan.path.parent) - plan.nbytes >= _AMPLE:
            return  # No manifest is as large, and to make one takes a while.
        beside = _RECEIPT * len(plan.tasks) + _BLOCK * 4
        if plan.is_folder:
            texts = self._texts([0] * len(plan.tensors)).values()  # Digests have the same length whatever they are.
            beside += sum(len(text) + _BLOCK for text in texts)
        check_room(plan.path, plan.nbytes + beside)

    def _is_remote(self) -> bool:
        """Whether something is read from a store. What a plan file lists is all in a store, or all on disks."""
        is_saved = self.plan._file is not None
        return is_remote([next(iter(self.plan.sources), None)] if is_saved else self.plan.sources)

    def crew(self, work: Work) -> AbstractContextManager[Crew]:
        """Give what runs the tasks: threads, or an executor."""
        plan = self.plan
        if not self._is_remote():
            return crew_for(work, nbytes=plan.nbytes, tasks=len(plan.tasks))
        inside = next((str(source.path) for source in filter(is_in_memory, plan.sources)), None)
        if inside is not None and work.executor is not None and not isinstance(work.executor, ThreadPoolExecutor):
            raise TypeError(f"{inside}: is in the memory of this process; give a ThreadPoolExecutor")
        largest = int(plan.grid.bytes.max(initial=0))
        return crew_for(work, nbytes=plan.nbytes, tasks=len(plan.tasks), each=memory_for(largest))

    def outline(self, work: Work) -> WriteOutline:
        """Say what it takes to run the plan in this process."""
        plan = self.plan
        to_read = bytes_to_read(plan)
        with self.crew(work) as crew:
            return WriteOutline(
                tuple(zip((file.name for file in plan.files), plan.sizes, strict=True)),
                plan.nbytes,
                crew.workers * min(crew.memory, _MOST_BUFFERS),
                crew.workers,
                len(plan.tasks),
                _core.free_space(plan.path.parent),
                to_read,
                runs_to_copy(plan),
                # A sample of files does not tell how fast a store is.
                None if self._is_remote() else estimated_seconds(plan, to_read, sync=work.sync),
            )

    def task_bytes(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """The bytes that each of these tasks writes."""
        if not len(numbers):
            return np.zeros(0, np.int64)
        found: npt.NDArray[np.int64] = self.plan.written_bytes[np.asarray(numbers, np.int64)]
        return found

    def claim(self, resume: bool) -> None:
        """Remove what other runs have left, including runs of this plan unless it is resumed.

        Raises:
            FileExistsError: if another plan is being run there in parts.
        """
        claim_name(self.plan.path)
        _remove_plans(self.plan.path, but=self.root.name if resume else "", parts=False)

    def begin(self, *, parts: bool) -> None:
        """Make the files, unless another process has: all of them in full size, without their contents."""
        refuse_existing(self.plan.path)
        with ExitStack() as stack:
            beside = stack.enter_context(OpenFolder.at(self.root.parent.parent))
            with suppress(FileExistsError):
                beside.make(self.root.parent.name, 0o700)
            top = stack.enter_context(beside.enter(self.root.parent.name))
            root = stack.enter_context(make_marked(top, self.root.name, _mark(self.root.name)))
            if root.status(_DATA) is None:
                self._make_files(root)
            with suppress(FileExistsError):
                root.make(_RECEIPTS)
            for name in (_DATA, _RECEIPTS):
                root.enter(name).__exit__()
            if parts:
                root.write(_PARTS, b"", sync=False)

    def _make_files(self, root: OpenFolder) -> None:
        name = f"making.{secrets.token_hex(8)}"
        root.make(name)
        try:
            job = CopyJob()
            with root.enter(name) as made:
                for file, size in zip(self.plan.files, self.plan.sizes, strict=True):
                    job.write_file(made.path / file.name, size, made.descriptor)
                job.run(threads=1)
            root.rename(name, _DATA)
        except OSError:
            if root.status(_DATA) is None or root.status(name) is None:  # If both exist, another process was faster.
                raise
        finally:
            with suppress(OSError):
                root.remove(name)

    def recorder(self, numbers: range | None, work: Work, part: str, crew: Crew) -> FolderRecorder:
        """Give what writes the receipts of tasks with these numbers to a file of its own."""
        first, end = (numbers.start, numbers.stop) if numbers is not None else (0, len(self.plan.tasks))
        token = secrets.token_hex(4)
        host = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter in "-_")[:64]
        name = f"{first}-{end}-{host}-{os.getpid()}-{token}.jsonl"
        return FolderRecorder(self, self.root / _RECEIPTS / name, work, part, gather=crew.is_here)

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts; of `numbers` only, if given.

        Raises:
            ParseError: if one is not what was written.
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
                with folder.file(name, os.O_RDONLY) as raw, naming(path), BufferedReader(raw) as stream:  # type: ignore[type-var]
                    for line in iter(lambda stream=stream: stream.readline(_MOST_LINE), b""):  # type: ignore[misc]
                        if not line.endswith(b"\n"):
                            break  # Its writer was killed.
                        receipt = receipt_from_line(line, path)
                        if numbers is None or receipt.task in numbers:
                            yield receipt

    def finish(self, ledger: Ledger, *, sync: bool) -> None:
        """Write headers, texts and manifest, and give the checkpoint its name.

        Raises:
            ParseError: if a file is missing or does not have its full size.
            OSError: if a file cannot be written.
        """
        plan = self.plan
        if not len(plan.tasks):
            self.begin(parts=True)  # Tensors without elements have no tasks.
        digests = self._digests(ledger)
        with opened_below(self.folder, 3) as folder:
            self._write_frames(folder, ledger)
            for name, text in self._texts(digests).items() if plan.is_folder else ():
                folder.write(name, text, sync=sync)
            if sync:
                _core.sync_files([self.folder / file.name for file in plan.files])
            if plan.is_folder:
                with opened_below(self.root, 2) as root:
                    self._publish(self.folder, root)
            else:
                (file,) = plan.files
                self._publish(self.folder / file.name, folder)
        self.discard()

    def _digests(self, ledger: Ledger) -> list[int]:
        """The digests of the tensors; those of what each file has of them are noted in the file."""
        for number, file in enumerate(self.plan.files):
            file.digests = {}
            for slot in file.slots:
                if slot.tensor not in file.digests:
                    file.digests[slot.tensor] = ledger.digest(number, slot.tensor)
        return ledger.digests

    def _frame(self, number: int, ledger: Ledger) -> Iterable[tuple[int, bytes]]:
        """What surrounds the tensors of a file."""
        file = self.plan.files[number]
        if file.needs_crcs:
            file.crcs = ledger.crcs(number)
        return file.frame()

    def _texts(self, digests: list[int]) -> dict[str, bytes]:
        """The manifest, and the other files beside those with tensors."""
        plan = self.plan
        manifest = manifest_text(plan.manifest, list(plan.tensors), digests, plan.files, plan.sizes, plan.texts)
        return {MANIFEST: manifest, **plan.texts}

    def _write_frames(self, folder: OpenFolder, ledger: Ledger) -> None:
        """Write what surrounds the tensors of each file.

        Raises:
            ParseError: if a file does not have its full size.
            FileExistsError: if there is something else in the folder, or in the place of a file.
        """
        plan = self.plan
        known = {file.name for file in plan.files} | ({MANIFEST, *plan.texts} if plan.is_folder else set())
        strange = next((name for name in folder.names() if name not in known), None)
        if strange is not None:
            raise refuse_stranger(folder.path / strange)
        for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
            with folder.file(file.name, os.O_RDWR) as stream, naming(folder.path / file.name):
                found = os.fstat(stream.fileno()).st_size
                if found != size:
                    raise ParseError(f"{folder.path / file.name}: has {found} bytes, but was made with {size}")
                for at, text in self._frame(number, ledger):
                    stream.seek(at)
                    write_all(stream, text)

    def _publish(self, made: Path, folder: OpenFolder) -> None:
        """Give what was made its name, as it is in this folder of ours."""
        found = folder.status(made.name)
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise refuse_stranger(made)
        try:
            _core.publish(made, folder.descriptor, self.plan.path)
        except OSError as error:
            if found is None or folder.status(made.name) is not None:
                raise
            self.discard()
            reason = f"{error.strerror}; the checkpoint is complete, but a loss of power may undo its final rename"
            raise OSError(error.errno, reason, str(self.plan.path)) from None

    def check_finished(self, ledger: Ledger) -> None:
        """Refuse, with FileExistsError, a finished checkpoint with other headers, texts or manifest than the plan's."""
        plan, digests = self.plan, self._digests(ledger)
        wanted = [
            (Path(self.finished, file.name), at, text)
            for number, file in enumerate(plan.files)
            for at, text in self._frame(number, ledger)
        ]
        if plan.is_folder:
            wanted += [(plan.path / name, 0, text) for name, text in self._texts(digests).items()]
        for path, at, text in wanted:
            found = b""
            with suppress(OSError), path.open("rb") as stream:
                stream.seek(at)
                found = stream.read(len(text))
            if found != text:
                raise FileExistsError(errno.EEXIST, "exists already, and is not what this plan makes", str(plan.path))

    def check_written(self, ledger: Ledger, work: Work) -> None:
        """Read all that was written, and compare it with the receipts.

        Raises:
            ParseError: if it is not what they say; names the tensor and the file.
        """
        check_memory(work.memory)
        plan, job, slots = self.plan, CopyJob(), []
        nowhere = job.discard()
        for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
            holder = job.read_file(self.folder / file.name, size)
            for at, slot in enumerate(file.slots):
                if slot.end > slot.begin:
                    tensor = plan.tensors[slot.tensor]
                    start, stop = ([side[i] for side in slot.box] for i in (0, 1))
                    piece = HeldPiece(holder, file.start + slot.begin, start, stop, file.slots.strides(at))
                    kept = HeldPiece(nowhere, 0, start, stop)
                    job.add_tensor(tensor.shape, tensor.itemsize, [piece], [kept], digest=True)
                    slots.append((number, slot.tensor))
        found: dict[tuple[int, int], int] = {}
        for key, digest in zip(slots, job.run(budget=work.memory).digests, strict=True):
            found[key] = add_digests([found.get(key, 0), digest])
        for (number, tensor_number), digest in found.items():
            if digest != ledger.digest(number, tensor_number):
                name = plan.tensors[tensor_number].name
                raise ParseError(
                    f"{self.folder / plan.files[number].name}: tensor {shown(name)} is not what the receipts say"
                )

    def discard(self, ledger: Ledger | None = None) -> None:
        """Remove what is not finished; what stays is for the next run to remove."""
        with suppress(OSError), opened_below(self.root.parent, 1) as top:
            remove_marked(top, self.root.name, _mark(self.root.name))
        with (
            suppress(OSError),
            OpenFolder.at(self.root.parent.parent) as beside,
        ):  # Another plan may have a folder there.
            beside.remove_empty(self.root.parent.name)


def check_room(path: Path, nbytes: int, what: str = "the checkpoint") -> None:
    """Refuse, with OSError, what does not fit in the file system of a path; what a run has left there makes room."""
    free, left = _core.free_space(path.parent), _unfinished(path)
    if nbytes > free + left:
        sizes = bytes_text(nbytes), bytes_text(free)
        if sizes[0] == sizes[1]:
            sizes = f"{nbytes:,} bytes", f"{free:,} bytes"
        more = ""
        if left:
            more = (
                f", besides the {bytes_text(left)} that an interrupted run has left in {workplace_of(path).name}; "
                "resume=True goes on with that"
            )
        raise OSError(errno.ENOSPC, f"{what} takes {sizes[0]}, but {sizes[1]} are free{more}", str(path))


def _unfinished(path: Path) -> int:
    """The bytes on the disk of what runs have left of a checkpoint."""
    total = 0
    with suppress(OSError), opened_below(workplace_of(path), 1) as top:
        for name in top.names():
            with suppress(OSError), opened_below(top.path / name / _DATA, 3) as data:
                found = [data.status(each) for each in data.names()]
                total += sum(getattr(each, "st_blocks", 0) * 512 for each in found if each is not None)
    return total


class FolderRecorder:
    """Writes receipts to a file, each after its data is on the disk.

    Args:
        place: The place.
        path: The file, which is made when the first receipt comes.
        work: How tasks are run.
        part: The part that they are of.
        gather: Whether the tasks ran in this process without syncing their data, so that this must be done here,
            for many of them at once.
    """

    def __init__(self, place: FolderPlace, path: Path, work: Work, part: str, *, gather: bool) -> None:
        self._place, self._path, self._part = place, path, part
        self._sync, self._gather = work.sync, work.sync and gather
        self._most = work.record_bytes, work.record_seconds if self._gather else _SOON
        self._lines: list[bytes] = []
        self._touched: set[int] = set()
        self._bytes, self._last = 0, time.monotonic()

    def add(self, receipt: TaskReceipt) -> None:
        """Write a receipt, now or a little later."""
        self._lines.append(receipt_line(receipt._replace(part=self._part)))
        self._touched.update(file for file, _, _ in receipt.ranges)
        self._bytes += receipt.bytes_written
        if self._bytes >= self._most[0] or time.monotonic() - self._last >= self._most[1]:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if not self._lines:
            return
        if self._gather:
            files = self._place.plan.files
            _core.sync_files([self._place.folder / files[number].name for number in sorted(self._touched)])
        with (
            opened_below(self._path.parent, 3) as folder,
            folder.file(self._path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as stream,
            naming(self._path),
        ):
            write_all(stream, b"".join(self._lines))
            if self._sync:
                os.fsync(stream.fileno())
        self._lines.clear()
        self._touched.clear()
        self._bytes, self._last = 0, time.monotonic()


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "the folder for the checkpoint does not exist", str(path.parent))


def _mark(name: str) -> str:
    """What is in the mark of the folder of a plan."""
    return f"shardwise plan {name}\n"


def _remove_plans(path: Path, *, but: str = "", parts: bool = True) -> None:
    """Remove the unfinished work of all plans for a checkpoint, except of one.

    Raises:
        FileExistsError: if there is something that no plan made, or, unless `parts`, a plan that is run in parts.
    """
    top_path = workplace_of(path)
    with ExitStack() as stack:
        try:
            top = stack.enter_context(opened_below(top_path, 1))
        except FileNotFoundError:
            return
        names = top.names()
        for name in names:  # Before anything is removed.
            if not _PLAN.fullmatch(name):
                raise refuse_stranger(top_path / name)
            with top.enter(name) as folder:
                refuse_unmarked(folder, _mark(name))
                if not parts and name != but and folder.status(_PARTS) is not None:
                    text = "holds parts of a plan; commit the plan, or remove this folder"
                    raise FileExistsError(errno.EEXIST, text, str(folder.path))
        for name in names:
            if name != but:
                remove_marked(top, name, _mark(name))
    if but not in names:
        with suppress(OSError), OpenFolder.at(top_path.parent) as beside:
            beside.remove_empty(top_path.name)


def _may_hold(name: str, numbers: range) -> bool:
    first, _, rest = name.partition("-")
    end = rest.partition("-")[0]
    if not (first.isdecimal() and end.isdecimal()):
        return True
    return int(first) < numbers.stop and numbers.start < int(end)
