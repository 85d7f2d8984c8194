"""A report as one self-contained page of HTML: to look at, to search, to send to others."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .._text import bytes_text
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..show.cells import CellBlock, ShardCells, cell_ranges, held_in, plane_of
from ..show.colours import FILLS, INK, NEUTRAL, PATTERNS
from ..show.html import html_of
from ..show.lanes import packed_view
from ..show.names import brief, group_names
from ..show.picture import MOST_KEYS, short, xml_text
from ..show.svg import escaped, svg_of
from ..show.views import axes_text
from .drawn import KINDS, MOST_DEVICES, kind_number, meshes_picture, report_picture

__all__ = ["notebook_of", "page_around", "page_of", "plain_page"]

_LONGEST, _MOST_NAMES = 400, 200
#: The most blocks of a tensor that the page draws: for each there is room for a name, if it stands upright.
_MOST_BLOCKS = 64
#: If there are more packed cuts, the page only names them: their pieces would make it large.
_MOST_PACKED = 64
_COLUMNS = (
    ("tensor", ""),
    ("shape", "n"),
    ("dtype", ""),
    ("layout", ""),
    ("largest shard", "n"),
    ("bytes", "n"),
    ("bytes per device", "n"),
    ("rule", ""),
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page_of(report: Any, title: str) -> str:
    """Return the page of a report: `LayoutReport.to_html` lists what is on it."""
    page = _Page(report)
    rows = "\n".join(page.rows())
    looks = {"fills": FILLS, "patterns": PATTERNS, "neutral": NEUTRAL, "ink": INK, "most": MOST_KEYS}
    data = {"cuts": page.cuts, "held": page.held, **looks}
    style, script = ((files(__package__) / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    name = _text(title)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            '<a class="skip" href="#table">Skip to the tensors</a>',
            f"<header>\n<h1>{name}</h1>\n<p>{_text(_about(report))}</p>\n</header>\n<main>",
            _figures(report),
            *_problems(report),
            "<section>\n<h2>What the devices hold</h2>",
            "<p>Without the tensors that cannot be placed.</p>" if report.unplaced else "",
            f'<div class="scroll" tabindex="0" role="region" aria-label="bars">{_bars(report)}</div>',
            "</section>",
            *_meshes(report),
            '<section id="table">\n<h2>Tensors</h2>',
            _tools(report),
            '<div class="scroll" tabindex="0" role="region" aria-label="tensors"><table id="tensors"><thead><tr>',
            "".join(_head(column, kind) for column, kind in _COLUMNS),
            f"</tr></thead><tbody>\n{rows}\n</tbody></table></div>\n</section>",
            '<section id="who" aria-live="polite" class="needs-js"><h2>Who holds what</h2>',
            '<p class="quiet">Choose a tensor in the table.</p></section>\n</main>',
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def plain_page(title: str, about: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page of sections, each a title and its HTML, that looks as that of a report and has no scripts."""
    body = [
        f'<section>\n<h2>{_text(heading)}</h2>\n<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{_text(heading)}">{html}</div>\n</section>'
        for heading, html in sections
    ]
    return page_around(title, about, "\n".join(body))


def page_around(title: str, about: str, body: str, script: str = "") -> str:
    """Return a page around HTML, that looks as that of a report; its script may ask the page's own server only."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    name = _text(title)
    policy = f"{_POLICY}; connect-src 'self'" if script else _POLICY
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f"<header>\n<h1>{name}</h1>\n<p>{escaped(xml_text(about))}</p>\n</header>\n<main>",
            body,
            f"</main>{f'{chr(10)}<script>{chr(10)}{script}</script>' if script else ''}\n</body>\n</html>\n",
        ]
    )


def notebook_of(report: Any) -> str:
    """Return what a notebook shows of a report: its picture, what looks wrong, and the tensors, folded, as a table."""
    by_name = {tensor.name: tensor for tensor in report.tensors}
    groups = group_names((name, (t.shape, t.layout, t.rule, t.num_shards, t.bits)) for name, t in by_name.items())
    rows = []
    for name, names, _ in groups[:_MOST_NAMES]:
        tensor, many = by_name[names[0]], f" × {len(names)}" if len(names) > 1 else ""
        layout = _layout(report, tensor.layout)
        size = "?" if tensor.bytes_per_device is None else bytes_text(tensor.bytes_per_device * len(names))
        cells = (f"{name}{many}", _sizes(tensor.shape), layout, size, tensor.rule or KINDS[kind_number(tensor)])
        rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    warnings = [f"<li>{_text(warning)}</li>" for warning in report.warnings[:_MOST_NAMES]]
    return "\n".join(
        [
            html_of(report_picture(report)),
            f"<ul>{''.join(warnings)}</ul>{_more(len(report.warnings))}" if warnings else "",
            "<details><summary>Tensors</summary><table><thead><tr><th>tensor</th><th>shape</th><th>layout</th>"
            f"<th>bytes per device</th><th>rule</th></tr></thead><tbody>{''.join(rows)}</tbody></table>",
            f"{_more(len(groups))}</details>",
        ]
    )


def _text(text: str) -> str:
    return escaped(short(xml_text(text), _LONGEST))


def _name(name: str) -> str:
    """Return a name as HTML that can be broken after its dots and slashes."""
    return _text(name).replace(".", ".<wbr>").replace("/", "/<wbr>")


def _json(value: Any) -> str:
    """Return a value as JSON that is safe inside an HTML script element."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _about(report: Any) -> str:
    mesh = report.device_mesh
    if mesh is None:
        return "No mesh."
    devices = f"{mesh.size:,} device{'s' * (mesh.size > 1)}"
    if not report.meshes:
        return f"On the mesh {_axes(mesh)} of {devices}; uneven rule: {report.uneven}."
    named = "; ".join(f"{name} ({_axes(one)})" for name, one in report.meshes)
    return f"On {devices} by the mesh{'es' * (len(report.meshes) > 1)} {named}; uneven rule: {report.uneven}."


