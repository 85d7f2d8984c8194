"""`shardwise report`: what each device would hold of a checkpoint, from its headers alone."""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._dtypes import bytes_for
from .._text import bytes_text
from ..conversion.apply import kept_objects, rewritten_outline
from ..conversion.assembled import Assembled
from ..deploy.deployment import Deployment
from ..deploy.presets import preset
from ..deploy.read import no_mesh
from ..mesh import DeviceMesh
from ..quantized import followers
from ..quantized.outline import Outline, components_in
from ..quantized.unstated import cast_weights, check_elements
from ..rules.layout_map import LayoutMap
from ..rules.left_out import LeftOut
from ..rules.numbers import Config, read_config, reading_for
from ..rules.pattern import NamePattern
from ..rules.problems import unused_texts
from ..rules.report import LayoutReport
from ..rules.rewrites import Rewrites
from ..rules.states import training_names
from ..rules.tensor_report import TensorReport
from ..show.lines import StyledText
from ..show.names import brief, group_names, lines_alike
from ..show.table import table_lines
from ..store import open_checkpoint
from ..store.data.location import Location
from ..store.rewritten.components import reader_of
from ..store.rewritten.left_out import asked_for, dropped_by_rules, states_alone
from ..store.rewritten.model_tensors import described_tensors, is_described
from ..store.rewritten.names import names_of
from ..store.tensors.companion_files import beside
from ..store.tensors.training import Total, totals_dict, totals_of, totals_text
from ..store.write.forms.one_rank import file_ranks
from ..store.write.forms.rank_files import rank_name
from .layouts import check_for, config_for, read_layouts, source_layouts
from .notation import format_layout, format_mesh, format_shape, parse_mesh
from .terminal import Screen, as_options

__all__ = ["doubts", "run_report"]

_TITLES = ("tensor", ">shape", "dtype", "layout", ">shard", ">per device")
_MAX_UNMATCHED = 6
_MAX_PROBLEMS = 20
_PROBLEMS = ("unmatched", "unused_rules", "unused_axes", "clashes", "rank_mismatches", "indivisible", "misfits")


def run_report(screen: Screen, options: argparse.Namespace) -> int:
    """Print a report; the exit status is 1 if a tensor cannot be placed or, with `--strict`, on any warning, else 0."""
    applied = _applied(options)
    if options.html is not None:
        applied.report.save_html(options.html, f"{applied.path.name} on {format_mesh(applied.mesh)}")
    if options.json:
        found = _as_json(applied, options.devices, options.html)
        print(json.dumps(found | ({"ranks": _rank_rows(applied)} if options.ranks else {}), indent=2))
    else:
        _print(screen, applied, apart=options.all, devices=options.devices, ranks=options.ranks)
        said = [*doubts(applied.report), *_said(applied)]
        if applied.report.problems or said or applied.left_out:
            screen.write("")
        for each in applied.left_out:
            if each.kind == "asked":
                screen.write(as_options(str(each)))
        for text in said:
            screen.write(("error: ", "bold red") if options.strict else ("warning: ", "bold yellow"), as_options(text))
        for text in _grouped(applied.report):
            screen.write(("error: ", "bold red"), text)
        if options.html is not None:
            screen.write("")
            screen.write("the page is in ", (str(options.html), "bold"))
    is_wrong = applied.report.warnings or any(_said(applied))
    return 1 if applied.report.unplaced or (options.strict and is_wrong) else 0


class Applied(NamedTuple):
    """A checkpoint under the rules of a layout map.

    Attributes:
        path: Its place.
        mesh: The mesh of all devices.
        report: The tensors that each device would hold.
        layouts: The layout map or the deployment.
        left_out: The parts of the checkpoint that the report leaves out.
        totals: The tensors and bytes of its weights, and of each kind of training state.
    """

    path: Location
    mesh: DeviceMesh
    report: LayoutReport
    layouts: LayoutMap | Deployment
    left_out: tuple[LeftOut, ...] = ()
    totals: tuple[Total, ...] = ()


