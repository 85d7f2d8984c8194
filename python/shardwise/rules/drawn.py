"""The picture of a report: what each device holds, and what happens to the bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._text import bytes_text, counted
from ..mesh import DeviceMesh
from ..show.lanes import bars, holder_bars
from ..show.names import brief
from ..show.picture import Panel, Picture, Tile, View, short
from ..show.views import mesh_picture

__all__ = ["KINDS", "MOST_DEVICES", "kind_number", "layout_map_table", "meshes_picture", "report_picture"]

#: The fates of a tensor, in the words of the legend.
KINDS = ("cut", "replicated by a rule", "replicated, no rule matches", "cannot be placed")
MOST_DEVICES = 1 << 20
#: Devices that are drawn one by one.
_MOST_DRAWN = 256
#: The number of a layer in the name of a tensor, and what it is a number of.
_NUMBERED = re.compile(r"(?:^|\.)([A-Za-z_]+)\.([0-9]{1,9})(?=\.|$)")


class Reported(Protocol):
    """The members of a report that a picture needs."""

    @property
    def tensors(self) -> Sequence[Any]: ...
    @property
    def device_mesh(self) -> DeviceMesh | None: ...
    @property
    def device_bytes(self) -> npt.NDArray[np.int64] | None: ...
    @property
    def totals(self) -> tuple[str, ...]: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...


def kind_number(tensor: Any) -> int:
    """Return the number, in `KINDS`, of a tensor's fate."""
    if tensor.num_shards is None:
        return 2 if tensor.rule is None and tensor.layout is not None else 3
    if not tensor.is_replicated:
        return 0
    return 1 if tensor.rule is not None else 2


def layout_map_table(layout_map: Any) -> tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return a table of the rules of a layout map: what it shows, its titles, its rows and notes."""
    rows: list[tuple[str, ...]] = []
    for key, rule in layout_map.rules().items():
        shards = "?" if rule.layout.device_mesh is None else " × ".join(map(str, rule.layout.num_shards)) or "1"
        rows.append((key, str(rule.layout.axes), shards, ", ".join(rule.words)))
    mesh = layout_map.device_mesh
    axes = (
        "no mesh" if mesh is None else ", ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True))
    )
    count = counted(len(rows), "rule")
    default = layout_map.default
    notes = [] if default is None else [f"what no rule matches: {default.layout.axes}"]
    caption = f"LayoutMap of {count} on {axes}; a rule matches by {layout_map.match}"
    return caption, ("rule", "layout", ">shards", "more"), rows, notes


def report_picture(report: Reported) -> Picture:
    """Return the picture of a report; without bars where a dtype is not known, or the devices are too many."""
    mesh = report.device_mesh
    count = len(report.warnings)
    warnings = counted(count, "warning")
    panels = list(kinds_panel(report))
    each = None if mesh is None or mesh.size > MOST_DEVICES else report.device_bytes
    if mesh is not None and each is not None:
        panels.append(holder_bars("bytes on each device", mesh.labels(), each.tolist(), bytes_text))
    view = View((report.totals[0], *report.totals[1:], warnings), tuple(panels))
    return Picture(f"report on {report.totals[0]}", f"{'; '.join(report.totals)}; {warnings}.", (view,))


def meshes_picture(report: Any) -> Picture:
    """Return the picture of the meshes of a deployment: on each device its bytes, and the layers that not all have."""
    devices = report.device_mesh.size
    each = report.device_bytes if devices <= MOST_DEVICES else None
    said: dict[Any, list[str]] = {}
    if devices <= _MOST_DRAWN:
        labels = report.device_mesh.labels()
        for at, label in enumerate(labels):
            said[label] = [] if each is None else [bytes_text(int(each[at]))]
        for label, layers in _layers(report).items():
            said[label] += layers
    views = []
    for name, mesh in report.meshes:
        drawn = mesh_picture(mesh)
        for view in drawn.views:
            panels = tuple(
                replace(panel, tiles=tuple(_told(tile, said, mesh) for tile in panel.tiles)) for panel in view.panels
            )
            views.append(View((f"{name}: {view.captions[0]}", *view.captions[1:]), panels, view.notes))
    title = f"meshes of a deployment on {devices:,} device{'s' * (devices != 1)}"
    return Picture(title, "; ".join((title, *(view.captions[0] for view in views))) + ".", tuple(views))


def _layers(report: Any) -> dict[Any, list[str]]:
    """Return the numbers of layers on each device, if not all devices have the same."""
    found: dict[Any, dict[str, set[int]]] = {}
    for tensor in report.tensors:
        numbered = _NUMBERED.search(tensor.name)
        mesh = None if tensor.layout is None else tensor.layout.device_mesh
        if numbered is not None and mesh is not None:
            for label in mesh.labels():
                found.setdefault(label, {}).setdefault(numbered[1], set()).add(int(numbered[2]))
    if len({tuple(sorted((noun, *sorted(numbers)) for noun, numbers in one.items())) for one in found.values()}) < 2:
        return {}
    return {
        label: [brief([f"{noun} {number}" for number in sorted(numbers)]) for noun, numbers in one.items()]
        for label, one in found.items()
    }


def _told(tile: Tile, said: dict[Any, list[str]], mesh: DeviceMesh) -> Tile:
    """Return the tile of a device with a text on it; a tile of several devices stays unchanged."""
    place = tuple(int(number) for number in re.findall(r"[0-9]+", tile.place))
    if len(place) != mesh.ndim or ":" in tile.place:
        return tile
    lines = said.get(mesh.devices[place]) if said else None
    if not lines:
        return tile
    naming = None if tile.naming is None else tile.naming + 1
    labels = ((tile.labels[0][0], *(short(line, 18) for line in lines)), *tile.labels)
    return replace(tile, labels=labels, naming=naming, caption=f"{tile.caption}: {', '.join(lines)}")


def kinds_panel(report: Reported) -> list[Panel]:
    """Return bars of the bytes of tensors of each kind, each tensor counted once; no bars if a dtype is unknown."""
    sizes, counts = [0] * len(KINDS), [0] * len(KINDS)
    for tensor in report.tensors:
        if tensor.nbytes is None:
            return []
        kind = kind_number(tensor)
        sizes[kind] += tensor.nbytes
        counts[kind] += 1
    rows = [
        (f"{name} ({count:,})", size, bytes_text(size))
        for name, size, count in zip(KINDS, sizes, counts, strict=True)
        if count
    ]
    return [bars("bytes of the tensors, each counted once", rows)] if rows else []
