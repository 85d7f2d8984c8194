"""A training state as one self-contained page of HTML."""

from __future__ import annotations

from typing import Any

from .._text import bytes_text
from ..rules.page import plain_page
from ..show.html import html_of, table_html
from .drawn import state_picture
from .result import NOT_COUNTED

__all__ = ["page_of"]

#: The most groups of equal devices that have a row.
_MOST = 64


def page_of(state: Any, title: str) -> str:
    """Return the page of a training state: bars by kind and by device, and tables of both."""
    kinds = state.kinds
    rows = []
    for devices, sizes in state.alike()[:_MOST]:
        named = str(state.device_mesh.device(devices[0])) + (
            f" and {len(devices) - 1:,} more" if len(devices) > 1 else ""
        )
        each = [bytes_text(sizes[kind][1]) for kind in kinds]
        rows.append((named, *each, bytes_text(sum(room for _, room in sizes.values()))))
    totals = [(kind, bytes_text(held), bytes_text(room)) for kind, (held, room) in state.totals().items()]
    sections = [
        ("What the devices allocate", html_of(state_picture(state))),
        ("Devices that are alike", table_html("allocated", ("devices", *(f">{kind}" for kind in kinds), ">all"), rows)),
        ("All devices together", table_html("by kind", ("kind", ">held", ">allocated"), totals)),
    ]
    trained = "Nothing is trained." if state.optimizer is None else f"{state.optimizer}, sharded by {state.sharding}."
    return plain_page(title, f"{trained} {state}; {NOT_COUNTED}.", sections)