def _applied(options: argparse.Namespace) -> Applied:
    """Apply rules or a preset to a checkpoint, to a model's configuration alone, or to a list of tensors.

    The rewrites of the rules are applied first, unless the tensors have the new names already. The components of
    quantized weights follow these. Without `--mesh`, the mesh is that of the rules; without `--config`, the model's
    configuration is the one next to the checkpoint.
    """
    source, rules, drop = options.source, options.rules, options.drop
    bare = source_layouts(options, source)
    given = config_for(options, source)
    if given is None and Path(source).name.endswith(".json") and is_described(Path(source)):
        given = Path(source)  # Of a list, the numbers that its rules name are missing.
    layouts, rewrites = _rules_of(options, given)
    mesh = layouts.world
    if mesh is None:
        assert rules is not None
        raise no_mesh(rules, layouts)
    unwanted = None if drop is None else NamePattern("drop", drop)
    dropped: dict[str, Assembled] = {}
    left_out: list[LeftOut] = []
    lost: list[str] = []
    if is_described(Path(source)):
        stored: Outline = _asked(described_tensors(Path(source), rules), unwanted, left_out)
        names = set(stored)
        said = {} if given is None else read_config(given)
        path: Location = Path(source)
        known = rewritten_outline(stored, rewrites, components_in(stored, said), dropped=dropped)
    else:
        with open_checkpoint(source, layouts=bare) as checkpoint:
            stored = {name: (shape, dtype) for name, dtype, shape in checkpoint.described()}
            stored = _asked(stored, unwanted, left_out)
            names = {*names_of(checkpoint)}
            left_out += beside(checkpoint, unwanted)
            lost = [
                name
                for name in (*checkpoint.objects, *checkpoint.unreadable)
                if not kept_objects([name], rewrites) and (unwanted is None or not unwanted.is_found(name))
            ]
            read, said = reader_of(checkpoint), {} if given is None else read_config(given)
            path, known = (
                checkpoint.path,
                rewritten_outline(stored, rewrites, components_in(stored, said, read), read, dropped),
            )
    outline, weights = known
    check_elements(outline, weights, layouts)
    left_out += cast_weights(outline, weights, layouts, said)
    following = followers(weights, layouts, options.uneven)
    left_out += dropped_by_rules(dropped, lost, names)
    left_out += states_alone(outline, names)
    totals = totals_of(((name, dtype, shape) for name, (shape, dtype) in outline.items()), training_names(outline))
    report = layouts.report(_described(outline), uneven=options.uneven, followers=following)
    return Applied(path, mesh, report, layouts, tuple(left_out), totals)


def _rules_of(options: argparse.Namespace, config: Config | None) -> tuple[LayoutMap | Deployment, Rewrites]:
    """Return the layouts and rewrites that the options name, after the rewrites of bare files of ranks are undone."""
    rules, mesh = options.rules, None if options.mesh is None else parse_mesh(options.mesh)
    check_for(mesh, options.preset)
    with reading_for(options.source):
        if options.preset is not None:
            layouts, rewrites, _, _ = preset(options.preset, config, rules=rules, form="report")
        elif rules is None:
            raise ValueError("--rules or --for is missing: they say how the tensors are cut")
        else:
            layouts, rewrites = read_layouts(rules, mesh, config), Rewrites.from_toml(rules, config=config)
        if options.source_rules is not None:
            rewrites = Rewrites.from_toml(options.source_rules, config=config).inverse() + rewrites
    return layouts, rewrites


def _asked(stored: Outline, unwanted: NamePattern | None, left_out: list[LeftOut]) -> Outline:
    """Return the tensors without those that the call leaves out, which are noted."""
    if unwanted is None:
        return stored
    found = {name: each for name, each in stored.items() if unwanted.is_found(name)}
    left_out += asked_for({name: bytes_for(math.prod(shape), dtype.bits) for name, (shape, dtype) in found.items()})
    return {name: each for name, each in stored.items() if name not in found}


def _said(applied: Applied) -> Iterator[str]:
    """Yield a line for each thing of the checkpoint that the report is not about, unless that was asked for."""
    for each in applied.left_out:
        if each.kind != "asked":
            yield as_options(str(each))


def _described(outline: Outline) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, dtype.name) for name, (shape, dtype) in outline.items()}


def _print(screen: Screen, applied: Applied, *, apart: bool, devices: bool, ranks: bool) -> None:
    count, *totals = applied.report.totals
    screen.write(
        (str(applied.path), "bold"),
        f": {count}, {_where(applied)}",
    )
    screen.write("")
    for line in table_lines(_TITLES, _rows(applied, apart), screen.size and screen.size.columns):
        screen.write(*line)
    screen.write("")
    for text in totals:
        screen.write(text)
    if text := totals_text(applied.totals):
        screen.write(text)
    if devices:
        screen.write("")
        for line in table_lines(("devices", ">bytes"), _device_rows(applied)):
            screen.write(*line)
    if ranks:
        screen.write("")
        rows = [[(str(row[key]), "") for key in ("rank", "device", "bytes", "file")] for row in _rank_rows(applied)]
        for line in table_lines((">rank", "device", ">bytes", "file of --to ranks"), rows):
            screen.write(*line)


def _where(applied: Applied) -> str:
    mesh, meshes = applied.mesh, applied.report.meshes
    devices = f"{mesh.size:,} device{'s' * (mesh.size > 1)}"
    if not meshes:
        return f"on the mesh {format_mesh(mesh)} of {devices}"
    said = "; ".join(f"{name} {format_mesh(one)}" for name, one in meshes)
    return f"on {devices} by the mesh{'es' * (len(meshes) > 1)} {said}"


def _rows(applied: Applied, apart: bool) -> list[list[StyledText]]:
    by_name = {tensor.name: tensor for tensor in applied.report.tensors}
    if apart:
        return [_row(applied, name, 1, tensor) for name, tensor in by_name.items()]
    groups = group_names((name, _look(tensor)) for name, tensor in by_name.items())
    return [_row(applied, text, len(names), by_name[names[0]]) for text, names, _ in groups]


