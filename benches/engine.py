"""Times the I/O engine beside `cp` and safetensors: `benches/engine.py [--mib 1024] [--rounds 5] [--folder DIR]`.

Every line is a ratio of times in one run, on a warm page cache, without syncs on either side; the best of some rounds,
taken in turns. Peak memory is measured from outside, of a process of its own. The files are removed at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardwise.pieces import LocatedPiece
from shardwise.store.data.engine import CopyJob

ROWS, COLUMNS, ITEM = 4096, 8192, 2
TENSOR = ROWS * COLUMNS * ITEM
HEADER = 4096  # Bytes of each file before its first tensor.
WAYS = 8

Boxes = list[tuple[tuple[int, int], tuple[int, int]]]


def rows_of(ways: int) -> Boxes:
    return [((i * ROWS // ways, 0), ((i + 1) * ROWS // ways, COLUMNS)) for i in range(ways)]


def columns_of(ways: int) -> Boxes:
    return [((0, i * COLUMNS // ways), (ROWS, (i + 1) * COLUMNS // ways)) for i in range(ways)]


def make(folder: Path, tensors: int) -> list[Path]:
    """Files with `tensors` shards each."""
    paths = [folder / f"shard{i}" for i in range(WAYS)]
    rng = np.random.default_rng(0)
    block = rng.bytes(TENSOR // WAYS)
    for path in paths:
        with path.open("wb") as file:
            file.write(bytes(HEADER))
            for _ in range(tensors):
                file.write(block)
    return paths


def job_for(
    paths: list[Path], source: Boxes, made: list[Path], target: Boxes, tensors: int, *, digest: bool = False
) -> CopyJob:
    """From shards of each tensor in files to other shards of it in other files."""
    job = CopyJob()
    of_each = TENSOR // len(target)
    sources = [job.read_file(path, path.stat().st_size) for path in paths]
    targets = [job.write_file(path, HEADER + tensors * of_each) for path in made]
    for t in range(tensors):
        held = [
            LocatedPiece.dense(zip(start, stop, strict=True), holder, HEADER + t * TENSOR // len(source), ITEM)
            for holder, (start, stop) in zip(sources, source, strict=True)
        ]
        wanted = [
            LocatedPiece.dense(zip(start, stop, strict=True), holder, HEADER + t * of_each, ITEM)
            for holder, (start, stop) in zip(targets, target, strict=True)
        ]
        job.add_tensor((ROWS, COLUMNS), ITEM, held, wanted, digest=digest)
    return job


def timed(work: Callable[[], object], paths: list[Path]) -> float:
    """Seconds; what was made is removed outside of the time."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    for path in paths:
        path.unlink(missing_ok=True)
    return seconds


def best(rounds: int, works: dict[str, tuple[Callable[[], object], list[Path]]]) -> dict[str, float]:
    """The least time of each, in turns."""
    times: dict[str, float] = {}
    for _ in range(rounds):
        for name, (work, paths) in works.items():
            times[name] = min(times.get(name, float("inf")), timed(work, paths))
    return times


CASES: dict[str, tuple[Boxes, Boxes, float]] = {
    "merge row shards": (rows_of(8), [((0, 0), (ROWS, COLUMNS))], 1.1),
    "merge column shards": (columns_of(8), [((0, 0), (ROWS, COLUMNS))], 1.5),
    "rows, 8 to 4": (rows_of(8), rows_of(4), 1.3),
    "columns, 8 to 4": (columns_of(8), columns_of(4), 1.3),
    "rows to columns": (rows_of(8), columns_of(8), 1.5),
}


