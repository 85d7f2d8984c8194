"""`shardwise run` and `commit`: the parts of a saved plan, on any machines."""

from __future__ import annotations

import argparse
import json
import re

from .._text import bytes_text
from ..show.table import table_lines
from ..store import CheckpointPlan, WriteReport
from .notation import parse_memory
from .progress import ShownProgress
from .terminal import Screen

__all__ = ["run_commit", "run_run", "write_parts", "write_report"]

_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_MOST_SHOWN = 20


def run_run(screen: Screen, options: argparse.Namespace) -> int:
    """Run a part of a plan, and give the exit status."""
    part = None
    if options.part is not None:
        found = _PART.fullmatch(options.part)
        if found is None:
            raise ValueError(f"--part {options.part[:80]!r}: write PART/PARTS, as in 3/16")
        part = int(found[1]), int(found[2])
    plan = CheckpointPlan.load(options.plan)
    with ShownProgress(options.quiet, options.progress) as progress:
        count = plan.run(
            part,
            memory=parse_memory(options.memory),
            threads=options.jobs,
            sync=not options.no_sync,
            progress=progress,
        )
    total = len(plan.tasks if part is None else plan.part(*part))
    if options.json:
        print(json.dumps({"plan": str(options.plan), "tasks": count, "of": total}))
        return 0
    earlier = f", {total - count} were done before" if count < total else ""
    screen.write((str(options.plan), "bold"), f": {count} task{'s' * (count != 1)} done{earlier}")
    return 0


def run_commit(screen: Screen, options: argparse.Namespace) -> int:
    """Finish the checkpoint of a plan, and give the exit status."""
    plan = CheckpointPlan.load(options.plan)
    done = plan.commit(check=options.check, memory=parse_memory(options.memory), sync=not options.no_sync)
    write_report(screen, done, options.json)
    return 0


def write_report(screen: Screen, done: WriteReport, as_json: bool) -> None:
    """Say what was written."""
    if as_json:
        print(json.dumps({**vars(done), "path": str(done.path)}))
        return
    resumed = f", {bytes_text(done.bytes_resumed)} were there from an earlier run" if done.bytes_resumed else ""
    screen.write(
        (str(done.path), "bold"),
        f": {done.tensors} tensors, {bytes_text(done.bytes)}; {bytes_text(done.bytes_read)} read, "
        f"{bytes_text(done.bytes_written)} written{resumed}",
    )


def write_parts(screen: Screen, plan: CheckpointPlan, parts: int, as_json: bool) -> None:
    """Say what each part of a plan reads and writes."""
    found = plan.part_bytes(parts)
    rows = [(number, len(plan.part(number, parts)), *found[number - 1].tolist()) for number in range(1, parts + 1)]
    if as_json:
        print(json.dumps([dict(zip(("part", "tasks", "reads", "writes"), row, strict=True)) for row in rows]))
        return
    cells = [
        [(f"{number}/{parts}", ""), (str(tasks), ""), (bytes_text(reads), ""), (bytes_text(writes), "")]
        for number, tasks, reads, writes in rows[:_MOST_SHOWN]
    ]
    for line in table_lines(("part", ">tasks", ">reads", ">writes"), cells, screen.size and screen.size.columns):
        screen.write(*line)
    least, most = found.min(axis=0).tolist(), found.max(axis=0).tolist()
    screen.write(
        f"{parts} parts: each reads {bytes_text(least[0])} to {bytes_text(most[0])} and writes "
        f"{bytes_text(least[1])} to {bytes_text(most[1])}"
    )
