"""Writing a new checkpoint to an object store: each object once, under its final name, the manifest last.

There is no rename in a store, and no folder that appears at once. What makes a folder a checkpoint is its manifest,
which is written when everything else is there, on condition that there is none. A single object appears only when it
is complete.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, cast

from ..._arguments import integer
from ..._text import bytes_text
from ...errors import LayoutError
from ..engine import add_digests
from ..mapped import MappedFiles
from ..object_files import ObjectFile
from ..objects import ObjectPath
from ..sharded import MANIFEST
from .crew import Crew, Flight, crew_of
from .dcp import INDEX
from .files import TargetFile
from .gather import check_replicas
from .manifest import manifest_text
from .object_task import ObjectReceipt, ObjectTask, task_for
from .reports import WriteOutline, WriteReport
from .uploads import check_writable, put_object
from .wanted import Wanted

__all__ = ["ObjectJob"]

#: S3 takes at least 5 MiB for each part but the last, and at most 10,000 parts. Parts are filled to at least three
#: quarters, with blocks of at most a quarter.
_LEAST_PART = 8 * 2**20
_MOST_PART = 64 * 2**20
_MOST_PARTS = 7_000
_FLIGHT = 8
_THERE = "exists already; a checkpoint is written to a new name"


class ObjectJob:
    """A new checkpoint in a store: a plan like that for a disk, in which each task makes an object."""

    def __init__(
        self,
        path: Any,
        wanted: Sequence[Wanted],
        files: Sequence[TargetFile],
        *,
        is_folder: bool,
        texts: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        compare_replicas: bool,
    ) -> None:
        self.path: ObjectPath = path
        self._wanted = wanted
        self._files = files
        self._is_folder = is_folder
        self._texts = texts
        self._manifest = manifest
        self._compare_replicas = compare_replicas
        self._sizes = [file.size for file in files]
        #: What makes a folder a checkpoint: PyTorch looks for its own index, and does not know the manifest.
        self._last = INDEX if INDEX in texts else MANIFEST
        check_writable(self.path)

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return sum(self._sizes)

    def outline(self, memory: int, threads: int | None) -> WriteOutline:
        """Say what it would take; nothing is written.

        Raises:
            LayoutError: if the memory is too little; says what would be needed.
        """
        part = self._part_bytes(memory)
        taken = part * (3 + self._holds(memory) + self._flight(memory))
        names = [file.name for file in self._files]
        return WriteOutline(
            tuple(zip(names, self._sizes, strict=True)), self.bytes, taken, threads or 1, len(names), free=2**63 - 1
        )

    def _part_bytes(self, memory: int, workers: int = 1) -> int:
        """The bytes of a part: one is filled from another while some are under way."""
        integer("memory", memory)
        largest = max(self._sizes, default=1)
        least = max(_LEAST_PART, -(-largest // _MOST_PARTS))
        part = min(max(least, min(memory // 6, _MOST_PART)), max(largest, 1))
        if memory < 4 * part:
            each = f" for each of {workers} workers" if workers > 1 else ""
            raise LayoutError(
                f"memory is {bytes_text(memory)}{each}; at least {bytes_text(4 * part)} are needed for objects that "
                f"are uploaded in parts of {bytes_text(part)}"
            )
        return part

    def _holds(self, memory: int) -> bool:
        """Whether there is room for a part that is held back."""
        is_needed = any(file.has_digests or file.needs_crcs for file in self._files)
        return is_needed and memory >= 5 * self._part_bytes(memory)

    def _flight(self, memory: int) -> int:
        return max(1, min(memory // self._part_bytes(memory) - 3 - self._holds(memory), _FLIGHT))

    def run(
        self,
        *,
        executor: Executor | None,
        memory: int,
        threads: int | None,
        resume: bool,
        retries: int,
        progress: Callable[[int, int], object] | None,
    ) -> WriteReport:
        """Write the checkpoint; what a store acknowledges is on its disks."""
        crew = None if executor is None else self._crew(executor, memory)
        if crew is not None:
            self._part_bytes(crew.memory, memory // crew.memory)
        tasks = self._tasks(memory if crew is None else crew.memory, resume)
        self._refuse_existing(resume)
        if self._compare_replicas:
            check_replicas(self._wanted, memory)
        made: dict[int, ObjectReceipt] = {}
        mapped = MappedFiles(piece.holder for tensor in self._wanted for piece in tensor.pieces)
        written = 0

        def more(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            if progress is not None:
                progress(written, self.bytes)

        def keep(task: ObjectTask, receipt: ObjectReceipt) -> None:
            made[task.number] = receipt

        def refused(task: ObjectTask) -> ObjectTask:
            if not resume and self._is_folder and task.place.is_file():
                raise FileExistsError(errno.EEXIST, f"{_THERE}; resume=True makes it again", str(task.place))
            return task

        if crew is None:
            for task in tasks:
                keep(task, refused(task).make(threads=threads, progress=more))
        else:
            hint = "the next run makes all objects again"
            flight: Flight[ObjectTask, ObjectReceipt] = Flight(crew, _make, (), retries, keep, hint)
            flight.run((task_for(refused(task)) for task in tasks), len(tasks), lambda task: more(task.nbytes))
        digests: list[list[int]] = [[] for _ in self._wanted]
        for task in tasks:
            receipt = made[task.number]
            task.file.digests, task.file.crcs = receipt.digests, receipt.crcs
            for position, digest in receipt.digests.items():
                digests[position].append(digest)
        if self._is_folder:
            mapped.check()
            self._finish([add_digests(parts) for parts in digests], tasks, made, resume)
        read = sum(receipt.bytes_read for receipt in made.values())
        written = sum(receipt.bytes_written for receipt in made.values())
        tensors = sum(not tensor.is_object for tensor in self._wanted)
        return WriteReport(cast(Any, self.path), tensors, self.bytes, read, written, 0)

    def _crew(self, executor: Executor, memory: int) -> Crew:
        crew = crew_of(executor, memory)
        holders = (piece.holder for tensor in self._wanted for piece in tensor.pieces)
        sources = (cast(Any, holder.path) for holder in holders if isinstance(holder, ObjectFile))
        if not crew.is_here:
            for path in (self.path, *sources):
                if path.protocol == "memory":
                    raise TypeError(f"{path}: is in the memory of this process; give a ThreadPoolExecutor")
        return crew

    def _tasks(self, memory: int, resume: bool) -> list[ObjectTask]:
        run = secrets.token_hex(16)
        return [
            ObjectTask(
                number,
                self.path / file.name if self._is_folder else self.path,
                file,
                self._wanted,
                self._part_bytes(memory),
                self._flight(memory),
                self._holds(memory),
                is_new=not (resume and self._is_folder),
                run=run,
            )
            for number, file in enumerate(self._files)
        ]

    def _refuse_existing(self, resume: bool) -> None:
        # Only a manifest blocks a folder; other objects are refused one by one, when they are made.
        goes_on = resume and self._is_folder
        is_there = self.path.is_file() if goes_on else self.path.exists()
        if is_there or (self._is_folder and (self.path / self._last).is_file()):
            hint = "; resume=True writes over what an interrupted run left" if self._is_folder and not resume else ""
            raise FileExistsError(errno.EEXIST, f"{_THERE}{hint}", str(self.path))

    def _finish(
        self,
        digests: Sequence[int],
        tasks: Sequence[ObjectTask],
        made: Mapping[int, ObjectReceipt],
        resume: bool,
    ) -> None:
        """Check that everything is still there; write index and manifest, last the one that makes it a checkpoint."""
        for task in tasks:
            if task.place.status() != made[task.number].status:
                raise FileExistsError(errno.EEXIST, "was replaced meanwhile: another run writes here", str(task.place))
        texts = dict(self._texts)
        texts[MANIFEST] = manifest_text(self._manifest, self._wanted, digests, self._files, self._sizes, self._texts)
        last = texts.pop(self._last)
        for name, text in texts.items():
            put_object(self.path / name, text, is_new=not resume)
        put_object(self.path / self._last, last, is_new=True)


def _make(task: ObjectTask) -> ObjectReceipt:
    return task.make(threads=1)
