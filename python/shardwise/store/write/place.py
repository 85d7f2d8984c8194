"""Where an unfinished checkpoint lies: files, receipts for what is in them, a lock, a final rename.

The workplace is a folder beside the checkpoint whose name begins with a dot. Each plan has a folder of its own in it,
named by the plan's digest, so that a late task of another plan finds nothing to write to. What `Workplace` does with
paths is all that a plan needs from a file system; tasks open the files themselves.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ... import _core
from ..._atomic import naming
from ..._text import bytes_text, shown
from ...errors import ParseError
from ..engine import CopyJob, HeldPiece, add_digests
from ..sharded import MANIFEST
from .ledger import Ledger
from .manifest import manifest_text
from .plan import WritePlan, workplace_of
from .task import TaskReceipt, receipt_from_line, receipt_line

__all__ = ["Recorder", "Workplace", "check_room", "claim_name", "locked", "refuse_existing"]

#: In a plan's folder, the file that says that parts of the plan are run by processes that do not know each other.
_PARTS = "parts"
#: The longest line of receipts that is read.
_MOST_LINE = 2**26
#: Receipts are written after this many bytes with syncs, and after this many seconds without.
_RECORD_BYTES, _RECORD_SECONDS = 2**30, 0.1


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a checkpoint's lock: BlockingIOError if another process has it, or another run of this one."""
    _check_parent(path)
    lock = _core.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        yield
    finally:
        lock.release()


def claim_name(path: Path) -> None:
    """Refuse a path that exists, under its lock; remove what a run has left that was killed when all was done."""
    if path.exists():
        shutil.rmtree(workplace_of(path), ignore_errors=True)
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
        self._receipts = self.root / "receipts"

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
        others = [each for each in _folders(self.root.parent) if not resume or each != self.root]
        for other in others:
            if (other / _PARTS).exists():
                text = "holds parts of a plan; commit the plan, or remove this folder"
                raise FileExistsError(17, text, str(other))
        for other in others:
            shutil.rmtree(other)

    def begin(self, *, parts: bool) -> None:
        """Make the files, unless another process has: all of them in full size, without their contents."""
        self.refuse_existing()
        if not self.folder.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            made = self.root / f"making.{secrets.token_hex(8)}"
            made.mkdir()
            try:
                job = CopyJob()
                for file, size in zip(self.plan.files, self.plan.sizes, strict=True):
                    job.write_file(made / file.name, size)
                job.run(threads=1)
                _core.publish(made, self.folder)
            except OSError:
                if not (self.folder.is_dir() and made.is_dir()):  # If both exist, another process was faster.
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        self._receipts.mkdir(exist_ok=True)
        if parts:
            (self.root / _PARTS).touch()

    def recorder(self, numbers: range | None, *, sync: bool, gather: bool) -> Recorder:
        """Give what writes the receipts of tasks with these numbers."""
        first, end = (numbers.start, numbers.stop) if numbers is not None else (0, len(self.plan.tasks))
        token = secrets.token_hex(4)
        host = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter in "-_")[:64]
        return Recorder(self, self._receipts / f"{first}-{end}-{host}-{os.getpid()}-{token}.jsonl", sync, gather)

    def receipts(self, numbers: range | None = None) -> Iterator[TaskReceipt]:
        """Read the receipts; of `numbers` only, if given.

        Raises:
            ParseError: if one is not what was written.
        """
        if not self._receipts.is_dir():
            return
        for path in sorted(self._receipts.glob("*.jsonl")):
            if numbers is not None and not _may_hold(path.name, numbers):
                continue
            with naming(path), path.open("rb") as stream:
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
        for number, (file, size) in enumerate(zip(plan.files, plan.sizes, strict=True)):
            found = (self.folder / file.name).stat().st_size
            if found != size:
                raise ParseError(f"{self.folder / file.name}: has {found} bytes, but was made with {size}")
            file.digests = {}
            for slot in file.slots:
                if slot.tensor not in file.digests:
                    file.digests[slot.tensor] = ledger.digest(number, slot.tensor)
                    parts[slot.tensor].append(file.digests[slot.tensor])
            if file.needs_crcs:
                file.crcs = ledger.crcs(number)
            path = self.folder / file.name
            with naming(path), path.open("r+b") as stream:
                for at, text in file.frame():
                    stream.seek(at)
                    stream.write(text)
                stream.flush()
                if sync:
                    os.fsync(stream.fileno())
        if plan.is_folder:
            self._write_texts([add_digests(each) for each in parts], sync)
            if sync:
                _core.sync_files([self.folder / file.name for file in plan.files])
            self._publish(self.folder)
        else:
            (file,) = plan.files
            self._publish(self.folder / file.name)
        self.discard()

    def _publish(self, made: Path) -> None:
        try:
            _core.publish(made, self.plan.path)
        except OSError as error:
            if made.exists():
                raise
            self.discard()
            reason = f"{error.strerror}; the checkpoint is complete, but a loss of power may undo its final rename"
            raise OSError(error.errno, reason, str(self.plan.path)) from None

    def _write_texts(self, digests: list[int], sync: bool) -> None:
        plan = self.plan
        manifest = manifest_text(plan.manifest, plan.tensors, digests, plan.files, plan.sizes, plan.texts)
        for name, text in {MANIFEST: manifest, **plan.texts}.items():
            path = self.folder / name
            with naming(path):
                path.write_bytes(text)
            if sync:
                _core.sync_files([path])

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
        """Remove what is not finished."""
        shutil.rmtree(self.root, ignore_errors=True)
        with suppress(OSError):  # Another plan has a folder there.
            self.root.parent.rmdir()


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
        with naming(self._path), self._path.open("ab", buffering=0) as stream:
            text = memoryview(b"".join(self._lines))
            while text:
                text = text[stream.write(text) :]
            if self._sync:
                os.fsync(stream.fileno())
        self._lines.clear()
        self._touched.clear()
        self._bytes, self._last = 0, time.monotonic()


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "the folder for the checkpoint does not exist", str(path.parent))


def _folders(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _may_hold(name: str, numbers: range) -> bool:
    first, _, rest = name.partition("-")
    end = rest.partition("-")[0]
    if not (first.isdecimal() and end.isdecimal()):
        return True
    return int(first) < numbers.stop and numbers.start < int(end)
