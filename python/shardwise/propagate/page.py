"""The page of HTML of a propagation, which needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._text import bytes_text
from ..rules.page import plain_page
from ..show.html import html_of, table_html
from .drawn import moves_picture
from .given import layout_text, mesh_text, shape_text
from .move import Move

__all__ = ["page_of"]

#: The most inputs and results that have a row.
_MOST = 512


def page_of(found: Any, title: str) -> str:
    """Return the page of a propagation: bars by collective and by line, moves with reasons, inputs and results."""
    moved = table_html(
        "the most bytes first",
        (">bytes", "line", "why", "collectives", ">times", "tensor", "shape", "op"),
        _rows(found.moves),
    )
    computation = found.computation
    names = computation.names or [f"input {at}" for at in range(computation.inputs)]
    ends = [(name, at, layout) for at, (name, layout) in enumerate(zip(names, found.layouts, strict=False))]
    ends += [
        (f"result {at}", number, layout)
        for at, (number, layout) in enumerate(zip(computation.outputs, found.results, strict=True))
    ]
    rows = [
        (
            name,
            shape_text(computation.shapes[at]),
            computation.dtypes[at],
            "free" if layout is None else layout_text(layout),
        )
        for name, at, layout in ends[:_MOST]
    ]
    sections = [
        ("What each device receives", html_of(moves_picture(found.moves, mesh_text(found.mesh)))),
        ("Moves", moved),
        ("Inputs and results", table_html("the axes that cut each dim", ("tensor", "shape", "dtype", "layout"), rows)),
    ]
    return plain_page(title, found.explain(0).splitlines()[0], sections)


def _rows(moves: Sequence[Move]) -> list[tuple[str, ...]]:
    """Return a row for the moves of a line that are alike, the most bytes first."""
    alike: dict[tuple[str, ...], list[Move]] = {}
    for move in moves:
        why = " ".join([move.when and f"{move.when[0].upper()}{move.when[1:]}.", move.why]).strip()
        why = f"{why} Shardy does not list it." if move.implied else why
        shape = f"{shape_text(move.shape)} {move.dtype}"
        alike.setdefault((move.source, why, move.kinds, move.tensor, shape, move.op), []).append(move)
    sums = [
        (sum(move.bytes_in_all for move in same), sum(move.times for move in same), row) for row, same in alike.items()
    ]
    return [
        (bytes_text(size), *row[:3], f"{times:,}", *row[3:])
        for size, times, row in sorted(sums, key=lambda each: -each[0])
    ]
