"""Locks and imports for a library that other threads use while the process forks: the child must work.

A child has the thread that forked and no other, but all the locks as they were: one that another thread held stays shut
for ever. So nothing here waits for a lock that a thread may hold at that moment:

- Modules that are imported when they are first needed are imported under `importing`, which a fork waits for: Python
  itself locks each module while it is imported, and a child would wait for that.
- A `ForkLock` is open in the child. What it guards is valid at every moment; it only keeps writers apart.
- `cached_property` has no lock. That of Python 3.11 and earlier has one for all objects of a class.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from _thread import RLock  # That of `threading`, which takes as long to import as half of this package.
from typing import TYPE_CHECKING, Any

__all__ = ["ForkLock", "cached_property", "importing"]

#: Held while a function imports a module.
importing = RLock()


class ForkLock:
    """A reentrant lock that is open in a process forked while another thread holds it.

    >>> with ForkLock() as held:
    ...     print(held)
    None
    """

    __slots__ = ("__weakref__", "_held", "_lock")

    def __init__(self) -> None:
        self._lock = RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        # Whoever holds it gives this one back, also if the process forks meanwhile.
        self._held = lock

    def __exit__(self, *raised: object) -> None:
        self._held.release()


_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


#: Modules of the standard library that register to take a lock before a fork and to release it after, and that lock:
#: `store` imports them.
_REGISTERING = {"logging": "_lock", "concurrent.futures.thread": "_global_shutdown_lock"}


def _before() -> None:
    """Wait until no thread imports a module.

    A fork first takes what is registered then, and looks anew at what is registered for after it. So a module that is
    imported while it waits here would have its lock released that nobody took: it is taken here.
    """
    if importing.acquire(blocking=False):
        return
    missing = [name for name in _REGISTERING if not _is_imported(name)]
    importing.acquire()
    for name in filter(_is_imported, missing):
        lock = getattr(sys.modules[name], _REGISTERING[name], None)
        if lock is not None:
            lock.acquire()


def _is_imported(name: str) -> bool:
    """Say if a module is imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _in_child() -> None:
    importing.release()
    for lock in list(_locks):
        lock._lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=importing.release, after_in_child=_in_child)

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
