"""The frame of every `bench_*.py`: it prints its rows as they come, and writes them as JSON where the runner says.

By hand: `python benches/peers/bench_core.py [--quick]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

from figures import Point, Row, quantity, ratio_text

__all__ = ["QUICK", "main"]

#: Smaller work and fewer turns: to see that a benchmark runs, not to know what it says.
QUICK = "--quick" in sys.argv


def main(rows: Callable[[], Iterable[Row | Point]]) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller work, fewer turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each row to FILE")
    arguments = parser.parse_args()
    with arguments.json.open("a", encoding="utf-8") if arguments.json else nullcontext() as out:
        for row in rows():
            print(_line(row), flush=True)
            if out:
                print(row.to_json(), file=out, flush=True)


def _line(row: Row | Point) -> str:
    if isinstance(row, Point):
        return f"  {row.curve}, {row.devices:,} devices: {row.library} {quantity(row.seconds, 's')}"
    text = f"  {row.work}: {quantity(row.ours, row.unit)}"
    if row.theirs is not None and row.ratio is not None:
        text += f", {row.peer} {quantity(row.theirs, row.unit)}, {ratio_text(row.ratio)}"
    if row.share is not None:
        text += f"; {row.share:.0%} of {row.floor}"
    return text + (f" ({row.goal}: {row.verdict})" if row.goal else "")
