"""The table of the page: a row for each group of tensors that are alike, and the cuts that rows refer to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .._text import bytes_text
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..show.canvas import escaped
from ..show.cells import CellBlock, ShardCells, cell_ranges, held_in, plane_of
from ..show.lanes import packed_view
from ..show.names import brief, group_names
from ..show.picture import short, xml_text
from ..show.views import axes_text
from .drawn import MOST_DEVICES, kind_number

__all__ = ["COLUMNS", "PageTable", "cell_text", "layout_and_mesh", "mesh_sizes", "sizes_text"]

#: The most characters of a text.
_LONGEST = 400
#: The most blocks of a tensor that the page draws: for each there is room for a name, if it stands upright.
_MOST_BLOCKS = 64
#: The most packed cuts that the page draws: with more it only names them, as their pieces would make it large.
_MOST_PACKED = 64
#: The columns of the table, each with the class of its cells.
COLUMNS = (
    ("tensor", ""),
    ("shape", "n"),
    ("dtype", ""),
    ("layout", ""),
    ("largest shard", "n"),
    ("bytes", "n"),
    ("bytes per device", "n"),
    ("rule", ""),
)


def cell_text(text: str) -> str:
    """Return a text for a cell, without what HTML does not allow, and not too long."""
    return escaped(short(xml_text(text), _LONGEST))


def name_html(name: str) -> str:
    """Return a name as HTML that can be broken after its dots and slashes."""
    return cell_text(name).replace(".", ".<wbr>").replace("/", "/<wbr>")


def sizes_text(shape: Sequence[int]) -> str:
    """Return the sizes of a shape."""
    return " × ".join(map(str, shape)) or "scalar"


def mesh_sizes(mesh: DeviceMesh) -> str:
    """Return the sizes of a mesh by its axes."""
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))


@lru_cache(maxsize=256)  # the tensors of a stage have their mesh in common
def _devices(mesh: DeviceMesh) -> str:
    return f"{mesh.size:,} devices" if mesh.size > MOST_DEVICES else brief(list(map(str, mesh.labels())))


def layout_and_mesh(report: Any, layout: TensorLayout | None) -> str:
    """Return the axes of a layout; in a deployment also its mesh, and the mesh's devices that it is on."""
    if layout is None:
        return "?"
    axes, mesh = axes_text(layout), layout.device_mesh
    if not report.meshes or mesh is None:
        return axes
    return f"{axes} over {mesh_sizes(mesh)}: {_devices(mesh)}"


class PageTable:
    """The rows of the table, and the list of cuts that they refer to."""

    def __init__(self, report: Any) -> None:
        self._report = report
        self.cuts: list[Any] = []
        self.held: list[list[str]] = []
        self._cuts: dict[Any, int] = {}
        self._held: dict[Any, int] = {}
        self._packed = 0
        #: The reasons why tensors cannot be placed, and the same without their names, by which they are grouped.
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
        layout = layout_and_mesh(self._report, tensor.layout)
        shard = None if tensor.shard_shape is None else tensor.shard_shape
        fold = '<button type="button" class="fold needs-js" aria-expanded="false" aria-label="members">+</button>'
        name = (
            f'{fold if many > 1 else ""}<button type="button" class="plain"{f" data-many={many}" if many > 1 else ""}>'
            f"{name_html(text)}</button>{f' × {many}' if many > 1 else ''}"
        )
        cells = [
            ("name", number, name),
            ("n", math.prod(tensor.shape), cell_text(sizes_text(tensor.shape))),
            ("", tensor.dtype or "", cell_text(tensor.dtype or "?")),
            ("code", short(layout, 40), cell_text(layout)),
            ("n", -1 if shard is None else math.prod(shard), "none" if shard is None else cell_text(sizes_text(shard))),
            ("n", -1 if sizes is None else sizes, "?" if sizes is None else bytes_text(sizes)),
            ("n", -1 if each is None else each, "?" if each is None else bytes_text(each)),
            ("code", short(tensor.rule or "", 40), self._rule(tensor)),
        ]
        place = "" if cut is None else f' data-c="{cut}"'
        return (
            f'<tr class="g" data-k="{kind_number(tensor)}"{place}>'
            + "".join(f'<td class="{kind}" data-v="{cell_text(str(value))}">{cell}</td>' for kind, value, cell in cells)
            + "</tr>"
        )

    def _member(self, tensor: Any) -> str:
        size = "" if tensor.nbytes is None else bytes_text(tensor.nbytes)
        each = "" if tensor.bytes_per_device is None else f", {bytes_text(tensor.bytes_per_device)} per device"
        return (
            f'<tr class="m"><td class="name"><button type="button" class="plain">{name_html(tensor.name)}</button></td>'
            f'<td class="quiet" colspan="{len(COLUMNS) - 1}">as above; {size}{each}</td></tr>'
        )

    def _rule(self, tensor: Any) -> str:
        reason = self._reasons.get(tensor.name)
        if reason is not None:
            return f'<span class="bad">{cell_text(reason[0])}</span>'
        if tensor.rule is not None:
            return cell_text(tensor.rule)
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
            "about": short(xml_text(f"{sizes_text(shape)}, {layout_and_mesh(self._report, layout)}"), _LONGEST),
            "shape": list(map(str, shape)),
            "ranges": ranges,
            "held": self._held[key],
            "plane": [plane[0] if len(plane) > 1 else None, plane[-1] if plane else None],
        }

    def _shared_cut(self, layout: TensorLayout, shape: tuple[int, ...]) -> dict[str, Any]:
        about = short(xml_text(f"{sizes_text(shape)}, {layout_and_mesh(self._report, layout)}"), _LONGEST)
        note = "neighbours share blocks; shardwise.draw draws the tilings of shardwise.quantized.followers"
        return {"about": about, "notes": [note], "pieces": [], "shape": [], "plane": [None, None]}

    def _packed_cut(self, layout: TensorLayout, shape: tuple[int, ...], uneven: Any) -> dict[str, Any]:
        self._packed += 1
        about = short(xml_text(f"{sizes_text(shape)}, {layout_and_mesh(self._report, layout)}"), _LONGEST)
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
            "pieces": [
                [tile.down[0], f"{tile.across[0]}:{tile.across[1]}", tile.place, tile.caption] for tile in tiles
            ],
        }

    def _look(self, tensor: Any) -> tuple[Any, ...]:
        """Return the properties that tensors in one row have in common."""
        reason = self._reasons.get(tensor.name, ("", ""))[1]
        held = tensor.layout, tensor.tiling, tensor.num_shards
        return tensor.shape, tensor.dtype, *held, tensor.rule, tensor.uneven, reason
