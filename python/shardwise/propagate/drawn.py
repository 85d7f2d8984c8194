"""The picture of an op: its tensors before and after each move, in the colours of the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .._text import bytes_text
from ..layout import TensorLayout
from ..show.picture import Picture
from ..show.views import tilings_picture
from ..tiling import Tiling
from .move import Move

__all__ = ["op_picture"]

#: The name, the shape and the layout of a tensor before the op.
Operand = tuple[str, tuple[int, ...], TensorLayout]


def op_picture(
    title: str, operands: Iterable[Operand], result: Operand, moves: Mapping[str, Move], why: str
) -> Picture:
    """Give the picture: each operand, after its move if it has one, then the result before and after its own."""
    stages: list[tuple[str, Tiling]] = []
    for name, shape, layout in operands:
        stages.append((name, layout.partition(shape)))
        if name in moves:
            stages.append((f"{name} after {_move_text(moves[name])}", moves[name].after.partition(shape)))
    name, shape, layout = result
    if name in moves:
        stages.append(("computed", moves[name].before.partition(shape)))
        stages.append((f"{name} after {_move_text(moves[name])}", layout.partition(shape)))
    else:
        stages.append((name, layout.partition(shape)))
    picture = tilings_picture([tiling for _, tiling in stages], [name for name, _ in stages], title)
    return replace(picture, about=f"{picture.about} {why}", turns=False)


def _move_text(move: Move) -> str:
    return f"{move.kinds}, {bytes_text(move.bytes)}" if move.bytes else move.kinds
