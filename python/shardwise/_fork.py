"""Locks and imports for a library that other threads use while the process forks: the child must work.

A child has the thread that forked and no other, but all the locks as they were: one that another thread held stays shut
for ever. So nothing here waits for a lock that a thread may hold at that moment:

- Modules that are imported when they are first needed are imported under `importing`, which a fork waits for: Python
  itself locks each module while it is imported, and a child would wait for that.
- A `ForkLock` is open in the child. What it guards is valid at every moment; it only keeps writers apart.
- `cached_property` has no lock. That of Python 3.11 and earlier has one for all objects of a class.
"""

from __future__ import annotations

# A fork calls what is registered for before it in reverse order. This module, and `logging`, which it imports, register
# to take a lock. They are imported here so that a fork takes `importing` first: if it held the lock of `logging` and
# waited for a thread that imports a module, and that module made a logger, both would wait for ever.
import concurrent.futures.thread  # noqa: F401
import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

__all__ = ["ForkLock", "cached_property", "importing"]

#: Held while a function imports a module.
importing = threading.RLock()


class ForkLock:
    """A reentrant lock that is open in a process forked while another thread holds it.

    >>> with ForkLock() as held:
    ...     print(held)
    None
    """

    __slots__ = ("__weakref__", "_held", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        # Whoever holds it gives this one back, also if the process forks meanwhile.
        self._held = lock

    def __exit__(self, *raised: object) -> None:
        self._held.release()


_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


#: The seconds that a fork waits for an import. A library that registers a lock of its own while it is imported, as h5py
#: does, may need that lock to end its import: the fork has it.
_LONGEST = 60


def _before() -> None:
    importing.acquire(timeout=_LONGEST)


def _in_parent() -> None:
    if importing._is_owned():  # type: ignore[attr-defined]
        importing.release()


def _in_child() -> None:
    if importing._is_owned():  # type: ignore[attr-defined]
        importing.release()
    else:
        importing._at_fork_reinit()  # type: ignore[attr-defined]
    for lock in list(_locks):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801  # As there.
        """A method whose result is kept as an attribute of the object."""

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            # Two threads may both make it; all have what is there first.
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
