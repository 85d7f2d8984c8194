"""`shardwise plan`: what a reshard would take, or its plan in a file, whose parts run anywhere."""

from __future__ import annotations

import argparse
import json

from .._text import bytes_text, counted
from ..show.table import table_lines
from ..store import WriteOutline, plan_checkpoint
from ..store.write.forms.doubts import DoubtsError
from .checkpoints import contents_of, refused
from .notation import parse_memory
from .tasks import part_totals, report_fields, write_parts
from .terminal import Screen, say

__all__ = ["run_plan"]

_MOST_SHOWN = 20


def run_plan(screen: Screen, options: argparse.Namespace) -> int:
    """Say what a reshard would take, or save its plan, and give the exit status."""
    try:
        return _run(screen, options)
    except DoubtsError as error:
        say("error", error.warnings)
        return 1


def _run(screen: Screen, options: argparse.Namespace) -> int:
    layouts, settings = contents_of(options)
    memory, sync = parse_memory(options.memory), not options.no_sync
    with refused():
        plan = plan_checkpoint(options.source, options.target, layouts, **settings, memory=memory)
        say("warning", plan.warnings)
        if options.save is not None:
            plan.save(options.save)
        if options.workers is not None:
            plan.check_tasks()
    more: dict[str, object] = {}
    status = 0
    if options.workers is not None:
        more["parts"] = parts = part_totals(plan, options.workers)
    if options.save is not None:
        more["plan"] = str(options.save)
    if options.save is None or options.workers is not None:
        outline = plan.outline(memory, options.jobs, sync=sync)
        _write_outline(screen, options, outline, **more)
        if outline.bytes > outline.free:
            sizes = f"{bytes_text(outline.bytes)}, but {bytes_text(outline.free)} are free"
            say("error", [f"{options.target}: there is no room for it: it takes {sizes}"])
            status = 1
        if options.workers is not None and not options.json:
            write_parts(screen, parts)
    elif options.json:
        print(
            json.dumps(
                {
                    "plan": str(options.save),
                    "tasks": len(plan.tasks),
                    "bytes": plan.nbytes,
                    "warnings": list(plan.warnings),
                    "left_out": [each.to_dict() for each in plan.left_out],
                }
            )
        )
    if options.save is not None and not options.json:
        screen.write(
            (str(options.save), "bold"),
            f": {counted(len(plan.tasks), 'task')} of up to {bytes_text(plan.task_bytes)}, {bytes_text(plan.nbytes)} "
            "in all; shardwise run does a part of them, shardwise commit finishes the checkpoint",
        )
    return status


def _write_outline(screen: Screen, options: argparse.Namespace, outline: WriteOutline, **more: object) -> None:
    if options.json:
        print(json.dumps({**report_fields(outline), **more}))
        return
    # A store does not say how much room it has.
    room = "" if outline.bytes_read is None else f"; {bytes_text(outline.free)} are free"
    screen.write(
        (str(options.target), "bold"),
        f" would be {len(outline.files)} file{'s' * (len(outline.files) != 1)}, {bytes_text(outline.bytes)}, in "
        f"{outline.tasks} task{'s' * (outline.tasks != 1)}; up to {bytes_text(outline.memory)} of memory in "
        f"{outline.threads} thread{'s' * (outline.threads != 1)}{room}",
    )
    if outline.bytes_read is not None and outline.operations is not None:
        seconds = outline.seconds
        screen.write(
            f"{bytes_text(outline.bytes_read)} are read, in {outline.operations:,} contiguous "
            f"part{'s' * (outline.operations != 1)}; "
            + ("no estimate of the time" if seconds is None else time_text(seconds)),
        )
    rows = [[(name, ""), (bytes_text(size), "")] for name, size in outline.files[:_MOST_SHOWN]]
    for line in table_lines(("file", ">bytes"), rows, screen.size and screen.size.columns):
        screen.write(*line)
    if len(outline.files) > _MOST_SHOWN:
        screen.write(f"and {len(outline.files) - _MOST_SHOWN} more")


def time_text(seconds: float) -> str:
    """Return an estimated time as text, rounded as a sample allows."""
    size, unit = next(
        ((size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= 2 * size), (1, "seconds")
    )
    said = f"about {seconds / size:.0f} {unit}" if seconds >= 2 else "a few seconds at most"
    return f"{said}, estimated from a sample"
