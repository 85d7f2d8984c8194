"""`shardwise plan`: what each device would hold of a checkpoint, from its header alone."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._text import bytes_text
from ..layout import UnevenRule
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..show.lines import Part
from ..show.names import brief, group_names
from ..show.table import table_lines
from ..store import open_safetensors
from .notation import format_layout, format_mesh, format_shape, parse_mesh
from .planning import Plan, PlannedTensor
from .terminal import Screen

__all__ = ["make_plan", "run_plan"]

_TITLES = ("tensor", ">shape", "dtype", "layout", ">shard", ">per device")
_MAX_UNMATCHED = 6
_PROBLEMS = ("unmatched", "unused_rules", "clashes", "rank_mismatches", "indivisible")


def run_plan(screen: Screen, options: argparse.Namespace) -> int:
    """Print a plan and give the exit status: 1 if it is to be strict and there are warnings, else 0."""
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    path, plan = make_plan(options.file, options.rules, mesh, options.uneven)
    if options.json:
        print(json.dumps(_as_json(path, plan, options.devices), indent=2))
    else:
        _print(screen, path, plan, apart=options.all, devices=options.devices)
        for number, warning in enumerate(_warnings(plan)):
            if number == 0:
                screen.write("")
            screen.write(("warning: ", "bold yellow"), warning)
    return 1 if options.strict and plan.report.warnings else 0


def make_plan(file: Path, rules: Path, mesh: DeviceMesh | None, uneven: UnevenRule = "even") -> tuple[Path, Plan]:
    """Apply a file of rules to a checkpoint: the file or index that was read, and the plan.

    The mesh, if there is none, is that of the rules; a ValueError if they have none either.
    """
    layout_map = LayoutMap.from_toml(rules, mesh)
    mesh = layout_map.device_mesh
    if mesh is None:
        raise ValueError(f"--mesh is missing, and {rules} has no mesh of its own")
    with open_safetensors(file) as checkpoint:
        entries = checkpoint.entries
        report = layout_map.report({name: entry.shape for name, entry in entries.items()}, uneven=uneven)
        return checkpoint.path, Plan(entries, mesh, report)


def _print(screen: Screen, path: Path, plan: Plan, *, apart: bool, devices: bool) -> None:
    count = len(plan.tensors)
    screen.write(
        (str(path), "bold"),
        f": {count} tensor{'s' * (count != 1)}, {bytes_text(plan.nbytes)}, ",
        f"on the mesh {format_mesh(plan.mesh)} of {plan.mesh.size:,} device{'s' * (plan.mesh.size > 1)}",
    )
    screen.write("")
    for line in table_lines(_TITLES, _rows(plan, apart), screen.size and screen.size.columns):
        screen.write(*line)
    screen.write("")
    for text in _totals(plan):
        screen.write(text)
    if devices:
        screen.write("")
        for line in table_lines(("devices", ">bytes"), _device_rows(plan)):
            screen.write(*line)


def _rows(plan: Plan, apart: bool) -> list[list[Part]]:
    by_name = {tensor.entry.name: tensor for tensor in plan.tensors}
    if apart:
        return [_row(name, 1, tensor) for name, tensor in by_name.items()]
    groups = group_names((name, _look(tensor)) for name, tensor in by_name.items())
    return [_row(text, len(names), by_name[names[0]]) for text, names, _ in groups]


def _look(tensor: PlannedTensor) -> tuple[object, ...]:
    """Give what tensors in one row have in common."""
    return tensor.entry.shape, tensor.entry.dtype, tensor.report.layout, tensor.report.rule, tensor.bytes_per_device


def _row(name: str, count: int, tensor: PlannedTensor) -> list[Part]:
    entry, report, size = tensor
    shard = "no place" if report.shard_shape is None else format_shape(report.shard_shape)
    held = "" if size is None else bytes_text(size)
    return [
        (name, ""),
        (format_shape(entry.shape), ""),
        (entry.dtype, ""),
        _layout_part(tensor),
        (f"≤ {shard}" if tensor.is_uneven else shard, "red" if size is None else ""),
        (f"{count} x {held}" if held and count > 1 else held, ""),
    ]


def _layout_part(tensor: PlannedTensor) -> Part:
    report = tensor.report
    if report.layout is None:
        return "clash", "red"
    if report.rule is None:
        return "no rule", "yellow"
    style = "red" if report.shard_shape is None else "dim" if report.is_replicated else "cyan"
    return format_layout(report.layout) or "()", style


def _totals(plan: Plan) -> Iterator[str]:
    if plan.displaced:
        yield f"without the {plan.displaced} tensor{'s' * (plan.displaced > 1)} that have no place:"
    whole, each = plan.nbytes, plan.device_bytes
    if each is None:
        largest = sum(tensor.bytes_per_device or 0 for tensor in plan.tensors)
        yield f"a device holds at most {bytes_text(largest)} of {bytes_text(whole)}"
    else:
        least, most = bytes_text(int(each.min())), bytes_text(int(each.max()))
        share = f", {100 * int(each.max()) / whole:.3g}%" if whole else ""
        yield f"each device holds {least if least == most else f'{least} to {most}'} of {bytes_text(whole)}{share}"
        total = sum(each.tolist())
        times = f", {total / whole:.2f} times the checkpoint" if whole else ""
        yield f"all devices hold {bytes_text(total)}{times}"
    yield f"{100 * plan.replicated_share:.3g}% of the checkpoint is on every device"


def _device_rows(plan: Plan) -> list[list[Part]]:
    """Give a row for each number of bytes that devices hold: which devices, and the bytes."""
    if plan.device_bytes is None:
        raise ValueError(f"--devices: {plan.mesh.size} devices are too many to list")
    holders: dict[int, list[str]] = {}
    for device, size in enumerate(plan.device_bytes.tolist()):
        holders.setdefault(size, []).append(str(plan.mesh.device(device)))
    return [[(brief(devices), ""), (f"{size:,}", "")] for size, devices in holders.items()]


def _warnings(plan: Plan) -> Iterator[str]:
    """Give a line for each thing that looks wrong, where the report has one for each tensor."""
    report = plan.report
    problems: list[Any] = [*report.clashes, *report.rank_mismatches]
    if report.uneven == "even":
        problems += report.indivisible
    for name, _, problem in group_names((problem.name, replace(problem, name="")) for problem in problems):
        yield str(replace(problem, name=name))
    if report.unmatched:
        names = [name for name, _, _ in group_names((tensor.name, None) for tensor in report.unmatched)]
        more = f" and {len(names) - _MAX_UNMATCHED} more" if len(names) > _MAX_UNMATCHED else ""
        size = bytes_text(sum(plan.entries[tensor.name].nbytes for tensor in report.unmatched))
        count = len(report.unmatched)
        match = "1 tensor matches no rule and is" if count == 1 else f"{count} tensors match no rule and are"
        yield f"{match} replicated, {size}: {', '.join(names[:_MAX_UNMATCHED])}{more}"
    for rule in report.unused_rules:
        yield f"rule {rule!r} applies to no name"


def _as_json(path: Path, plan: Plan, devices: bool) -> dict[str, Any]:
    each, report = plan.device_bytes, plan.report.to_dict()
    return {
        "file": str(path),
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "uneven": plan.report.uneven,
        "tensors": [tensor.to_dict() for tensor in plan.tensors],
        "nbytes": plan.nbytes,
        "replicated_share": plan.replicated_share,
        "bytes_per_device": None if each is None else {"least": int(each.min()), "most": int(each.max())},
        "bytes_on_all_devices": None if each is None else sum(each.tolist()),
        **({"device_bytes": None if each is None else each.tolist()} if devices else {}),
        **{problem: report[problem] for problem in _PROBLEMS},
        "warnings": list(_warnings(plan)),
    }
