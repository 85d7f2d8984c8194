"""What a call may do: raise a documented exception, and take two seconds of the processor. Nothing else."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from shardwise import InternalError, ShardwiseError

SECONDS = 2
#: What a process may take on top of what it has when the fuzzing begins.
MORE_MEMORY = 1 << 30


class Hang(BaseException):
    """A call took too long; no `Exception`, so that nobody catches it on the way."""


class Mine(Exception):
    """Raised by the odd objects that are given as arguments; it must come out as it is, or as a documented one."""


def limit_memory() -> None:
    """Let absurd sizes fail instead of filling the machine."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:  # noqa: PTH123
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, resource.RLIM_INFINITY))


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Hang(f"over {SECONDS} s of the processor")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `Hang` in the body after two seconds of the processor."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def is_documented(error: BaseException, *documentation: str | None) -> bool:
    """Whether an exception is one that everything may raise, or that these docstrings name."""
    if isinstance(error, InternalError):
        return False
    if isinstance(error, (ShardwiseError, TypeError, IndexError, Mine)):
        return True
    if type(error) in (ValueError, OverflowError) and re.search(r"__len__\(\) should|index-sized integer", str(error)):
        return True  # Python's own word on an object whose length is none.
    if isinstance(error, MemoryError):  # What cannot be listed in any memory, such as the labels of 2**62 devices.
        return True
    if isinstance(error, ImportError) and error.name in ("torch", "jax", "ml_dtypes"):
        return True
    names = {kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception) and kind is not Exception}
    return any(name in (text or "") for text in documentation for name in names)
