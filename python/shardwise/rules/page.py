"""A report as one self-contained page of HTML: to look at, to search, to send to others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from .._text import bytes_text, counted
from ..show.canvas import escaped
from ..show.colours import FILLS, INK, NEUTRAL, PATTERNS
from ..show.html import html_of
from ..show.names import group_names
from ..show.picture import MOST_KEYS, xml_text
from ..show.svg import svg_of
from .drawn import KINDS, MOST_DEVICES, kind_number, meshes_picture, report_picture
from .page_table import COLUMNS, PageTable, cell_text, layout_and_mesh, mesh_sizes, sizes_text

__all__ = ["notebook_of", "page_around", "page_of", "plain_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

#: The most names of one list.
_MOST_NAMES = 200


def page_of(report: Any, title: str) -> str:
    """Return the page of a report: `LayoutReport.to_html` lists what is on it."""
    page = PageTable(report)
    rows = "\n".join(page.rows())
    looks = {"fills": FILLS, "patterns": PATTERNS, "neutral": NEUTRAL, "ink": INK, "most": MOST_KEYS}
    data = {"cuts": page.cuts, "held": page.held, **looks}
    style, script = ((files(__package__) / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    name = cell_text(title)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            '<a class="skip" href="#table">Skip to the tensors</a>',
            f"<header>\n<h1>{name}</h1>\n<p>{cell_text(_about(report))}</p>\n</header>\n<main>",
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
            "".join(_head(column, kind) for column, kind in COLUMNS),
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
        f'<section>\n<h2>{cell_text(heading)}</h2>\n<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{cell_text(heading)}">{html}</div>\n</section>'
        for heading, html in sections
    ]
    return page_around(title, about, "\n".join(body))


def page_around(title: str, about: str, body: str, script: str = "") -> str:
    """Return a page around HTML, that looks as that of a report; its script may ask the page's own server only."""
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    name = cell_text(title)
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
        layout = layout_and_mesh(report, tensor.layout)
        size = "?" if tensor.bytes_per_device is None else bytes_text(tensor.bytes_per_device * len(names))
        cells = (f"{name}{many}", sizes_text(tensor.shape), layout, size, tensor.rule or KINDS[kind_number(tensor)])
        rows.append("<tr>" + "".join(f"<td>{cell_text(cell)}</td>" for cell in cells) + "</tr>")
    warnings = [f"<li>{cell_text(warning)}</li>" for warning in report.warnings[:_MOST_NAMES]]
    return "\n".join(
        [
            html_of(report_picture(report)),
            f"<ul>{''.join(warnings)}</ul>{_more(len(report.warnings))}" if warnings else "",
            "<details><summary>Tensors</summary><table><thead><tr><th>tensor</th><th>shape</th><th>layout</th>"
            f"<th>bytes per device</th><th>rule</th></tr></thead><tbody>{''.join(rows)}</tbody></table>",
            f"{_more(len(groups))}</details>",
        ]
    )


def _json(value: Any) -> str:
    """Return a value as JSON that is safe inside an HTML script element."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _about(report: Any) -> str:
    mesh = report.device_mesh
    if mesh is None:
        return "No mesh."
    devices = f"{mesh.size:,} device{'s' * (mesh.size > 1)}"
    if not report.meshes:
        return f"On the mesh {mesh_sizes(mesh)} of {devices}; uneven rule: {report.uneven}."
    named = "; ".join(f"{name} ({mesh_sizes(one)})" for name, one in report.meshes)
    return f"On {devices} by the mesh{'es' * (len(report.meshes) > 1)} {named}; uneven rule: {report.uneven}."


def _bars(report: Any) -> str:
    """Return the bars of the report, without texts that the page shows elsewhere."""
    picture = report_picture(report)
    return svg_of(replace(picture, views=tuple(replace(view, captions=()) for view in picture.views)))


def _meshes(report: Any) -> Iterator[str]:
    """Yield the section about the meshes of a deployment, with the contents of their devices."""
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
        checks = counted(len(empty), "check")
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
        cells = (cell_text(name), dim, size, shards, cell_text(str(rule)), fate)
        yield "<tr>" + "".join(f'<td class="code">{cell}</td>' for cell in cells) + "</tr>"
    yield f"</tbody></table></div>{_more(len(found))}</details>"


def _names(title: str, texts: Sequence[str], kind: str) -> Iterator[str]:
    """Yield a list of names with one line for those that differ only in numbers; it is open if it shows a problem."""
    found = group_names((text, None) for text in texts)
    yield f"<details{' open' if kind == 'bad' else ''}><summary>{title}: {len(texts):,}</summary>"
    items = "".join(
        f'<li class="{kind}">{cell_text(name)}{f" ({len(members)})" if len(members) > 1 else ""}</li>'
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