def _axes(mesh: DeviceMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


def _layout(report: Any, layout: TensorLayout | None) -> str:
    """Return the axes of a layout; in a deployment also its mesh, and the mesh's devices that it is on."""
    if layout is None:
        return "?"
    axes, mesh = axes_text(layout), layout.device_mesh
    if not report.meshes or mesh is None:
        return axes
    return f"{axes} over {_axes(mesh)}: {_devices(mesh)}"


@lru_cache(maxsize=256)  # the tensors of a stage have their mesh in common
def _devices(mesh: DeviceMesh) -> str:
    return f"{mesh.size:,} devices" if mesh.size > MOST_DEVICES else brief(list(map(str, mesh.labels())))


def _bars(report: Any) -> str:
    """Return the bars of the report, without texts that the page shows elsewhere."""
    picture = report_picture(report)
    return svg_of(replace(picture, views=tuple(replace(view, captions=()) for view in picture.views)))


def _meshes(report: Any) -> Iterator[str]:
    """Return the section about the meshes of a deployment, and the contents of their devices."""
    if report.meshes:
        yield "<section>\n<h2>Meshes of the deployment</h2>"
        drawn = svg_of(meshes_picture(report))
        yield f'<div class="scroll" tabindex="0" role="region" aria-label="meshes">{drawn}</div>'
        yield "</section>"


def _figures(report: Any) -> str:
    each = None if report.device_mesh is None or report.device_mesh.size > MOST_DEVICES else report.device_bytes
    share = report.replicated_share
    figures = [
        (f"{len(report.tensors):,}", "tensors"),
        ("?" if report.nbytes is None else bytes_text(report.nbytes), "in all"),
        ("?" if each is None else bytes_text(int(each.max())), "on the fullest device"),
        ("?" if each is None else bytes_text(sum(each.tolist())), "on all devices together"),
        ("?" if share is None else f"{100 * share:.3g}%", "of the bytes are on every device"),
        (f"{len(report.unmatched):,}", "match no rule"),
        (f"{len(report.unplaced):,}", "cannot be placed"),
    ]
    return '<ul class="figures">' + "".join(f"<li><b>{value}</b> {what}</li>" for value, what in figures) + "</ul>"


def _problems(report: Any) -> Iterator[str]:
    """Yield the sections about problems, one for each kind."""
    replicated = [tensor.name for tensor in report.tensors if tensor.is_replicated and report.is_everywhere(tensor)]
    lists = [
        ("Replicated on every device", replicated, ""),
        ("No rule matches", [tensor.name for tensor in report.unmatched], "warn"),
        ("Several rules match", [str(clash) for clash in report.clashes], "bad"),
        ("Of another rank than the layout", [str(mismatch) for mismatch in report.rank_mismatches], "bad"),
        ("Of sizes that do not fit", [str(misfit) for misfit in report.misfits], "bad"),
        ("Rules that apply to no name", list(report.unused_rules), "warn"),
    ]
    yield "<section>\n<h2>What to look at</h2>"
    for title, texts, kind in lists:
        if texts:
            yield from _names(title, texts, kind)
    if report.indivisible:
        yield from _indivisible(report)
    empty = [title for title, texts, _ in lists if not texts] + ["Does not divide"] * (not report.indivisible)
    if empty:
        items = "".join(f"<li>{title}</li>" for title in empty)
        checks = "1 check" if len(empty) == 1 else f"{len(empty)} checks"
        yield f"<details><summary>{checks} found nothing</summary><ul>{items}</ul></details>"
    yield "</section>"


def _indivisible(report: Any) -> Iterator[str]:
    hindering = {(problem.name, problem.dim) for problem in report.hindering}
    dims = report.indivisible
    yield f"<details{' open' if hindering else ''}><summary>Does not divide: {len(dims):,}</summary>"
    yield (
        '<div class="scroll" tabindex="0" role="region" aria-label="dims that do not divide"><table><thead><tr>'
        "<th>tensor</th><th>dim</th><th>elements</th><th>shards</th><th>rule</th><th>so it is</th></tr></thead>"
        "<tbody>"
    )
    found = group_names(
        (dim.name, (dim.dim, dim.size, dim.num_shards, dim.rule, (dim.name, dim.dim) in hindering)) for dim in dims
    )
    for name, _, (dim, size, shards, rule, hinders) in found[:_MOST_NAMES]:
        fate = '<span class="bad">not placed</span>' if hinders else "cut unevenly"
        cells = (_text(name), dim, size, shards, _text(str(rule)), fate)
        yield "<tr>" + "".join(f'<td class="code">{cell}</td>' for cell in cells) + "</tr>"
    yield f"</tbody></table></div>{_more(len(found))}</details>"


def _names(title: str, texts: Sequence[str], kind: str) -> Iterator[str]:
    """Return a list of names with one line for those that differ only in numbers; it is open if it shows a problem."""
    found = group_names((text, None) for text in texts)
    yield f"<details{' open' if kind == 'bad' else ''}><summary>{title}: {len(texts):,}</summary>"
    items = "".join(
        f'<li class="{kind}">{_text(name)}{f" ({len(members)})" if len(members) > 1 else ""}</li>'
        for name, members, _ in found[:_MOST_NAMES]
    )
    yield f'<ul class="names">{items}</ul>{_more(len(found))}</details>'


def _more(count: int) -> str:
    return f"<p>and {count - _MOST_NAMES:,} more</p>" if count > _MOST_NAMES else ""


def _tools(report: Any) -> str:
    kinds = {kind_number(tensor) for tensor in report.tensors}
    options = "".join(f'<option value="{kind}">{KINDS[kind]}</option>' for kind in sorted(kinds))
    return (
        '<div class="tools needs-js">'
        '<span><label for="search">Search names, shapes, rules</label><input id="search" type="search"></span>'
        f'<span><label for="kind">Show</label><select id="kind"><option value="">all</option>{options}</select></span>'
        '<button id="unfold" type="button">Unfold all</button><span id="status" role="status"></span></div>'
    )


def _head(column: str, kind: str) -> str:
    return f'<th scope="col" class="{kind}"><button type="button">{column}</button></th>'


class _Page:
    """The rows of the table, and the list of cuts that they refer to."""

    def __init__(self, report: Any) -> None:
        self._report = report
        self.cuts: list[Any] = []
        self.held: list[list[str]] = []
        self._cuts: dict[Any, int] = {}
        self._held: dict[Any, int] = {}
        self._packed = 0
        #: Why tensors cannot be placed, and the same without their names, by which they are grouped.
        self._reasons: dict[str, tuple[str, str]] = {}
        for problem in report.problems:
            self._reasons.setdefault(problem.name, (str(problem), str(replace(problem, name=""))))

    def rows(self) -> Iterator[str]:
        """Yield the rows: one for each group of tensors that are alike, then its members."""
        by_name = {tensor.name: tensor for tensor in self._report.tensors}
        for number, (text, names, _) in enumerate(group_names((name, self._look(t)) for name, t in by_name.items())):
            tensors = [by_name[name] for name in names]
            yield self._group(number, text, tensors)
            if len(names) > 1:
                yield from (self._member(tensor) for tensor in tensors)

    def _group(self, number: int, text: str, tensors: Sequence[Any]) -> str:
        tensor, many = tensors[0], len(tensors)
        cut = self._cut(tensor)
        sizes = None if tensor.nbytes is None else tensor.nbytes * many
        each = None if tensor.bytes_per_device is None else tensor.bytes_per_device * many
        layout = _layout(self._report, tensor.layout)
        shard = None if tensor.shard_shape is None else tensor.shard_shape
        fold = '<button type="button" class="fold needs-js" aria-expanded="false" aria-label="members">+</button>'
        name = (
            f'{fold if many > 1 else ""}<button type="button" class="plain"{f" data-many={many}" if many > 1 else ""}>'
            f"{_name(text)}</button>{f' × {many}' if many > 1 else ''}"
        )
        cells = [
            ("name", number, name),
            ("n", math.prod(tensor.shape), _text(_sizes(tensor.shape))),
            ("", tensor.dtype or "", _text(tensor.dtype or "?")),
            ("code", short(layout, 40), _text(layout)),
            ("n", -1 if shard is None else math.prod(shard), "none" if shard is None else _text(_sizes(shard))),
            ("n", -1 if sizes is None else sizes, "?" if sizes is None else bytes_text(sizes)),
            ("n", -1 if each is None else each, "?" if each is None else bytes_text(each)),
            ("code", short(tensor.rule or "", 40), self._rule(tensor)),
        ]
        place = "" if cut is None else f' data-c="{cut}"'
        return (
            f'<tr class="g" data-k="{kind_number(tensor)}"{place}>'
            + "".join(f'<td class="{kind}" data-v="{_text(str(value))}">{cell}</td>' for kind, value, cell in cells)
            + "</tr>"
        )

    def _member(self, tensor: Any) -> str:
        size = "" if tensor.nbytes is None else bytes_text(tensor.nbytes)
        each = "" if tensor.bytes_per_device is None else f", {bytes_text(tensor.bytes_per_device)} per device"
        return (
            f'<tr class="m"><td class="name"><button type="button" class="plain">{_name(tensor.name)}</button></td>'
            f'<td class="quiet" colspan="{len(_COLUMNS) - 1}">as above; {size}{each}</td></tr>'
        )

    def _rule(self, tensor: Any) -> str:
        reason = self._reasons.get(tensor.name)
        if reason is not None:
            return f'<span class="bad">{_text(reason[0])}</span>'
        if tensor.rule is not None:
            return _text(tensor.rule)
        return '<span class="warn">no rule</span>' if self._report.default is None else "the default"

    def _cut(self, tensor: Any) -> int | None:
        """Return the number of the entry that says who holds what, for tensors of this layout and shape."""
        layout, shape = tensor.layout, tensor.shape
        if tensor.num_shards is None or layout is None or len(shape) > 64:
            return None
        key = tensor.tiling or layout, shape, tensor.uneven
        if key not in self._cuts:
            self._cuts[key] = len(self.cuts)
            if tensor.tiling is not None:
                self.cuts.append(self._shared_cut(layout, shape))
            else:
                made = self._packed_cut if layout.is_packed else self._regular_cut
                self.cuts.append(made(layout, shape, tensor.uneven))
        return self._cuts[key]

    def _regular_cut(self, layout: TensorLayout, shape: tuple[int, ...], uneven: Any) -> dict[str, Any]:
        cells = ShardCells(layout.partition(shape, uneven))
        plane = plane_of([cells.counts])
        parts = cell_ranges(cells, plane, _MOST_BLOCKS)
        ranges = [["{}:{}".format(*cells.span(dim, *each)) for each in part] for dim, part in enumerate(parts)]
        key = layout, cells.counts
        if key not in self._held:
            self._held[key] = len(self.held)
            self.held.append([held_in(CellBlock(cells, block)) for block in itertools.product(*parts)])
        return {
            "about": short(xml_text(f"{_sizes(shape)}, {_layout(self._report, layout)}"), _LONGEST),
            "shape": list(map(str, shape)),
            "ranges": ranges,
            "held": self._held[key],
            "plane": [plane[0] if len(plane) > 1 else None, plane[-1] if plane else None],
        }

    def _shared_cut(self, layout: TensorLayout, shape: tuple[int, ...]) -> dict[str, Any]:
        about = short(xml_text(f"{_sizes(shape)}, {_layout(self._report, layout)}"), _LONGEST)
        note = "neighbours share blocks; shardwise.draw draws what shardwise.quantized.followers gives"
        return {"about": about, "notes": [note], "pieces": [], "shape": [], "plane": [None, None]}

    def _packed_cut(self, layout: TensorLayout, shape: tuple[int, ...], uneven: Any) -> dict[str, Any]:
        self._packed += 1
        about = short(xml_text(f"{_sizes(shape)}, {_layout(self._report, layout)}"), _LONGEST)
        if self._packed > _MOST_PACKED:
            note = "too many packed layouts for one page; shardwise.draw draws this one"
            return {"about": about, "notes": [note], "pieces": [], "shape": [], "plane": [None, None]}
        view, _ = packed_view(layout.partition(shape, uneven), about, ())
        tiles = [tile for panel in view.panels for tile in panel.tiles]
        size = view.panels[0].across.size if view.panels and view.panels[0].across is not None else 1
        return {
            "about": about,
            "notes": list(view.notes),
            "shape": [str(size)],
            "plane": [None, 0],
            "pieces": [[tile.down[0], f"{tile.across[0]}:{tile.across[1]}", tile.place, tile.held] for tile in tiles],
        }

    def _look(self, tensor: Any) -> tuple[Any, ...]:
        """Return the properties that tensors in one row have in common."""
        reason = self._reasons.get(tensor.name, ("", ""))[1]
        held = tensor.layout, tensor.tiling, tensor.num_shards
        return tensor.shape, tensor.dtype, *held, tensor.rule, tensor.uneven, reason
