"""Paired timing: the contestants take turns, so that a machine whose speed drifts slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from figures import Goal, Row

__all__ = ["alternate", "compare"]

Work = Callable[[], Any]
#: From how many seconds on a call is not made once more to see how long it takes when all is warm.
LONG = 1.0


def _timed(work: Work, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def _calls_for(work: Work, seconds: float) -> int:
    """How often to call in a turn; the first call, which warms up and may import, is not counted unless it is long."""
    once = _timed(work, 1)
    if once < LONG:
        once = _timed(work, 1)
    return max(1, int(seconds / max(once, 1e-7)))


def alternate(works: list[Work], turns: int, seconds: float) -> list[list[float]]:
    """The time of one call of each work, turn by turn, each turn lasting about `seconds` for each work."""
    calls = [_calls_for(work, seconds) for work in works]
    # What the frameworks have made is not the contestants' garbage.
    gc.collect()
    gc.freeze()
    taken = [[_timed(work, count) for work, count in zip(works, calls, strict=True)] for _ in range(turns)]
    gc.unfreeze()
    return taken


def compare(
    work: str,
    ours: Work,
    peer: str = "",
    theirs: Work | None = None,
    *,
    floor: tuple[str, Work] | None = None,
    goal: Goal | None = None,
    turns: int = 11,
    seconds: float = 0.02,
) -> Row:
    """Time `ours`, `theirs` and the floor in turn; `peer` without `theirs` says that the peer is not here."""
    works = [ours, *([theirs] if theirs else []), *([floor[1]] if floor else [])]
    taken = alternate(works, turns, seconds)
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    ratios = [turn[1] / turn[0] for turn in taken] if theirs else []
    return Row(
        work,
        peer,
        medians[0],
        medians[1] if theirs else None,
        least=min(ratios, default=None),
        greatest=max(ratios, default=None),
        floor=floor[0] if floor else "",
        floor_takes=medians[-1] if floor else None,
        goal=goal,
    )
