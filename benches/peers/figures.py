"""What a benchmark says: rows of a table and points of a curve, with the goals that they are judged by.

They go from the process that measures to the page as JSON, one object a line. Only the standard library is needed.

>>> row = Row("boxes", "JAX", 2e-3, 1e-2, least=4.0, greatest=6.0, goal=faster(3))
>>> row.ratio, row.verdict, str(row.goal)
(5.0, 'met', '≥ 3×')
>>> Row("copy", "memcpy", 0.30, 0.25, goal=at_most_times(1.15)).verdict
'missed'
>>> Row("a view", "", 0.3e-6, goal=at_most(0.35e-6)).verdict, str(at_most(0.35e-6))
('met', '≤ 350 ns')
>>> Row("import", "import numpy", 0.224, 0.217, goal=Goal("more", 0.015)).verdict  # in older results
'met'
>>> Row("the wheel", "", 2**20, unit="B", goal=at_most_bytes(2**21)).verdict, quantity(2**20, "B")
('met', '1 MiB')
>>> Row("a merge", "what is needed", 105, 100, unit="B", goal=at_most_times_bytes(1.05)).verdict
'met'
>>> str(at_most_times_bytes(1.05)), Row("a merge", "needed", 106, 100, unit="B", goal=at_most_times_bytes(1.05)).verdict
('≤ 1.05× as many', 'missed')
>>> Row("ranks", "PyTorch", 1e-4, goal=faster(2000)).verdict  # without the peer there is nothing to judge
'not shown'
>>> Row.from_json(row.to_json()) == row
True
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Goal",
    "Point",
    "Row",
    "at_most",
    "at_most_bytes",
    "at_most_times",
    "at_most_times_bytes",
    "faster",
    "quantity",
    "ratio_text",
]


@dataclass(frozen=True)
class Goal:
    """What the project asks of itself: a limit, and what it limits."""

    kind: str
    limit: float

    def __str__(self) -> str:
        """In the notation of the tables."""
        if self.kind == "ratio":
            return f"≥ {self.limit:,g}×"
        if self.kind == "times":
            return f"≤ {self.limit:g}× its time"
        if self.kind == "bytes":
            return f"≤ {quantity(self.limit, 'B')}"
        if self.kind == "moved":
            return f"≤ {self.limit:g}× as many"
        return f"≤ {quantity(self.limit, 's')}" + (" more" if self.kind == "more" else "")


def faster(times: float) -> Goal:
    """The peer takes at least so many times as long."""
    return Goal("ratio", times)


def at_most_times(times: float) -> Goal:
    """At most so many times what the peer takes."""
    return Goal("times", times)


def at_most(seconds: float) -> Goal:
    """At most so long, whatever the peer takes."""
    return Goal("time", seconds)


def at_most_bytes(limit: float) -> Goal:
    """At most so many bytes."""
    return Goal("bytes", limit)


def at_most_times_bytes(times: float) -> Goal:
    """At most so many times as many bytes as the peer."""
    return Goal("moved", times)


@dataclass(frozen=True)
class Row:
    """One line of a table: medians, in seconds or bytes."""

    work: str
    #: What it is compared with; empty if with nothing.
    peer: str
    ours: float
    theirs: float | None = None
    #: The least and the greatest ratio of one pair of turns.
    least: float | None = None
    greatest: float | None = None
    #: Work that cannot be left out: writing or copying the bytes, or making the objects; and what that takes.
    floor: str = ""
    floor_takes: float | None = None
    goal: Goal | None = None
    unit: str = "s"

    @property
    def ratio(self) -> float | None:
        """How many times ours the peer takes; `None` without a peer."""
        return None if self.theirs is None else self.theirs / self.ours

    @property
    def target(self) -> float | None:
        """The ratio that the goal asks for, where it asks for one and there is one."""
        if self.goal is None or self.ratio is None or self.goal.kind not in ("ratio", "times"):
            return None
        return self.goal.limit if self.goal.kind == "ratio" else 1 / self.goal.limit

    @property
    def share(self) -> float | None:
        """The floor's part of our time: 1 says that nothing faster is possible."""
        return None if self.floor_takes is None else self.floor_takes / self.ours

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or `not shown`, judged by the medians; empty without a goal."""
        if self.goal is None:
            return ""
        kind, limit = self.goal.kind, self.goal.limit
        if kind in ("time", "bytes"):
            met = self.ours <= limit
        elif self.theirs is None:
            return "not shown"
        elif kind == "ratio":
            met = self.theirs >= limit * self.ours
        elif kind in ("times", "moved"):
            met = self.ours <= limit * self.theirs
        else:
            met = self.ours - self.theirs <= limit
        return "met" if met else "missed"

    def to_json(self) -> str:
        """One line, with what a reader of the line wants to see although it follows from the rest."""
        return json.dumps({**asdict(self), "ratio": self.ratio, "verdict": self.verdict}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(line)
        goal = fields.pop("goal")
        del fields["ratio"], fields["verdict"]
        return cls(**fields, goal=None if goal is None else Goal(**goal))


@dataclass(frozen=True)
class Point:
    """One point of a curve: what some work on a mesh of so many devices takes one library."""

    curve: str
    library: str
    devices: int
    seconds: float

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Point:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


def quantity(value: float, unit: str) -> str:
    """A time or a size with three digits.

    >>> quantity(0.0000275, "s"), quantity(1234, "s"), quantity(130 * 2**20, "B"), quantity(0.9999, "s")
    ('27.5 µs', '1,230 s', '130 MiB', '1 s')
    """
    scales: tuple[tuple[str, float], ...] = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    if unit == "B":
        scales = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
    # What rounds to the larger unit is written in it.
    name, scale = next((pair for pair in scales if value >= 0.9995 * pair[1]), scales[-1])
    return f"{three_digits(value / scale)} {name}"


def three_digits(value: float) -> str:
    """Three digits that mean something, and no exponent.

    >>> [three_digits(value) for value in (0.874, 9.996, 351.4, 226413)]
    ['0.874', '10', '351', '226,000']
    """
    return f"{float(f'{value:.3g}'):,.12g}"


def ratio_text(value: float) -> str:
    """A ratio with two digits, or three from ten upwards.

    >>> [ratio_text(value) for value in (0.874, 6.04, 55.31, 226413)]
    ['0.87×', '6.0×', '55×', '226,000×']
    """
    if value < 1:
        return f"{value:.2f}×"
    return f"{value:.1f}×" if value < 9.95 else f"{float(f'{value:.{3 if value >= 99.5 else 2}g}'):,.0f}×"
