"""Layouts, meshes, boxes and digests of a manifest as JSON, and read from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from .._arguments import sizes_of
from .._atomic import read_file
from .._dtypes import find_dtype
from .._text import shown
from ..errors import LayoutError, ParseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..packed import PackedDim, parse
from ..tiling import Tiling

__all__ = [
    "axes_in",
    "boxes_in",
    "check_label",
    "digest_in",
    "dtype_name",
    "layout_dict",
    "list_in",
    "mesh_dict",
    "number_below",
    "read_json_file",
    "tiling_of",
]


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """Return the contents of a file of JSON."""
    data = read_file(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{os.fspath(path)!r} is not JSON: {error}") from None


def boxes_in(entry: Any) -> dict[Any, Any]:
    """Return the boxes of each holder of an entry without a layout."""
    holders, boxes = list_in("holders", entry["holders"]), list_in("boxes", entry["boxes"])
    if len(holders) != len(boxes) or not all(type(label) in (str, int) for label in holders):
        raise LayoutError(
            f"there are {len(holders)} holders with labels that are str or int, but boxes for {len(boxes)}"
        )
    if len(set(holders)) != len(holders):
        raise LayoutError("a holder is listed twice")
    return {
        label: [[_side_of(side) for side in list_in("a box", box)] for box in list_in("the boxes", held)]
        for label, held in zip(holders, boxes, strict=True)
    }


def _side_of(side: Any) -> tuple[int, int]:
    start, stop = sizes_of("a side of a box", side)
    return start, stop


def tiling_of(shape: tuple[int, ...], boxes: Mapping[Any, list[list[tuple[int, int]]]]) -> Tiling:
    """Return the tiling with these boxes for each holder; a holder of one box has an array of its shape."""
    given = {label: tuple(held[0]) if len(held) == 1 else held for label, held in boxes.items()}
    tiling = Tiling.from_boxes(shape, given, replicas=True)
    tiling.check()
    return tiling


def digest_in(given: list[Any]) -> str | None:
    """Return the digest of an entry, if it has one."""
    if not given:
        return None
    if len(given) > 1 or not isinstance(given[0], str):
        raise LayoutError(f"its digest must be text, got {shown(given[0])}")
    return str(given[0])


def list_in(what: str, values: Any) -> list[Any]:
    """Return a list as it is; refuse anything else."""
    if not isinstance(values, list):
        raise LayoutError(f"{what} must be a list, got {shown(values)}")
    return values


def number_below(value: Any, count: int) -> int:
    """Return a whole number from 0 to below a count; refuse anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise LayoutError(f"{shown(value)} is not a number below {count}")
    return value


def mesh_dict(mesh: DeviceMesh) -> dict[str, Any]:
    """Return a mesh as JSON; its labels only if they were given."""
    found: dict[str, Any] = {"shape": list(mesh.shape), "axis_names": list(mesh.axis_names)}
    if not mesh.has_default_devices:
        labels = mesh.labels()
        for label in labels:
            check_label(label)
        found["devices"] = list(labels)
    return found


def check_label(label: Any) -> None:
    """Refuse a label that JSON cannot hold."""
    if not isinstance(label, (str, int)) or isinstance(label, bool):
        raise LayoutError(f"device {shown(label)} cannot be in a manifest: its labels must be str or int")


def layout_dict(layout: TensorLayout | Tiling, uneven: UnevenRule, meshes: Mapping[DeviceMesh, int]) -> dict[str, Any]:
    """Return a layout as JSON, or the boxes of a tiling."""
    if isinstance(layout, Tiling):
        return _boxes_dict(layout)
    assert layout.device_mesh is not None
    axes: list[Any] = [
        {"packed": str(spec)} if isinstance(spec, PackedDim) else [spec] if isinstance(spec, str) else list(spec or ())
        for spec in layout.axes
    ]
    number = meshes[layout.device_mesh]
    return {"mesh": number, "axes": axes, "unreduced": list(layout.unreduced), "uneven": uneven}


def _boxes_dict(tiling: Tiling) -> dict[str, Any]:
    if not tiling.has_labels:
        raise LayoutError("a tiling whose holders have no labels cannot be written")
    boxes = []
    for label in tiling.holders:
        check_label(label)
        at, held, shape = 0, tiling.pieces(label), tiling.holder_shape(label)
        for piece in held:
            sizes = tuple(side.stop - side.start for side in piece.box)
            begin = piece.start
            if isinstance(begin, tuple) and len(begin) == len(sizes):
                # In an array of the tensor's rank a box is a run if it is whole in all dims but the first.
                is_run = sizes[1:] == shape[1:] or not math.prod(sizes)
                begin = sum(a * math.prod(shape[dim + 1 :]) for dim, a in enumerate(begin)) if is_run else -1
            if begin not in (at, (at,)) and math.prod(sizes):
                raise LayoutError(
                    f"the boxes of {shown(label)} are not one after the other; such boxes cannot be written"
                )
            at += math.prod(sizes)
        if at != math.prod(shape):
            raise LayoutError(f"the array of {shown(label)} is larger than its boxes; such an array cannot be written")
        boxes.append([[[side.start, side.stop] for side in piece.box] for piece in held])
    return {"holders": list(tiling.holders), "boxes": boxes}


def axes_in(axes: Any) -> Any:
    """Return the axes of a dim."""
    if isinstance(axes, Mapping):
        return parse(axes["packed"])
    if not isinstance(axes, list):
        raise LayoutError(f"the axes of a dim must be a list or packed, got {shown(axes)}")
    return tuple(axes)


def dtype_name(dtype: Any) -> str:
    """Return the name that the package has for a dtype; refuse one that is not known."""
    found = find_dtype(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise LayoutError(f"the dtype {shown(dtype)} is not known")
    return found.name
