"""The sink of tasks on a disk: regions of the unfinished files of a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...._arguments import path_of
from ...data.engine import CopyJob
from ...data.location import taken
from ...data.own_folders import opened_below
from .gatherer import Gatherer
from .leftovers import unfinished_name
from .task import Outcome, Progress, Task

__all__ = ["FolderSink"]


@dataclass(frozen=True)
class FolderSink:
    """The unfinished files of a folder; tasks write regions of them.

    Attributes:
        folder: The folder of the unfinished files.
        finished: The folder of the finished checkpoint's files.
    """

    folder: str
    finished: str

    def count(self, task: Task) -> int:
        """Return the number of files that the task writes to."""
        return len(task.files)

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Write the task's regions, assembled by the gatherer."""
        with opened_below(path_of(self.folder), 3) as folder:

            def destinations(job: CopyJob) -> None:
                for number, name, size in task.files:
                    # As a text: what is known of its path is kept, and tasks name the same files.
                    job.fill_file(f"{folder.path}{os.sep}{unfinished_name(number, name)}", size, folder.descriptor)

            done = gatherer.into_files(destinations, memory, threads, sync=sync, progress=progress)
        return Outcome(done.digests, done.crcs, done.bytes_written)

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """Compare the regions of the finished files with the assembled tensors.

        Raises:
            FileExistsError: if they differ.
        """

        def destinations(job: CopyJob) -> None:
            for _, name, size in task.files:
                job.compare_file(Path(self.finished, name), size)

        done = gatherer.into_files(destinations, memory, threads, sync=False, progress=progress)
        if done.differs:
            raise taken(self.finished, "exists already, and has other values than this plan gives it")
        return Outcome(done.digests, done.crcs, done.bytes_written)
