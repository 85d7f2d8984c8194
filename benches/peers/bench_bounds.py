"""What changing a checkpoint may take at most: memory, bytes read and written, and the time that digests add.

8 GiB of bfloat16 in safetensors files of 8 owners for the memory, an eighth of it for the rest; without syncs. Each
change is a process of its own, which is looked at from outside: the most memory that it had, and what it read and
wrote, as Linux counts them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from figures import Row, at_most_bytes, at_most_times, at_most_times_bytes, quantity
from part import QUICK, main
from timing import compare

import shardwise as sw
from shardwise.pieces import LocatedPiece
from shardwise.store.data.engine import CopyJob

#: Of one tensor.
ROWS, COLUMNS = (1 << 9, 1 << 9) if QUICK else (1 << 12, 1 << 13)
TENSOR = ROWS * COLUMNS * 2
WAYS = 8
MANY, FEW = (8, 4) if QUICK else (128, 16)
MIB = 2**20
#: What is asked besides the budget: Python, numpy, the plan, and what is noted down.
BESIDES = 64 * MIB

Layouts = dict[str, sw.TensorLayout]


def cut(count: int, ways: int, axes: tuple[str | None, str | None]) -> Layouts:
    layout = sw.TensorLayout(axes, sw.DeviceMesh((ways,), ("x",)))
    return {f"layers.{i}.weight": layout for i in range(count)}


def make(folder: Path, count: int, axes: tuple[str | None, str | None]) -> Path:
    """A checkpoint of so many tensors, cut for eight devices."""
    elements = ROWS * COLUMNS
    values = np.random.default_rng(0).random(elements + count, np.float32).astype(ml_dtypes.bfloat16)
    layouts = cut(count, WAYS, axes)
    # Each begins an element later in the same memory: the same array would be written once, under several names.
    tensors = {name: values[i : i + elements].reshape(ROWS, COLUMNS) for i, name in enumerate(layouts)}
    sw.save_checkpoint(folder, tensors, layouts, to="sharded", sync=False)
    return folder


#: Changes a checkpoint, says what it read and wrote, and waits, so that it can be looked at.
CHILD = """
import json, sys
import shardwise as sw

def counted():
    lines = open("/proc/self/io", encoding="ascii").read().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}

src, dst, axes, ways, to, memory = json.loads(sys.argv[1])
mesh = sw.DeviceMesh((ways,), ("x",))
with sw.open_checkpoint(src) as checkpoint:
    names = list(checkpoint)
