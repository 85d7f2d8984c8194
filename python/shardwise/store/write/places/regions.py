"""The unfinished files of a folder, of which tasks write regions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...data.engine import CopyJob
from ...data.location import taken
from ...data.own_folders import opened_below
from .gatherer import Gatherer
from .leftovers import unfinished_name
from .task import Outcome, Progress, Task

__all__ = ["FolderSink"]


@dataclass(frozen=True)
class FolderSink:
    """The unfinished files of a folder, of which tasks write regions.

    Attributes:
        folder: Their folder.
        finished: The folder of the files of the finished checkpoint.
    """

    folder: str
    finished: str

    def count(self, task: Task) -> int:
        """The files that the task writes parts of."""
        return len(task.files)

    def fill(
        self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, *, sync: bool, progress: Progress
    ) -> Outcome:
        """Write what the gatherer gives."""
        with opened_below(Path(self.folder), 3) as folder:

            def destinations(job: CopyJob) -> None:
                for number, name, size in task.files:
                    job.fill_file(folder.path / unfinished_name(number, name), size, folder.descriptor)

            done = gatherer.into_files(destinations, memory, threads, sync=sync, progress=progress)
        return Outcome(done.digests, done.crcs, done.bytes_written)

    def compare(self, task: Task, gatherer: Gatherer, memory: int, threads: int | None, progress: Progress) -> Outcome:
        """Compare the finished files with what the gatherer gives.

        Raises:
            FileExistsError: if they have something else.
        """

        def destinations(job: CopyJob) -> None:
            for _, name, size in task.files:
                job.compare_file(Path(self.finished, name), size)

        done = gatherer.into_files(destinations, memory, threads, sync=False, progress=progress)
        if done.differs:
            raise taken(self.finished, "exists already, and has other values than this plan gives it")
        return Outcome(done.digests, done.crcs, done.bytes_written)
