"""Threads that are started only if there is memory: a failed start would hang the caller or end the process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Threads"]

Returned = TypeVar("Returned")

#: The stack of a thread where nobody says it, and what Python and the C library take for one before it does anything.
_STACK = 8 << 20
_BESIDE = 2 << 20


class Threads(ThreadPoolExecutor):
    """A pool of threads for submitted functions: as many as asked for, or as there is memory for.

    Args:
        threads: The number of threads.
        prefix: The beginning of their names.

    Raises:
        MemoryError: if there is no memory for one.
    """

    def __init__(self, threads: int, prefix: str = "shardwise") -> None:
        count = threads
        while count and not _has_room(count):
            count //= 2
        if not count:
            raise _no_memory()
        super().__init__(count, thread_name_prefix=prefix)

    def submit(self, fn: Callable[..., Returned], /, *args: Any, **kwargs: Any) -> Future[Returned]:
        """Have a function called in one of the threads; return its future.

        Raises:
            MemoryError: if a thread cannot be started.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "start new thread" in str(error):
                raise _no_memory() from None
            raise


def _has_room(threads: int) -> bool:
    try:
        mmap.mmap(-1, threads * ((threading.stack_size() or _STACK) + _BESIDE)).close()
    except (OSError, MemoryError):
        return False
    return True


def _no_memory() -> MemoryError:
    return MemoryError("no thread can be started: there is no room for its stack, or the limit of threads is reached")