before = counted()
layouts = dict.fromkeys(names, sw.TensorLayout(axes, mesh)) if axes else None
sw.reshard_checkpoint(src, dst, layouts, to=to, memory=memory, sync=False)
after = counted()
print(after["rchar"] - before["rchar"] + after["wchar"] - before["wchar"], flush=True)
sys.stdin.read()
"""


def changed(
    src: Path, dst: Path, axes: tuple[str | None, str | None] | None, ways: int, to: str, memory: int
) -> tuple[int, int]:
    """Change a checkpoint; gives the most memory that this took, and the bytes read and written. Removes it again."""
    what = json.dumps([str(src), str(dst), axes, ways, to, memory])
    command = [sys.executable, "-c", CHILD, what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        moved = child.stdout.readline()
        # Not `ru_maxrss`, in which Linux counts what the parent of the process had when it started it.
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        child.communicate()
    assert child.returncode == 0
    shutil.rmtree(dst)
    return peak, int(moved)


def memory(folder: Path) -> Iterator[Row]:
    size = quantity(MANY * TENSOR, "B")
    budgets = [1, 2] if QUICK else [64, 256, 1024]
    for kind, axes in (("row", ("x", None)), ("column", (None, "x"))):
        source = make(folder / kind, MANY, axes)
        works: list[tuple[str, Any, int, str]] = [(f"merging {size} of {WAYS} {kind} shards", None, 1, "hf")]
        if kind == "row":
            works.append((f"{size} from {WAYS} row shards, to columns of 4 as PyTorch's DCP", (None, "x"), 4, "dcp"))
        for work, to_axes, ways, to in works:
            for budget in budgets:
                peak, _ = changed(source, folder / "out", to_axes, ways, to, budget * MIB)
                goal = at_most_bytes(budget * MIB + BESIDES)
                yield Row(f"{work}: the process's memory, budget {budget} MiB", "", peak, unit="B", goal=goal)
        shutil.rmtree(source)


def moved(folder: Path) -> Iterator[Row]:
    needed = 2 * FEW * TENSOR
    size = quantity(FEW * TENSOR, "B")
    sources = {kind: make(folder / kind, FEW, axes) for kind, axes in (("row", ("x", None)), ("column", (None, "x")))}
    sw.reshard_checkpoint(sources["row"], folder / "dcp", cut(FEW, WAYS, ("x", None)), to="dcp", sync=False)
    works: list[tuple[str, Path, Any, int, str]] = [
        (f"merging {size} of {WAYS} row shards", sources["row"], None, 1, "hf"),
        (f"merging {size} of {WAYS} column shards", sources["column"], None, 1, "hf"),
        (f"{size} from PyTorch's DCP to Hugging Face's form", folder / "dcp", None, 1, "hf"),
        (f"{size} from {WAYS} row shards, to 4", sources["row"], ("x", None), 4, "sharded"),
        (f"{size} from {WAYS} row shards, to columns of 4", sources["row"], (None, "x"), 4, "sharded"),
    ]
    for work, source, axes, ways, to in works:
        _, total = changed(source, folder / "out", axes, ways, to, 256 * MIB)
        name = f"{work}: bytes read and written"
        yield Row(name, "those of the tensors, twice", total, needed, unit="B", goal=at_most_times_bytes(1.05))
    shutil.rmtree(folder / "dcp")
    yield from digests(folder, sources)


def digests(folder: Path, sources: dict[str, Path]) -> Iterator[Row]:
    """The engine's own work, of which digests are a part that can be left out."""
    boxes = {
        "row": [((i * ROWS // WAYS, 0), ((i + 1) * ROWS // WAYS, COLUMNS)) for i in range(WAYS)],
        "column": [((0, i * COLUMNS // WAYS), (ROWS, (i + 1) * COLUMNS // WAYS)) for i in range(WAYS)],
    }
    for kind, source in sources.items():
        files = sorted(source.glob("*.safetensors"))

        def run(digest: bool, files: list[Path] = files, kind: str = kind) -> None:
            job = CopyJob()
            held = [job.read_file(path, path.stat().st_size) for path in files]
            out = folder / "whole"
            target = job.write_file(out, FEW * TENSOR)
            for i in range(FEW):
                starts = [path.stat().st_size - (FEW - i) * TENSOR // WAYS for path in files]
                pieces = [
                    LocatedPiece.dense(zip(*box, strict=True), file, at, 2)
                    for file, at, box in zip(held, starts, boxes[kind], strict=True)
                ]
                whole = LocatedPiece.dense(((0, ROWS), (0, COLUMNS)), target, i * TENSOR, 2)
                job.add_tensor((ROWS, COLUMNS), 2, pieces, [whole], digest=digest)
            job.run()
            out.unlink()

        work = f"merging {quantity(FEW * TENSOR, 'B')} of {WAYS} {kind} shards, with digests"
        goal = at_most_times(1.25)
        yield compare(work, partial(run, True), "without", partial(run, False), goal=goal, turns=7)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        yield from moved(Path(name))
    with tempfile.TemporaryDirectory() as name:
        free, needed = shutil.disk_usage(name).free, int(2.5 * MANY * TENSOR)
        if free < needed:
            sys.exit(f"{name} has {quantity(free, 'B')} free; {quantity(needed, 'B')} are needed")
        yield from memory(Path(name))


if __name__ == "__main__":
    main(rows)
