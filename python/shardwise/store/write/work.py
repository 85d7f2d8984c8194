"""The way that a plan is run: by whom, with what memory, and how often again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from ..._arguments import integer
from ...errors import LayoutError
from ..engine import check_threads

__all__ = ["MEMORY", "RETRIES", "Work"]

#: Bytes of memory, and how often a task is retried, unless the caller says otherwise.
MEMORY = 256 * 2**20
RETRIES = 2


@dataclass(frozen=True)
class Work:
    """The way that a plan is run.

    Attributes:
        executor: What runs the tasks; threads of this process if `None`.
        workers: The number of workers of the executor; if `None`, as many as it says it has.
        memory: Bytes for the buffers of all workers of a host.
        threads: Their number, if there is no executor; one per core if `None`.
        sync: Whether the data is on the disk before its receipt is; a store does so anyway.
        retries: How often a task is retried that fails with an error of the system or of its worker.
        timeout: Seconds after which workers of the executor that have ended no task are given up; `None` for no end.
        progress: Called now and then with the bytes that are done and the bytes in all.
        resume: Whether what an interrupted run has done is kept.
        record_bytes: Of tasks that this process runs, receipts are written when they have written so many bytes,
        record_seconds: or after so many seconds.

    Raises:
        LayoutError, TypeError: if a number is too small, or of another type.
    """

    executor: Executor | None = None
    workers: int | None = None
    memory: int = MEMORY
    threads: int | None = None
    sync: bool = True
    retries: int = RETRIES
    timeout: float | None = None
    progress: Callable[[int, int], object] | None = None
    resume: bool = False
    record_bytes: int = 2**30
    record_seconds: float = 5.0

    def __post_init__(self) -> None:
        integer("memory", self.memory)
        check_threads(self.threads)
        if integer("retries", self.retries) < 0:
            raise LayoutError(f"retries is {self.retries}; it must be at least 0")
        if self.workers is not None and integer("workers", self.workers) < 1:
            raise LayoutError(f"workers is {self.workers}; it must be at least 1")
        if self.timeout is not None:
            if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
                raise TypeError(f"timeout must be a number of seconds, got {type(self.timeout).__name__}")
            if not self.timeout > 0:
                raise LayoutError(f"timeout is {self.timeout}; it must be more than 0 seconds")
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(self.executor).__name__}")
