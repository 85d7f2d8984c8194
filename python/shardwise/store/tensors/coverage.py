"""The pieces of a tensor checked against its shape: gaps, overlaps, and replicas."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..._text import shown
from ...errors import LayoutError, ParseError
from ...pieces import Pieces, repeats
from ...tiling import Tiling
from ..data.text import box_text

__all__ = ["tile"]

Boxes = npt.NDArray[np.int64]
BoxPositions = npt.NDArray[np.intp]


def tile(
    name: str, shape: tuple[int, ...], boxes: Boxes, where: Callable[[int], str], checkpoint: object
) -> tuple[list[int], list[int]]:
    """Check that boxes tile a tensor; return the positions of boxes that tile it, and of replicas, which repeat some.

    Boxes without elements are neither, except that a tensor without elements has one box.

    Args:
        name: The tensor's name, for messages.
        shape: The tensor's shape.
        boxes: Start and stop: int64 of shape (boxes, dims, 2).
        where: Returns the file that holds the box at a position, for messages.
        checkpoint: The beginning of messages.

    Raises:
        ParseError: if a box reaches outside the tensor, two overlap without being equal, or some elements are in none;
            the message names the tensor, the box and the file.
    """
    sizes = np.array(shape, np.int64)
    outside = ((boxes[..., 0] < 0) | (boxes[..., 0] > boxes[..., 1]) | (boxes[..., 1] > sizes)).any(axis=1)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ParseError(
            f"{checkpoint}: tensor {shown(name)} of shape {shape}: {where(at)} holds {box_text(boxes[at].tolist())}, "
            "which is outside it"
        )
    if len(boxes) == 1 and (boxes[0, :, 1] - boxes[0, :, 0] == sizes).all():
        return [0], []
    filled = np.flatnonzero((boxes[..., 0] < boxes[..., 1]).all(axis=1))
    again = repeats(Pieces.boxed(boxes[filled]))
    kept, replicas = filled[~again], filled[again]
    _check(name, shape, boxes, kept, where, checkpoint)
    return kept.tolist(), replicas.tolist()


def _check(
    name: str, shape: tuple[int, ...], boxes: Boxes, kept: BoxPositions, where: Callable[[int], str], checkpoint: object
) -> None:
    try:
        Tiling.from_boxes(shape, boxes[kept]).check()
    except LayoutError as error:
        text = str(error).replace("holders[", "boxes[")
        positions = [int(number) for number in re.findall(r"boxes\[(\d+)\]", text)]
        files = [f"boxes[{position}] is in {where(int(kept[position]))}" for position in positions]
        held = f" ({', '.join(files)})" if files else ""
        raise ParseError(f"{checkpoint}: tensor {shown(name)} of shape {shape}: {text}{held}") from None
