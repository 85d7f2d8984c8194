"""Pictures of an einsum, its tensors before and after each move, and of a computation's moves, as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .._text import bytes_text
from ..layout import TensorLayout
from ..show.lanes import bars
from ..show.picture import Panel, Picture, View
from ..show.views import tilings_picture
from ..tiling import Tiling
from .move import Move

__all__ = ["moves_picture", "op_picture"]

#: The most lines of a source that have a bar.
_MOST_LINES = 16

#: A tensor's name, its shape, and its layout before the op.
Operand = tuple[str, tuple[int, ...], TensorLayout]


def op_picture(
    title: str, operands: Iterable[Operand], result: Operand, moves: Mapping[str, Move], why: str
) -> Picture:
    """Return the picture of an einsum: operands, then the result, each before and after its move."""
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


def moves_picture(moves: Sequence[Move], mesh: str) -> Picture:
    """Return bars of a computation's bytes: by collective, and by line of the source."""
    kinds: dict[str, int] = {}
    lines: dict[str, int] = {}
    for move in moves:
        for step in move.steps:
            if step.bytes:
                name = f"{step.kind} over {', '.join(step.axes)}{move.when and f', {move.when}'}"
                kinds[name] = kinds.get(name, 0) + step.bytes * move.times
        place = f"{move.source or f'{move.op}, of no line'}{move.when and f', {move.when}'}"
        lines[place] = lines.get(place, 0) + move.bytes_in_all

    def panel(title: str, sizes: dict[str, int]) -> Panel:
        most = sorted(sizes.items(), key=lambda item: -item[1])
        rows = [(name, size, bytes_text(size)) for name, size in most[:_MOST_LINES]]
        if most[_MOST_LINES:]:
            rest = sum(size for _, size in most[_MOST_LINES:])
            rows.append((f"{len(most) - _MOST_LINES} others", rest, bytes_text(rest)))
        return bars(title, rows)

    total = bytes_text(sum(move.bytes_in_all for move in moves if not move.when))
    caption = f"each device of {mesh} receives {total}"
    panels = (panel("bytes by collective", kinds), panel("bytes by line of the source", lines)) if kinds else ()
    return Picture(caption, f"{caption}.", (View((caption,), panels),))


def _move_text(move: Move) -> str:
    return f"{move.kinds}, {bytes_text(move.bytes)}" if move.bytes else move.kinds
