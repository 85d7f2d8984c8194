"""What tasks cost: each beyond its bytes, a million of them planned, and two processes beside one.

The overhead of a task is what as many bytes take longer in twice as many tasks, a task. Files lie in the folder for
temporary ones, on a warm page cache, without syncs; a pool has started its workers before it is timed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster
from figures import Row, at_most, at_most_bytes, faster
from part import QUICK, main

import shardwise as sw

TASK = 1 << 16
COUNT = 256 if QUICK else 2048
LARGE = 1 << (24 if QUICK else 30)
TURNS = 3 if QUICK else 7
#: Of the simulated checkpoint: layers of 58 tensors, files, rows and columns of each tensor of two bytes an element.
LAYERS, FILES, SIDE = (10, 20, 28672) if QUICK else (100, 200, 28672)


def resharded(
    source: Path, target: Path, executor: Executor | None, task_bytes: int, threads: int | None, file_bytes: int = 2**40
) -> None:
    sw.reshard_checkpoint(
        source, target, to="hf", sync=False, executor=executor, threads=threads, task_bytes=task_bytes,
        max_file_bytes=file_bytes,
    )  # fmt: skip


def timed(work: Callable[[], object], target: Path, clock: Callable[[], float]) -> float:
    start = clock()
    work()
    seconds = clock() - start
    shutil.rmtree(target)
    return seconds


def overhead(
    source: Path, executor: Executor | None, threads: int | None, clock: Callable[[], float]
) -> tuple[float, int]:
    """Seconds a task, of the least that each took in all turns, and how many tasks the one has more."""
    target = source.parent / "out"
    few, many = (len(sw.plan_checkpoint(source, target, to="hf", task_bytes=size).tasks) for size in (2 * TASK, TASK))
    taken: dict[int, list[float]] = {2 * TASK: [], TASK: []}
    for _ in range(TURNS + 1):
        for size, seconds in taken.items():
            seconds.append(timed(partial(resharded, source, target, executor, size, threads), target, clock))
    least_few, least_many = (min(seconds) for seconds in taken.values())
    return (least_many - least_few) / (many - few), many - few


def overheads(folder: Path) -> Iterator[Row]:
    source = folder / "source.safetensors"
    sw.save_checkpoint(source, {"w": np.random.default_rng(0).integers(0, 255, (COUNT, TASK), "u1")}, sync=False)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        processes = stack.enter_context(ProcessPoolExecutor(2, get_context("spawn")))
        cluster = stack.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
        client = stack.enter_context(Client(cluster))
        engines: list[tuple[str, Executor | None, int | None, float]] = [
            ("one thread", None, 1, 1e-3),
            ("two threads", pool, None, 1e-3),
            ("two processes", processes, None, 10e-3),
            ("Dask, two workers", client.get_executor(), None, 10e-3),
        ]
        for name, executor, threads, limit in engines:
            seconds, tasks = overhead(source, executor, threads, time.perf_counter)
            yield Row(f"overhead of a task by {name}, of {tasks:,} tasks more", "", seconds, goal=at_most(limit))
            seconds, _ = overhead(source, executor, threads, time.process_time)
            yield Row(f"the same, the processor's time of the driver, {name}", "", seconds)


def scaling(folder: Path) -> Iterator[Row]:
    """Two processes beside one; and as a measure of the machine, two `cp` at once beside one after the other.

    Both write two files. A file system lets one process at a time write to a file, so that two make one file less fast:
    what the machine gives there is measured by processes that only read and write.
    """
    source, target = folder / "large", folder / "out"
    block = np.random.default_rng(1).integers(0, 255, (256, LARGE // 512), "u1")
    sw.save_checkpoint(source, {"a": block, "b": block + 1}, to="hf", max_file_bytes=LARGE // 2, sync=False)
    files = sorted(source.glob("*.safetensors"))

    def copied(at_once: bool) -> None:
        target.mkdir()
        running = []
        for file in files:
            running.append(subprocess.Popen(["cp", str(file), str(target / file.name)]))
            if not at_once:
                running[-1].wait()
        for process in running:
            process.wait()

    def halves(executor: Executor) -> None:
        target.mkdir()
        with (target / "file").open("wb") as stream:
            stream.truncate(LARGE)
        list(executor.map(written, files, [target / "file"] * 2, [0, LARGE // 2]))

    with ProcessPoolExecutor(1, get_context("spawn")) as one, ProcessPoolExecutor(2, get_context("spawn")) as two:
        works: dict[str, Callable[[], object]] = {
            "one": lambda: resharded(source, target, one, LARGE // 64, None, LARGE // 2),
            "two": lambda: resharded(source, target, two, LARGE // 64, None, LARGE // 2),
            "cp, cp": lambda: copied(False),
            "cp & cp": lambda: copied(True),
            "one, a file": lambda: resharded(source, target, one, LARGE // 64, None),
            "two, a file": lambda: resharded(source, target, two, LARGE // 64, None),
            "one writes": lambda: halves(one),
            "two write": lambda: halves(two),
        }
        taken: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(TURNS + 1):
            for name, work in works.items():
                seconds = timed(work, target, time.perf_counter)
                if turn:
                    taken[name].append(seconds)

    def row(work: str, peer: str, ours: str, theirs: str) -> Row:
        ratios = [b / a for a, b in zip(taken[ours], taken[theirs], strict=True)]
        medians = statistics.median(taken[ours]), statistics.median(taken[theirs])
        return Row(work, peer, *medians, least=min(ratios), greatest=max(ratios))

    size = f"{LARGE / 2**30:g} GiB"
    of_cp = row(f"`cp` of {size} in two files, at once", "one after the other", "cp & cp", "cp, cp")
    yield of_cp
    found = row(f"tasks of {size} by two processes, into two files", "by one process", "two", "one")
    # What the machine does not give to `cp` is not asked of us.
    is_fair = of_cp.ratio is not None and of_cp.ratio >= 1.6
    yield Row(**{**vars(found), "goal": faster(1.6)}) if is_fair else found
    yield row(f"reading and writing {size} by two processes, into one file", "by one", "two write", "one writes")
    yield row(f"tasks of {size} by two processes, into one file", "by one process", "two, a file", "one, a file")


def written(source: Path, target: Path, at: int) -> None:
    """Copy a file into a part of another, by reads and writes."""
    with source.open("rb", buffering=0) as reader, target.open("r+b", buffering=0) as writer:
        writer.seek(at)
        while block := reader.read(2**18):
            writer.write(block[: LARGE // 2 + at - writer.tell()])


def simulated(folder: Path) -> Path:
    """Headers of a checkpoint of terabytes; its files are holes."""
    source, layers = folder / "simulated", [f"layers.{i}.{k}.weight" for i in range(LAYERS) for k in range(58)]
    source.mkdir()
    places = {}
    for number in range(FILES):
        header, at = {}, 0
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        for name in layers[number::FILES]:
            header[name] = {"dtype": "BF16", "shape": [SIDE, SIDE], "data_offsets": [at, at + 2 * SIDE * SIDE]}
            at += 2 * SIDE * SIDE
            places[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (source / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return source


def planning(source: str, ways: str) -> None:
    """In a process of its own: plan, save, and say how many tasks, seconds and bytes of memory it took."""
    rules = sw.LayoutMap(sw.DeviceMesh((int(ways),), ("x",)))
    rules["weight$"] = (None, "x")
    start = time.perf_counter()
    plan = sw.plan_checkpoint(source, f"{source}-new", rules, task_bytes=9 * 2**20)
    plan.save(f"{source}.swplan")
    seconds = time.perf_counter() - start
    # Not `ru_maxrss`, in which Linux counts what the parent of the process had when it started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(json.dumps([len(plan.tasks), plan.nbytes, seconds, peak]))


def plans(folder: Path) -> Iterator[Row]:
    source = simulated(folder)
    for ways in (8, 64):
        found = []
        for _ in range(1 if QUICK else 3):
            command = [sys.executable, __file__, "--planning", str(source), str(ways)]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        tasks, nbytes, _, peak = found[0]
        seconds = statistics.median(each[2] for each in found)
        what = f"{tasks:,} tasks of a checkpoint of {nbytes / 2**40:.1f} TiB to {ways} shards"
        yield Row(f"planning {what}", "", seconds, goal=at_most(10))
        yield Row(
            f"memory of the process that plans them, {ways} shards", "", peak, unit="B", goal=at_most_bytes(2**30)
        )


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        for part in (overheads, scaling, plans):
            folder = Path(name, part.__name__)
            folder.mkdir()
            yield from part(folder)
            shutil.rmtree(folder)


if __name__ == "__main__":
    if "--planning" in sys.argv:
        planning(*sys.argv[sys.argv.index("--planning") + 1 :])
    else:
        main(rows)
