"""Pictures of meshes, partitions and other tilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._text import counted
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..partition import Partition
from ..tiling import Tiling
from .boxes import boxes_view
from .cells import CellBlock, Cells, ChunkCells, DeviceCells, ShardCells, cell_blocks, panels_of, plane_of
from .lanes import packed_view
from .names import brief
from .picture import MOST_KEYS, MOST_NAMED, Picture, Tile, View, held_text, replicas_text, short, xml_text

__all__ = ["axes_text", "layout_picture", "mesh_picture", "tilings_picture"]

_MOST_DIMS = 64
#: The most cells, and along each side, that are drawn one by one; without colours if there are more than these.
_MOST_CELLS, _MOST_SIDE = 256, 16
#: The most holders by which two blocks are compared.
_MOST_COMPARED = 4096


def mesh_picture(mesh: DeviceMesh) -> Picture:
    """Return the picture of a mesh: its devices in rows and columns, without colours; in blocks if there are many."""
    many = counted(mesh.size, "device")
    return _mesh_picture(mesh, (f"mesh {_mesh_text(mesh)}", f"{many}: {_devices_text(mesh)}"), None)


def layout_picture(layout: TensorLayout, mesh: DeviceMesh) -> Picture:
    """Return the picture of a layout that has no shape yet: its mesh, with the shard that each device holds.

    Devices that hold the same shard have its colour. Shards have no colour where there are too many, or where the
    size of a packed dim is left to the shape.
    """
    partition = _unit_partition(layout)
    many = "" if partition is None else f": {_shards_text(partition)}"
    captions = (axes_text(layout), f"{short(_mesh_text(mesh), 60)}{many}", f"devices: {_devices_text(mesh)}")
    return _mesh_picture(mesh, captions, partition)


def _mesh_picture(mesh: DeviceMesh, captions: tuple[str, ...], partition: Partition | None) -> Picture:
    title, about = captions[0], f"{'; '.join(captions)}."
    if mesh.ndim > _MOST_DIMS:
        return Picture(title, about, (View((*captions, f"{mesh.ndim} axes are too many to draw"), ()),))
    cells = DeviceCells(mesh)
    plane = plane_of([cells.counts])
    blocks = cell_blocks(cells, plane, _MOST_CELLS, _MOST_SIDE)
    if len(blocks) < mesh.size:
        blocks = cell_blocks(cells, plane, MOST_KEYS)
        about += f" Drawn as {len(blocks)} blocks."
    panels = panels_of(cells, plane, blocks, [None] * len(blocks))
    legend: tuple[str, ...] = ()
    if partition is not None and len(blocks) == mesh.size:
        # In the order of the devices, as the blocks are.
        ids = partition.shard_ids().tolist()
        shards = list(dict.fromkeys(ids))
        legend = tuple(f"shard {_index(partition, shard)}" for shard in shards) if len(shards) <= MOST_KEYS else ()
        keys = {shard: key if legend else None for key, shard in enumerate(shards)}
        held = {"[" + ", ".join(map(str, mesh.coordinate(at))) + "]": shard for at, shard in enumerate(ids)}
        panels = [
            replace(
                panel,
                tiles=tuple(
                    _holding(tile, _index(partition, held[tile.place]), keys[held[tile.place]]) for tile in panel.tiles
                ),
            )
            for panel in panels
        ]
    return Picture(title, about, (View(captions, tuple(panels)),), legend)


def _index(partition: Partition, shard: int) -> str:
    """Return the indices of a shard along the dims, as many as there are."""
    found = []
    for count in reversed(partition.num_shards):
        shard, index = divmod(shard, count)
        found.append(str(index))
    return f"({', '.join(reversed(found))})"


def _holding(tile: Tile, index: str, key: int | None) -> Tile:
    """Return the tile of a device with the index of the shard that it holds."""
    device = tile.labels[0][0]
    labels = ((device, index), (f"{device} {index}",), (tile.labels[-1][0], index), *tile.labels)
    return replace(tile, key=key, labels=labels, caption=f"{tile.caption} holds shard {index}")


def _unit_partition(layout: TensorLayout) -> Partition | None:
    """Return the partition of the least shape that a layout cuts evenly: one element per shard along each dim."""
    shape = []
    for spec, count in zip(layout.axes, layout.num_shards, strict=True):
        if isinstance(spec, PackedDim) and spec.size is None:
            return None
        shape.append(spec.size if isinstance(spec, PackedDim) and spec.size is not None else count)
    return layout.partition(shape)


def tilings_picture(tilings: Sequence[Tiling], names: Sequence[str], more: str = "") -> Picture:
    """Return the picture of who holds which part of a tensor, or of several tilings, each of its own shape perhaps.

    What they have in common has the same colour in all of them: the first holder of a shard, or all holders of a block.
    If there are more shards than colours, they have none.
    """
    rank = max(len(tiling.shape) for tiling in tilings)
    if rank > _MOST_DIMS:
        text = f"{rank} dims are too many to draw; at most {_MOST_DIMS} can be"
        return Picture("tiling", text, (View((text,), ()),))
    grids: list[Cells | None] = [_cells(tiling) for tiling in tilings]
    # Tilings of one shape are drawn over the same dims.
    regular: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for tiling, cells in zip(tilings, grids, strict=True):
        if cells is not None:
            regular.setdefault(tiling.shape, []).append(cells.counts)
    planes = {shape: plane_of(counts) for shape, counts in regular.items()}
    for most, widest in ((_MOST_CELLS, _MOST_SIDE), (MOST_KEYS, None), (MOST_KEYS // 2, None)):
        parts = [
            [] if cells is None else cell_blocks(cells, planes[tiling.shape], most, widest)
            for tiling, cells in zip(tilings, grids, strict=True)
        ]
        is_single = all(block.size == 1 for blocks in parts for block in blocks)
        if widest is not None and not is_single:
            continue
        colours = _Colours(len(tilings))
        keys = [[colours.key(block, at) for block in blocks] for at, blocks in enumerate(parts)]
        has_colours = len(colours.legend()) <= MOST_KEYS
        if has_colours or is_single:
            break
    if not has_colours:
        colours, keys = _Colours(len(tilings)), [[None] * len(blocks) for blocks in parts]
    views = []
    for at, (tiling, cells, blocks) in enumerate(zip(tilings, grids, parts, strict=True)):
        captions = _captions(tiling)
        head = (f"{names[at]}: {captions[0]}" if names[at] else captions[0], *captions[1:])
        if cells is not None:
            views.append(View(head, tuple(panels_of(cells, planes[tiling.shape], blocks, keys[at])), _notes(blocks)))
        elif isinstance(tiling, Partition):
            view, holders = packed_view(tiling, head[0], head[1:])
            views.append(colours.listed(view, holders))
        else:
            view, holders = boxes_view(tiling, head)
            views.append(colours.listed(view, holders))
    title = more or " → ".join(short(view.captions[0], 120) for view in views)
    about = " ".join(f"{'; '.join(short(line, 160) for line in view.captions)}." for view in views)
    return Picture(title, about, tuple(views), colours.legend(), len(views) > 1)


def _cells(tiling: Tiling) -> Cells | None:
    """Return the tiling as a regular grid, if it is one."""
    if isinstance(tiling, Partition):
        return None if tiling.is_packed else ShardCells(tiling)
    chunks = tiling.grid_chunks
    return None if chunks is None else ChunkCells(tiling, chunks)


class _Colours:
    """The holders of each entry of the legend."""

    def __init__(self, views: int) -> None:
        self._texts: dict[Any, list[str]] = {}
        self._views = views

    def key(self, block: CellBlock, view: int) -> int | None:
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

    def listed(self, view: View, holders: Sequence[tuple[Any, str]]) -> View:
        """Return a view whose tiles count a list of holders of its own; those of another view have the same look."""
        if len({*self._texts, *(name for name, _ in holders)}) > MOST_KEYS:
            keys: list[int | None] = [None] * len(holders)
        else:
            for name, text in holders:
                self._texts.setdefault(name, []).append(text)
            names = list(self._texts)
            keys = [names.index(name) for name, _ in holders]
        panels = tuple(
            replace(
                panel,
                tiles=tuple(replace(tile, key=None if tile.key is None else keys[tile.key]) for tile in panel.tiles),
            )
            for panel in view.panels
        )
        return replace(view, panels=panels)

    def legend(self) -> tuple[str, ...]:
        return tuple(" / ".join(list(dict.fromkeys(texts))[:2]) for texts in self._texts.values())


def _entry(block: CellBlock) -> str:
    labels, count = block.holders()
    held = short(held_text(labels, count), 80)
    if block.size > 1:
        return f"{held} ({block.size:,} {block.cells.unit}s)"
    return replicas_text(held, count, block.cells.copies)


def _notes(blocks: Sequence[CellBlock]) -> tuple[str, ...]:
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
        count = tiling.holder_count
        return f"{sizes} in {tiling.kind_text()}", f"{count:,} holder{'s' * (count != 1)}"
    mesh = short(_mesh_text(tiling.device_mesh), 60)
    return axes_text(tiling.layout), f"{sizes} on {mesh}: {_shards_text(tiling)}"


def _shards_text(partition: Partition) -> str:
    total, replicas = partition.total_shards, partition.replicas
    shards = counted(total, "shard")
    return f"{shards}, each on {'one device' if replicas == 1 else f'{replicas:,} devices'}"


def axes_text(layout: TensorLayout) -> str:
    """Write the axes of a layout as pictures have them: packed dims in their own notation.

    >>> from shardwise import packed
    >>> axes_text(TensorLayout((packed.parse("(3 h=2@tp d=4)"), None)))
    '((3 2@tp 4), None)'
    """
    partial = f", partial sums over {', '.join(layout.unreduced[:4])}" if layout.unreduced else ""
    # A packed dim as it is written in rules: no call around it, and no quotes.
    specs = [str(spec) if isinstance(spec, PackedDim) else repr(spec) for spec in layout.axes]
    axes = f"({specs[0]},)" if len(specs) == 1 else f"({', '.join(specs)})"
    return f"{short(xml_text(axes), 100)}{short(xml_text(partial), 60)}"


def _devices_text(mesh: DeviceMesh) -> str:
    """Return the labels of a mesh's devices, briefly."""
    if mesh.size <= _MOST_CELLS:
        return short(brief([held_text([label], 1) for label in mesh.labels()]), 80)
    return f"{held_text([mesh.device(0)], 1)} to {held_text([mesh.device(mesh.size - 1)], 1)}"


def _mesh_text(mesh: DeviceMesh) -> str:
    axes = zip(mesh.axis_names[:8], mesh.shape[:8], strict=True)
    text = ", ".join(f"{short(xml_text(name), 24)}={size}" for name, size in axes)
    return f"{text}, …" if mesh.ndim > 8 else text
