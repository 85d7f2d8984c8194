"""Checkpoints merged and cut anew, beside PyTorch's consolidator and beside `cp` of the same bytes.

16 tensors of bfloat16 in safetensors files of 8 owners. On a warm page cache, without syncs on either side; what was
written is removed outside of the time. The files lie in the folder for temporary ones.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Goal, Row, at_most_times, faster
from part import QUICK, main
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import shardwise as sw

TENSORS = 16
COLUMNS = 1 << (8 if QUICK else 13)
ROWS = 4096
SIZE = f"{TENSORS * ROWS * COLUMNS / 2**29:g} GiB"
TURNS = 3 if QUICK else 5
NAMES = [f"layers.{i}.weight" for i in range(TENSORS)]

Layouts = dict[str, sw.TensorLayout]


def cut(ways: int, axes: tuple[str | None, str | None]) -> Layouts:
    return dict.fromkeys(NAMES, sw.TensorLayout(axes, sw.DeviceMesh((ways,), ("x",))))


def turns(works: dict[str, Callable[[Path], object]], folder: Path) -> dict[str, list[float]]:
    """The time of each work, turn by turn; each writes to a path that is not there, after a turn to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(TURNS + 1):
        for name, work in works.items():
            out = folder / "out"
            start = time.perf_counter()
            work(out)
            seconds = time.perf_counter() - start
            if turn:
                taken[name].append(seconds)
            shutil.rmtree(out)
    return taken


def row(work: str, ours: list[float], peer: str, theirs: list[float], goal: Goal | None = None) -> Row:
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    medians = statistics.median(ours), statistics.median(theirs)
    return Row(work, peer, *medians, least=min(ratios), greatest=max(ratios), goal=goal)


def copied(source: Path) -> Callable[[Path], object]:
    return lambda out: subprocess.run(["cp", "-r", str(source), str(out)], check=True)


def anew(source: Path, layouts: Layouts | None, to: Any) -> Callable[[Path], object]:
    return lambda out: sw.reshard_checkpoint(source, out, layouts, to=to, sync=False)


def consolidated(source: Path) -> Callable[[Path], object]:
    def work(out: Path) -> None:
        out.mkdir()
        consolidate_safetensors_files(str(source), str(out), dict.fromkeys(NAMES, 1), num_threads=2)

    return work


def rows() -> Iterator[Row]:
    import ml_dtypes

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        block = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32).astype(ml_dtypes.bfloat16)
        whole = {name: block + block.dtype.type(i) for i, name in enumerate(NAMES)}
        sw.save_checkpoint(folder / "rows", whole, cut(8, ("x", None)), to="sharded")
        sw.save_checkpoint(folder / "columns", whole, cut(8, (None, "x")), to="sharded")
        del whole
        for kind, goal in (("rows", at_most_times(1.1)), ("columns", at_most_times(1.5))):
            source = folder / kind
            ours, theirs = anew(source, None, "hf"), consolidated(source)
            ours(folder / "ours")
            theirs(folder / "theirs")
            assert not sw.diff_checkpoints(folder / "ours", folder / "theirs")
            for out in ("ours", "theirs"):
                shutil.rmtree(folder / out)
            taken = turns({"ours": ours, "theirs": theirs, "cp": copied(source)}, folder)
            work = f"merging {SIZE} of 8 {kind[:-1]} shards into a file"
            yield row(work, taken["ours"], "PyTorch `consolidate_safetensors_files`", taken["theirs"], faster(5))
            yield row(work, taken["ours"], "`cp` of the same bytes", taken["cp"], goal)
        others: list[tuple[str, Layouts, str, Goal | None]] = [
            ("row shards, to 4", cut(4, ("x", None)), "sharded", at_most_times(1.3)),
            ("row shards, to 4 as PyTorch's DCP", cut(4, ("x", None)), "dcp", None),
            ("row shards, to columns of 4 as PyTorch's DCP", cut(4, (None, "x")), "dcp", None),
        ]
        for what, layouts, to, limit in others:
            source = folder / "rows"
            taken = turns({"ours": anew(source, layouts, to), "cp": copied(source)}, folder)
            yield row(f"{SIZE} from 8 {what}", taken["ours"], "`cp` of the same bytes", taken["cp"], limit)


if __name__ == "__main__":
    main(rows)
