"""Work during which cyclic garbage is not collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the collection of cyclic garbage, which would take as long as making hundreds of thousands of slots.

    None of them is in a cycle, nor is what a checkpoint of as many tensors is opened as; garbage from other threads is
    collected afterwards.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
