"""What the machine itself can do: writing and copying bytes, with one thread and with two.

Everything that writes an array pays at least the first; everything that moves one at least the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from figures import Row
from part import QUICK, main
from timing import compare

Array = npt.NDArray[np.float32]
SIDE = 1 << (12 if QUICK else 14)


def halves(work: Callable[..., Any], *arrays: Array) -> Callable[[], Any]:
    """Do the work on both halves of the arrays, a thread for each; the threads stay."""
    pool = ThreadPoolExecutor(2)
    middle = SIDE // 2
    parts = [[array[:middle] for array in arrays], [array[middle:] for array in arrays]]

    def run() -> None:
        for future in [pool.submit(work, *part) for part in parts]:
            future.result()

    return run


def rows() -> Iterator[Row]:
    source, target = np.ones((SIDE, SIDE), np.float32), np.zeros((SIDE, SIDE), np.float32)
    size = f"{source.nbytes / 2**30:g} GiB"

    def fill(array: Array) -> None:
        array.fill(1)

    works: list[tuple[str, Callable[[], Any]]] = [
        (f"fill {size}, one thread", lambda: fill(target)),
        (f"fill {size}, two threads", halves(fill, target)),
        (f"fill {size} of new memory, one thread", lambda: fill(np.empty_like(target))),
        (f"copy {size}, one thread", lambda: np.copyto(target, source)),
        (f"copy {size}, two threads", halves(np.copyto, target, source)),
        (f"copy {size} into new memory, one thread", source.copy),
    ]
    small = np.ones(1 << 14, np.float32)
    for name, work in works:
        yield compare(name, work, turns=5)
    yield compare("copy 64 KiB, which stay in the cache", lambda: np.copyto(small, small[::-1][::-1]))


if __name__ == "__main__":
    main(rows)
