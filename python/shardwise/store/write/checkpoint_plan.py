"""`CheckpointPlan`: a plan of a new checkpoint that can be saved, run in parts anywhere, and committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from ..._arguments import path_of
from ..objects import ObjectPath
from .drive import check_retries, commit_plan, numbers_of, outline_of, run_part
from .object_drive import commit_objects, run_objects
from .object_parts import outline_of as objects_outline
from .place import Workplace
from .plan import WritePlan
from .planfile import load_plan, save_plan
from .planned_object import planned_object
from .reports import WriteOutline, WriteReport
from .task import SourceObject

__all__ = ["CheckpointPlan"]

_MEMORY = 256 * 2**20


class CheckpointPlan(WritePlan):
    """A new checkpoint as tasks that any process can do, in any order; `plan_checkpoint` makes it.

    Where the checkpoint goes to an object store, a task makes an object, and receipts are objects beside it.

    Attributes:
        path: Where the checkpoint is to be.
        task_bytes: How many bytes of tensors a task writes at most; of no meaning for stores.
        tasks: The tasks, each made when it is asked for.
        digest: What tells it from any other plan.
        nbytes: Bytes of all files.
    """

    def outline(self, memory: int = _MEMORY, threads: int | None = None) -> WriteOutline:
        """Say what it takes to run it in this process; nothing is written.

        Raises:
            LayoutError: if the memory is too little.
            OSError: if the folder that is to hold the checkpoint is not there.
        """
        if self.is_in_store:
            return objects_outline(self.files, memory, threads)
        return outline_of(self, memory, threads)

    def task(self, number: int) -> Any:
        """Make a task."""
        return planned_object(self, number) if self.is_in_store else super().task(number)

    def check_room(self) -> None:
        """Refuse, with OSError, what the destination's file system has no room for."""
        Workplace(self).check_room()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, which `load` reads anywhere where its files are.

        Raises:
            TypeError: if a part of it is in memory only, or a filesystem of fsspec has options that its URL and the
                environment do not say.
            OSError: if the file cannot be written.
        """
        if not self.is_of_files:
            raise TypeError("a plan whose tensors are in memory, or in temporary files, cannot be saved")
        places = [source.path for source in self.sources if isinstance(source, SourceObject)]
        if isinstance(self.path, ObjectPath):
            places.append(self.path)
        for place in {place.protocol: place for place in places}.values():
            place.refuse_options("a plan file")
        save_plan(self, path_of(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckpointPlan:
        """Read a plan that `save` wrote.

        Raises:
            ParseError: if it is not a plan, of another version, damaged, or edited.
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
            part: Which part, counted from 1, and of how many, as in `(3, 16)`; all tasks if left out.
            tasks: Numbers of tasks instead, which are run even if there are receipts for them.
            executor: What runs them; threads of this process if left out. See `reshard_checkpoint`.
            memory: Bytes for the buffers of all workers of this host.
            threads: How many, without an executor; one per core if left out.
            sync: Whether the data is on the disk before there is a receipt; what a store says that it has is.
            retries: How often a task is tried again that fails with an error of the system.
            progress: Called now and then with the bytes that are done and the bytes in all.

        Returns:
            How many tasks were run; those with a receipt from an earlier run are not run again.

        Raises:
            FileExistsError: if the checkpoint is there already.
            ParseError: if a source is not what it was, replicas disagree, or a receipt is not what was written.
            LayoutError: if there is no such part or task, or the memory is too little.
            BrokenExecutor: if a worker died and its executor with it; what is done stays, and the next run goes on.
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
            check: Whether all that was written is read back and compared with the receipts; in a store also with
                the sources.
            memory: Bytes for buffers, to check.
            sync: Whether the data is on the disk before the checkpoint has its name.

        Returns:
            What was written.

        Raises:
            FileExistsError: if the checkpoint is there already.
            BlockingIOError: if another process is at work on the whole of it.
            ParseError: if a receipt is missing, damaged, of another plan, or says something else than the task would or
                than another receipt for it; or, checked, if the data is not what a receipt says. Nothing is changed.
            OSError: if a file cannot be written.
        """
        if self.is_in_store:
            return commit_objects(self, check=check, memory=memory)
        return commit_plan(self, check=check, memory=memory, sync=sync)
