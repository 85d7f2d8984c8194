"""Writing a new checkpoint to an object store: each object once, under its final name, the manifest last.

There is no rename in a store, and no folder that appears at once. What makes a folder a checkpoint is its manifest,
which is written when everything else is there, on condition that there is none. A single object appears only when it
is complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, cast

from ...errors import LayoutError
from ..engine import check_threads
from ..files import DataFile
from ..mapped import MappedFiles
from ..object_files import ObjectFile
from ..objects import ObjectPath
from ..same_files import SameFiles
from .carried import carried_names
from .crew import Flight, check_retries
from .files import TargetFile
from .gather import check_replicas
from .object_parts import (
    Parts,
    finish,
    last_of,
    object_crew,
    outline_of,
    parts_for,
    parts_of_crew,
    refuse_existing,
)
from .object_task import ObjectReceipt, ObjectTask, task_for
from .reports import WriteOutline, WriteReport
from .uploads import check_writable, put_object, refusal
from .wanted import Wanted

__all__ = ["ObjectJob", "check_plannable"]


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
        self._last = last_of(texts)
        check_writable(self.path)

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return sum(self._sizes)

    def outline(self, memory: int, threads: int | None, *, sync: bool = True) -> WriteOutline:
        """Say what it would take; nothing is written. What a store has acknowledged is always on its disks.

        Raises:
            LayoutError: if the memory is too little.
        """
        return outline_of(self._files, memory, threads)

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
        check_threads(threads)
        check_retries(retries)
        holders = {id(piece.holder): piece.holder for tensor in self._wanted for piece in tensor.pieces}.values()
        sources = (cast(Any, holder.path) for holder in holders if isinstance(holder, ObjectFile))
        crew = None if executor is None else object_crew(executor, memory, [self.path, *sources])
        parts = parts_for(self._files, memory) if crew is None else parts_of_crew(self._files, memory, crew)
        tasks = self._tasks(parts, resume)
        self.refuse_existing(resume)
        if self._compare_replicas:
            check_replicas(self._wanted, memory)
        made: dict[int, ObjectReceipt] = {}
        mapped = MappedFiles(holders)
        local = (each for each in holders if isinstance(each, DataFile) and not isinstance(each, ObjectFile))
        files = SameFiles(each.path for each in local)
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
                raise refusal(task.place, "; resume=True makes it again")
            return task

        if crew is None:
            for task in tasks:
                keep(task, refused(task).make(threads=threads, progress=more))
        else:
            hint = "the next run makes all objects again (resume=True)"
            flight: Flight[ObjectTask, ObjectReceipt] = Flight(crew, _make, (), retries, keep, hint)
            flight.run((task_for(refused(task)) for task in tasks), len(tasks), lambda task: more(task.nbytes))
        if self._is_folder:
            mapped.check()
            files.check()
            receipts = [made[task.number] for task in tasks]
            put_text = partial(put_object, is_new=not resume)
            finish(self.path, self._files, self._wanted, self._texts, self._manifest, receipts, put_text)
        read = sum(receipt.bytes_read for receipt in made.values())
        written = sum(receipt.bytes_written for receipt in made.values())
        tensors = sum(not tensor.is_object for tensor in self._wanted)
        return WriteReport(
            cast(Any, self.path), tensors, self.bytes, read, written, 0, carried=carried_names(self._texts)
        )

    def _tasks(self, parts: Parts, resume: bool) -> list[ObjectTask]:
        run = secrets.token_hex(16)
        return [
            ObjectTask(
                number,
                self.path / file.name if self._is_folder else self.path,
                file,
                self._wanted,
                *parts,
                is_new=not (resume and self._is_folder),
                run=run,
            )
            for number, file in enumerate(self._files)
        ]

    def refuse_existing(self, resume: bool) -> None:
        """Refuse, with FileExistsError, a name at which there is something that a resumed run does not go on with."""
        # Only a manifest blocks a folder; other objects are refused one by one, when they are made.
        goes_on = resume and self._is_folder
        is_there = self.path.is_file() if goes_on else self.path.exists()
        if is_there or (self._is_folder and (self.path / self._last).is_file()):
            hint = "; resume=True writes over what an interrupted run left" if self._is_folder and not resume else ""
            raise refusal(self.path, hint)


def check_plannable(path: ObjectPath, is_folder: bool, texts: Mapping[str, bytes]) -> None:
    """Refuse what no saved plan writes to a store.

    Raises:
        LayoutError: if it is a single object, which is one task, or the store would show half of an object.
        FileExistsError: if there is a checkpoint of this name.
    """
    check_writable(path)
    if not is_folder:
        raise LayoutError(
            f"{path}: is one object, which is one task; reshard_checkpoint writes it, a plan writes folders"
        )
    refuse_existing(path, texts)


def _make(task: ObjectTask) -> ObjectReceipt:
    return task.make(threads=1)
