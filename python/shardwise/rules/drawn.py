"""The picture of a report: what each device holds, and what happens to the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._text import bytes_text
from ..mesh import DeviceMesh
from ..show.html import table_html
from ..show.lanes import bars, holder_bars
from ..show.picture import Panel, Picture, View

__all__ = ["KINDS", "MOST_DEVICES", "kind_number", "layout_map_html", "report_picture"]

#: The fates of a tensor, in the words of the legend.
KINDS = ("cut", "replicated by a rule", "replicated, no rule matches", "cannot be placed")
MOST_DEVICES = 1 << 20


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
    """Say what happens to a tensor: the number of its kind in `KINDS`."""
    if tensor.num_shards is None:
        return 2 if tensor.rule is None and tensor.layout is not None else 3
    if not tensor.is_replicated:
        return 0
    return 1 if tensor.rule is not None else 2


def layout_map_html(layout_map: Any) -> str:
    """Give a table of the rules of a layout map."""
    rows = []
    for key, rule in layout_map.rules().items():
        shards = "?" if rule.layout.device_mesh is None else " × ".join(map(str, rule.layout.num_shards)) or "1"
        rows.append((key, str(rule.layout.axes), shards, ", ".join(rule.words)))
    mesh = layout_map.device_mesh
    axes = (
        "no mesh" if mesh is None else ", ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True))
    )
    count = "1 rule" if len(rows) == 1 else f"{len(rows):,} rules"
    default = layout_map.default
    notes = [] if default is None else [f"what no rule matches: {default.layout.axes}"]
    caption = f"LayoutMap of {count} on {axes}; a rule matches by {layout_map.match}"
    return table_html(caption, ("rule", "layout", ">shards", "more"), rows, notes)


def report_picture(report: Reported) -> Picture:
    """Give the picture of a report; without bars where a dtype is not known, or the devices are too many."""
    mesh = report.device_mesh
    count = len(report.warnings)
    warnings = "1 warning" if count == 1 else f"{count:,} warnings"
    panels = list(kinds_panel(report))
    each = None if mesh is None or mesh.size > MOST_DEVICES else report.device_bytes
    if mesh is not None and each is not None:
        panels.append(holder_bars("bytes on each device", mesh.labels(), each.tolist(), bytes_text))
    view = View((report.totals[0], *report.totals[1:], warnings), tuple(panels))
    return Picture(f"report on {report.totals[0]}", f"{'; '.join(report.totals)}; {warnings}.", (view,))


def kinds_panel(report: Reported) -> list[Panel]:
    """Draw bars of the bytes of the tensors of each kind, each tensor counted once; none if a dtype is unknown."""
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
