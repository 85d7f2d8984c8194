"""Runs as a table: the addresses of both sides, in blocks of memory that both have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .._text import shown
from .._types import Numbers, Table
from ..errors import LayoutError
from ..reshard.model.memory import array_name
from .versions import MemoryManifest, MemoryRange

__all__ = ["ROW", "Addresses", "addresses_of_runs", "joined_rows", "lengths_of_runs", "located", "strided"]

Addresses = npt.NDArray[np.uint64]
#: `count` runs of `bytes` bytes, in memory of this side and of the other; the blocks are positions in `blocks` of both.
ROW = np.dtype(
    [
        ("local", np.uint64),
        ("remote", np.uint64),
        ("bytes", np.int64),
        ("count", np.int64),
        ("local_stride", np.int64),
        ("remote_stride", np.int64),
        ("local_block", np.int64),
        ("remote_block", np.int64),
    ]
)
#: The longest block.
_FAR = 2**64


def located(manifest: MemoryManifest, what: str, names: Sequence[str], tensors: Numbers, last: Numbers) -> Table:
    """Return the address and the block of tensors in a manifest; `last` is the byte that rows of each reach."""
    used, which = np.unique(tensors, return_inverse=True)
    needed = np.zeros(len(used), np.int64)
    np.maximum.at(needed, which, last)
    ranges: Mapping[str, MemoryRange] = getattr(manifest, what)
    blocks = manifest.sorted_blocks()
    found = np.zeros(len(used), [("address", np.uint64), ("block", np.int64)])
    for at, (number, least) in enumerate(zip(used.tolist(), needed.tolist(), strict=True)):
        name = names[number]
        one = ranges.get(name)
        if one is None or one.nbytes < least:
            held = "no memory" if one is None else f"{one.nbytes} bytes"
            raise LayoutError(
                f"{shown(manifest.holder)} has {held} for {array_name(what, name)}, but the plan needs {least} bytes "
                f"(manifest {manifest.digest})"
            )
        # The last block that begins no later, the longest of those that begin there: blocks of one's own are apart.
        before = bisect_right(blocks, (one.device, one.address, _FAR, 0))
        device, begin, size, block = blocks[before - 1] if before else ("", 0, 0, 0)
        if device != one.device or one.address + one.nbytes > begin + size:
            raise LayoutError(f"{array_name(what, name)} of {shown(manifest.holder)} is in none of its blocks")
        found[at] = one.address, block
    return found[which]


def joined_rows(rows: Table) -> Table:
    """Return the rows in the order of this side's memory, joined where they follow each other in blocks of both."""
    rows = rows[np.lexsort((rows["remote"], rows["local"], rows["remote_block"], rows["local_block"]))]
    rows = _merge(rows, rows["count"] == 1, "bytes")
    return _merge(rows, rows["count"] > 1, "count")


def _merge(rows: Table, may: npt.NDArray[np.bool_], field: str) -> Table:
    """Join neighbours that are one run, or strided rows of which one goes on where the other ends."""
    before, after = rows[:-1], rows[1:]
    joins = may[:-1] & may[1:]
    same = ["local_block", "remote_block"]
    same += ["bytes", "local_stride", "remote_stride"] if field == "count" else []
    for name in same:
        joins &= before[name] == after[name]
    for side in ("local", "remote"):
        length = before["bytes"] if field == "bytes" else before["count"] * before[f"{side}_stride"]
        joins &= after[side] - before[side] == length.astype(np.uint64)
    if not joins.any():
        return rows
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    sizes = np.add.reduceat(rows[field], starts)
    rows = rows[starts]
    rows[field] = sizes
    return rows


def addresses_of_runs(rows: Table, side: str) -> Addresses:
    """Return the address of each run."""
    count = rows["count"]
    turn = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    steps = (turn * np.repeat(rows[f"{side}_stride"], count)).astype(np.uint64)
    found: Addresses = np.repeat(rows[side], count) + steps
    return found


def lengths_of_runs(rows: Table) -> Numbers:
    """Return the bytes of each run."""
    return np.repeat(rows["bytes"], rows["count"])


def strided(memory: npt.NDArray[np.uint8], start: int, count: int, size: int, stride: int) -> npt.NDArray[np.uint8]:
    """Return a view of runs of equal size in memory: int (count, size)."""
    step = stride if count > 1 else size
    return np.lib.stride_tricks.as_strided(memory[start:], (count, size), (step, 1))
