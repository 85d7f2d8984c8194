"""Receipts written to a file of a plan's folder, each after its task's data is on the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...._atomic import naming_file
from ...data.own_folders import opened_below, write_all
from .receipts import receipt_line
from .task import TaskReceipt
from .work import Work

__all__ = ["FolderRecorder"]

#: Seconds after which receipts are written if their data is on the disk already.
_SOON = 0.1


class FolderRecorder:
    """A recorder that writes receipts to a file, each after its task's data is on the disk.

    Args:
        sync_files: Brings the data of files, by their numbers, to the disk.
        path: The file, which is made at the first receipt.
        work: The options by which tasks are run.
        part: The part of the plan, such as `"3/16"`, that the receipts name.
        gather: Whether the tasks ran in this process without syncing their data, so that the recorder syncs it,
            for many tasks at once.
    """

    def __init__(
        self, sync_files: Callable[[Iterable[int]], None], path: Path, work: Work, part: str, *, gather: bool
    ) -> None:
        self._sync_files, self._path, self._part = sync_files, path, part
        self._sync, self._gather = work.sync, work.sync and gather
        self._most = work.record_bytes, work.record_seconds if self._gather else _SOON
        self._receipts: list[TaskReceipt] = []
        self._touched: set[int] = set()
        self._bytes, self._last = 0, time.monotonic()

    def add(self, receipt: TaskReceipt) -> None:
        """Take a receipt, to be written now or a little later."""
        self._receipts.append(receipt._replace(part=self._part))
        self._touched.update(file for file, _, _ in receipt.ranges)
        self._bytes += receipt.bytes_written
        if self._bytes >= self._most[0] or time.monotonic() - self._last >= self._most[1]:
            self.flush()

    def flush(self) -> None:
        """Write the receipts that were taken and not written yet."""
        if not self._receipts:
            return
        if self._gather:
            self._sync_files(self._touched)
        with (
            opened_below(self._path.parent, 3) as folder,
            folder.file(self._path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as stream,
            naming_file(self._path),
        ):
            write_all(stream, b"".join(map(receipt_line, self._receipts)))
            if self._sync:
                os.fsync(stream.fileno())
        self._receipts.clear()
        self._touched.clear()
        self._bytes, self._last = 0, time.monotonic()