def _look(tensor: TensorReport) -> tuple[object, ...]:
    """Return the values by which tensors are grouped: those of one row have the same."""
    return tensor.shape, tensor.dtype or "?", tensor.layout, tensor.rule, tensor.bytes_per_device


def _row(applied: Applied, name: str, count: int, tensor: TensorReport) -> list[StyledText]:
    size = tensor.bytes_per_device
    shard = "cannot be placed" if tensor.shard_shape is None else format_shape(tensor.shard_shape)
    held = "" if size is None else bytes_text(size)
    return [
        (name, ""),
        (format_shape(tensor.shape), ""),
        (tensor.dtype or "?", ""),
        _layout_part(tensor, applied.report),
        (f"≤ {shard}" if tensor.is_uneven else shard, "red" if size is None else ""),
        (f"{count} x {held}" if held and count > 1 else held, ""),
    ]


def _layout_part(tensor: TensorReport, report: LayoutReport) -> StyledText:
    if tensor.layout is None:
        return "no place" if report.meshes else "clash", "red"
    if tensor.rule is None and report.default is None:
        return "no rule", "yellow"
    style = "red" if tensor.shard_shape is None else "dim" if tensor.is_replicated else "cyan"
    return format_layout(tensor.layout) or "()", style


def _device_rows(applied: Applied) -> list[list[StyledText]]:
    """Return a row for each number of bytes that devices hold: which devices, and the bytes."""
    each = applied.report.to_dict()["device_bytes"]
    if each is None:
        raise ValueError(f"--devices: {applied.mesh.size} devices are too many to list")
    holders: dict[int, list[str]] = {}
    for device, size in enumerate(each):
        holders.setdefault(size, []).append(str(applied.mesh.device(device)))
    return [[(brief(devices), ""), (f"{size:,}", "")] for size, devices in holders.items()]


def _rank_rows(applied: Applied) -> list[dict[str, Any]]:
    """Return for each rank its device, its coordinates in each mesh, the bytes that it holds, and the file of them."""
    each = applied.report.to_dict()["device_bytes"]
    if each is None:
        raise ValueError(f"--ranks: {applied.mesh.size} devices are too many to list")
    ranks = file_ranks(applied.layouts, ())
    return [
        {
            "rank": rank,
            "device": str(ranks.labels[rank]),
            "coordinates": ranks.coordinates(rank),
            "bytes": size,
            "file": rank_name(ranks, rank),
        }
        for rank, size in enumerate(each)
    ]


def _grouped(report: LayoutReport) -> Iterator[str]:
    """Yield a line for what prevents tensors of alike names from being placed, where the report has one for each."""
    said = ((problem.name, str(problem).removeprefix(repr(problem.name))) for problem in report.problems)
    yield from map(as_options, lines_alike(said, _MAX_PROBLEMS, joined=True))


def doubts(report: LayoutReport) -> Iterator[str]:
    """Yield a line for each thing that looks wrong although it prevents nothing."""
    yield from report.notes
    for each in report.left_out:
        if each.kind != "unmatched":
            yield as_options(str(each))
            continue
        names = [name for name, _, _ in group_names((tensor.name, None) for tensor in report.unmatched)]
        more = f" and {len(names) - _MAX_UNMATCHED} more" if len(names) > _MAX_UNMATCHED else ""
        size = bytes_text(sum(tensor.nbytes or 0 for tensor in report.unmatched))
        count = len(report.unmatched)
        match = "1 tensor matches no rule and is" if count == 1 else f"{count} tensors match no rule and are"
        yield f"{match} replicated, {size}: {', '.join(names[:_MAX_UNMATCHED])}{more}"
    yield from unused_texts(report.unused_rules)


def _as_json(applied: Applied, devices: bool, html: Path | None) -> dict[str, Any]:
    report = applied.report.to_dict()
    each = report["device_bytes"]
    return {
        "file": str(applied.path),
        "mesh": dict(zip(applied.mesh.axis_names, applied.mesh.shape, strict=True)),
        **({"meshes": report["meshes"]} if "meshes" in report else {}),
        "uneven": report["uneven"],
        "default": report["default"],
        "tensors": report["tensors"],
        "nbytes": report["nbytes"],
        "training": totals_dict(applied.totals),
        "replicated_share": report["replicated_share"] or 0.0,
        "bytes_per_device": None if each is None else {"least": min(each), "most": max(each)},
        "bytes_on_all_devices": None if each is None else sum(each),
        **({"device_bytes": each} if devices else {}),
        **{problem: report[problem] for problem in _PROBLEMS},
        "left_out": [each.to_dict() for each in (*applied.report.left_out, *applied.left_out)],
        "warnings": [*_grouped(applied.report), *doubts(applied.report), *_said(applied)],
        **({} if html is None else {"html": str(html)}),
    }
