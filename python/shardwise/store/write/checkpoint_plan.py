"""`CheckpointPlan`: a plan of a new checkpoint that can be saved, run in parts anywhere, and committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from ..._arguments import path_of
from ..objects import ObjectPath
from .check_plan import check_plan
from .crew import check_retries
from .drive import commit_plan, numbers_of, outline_of, run_part
from .object_drive import commit_objects, run_objects
from .object_parts import outline_of as objects_outline
from .place import check_room
from .plan import WritePlan, said_by
from .planfile import load_plan, save_plan
from .planned_object import planned_object
from .reports import WriteOutline, WriteReport
from .task import SourceObject

__all__ = ["CheckpointPlan"]

_MEMORY = 256 * 2**20


class CheckpointPlan(WritePlan):
    """A new checkpoint as tasks that any process can do, in any order; `plan_checkpoint` makes it.

    For a checkpoint in an object store a task makes an object, and receipts are objects beside it.

    Attributes:
        path: The place of the new checkpoint.
        task_bytes: The most bytes of tensors that a task writes; has no meaning for stores.
        tasks: The tasks, each made when it is asked for.
        digest: Distinguishes it from any other plan.
        nbytes: Bytes of all files.
        warnings: What looks wrong, as in `WriteReport`; a file of a plan does not keep them.
    """

    warnings: tuple[str, ...] = ()

    def outline(self, memory: int = _MEMORY, threads: int | None = None, *, sync: bool = True) -> WriteOutline:
        """Say what it takes to run it in this process.

        Nothing is written but a sample of up to 16 MiB, to a file without a name beside the destination: it says
        how fast files are read and written there.

        Args:
            memory: Bytes for the buffers of all workers.
            threads: Their number; one per core if left out.
            sync: Whether the data is to be synced to disk.

        Raises:
            LayoutError: if the memory is too little.
            OSError: if the folder for the checkpoint does not exist.
        """
        if self.is_in_store:
            return objects_outline(self.files, memory, threads)
        return outline_of(self, memory, threads, sync)

    def task(self, number: int) -> Any:
        """Make a task."""
        return planned_object(self, number) if self.is_in_store else super().task(number)

    def check(self) -> None:
        """Check all that the plan says against itself, if it is from a file; `commit` does.

        Raises:
            ParseError: if it contradicts itself.
        """
        if self._file is not None:
            with said_by(self._file):
                check_plan(self)

    def check_room(self) -> None:
        """Raise OSError if the destination's file system does not have room for it."""
        check_room(self.path, self.nbytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which `load` reads on any machine that sees the plan's files.

        Raises:
            TypeError: if a part of it is only in memory, or a filesystem of fsspec has options that its URL and the
                environment do not give.
            OSError: if the file cannot be written.
        """
        if not self.is_of_files:
            raise TypeError("a plan whose tensors are in memory, or in temporary files, cannot be saved")
        places = [source.path for source in self.sources if isinstance(source, SourceObject)]
        if isinstance(self.path, ObjectPath):
            places.append(self.path)
        for place in {id(place.filesystem): place for place in places}.values():
            place.refuse_options("a plan file")
        save_plan(self, path_of(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckpointPlan:
        """Read a plan that `save` wrote.

        Raises:
            ParseError: if it is not a plan, has another version, or was damaged or edited.
            OSError: if it cannot be read.
        """
        return load_plan(path_of(path), cls)

    def run(
        self,
        part: tuple[int, int] | None = None,
        *,
        tasks: Sequence[int] | None = None,
        executor: Executor | None = None,
        memory: int = _MEMORY,
        threads: int | None = None,
        sync: bool = True,
        retries: int = 2,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Run tasks of the plan, and record their receipts beside the files; `commit` finishes the checkpoint.

        Args:
            part: The part, counted from 1, and the number of parts, as in `(3, 16)`; all tasks if left out.
            tasks: Numbers of tasks instead, which are run even if there are receipts for them.
            executor: What runs the tasks; threads of this process if left out. See `reshard_checkpoint`.
            memory: Bytes for the buffers of all workers of this host.
            threads: Their number, if there is no executor; one per core if left out.
            sync: Whether to sync the data to disk before writing its receipt; a store does so anyway.
            retries: How often to retry a task that fails with a system error.
            progress: Called now and then with the bytes done and the bytes in all.

        Returns:
            The number of tasks that were run; those with a receipt from an earlier run are not run again.

        Raises:
            FileExistsError: if the checkpoint exists already.
            ParseError: if a source is not what it was, replicas disagree, or a receipt is not what was written.
            LayoutError: if there is no such part or task, or the memory is too little.
            BrokenExecutor: if a worker died and its executor with it; finished tasks stay, and the next run continues.
            OSError: if a file cannot be read or written.
        """
        check_retries(retries)
        span, numbers = numbers_of(self, part, tasks)
        if self.is_in_store:
            return run_objects(
                self, numbers, again=tasks is not None, executor=executor, memory=memory, threads=threads,
                retries=retries, progress=progress,
            )  # fmt: skip
        return run_part(
            self, span, numbers, is_whole=part is None and tasks is None, again=tasks is not None, executor=executor,
            memory=memory, threads=threads, sync=sync, retries=retries, progress=progress,
        )  # fmt: skip

    def commit(self, *, check: bool = False, memory: int = _MEMORY, sync: bool = True) -> WriteReport:
        """Finish the checkpoint: write headers and manifest, and give it its name.

        Args:
            check: Whether to read back all that was written and compare it with the receipts; in a store also with
                the sources.
            memory: Bytes for buffers while checking.
            sync: Whether to sync the data to disk before the checkpoint gets its name.

        Returns:
            What was written.

        Raises:
            FileExistsError: if the checkpoint exists already.
            BlockingIOError: if another process is working on it.
            ParseError: if a receipt is missing, damaged, of another plan, or contradicts its task or another receipt
                for it; or, with `check`, if the data is not what a receipt says. Nothing is changed.
            OSError: if a file cannot be written.
        """
        self.check()
        if self.is_in_store:
            return commit_objects(self, check=check, memory=memory)
        return commit_plan(self, check=check, memory=memory, sync=sync)
