"""Pictures of meshes, partitions and other tilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..mesh import DeviceMesh
from ..partition import Partition
from ..tiling import Tiling
from .boxes import boxes_view
from .cells import Block, Cells, ChunkCells, DeviceCells, ShardCells, blocks_of, panels_of, plane_of
from .lanes import packed_view
from .picture import MOST_KEYS, MOST_NAMED, Picture, View, held_text, plain, replicas_text, short

__all__ = ["mesh_picture", "tilings_picture"]

_MOST_DIMS = 64
#: The most holders by which two blocks are compared.
_MOST_COMPARED = 4096


def mesh_picture(mesh: DeviceMesh) -> Picture:
    """Give the picture of a mesh: its devices in rows and columns, in blocks where there are many."""
    sizes = _mesh_text(mesh)
    many = "1 device" if mesh.size == 1 else f"{mesh.size:,} devices"
    if mesh.ndim > _MOST_DIMS:
        return Picture("mesh", f"A mesh of {mesh.ndim} axes.", (View((f"mesh of {mesh.ndim} axes",), ()),))
    cells = DeviceCells(mesh)
    plane = plane_of([cells])
    blocks = blocks_of(cells, plane, MOST_KEYS)
    keys = range(len(blocks))
    view = View((f"mesh {sizes}", many), tuple(panels_of(cells, plane, blocks, keys)))
    about = f"A mesh of {many}: {sizes}." + (f" Drawn as {len(blocks)} blocks." if len(blocks) < mesh.size else "")
    return Picture(f"mesh {sizes}", about, (view,), tuple(_entry(block) for block in blocks))


def tilings_picture(tilings: Sequence[Tiling], names: Sequence[str], more: str = "") -> Picture:
    """Give the picture of who holds which part of a tensor, or of several tilings of one shape.

    What they have in common has the same colour in all of them: the first holder of a shard, or all holders of a block.
    """
    shape = tilings[0].shape
    if len(shape) > _MOST_DIMS:
        text = f"{len(shape)} dims are too many to draw; at most {_MOST_DIMS} are"
        return Picture("tiling", text, (View((text,), ()),))
    grids: list[Cells | None] = [_cells(tiling) for tiling in tilings]
    regular = [cells for cells in grids if cells is not None]
    plane = plane_of(regular) if regular else ()
    for most in (MOST_KEYS, MOST_KEYS // 2):
        parts = [[] if cells is None else blocks_of(cells, plane, most) for cells in grids]
        colours = _Colours(len(tilings))
        keys = [[colours.key(block, at) for block in blocks] for at, blocks in enumerate(parts)]
        if len(colours.legend()) <= MOST_KEYS:
            break
    else:
        colours, keys = _Colours(len(tilings)), [[None] * len(blocks) for blocks in parts]
    views = []
    for at, (tiling, cells, blocks) in enumerate(zip(tilings, grids, parts, strict=True)):
        captions = _captions(tiling)
        head = (f"{names[at]}: {captions[0]}" if names[at] else captions[0], *captions[1:])
        if cells is not None:
            views.append(View(head, tuple(panels_of(cells, plane, blocks, keys[at])), _notes(blocks)))
        elif isinstance(tiling, Partition):
            view, legend = packed_view(tiling, head[0], head[1:])
            views.append(colours.shifted(view, legend))
        else:
            view, legend = boxes_view(tiling, head)
            views.append(colours.shifted(view, legend))
    title = more or " → ".join(short(view.captions[0], 120) for view in views)
    about = " ".join(f"{'; '.join(short(line, 160) for line in view.captions)}." for view in views)
    return Picture(title, about, tuple(views), colours.legend(), len(views) > 1)


def _cells(tiling: Tiling) -> Cells | None:
    """The tiling as a regular grid, if it is one."""
    if isinstance(tiling, Partition):
        return None if tiling.is_packed else ShardCells(tiling)
    if tiling._key[0] == "grid":
        return ChunkCells(tiling, tiling._key[3])
    return None


class _Colours:
    """The holders of each entry of the legend."""

    def __init__(self, views: int) -> None:
        self._texts: dict[Any, list[str]] = {}
        self._views = views
        self._others: list[str] = []

    def key(self, block: Block, view: int) -> int | None:
        if block.is_empty:
            return None
        labels, count = block.holders(_MOST_COMPARED if self._views > 1 else MOST_NAMED)
        if block.size == 1:
            name: Any = labels[0]
        elif len(labels) == count:
            name = frozenset(labels)
        else:  # Too many to tell whether they are those of another view.
            name = (view, *block.ranges)
        texts = self._texts.setdefault(name, [])
        text = _entry(block)
        if text not in texts:
            texts.append(text)
        return list(self._texts).index(name)

    def shifted(self, view: View, legend: tuple[str, ...]) -> View:
        """Give a view whose tiles count the entries of its own legend; these follow those that exist already."""
        before = len(self.legend())
        fits = before + len(legend) <= MOST_KEYS
        if fits:
            self._others += legend
        if fits and not before:
            return view
        panels = tuple(
            replace(
                panel,
                tiles=tuple(
                    replace(tile, key=tile.key + before if fits and tile.key is not None else None)
                    for tile in panel.tiles
                ),
            )
            for panel in view.panels
        )
        return replace(view, panels=panels)

    def legend(self) -> tuple[str, ...]:
        return (*(" / ".join(texts[:2]) for texts in self._texts.values()), *self._others)


def _entry(block: Block) -> str:
    labels, count = block.holders()
    held = short(held_text(labels, count), 80)
    if block.size > 1:
        return f"{held} ({block.size:,} {block.cells.unit}s)"
    return replicas_text(held, count)


def _notes(blocks: Sequence[Block]) -> tuple[str, ...]:
    empty = [block for block in blocks if block.is_empty]
    if not empty:
        return ()
    if len(empty) == len(blocks):
        return ("the tensor has no elements",)
    held = [block.holders() for block in empty]
    labels = (label for found, _ in held for label in found)
    return (f"empty: {held_text(labels, sum(count for _, count in held))}",)


def _captions(tiling: Tiling) -> tuple[str, ...]:
    sizes = " × ".join(map(str, tiling.shape)) or "scalar"
    if not isinstance(tiling, Partition):
        count = tiling._count
        return f"{sizes} in {tiling._kind_text()}", f"{count:,} holder{'s' * (count != 1)}"
    total, replicas = tiling.total_shards, tiling.replicas
    shards = "1 shard" if total == 1 else f"{total:,} shards"
    devices = "one device" if replicas == 1 else f"{replicas:,} devices"
    layout = tiling.layout
    partial = f", partial sums over {', '.join(layout.unreduced[:4])}" if layout.unreduced else ""
    return (
        f"{short(plain(str(layout.axes)), 100)}{short(plain(partial), 60)}",
        f"{sizes} on {short(_mesh_text(tiling.device_mesh), 60)}: {shards}, each on {devices}",
    )


def _mesh_text(mesh: DeviceMesh) -> str:
    axes = zip(mesh.axis_names[:8], mesh.shape[:8], strict=True)
    text = ", ".join(f"{short(plain(name), 24)}={size}" for name, size in axes)
    return f"{text}, …" if mesh.ndim > 8 else text
