"""Digests of a gibibyte where it lies: on one core, on two, and of a tensor of PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from figures import Row, at_most
from part import QUICK, main
from timing import compare

import shardwise as sw

NBYTES = 2**26 if QUICK else 2**30
TURNS = 3 if QUICK else 11


def within(gigabytes: float) -> float:
    """The seconds in which this is read at so many gigabytes a second."""
    return NBYTES / (gigabytes * 1e9)


def rows() -> Iterator[Row]:
    array = np.random.default_rng(0).integers(0, 2**63, NBYTES // 8)
    size = f"{NBYTES >> 20:,} MiB"
    for threads, speed, where in ((1, 15, "one core"), (2, 25, "two cores")):
        work = f"the digest of {size}, {where} ({speed} GB/s are asked)"
        floor = "its sum by numpy, one core", lambda: array.sum()
        ours = partial(sw.digest, array, threads=threads)
        yield compare(work, ours, floor=floor, goal=at_most(within(speed)), turns=TURNS)
    tensor = torch.from_numpy(array).view(torch.bfloat16)
    work = f"the digest of {size} in a tensor of PyTorch on the CPU (5 GB/s are asked)"
    yield compare(work, lambda: sw.digest(tensor), goal=at_most(within(5)), turns=TURNS)


if __name__ == "__main__":
    main(rows)
