"""Many files: one tensor cut into hundreds and thousands of column shards, each in a file that is synced to the disk.

Beside it, in the same turns, the bare work: making files of the same names and bytes, and syncing each. Nothing is
removed before all turns are done: ext4 does not give away an inode soon after its file was removed, and looks at each
such one again for every file that is made (`recently_deleted` in its ialloc.c), so that thousands of removed files
would make the next thousands slow, whoever makes them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from figures import Row, at_most_times
from part import QUICK, main

import shardwise as sw

ROWS, COLUMNS = 2048, 4096
COUNTS = (32, 64, 128) if QUICK else (512, 1024, 2048)
TURNS = 2 if QUICK else 7


def cut(source: Path, files: int, target: Path) -> None:
    rules = sw.LayoutMap(sw.DeviceMesh((files,), ("x",)))
    rules["w"] = (None, "x")
    sw.reshard_checkpoint(source, target, rules, to="sharded")


def bare(files: dict[str, int], target: Path) -> None:
    target.mkdir()
    folder = os.open(target, os.O_RDONLY)
    data = bytes(max(files.values()))
    for name, size in files.items():
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder)
        os.write(file, memoryview(data)[:size])
        os.fsync(file)
        os.close(file)
    os.fsync(folder)
    os.close(folder)


def timed(work: Callable[[Path], None], target: Path) -> float:
    start = time.perf_counter()
    work(target)
    seconds = time.perf_counter() - start
    os.sync()  # What this one leaves to do is not the next one's.
    return seconds


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.safetensors")
        sw.save_checkpoint(source, {"w": np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)})
        works: list[Callable[[Path], None]] = []
        for count in COUNTS:
            target = Path(folder, f"{count} files")
            cut(source, count, target)
            files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
            assert sum(name.endswith(".safetensors") for name in files) == count
            works += [partial(cut, source, count), partial(bare, files)]
        turns = [
            [timed(work, Path(folder, f"turn {turn}, {at}")) for at, work in enumerate(works)] for turn in range(TURNS)
        ]
        medians = [statistics.median(column) for column in zip(*turns, strict=True)]
        size = f"{ROWS * COLUMNS * 4 >> 20} MiB"
        for number, count in enumerate(COUNTS):
            ratios = [turn[2 * number + 1] / turn[2 * number] for turn in turns]
            name = f"{size} into {count:,} column files, synced"
            ours, theirs = medians[2 * number : 2 * number + 2]
            yield Row(name, "making and syncing them", ours, theirs, least=min(ratios), greatest=max(ratios))
        for at, name in enumerate(("the same", "making and syncing them")):
            ours, theirs = medians[4 + at], medians[at]
            ratios = [turn[at] / turn[4 + at] for turn in turns]
            goal = None if at or QUICK else at_most_times(4)
            work, peer = f"{name}: {COUNTS[2]:,} files", f"{COUNTS[0]:,} files"
            yield Row(work, peer, ours, theirs, least=min(ratios), greatest=max(ratios), goal=goal)


if __name__ == "__main__":
    main(rows)
