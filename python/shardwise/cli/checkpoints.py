"""`shardwise reshard`, `extract`, `verify`, `diff` and `inspect`: checkpoints on disk."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._text import bytes_text, counted, shown
from ..deploy.deployment import Deployment
from ..deploy.presets import preset
from ..rules.layout_map import LayoutMap
from ..rules.left_out import LeftOut
from ..rules.numbers import reading_for
from ..rules.rewrites import Rewrites
from ..rules.shipped import example_rules
from ..show.lines import printable
from ..show.names import lines_alike
from ..show.table import table_lines
from ..store import (
    DamageError,
    StoredCheckpoint,
    WriteReport,
    diff_checkpoints,
    open_checkpoint,
    reshard_checkpoint,
    verify_checkpoint,
)
from ..store.compare.damage import damage_lines
from ..store.compare.diff import Differences
from ..store.tensors.companion_files import beside
from ..store.tensors.training import Total, totals_dict, totals_text
from ..store.write.forms.doubts import DoubtsError
from .layouts import check_for, config_for, layouts_alone, source_layouts
from .notation import parse_memory, parse_mesh
from .options import read_names
from .progress import ShownProgress
from .tasks import report_fields, write_report
from .terminal import Screen, as_options, say

__all__ = ["contents_of", "refused", "run_diff", "run_inspect", "run_reshard", "run_verify"]

_MOST_SHOWN = 20
#: The exit status of `verify` for a checkpoint that is not what was written.
_DAMAGED = 3


def run_reshard(screen: Screen, options: argparse.Namespace) -> int:
    """Reshard a checkpoint, or write what one rank holds of it, and give the exit status."""
    layouts, settings = contents_of(options)
    settings |= {
        "memory": parse_memory(options.memory),
        "threads": options.jobs,
        "sync": not options.no_sync,
        "resume": options.resume,
    }
    try:
        with ShownProgress(options.quiet, options.progress) as progress, refused():
            done = reshard_checkpoint(options.source, options.target, layouts, **settings, progress=progress)
    except DoubtsError as error:
        say("error", error.warnings)
        return 1
    assert isinstance(done, WriteReport)
    say("warning", done.warnings)
    write_report(screen, done, options.json)
    return 0


def contents_of(options: argparse.Namespace) -> tuple[LayoutMap | Deployment | None, dict[str, Any]]:
    """Return the layouts of a new checkpoint, and its other options as arguments."""
    _check_names(options.rules, options.to)
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    check_for(mesh, options.preset)
    layouts, form = None, options.to
    contents: dict[str, Any] = {"rules": options.rules, "source_rules": options.source_rules, "rewrites": None}
    if options.preset is not None:
        with reading_for(options.source):
            made = preset(options.preset, config_for(options, options.source), rules=options.rules, form=form)
        _check_names(example_rules().get(made.source), form)
        rewrites = _rewrites(options, options.source) + made.rewrites
        layouts, form = made.layouts, form or made.form
        contents = {"rules": None, "source_rules": None, "rewrites": rewrites or None}
    return layouts, {
        "mesh": mesh,
        **contents,
        "to": form,
        "uneven": options.uneven,
        "dtype": options.dtype,
        "overflow": options.overflow,
        "rename": [_pair(text) for text in options.rename or ()],
        "only": options.only,
        "drop": options.drop,
        "which": options.which,
        "replicas": options.replicas,
        "strict": options.strict,
        "rank": options.rank,
        "padded": options.padded,
        "parameter_names": read_names(options.parameter_names),
        "source_layouts": source_layouts(options, options.source),
        "config": options.config,
        "task_bytes": None if options.task_bytes is None else parse_memory(options.task_bytes),
    }


def _check_names(rules: Path | None, to: str | None) -> None:
    """Refuse rules of the package whose names are not an engine's, where an engine's loader is to read them."""
    if to != "vllm":
        return
    known = example_rules()
    name = next((name for name, path in known.items() if path == rules), None)
    if name is None or name.startswith(("vllm/", "sglang/")):
        return
    family = name.rpartition("/")[2]
    others = [each for each in known if each.endswith(f"/{family}") and each.startswith(("vllm/", "sglang/"))]
    instead = f"--rules {' or '.join(others)}" if others else "rules of these engines, which `shardwise rules` lists"
    raise ValueError(
        f"--to vllm writes files for the loaders of vLLM and SGLang, but --rules {name} has other names for the "
        f"tensors: give {instead}, or use --to ranks, which takes any names"
    )


@contextmanager
def refused() -> Iterator[None]:
    """Report a wrong type in the library, of elements or of a place, as bad input."""
    try:
        yield
    except TypeError as error:
        raise ValueError(str(error)) from error


def _rewrites(options: argparse.Namespace, source: str) -> Rewrites:
    config, rewrites = config_for(options, source), Rewrites()
    with reading_for(source):
        if options.source_rules is not None:
            rewrites += Rewrites.from_toml(options.source_rules, config=config).inverse()
        if options.rules is None or getattr(options, "preset", None) is not None:  # A preset has those of its rules.
            return rewrites
        return rewrites + Rewrites.from_toml(options.rules, config=config)


def _pair(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator:
        raise ValueError(f"--rename {shown(text)}: write PATTERN=REPLACEMENT")
    return pattern, replacement


def run_verify(screen: Screen, options: argparse.Namespace) -> int:
    """Verify a checkpoint, and give the exit status: 3 if it is damaged."""
    damaged = False
    with ShownProgress(options.quiet, options.progress) as progress, refused():
        try:
            done = verify_checkpoint(
                options.source,
                layouts=layouts_alone(options),
                which=options.which,
                memory=parse_memory(options.memory),
                threads=options.jobs,
                progress=progress,
            )
        except DamageError as error:
            done, damaged = error.report, True
    unasked = [each for each in done.left_out if each.kind != "asked"]
    status = 1 if options.strict and unasked else 0
    if options.json:
        training = {"training": totals_dict(done.totals)} if done.totals else {}
        rows = {key: value for key, value in report_fields(done).items() if key != "totals"}
        print(json.dumps({**rows, **training, "damaged": [vars(one) for one in done.damaged]}))
        say("error" if status else "warning", map(str, unasked))
        return _DAMAGED if damaged else status
    if damaged:
        lines = damage_lines(done.damaged)
        for line in lines[:_MOST_SHOWN]:
            screen.write(printable(line))
        if len(lines) > _MOST_SHOWN:
            screen.write(f"and {len(lines) - _MOST_SHOWN:,} more (--json lists all)")
        count = len({one.tensor for one in done.damaged if one.tensor is not None})
        screen.write(
            (str(done.path), "bold"),
            f": damaged: {count:,} of {counted(done.tensors, 'tensor')}"
            if done.tensors
            else ": damaged, and cannot be opened",
        )
        return _DAMAGED
    right = ((done.digests, "digests"), (done.crcs, "CRC-32"))
    what = " and ".join(f"{count} {what}" for count, what in right if count)
    what = f"all {what} are right" if what else "it has no digests; all of it can be read"
    screen.write(
        (str(done.path), "bold"),
        f": {done.format}, {counted(done.tensors, 'tensor')}, {bytes_text(done.bytes)}: {what}",
    )
    if text := totals_text(done.totals or [Total("weights", 0, 0)]):
        screen.write(text)
    if done.unreadable:
        names = ", ".join(map(shown, done.unreadable[:4]))
        more = len(done.unreadable) - 4
        screen.write(f"not verified, because they cannot be read: {names}{f' and {more} more' if more > 0 else ''}")
    _write_left_out(screen, done.left_out, options.strict)
    return status


def _write_left_out(screen: Screen, left_out: Sequence[LeftOut], strict: bool) -> None:
    """Write a line for each thing that is left out; what was asked for is no reason to warn."""
    for each in left_out:
        if each.kind == "asked" or (each.kind == "untrained" and not strict):
            screen.write(as_options(str(each)))
        else:
            screen.write(("error: ", "bold red") if strict else ("warning: ", "bold yellow"), as_options(str(each)))


def run_diff(screen: Screen, options: argparse.Namespace) -> int:
    """Compare two checkpoints, and give the exit status: 1 if they differ."""
    with ShownProgress(options.quiet, options.progress) as progress, refused():
        found = diff_checkpoints(
            options.first,
            options.second,
            layouts=source_layouts(options, options.first),
            rewrites=_rewrites(options, options.first) or None,
            drop=options.drop,
            which=options.which,
            memory=parse_memory(options.memory),
            threads=options.jobs,
            progress=progress,
        )
    unasked = [each for each in found.left_out if each.kind != "asked"]
    if options.json:
        rows: list[dict[str, Any]] = [{key: _plain(value) for key, value in vars(one).items()} for one in found]
        rows += [{"name": None, "what": "not compared", **each.to_dict()} for each in found.left_out]
        if any(len(totals) > 1 for totals in found.totals):
            first, second = map(totals_dict, found.totals)
            rows.append({"name": None, "what": "training", "first": first, "second": second, "text": found.one_sided})
        print(json.dumps(rows))
        say("error" if options.strict else "warning", map(str, unasked))
    elif not found:
        screen.write(_same(found, options.which) + (", as far as they were compared" if unasked else ""))
    else:
        for line in lines_alike(((one.name, str(one).removeprefix(repr(one.name))) for one in found), _MOST_SHOWN):
            screen.write(line)
        if found.one_sided:
            screen.write(found.one_sided)
        if options.rules is None and _is_renamed(found):
            screen.write("if rules made the second checkpoint, give them with --rules: then its tensors are compared")
    if not options.json:
        _write_left_out(screen, found.left_out, options.strict)
    return 1 if found or (options.strict and unasked) else 0


def _is_renamed(found: Differences) -> bool:
    """Return whether each of two checkpoints has names that the other lacks, as after a rewrite."""
    return {each.what for each in found} >= {"missing", "added"}


def _same(found: Differences, which: str) -> str:
    """Return a sentence for equal checkpoints: all tensors, or the weights or states that were compared."""
    if which != "all":
        return f"the same {'weights' if which == 'weights' else 'training state'}"
    weights, *kinds = found.totals[0]
    states = sum(each.tensors for each in kinds)
    count = f": {counted(weights.tensors, 'weight')} and {states} of the training state" if states else ""
    return f"the same tensors{count}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def run_inspect(screen: Screen, options: argparse.Namespace) -> int:
    """Describe a checkpoint, and give the exit status."""
    names = read_names(options.parameter_names)
    layouts = layouts_alone(options)
    with open_checkpoint(
        options.source, part=True, padded=options.padded, parameter_names=names, layouts=layouts
    ) as checkpoint:
        training = checkpoint.training
        left_out = [*beside(checkpoint), *training.left_out()]
        status = 1 if options.strict and (left_out or checkpoint.doubts) else 0
        if options.json:
            said = {"left_out": [each.to_dict() for each in left_out], "doubts": list(checkpoint.doubts)}
            print(json.dumps(_described(checkpoint) | said, indent=2))
            losses = [str(each) for each in left_out if status or each.kind != "untrained"]
            say("error" if status else "warning", [*checkpoint.doubts, *losses])
            return status
        dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        screen.write(
            (str(checkpoint.path), "bold"),
            f": {checkpoint.format}, {counted(len(checkpoint), 'tensor')}{f' ({kinds})' if kinds else ''}, "
            f"{bytes_text(checkpoint.nbytes)}",
        )
        if str(training):
            screen.write(str(training))
        titles = ("tensor", "dtype", ">shape", ">bytes", ">pieces", "")
        rows = []
        for name, tensor in checkpoint.items():
            notes = [f"tied to {tensor.alias_of}"] if tensor.alias_of is not None else []
            if len(tensor.pieces) > 1:
                sizes = tensor.boxes[..., 1] - tensor.boxes[..., 0]
                largest = sizes.max(axis=0)
                notes.append(f"each {'' if (sizes == largest).all() else 'at most '}{' x '.join(map(str, largest))}")
            again = len(tensor.replicas)
            notes += [f"{counted(again, 'piece')} stored again"] if again else []
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            cells = (name, tensor.dtype, shape, bytes_text(tensor.nbytes), str(len(tensor.pieces)), ", ".join(notes))
            rows.append([(cell, "") for cell in cells])
        for line in table_lines(titles, rows, screen.size and screen.size.columns):
            screen.write(*line)
        for name in checkpoint.objects:
            screen.write(f"{name}: not a tensor")
        for name, reason in checkpoint.unreadable.items():
            screen.write(f"{name}: cannot be read: {reason}")
        for text in checkpoint.doubts:
            screen.write(("error: ", "bold red") if options.strict else ("warning: ", "bold yellow"), as_options(text))
        _write_left_out(screen, left_out, options.strict)
    return status


def _described(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    states = checkpoint.training.names.states
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
                **({"state": states[name].kind, "weight": states[name].weight} if name in states else {}),
                "pieces": [{"file": str(piece.path), "box": piece.bounds} for piece in tensor.pieces],
                "replicas": len(tensor.replicas),
            }
            for name, tensor in checkpoint.items()
        },
        "training": totals_dict(checkpoint.training.totals),
        "objects": list(checkpoint.objects),
        "unreadable": dict(checkpoint.unreadable),
    }
