"""A whole run: what is still to be done, doing it, and telling what it has shown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from .ledger import Ledger
from .pool import Pool, Work, subjects_of
from .report import Row, progress, table
from .subject import Outcome

#: How many mismatches of a subject are printed; all are saved.
MOST_PRINTED = 5
LEFT_OUT = "left out"


def goal_of(goal: int, scale: float) -> int:
    return math.ceil(goal * scale)


def works_of(
    rows: Sequence[Row],
    done: dict[tuple[str, int], Outcome],
    limit: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Work]:
    """Give what is not done yet, subject by subject, so that a framework is started once.

    A limit, in seconds, is shared out: each subject may take as much of what is left as those after it, and does one
    batch however little that is. So a run with a limit ends, however many subjects there are, and reaches them all.
    """
    end = math.inf if limit is None else clock() + limit
    left = sum(row.missing is None for row in rows)
    for number, row in enumerate(rows):
        if row.missing is not None:
            continue
        share_ends = clock() + max(end - clock(), 0) / left
        left -= 1
        begun = False
        for batch in range(math.ceil(row.goal / row.subject.batch)):
            if (row.subject.name, batch) in done:
                continue
            if begun and clock() >= share_ends:
                row.is_cut_short = True
                break
            begun = True
            yield Work(number, batch, min(row.subject.batch, row.goal - batch * row.subject.batch))


def prove(registry: str, ledger: Ledger, jobs: int, resume: bool, only: str = "", limit: float | None = None) -> int:
    """Go through all subjects, or as far as a limit in seconds allows; gives the exit status, 1 if anything differs."""
    start = time.monotonic()
    done = ledger.start(resume)
    rows = [Row(subject, goal_of(subject.goal, ledger.scale)) for subject in subjects_of(registry)]
    for row in rows:
        row.missing = row.subject.missing() if only in row.subject.name else LEFT_OUT
    for (name, _), outcome in done.items():
        for row in rows:
            if row.subject.name == name:
                row.add(outcome)
    print(f"seed {ledger.seed}, scale {ledger.scale:g}, version {ledger.version}, {jobs} processes")
    if done:
        print(f"{sum(row.cases for row in rows):,} cases were done before; Ctrl-C stops, the same command goes on")
    pool = Pool(registry, ledger.seed, jobs)
    try:
        with progress(rows) as shown:
            for work, outcome in pool.outcomes(works_of(rows, done, limit)):
                row = rows[work.subject]
                for number, text in enumerate(outcome.mismatches):
                    path = ledger.save_mismatch(row.subject.name, work.batch, number, text)
                    if row.mismatches + number < MOST_PRINTED:
                        shown.say(f"\n{row.subject.name}: a mismatch, saved as {path}\n{text}")
                ledger.add(row.subject.name, work.batch, outcome)
                row.add(outcome)
                shown.show(row)
    except KeyboardInterrupt:
        pool.close(kill=True)
        print("\nstopped; the same command goes on from here")
        return 130
    finally:
        pool.close()
    if short := sum(row.is_cut_short for row in rows):
        print(f"\nthe limit of {limit} seconds leaves cases of {short} subjects; the same command goes on from here")
    elif not only:
        ledger.finish()
    return conclude(rows, ledger.seed, time.monotonic() - start)


def conclude(rows: Sequence[Row], seed: int, seconds: float) -> int:
    mismatches = sum(row.mismatches for row in rows)
    print(f"\n{table([row for row in rows if row.missing != LEFT_OUT])}\n")
    cases = sum(row.cases for row in rows)
    print(f"{cases:,} cases, {mismatches} mismatches, seed {seed}, {seconds / 60:.1f} minutes of this call")
    return 1 if mismatches else 0
