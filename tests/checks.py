"""What several tests assert alike."""

from __future__ import annotations

import functools
import gc
import hashlib
import signal
import sys
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw

INT64_MAX = 2**63 - 1
#: 5,000 digits: more than Python writes of an integer.
HUGE = 10**5000


def extracted(archive: Path, folder: Path) -> Path:
    """Extract an archive of what another library wrote into a folder, and return the folder."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


def sha256_of(array: npt.NDArray[Any]) -> str:
    """The first 32 digits of the SHA-256 of an array's elements, as `expected.json` of trainers' files has them."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@functools.cache
def deep() -> list[Any]:
    """Made once: the collector looks at each list again and again while they are made."""
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


@contextmanager
def refused(exception: type[BaseException], *fragments: object) -> Iterator[None]:
    """The body raises exactly `exception`, no subclass, and its message holds every fragment."""
    with pytest.raises(exception) as caught:
        yield
    assert type(caught.value) is exception, repr(caught.value)
    for fragment in fragments:
        assert str(fragment) in str(caught.value)


def same_tensors(path: Path, expected: Mapping[str, npt.NDArray[Any]]) -> None:
    """The checkpoint has exactly these tensors, with their dtypes, shapes and bytes."""
    with sw.open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == set(expected)
        for name, value in expected.items():
            found = checkpoint.read(name)
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes()), name


def swapped(tensor: npt.NDArray[Any], first: slice, second: slice) -> None:
    """Two segments of a tensor change places."""
    kept = tensor[first].copy()
    tensor[first], tensor[second] = tensor[second], kept


def poisoned_memory(shape: tuple[int, ...], dtype: str) -> None:
    """Leave memory that is not zero where the next arrays of such a size will be."""
    arrays = [np.full(shape, -1, dtype) for _ in range(64)]
    del arrays[::2]


def view_index(box: Iterable[slice]) -> Any:
    """`box` as the index that gives a view, also of a 0-d array, of which `array[()]` would be a scalar."""
    return (*box, ...)


def assert_same_view(view: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """`view` is in every respect that can be observed the array `expected`, which numpy made by indexing."""
    assert type(view) is type(expected)
    assert view.dtype == expected.dtype
    assert view.dtype.byteorder == expected.dtype.byteorder
    assert view.shape == expected.shape
    assert view.strides == expected.strides
    for flag in ("WRITEABLE", "ALIGNED", "C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA", "WRITEBACKIFCOPY"):
        assert view.flags[flag] == expected.flags[flag], flag
    if view.size:
        # The same address, strides and dtype: the same values, whatever they are.
        assert view.__array_interface__["data"] == expected.__array_interface__["data"]


@contextmanager
def linear(seconds: int = 300) -> Iterator[None]:
    """The body must end within so much time of the processor.

    It is for inputs on which a cost that grows as the square takes hours: it ends such a body, and neither a slow
    machine nor a busy one makes it fail.
    """

    def too_long(*_: object) -> None:
        raise AssertionError(f"over {seconds} s of the processor")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def interrupted(call: Callable[[Any], object], arguments: Iterable[Any], error: type[BaseException]) -> bool:
    """Whether a signal ends `call` while it goes on, on one of the arguments, each of which makes it longer.

    A timer of the processor runs out again and again, and the handler raises the error only when it has been run some
    times. A call that looks at signals now and then runs it again and again; one that does not runs it once, when it
    ends. So neither a slow machine nor a busy one changes the answer, and a fast one needs longer arguments.
    """
    left = 0

    def handle(*_: object) -> None:
        nonlocal left
        if not left:
            return  # The call has ended, and the timer is not to run again.
        left -= 1
        if not left:
            raise error
        signal.setitimer(signal.ITIMER_PROF, 0.001)

    before = signal.signal(signal.SIGPROF, handle)
    # The interpreter drops an error that a handler raises in a callback of the collector; Hypothesis sets one.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        for argument in arguments:
            left = 5
            try:
                signal.setitimer(signal.ITIMER_PROF, 0.001)
                try:
                    call(argument)
                finally:
                    left = 0
                    signal.setitimer(signal.ITIMER_PROF, 0)
            except error:
                return True
        return False
    finally:
        signal.signal(signal.SIGPROF, before)
        if was_collecting:
            gc.enable()


def peak_of(call: Callable[[], object]) -> int:
    """How many bytes Python and numpy had at most while the call ran, on top of what they had before."""
    gc.collect()
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()


def open_below(folder: Path) -> int | None:
    """How many descriptors of this process are of files below the folder; `None` where nothing lists them."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        return None
    found = 0
    for descriptor in descriptors.iterdir():
        with suppress(OSError):  # The one that lists them is closed by now, and other threads have theirs.
            found += str(descriptor.readlink()).startswith(f"{folder.resolve()}/")
    return found


def lets_others_run(make: Callable[[int], Any], call: Callable[[Any], object], exponents: range) -> bool:
    """Whether another thread runs while `call` does, on arguments that `make` makes of growing powers of two.

    The interpreter does not change threads of itself meanwhile, so only a call that releases the lock lets the other
    thread count. If the machine is busy, it may not get to it during one call; so there are many.
    """
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # Releases the lock.

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1000)
        # A thread that waits for the lock already, such as one that another test left, asks for it after the old
        # interval; one that begins to wait from now on does not ask for 1000 seconds.
        seen = counted[0]
        while counted[0] < seen + 2:
            time.sleep(2 * interval)
        for exponent in [*exponents, *[exponents[-1]] * 50]:
            argument = make(1 << exponent)
            before = counted[0]
            call(argument)
            if counted[0] > before:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
