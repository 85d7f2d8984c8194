"""What a run shows while it goes on, and the table at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .subject import Outcome, Subject


@dataclass
class Row:
    """One line of the table: a subject, and what its batches have shown so far."""

    subject: Subject
    goal: int
    cases: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    missing: str | None = None
    #: Whether a limit of time left some of its batches out.
    is_cut_short: bool = False

    def add(self, outcome: Outcome) -> None:
        self.cases += outcome.cases
        self.mismatches += len(outcome.mismatches)
        self.seconds += outcome.seconds

    def cells(self) -> tuple[str, ...]:
        names = (self.subject.oracle, self.subject.operation)
        if self.missing is not None:
            return (*names, self.missing, "", "", "")
        rate = f"{self.cases / self.seconds:,.0f}" if self.seconds else ""
        return (*names, f"{self.cases:,}", f"{self.mismatches:,}", f"{self.seconds:,.1f} s", rate)


HEAD = ("oracle", "operation", "cases", "mismatches", "time of one process", "cases/s of one process")


def table(rows: Sequence[Row]) -> str:
    """Lay the rows out under a head, the numbers to the right."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]

    def line_of(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line_of(HEAD), "  ".join("-" * w for w in widths), *map(line_of, lines[1:])])


class Lines:
    """Progress where there is no terminal: a line when a subject is through, and one every half a minute."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._told = time.monotonic()

    def show(self, row: Row) -> None:
        if row.cases >= row.goal or time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            print(f"{row.subject.name}: {row.cases:,} of {row.goal:,} cases, {row.mismatches} mismatches", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)


class Bars:
    """Progress in a terminal: a bar for each subject."""

    def __init__(self, rows: Sequence[Row]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns)
        self._tasks = {
            row.subject.name: self.progress.add_task(row.subject.name, total=row.goal, completed=row.cases)
            for row in rows
            if row.missing is None
        }

    def show(self, row: Row) -> None:
        self.progress.update(self._tasks[row.subject.name], completed=row.cases)

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(rows: Sequence[Row]) -> Iterator[Lines | Bars]:
    """Give what shows the rows, for as long as the body runs."""
    if not sys.stdout.isatty():
        yield Lines(rows)
        return
    bars = Bars(rows)
    with bars.progress:
        yield bars
