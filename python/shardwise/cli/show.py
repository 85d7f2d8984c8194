"""`shardwise show`: the shards of one tensor, drawn as a grid that says which devices hold which part."""

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from .._text import bytes_text, counted
from ..layout import TensorLayout
from ..partition import Partition
from ..show.text import lines_of
from ..show.views import tilings_picture
from .notation import format_layout, format_mesh, format_shape, parse_dtype, parse_layout, parse_mesh, parse_shape
from .terminal import Screen

__all__ = ["run_show", "summary_of"]

# The width of a picture where there is no terminal.
_COLUMNS = 100

# The most devices for which `--json` lists them all.
_MOST_DEVICES = 1 << 20


def run_show(screen: Screen, options: argparse.Namespace) -> int:
    """Describe and draw how a layout cuts a tensor, and give the exit status."""
    mesh = parse_mesh(options.mesh)
    shape = parse_shape(options.shape)
    axes = parse_layout(options.layout, len(shape)).axes
    if len(axes) != len(shape):
        entries = [entry or "-" for entry in options.layout.split(",")]
        joined = ", + between the axes of one dim" if len(axes) > len(shape) else ""
        raise ValueError(
            f"--layout {options.layout!r} has {len(axes)} entr{'y' if len(axes) == 1 else 'ies'} for {len(shape)} "
            f"dim{'s' * (len(shape) != 1)}: write one for each, - where it is not cut{joined}, as in "
            f"{','.join([*entries, *['-'] * len(shape)][: len(shape)]) or '()'}"
        )
    layout = TensorLayout(axes, mesh)
    partition = layout.partition(shape, options.uneven)
    bits = None if options.dtype is None else parse_dtype(options.dtype)
    if options.json:
        print(json.dumps(_as_json(partition, bits)))
        return 0
    screen.write(
        *((format_shape(shape), "bold"), " laid out as ", (format_layout(layout) or "()", "bold")),
        f" on the mesh {format_mesh(mesh)}",
    )
    screen.write(summary_of(partition, bits))
    screen.write("")
    picture = tilings_picture([partition], [""])
    # The lines above say what its captions do.
    picture = replace(picture, views=tuple(replace(view, captions=()) for view in picture.views))
    for line in lines_of(picture, _COLUMNS if screen.size is None else screen.size.columns):
        screen.write(*line)
    return 0


def _as_json(partition: Partition, bits: int | None) -> dict[str, Any]:
    """Return each shard: which devices hold it, which boxes of the tensor it is, and where they begin in it."""
    mesh = partition.device_mesh
    if mesh.size > _MOST_DEVICES:
        raise ValueError(f"--json: {mesh.size} devices are too many to list, {_MOST_DEVICES} at most")
    shards = []
    for shard in range(partition.total_shards):
        devices = partition.devices_holding(shard)
        shape = partition.shard_shape(devices[0])
        pieces = []
        for piece in partition.pieces(devices[0]):
            start = list(piece.start) if isinstance(piece.start, tuple) else piece.start
            pieces.append({"box": [[side.start, side.stop] for side in piece.box], "start": start})
        size = {} if bits is None else {"nbytes": -(-math.prod(shape) * bits // 8)}
        shards.append({"shard_id": shard, "devices": devices, "shape": list(shape), "pieces": pieces, **size})
    return {
        "shape": list(partition.shape),
        "mesh": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        "layout": format_layout(partition.layout),
        "uneven": partition.uneven,
        "num_shards": list(partition.num_shards),
        "replicas": partition.replicas,
        "shards": shards,
    }


def summary_of(partition: Partition, bits: int | None) -> str:
    """Say how many shards a partition has, how large, and on how many devices; with bits of an element, their bytes."""
    shard = partition.largest_shard_shape
    uneven = any(
        part * count != size for part, count, size in zip(shard, partition.num_shards, partition.shape, strict=True)
    )
    shards = counted(partition.total_shards, "shard")
    holders = "one device" if partition.replicas == 1 else f"{partition.replicas:,} devices"
    text = f"{shards} of {'at most ' * uneven}{format_shape(shard)}, each on {holders}"
    if bits is None:
        return text
    part, whole = (-(-math.prod(sizes) * bits // 8) for sizes in (shard, partition.shape))
    share = f", {100 * part / whole:.3g}%" if whole else ""
    return f"{text}, {bytes_text(part)} of {bytes_text(whole)}{share}"
