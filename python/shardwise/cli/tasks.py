"""`shardwise run` and `commit`: the parts of a saved plan, on any machines."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from .._text import bytes_text, counted, shown
from ..show.table import table_lines
from ..store import CheckpointPlan, WriteReport
from .notation import parse_memory
from .progress import ShownProgress
from .terminal import Screen

__all__ = ["part_totals", "report_fields", "run_commit", "run_run", "write_parts", "write_report"]

_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_MOST_NAMED = 8
_MOST_SHOWN = 20


def run_run(screen: Screen, options: argparse.Namespace) -> int:
    """Run a part of a plan, and give the exit status."""
    part = None
    if options.part is not None:
        found = _PART.fullmatch(options.part)
        if found is None:
            raise ValueError(f"--part {shown(options.part)}: write PART/PARTS, as in 3/16")
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
    if not count and plan.is_finished():
        earlier = "; the checkpoint is finished, and has what these tasks would write"
    screen.write((str(options.plan), "bold"), f": {count} task{'s' * (count != 1)} done{earlier}")
    return 0


def run_commit(screen: Screen, options: argparse.Namespace) -> int:
    """Finish the checkpoint of a plan, and give the exit status."""
    plan = CheckpointPlan.load(options.plan)
    done = plan.commit(check=options.check, memory=parse_memory(options.memory), sync=not options.no_sync)
    write_report(screen, done, options.json)
    return 0


def write_report(screen: Screen, done: WriteReport, as_json: bool) -> None:
    """Print the report on a written checkpoint."""
    if as_json:
        print(json.dumps(report_fields(done)))
        return
    if done.bytes_resumed == done.bytes and not done.bytes_written:
        screen.write((str(done.path), "bold"), " was finished before; its contents are right")
        return
    resumed = f", {bytes_text(done.bytes_resumed)} were there from an earlier run" if done.bytes_resumed else ""
    screen.write(
        (str(done.path), "bold"),
        f": {counted(done.tensors, 'tensor')}, {bytes_text(done.bytes)}; {bytes_text(done.bytes_read)} read, "
        f"{bytes_text(done.bytes_written)} written{resumed}",
    )
    if done.companions:
        names = ", ".join(done.companions[:_MOST_NAMED])
        more = len(done.companions) - _MOST_NAMED
        screen.write(f"copied along: {names}{f' and {more} more' if more > 0 else ''}")


def report_fields(done: Any) -> dict[str, Any]:
    """Return the fields of a report, ready for JSON."""
    found = dict(vars(done))
    if "path" in found:
        found["path"] = str(found["path"])
    return found | {"left_out": [each.to_dict() for each in done.left_out]}


def part_totals(plan: CheckpointPlan, parts: int) -> list[dict[str, int]]:
    """Return the bytes that each part of a plan reads and writes."""
    found = plan.part_bytes(parts).tolist()
    return [
        {"part": number, "tasks": len(plan.part(number, parts)), "reads": reads, "writes": writes}
        for number, (reads, writes) in enumerate(found, start=1)
    ]


def write_parts(screen: Screen, parts: list[dict[str, int]]) -> None:
    """Print the bytes that each part of a plan reads and writes."""
    cells = [
        [(f"{row['part']}/{len(parts)}", ""), (str(row["tasks"]), "")]
        + [(bytes_text(row[what]), "") for what in ("reads", "writes")]
        for row in parts[:_MOST_SHOWN]
    ]
    for line in table_lines(("part", ">tasks", ">reads", ">writes"), cells, screen.size and screen.size.columns):
        screen.write(*line)
    reads, writes = ([row[what] for row in parts] for what in ("reads", "writes"))
    screen.write(
        f"{counted(len(parts), 'part')}: each reads {bytes_text(min(reads))} to {bytes_text(max(reads))} and writes "
        f"{bytes_text(min(writes))} to {bytes_text(max(writes))}"
    )
