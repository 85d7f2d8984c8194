"""The picture of a training state: bars of each kind on the fullest device, and of all kinds on each device."""

from __future__ import annotations

from typing import Any

from .._text import bytes_text
from ..show.lanes import bars, holder_bars
from ..show.picture import Panel, Picture, View

__all__ = ["state_picture"]

#: The most devices that are drawn with a bar each.
_MOST_DEVICES = 1 << 20


def state_picture(state: Any) -> Picture:
    """Return the picture of a training state."""
    each = state.device_bytes
    at = int(each.argmax())
    device, most = state.fullest
    held, room = state.held, state.allocated
    kinds = [
        (
            kind,
            int(room[kind][at]),
            f"{bytes_text(int(room[kind][at]))}, of which {bytes_text(int(held[kind][at]))} held",
        )
        for kind in state.kinds
    ]
    panels: list[Panel] = [bars(f"bytes of each kind on {device}, the fullest", kinds)] if kinds else []
    if len(each) <= _MOST_DEVICES:
        labels = state.device_mesh.labels()
        panels.append(holder_bars("bytes that each device allocates", labels, each.tolist(), bytes_text))
    total = sum(sizes for _, sizes in state.totals().values())
    captions = (
        f"{bytes_text(most)} on {device}, the fullest of {len(each):,} devices",
        f"{bytes_text(total)} on all together",
        state.why,
    )
    return Picture(f"training state: {captions[0]}", f"{'; '.join(captions)}.", (View(captions, tuple(panels)),))
