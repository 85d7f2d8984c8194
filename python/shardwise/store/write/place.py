"""Where an unfinished checkpoint lies: files, receipts for what is in them, a lock, a final rename.

The workplace is a folder beside the checkpoint whose name begins with a dot. Each plan has a folder of its own in it,
named by the plan's digest, so that a late task of another plan finds nothing to write to. What `Workplace` does with
paths is all that a plan needs from a file system; tasks open the files themselves. Whatever else is found there is not
touched: see `places.opened`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from ... import _core
from ..._atomic import naming
from ..._text import bytes_text, shown
from ...errors import ParseError
from ..engine import CopyJob, HeldPiece, add_digests
from ..files import hidden_name
from ..sharded import MANIFEST
from .ledger import Ledger
from .manifest import manifest_text
from .places.opened import (
    OpenFolder,
    make_marked,
    opened_below,
    refuse_stranger,
    refuse_unmarked,
    remove_marked,
    write_all,
)
from .plan import WritePlan, workplace_of
from .task import TaskReceipt, receipt_from_line, receipt_line

__all__ = ["Recorder", "Workplace", "check_room", "claim_name", "locked", "refuse_existing"]

#: The name of a plan's folder: the beginning of its digest.
_PLAN = re.compile(r"[0-9a-f]{16}")
#: In a plan's folder, the file that says that parts of the plan are run by processes that do not know each other.
_PARTS = "parts"
#: The folders in a plan's folder.
_DATA, _RECEIPTS = "data", "receipts"
#: The longest line of receipts that is read.
_MOST_LINE = 2**26
#: Receipts are written after this many bytes with syncs, and after this many seconds without.
_RECORD_BYTES, _RECORD_SECONDS = 2**30, 0.1


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


class Workplace:
    """The workplace of a plan."""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.root = plan.workplace
        self.folder = plan.folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the checkpoint's lock: BlockingIOError if another process has it."""
        with locked(self.plan.path):
            yield

    def refuse_existing(self) -> None:
        """Refuse a path that exists, or whose folder does not."""
        refuse_existing(self.plan.path)

    def claim(self, resume: bool) -> None:
        """Remove what other runs have left, including runs of this plan unless it is resumed.

        Raises:
            FileExistsError: if another plan is being run there in parts.
        """
        claim_name(self.plan.path)
        _remove_plans(self.plan.path, but=self.root.name if resume else "", parts=False)

    def begin(self, *, parts: bool) -> None:
        """Make the files, unless another process has: all of them in full size, without their contents."""
        self.refuse_existing()
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

    def recorder(self, numbers: range | None, *, sync: bool, gather: bool) -> Recorder:
        """Give what writes the receipts of tasks with these numbers."""
        first, end = (numbers.start, numbers.stop) if numbers is not None else (0, len(self.plan.tasks))
        token = secrets.token_hex(4)
        host = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter in "-_")[:64]
        name = f"{first}-{end}-{host}-{os.getpid()}-{token}.jsonl"
        return Recorder(self, self.root / _RECEIPTS / name, sync, gather)

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
        parts: list[list[int]] = [[] for _ in plan.tensors]
        with opened_below(self.folder, 3) as folder:
            self._write_frames(folder, ledger, parts, sync)
            if plan.is_folder:
                self._write_texts(folder, [add_digests(each) for each in parts], sync)
                if sync:
                    _core.sync_files([self.folder / file.name for file in plan.files])
                with opened_below(self.root, 2) as root:
                    self._publish(self.folder, root)
            else:
                (file,) = plan.files
                self._publish(self.folder / file.name, folder)
        self.discard()

    def _write_frames(self, folder: OpenFolder, ledger: Ledger, parts: list[list[int]], sync: bool) -> None:
        """Write what surrounds the tensors of each file; add their digests to those of the tensors.

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
            file.digests = {}
            for slot in file.slots:
                if slot.tensor not in file.digests:
                    file.digests[slot.tensor] = ledger.digest(number, slot.tensor)
                    parts[slot.tensor].append(file.digests[slot.tensor])
            if file.needs_crcs:
                file.crcs = ledger.crcs(number)
            with folder.file(file.name, os.O_RDWR) as stream, naming(folder.path / file.name):
                found = os.fstat(stream.fileno()).st_size
                if found != size:
                    raise ParseError(f"{folder.path / file.name}: has {found} bytes, but was made with {size}")
                for at, text in file.frame():
                    stream.seek(at)
                    write_all(stream, text)
                if sync:
                    os.fsync(stream.fileno())

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

    def _write_texts(self, folder: OpenFolder, digests: list[int], sync: bool) -> None:
        plan = self.plan
        manifest = manifest_text(plan.manifest, plan.tensors, digests, plan.files, plan.sizes, plan.texts)
        for name, text in {MANIFEST: manifest, **plan.texts}.items():
            folder.write(name, text, sync=sync)

    def check_written(self, ledger: Ledger, memory: int) -> None:
        """Read all that was written, and compare it with the receipts.

        Raises:
            ParseError: if it is not what they say; names the tensor and the file.
        """
        plan, job, slots = self.plan, CopyJob(), []
        nowhere = job.discard()
        for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
            holder = job.read_file(self.folder / file.name, size)
            for slot in file.slots:
                if slot.end > slot.begin:
                    tensor = plan.tensors[slot.tensor]
                    start, stop = ([side[i] for side in slot.box] for i in (0, 1))
                    piece = HeldPiece(holder, file.start + slot.begin, start, stop)
                    kept = HeldPiece(nowhere, 0, start, stop)
                    job.add_tensor(tensor.shape, tensor.itemsize, [piece], [kept], digest=True)
                    slots.append((number, slot.tensor))
        found: dict[tuple[int, int], int] = {}
        for key, digest in zip(slots, job.run(budget=memory).digests, strict=True):
            found[key] = add_digests([found.get(key, 0), digest])
        for (number, tensor_number), digest in found.items():
            if digest != ledger.digest(number, tensor_number):
                name = plan.tensors[tensor_number].name
                raise ParseError(
                    f"{self.folder / plan.files[number].name}: tensor {shown(name)} is not what the receipts say"
                )

    def discard(self) -> None:
        """Remove what is not finished; what stays is for the next run to remove."""
        with suppress(OSError), opened_below(self.root.parent, 1) as top:
            remove_marked(top, self.root.name, _mark(self.root.name))
        with (
            suppress(OSError),
            OpenFolder.at(self.root.parent.parent) as beside,
        ):  # Another plan may have a folder there.
            beside.remove_empty(self.root.parent.name)


def check_room(path: Path, nbytes: int, what: str = "the checkpoint") -> None:
    """Refuse, with OSError, what does not fit in the file system of a path."""
    free = _core.free_space(path.parent)
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{what} takes {bytes_text(nbytes)}, but {bytes_text(free)} are free", str(path))


class Recorder:
    """Writes receipts to a file, each after its data is on the disk.

    Args:
        place: The workplace.
        path: The file, which is made when the first receipt comes.
        sync: Whether data and receipts are synced to disk.
        gather: Whether the tasks ran in this process without syncing their data, so that this must be done here,
            for many of them at once.
    """

    def __init__(self, place: Workplace, path: Path, sync: bool, gather: bool) -> None:
        self._place, self._path = place, path
        self._sync, self._gather = sync, sync and gather
        self._lines: list[bytes] = []
        self._touched: set[int] = set()
        self._bytes, self._last = 0, time.monotonic()

    def add(self, receipt: TaskReceipt) -> None:
        """Write a receipt, now or a little later."""
        self._lines.append(receipt_line(receipt))
        self._touched.update(file for file, _, _ in receipt.ranges)
        self._bytes += receipt.bytes_written
        late = time.monotonic() - self._last >= _RECORD_SECONDS
        if self._bytes >= _RECORD_BYTES if self._gather else late:
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
