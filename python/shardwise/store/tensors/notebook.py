"""Views of checkpoints and their tensors in notebooks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from ..._dtypes import bytes_for
from ..._text import bytes_text, counted
from ...show.names import group_names
from ...show.picture import Picture
from ...show.views import tilings_picture
from ...tiling import Tiling

__all__ = ["checkpoint_table", "tensor_picture"]

#: The most pieces of a tensor that are drawn with the names of their files; more are numbered.
_MOST_PIECES = 4096
#: The most tensors that a table lists, as a checkpoint may have millions.
_MOST_TENSORS = 100_000


def tensor_picture(tensor: Any) -> Picture:
    """Return the picture of a tensor's boxes with the files that hold them; two copies of a box are replicas."""
    about = f"{tensor.name}: {tensor.dtype}, {bytes_text(tensor.nbytes)}"
    tiling = tensor.tiling
    if len(tensor.pieces) + len(tensor.replicas) <= _MOST_PIECES:
        held: dict[str, list[Any]] = {}
        for piece in (*tensor.pieces, *tensor.replicas):
            held.setdefault(str(piece.path).replace("\\", "/").rpartition("/")[2], []).append(piece.box)
        tiling = Tiling.from_boxes(tensor.shape, held)
    picture = tilings_picture([tiling], [""])
    sizes = " × ".join(map(str, tensor.shape)) or "scalar"
    count = len(tensor.pieces)
    pieces = f"{sizes} in {counted(count, 'piece')}"
    view = replace(picture.views[0], captions=(about, pieces))
    return replace(picture, title=tensor.name, about=f"{about}; {pieces}. {picture.about}", views=(view,))


def checkpoint_table(checkpoint: Any) -> tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return a table of a checkpoint's tensors and totals; tensors that differ only in a number are one row."""
    described = itertools.islice(checkpoint.described(), _MOST_TENSORS)
    groups = group_names((name, (dtype, shape)) for name, dtype, shape in described)
    rows: list[tuple[str, ...]] = []
    for name, names, (dtype, shape) in groups:
        size = bytes_for(math.prod(shape), dtype.bits) * len(names)
        many = f" × {len(names)}" if len(names) > 1 else ""
        rows.append((f"{name}{many}", " × ".join(map(str, shape)) or "scalar", dtype.name, bytes_text(size)))
    tensors = counted(len(checkpoint), "tensor")
    caption = f"{checkpoint.path}: {checkpoint.format}, {tensors}, {bytes_text(checkpoint.nbytes)}"
    notes = [text] if (text := str(checkpoint.training)) else []
    if len(checkpoint) > _MOST_TENSORS:
        notes.append(f"the first {_MOST_TENSORS:,} tensors are listed")
    if checkpoint.objects:
        notes.append(f"{counted(len(checkpoint.objects), 'other value')}: objects has them")
    if checkpoint.unreadable:
        notes.append(f"{counted(len(checkpoint.unreadable), 'tensor')} cannot be read: unreadable says why")
    return caption, ("tensor", "shape", "dtype", ">bytes"), rows, notes
