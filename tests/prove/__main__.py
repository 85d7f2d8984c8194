"""`python -m tests.prove`: compares shardwise with oracles at scale; `make prove` calls it."""

from __future__ import annotations

import argparse
import random
import sys

from .ledger import Ledger, code_version
from .run import prove


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats a run; by default a new one, or that of the run taken up")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the stated numbers of cases (default: 1.0)")
    parser.add_argument("--limit", type=float, help="end after so many seconds, shared out among the subjects")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run of this version and scale")
    parser.add_argument("--only", default="", help="a part of the names of the subjects to go through")
    parser.add_argument("--registry", default="tests.prove.registry", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    version = code_version()
    ledger = None
    if given.seed is not None:
        ledger = Ledger(given.seed, given.scale, version)
    elif given.resume:
        ledger = Ledger.unfinished(given.scale, version)
    if ledger is None:
        ledger = Ledger(random.SystemRandom().randrange(10**9), given.scale, version)
    return prove(given.registry, ledger, given.jobs, given.resume, given.only, given.limit)


if __name__ == "__main__":
    sys.exit(main())