def copies(folder: Path, tensors: int, rounds: int, threads: int | None) -> Iterator[str]:
    paths = make(folder, tensors)
    copied = [folder / f"cp{i}" for i in range(WAYS)]

    def cp() -> None:
        (folder / "cp").mkdir()
        subprocess.run(["cp", *map(str, paths), str(folder / "cp")], check=True)
        for i, path in enumerate(sorted((folder / "cp").iterdir())):
            path.rename(copied[i])
        (folder / "cp").rmdir()

    for name, (source, target, goal) in CASES.items():
        made = [folder / f"made{i}" for i in range(len(target))]
        plain = job_for(paths, source, made, target, tensors)
        digested = job_for(paths, source, made, target, tensors, digest=True)
        report = plain.run(threads=threads)
        for path in made:
            path.unlink()
        times = best(
            rounds,
            {
                "cp": (cp, copied),
                "off": (lambda job=plain: job.run(threads=threads), made),  # type: ignore[misc]
                "on": (lambda job=digested: job.run(threads=threads), made),  # type: ignore[misc]
            },
        )
        yield (
            f"{name:22} {times['off'] / times['cp']:5.2f} x cp (goal {goal}), digests on "
            f"{times['on'] / times['off']:5.2f} x off (goal 1.25); cp {times['cp']:.2f} s; "
            f"bytes read {report.bytes_read / (tensors * TENSOR):.3f} of those needed; {report.calls} calls"
        )


def column_slices(folder: Path, mib: int, rounds: int) -> Iterator[str]:
    from safetensors import safe_open

    columns = 8192
    rows = mib * 2**20 // (columns * ITEM)
    head = json.dumps({"a": {"dtype": "F16", "shape": [rows, columns], "data_offsets": [0, rows * columns * ITEM]}})
    path = folder / "whole.safetensors"
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head.encode())
        block = np.random.default_rng(1).bytes(2**20)
        for _ in range(mib):
            file.write(block)
    start, stop = columns // 8, columns // 4
    size = path.stat().st_size

    def ours() -> np.ndarray:
        out = np.empty((rows, stop - start), np.float16)
        job = CopyJob()
        held = LocatedPiece.dense(((0, rows), (0, columns)), job.read_file(path, size), 8 + len(head), ITEM)
        wanted = LocatedPiece.dense(((0, rows), (start, stop)), job.write_array(out), 0, ITEM)
        job.add_tensor((rows, columns), ITEM, [held], [wanted])
        job.run()
        return out

    def theirs() -> np.ndarray:
        with safe_open(path, "numpy") as opened:
            return opened.get_slice("a")[:, start:stop]  # type: ignore[no-any-return]

    assert ours().tobytes() == theirs().tobytes()  # Random bits are not all numbers.
    times = best(rounds, {"ours": (ours, []), "theirs": (theirs, [])})
    yield (
        f"{'read a column slice':22} {times['theirs'] / times['ours']:5.2f} times as fast as get_slice (goal 2); "
        f"{times['ours'] * 1e3:.0f} ms"
    )
    path.unlink()


def peak(folder: Path, tensors: int, budget: int) -> int:
    """The peak memory of a process that merges column shards within a budget, or does nothing with a budget of 0."""
    # Not `ru_maxrss`, in which Linux counts what the parent of the process had when it started it.
    code = (
        "import re, sys; sys.path.insert(0, sys.argv[1]); import engine; from pathlib import Path\n"
        "folder, tensors, budget = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])\n"
        "paths = [folder / f'shard{i}' for i in range(engine.WAYS)]\n"
        "made = [folder / 'made']\n"
        "job = engine.job_for(paths, engine.columns_of(8), made, engine.rows_of(1), tensors, digest=True)\n"
        "job.run(budget=budget) if budget else None\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder), str(tensors), str(budget)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    (folder / "made").unlink(missing_ok=True)
    return int(done.stdout) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    tensors = max(1, arguments.mib * 2**20 // TENSOR)
    free = os.statvfs(arguments.folder)
    if free.f_bavail * free.f_frsize < 4 * arguments.mib * 2**20:
        sys.exit(f"{arguments.folder} has not the {4 * arguments.mib} MiB free that this needs")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for line in copies(Path(folder), tensors, arguments.rounds, arguments.threads):
            print(line, flush=True)
        idle = peak(Path(folder), tensors, 0)
        print(f"peak memory of a process that makes the job and does not run it: {idle / 2**20:.0f} MiB", flush=True)
        for budget in (64, 256, 1024):
            used = peak(Path(folder), tensors, budget * 2**20) - idle
            print(f"peak memory, budget {budget} MiB: {used / 2**20:.0f} MiB above the idle process", flush=True)
        for line in column_slices(Path(folder), arguments.mib, arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
