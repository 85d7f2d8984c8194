"""`shardwise reshard`, `verify`, `diff` and `inspect`: checkpoints on disk."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._text import bytes_text
from ..rules.layout_map import LayoutMap
from ..rules.numbers import config_beside
from ..rules.rewrites import Rewrites
from ..show.table import table_lines
from ..store import (
    StoredCheckpoint,
    WriteOutline,
    diff_checkpoints,
    open_checkpoint,
    plan_checkpoint,
    reshard_checkpoint,
    verify_checkpoint,
)
from ..store.write.doubts import DoubtsError
from .notation import parse_memory, parse_mesh
from .progress import ShownProgress
from .tasks import parts_of, write_parts, write_report
from .terminal import Screen, say

__all__ = ["run_diff", "run_inspect", "run_reshard", "run_verify"]

_MOST_SHOWN = 20


def run_reshard(screen: Screen, options: argparse.Namespace) -> int:
    """Reshard a checkpoint, and give the exit status."""
    layouts, rewrites = _rules(options)
    pairs = [_pair(text) for text in options.rename or ()]
    settings: dict[str, Any] = {
        "to": options.to,
        "uneven": options.uneven,
        "dtype": options.dtype,
        "overflow": options.overflow,
        "rename": pairs,
        "rewrites": rewrites or None,
        "only": options.only,
        "memory": parse_memory(options.memory),
        "threads": options.jobs,
        "sync": not options.no_sync,
        "replicas": options.replicas,
        "resume": options.resume,
        "plan": options.plan,
        "strict": options.strict,
        "task_bytes": None if options.task_bytes is None else parse_memory(options.task_bytes),
    }
    if options.workers is not None and not options.plan:
        raise ValueError("--workers says how many workers to plan for; it needs --plan")
    try:
        if options.plan_to is not None or options.workers is not None:
            return _run_planned(screen, options, layouts, settings)
        with ShownProgress(options.quiet or options.plan, options.progress) as progress, _refused():
            done = reshard_checkpoint(options.source, options.target, layouts, **settings, progress=progress)
    except DoubtsError as error:
        say("error", error.warnings)
        return 1
    say("warning", done.warnings)
    if isinstance(done, WriteOutline):
        _write_outline(screen, options, done)
        return 0
    write_report(screen, done, options.json)
    return 0


@contextmanager
def _refused() -> Iterator[None]:
    """Report a wrong type in the library, of elements or of a place, as bad input."""
    try:
        yield
    except TypeError as error:
        raise ValueError(str(error)) from error


def _run_planned(
    screen: Screen, options: argparse.Namespace, layouts: LayoutMap | None, settings: dict[str, Any]
) -> int:
    """Save a plan, or say what each worker would do."""
    if options.dtype is not None:
        raise ValueError("--dtype: tasks copy bytes and cannot convert them; convert without --plan-to and --workers")
    own = ("memory", "threads", "sync", "dtype", "overflow", "resume", "plan")
    settings = {name: value for name, value in settings.items() if name not in own}
    with _refused():
        plan = plan_checkpoint(options.source, options.target, layouts, **settings)
    say("warning", plan.warnings)
    if options.workers is not None:
        parts = parts_of(plan, options.workers)
        outline = plan.outline(parse_memory(options.memory), options.jobs, sync=not options.no_sync)
        _write_outline(screen, options, outline, parts=parts)
        if not options.json:
            write_parts(screen, parts)
        return 0
    with _refused():
        plan.save(options.plan_to)
    if options.json:
        print(json.dumps({"plan": str(options.plan_to), "tasks": len(plan.tasks), "bytes": plan.nbytes}))
        return 0
    screen.write(
        (str(options.plan_to), "bold"),
        f": {len(plan.tasks)} tasks of up to {bytes_text(plan.task_bytes)}, {bytes_text(plan.nbytes)} in all; "
        "shardwise run does a part of them, shardwise commit finishes",
    )
    return 0


def _rules(options: argparse.Namespace) -> tuple[LayoutMap | None, Rewrites]:
    """How the tensors are cut, and what is rewritten: the source's rules undone, then the destination's."""
    rewrites = Rewrites()
    config = options.config or config_beside(options.source)
    if options.source_rules is not None:
        rewrites += Rewrites.from_toml(options.source_rules, config=config).inverse()
    layouts = None
    if options.rules is not None:
        rewrites += Rewrites.from_toml(options.rules, config=config)
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        layouts = LayoutMap.from_toml(options.rules, mesh, config=config)
        if not layouts and layouts.default is None:
            layouts = None  # A file with rewrites only.
        elif layouts.device_mesh is None:
            raise ValueError(f"--mesh is missing, and {options.rules} has no mesh of its own")
    if options.mesh is not None and layouts is None:
        raise ValueError("--mesh says how many devices there are; --rules must say how the tensors are cut")
    return layouts, rewrites


def _pair(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator:
        raise ValueError(f"--rename {text[:80]!r}: write PATTERN=REPLACEMENT")
    return pattern, replacement


def _write_outline(screen: Screen, options: argparse.Namespace, outline: WriteOutline, **more: object) -> None:
    if options.json:
        print(json.dumps({**vars(outline), **more}))
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
            + ("no estimate of the time" if seconds is None else _about(seconds)),
        )
    rows = [[(name, ""), (bytes_text(size), "")] for name, size in outline.files[:_MOST_SHOWN]]
    for line in table_lines(("file", ">bytes"), rows, screen.size and screen.size.columns):
        screen.write(*line)
    if len(outline.files) > _MOST_SHOWN:
        screen.write(f"and {len(outline.files) - _MOST_SHOWN} more")


def _about(seconds: float) -> str:
    """Write an estimate of a time, which is known by a sample only."""
    size, unit = next(
        ((size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= 2 * size), (1, "seconds")
    )
    said = f"about {seconds / size:.0f} {unit}" if seconds >= 2 else "a few seconds at most"
    return f"{said}, estimated from a sample"


def run_verify(screen: Screen, options: argparse.Namespace) -> int:
    """Verify a checkpoint, and give the exit status."""
    with ShownProgress(options.quiet, options.progress) as progress, _refused():
        done = verify_checkpoint(
            options.source, memory=parse_memory(options.memory), threads=options.jobs, progress=progress
        )
    if options.json:
        print(json.dumps({**vars(done), "path": str(done.path)}))
        return 0
    right = ((done.digests, "digests"), (done.crcs, "CRC-32"))
    what = " and ".join(f"{count} {what}" for count, what in right if count)
    what = f"all {what} are right" if what else "it has no digests; all of it can be read"
    screen.write((str(done.path), "bold"), f": {done.format}, {done.tensors} tensors, {bytes_text(done.bytes)}: {what}")
    return 0


def run_diff(screen: Screen, options: argparse.Namespace) -> int:
    """Compare two checkpoints, and give the exit status: 1 if they differ."""
    with ShownProgress(options.quiet, options.progress) as progress, _refused():
        found = diff_checkpoints(
            options.first,
            options.second,
            memory=parse_memory(options.memory),
            threads=options.jobs,
            progress=progress,
        )
    if options.json:
        print(json.dumps([{key: _plain(value) for key, value in vars(one).items()} for one in found]))
    elif not found:
        screen.write("the same tensors")
    else:
        for one in found[:_MOST_SHOWN]:
            screen.write(str(one))
        if len(found) > _MOST_SHOWN:
            screen.write(f"and {len(found) - _MOST_SHOWN} more")
    return 1 if found else 0


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def run_inspect(screen: Screen, options: argparse.Namespace) -> int:
    """Describe a checkpoint, and give the exit status."""
    with open_checkpoint(options.source) as checkpoint:
        if options.json:
            print(json.dumps(_described(checkpoint), indent=2))
            return 0
        dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        screen.write(
            (str(checkpoint.path), "bold"),
            f": {checkpoint.format}, {len(checkpoint)} tensors ({kinds}), {bytes_text(checkpoint.nbytes)}",
        )
        titles = ("tensor", "dtype", ">shape", ">bytes", ">pieces", "")
        rows = []
        for name, tensor in checkpoint.items():
            notes = [f"tied to {tensor.alias_of}"] if tensor.alias_of is not None else []
            notes += [f"{len(tensor.replicas)} replicas"] if len(tensor.replicas) else []
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            cells = (name, tensor.dtype, shape, bytes_text(tensor.nbytes), str(len(tensor.pieces)), ", ".join(notes))
            rows.append([(cell, "") for cell in cells])
        for line in table_lines(titles, rows, screen.size and screen.size.columns):
            screen.write(*line)
        for name in checkpoint.objects:
            screen.write(f"{name}: not a tensor")
    return 0


def _described(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "bytes": checkpoint.nbytes,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "alias_of": tensor.alias_of,
                "pieces": [{"file": str(piece.path), "box": piece.box} for piece in tensor.pieces],
                "replicas": len(tensor.replicas),
            }
            for name, tensor in checkpoint.items()
        },
        "objects": list(checkpoint.objects),
    }
